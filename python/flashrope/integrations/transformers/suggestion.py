"""``suggest``: a scheme for sequences longer than the training length."""

from __future__ import annotations

from typing import NamedTuple

from ...rotary.catalogue import BANDS, SCHEMES, Lengths, describe_options, known_options
from ..hf_config import rotary_from_config
from .layer_schemes import layer_type_of, sliding_window_of


class Suggestion(NamedTuple):
    """changes: keyword arguments for ``convert``; reason: what they mean, and why."""

    changes: dict
    reason: str


def suggest(model_or_config, target_length: int, scheme: str = "rerope") -> Suggestion:
    """What lets a model read target_length tokens without training.

    Use it as ``convert(model, **suggest(model, 32768).changes)``. It suggests ReRoPE with a window of half the training
    length, and log n scaling by the training length, clipped at 1. In the ablation of the ReRoPE blog post (training
    length 512, tested at 4096, not trained with log n), windows of a quarter and a half of the training length give
    82.3% and 82.4%, an eighth 78.6%, three quarters 76.4%, and the training length itself 7.1%.

    Args:
        model_or_config: a transformers model or its configuration.
        target_length: in tokens.
        scheme: "rerope", or any scheme of ``flashrope loss --schemes`` to have the numbers for. "cope": the pairs with
            less than one turn over the training length rotate less. "self-extend": a window of half the training
            length, and the smallest group that keeps distances below the training length. "dual-chunk": chunks of about
            three quarters of the training length. These three are without log n, as in their papers.

    Raises:
        ValueError: the model has no rotary embedding, or sliding windows for a scheme that changes distances; its
            configuration lacks max_position_embeddings or num_hidden_layers; its training length leaves no room for
            the scheme.
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
    length = config.max_position_embeddings
    layer_types = {layer_type_of(config, layer) for layer in range(config.num_hidden_layers)}
    if not any(_rotates(config, layer_type) for layer_type in layer_types):
        raise ValueError(
            "model_or_config: expected a model with a rotary embedding, got "
            f"{_name(model_or_config)} without rope_theta"
        )
    if target_length <= length:
        return Suggestion({}, f"{target_length} tokens are within the {length} that the model was trained with")
    row, lengths = SCHEMES[scheme], Lengths(length, target_length)
    changes, options = row.options(lengths), known_options()
    windows = [sliding_window_of(config, layer) for layer in range(config.num_hidden_layers)]
    if any(windows) and any(options[name].stage == BANDS for name in changes if name in options):
        raise ValueError(
            "model_or_config: expected layers that see all keys, got sliding windows of "
            f"{max(filter(None, windows))} in {sum(map(bool, windows))} of {len(windows)} layers"
        )
    why = row.why.format(train=lengths.train, longest=lengths.longest)
    return Suggestion(changes, f"{row.label}: {describe_options(changes)}" + (f"; {why}" if why else ""))


def _rotates(config, layer_type: str | None) -> bool:
    if not any(getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")):
        return False
    return any(rotary_from_config(config, layer_type).frequencies)


def _name(model_or_config) -> str:
    return repr(model_or_config) if isinstance(model_or_config, str) else type(model_or_config).__name__
