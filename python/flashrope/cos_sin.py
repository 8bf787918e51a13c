"""Tables of cos and sin, built in float64 and stored in float32.

position * inv_freq in float32 is off by 6e-2 rad at a million positions; these tables are off by 3e-8 (one level) or
two to three float32 roundings (two levels) at any position.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch

from .rotary import Rotary

FINE_ROWS = 1024  # positions per coarse row; both levels of a 128k context stay in L2


class BandRotations(NamedTuple):
    """For every band of a scheme, as slots of ``slots`` (slope, offset): the turn of its queries and of its keys, and
    the turns that lead there from the queries' and the keys' turn in the band before. Slot 0 is no turn."""

    slots: tuple[tuple[float, float], ...]
    query: tuple[int, ...]
    key: tuple[int, ...]
    query_step: tuple[int, ...]
    key_step: tuple[int, ...]


@lru_cache(maxsize=1024)
def band_rotations(rotary: Rotary, causal: bool) -> BandRotations:
    slots: dict[tuple[float, float], int] = {(0.0, 0.0): 0}
    columns = ([], [], [], [])
    before = None
    for _, _, slope, offset in rotary.bands_for(causal):
        turns = ((slope, offset), (slope, 0.0))
        steps = [(a - c, b - d) for (a, b), (c, d) in zip(turns, before or turns, strict=True)]
        for column, turn in zip(columns, (*turns, *steps), strict=True):
            column.append(slots.setdefault(turn, len(slots)) if any(rotary.frequencies) else 0)
        before = turns
    return BandRotations(tuple(slots), *map(tuple, columns))


def cos_sin(rotary: Rotary, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin in float64 of positions (...,) or, for an axial table, (..., axes): two of shape (..., pairs)."""
    return _cos_sin(positions, *_frequencies(rotary, positions.device))


def _cos_sin(positions, theta, axis):
    positions = positions.to(torch.float64)
    angle = (positions[..., None] if axis is None else positions.index_select(-1, axis)) * theta
    return angle.cos(), angle.sin()


def _frequencies(rotary: Rotary, device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """theta float64 (pairs,), and for an axial table the axis of every pair, int64 (pairs,)."""
    return (
        torch.tensor(rotary.frequencies, dtype=torch.float64, device=device),
        torch.tensor(rotary.axis, device=device) if rotary.axis else None,
    )


def padded_pairs(rotary: Rotary) -> int:
    """Pairs of a power-of-two tile that holds head_dim; those beyond the table's do not turn (cos 1, sin 0)."""
    return max(8, 1 << (rotary.head_dim - 1).bit_length() >> 1)


def coarse_rows(positions: int) -> int:
    """Coarse rows that reach this many positions, rounded up to a power of two so that few tables are ever built."""
    return 1 << max(-(-positions // FINE_ROWS) - 1, 0).bit_length()


def resident(build: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """What build returns, on a device where it is to stay. On a GPU a thread of its own makes it: this one may stand in
    inference mode, or allocate from the pool of a CUDA graph, as torch.compile's "reduce-overhead" does, which takes
    that memory back."""
    if device.type != "cuda":
        return build().to(device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: build().to(device)).result()


@lru_cache(maxsize=256)
def two_level_table(rotary: Rotary, causal: bool, coarse: int, device: torch.device) -> torch.Tensor:
    """float32 (turns, FINE_ROWS + coarse, 2, padded pairs): cos and sin of slope * r for the fine rows r, then of
    slope * FINE_ROWS * c + offset for the coarse rows c. Angle addition joins the two."""
    return resident(lambda: _two_levels(rotary, causal, coarse), device)


def _two_levels(rotary: Rotary, causal: bool, coarse: int) -> torch.Tensor:
    fine = torch.arange(FINE_ROWS, dtype=torch.float64)
    blocks = torch.arange(coarse, dtype=torch.float64) * FINE_ROWS
    rows = torch.stack(
        [torch.cat([slope * fine, slope * blocks + offset]) for slope, offset in band_rotations(rotary, causal).slots]
    )
    return _padded(rotary, *cos_sin(rotary, rows[..., None].expand(*rows.shape, rotary.axes) if rotary.axis else rows))


@lru_cache(maxsize=256)
def _resident_frequencies(rotary: Rotary, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    return tuple(x if x is None else resident(lambda x=x: x, device) for x in _frequencies(rotary, "cpu"))


def position_table(rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """float32 (2, batch, seqlen, 2, padded pairs): slot 0 does not turn, slot 1 turns by the given positions."""
    cos, sin = _cos_sin(
        positions, *_resident_frequencies(rotary, positions.device)
    )  # nothing to copy, so nothing to wait for
    return _padded(rotary, torch.stack([torch.ones_like(cos), cos]), torch.stack([torch.zeros_like(sin), sin]))


def _padded(rotary: Rotary, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """float32 (..., 2, padded pairs)."""
    missing = (0, padded_pairs(rotary) - cos.shape[-1])
    pad = torch.nn.functional.pad
    return torch.stack([pad(cos, missing, value=1.0), pad(sin, missing)], dim=-2).to(torch.float32)
