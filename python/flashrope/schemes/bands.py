"""Defines bands: ranges of the distance between query and key. Each band has its own maps of positions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .scheme_checks import LARGEST, TILE, positive


class PositionMap(NamedTuple):
    """Maps the position p of a row to the position by which it rotates.

    The result is slope * min(floor((p mod chunk) / group), last) + offset. If chunk is 0, there is no mod.
    """

    slope: float
    offset: float
    chunk: int = 0
    group: int = 1
    last: float = math.inf

    def of(self, positions):
        """Returns the mapped positions, float64. Integers would be multiplied in torch's default dtype otherwise."""
        positions = positions.to(torch.float64)
        if self.chunk:
            positions = positions % self.chunk
        if self.group > 1:
            positions = positions // self.group
        if self.last != math.inf:
            positions = positions.clamp(max=self.last)
        return self.slope * positions + self.offset


STILL = PositionMap(0.0, 0.0)


class Band(NamedTuple):
    """A range of distances, start <= d < stop, in which q_i rotates by slope * i + offset and k_j by slope * j.

    start is an integer of at least 0. stop is a larger integer or inf. A scheme's bands are in order of distance and do
    not overlap. Keys at distances between two bands are not attended to.

    The fields `group`, `chunk` and `last` define a map of positions. A band that sets any of them is for causal
    attention. q_i rotates by slope * min(floor(i mod chunk / group), last) + offset, and k_j by slope *
    floor(j mod chunk / group). If chunk is 0, there is no mod. If chunk is not 0, start and stop count chunks: the band
    holds the keys j <= i with start <= floor(i / chunk) - floor(j / chunk) < stop.

    keys_rotated: the caller's keys are already rotated, so only queries rotate.
    """

    start: float
    stop: float
    slope: float
    offset: float
    group: int = 1
    chunk: int = 0
    last: float = math.inf
    keys_rotated: bool = False

    @property
    def queries(self) -> PositionMap:
        return PositionMap(self.slope, self.offset, self.chunk, self.group, self.last)

    @property
    def keys(self) -> PositionMap:
        return STILL if self.keys_rotated else PositionMap(self.slope, 0.0, self.chunk, self.group)

    @property
    def maps_positions(self) -> bool:
        return (self.group, self.chunk, self.last) != (1, 0, math.inf)

    @property
    def is_plain(self) -> bool:
        """Whether scores in the band see the true distance."""
        return self[2:] == EVERYWHERE[2:]

    @property
    def distances(self) -> tuple[float, float]:
        """Returns a range [start, stop) that contains all distances of the band."""
        if not self.chunk:
            return self.start, self.stop
        return max((self.start - 1) * self.chunk + 1, 0), self.stop * self.chunk

    def holds(self, position_q, position_k):
        """Whether each pair (position_q, position_k) is in the band. The positions are float tensors that broadcast."""
        if not self.chunk:
            distance = position_q - position_k
            return (distance >= self.start) & (distance < self.stop)
        difference = position_q // self.chunk - position_k // self.chunk
        return (difference >= self.start) & (difference < self.stop) & (position_k <= position_q)


EVERYWHERE = Band(0, math.inf, 1.0, 0.0)


def have_maps(bands: Iterable[Band]) -> bool:
    """Whether a band of a scheme maps positions."""
    return any(band.maps_positions for band in bands)


def chunk_of(bands: tuple[Band, ...]) -> int:
    """Returns the length of the chunks that the bands of a scheme count, or 0 if they count distances."""
    return bands[0].chunk


def shared_map(bands: Iterable[Band]) -> PositionMap | None:
    """Returns the map by which all queries and keys of the bands rotate, or None if there are several maps."""
    maps = {each for band in bands for each in (band.queries, band.keys)}
    return maps.pop() if len(maps) == 1 else None


def checked_bands(bands) -> tuple[Band, ...]:
    """Checks bands and returns them as a tuple of Band.

    Raises:
        TypeError, ValueError: a field of a band is invalid. The message names the band and the field.
    """
    if not isinstance(bands, (tuple, list)):
        raise TypeError(f"bands: expected a tuple of flashrope.Band, got {type(bands).__name__}")
    if not bands:
        raise ValueError(f"bands: expected at least one band, got {bands!r}; queries would see no keys")
    checked: list[Band] = []
    for n, band in enumerate(bands):
        checked.append(_checked(f"bands[{n}]", band))
        start, before = checked[-1].start, checked[n - 1].stop if n else 0
        if start < before:
            raise ValueError(
                f"bands[{n}].start: expected at least {before:g}, where bands[{n - 1}] stops, got {start:g}; bands are "
                "in order of distance and do not overlap"
            )
        if (chunk := checked[-1].chunk) != checked[0].chunk:
            raise ValueError(
                f"bands[{n}].chunk: expected {checked[0].chunk}, the chunk of bands[0], got {chunk}; all bands of a "
                "scheme count distances, or differences of the same chunks"
            )
    return tuple(checked)


def _checked(name: str, band) -> Band:
    if not isinstance(band, (tuple, list)) or not 4 <= len(band) <= len(Band._fields):
        raise TypeError(f"{name}: expected a Band (start, stop, slope, offset), got {band!r}")
    band = Band(*band)
    for field, value in zip(Band._fields[:-1], band[:-1], strict=True):
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name}.{field}: expected a number, got {value!r}")
    start, stop, slope, offset, group, chunk, last, keys_rotated = band
    if not (start >= 0 and start != math.inf and start == math.floor(start)):
        raise ValueError(
            f"{name}.start: expected a whole number of at least 0, got {start!r}; bands hold the distances to earlier "
            "keys; if attention is not causal, their mirror images hold the distances to later keys"
        )
    if not (stop > start and (stop == math.inf or stop == math.floor(stop))):
        raise ValueError(f"{name}.stop: expected a whole number above start = {start:g}, or inf, got {stop!r}")
    for field, value in (("slope", slope), ("offset", offset)):
        if not math.isfinite(value):
            raise ValueError(f"{name}.{field}: expected a finite number, got {value!r}")
    if not (group >= 1 and group == math.floor(group)):
        raise ValueError(f"{name}.group: expected a positive whole number, got {group!r}")
    if not (chunk >= 0 and chunk % TILE == 0):
        raise ValueError(f"{name}.chunk: expected 0 or a multiple of {TILE}, the rows of a tile, got {chunk!r}")
    if not (last >= 0 and (last == math.inf or last == math.floor(last))):
        raise ValueError(f"{name}.last: expected a whole number of at least 0, or inf, got {last!r}")
    if band.maps_positions and offset < 0:
        raise ValueError(
            f"{name}.offset: expected at least 0 in a band that maps positions, got {offset:g}; the first rows "
            "would have positions below 0"
        )
    for field, value in zip(Band._fields, band[:-1], strict=False):
        if abs(value) > LARGEST and not (field in ("stop", "last") and value == math.inf):
            raise ValueError(f"{name}.{field}: expected a magnitude of at most 2^30, got {value!r}")
    stop, last = (x if x == math.inf else int(x) for x in (stop, last))
    if not isinstance(keys_rotated, bool):
        raise TypeError(f"{name}.keys_rotated: expected True or False, got {keys_rotated!r}")
    return Band(int(start), stop, float(slope), float(offset), int(group), int(chunk), last, keys_rotated)


def two_sided(bands: tuple[Band, ...]) -> tuple[Band, ...]:
    """Returns the bands over all d: each band and its mirror image (d -> -d, offset -> -offset), merged at d = 0.

    Raises:
        ValueError: a band maps positions, or d = 0 is in a band and in its mirror image, which rotate by different
            positions.
    """
    if have_maps(bands):
        raise ValueError(
            "causal: expected True for a scheme that maps positions (self_extend, dual_chunk), got False; these maps "
            "are defined only for keys at or before the query"
        )
    mirrored = []
    for n, band in enumerate(bands):
        if band.start > 0:
            mirrored += [band, band._replace(start=1 - band.stop, stop=1 - band.start, offset=-band.offset)]
        elif band.offset == 0:
            mirrored.append(band._replace(start=1 - band.stop))
        else:
            raise ValueError(
                f"bands[{n}].offset: expected 0 in a band that starts at distance 0, for attention that is not causal, "
                f"got {band.offset:g}; distance 0 would also be in the mirror image, whose offset is {-band.offset:g}"
            )
    return tuple(mirrored)


def merged(bands: Iterable[Band]) -> tuple[Band, ...]:
    """Returns the bands without empty bands. Adjacent bands that map positions in the same way become one band."""
    kept: list[Band] = []
    for band in bands:
        if band.start >= band.stop:
            continue
        last = kept[-1] if kept else None
        if last and last.stop == band.start and last[2:] == band[2:]:
            kept[-1] = last._replace(stop=band.stop)
        else:
            kept.append(band)
    return tuple(kept)


def clipped(band: Band, start: float, stop: float) -> Band:
    return band._replace(start=max(band.start, start), stop=min(band.stop, stop))


def band_text(band: Band) -> str:
    """Returns a readable text, such as "d * 0.25 + 6 for d >= 8"."""
    if band.maps_positions:
        distance = _mapped_text(band)
    elif band.slope == 0:
        distance = f"{band.offset:g}"
    else:
        distance = "d" if band.slope == 1 else f"d * {band.slope:.6g}"
        distance += f" {'-' if band.offset < 0 else '+'} {abs(band.offset):.6g}" if band.offset else ""
    counted = "n" if band.chunk else "d"  # n: the difference of the query's and the key's chunk
    if band.stop == math.inf:
        return f"{distance} for {counted} >= {band.start:g}"
    return f"{distance} for {band.start:g} <= {counted} < {band.stop:g}"


def bands_text(bands: Iterable[Band]) -> str:
    """Returns a readable text of the bands, and of the gaps before and between them."""
    parts, seen = [], 0.0
    for band in bands:
        if band.start > seen:
            parts.append(f"unseen for {seen:g} <= {'n' if band.chunk else 'd'} < {band.start:g}")
        parts.append(band_text(band))
        seen = band.stop
    return "; ".join(parts)


def _mapped_text(band: Band) -> str:
    """Returns a readable text of mapped positions, such as "floor(i / 8) + 14 - floor(j / 8)"."""
    of_q, of_k = (f"{x} mod {band.chunk}" if band.chunk else x for x in "ij")
    if band.group > 1:
        of_q, of_k = (f"floor({f'({x})' if band.chunk else x} / {band.group})" for x in (of_q, of_k))
    if band.last != math.inf:
        of_q = f"min({of_q}, {band.last:g})"
    slope = "" if band.slope == 1 else f"{band.slope:.6g} * "
    of_queries = [slope + of_q] * (band.last != 0) + [f"{band.offset:.10g}"] * (band.offset != 0 or band.last == 0)
    return f"{' + '.join(of_queries)} - {slope}{of_k}"


# ---- bands that replace the true distance: ReRoPE, STRING, Self-Extend, dual chunk attention


def rectified(window: int, factor: float | None) -> Band:
    """Returns the band of ``Rotary.rectify`` beyond its window."""
    slope = 0.0
    if factor is not None:
        slope = 1.0 / positive("factor", factor, finite=False)
        if slope == math.inf:
            raise ValueError(f"factor: too small to divide by, {factor!r}")
    return Band(window, math.inf, slope, window - window * slope)


def shifted(start: int, window: int) -> Band:
    """Returns the band of ``Rotary.string`` from start on, where scores see the distance d - start + window."""
    return Band(start, math.inf, 1.0, float(window - start))


def grouped(window: int, group: int) -> Band:
    """Returns the band of ``Rotary.self_extend`` beyond its window."""
    return Band(window, math.inf, 1.0, float(window - window // group), group)


def chunked(chunk: int, last: int) -> list[Band]:
    """Returns the bands of ``Rotary.dual_chunk``. last: the largest position by which a query rotates."""
    return [
        Band(0, 1, 1.0, 0.0, 1, chunk),
        Band(1, 2, 1.0, float(chunk), 1, chunk, last - chunk),
        Band(2, math.inf, 1.0, float(last), 1, chunk, 0),
    ]


def beyond_window(bands: Iterable[Band], far: Band) -> list[Band]:
    """Returns ``bands`` with distances of far.start and more replaced by ``far``."""
    return [b for reach in bands for b in (clipped(reach, 0, far.start), clipped(far, 0, reach.stop))]
