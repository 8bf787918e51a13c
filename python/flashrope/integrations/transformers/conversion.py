"""``convert`` and ``revert``: Hugging Face transformers models on this package's attention.

A converted model keeps its modules, weights and forward methods. Its configuration names an attention function and a
mask function of this package, which are registered with transformers. A hook on its rotary embedding returns cos = 1
and sin = 0, so raw queries and keys reach the attention function, and the library's own caches hold raw keys.
"""

from __future__ import annotations

import math
import uuid
import warnings
from functools import partial
from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

from ...rotary.rotary import Rotary
from ..options import RAW_KEYS, keeps_raw_keys, read_field, read_options, to_json
from .attention_function import NAME
from .caches import check_cache, mark_returned
from .continuous_batching import SUPPORTED, with_pages
from .coordinates import axes_of, axes_of_schemes, with_coordinates
from .decoder import attention_modules, check_decoder, check_tables, check_widths, find_decoder, head_dim_of, rotates
from .layer_schemes import LayerScheme, layer_type_of, sliding_window_of
from .masks import check_positions
from .rotary_hook import disable_model_rotary
from .saved import SAVED, choose_stock_attention, delete_options, write_options
from .untested import accept

__all__ = ["convert", "revert"]


def convert(model, rotary: Rotary | dict[str, Rotary] | None = None, *, untested: bool = False, **options: Any):
    """Runs a causal language model on this package's attention, in place; ``revert`` undoes it.

    Without options the model keeps its own scheme, and its logits are the same. Caches then hold raw keys: a cache that
    was filled before ``convert`` or ``revert`` is refused.

    Every call describes the whole scheme: options replace those of an earlier call, they are not added to them.
    Without any, the options in the configuration are used: those of an earlier ``convert``, of which a warning tells,
    or those that the model was saved with. ``revert(model)`` first, for the model's own scheme.

    Args:
        model: a transformers model of a type in ``FAMILIES``, or a module that holds one (PEFT, DDP).
        rotary: a scheme to use instead of the model's own in all layers that rotate; a dict by layer type if the layers
            differ.
        untested: also take a model type that is not in ``FAMILIES``, if the converted model's outputs are its own: on
            random tokens, with and without a cache and padding on the left. Tests cover more.
        ntk: the factor of ``Rotary.ntk``.
        yarn: (factor, train_length) of ``Rotary.yarn``. It excludes ntk.
        hope_train_length: HoPE: pairs that make less than one turn over this number of tokens do not rotate.
        clip: CoPE (``Rotary.cope``): those pairs rotate less the slower they are, by this training length; True: by the
            model's. A dict gives the arguments of ``Rotary.cope``, {"pairs": 10, "taper": False}. It excludes
            hope_train_length.
        window: ReRoPE with this window, in positions. A quarter to a half of the training length was best in its
            author's ablation; 0 and the training length or more warn.
        factor: beside window, Leaky ReRoPE: distances grow by 1 / factor beyond the window.
        self_extend: (window, group) of ``Rotary.self_extend``: grouped positions beyond the window. It excludes window.
        dual_chunk: (chunk_size, local_size) of ``Rotary.dual_chunk``, or (chunk_size, local_size, length_scale). It
            excludes window and self_extend. A configuration's dual_chunk_attention_config (Qwen2.5-1M) is honored
            without this option, with the length of its factor and without the sparse attention that may stand beside
            it. The option takes its place; False switches it off.
        log_n: scales queries by max(1, ln(i + 1) / ln(log_n)). True: by the training length. Layers with a sliding
            window see a fixed number of keys and are not scaled.
        log_n_clip: beside log_n, for models that were trained with it, False: the factor may be below 1.

    ``print(model)`` shows the scheme of every layer. The configuration keeps the options, save_pretrained writes them,
    and ``revert`` deletes them. A model that was saved with options is loaded by ``from_pretrained`` of this package;
    transformers alone refuses it.

    Returns:
        model.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came; the model keeps its state.
    """
    decoder = find_decoder(model)
    check_decoder(decoder)
    modules = attention_modules(decoder)
    check_widths(decoder.config.model_type, modules)
    accept(model, decoder, untested, convert, revert)
    config = decoder.config
    given = read_options({"rotary": rotary, **options}, config)
    options, raw_keys = given or read_field(config), keeps_raw_keys(config)
    schemes: dict[tuple, LayerScheme] = {}
    scheme_of = {}
    for module in modules:
        layer_type, sliding = layer_type_of(config, module.layer_idx), sliding_window_of(config, module.layer_idx)
        key = layer_type, sliding, rotates(module)
        if key not in schemes:
            schemes[key] = LayerScheme(config, *key, options)
        head_dim = head_dim_of(module)
        if schemes[key].rotary.head_dim != head_dim:
            raise ValueError(
                f"rotary: expected head_dim {head_dim} of layer {module.layer_idx}, got {schemes[key].rotary.head_dim}"
            )
        scheme_of[module] = schemes[key]
    if options.get("log_n") and all(scheme.window for scheme in schemes.values()):
        raise ValueError("log_n: expected a layer that sees all keys, got a sliding window in every layer")
    check_tables(decoder, {layer_type for layer_type, _, rotated in schemes if rotated})

    earlier = vars(decoder).get("rotary_bands")
    mark = uuid.uuid4().hex
    if earlier is not None:
        if options and not given:
            warnings.warn(
                f"convert: the model keeps {_text(options)} of its last convert; for its own scheme, call "
                "revert(model) before",
                stacklevel=2,
            )
        if all(_same(getattr(module, "rotary_bands", None), scheme) for module, scheme in scheme_of.items()):
            mark = earlier.mark  # caches stay valid
    _undo(model, decoder)
    if "rotary_bands_reverted" in vars(decoder):
        vars(decoder).pop("rotary_bands_reverted").remove()
    _warn_of_window(options, config)
    attn_implementation = config._attn_implementation
    decoder.set_attn_implementation(NAME)
    for module, scheme in scheme_of.items():
        module.rotary_bands = scheme
        module.extra_repr = partial(_describe_layer, type(module).extra_repr(module), scheme)
    handles = disable_model_rotary(decoder)
    handles.append(decoder.register_forward_pre_hook(_check_forward, with_kwargs=True))
    handles.append(decoder.register_forward_hook(mark_returned, with_kwargs=True))
    decoder.rotary_bands = _Conversion(attn_implementation, handles, mark, axes_of_schemes(schemes.values()))
    decoder.extra_repr = partial(_describe_decoder, type(decoder).extra_repr(decoder), _text(options))
    if options or raw_keys:
        write_options(model, config, to_json(options) | ({RAW_KEYS: True} if raw_keys else {}))
    return model


def revert(model):
    """Restores the stock model: the same functions run on the same weights as before ``convert``. Returns model.

    One hook stays, which refuses caches that hold the converted model's raw keys. A model that was saved with options
    and loaded without ``convert`` becomes the stock model, too.
    """
    decoder = find_decoder(model)
    if _undo(model, decoder):
        decoder.rotary_bands_reverted = decoder.register_forward_pre_hook(_check_reverted, with_kwargs=True)
    return model


def _undo(model, decoder) -> bool:
    """Whether there was something to undo beside the configuration."""
    conversion = vars(decoder).pop("rotary_bands", None)
    choose_stock_attention(model, names=(SAVED,) if conversion else (SAVED, NAME))
    delete_options(model, decoder.config)
    if conversion is None:
        return False
    for handle in conversion.handles:
        handle.remove()
    for module in decoder.modules():
        if vars(module).pop("rotary_bands", None) is not None:
            vars(module).pop("extra_repr", None)
    vars(decoder).pop("extra_repr", None)
    decoder.set_attn_implementation(conversion.attn_implementation)
    return True


class _Conversion(NamedTuple):
    """What ``revert`` needs."""

    attn_implementation: str
    handles: list[RemovableHandle]
    mark: str  # of the caches that it fills
    axes: int  # coordinates of a position


def _check_forward(module, args, kwargs) -> tuple | None:
    """The decoder's hook: checks its arguments, and completes those of continuous batching."""
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"attn_implementation: expected {NAME!r} in a converted model, got "
            f"{module.config._attn_implementation!r}, with which nothing would rotate; call revert(model) first"
        )
    if SUPPORTED and isinstance(kwargs.get("cu_seq_lens_k"), dict):
        return args, with_pages(kwargs)
    check_cache(module, args, kwargs)
    if axes_of(module) > 1:
        return with_coordinates(module, args, kwargs)
    return check_positions(module, args, kwargs)


def _check_reverted(module, args, kwargs) -> None:
    """The decoder's hook after ``revert``."""
    check_cache(module, args, kwargs)


def _warn_of_window(options: dict[str, Any], config) -> None:
    """Warns where ReRoPE's window leaves no position, or distances that the model was not trained with."""
    window, length = options.get("window"), getattr(config, "max_position_embeddings", None)
    if window == 0 and "factor" not in options:
        warnings.warn(
            "window: expected more than 0, got 0; every distance is seen as 0, as in Rotary.none", stacklevel=3
        )
    elif window is not None and isinstance(length, int) and window >= length:
        warnings.warn(
            f"window: expected less than the training length {length}, got {window}; the model would see distances "
            "that it was not trained with. In the ablation of ReRoPE's author a window of the training length has "
            "7.1% accuracy at eight times that length, where half of it has 82.4%",
            stacklevel=3,
        )


# ---- what print(model) shows


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _describe_decoder(stock: str, options: str) -> str:
    return "\n".join(
        filter(None, [stock, f"converted by flashrope: {options or 'the same scheme, raw keys in the cache'}"])
    )


def _describe_layer(stock: str, scheme: LayerScheme) -> str:
    return "\n".join(filter(None, [stock, f"rotary_bands: {scheme.rotary!r}"]))


def _same(one: LayerScheme | None, other: LayerScheme) -> bool:
    """Whether caches of one are valid under the other."""
    return (
        one is not None
        and (one.window, one.rotary) == (other.window, other.rotary)
        and one.grows_from == other.grows_from == math.inf
    )
