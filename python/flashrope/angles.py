"""Tables of cos and sin, built in float64 and stored in float32.

position * inv_freq in float32 is off by 6e-2 rad at a million positions; these tables are off by 3e-8 (one level) or
two to three float32 roundings (two levels) at any position.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .rotary import Rotary

FINE_ROWS = 1024  # positions per coarse row; both levels of a 128k context stay in L2


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
    """Pairs of a power-of-two tile that holds head_dim; those beyond the table's do not turn (cos 1, sin 0)."""
    return max(8, 1 << (rotary.head_dim - 1).bit_length() >> 1)


def coarse_rows(positions: int) -> int:
    """Coarse rows that reach this many positions, rounded up to a power of two so that few tables are ever built."""
    return 1 << max(-(-positions // FINE_ROWS) - 1, 0).bit_length()


@lru_cache(maxsize=256)
def two_level_table(rotary: Rotary, causal: bool, coarse: int, device: torch.device) -> torch.Tensor:
    """float32 (turns, FINE_ROWS + coarse, 2, padded pairs): cos and sin of slope * r for the fine rows r, then of
    slope * FINE_ROWS * c + offset for the coarse rows c. Angle addition joins the two."""
    fine = torch.arange(FINE_ROWS, dtype=torch.float64)
    blocks = torch.arange(coarse, dtype=torch.float64) * FINE_ROWS
    rows = torch.stack([torch.cat([slope * fine, slope * blocks + offset]) for slope, offset in turns(rotary, causal)])
    return _padded(rotary, *cos_sin(rotary, rows[..., None].expand(*rows.shape, rotary.axes) if rotary.axis else rows)).to(device)


def position_table(rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """float32 (2, batch, seqlen, 2, padded pairs): slot 0 does not turn, slot 1 turns by the given positions."""
    cos, sin = cos_sin(rotary, positions)
    return _padded(rotary, torch.stack([torch.ones_like(cos), cos]), torch.stack([torch.zeros_like(sin), sin]))


def _padded(rotary: Rotary, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """float32 (..., 2, padded pairs)."""
    missing = (0, padded_pairs(rotary) - cos.shape[-1])
    pad = torch.nn.functional.pad
    return torch.stack([pad(cos, missing, value=1.0), pad(sin, missing)], dim=-2).to(torch.float32)
