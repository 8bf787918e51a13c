"""Bands: ranges of the relative distance, each with its own positions. No names of schemes, no tables."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import NamedTuple, cast

from .checks import TILE, positive


class PositionMap(NamedTuple):
    """What a row at position p rotates by: slope * min(floor(p mod chunk / group), last) + offset.

    chunk 0: p itself, without mod.
    """

    slope: float
    offset: float
    chunk: int = 0
    group: int = 1
    last: float = math.inf

    def of(self, positions):
        """Of a float tensor of positions."""
        if self.chunk:
            positions = positions % self.chunk
        if self.group > 1:
            positions = positions // self.group
        if self.last != math.inf:
            positions = positions.clamp(max=self.last)
        return self.slope * positions + self.offset


class Band(NamedTuple):
    """Distances start <= d < stop, in which q_i rotates by slope * i + offset and k_j by slope * j.

    start is an integer of at least 0, stop a larger one or inf. A scheme's bands are in order of distance and do not
    overlap; keys at distances between them are not attended to.
    """

    start: float
    stop: float
    slope: float
    offset: float

    @property
    def queries(self) -> PositionMap:
        return PositionMap(self.slope, self.offset)

    @property
    def keys(self) -> PositionMap:
        return PositionMap(self.slope, 0.0)


class MappedBand(NamedTuple):
    """A band whose rows rotate by a map of their positions; for causal attention.

    q_i rotates by slope * min(floor(i mod chunk / group), last) + offset, k_j by slope * floor(j mod chunk / group).
    chunk 0: without mod, and start and stop are distances, as in Band. Otherwise they are differences of chunks,
    start <= floor(i / chunk) - floor(j / chunk) < stop, with j <= i.
    """

    start: float
    stop: float
    slope: float
    offset: float
    group: int = 1
    chunk: int = 0
    last: float = math.inf

    @property
    def queries(self) -> PositionMap:
        return PositionMap(self.slope, self.offset, self.chunk, self.group, self.last)

    @property
    def keys(self) -> PositionMap:
        return PositionMap(self.slope, 0.0, self.chunk, self.group)


AnyBand = Band | MappedBand

EVERYWHERE = Band(0, math.inf, 1.0, 0.0)


def has_maps(bands: Iterable[AnyBand]) -> bool:
    return any(isinstance(band, MappedBand) for band in bands)


def is_plain(band: AnyBand) -> bool:
    """Whether the band shows scores their true distance."""
    return isinstance(band, Band) and (band.slope, band.offset) == (1, 0)


def chunk_of(bands: Iterable[AnyBand]) -> int:
    """The chunk that all bands count in, 0 where they count distances."""
    return next((band.chunk for band in bands if isinstance(band, MappedBand)), 0)


def distances(band: AnyBand) -> tuple[float, float]:
    """Distances [start, stop) that hold all of the band's."""
    if isinstance(band, Band) or not band.chunk:
        return band.start, band.stop
    return max((band.start - 1) * band.chunk + 1, 0), band.stop * band.chunk


def holds(band: AnyBand, position_q, position_k):
    """Whether pairs of positions, float tensors that broadcast, are in the band."""
    if isinstance(band, Band) or not band.chunk:
        distance = position_q - position_k
        return (distance >= band.start) & (distance < band.stop)
    difference = position_q // band.chunk - position_k // band.chunk
    return (difference >= band.start) & (difference < band.stop) & (position_k <= position_q)


def checked_bands(bands) -> tuple[AnyBand, ...]:
    """As a tuple of Band, and of MappedBand where a band maps positions.

    Raises:
        TypeError, ValueError: the band, its field, what was expected and what came.
    """
    if not isinstance(bands, (tuple, list)):
        raise TypeError(f"bands: expected a tuple of flashrope.Band, got {type(bands).__name__}")
    checked: list[AnyBand] = []
    for n, band in enumerate(bands):
        checked.append(_checked(f"bands[{n}]", band))
        start, before = checked[-1].start, checked[n - 1].stop if n else 0
        if start < before:
            raise ValueError(
                f"bands[{n}].start: expected at least {before:g}, where bands[{n - 1}] stops, got {start:g}; bands are "
                "in order of distance and do not overlap"
            )
        if (chunk := chunk_of(checked[-1:])) != chunk_of(checked[:1]):
            raise ValueError(
                f"bands[{n}].chunk: expected {chunk_of(checked[:1])} as in bands[0], got {chunk}; all bands of a "
                "scheme count distances, or differences of the same chunks"
            )
    return tuple(checked)


def _checked(name: str, band) -> AnyBand:
    kinds = {len(kind._fields): kind for kind in (Band, MappedBand)}
    if not isinstance(band, (tuple, list)) or len(band) not in kinds:
        raise TypeError(f"{name}: expected a Band (start, stop, slope, offset), got {band!r}")
    for field, value in zip(kinds[len(band)]._fields, band, strict=True):
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{name}.{field}: expected a number, got {value!r}")
    start, stop, slope, offset, *of_map = band
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
    plain = Band(int(start), stop if stop == math.inf else int(stop), float(slope), float(offset))
    return _with_map(name, plain, *of_map) if of_map else plain


def _with_map(name: str, band: Band, group, chunk, last) -> AnyBand:
    """A MappedBand, or the Band itself where the map changes no position."""
    if not (group >= 1 and group == math.floor(group)):
        raise ValueError(f"{name}.group: expected a positive whole number, got {group!r}")
    if not (chunk >= 0 and chunk % TILE == 0):
        raise ValueError(f"{name}.chunk: expected 0 or a multiple of {TILE}, the rows of a tile, got {chunk!r}")
    if not (last >= 0 and (last == math.inf or last == math.floor(last))):
        raise ValueError(f"{name}.last: expected a whole number of at least 0, or inf, got {last!r}")
    if (group, chunk, last) == (1, 0, math.inf):
        return band
    if band.offset < 0:
        raise ValueError(
            f"{name}.offset: expected at least 0 in a band that maps positions, got {band.offset:g}; the first rows "
            "would stand below position 0"
        )
    return MappedBand(*band, int(group), int(chunk), last if last == math.inf else int(last))


def two_sided(bands: tuple[AnyBand, ...]) -> tuple[Band, ...]:
    """The bands over all d: each band and its mirror image (d -> -d, offset -> -offset), merged at d = 0.

    Raises:
        ValueError: a band maps positions, or d = 0 is in a band and in its mirror image, which rotate by different
            positions.
    """
    if has_maps(bands):
        raise ValueError(
            "causal: expected True for a scheme that maps positions (self_extend, dual_chunk), got False; its maps are "
            "defined for keys at or before the query"
        )
    mirrored = []
    for n, (start, stop, slope, offset) in enumerate(cast(tuple[Band, ...], bands)):
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


def merged(bands: Iterable[AnyBand]) -> tuple[AnyBand, ...]:
    """Without empty bands, and with equal neighbors as one."""
    kept: list[AnyBand] = []
    for band in bands:
        if band.start >= band.stop:
            continue
        last = kept[-1] if kept else None
        if last and last.stop == band.start and last[2:] == band[2:]:
            kept[-1] = last._replace(stop=band.stop)
        else:
            kept.append(band)
    return tuple(kept)


def clipped(band: AnyBand, start: float, stop: float) -> AnyBand:
    return band._replace(start=max(band.start, start), stop=min(band.stop, stop))


def band_text(band: AnyBand) -> str:
    """For people: "d * 0.25 + 6 for d >= 8"."""
    if isinstance(band, MappedBand):
        return _mapped_text(band)
    if band.slope == 0:
        distance = f"{band.offset:g}"
    else:
        distance = "d" if band.slope == 1 else f"d * {band.slope:.6g}"
        distance += f" + {band.offset:.6g}" if band.offset else ""
    if band.stop == math.inf:
        return f"{distance} for d >= {band.start:g}"
    return f"{distance} for {band.start:g} <= d < {band.stop:g}"


def _mapped_text(band: MappedBand) -> str:
    """ "floor(i / 8) + 14 - floor(j / 8) for d >= 16"; n is the difference of chunks."""
    of_q, of_k = (f"{x} mod {band.chunk}" if band.chunk else x for x in "ij")
    if band.group > 1:
        of_q, of_k = (f"floor({f'({x})' if band.chunk else x} / {band.group})" for x in (of_q, of_k))
    if band.last != math.inf:
        of_q = f"min({of_q}, {band.last:g})"
    slope = "" if band.slope == 1 else f"{band.slope:.6g} * "
    of_queries = [slope + of_q] * (band.last != 0) + [f"{band.offset:.10g}"] * (band.offset != 0 or band.last == 0)
    text, counted = f"{' + '.join(of_queries)} - {slope}{of_k}", "n" if band.chunk else "d"
    if band.stop == math.inf:
        return f"{text} for {counted} >= {band.start:g}"
    return f"{text} for {band.start:g} <= {counted} < {band.stop:g}"


# ---- the bands of ReRoPE, Self-Extend and dual chunk attention, which replace the true distance


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
