"""The scheme of every layer of a model: its own, or what ``convert`` is asked for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

from ...rotary.catalogue import TABLE, apply_options, known_options
from ...rotary.rotary import Rotary
from ..hf_config import rotary_of_model
from ..options import DUAL_CHUNK


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
        fixes_table = {"rotary", *(name for name, option in known_options().items() if option.stage == TABLE)}
        fixed = not rotates or not fixes_table.isdisjoint(options)
        self.grows_from = math.inf if fixed else _grows_from(config, layer_type)
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

    def without_rotation(self) -> LayerScheme:
        """Returns the scheme of the same layers if they did not rotate."""
        other = copy.copy(self)
        none = Rotary.none(self.rotary.head_dim)
        other.rotary, other.grows_from = none if self.window is None else none.local(self.window), math.inf
        return other


def _scheme(config, layer_type, window, rotates, options, seqlen) -> Rotary:
    chunked = DUAL_CHUNK not in options  # which otherwise takes the place of the configuration's
    options = {name: value for name, value in options.items() if name != DUAL_CHUNK or value}
    rotary = rotary_of_model(config, layer_type, seqlen, chunked) if rotates else Rotary.none(_head_dim(config))
    given = options.get("rotary")
    if rotary.axis:
        _check_axial(rotary, options, window)
    if given is not None and rotates and (isinstance(given, dict) or any(rotary.frequencies)):
        given = given[layer_type] if isinstance(given, dict) else given
        if any(given.frequencies) and any(rotary.frequencies) and given.interleaved != rotary.interleaved:
            raise ValueError(
                f"rotary: expected interleaved={rotary.interleaved}, as the model pairs its channels, got "
                f"{given.interleaved}"
            )
        rotary = given
    rotary = apply_options(rotary, options, scaled=window is None)
    if window is None:
        return rotary
    if not all(band.is_plain for band in rotary.bands):
        raise ValueError(
            "window: expected a model whose layers see all keys, got layers with a sliding window of "
            f"{window}, which see nothing beyond it to rectify"
        )
    return rotary.local(window)


def _check_axial(rotary: Rotary, options: dict, window: int | None) -> None:
    """Refuses what counts distances, where a token stands at several coordinates."""
    given, asked = options.get("rotary"), [name for name in options if name != "rotary"]
    if window is not None:
        asked = ["sliding_window", *asked]
    if asked:
        raise ValueError(
            f"{asked[0]}: expected none in a model with mrope_section, whose tokens stand at {rotary.axes} coordinates "
            f"and have {rotary.axes} distances from one another, not the one that it changes"
        )
    if given is not None and (isinstance(given, dict) or given.axes != rotary.axes):
        raise ValueError(
            f"rotary: expected a scheme of {rotary.axes} axes, as the positions of this model, got {given!r}"
        )


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
