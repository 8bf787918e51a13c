"""Computes the scheme of every layer of a model from its configuration and options, and suggests options.

Nothing here needs transformers, except longrope's tables, which depend on the version of transformers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from ...schemes.bands import have_maps
from ...schemes.catalogue import (
    BANDS,
    SCALE,
    SCHEMES,
    TABLE,
    Lengths,
    add_options,
    apply_options,
    describe_options,
    known_options,
    stated_length,
)
from ...schemes.hugging_face import model_steps
from ...schemes.rotary import Rotary, build
from ...schemes.scales import UNSCALED
from ..scheme_options import DUAL_CHUNK, as_keywords, read_field


class LayerScheme:
    """The scheme of layers with the same layer type and window.

    Attributes:
        window: the sliding window of these layers, or None.
        rotary: the scheme for sequences of at most grows_from tokens.
        from_zero: whether scores depend on where positions begin to count, and not only on distances.
        grows_from: beyond this number of tokens the scheme depends on the length. inf: it never does.
        has_run: whether a forward has run under this scheme.
    """

    def __init__(self, config, layer_type: str | None, window: int | None, rotates: bool, options: dict):
        self.window = window
        self._build: Callable[[int | None], Rotary] = partial(_scheme, config, layer_type, window, rotates, options)
        self.rotary = self._build(None)
        self.from_zero = self.rotary.query_scale.by_position != UNSCALED or have_maps(self.rotary.bands)
        fixes_table = {"rotary", *(name for name, option in known_options().items() if option.stage == TABLE)}
        fixed = not rotates or not fixes_table.isdisjoint(options)
        self.grows_from = math.inf if fixed else grows_from(config, layer_type)
        self._latest = (0, self.rotary)
        self.has_run = False

    def at(self, seqlen: int) -> Rotary:
        """Returns the scheme for a sequence of seqlen tokens."""
        if seqlen <= self.grows_from:
            return self.rotary
        length, rotary = self._latest
        if length != seqlen:
            rotary = self._build(seqlen)
            self._latest = (seqlen, rotary)
        return rotary

    def without_rotation(self) -> LayerScheme:
        """Returns the scheme that the same layers would have without rotation."""
        other = copy.copy(self)
        none = Rotary.none(self.rotary.head_dim)
        other.rotary, other.grows_from = none if self.window is None else none.local(self.window), math.inf
        other.from_zero = False
        return other


def _scheme(config, layer_type, window, rotates, options, seqlen) -> Rotary:
    chunked = DUAL_CHUNK not in options  # the option replaces the configuration's dual_chunk_attention_config
    options = {name: value for name, value in options.items() if name != DUAL_CHUNK or value}
    rotary = build(model_steps(config, layer_type, seqlen, chunked)) if rotates else Rotary.none(_head_dim(config))
    given = options.get("rotary")
    if rotary.axis:
        _check_axial(rotary, options, window)
    if given is not None and rotates and (isinstance(given, dict) or any(rotary.frequencies)):
        given = given[layer_type] if isinstance(given, dict) else given
        if any(given.frequencies) and any(rotary.frequencies) and given.interleaved != rotary.interleaved:
            raise ValueError(
                f"rotary: expected interleaved={rotary.interleaved}, because the model pairs its channels this way, "
                f"got {given.interleaved}"
            )
        rotary = given
    rotary = apply_options(rotary, options, sees_all=window is None)
    if window is None:
        return rotary
    if not all(band.is_plain for band in rotary.bands):
        raise ValueError(
            "rotary: expected a scheme that keeps distances in layers with a sliding window (a dict gives a Rotary to "
            f"each layer type), got {rotary!r} and a window of {window} keys"
        )
    return rotary.local(window)


def check_sees_all(options: dict, layers: Iterable[tuple[int | None, bool]]) -> None:
    """Raises ValueError for options that change distances or scales if they would change no layer, because every layer
    has a sliding window, or does not rotate and has no distances to change.

    layers: the sliding window of every layer, or None, and whether the layer rotates.
    """
    known, layers = known_options(), list(layers)
    asked = [name for name in options if name in known and known[name].stage >= BANDS and options[name] is not False]
    if asked and all(window for window, _ in layers):
        windows = sorted({window for window, _ in layers if window})
        raise ValueError(
            f"{asked[0]}: expected a layer that sees all keys, got a sliding window of "
            f"{' or '.join(map(str, windows))} keys in every layer"
        )
    by_distance = [name for name in asked if known[name].stage == BANDS]
    if by_distance and not any(rotates for window, rotates in layers if not window):
        raise ValueError(
            f"{by_distance[0]}: expected a layer that sees all keys and rotates, got no rotation in the layers without "
            "a sliding window"
        )


def _check_axial(rotary: Rotary, options: dict, window: int | None) -> None:
    """Raises ValueError for options that depend on distances, because tokens have several coordinates."""
    given, asked = options.get("rotary"), [name for name in options if name != "rotary"]
    if window is not None:
        asked = ["sliding_window", *asked]
    if asked:
        raise ValueError(
            f"{asked[0]}: not supported in a model with mrope_section (its tokens have {rotary.axes} coordinates, so "
            f"two tokens have {rotary.axes} distances), got {options.get(asked[0], window)!r}"
        )
    if given is not None and (isinstance(given, dict) or given.axes != rotary.axes):
        raise ValueError(
            f"rotary: expected a scheme of {rotary.axes} axes, one per coordinate of a position, got {given!r}"
        )


# ---- fields of a configuration

# Types of layers without attention, in configurations of models that have layers with and without attention.
WITHOUT_ATTENTION = frozenset({"conv", "linear_attention", "mamba", "mlp", "moe", "recurrent"})


def attending_layers(config) -> list[int]:
    """Returns the layers that have attention."""
    types = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    return [layer for layer in range(config.num_hidden_layers) if not types or types[layer] not in WITHOUT_ATTENTION]


def layer_type_of(config, layer: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return types[layer] if types else None


def sliding_window_of(config, layer: int) -> int | None:
    """Returns the window that the configuration gives the layer. The attention function compares it with the window
    that the layer's forward passes."""
    layer_type = layer_type_of(config, layer)
    slides = getattr(config, "use_sliding_window", True) if layer_type is None else layer_type == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def grows_from(config, layer_type) -> float:
    """Returns the number of tokens beyond which the frequency table depends on the length, or inf."""
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
            "config: expected original_max_position_embeddings, from which transformers "
            f"{transformers.__version__} takes the length at which longrope's tables change, got None"
        )
    return params.get("original_max_position_embeddings") or of_config or config.max_position_embeddings


# ---- a scheme for sequences longer than the training length


class Suggestion(NamedTuple):
    """A suggestion of ``suggest``. changes: keyword arguments for ``convert``. reason: what the arguments mean, and why
    they are suggested."""

    changes: dict
    reason: str


def suggest(model_or_config, target_length: int, scheme: str = "rerope") -> Suggestion:
    """Suggests options of ``convert`` that let a model read target_length tokens without training.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import convert, suggest

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        suggestion = suggest(model, target_length=131_072)
        convert(model, **suggestion.changes)

    By default it suggests ReRoPE with a window of half the training length, and log n scaling by the training length,
    clipped at 1. In the ablation of the ReRoPE blog post (training length 512, tested at 4096, not trained with log n),
    windows of a quarter and a half of the training length give 82.3% and 82.4%, an eighth 78.6%, three quarters 76.4%,
    and the training length itself 7.1%.

    The changes of a model that was converted or saved with options contain these options, unless the scheme replaces
    them by others. Its own log n stays as it is. The training length is the longest one that its options state, or
    max_position_embeddings if they state none.

    Args:
        model_or_config: a transformers model or its configuration.
        target_length: the number of tokens that the model should read.
        scheme: "rerope", or any other scheme of ``flashrope loss --schemes``. "cope": the pairs with less than one turn
            over the training length rotate more slowly. "self-extend": a window of half the training length, and the
            smallest group that keeps distances below the training length. "dual-chunk": chunks of about three quarters
            of the training length. ``suggest`` gives these three without log n, as in their papers.

    Raises:
        ValueError: the model has no rotary embedding; or the scheme changes distances or scales, and no layer sees all
            keys; or it changes distances, and the layers that see all keys do not rotate; or the model's configuration
            lacks max_position_embeddings or num_hidden_layers; or the scheme cannot be fitted to its training length.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    config = getattr(model_or_config, "config", model_or_config)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not isinstance(target_length, int) or isinstance(target_length, bool) or target_length < 1:
        raise ValueError(f"target_length: expected a positive integer, got {target_length!r}")
    fields = ("max_position_embeddings", "num_hidden_layers")
    lacking = [name for name in fields if not isinstance(getattr(config, name, None), int)]
    if lacking:
        raise ValueError(
            f"model_or_config: expected a transformers model or its configuration, with {' and '.join(fields)}, got "
            f"{_name(model_or_config)} without {' and '.join(lacking)}"
        )
    own = read_field(config)
    length = stated_length(own) or config.max_position_embeddings
    layer_types = {layer_type_of(config, layer) for layer in attending_layers(config)}
    rotates = {layer_type: _rotates(config, layer_type) for layer_type in layer_types}
    if not any(rotates.values()):
        raise ValueError(
            "model_or_config: expected a model with a rotary embedding, got "
            f"{_name(model_or_config)} without rope_theta"
        )
    if target_length <= length:
        return Suggestion(own, f"{target_length} tokens are within the {length} that the model was trained with")
    row, lengths = SCHEMES[scheme], Lengths(length, target_length)
    fitted, options = row.options(lengths), known_options()
    changes = dict(fitted)
    if any(name in own and option.stage == SCALE for name, option in options.items()) and len(changes) > 1:
        changes = {name: value for name, value in changes.items() if options[name].stage != SCALE}
    windows = {layer: sliding_window_of(config, layer) for layer in attending_layers(config)}
    check_sees_all(changes, ((window, rotates[layer_type_of(config, layer)]) for layer, window in windows.items()))
    whole = [str(layer) for layer, window in windows.items() if not window]
    by_distance = any(options[name].stage >= BANDS for name in changes)
    why = row.why.format(train=lengths.train, longest=lengths.longest)
    together = add_options(own, changes)
    new = {name: value for name, value in fitted.items() if together.get(name) == value}
    kept = as_keywords({name: value for name, value in together.items() if name not in new})
    notes = [f"with the model's {kept}"] * bool(kept) + [why] * bool(why)
    if by_distance and len(whole) < len(windows):
        notes.append(
            f"in the layers that see all keys ({', '.join(whole)}); layers with a sliding window do not change"
        )
    return Suggestion(together, "; ".join([f"{row.label}: {describe_options(new)}", *notes]))


def _rotates(config, layer_type: str | None) -> bool:
    if not any(getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")):
        return False
    return any(Rotary.from_hf_config(config, layer_type).frequencies)


def _name(model_or_config) -> str:
    return repr(model_or_config) if isinstance(model_or_config, str) else type(model_or_config).__name__
