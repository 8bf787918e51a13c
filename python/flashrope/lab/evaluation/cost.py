"""Estimates the time of a run from short passes."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_by_length(read: Callable[[int], object], longest: int) -> Callable[[int], float]:
    """Returns a function that estimates the seconds of a pass over n tokens as a n + b n^2, for n up to ``longest``.

    read: a function that makes a pass over n tokens. It is called three times, with at most an eighth of ``longest``.
    """
    short, long = max(longest // 16, 1), max(longest // 8, 2)
    times = []
    for length in (short, short, long):  # the first pass warms up
        began = time.monotonic()
        read(length)
        times.append(time.monotonic() - began)
    square = max((times[2] / long - times[1] / short) / (long - short), 0.0)
    linear = max(times[2] / long - square * long, 0.0)
    return lambda n: linear * n + square * n * n
