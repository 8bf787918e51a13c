"""Describes a Rotary in readable text, and reads the fields of a Rotary from its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .bands import bands_text


def describe(rotary) -> str:
    """Returns the repr of a Rotary: channels, table, bands and scale."""
    rotating = [f for f in rotary.frequencies if f]
    pairs = f"{len(rotating)} of {rotary.head_dim // 2} pairs rotate"
    if rotating:
        pairs += f" (inv_freq {max(rotating, key=abs):.4g} to {min(rotating, key=abs):.4g}"
        pairs += f", {'interleaved' if rotary.interleaved else 'half'} pairing"
        pairs += f" in {rotary.rotary_dim} channels" if rotary.rotary_dim != rotary.head_dim else ""
        pairs += f" from {rotary.first_channel} on" if rotary.first_channel else ""
        pairs += _axes_text(rotary.axis)
        pairs += f", {rotary.scaled_by}" if rotary.scaled_by else ""
        pairs += ")"
    parts = [
        f"head_dim={rotary.head_dim}",
        pairs,
        f"distance: {bands_text(rotary.bands)}",
    ]
    scale = [f"{rotary.temperature:.6g}"] if rotary.temperature != 1 else []
    if rotary.log_n_scale is not None:
        length, clip = rotary.log_n_scale
        log_n = f"ln(i + 1) / ln({length:g})"
        scale.append(f"max(1, {log_n})" if clip else log_n)
    if rotary.log_steps_scale is not None:
        every, factor, first = rotary.log_steps_scale
        position = "(i + 1)" if first else "i"
        scale.append(f"(1 + {factor:g} ln(1 + floor({position} / {every:g})))")
    if rotary.rotated_scale != 1:
        scale.append(f"{rotary.rotated_scale:.6g} on {_rotary_channels(rotary)}")
    if rotary.length_scale is not None:
        scale.append(f"max(1, 0.1 * ln(n / {rotary.length_scale:g}) + 1)")
    return f"Rotary({', '.join(parts)}, score scale: {' * '.join(scale) or '1'})"


def _rotary_channels(rotary) -> str:
    if rotary.first_channel:
        return f"{rotary.rotary_dim} channels from {rotary.first_channel} on"
    return f"the first {rotary.rotary_dim} channels"


def _axes_text(axis: Sequence[int]) -> str:
    counts = [axis.count(a) for a in range(max(axis, default=-1) + 1)]
    if len(set(counts)) < 2:
        return f", {len(counts)} axes" if counts else ""
    return f", axes of {' + '.join(map(str, counts))} pairs"


def fields_of(text: str, known: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of a Rotary from its JSON. known: the names of a Rotary's fields."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"text: expected JSON, the text of a Rotary, got {_short(text)} ({error})") from None
    if not isinstance(fields, dict) or not {"head_dim", "frequencies"} <= fields.keys():
        raise ValueError(f"text: expected a JSON object with head_dim, frequencies, ..., got {_short(text)}")
    if unknown := sorted(fields.keys() - set(known)):
        raise ValueError(
            f"text: expected the fields {', '.join(known)}, got also {', '.join(unknown)}; a newer flashrope may have "
            "written it"
        )
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
