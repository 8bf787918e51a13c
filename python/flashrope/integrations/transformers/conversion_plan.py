"""Plans what ``convert`` does to a model: finds its decoder and attention layers, and checks them.

``plan_conversion`` reads and raises, and changes nothing. applying.py applies a ``ConversionPlan`` and undoes it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ...backends.registry import load_backend, resolve_impl
from ...calls.checks import MAX_HEAD_DIM
from ...schemes.catalogue import add_options, stated_length
from ...schemes.families import families_with, family
from ..scheme_options import RAW_KEYS, as_keywords, keeps_raw_keys, read_field, read_options, saved_options, to_json
from .adapters import check_adapters
from .embeddings import ATTRIBUTE, check_tables, is_rotary_embedding
from .layer_schemes import LayerScheme, attending_layers, check_sees_all, layer_type_of, sliding_window_of
from .versions import VERSION

# model_type of the decoders that the tests compare with the library's own attention.
FAMILIES = frozenset(families_with("tested"))
NAME = "rotary_bands"  # the attention's name; transformers handles names with "flash", "/" or "|" in a special way

KEY = "_attn_implementation"  # transformers 4.57 and 5.0 do not read "attn_implementation"
# The attention's name in a saved configuration, which only this package registers. transformers quotes it in its error.
# A name with "flash" would make transformers choose flash attention instead, so the line writes it with a capital F.
LOAD = "model = importlib.import_module('Flashrope.integrations.transformers'.lower()).from_pretrained('FOLDER')"
SAVED = (
    f"Flashrope converted this model. Load it with: import importlib; {LOAD} -- or delete the key "
    f'"{KEY}" from its config.json for the stock model'
)

IMAGES_ONLY = "vision"  # the value of use_bidirectional_attention of a decoder that is causal without images
NOT_CONVERTED = (
    "model: expected a converted model, got one that was loaded or built from the configuration of a converted model; "
    "call convert(model), load it with flashrope.integrations.transformers.from_pretrained, or call revert(model) for "
    "the stock model"
)


@dataclasses.dataclass(frozen=True, eq=False)
class ConversionPlan:
    """What a conversion does to a model. The plan holds names of modules, not modules, so the model can store the plan.

    Attributes:
        schemes: the scheme of every attention module, by the module's name in the decoder.
        options: the options from which the schemes were made. {}: the schemes are the model's own.
        field: the content of the configuration's field "flashrope". Empty: the configuration stays as it is.
        mark: the mark of the caches that the converted model fills. A later plan with the same schemes has the same
            mark.
        warnings: texts with which ``convert`` warns the caller.
        own: the plan of the model's own schemes, if the model must be compared with it first. None: no comparison
            is needed.
        axes: the largest number of coordinates by which a layer rotates.
        grows: whether a layer's frequency table depends on the length.
        from_zero: whether a layer's scores depend on where positions begin to count, and not only on distances.
    """

    schemes: Mapping[str, LayerScheme]
    options: Mapping[str, Any]
    field: Mapping[str, Any]
    mark: str
    warnings: tuple[str, ...] = ()
    own: ConversionPlan | None = None
    axes: int = dataclasses.field(init=False)
    grows: bool = dataclasses.field(init=False)
    from_zero: bool = dataclasses.field(init=False)

    def __post_init__(self):
        schemes = list(self.schemes.values())
        object.__setattr__(self, "axes", max((scheme.rotary.axes for scheme in schemes), default=1))
        object.__setattr__(self, "grows", any(scheme.grows_from < math.inf for scheme in schemes))
        object.__setattr__(self, "from_zero", any(scheme.from_zero for scheme in schemes))


def plan_conversion(model, decoder, given: Mapping[str, Any], untested: bool = False) -> ConversionPlan:
    """Plans ``convert`` with the given options. The model stays as it is.

    Args:
        model: a transformers model, converted or not.
        decoder: ``find_decoder(model)``.
        given: the options of ``convert``, including rotary. {}: the options in the configuration are used.
        untested: whether a model type that is not in ``FAMILIES`` is accepted. The plan of such a model has ``own``.

    Raises:
        TypeError, ValueError: the model or an option is not supported. The message names the argument and says what was
            expected.
    """
    check_adapters(model)
    check_decoder(decoder)
    modules = attention_modules(decoder)
    check_widths(decoder.config.model_type, modules)
    config, earlier = decoder.config, plan_of(decoder)
    tested = config.model_type in FAMILIES or earlier is not None
    if not tested and not untested:
        raise ValueError(
            "model: expected one of the types that are tested against the library's own attention, "
            f"{', '.join(sorted(FAMILIES))}; got {config.model_type!r}; convert(model, untested=True) compares the "
            "converted model with the stock model first"
        )
    asked = read_options(given, config)
    options, raw_keys = asked or read_field(config), keeps_raw_keys(config)
    schemes = _plan_layers(decoder, modules, options)
    own = None
    if not tested:
        stock = _plan_layers(decoder, modules, {})
        own = ConversionPlan(stock, {}, {}, uuid.uuid4().hex)
    field = to_json(options) | ({RAW_KEYS: True} if raw_keys else {})
    warnings = _warnings_of_window(options, config) + _warnings_of_images(model, decoder)
    if earlier is not None and options and not asked:
        warnings.insert(
            0,
            f"convert: the model keeps {as_keywords(options)} of its last convert; to get its own scheme, call "
            "revert(model) first",
        )
    had = dict(earlier.options) if earlier is not None else saved_options(config)
    dropped = {name: value for name, value in add_options(had, options).items() if name not in options}
    if asked and dropped:
        warnings.insert(
            0,
            f"convert: drops {as_keywords(dropped)}, which the model had; to keep an option, pass it again, as the "
            "changes of suggest do",
        )
    mark = uuid.uuid4().hex
    present = {name: scheme_of(decoder.get_submodule(name)) or scheme for name, scheme in schemes.items()}
    if earlier is not None and all(_same(present[name], scheme) for name, scheme in schemes.items()):
        mark, schemes = earlier.mark, present  # caches, and forwards before their backward, stay valid
    return ConversionPlan(schemes, options, field, mark, tuple(warnings), own)


def plan_of(decoder: torch.nn.Module) -> ConversionPlan | None:
    """Returns the plan by which a decoder was converted, or None if it is not converted."""
    return getattr(getattr(decoder, ATTRIBUTE, None), "plan", None)


def scheme_of(module: torch.nn.Module) -> LayerScheme | None:
    """Returns the scheme of an attention module, or None if it is not converted."""
    return getattr(module, ATTRIBUTE, None)


def _plan_layers(decoder, modules: list[Any], options: dict[str, Any]) -> dict[str, LayerScheme]:
    """Returns the scheme of every attention module, by name. Layers with the same type, window and use of rotation
    share one ``LayerScheme``."""
    config = decoder.config
    names = {module: name for name, module in decoder.named_modules()}
    alike: dict[tuple, LayerScheme] = {}
    schemes = {}
    for module in modules:
        layer_type, sliding = layer_type_of(config, module.layer_idx), sliding_window_of(config, module.layer_idx)
        key = layer_type, sliding, rotates(module)
        if key not in alike:
            alike[key] = LayerScheme(config, *key, options)
        head_dim = head_dim_of(module)
        if alike[key].rotary.head_dim != head_dim:
            raise ValueError(
                f"rotary: expected head_dim {head_dim} of layer {module.layer_idx}, got {alike[key].rotary.head_dim}"
            )
        schemes[names[module]] = alike[key]
    check_sees_all(options, ((scheme.window, any(scheme.rotary.frequencies)) for scheme in alike.values()))
    if "rotary" not in options:  # the given scheme replaces the model's tables
        rotating = {layer_type for layer_type, _, rotated in alike if rotated}
        check_tables(decoder, {layer_type: layer_type in rotating for layer_type, *_ in alike})
    return schemes


def _same(one: LayerScheme, other: LayerScheme) -> bool:
    """Whether a cache that was filled under one scheme is valid under the other scheme."""
    return (one.window, one.rotary) == (other.window, other.rotary) and one.grows_from == other.grows_from == math.inf


def _warnings_of_window(options: Mapping[str, Any], config) -> list[str]:
    """Returns a warning if ReRoPE's window is 0, or if it lets the model see distances with which it was not
    trained."""
    name = "leaky_rerope" if "leaky_rerope" in options else "rerope"
    window = options[name][0] if name == "leaky_rerope" else options.get(name)
    length = stated_length(options) or getattr(config, "max_position_embeddings", None)
    if window == 0 and name == "rerope":
        return ["rerope: expected more than 0, got 0; every distance is seen as 0, as in Rotary.none"]
    if window is not None and isinstance(length, int) and window >= length:
        return [
            f"{name}: expected a window of less than the training length {length}, got {window}; the model would see "
            "distances that it was not trained with. In the ablation of ReRoPE's author a window of the training "
            "length has 7.1% accuracy at eight times that length, and a window of half the training length has 82.4%"
        ]
    return []


def _warnings_of_images(model, decoder) -> list[str]:
    """Returns a warning if the model has a vision tower and lets the tokens of an image see one another."""
    config = decoder.config
    if getattr(config, "use_bidirectional_attention", None) != IMAGES_ONLY or model is decoder:
        return []
    if not any(
        isinstance(module, PreTrainedModel) and hasattr(module, "get_image_features") for module in model.modules()
    ):
        return []
    return [
        f"model: only text is supported ({config.model_type} lets the tokens of an image see one another, which the "
        "kernels cannot express), got a model for images; a call with images raises an error until revert(model)"
    ]


# ---- the decoder and its layers


def find_decoder(model) -> PreTrainedModel:
    """Returns the module that holds the layers and the rotary embedding.

    Raises:
        TypeError, ValueError: model is not a module, or does not have exactly one such decoder.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch module, got {type(model).__name__}")
    found = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(map(is_rotary_embedding, module.children()))
    ]
    if len(found) != 1:
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and (reason := family(module.config.model_type).refused):
                raise ValueError(f"model: not supported, {module.config.model_type} {reason}")
        raise ValueError(
            f"model: expected one transformers decoder with a rotary embedding, found {len(found)} in "
            f"{type(model).__name__}"
        )
    return found[0]


def check_decoder(decoder: PreTrainedModel) -> None:
    """Refuses decoders that do not go through transformers' registered attention and mask functions, and families whose
    attention or rotation is not supported.

    Raises:
        ValueError: the decoder is not supported. The message names its class or model type.
    """
    model_type, version = decoder.config.model_type, transformers.__version__
    if reason := family(model_type).refused:
        raise ValueError(f"model: not supported, {model_type} {reason}")
    if family(model_type).latent and VERSION < (5, 0):
        raise ValueError(
            f"model: {model_type} has latent attention, which needs transformers 5.0 or newer, got {version}"
        )
    names = vars(sys.modules[type(decoder).__module__])
    if "create_causal_mask" not in names:
        raise ValueError(
            f"model: expected a decoder that gets its masks from AttentionMaskInterface, got "
            f"{type(decoder).__name__}, which makes its masks itself in transformers {version}"
        )
    if "ALL_ATTENTION_FUNCTIONS" not in names:
        raise ValueError(
            f"model: expected a decoder that gets its attention from AttentionInterface, got "
            f"{type(decoder).__name__}, which computes attention itself in transformers {version}"
        )


def attention_modules(decoder: PreTrainedModel) -> list[Any]:
    """Returns the attention module of every layer that attends.

    Raises:
        ValueError: the attention is not causal, or caps its scores, or layers without attention need a newer
            transformers.
    """
    config = decoder.config
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"model: expected scores without a cap, got attn_logit_softcapping = {config.attn_logit_softcapping}"
        )
    attending = attending_layers(config)
    if len(attending) < config.num_hidden_layers and VERSION < (5, 1):
        raise ValueError(
            "model: expected transformers 5.1 or newer for a model with layers without attention, got "
            f"{transformers.__version__}, which has no static cache for them"
        )
    modules = [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith(("Attention", "MLA")) and getattr(module, "layer_idx", None) in attending
    ]
    if sorted(module.layer_idx for module in modules) != attending:
        raise ValueError(f"model: expected {len(attending)} attention modules, found {len(modules)}")
    bidirectional = getattr(config, "use_bidirectional_attention", None) or None
    if bidirectional not in (None, IMAGES_ONLY) or not all(getattr(module, "is_causal", False) for module in modules):
        raise ValueError("model: expected causal attention in every layer, got layers that see later keys")
    return modules


def head_dim_of(module: Any) -> int:
    """Returns the head_dim of an attention module: how many channels a query and a key have."""
    names = "qk_head_dim", "head_size", "head_dim"  # of latent attention, of gpt_neox, and of all others
    return int(next(width for name in names if (width := getattr(module, name, None))))


def check_widths(model_type: str, modules: list[Any]) -> None:
    """Refuses models with a layer whose head_dim the kernels of its device do not support.

    Raises:
        ValueError: a head_dim is too large. The message names the layer, its head_dim and the model type.
    """
    for module in modules:
        head_dim = head_dim_of(module)
        reason = f"the kernels take a head_dim up to {MAX_HEAD_DIM}" if head_dim > MAX_HEAD_DIM else ""
        if not reason and (like := next(module.parameters(), None)) is not None and like.is_floating_point():
            q = torch.empty(1, 1, 1, head_dim + -head_dim % 8, dtype=like.dtype, device=like.device)
            reason = load_backend(resolve_impl(None, q)).unsupported_reason(q)
        if reason:
            raise ValueError(
                f"model: head_dim = {head_dim} of layer {module.layer_idx} is not supported ({reason}), got "
                f"{model_type!r}"
            )


def rotates(module: torch.nn.Module) -> bool:
    """Whether an attention module applies the rotary embedding, as far as its attributes say."""
    if hasattr(module, "force_rope"):  # cohere2_moe
        return bool(module.force_rope or module.sliding_window is not None)
    return bool(getattr(module, "use_rope", True))
