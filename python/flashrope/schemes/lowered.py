"""Lowers a scheme to the rotations and band rows that kernels work with, independently of devices and kernels.

Rotations are numbered. Rotation 0 changes nothing. Rotation n > 0 rotates position p by the angle
``(slope * p + offset) * inv_freq``. The cos/sin tables (``cos_sin``) have one entry per rotation. If a scheme maps
positions, each rotation has a map from the position of a query or key to p.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .bands import PositionMap, chunk_of, have_maps
from .rotary import Rotary

UNBOUNDED = 1 << 30  # kernels count distances in 32 bits, with room to add a position


class LoweredBand(NamedTuple):
    """Distances start <= d < stop, and the rotations of queries and keys in the band.

    start, stop: distances, or differences of chunks if the bands count chunks.
    q_rotation, k_rotation: rotation numbers.
    k_copy: index into ``Lowered.k_copies``, or -1 if the band reads raw keys.
    dq_step, dk_step: the rotations that re-express the accumulated dQ and dK in this band's rotated basis after the
        previous band's tiles, so that one accumulator serves all bands. If the scheme maps positions, no single
        rotation can do this. In that case dq_step is q_rotation without its scale factor, and dk_step is k_rotation.
    """

    start: int
    stop: int
    q_rotation: int
    k_rotation: int
    k_copy: int
    dq_step: int
    dk_step: int


class RowMap(NamedTuple):
    """Maps a row's position to the p by which it rotates: min(floor((position mod chunk) / group), last). If chunk is
    0, there is no mod.

    chunk, group, last: the fields of ``bands.PositionMap``.
    is_query: 1 for rotations of queries, 0 for rotations of keys.
    """

    chunk: int
    group: int
    last: int
    is_query: int


class Lowered(NamedTuple):
    """A scheme, lowered for one value of ``causal``.

    rotations: (slope, offset) of every rotation. The first is (0, 0), the identity.
    scales: for every rotation, the factor by which it multiplies the channels that form pairs. The factor is the
        scheme's ``rotated_scale`` for rotations of queries, else 1.
    k_copies: the rotation of each rotated copy of k that the bands read. Equal rotations share a copy.
    k_stops: for each of k_copies, the distance at which the last band that reads it stops.
    rotated_bands: bit b is set if band b rotates its keys.
    rotated_pairs: number of pairs up to the last pair that rotates or is scaled.
    reach: an upper bound of the number of distances that the bands cover.
    maps: one RowMap for every rotation if the scheme maps positions, else empty. The first RowMap's ``chunk`` is the
        chunk length if the bands count chunks, and 0 if they count distances.
    """

    rotations: tuple[tuple[float, float], ...]
    scales: tuple[float, ...]
    bands: tuple[LoweredBand, ...]
    k_copies: tuple[int, ...]
    k_stops: tuple[int, ...]
    rotated_bands: int
    rotated_pairs: int
    reach: int
    maps: tuple[RowMap, ...] = ()

    @property
    def q_rotations(self) -> tuple[int, ...]:
        return tuple(band.q_rotation for band in self.bands)

    @property
    def rotated_key_ranges(self) -> tuple[tuple[int, int], ...]:
        """Returns, for each rotated copy of k, its rotation and its entry of ``k_stops``."""
        return tuple(zip(self.k_copies, self.k_stops, strict=True))


@lru_cache(maxsize=1024)
def lower(rotary: Rotary, causal: bool) -> Lowered:
    bands = rotary.bands_for(causal)
    numbers: dict[tuple[float, ...], int] = {(1.0, 0.0, 0.0): 0}
    mapped, rotates, chunk = have_maps(bands), any(rotary.frequencies), _bound(chunk_of(bands))

    def number(rotation: PositionMap, is_query: bool, scale: float = 1.0) -> int:
        if scale == 1 and (not rotates or (rotation.slope, rotation.offset) == (0, 0)):
            return 0
        row_map = (*map(_bound, rotation[2:]), int(is_query)) if mapped else ()
        return numbers.setdefault((scale, rotation.slope, rotation.offset, *row_map), len(numbers))

    rows: list[tuple[int, ...]] = []
    before: tuple[PositionMap, PositionMap] | None = None
    for band in bands:
        q_map, k_map = now = band.queries, band.keys
        numbered = number(q_map, True, rotary.rotated_scale), number(k_map, False)
        if mapped:
            steps: tuple[int, ...] = number(q_map, True), numbered[1]
        else:
            steps = tuple(number(_step(a, b), False) for a, b in zip(now, before or now, strict=True))
        rows.append((_bound(band.start, chunk), _bound(band.stop, chunk), *numbered, *steps))
        before = now
    k_copies = tuple(dict.fromkeys(k_rotation for *_, k_rotation, _, _ in rows if k_rotation))
    ranges = [tuple(map(_bound, band.distances)) for band in bands]
    return Lowered(
        rotations=tuple((slope, offset) for _, slope, offset, *_ in numbers),
        scales=tuple(scale for scale, *_ in numbers),
        bands=tuple(
            LoweredBand(start, stop, q_number, k_number, k_copies.index(k_number) if k_number else -1, *steps)
            for start, stop, q_number, k_number, *steps in rows
        ),
        k_copies=k_copies,
        k_stops=tuple(
            max(stop for (_, stop), row in zip(ranges, rows, strict=True) if row[3] == copy) for copy in k_copies
        ),
        rotated_bands=sum((k_number > 0) << b for b, (_, _, _, k_number, _, _) in enumerate(rows)),
        rotated_pairs=len(rotary.frequencies)
        if rotary.rotated_scale != 1
        else max((m + 1 for m, frequency in enumerate(rotary.frequencies) if frequency), default=0),
        reach=max((stop for _, stop in ranges), default=0) - min((start for start, _ in ranges), default=0),
        maps=tuple(RowMap._make(row) if row else RowMap(chunk, 1, UNBOUNDED, 0) for _, _, _, *row in numbers)
        if mapped
        else (),
    )


def _step(rotation: PositionMap, before: PositionMap) -> PositionMap:
    return PositionMap(rotation.slope - before.slope, rotation.offset - before.offset)


def _bound(distance: float, chunk: int = 0) -> int:
    """Clamps a distance, or a difference of chunks of this length, to the range that kernels can compute."""
    limit = UNBOUNDED // max(chunk, 1)
    return int(max(-limit, min(limit, distance)))
