"""How schemes change a frequency table: inv_freq per channel pair in, inv_freq out. Arguments were checked before."""

from __future__ import annotations

import math
from collections.abc import Sequence

NTK = ("old", "aware", "fixed", "mixed")


def ntk_table(
    frequencies: Sequence[float], dim: int, factor: float, variant: str, exponent: float
) -> tuple[float, ...]:
    """``Rotary.ntk``; dim: the denominator of the table's exponent."""
    if variant == "aware":
        if dim <= 2:
            raise ValueError(f'variant: "aware" needs more than one pair, this table has {dim // 2}')
        decay = [2 * m / (dim - 2) for m in range(len(frequencies))]
    elif variant == "old":
        decay = [2 * m / dim for m in range(len(frequencies))]
    elif variant == "fixed":
        decay = [2 * (m + 1) / dim for m in range(len(frequencies))]
    else:
        decay = [((m + 1) / (dim / 2)) ** exponent for m in range(len(frequencies))]
    return tuple(f * math.exp(-math.log(factor) * c) for f, c in zip(frequencies, decay, strict=True))


def yarn_table(
    frequencies: Sequence[float],
    dim: int,
    base: float,
    factor: float,
    train_length: float,
    betas: tuple[float, float],
    truncate: bool,
) -> tuple[float, ...]:
    """``Rotary.yarn``; dim: the denominator of the table's exponent."""
    low, high = (dim * math.log(train_length / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in betas)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 0.001)
    changed = []
    for m, f in enumerate(frequencies):
        interpolated = min(max((m - low) / width, 0.0), 1.0)
        changed.append(f / factor * interpolated + f * (1 - interpolated))
    return tuple(changed)


def cope_table(frequencies: Sequence[float], train_length: float, pairs: int | None, taper: bool) -> tuple[float, ...]:
    """``Rotary.cope``."""
    falling = sorted((m for m, f in enumerate(frequencies) if f), key=lambda m: -abs(frequencies[m]))
    if pairs is None:
        slow = [m for m in falling if abs(frequencies[m]) < 2 * math.pi / train_length]
    else:
        slow = falling[len(falling) - pairs :]
    changed = list(frequencies)
    for r, m in enumerate(slow):
        last = r == len(slow) - 1  # exactly 0, which cos does not give
        changed[m] *= 0.0 if last or not taper else (1 + math.cos(math.pi * r / (len(slow) - 1))) / 2
    return tuple(changed)
