"""Bands: ranges of the relative distance, each with its own positions. No names of schemes, no tables."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple


class Band(NamedTuple):
    """Distances start <= d < stop, in which q_i rotates by slope * i + offset and k_j by slope * j.

    start is an integer of at least 0, stop a larger one or inf. A scheme's bands are in order of distance and do not
    overlap; keys at distances between them are not attended to.
    """

    start: float
    stop: float
    slope: float
    offset: float


EVERYWHERE = Band(0, math.inf, 1.0, 0.0)


def checked_bands(bands) -> tuple[Band, ...]:
    """As a tuple of Band.

    Raises:
        TypeError, ValueError: the band, its field, what was expected and what came.
    """
    if not isinstance(bands, (tuple, list)):
        raise TypeError(f"bands: expected a tuple of flashrope.rotary.Band, got {type(bands).__name__}")
    checked: list[Band] = []
    for n, band in enumerate(bands):
        checked.append(_checked(f"bands[{n}]", band))
        start, before = checked[-1].start, checked[n - 1].stop if n else 0
        if start < before:
            raise ValueError(
                f"bands[{n}].start: expected at least {before:g}, where bands[{n - 1}] stops, got {start:g}; bands are "
                "in order of distance and do not overlap"
            )
    return tuple(checked)


def _checked(name: str, band) -> Band:
    if not isinstance(band, (tuple, list)) or len(band) != len(Band._fields):
        raise TypeError(f"{name}: expected a Band (start, stop, slope, offset), got {band!r}")
    for field, value in zip(Band._fields, band, strict=True):
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name}.{field}: expected a number, got {value!r}")
    start, stop, slope, offset = band
    if not (start >= 0 and start != math.inf and start == math.floor(start)):
        raise ValueError(
            f"{name}.start: expected a whole number of at least 0, got {start!r}; bands hold the distances to earlier "
            "keys, and without causality their mirror images those to later ones"
        )
    if not (stop > start and (stop == math.inf or stop == math.floor(stop))):
        raise ValueError(f"{name}.stop: expected a whole number above start = {start:g}, or inf, got {stop!r}")
    for field, value in (("slope", slope), ("offset", offset)):
        if not math.isfinite(value):
            raise ValueError(f"{name}.{field}: expected a finite number, got {value!r}")
    return Band(int(start), stop if stop == math.inf else int(stop), float(slope), float(offset))


def two_sided(bands: tuple[Band, ...]) -> tuple[Band, ...]:
    """The bands over all d: each band and its mirror image (d -> -d, offset -> -offset), merged at d = 0.

    Raises:
        ValueError: d = 0 is in a band and in its mirror image, which rotate by different positions.
    """
    mirrored = []
    for n, (start, stop, slope, offset) in enumerate(bands):
        if start > 0:
            mirrored += [Band(start, stop, slope, offset), Band(1 - stop, 1 - start, slope, -offset)]
        elif offset == 0:
            mirrored.append(Band(1 - stop, stop, slope, offset))
        else:
            raise ValueError(
                f"bands[{n}].offset: expected 0 in a band that starts at distance 0, for attention that is not causal, "
                f"got {offset:g}; distance 0 would be in the band and in its mirror image, with {-offset:g}"
            )
    return tuple(mirrored)


def merged(bands) -> tuple[Band, ...]:
    """Without empty bands, and with equal neighbors as one."""
    kept: list[Band] = []
    for band in bands:
        if band.start >= band.stop:
            continue
        last = kept[-1] if kept else None
        if last and (last.stop, last.slope, last.offset) == (band.start, band.slope, band.offset):
            kept[-1] = last._replace(stop=band.stop)
        else:
            kept.append(band)
    return tuple(kept)


def clipped(band: Band, start: float, stop: float) -> Band:
    return band._replace(start=max(band.start, start), stop=min(band.stop, stop))


def band_text(band: Band) -> str:
    """For people: "d * 0.25 + 6 for d >= 8"."""
    if band.slope == 0:
        distance = f"{band.offset:g}"
    else:
        distance = "d" if band.slope == 1 else f"d * {band.slope:.6g}"
        distance += f" + {band.offset:.6g}" if band.offset else ""
    if band.stop == math.inf:
        return f"{distance} for d >= {band.start:g}"
    return f"{distance} for {band.start:g} <= d < {band.stop:g}"
