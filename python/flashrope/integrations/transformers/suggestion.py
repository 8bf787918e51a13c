"""``suggest``: a scheme for sequences longer than the training length."""

from __future__ import annotations

from typing import NamedTuple

from ...rotary.fitting import dual_chunk_for, self_extend_for
from ...rotary.rotary import Rotary
from .layer_schemes import layer_type_of, sliding_window_of

SCHEMES = ("rerope", "cope", "self-extend", "dual-chunk")


class Suggestion(NamedTuple):
    """changes: keyword arguments for ``convert``; reason: why, in a sentence or two."""

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
        scheme: "rerope", or another scheme to have the numbers for. "cope": the pairs with less than one turn over the
            training length rotate less. "self-extend": a window of half the training length, and the smallest group
            that keeps distances below the training length. "dual-chunk": chunks of about three quarters of the training
            length. These three are without log n, as in their papers; log_n may be added to the changes.

    Raises:
        ValueError: the model has sliding windows (which "cope" allows) or no rotary embedding, its configuration lacks
            max_position_embeddings or num_hidden_layers, or its training length leaves no room for the scheme.
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
    windows = [sliding_window_of(config, layer) for layer in range(config.num_hidden_layers)]
    if any(windows) and scheme != "cope":
        raise ValueError(
            "model_or_config: expected layers that see all keys, got sliding windows of "
            f"{max(filter(None, windows))} in {sum(map(bool, windows))} of {len(windows)} layers"
        )
    return SUGGESTED[scheme](length, target_length)


def _rerope(length: int, target_length: int) -> Suggestion:
    window = max(length // 2, 1)
    return Suggestion(
        {"window": window, "log_n": length},
        f"ReRoPE with window {window}, half of the training length {length}: no distance beyond the window is ever "
        "seen, and windows of a quarter to a half of the training length are best in its ablation; log n by "
        f"{length}, at least 1, keeps attention sharp over {target_length} keys and changes nothing within the "
        "training length",
    )


def _cope(length: int, target_length: int) -> Suggestion:
    return Suggestion(
        {"clip": length},
        f"CoPE: the pairs that make less than one turn over the training length {length}, whose angles beyond it are "
        "new to the model, rotate less the slower they are; all distances are seen as they are",
    )


def _self_extend(length: int, target_length: int) -> Suggestion:
    window, group = self_extend_for(length, target_length)
    return Suggestion(
        {"self_extend": (window, group)},
        f"Self-Extend with window {window}, half of the training length {length}, and group {group}, the smallest that "
        f"keeps the distances of {target_length} tokens below the training length",
    )


def _dual_chunk(length: int, target_length: int) -> Suggestion:
    chunk_size, local_size = dual_chunk_for(length)
    return Suggestion(
        {"dual_chunk": (chunk_size, local_size)},
        f"dual chunk attention: chunks of {chunk_size - local_size} tokens, and no distance beyond the training length "
        f"{length}, of which {local_size} are left for the neighbours across a chunk's edge",
    )


SUGGESTED = dict(zip(SCHEMES, (_rerope, _cope, _self_extend, _dual_chunk), strict=True))


def _rotates(config, layer_type: str | None) -> bool:
    if not any(getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")):
        return False
    return any(Rotary.from_hf_config(config, layer_type).frequencies)


def _name(model_or_config) -> str:
    return repr(model_or_config) if isinstance(model_or_config, str) else type(model_or_config).__name__
