"""Computes paired differences over seeds and their 95% intervals, and says in words what the differences show."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from flashrope.lab.evaluation.losses import half_interval

MIN_SEEDS = 5  # the fewest seeds that allow a claim
HIGHER, LOWER = 1, -1


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Describes a comparison of two measurements at a multiple of the training length. A measurement is a (scheme,
    task). The difference, first minus second, is judged. Schemes may contain {w256} as in ``published``.

    Attributes:
        expected: the sign of the difference according to the papers, HIGHER or LOWER; 0 if they say nothing.
        second_multiple: the multiple of the second measurement, if it differs from the multiple of the first.
    """

    first: tuple[str, str]
    second: tuple[str, str]
    multiple: float
    expected: int = 0
    second_multiple: float | None = None


def schemes(first: str, second: str, task: str, *multiples: float, expected: int = 0) -> tuple[Comparison, ...]:
    """Returns comparisons of two schemes in one task, one for each multiple."""
    return tuple(Comparison((first, task), (second, task), multiple, expected) for multiple in multiples)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Holds a mean over seeds and the half width of its 95% interval, which is None for one seed."""

    mean: float
    half: float | None
    seeds: int

    @property
    def excludes_zero(self) -> bool:
        return self.seeds >= MIN_SEEDS and abs(self.mean) > self.half

    def __str__(self) -> str:
        """Returns the text of a difference, with as many digits as its interval justifies."""
        if self.half is None:
            return f"{self.mean:+.3g} (one seed)"
        digits = decimals(self.half)
        low, high = self.mean - self.half, self.mean + self.half
        return f"{self.mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"

    @property
    def level(self) -> str:
        """Returns the text of a measurement: the mean and the half width of the interval."""
        if self.half is None:
            return significant(self.mean)
        if abs(self.mean) >= 1e4:
            return f"{self.mean:.2e} ± {self.half:.1e}"
        digits = decimals(self.half)
        return f"{self.mean:.{digits}f} ± {self.half:.{digits}f}"


def decimals(size: float) -> int:
    """Returns how many decimals show two significant digits of a number of this size, but at most three."""
    return min(max(1 - math.floor(math.log10(abs(size))), 0), 3) if size else 1


def significant(value: float) -> str:
    return f"{value:.2e}" if abs(value) >= 1e4 else f"{value:.{decimals(value / 10)}f}"


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of values, one per seed, with its 95% interval."""
    return Interval(statistics.fmean(values), half_interval(values) if len(values) > 1 else None, len(values))


def values_at(rows: Sequence[dict[str, str]], scheme: str, task: str, at: float) -> dict[int, float]:
    """Returns {seed: value} of a measurement. at: its length, or its number of sequences."""
    return {
        int(row["seed"]): float(row["value"])
        for row in rows
        if row["scheme"] == scheme and row["task"] == task and float(row["at"]) == at
    }


def difference(
    rows: Sequence[dict[str, str]], first: tuple, second: tuple, at: float, second_at: float | None = None
) -> Interval | None:
    """Returns the mean and interval of first minus second, paired by seed, or None if no seed has both. first, second:
    (scheme, task). at: the length. second_at: the length for second, if it differs."""
    return paired(values_at(rows, *first, at), values_at(rows, *second, at if second_at is None else second_at))


def paired(one: dict[int, float], other: dict[int, float]) -> Interval | None:
    """Returns the mean and interval of one minus other, paired by seed, or None if no seed has both."""
    both = sorted(one.keys() & other.keys())
    return interval([one[seed] - other[seed] for seed in both]) if both else None


SHOWN, AGAINST, UNSHOWN, UNJUDGED = "as expected", "against expectation", "no difference shown", "not judged"


def outcome(found: Interval, expected: int) -> str:
    """Returns SHOWN or AGAINST if there are enough seeds and the interval excludes zero. Returns UNSHOWN if it includes
    zero, and UNJUDGED if there are too few seeds."""
    if found.seeds < MIN_SEEDS:
        return UNJUDGED
    if not found.excludes_zero:
        return UNSHOWN
    return SHOWN if found.mean * expected > 0 else AGAINST


def verdict(found: Interval, expected: int = 0) -> str:
    said = outcome(found, expected)
    if said == UNJUDGED:
        return f"{UNJUDGED}: fewer than {MIN_SEEDS} seeds"
    if said == UNSHOWN:
        return UNSHOWN
    size = "higher" if found.mean > 0 else "lower"
    return f"{size}, {said}" if expected else size
