"""Paired differences over seeds, with their 95% intervals, and what may be said in words about them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

# Student's t, 97.5%, by degrees of freedom from 1 on
T_975 = (
    (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    + (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
    + (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
)
MIN_SEEDS = 5  # for a claim


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two measurements whose difference, first minus second, is asked for: (scheme, task) each, at a multiple of the
    training length. Schemes may contain {w256} as in ``published``."""

    first: tuple[str, str]
    second: tuple[str, str]
    multiple: float


def schemes(first: str, second: str, task: str, *multiples: float) -> tuple[Comparison, ...]:
    """Two schemes by one task."""
    return tuple(Comparison((first, task), (second, task), multiple) for multiple in multiples)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Mean of several seeds and half the width of its 95% interval; None for one seed."""

    mean: float
    half: float | None
    seeds: int

    @property
    def excludes_zero(self) -> bool:
        return self.seeds >= MIN_SEEDS and abs(self.mean) > self.half

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:+.1f} (one seed)"
        return f"{self.mean:+.1f} ({self.mean - self.half:+.1f} to {self.mean + self.half:+.1f})"


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of values, one per seed. Raises ValueError beyond the seeds that the table of t covers."""
    if len(values) < 2:
        return Interval(values[0], None, 1)
    if len(values) > len(T_975) + 1:
        raise ValueError(f"expected at most {len(T_975) + 1} seeds, got {len(values)}")
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), T_975[len(values) - 2] * error, len(values))


def values_at(rows: Sequence[dict[str, str]], scheme: str, task: str, at: float) -> dict[int, float]:
    """A measurement by seed."""
    return {
        int(row["seed"]): float(row["value"])
        for row in rows
        if row["scheme"] == scheme and row["task"] == task and float(row["at"]) == at
    }


def difference(rows: Sequence[dict[str, str]], first: tuple, second: tuple, at: float) -> Interval | None:
    """First minus second, seed by seed: (scheme, task) each. None if no seed has both."""
    one, other = values_at(rows, *first, at), values_at(rows, *second, at)
    both = sorted(one.keys() & other.keys())
    return interval([one[seed] - other[seed] for seed in both]) if both else None


def verdict(found: Interval) -> str:
    if found.seeds < MIN_SEEDS:
        return f"not judged: fewer than {MIN_SEEDS} seeds"
    if not found.excludes_zero:
        return "no difference shown"
    return "higher" if found.mean > 0 else "lower"
