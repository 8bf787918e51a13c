"""Intervals of means over windows and trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean of a normal variable, by Student's t; nan for fewer than two."""
    if len(values) < 2:
        return math.nan
    deviation = torch.tensor(values, dtype=torch.float64).std().item()
    return student_t(len(values) - 1) * deviation / len(values) ** 0.5


def student_t(freedom: int, level: float = 0.95) -> float:
    """The two-sided quantile of Student's t: |t| with ``freedom`` degrees of freedom is below it with probability
    ``level``.

    Bisects the finite sums for whole numbers of degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4).
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
