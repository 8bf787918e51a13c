"""The bands of the schemes that show scores another distance than the true one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .bands import AnyBand, Band, MappedBand, clipped
from .fields import positive


def rectified(window: int, factor: float | None) -> Band:
    """``Rotary.rectify`` beyond its window."""
    slope = 0.0
    if factor is not None:
        slope = 1.0 / positive("factor", factor, finite=False)
        if slope == math.inf:
            raise ValueError(f"factor: too small to divide by, {factor!r}")
    return Band(window, math.inf, slope, window - window * slope)


def grouped(window: int, group: int) -> MappedBand:
    """``Rotary.self_extend`` beyond its window."""
    return MappedBand(window, math.inf, 1.0, float(window - window // group), group)


def chunked(chunk: int, last: int) -> list[AnyBand]:
    """``Rotary.dual_chunk``; last: the largest position that a query rotates by."""
    return [
        MappedBand(0, 1, 1.0, 0.0, 1, chunk),
        MappedBand(1, 2, 1.0, float(chunk), 1, chunk, last - chunk),
        MappedBand(2, math.inf, 1.0, float(last), 1, chunk, 0),
    ]


def beyond_window(bands: Iterable[AnyBand], far: AnyBand) -> list[AnyBand]:
    """``bands`` below the start of ``far``, and ``far`` from there on as long as they reach."""
    return [b for reach in bands for b in (clipped(reach, 0, far.start), clipped(far, 0, reach.stop))]
