"""Computes confidence intervals of means over windows and of proportions of trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def half_interval(values: Sequence[float]) -> float:
    """Returns half the width of the 95% interval of the mean of a normal variable, by Student's t, or nan for fewer
    than two values."""
    if len(values) < 2:
        return math.nan
    deviation = torch.tensor(values, dtype=torch.float64).std().item()
    return student_t(len(values) - 1) * deviation / len(values) ** 0.5


def student_t(freedom: int, level: float = 0.95) -> float:
    """Returns the two-sided quantile of Student's t with ``freedom`` degrees of freedom: |t| is below the quantile with
    probability ``level``.

    The quantile is found by bisection. The distribution function is a finite sum, because ``freedom`` is an integer
    (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """

    def within(t: float) -> float:
        angle = math.atan(t / freedom**0.5)
        cosine, term, total = math.cos(angle), 1.0, 0.0
        first = 2 if freedom % 2 else 1
        for n in range(first, freedom, 2):
            total += term
            term *= n / (n + 1) * cosine**2
        if freedom % 2:
            return 2 / math.pi * (angle + math.sin(angle) * cosine * total)
        return math.sin(angle) * total

    low, high = 0.0, 1.0
    while within(high) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < level else (low, middle)
    return high


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Returns the 95% interval of a proportion, by Wilson's score."""
    if not trials:
        return 0.0, 1.0
    z, share = 1.959964, successes / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)
