"""The scheme of every layer of a model: its own, or what ``convert`` is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

from ...rotary.rotary import Rotary
from ..hf_config import rotary_of_model

BEYOND = ("window", "self_extend", "dual_chunk")  # of which a model takes one
NUMBERS_OF = {"self_extend": ("window", "group"), "dual_chunk": ("chunk_size", "local_size", "length_scale")}
EXTRA = {"self_extend": "", "dual_chunk": ", or three numbers with length_scale"}


def check_beyond(options: dict) -> None:
    """
    Args:
        options: those that were given.

    Raises:
        TypeError, ValueError: several of BEYOND, or no pair where one is expected.
    """
    beyond = [name for name in BEYOND if name in options]
    if len(beyond) > 1:
        raise ValueError(f"{beyond[-1]}: expected one of {', '.join(BEYOND)}, got also {', '.join(beyond[:-1])}")
    for name, numbers_of in NUMBERS_OF.items():
        given = options.get(name)
        if given is not None and not (isinstance(given, (tuple, list)) and len(given) in (2, len(numbers_of))):
            raise TypeError(f"{name}: expected a pair ({', '.join(numbers_of[:2])}){EXTRA[name]}, got {given!r}")


class LayerScheme:
    """The scheme of layers with the same layer type and window.

    Attributes:
        window: the sliding window of these layers, or None.
        rotary: the scheme up to the length grows_from.
        grows_from: beyond this number of tokens the scheme depends on the length; inf: it never does.
    """

    def __init__(self, config, layer_type: str | None, window: int | None, rotates: bool, options: dict):
        self.window = window
        self._build: Callable[[int | None], Rotary] = partial(_scheme, config, layer_type, window, rotates, options)
        self.rotary = self._build(None)
        self.grows_from = math.inf if options.get("rotary") or not rotates else _grows_from(config, layer_type)
        self._latest = (0, self.rotary)

    def at(self, seqlen: int) -> Rotary:
        """The scheme for a sequence of seqlen tokens."""
        if seqlen <= self.grows_from:
            return self.rotary
        length, rotary = self._latest
        if length != seqlen:
            rotary = self._build(seqlen)
            self._latest = (seqlen, rotary)
        return rotary


def _scheme(config, layer_type, window, rotates, options, seqlen) -> Rotary:
    rotary = rotary_of_model(config, layer_type, seqlen) if rotates else Rotary.none(_head_dim(config))
    if rotary.axis:
        raise ValueError(
            "config: mrope_section gives each pair its own coordinate of a position, and caches keep one number for "
            "each key; for text only, where the coordinates are equal, remove the key"
        )
    given = options.get("rotary")
    if given is not None and rotates and (isinstance(given, dict) or any(rotary.frequencies)):
        given = given[layer_type] if isinstance(given, dict) else given
        if any(given.frequencies) and any(rotary.frequencies) and given.interleaved != rotary.interleaved:
            raise ValueError(
                f"rotary: expected interleaved={rotary.interleaved}, as the model pairs its channels, got "
                f"{given.interleaved}"
            )
        rotary = given
    if options.get("hope_train_length"):
        rotary = _hope(rotary, options["hope_train_length"])
    if options.get("clip"):
        rotary = rotary.cope(**options["clip"])
    if options.get("window") is not None and any(rotary.frequencies):
        rotary = rotary.rectify(options["window"], options.get("factor"))
    if options.get("self_extend"):
        rotary = rotary.self_extend(*options["self_extend"])
    if options.get("dual_chunk"):
        rotary = rotary.dual_chunk(*options["dual_chunk"])
    if window is not None:
        if not all(band.is_plain for band in rotary.bands):
            raise ValueError(
                "window: expected a model whose layers see all keys, got layers with a sliding window of "
                f"{window}, which see nothing beyond it to rectify"
            )
        return rotary.local(window)
    if options.get("log_n"):
        rotary = rotary.log_n(options["log_n"], clip=True)
    return rotary


def _hope(rotary: Rotary, train_length: float) -> Rotary:
    """HoPE on a model's own table: the frequency before any interpolation decides whether a pair rotates."""
    if not train_length > 0:
        raise ValueError(f"hope_train_length: expected a positive length, got {train_length!r}")
    original = rotary.frequencies
    if rotary.base is not None:
        original = [rotary.base ** (-2 * m / rotary.exponent_dim) for m in range(len(rotary.frequencies))]
    frequencies = tuple(
        frequency if abs(before) >= 2 * math.pi / train_length else 0.0
        for frequency, before in zip(rotary.frequencies, original, strict=True)
    )
    return dataclasses.replace(rotary, frequencies=frequencies)


# ---- fields of a configuration

# Types of layers without attention, in configurations of models that have both.
WITHOUT_ATTENTION = frozenset({"conv", "linear_attention", "mamba", "mlp", "moe", "recurrent"})


def attending_layers(config) -> list[int]:
    """The layers that have attention."""
    types = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    return [layer for layer in range(config.num_hidden_layers) if not types or types[layer] not in WITHOUT_ATTENTION]


def layer_type_of(config, layer: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return types[layer] if types else None


def sliding_window_of(config, layer: int) -> int | None:
    """The window that the layer's forward passes to the attention function, which compares the two."""
    layer_type = layer_type_of(config, layer)
    slides = getattr(config, "use_sliding_window", True) if layer_type is None else layer_type == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def training_length(config) -> int:
    """max_position_embeddings, in tokens."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ValueError(f"config: expected max_position_embeddings, the training length, got {length!r}")
    return length


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _grows_from(config, layer_type) -> float:
    """The number of tokens beyond which the table depends on the length."""
    params = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    params = params.get(layer_type, params) or {}
    rope_type = params.get("rope_type") or params.get("type")
    if rope_type == "dynamic" and not params.get("alpha"):
        return config.max_position_embeddings
    if rope_type not in ("longrope", "su"):
        return math.inf
    import transformers

    of_config = getattr(config, "original_max_position_embeddings", None)
    if of_config is None and int(transformers.__version__.split(".")[0]) < 5:
        raise ValueError(
            "config: expected original_max_position_embeddings beside the rope parameters, where transformers "
            f"{transformers.__version__} looks for the length that longrope's tables change at"
        )
    return params.get("original_max_position_embeddings") or of_config or config.max_position_embeddings
