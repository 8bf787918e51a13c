"""``convert`` and ``revert``: Hugging Face transformers models on this package's attention.

A converted model keeps its modules, weights and forward methods. Its configuration names an attention function and a
mask function of this package, which are registered with transformers. A hook on its rotary embedding returns cos = 1
and sin = 0, so raw queries and keys reach the attention function, and the library's own caches hold raw keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.utils.hooks import RemovableHandle

from ...rotary import Rotary
from .attention_function import NAME
from .continuous_batching import SUPPORTED, with_pages
from .decoder import attention_modules, check_tables, find_decoder, rotates
from .layer_schemes import LayerScheme, layer_type_of, sliding_window_of, training_length
from .masks import check_positions
from .rotary_hook import disable_model_rotary
from .untested import accept

__all__ = ["convert", "revert"]

FIELD = "flashrope"  # of the configuration: the options of convert, saved with the model
CHANGES = ("window", "factor", "log_n", "hope_train_length")


def convert(model, rotary: Rotary | dict[str, Rotary] | None = None, *, untested: bool = False, **changes):
    """Runs a causal language model on this package's attention, in place; ``revert`` undoes it.

    Without rotary and changes the model keeps its own scheme, and its logits are the same. Caches then hold raw keys:
    a cache that was filled before ``convert`` or ``revert`` is not valid after it.

    Args:
        model: a transformers model of a type in ``FAMILIES``, or a module that holds one (PEFT, DDP).
        rotary: a scheme to use instead of the model's own in all layers that rotate; a dict by layer type if the layers
            differ.
        window: ReRoPE with this window, in positions. With factor: Leaky ReRoPE, whose distances grow by 1 / factor
            beyond the window.
        log_n: scales queries by max(1, ln(i + 1) / ln(log_n)). True: by the training length. Layers with a sliding
            window see a fixed number of keys and are not scaled.
        untested: also take a model type that is not in ``FAMILIES``, if the converted model's outputs are its own: on
            random tokens, with and without a cache and padding on the left. Tests cover more.
        hope_train_length: HoPE: pairs that make less than one turn over this number of tokens do not rotate.

    Without any of these, the options of the last ``convert`` are used again. The configuration keeps them,
    save_pretrained writes them, and ``revert`` deletes them.

    Returns:
        model.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came; the model is unchanged.
    """
    decoder = find_decoder(model)
    accept(model, decoder, untested, convert, revert)
    config = decoder.config
    options = _options(config, rotary, changes)
    modules = attention_modules(decoder)
    schemes: dict[tuple, LayerScheme] = {}
    scheme_of = {}
    for module in modules:
        layer_type, window = layer_type_of(config, module.layer_idx), sliding_window_of(config, module.layer_idx)
        key = layer_type, window, rotates(module)
        if key not in schemes:
            schemes[key] = LayerScheme(config, *key, options)
        head_dim = module.head_size if hasattr(module, "head_size") else module.head_dim  # gpt_neox has head_size
        if schemes[key].rotary.head_dim != head_dim:
            raise ValueError(
                f"rotary: expected head_dim {head_dim} of layer {module.layer_idx}, got {schemes[key].rotary.head_dim}"
            )
        scheme_of[module] = schemes[key]
    if options.get("log_n") and all(scheme.window for scheme in schemes.values()):
        raise ValueError("log_n: expected a layer that sees all keys, got a sliding window in every layer")
    check_tables(decoder, {layer_type for layer_type, _, rotated in schemes if rotated})

    revert(model)
    attn_implementation = config._attn_implementation
    decoder.set_attn_implementation(NAME)
    for module, scheme in scheme_of.items():
        module.rotary_bands = scheme
    handles = disable_model_rotary(decoder)
    handles.append(decoder.register_forward_pre_hook(_check_forward, with_kwargs=True))
    decoder.rotary_bands = _Conversion(attn_implementation, handles)
    if any(options.values()):
        setattr(config, FIELD, {name: _to_text(value) for name, value in options.items() if value is not None})
    return model


def revert(model):
    """Restores the stock model: the same functions run on the same weights as before ``convert``. Returns model."""
    decoder = find_decoder(model)
    conversion = vars(decoder).pop("rotary_bands", None)
    if conversion is None:
        return model
    for handle in conversion.handles:
        handle.remove()
    for module in decoder.modules():
        vars(module).pop("rotary_bands", None)
    decoder.set_attn_implementation(conversion.attn_implementation)
    vars(decoder.config).pop(FIELD, None)
    return model


class _Conversion(NamedTuple):
    """What ``revert`` needs."""

    attn_implementation: str
    handles: list[RemovableHandle]


def _check_forward(module, args, kwargs) -> tuple | None:
    """The decoder's hook: checks its arguments, and completes those of continuous batching."""
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"attn_implementation: expected {NAME!r} in a converted model, got "
            f"{module.config._attn_implementation!r}, with which nothing would rotate; call revert(model) first"
        )
    if SUPPORTED and isinstance(kwargs.get("cu_seq_lens_k"), dict):
        return args, with_pages(kwargs)
    return check_positions(module, args, kwargs)


# ---- options


def _options(config, rotary, changes: dict) -> dict:
    """rotary and changes after checks; those of the last ``convert`` if there are none."""
    unknown = sorted(set(changes) - set(CHANGES))
    if unknown:
        raise TypeError(f"{unknown[0]}: convert takes rotary, {', '.join(CHANGES)}")
    if rotary is None and not any(value is not None and value is not False for value in changes.values()):
        saved = getattr(config, FIELD, None) or {}
        rotary, changes = _from_text(saved.get("rotary")), {name: saved.get(name) for name in CHANGES}
    for each in rotary.values() if isinstance(rotary, dict) else [rotary]:
        if each is not None and not isinstance(each, Rotary):
            raise TypeError(f"rotary: expected a Rotary or a dict of one per layer type, got {type(each).__name__}")
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    if isinstance(rotary, dict) and sorted(rotary) != layer_types:
        raise ValueError(f"rotary: expected the layer types {layer_types}, got {sorted(rotary)}")
    if changes.get("factor") is not None and changes.get("window") is None:
        raise ValueError("factor: expected a window beside it, beyond which distances grow by 1 / factor")
    if changes.get("log_n") is True:
        changes = changes | {"log_n": training_length(config)}
    return {"rotary": rotary, **changes}


def _to_text(value):
    if isinstance(value, dict):
        return {name: rotary.text for name, rotary in value.items()}
    return value.text if isinstance(value, Rotary) else value


def _from_text(value):
    if isinstance(value, dict):
        return {name: Rotary.from_text(text) for name, text in value.items()}
    return None if value is None else Rotary.from_text(value)
