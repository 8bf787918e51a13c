"""Computes the frequency tables of the schemes: inv_freq per channel pair, in radians per position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .scheme_checks import check_flag, check_fraction, is_integer, positive

NTK = ("old", "aware", "fixed", "mixed")


def geometric_table(base: float, dim: int) -> tuple[float, ...]:
    """Returns base ** (-2m / dim) for every pair m."""
    base = positive("base", base)
    if not base > 1:
        raise ValueError(f"base: expected more than 1, got {base!r}")
    return tuple(base ** (-2 * m / dim) for m in range(dim // 2))


def given_table(name: str, inv_freq) -> tuple[float, ...]:
    """Returns a tensor, array or list (pairs,) as a tuple. name: the argument's name, for errors."""
    try:
        table = torch.as_tensor(inv_freq, device="cpu")
        if table.is_complex() or table.dtype == torch.bool:
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        given = getattr(inv_freq, "dtype", repr(inv_freq))
        raise TypeError(f"{name}: expected a tensor, array or list of real numbers, got {given}") from None
    if table.requires_grad:
        raise ValueError(
            f"{name}: expected a table without gradients, got one that requires them; a Rotary copies the numbers, so "
            f"no gradient would reach the table; pass {name}.detach() to use its present values. docs/extending.md, 'A "
            "scheme outside the formula', trains a table"
        )
    table = torch.as_tensor(inv_freq, dtype=torch.float64, device="cpu")
    if table.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {tuple(table.shape)}")
    return tuple(table.tolist())


def hope_table(frequencies: Sequence[float], train_length: float) -> tuple[float, ...]:
    """Returns the frequencies of the pairs that make a full turn within train_length, for ``Rotary.hope``. frequencies:
    in decreasing order."""
    kept = sum(f >= 2 * math.pi / train_length for f in frequencies)
    return tuple(frequencies[:kept])


def first_pairs(frequencies: Sequence[float], fraction: float) -> tuple[float, ...]:
    """Returns the table with only the first ``fraction`` of its pairs. The frequencies of the other pairs are 0."""
    check_fraction(fraction)
    kept = int(fraction * len(frequencies))
    return (*frequencies[:kept], *(0.0,) * (len(frequencies) - kept))


def ntk_table(
    frequencies: Sequence[float], dim: int, factor: float, variant: str, exponent: float
) -> tuple[float, ...]:
    """Returns the table of ``Rotary.ntk``. dim: the denominator of the exponent."""
    factor, exponent = positive("factor", factor), positive("exponent", exponent)
    if variant not in NTK:
        raise ValueError(f'variant: expected "old", "aware", "fixed" or "mixed", got {variant!r}')
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
    base: float | None,
    factor: float,
    train_length: float,
    betas: tuple[float, float],
    truncate: bool,
) -> tuple[float, ...]:
    """Returns the table of ``Rotary.yarn``. dim: the denominator of the exponent. betas: (beta_fast, beta_slow)."""
    factor, train_length = positive("factor", factor), positive("train_length", train_length)
    beta_fast, beta_slow = positive("beta_fast", betas[0]), positive("beta_slow", betas[1])
    check_flag("truncate", truncate)
    if beta_fast < beta_slow:
        raise ValueError(f"beta_fast: expected at least beta_slow = {beta_slow!r}, got {beta_fast!r}")
    if train_length < beta_slow * 2 * math.pi:
        raise ValueError(
            f"train_length: no pair turns beta_slow = {beta_slow!r} times over {train_length!r} positions, "
            "which leaves no ramp; use interpolate"
        )
    if base is None:
        raise ValueError("yarn: needs the base of the table for its ramp; a table of from_inv_freq has none")
    low, high = (
        dim * math.log(train_length / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 0.001)
    changed = []
    for m, f in enumerate(frequencies):
        interpolated = min(max((m - low) / width, 0.0), 1.0)
        changed.append(f / factor * interpolated + f * (1 - interpolated))
    return tuple(changed)


def llama3_table(
    frequencies: Sequence[float], factor: float, train_length: float, low: float, high: float
) -> tuple[float, ...]:
    """Returns Llama 3.1's table. A pair's frequency depends on the number of turns that it makes over the training
    length.

    A pair with fewer than ``low`` turns has its frequency divided by ``factor``. A pair with more than ``high`` turns
    keeps its frequency. Between them, the result is interpolated linearly in the number of turns.
    """
    found = []
    for f in frequencies:
        kept = min(max((train_length * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0)
        found.append((1 - kept) * f / factor + kept * f)
    return tuple(found)


def cope_table(frequencies: Sequence[float], train_length: float, pairs: int | None, taper: bool) -> tuple[float, ...]:
    """Returns the table of ``Rotary.cope``."""
    train_length = positive("train_length", train_length)
    check_flag("taper", taper)
    rotating = sum(f != 0 for f in frequencies)
    if pairs is not None and not (is_integer(pairs, 0) and pairs <= rotating):
        raise ValueError(
            f"pairs: expected None or an integer from 0 to {rotating}, the pairs that rotate, got {pairs!r}"
        )
    falling = sorted((m for m, f in enumerate(frequencies) if f), key=lambda m: -abs(frequencies[m]))
    if pairs is None:
        slow = [m for m in falling if abs(frequencies[m]) < 2 * math.pi / train_length]
    else:
        slow = falling[len(falling) - pairs :]
    changed = list(frequencies)
    for r, m in enumerate(slow):
        last = r == len(slow) - 1  # gets exactly 0, which the formula with cos does not give
        changed[m] *= 0.0 if last or not taper else (1 + math.cos(math.pi * r / (len(slow) - 1))) / 2
    return tuple(changed)
