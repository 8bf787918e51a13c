"""Tables of cos and sin, built in float64 and stored in float32.

position * inv_freq in float32 is off by 6e-2 rad at a million positions; these tables are off by 3e-8 (one level) or
two to three float32 roundings (two levels) at any position.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .rotary import Rotary

FINE_ROWS = 1024  # positions per coarse row; both levels of a 128k context stay in L2
PAIR_ALIGNMENT = 16  # a row of pairs starts at a multiple of 64 bytes


def turns(rotary: Rotary, causal: bool) -> tuple[tuple[float, float], ...]:
    """The distinct (slope, offset) at which queries or keys of any band turn; the first is (0, 0), no turn at all."""
    seen = [(0.0, 0.0)]
    for band in rotary.bands_for(causal):
        for turn in ((band.slope, band.offset), (band.slope, 0.0)):
            if turn not in seen:
                seen.append(turn)
    return tuple(seen)


def cos_sin(rotary: Rotary, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin in float64 of positions (...,) or, for an axial table, (..., axes): two of shape (..., pairs)."""
    positions = positions.to(torch.float64)
    theta = torch.tensor(rotary.theta, dtype=torch.float64, device=positions.device)
    if rotary.axis:
        angle = positions[..., list(rotary.axis)] * theta
    else:
        angle = positions[..., None] * theta
    return angle.cos(), angle.sin()


def padded_pairs(rotary: Rotary) -> int:
    return max(-(-len(rotary.theta) // PAIR_ALIGNMENT), 1) * PAIR_ALIGNMENT


def coarse_rows(positions: int) -> int:
    """Coarse rows that reach this many positions, rounded up to a power of two so that few tables are ever built."""
    return 1 << max(-(-positions // FINE_ROWS) - 1, 0).bit_length()


@lru_cache(maxsize=256)
def two_level_table(rotary: Rotary, causal: bool, coarse: int, device: torch.device) -> torch.Tensor:
    """float32 (turns, FINE_ROWS + coarse, 2, padded pairs): cos and sin of slope * r for the fine rows r, then of
    slope * FINE_ROWS * c + offset for the coarse rows c. Angle addition joins the two."""
    table = torch.zeros(len(turns(rotary, causal)), FINE_ROWS + coarse, 2, padded_pairs(rotary))
    fine = torch.arange(FINE_ROWS, dtype=torch.float64)
    blocks = torch.arange(coarse, dtype=torch.float64) * FINE_ROWS
    for slot, (slope, offset) in enumerate(turns(rotary, causal)):
        rows = torch.cat([slope * fine, slope * blocks + offset])
        if not rotary.axis:
            cos, sin = cos_sin(rotary, rows)
            table[slot, :, 0, :len(rotary.theta)] = cos
            table[slot, :, 1, :len(rotary.theta)] = sin
    return table.to(device)


def position_table(rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """float32 (2, batch, seqlen, 2, padded pairs): slot 0 does not turn, slot 1 turns by the given positions."""
    cos, sin = cos_sin(rotary, positions)
    table = torch.zeros(2, *cos.shape[:-1], 2, padded_pairs(rotary), dtype=torch.float32, device=positions.device)
    table[0, ..., 0, :] = 1
    table[1, ..., 0, :cos.shape[-1]] = cos
    table[1, ..., 1, :cos.shape[-1]] = sin
    return table
