"""Lowering: a scheme as the rotations and band rows that kernels work with. No devices, no kernels.

Rotations are numbered. Rotation 0 is none; rotation n > 0 rotates position p by the angle
``(slope * p + offset) * inv_freq``. The cos/sin tables (``cos_sin``) have one entry per rotation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .rotary import Rotary

UNBOUNDED = 1 << 30  # kernels count distances in 32 bits, with room to add a position


class LoweredBand(NamedTuple):
    """Distances start <= d < stop, and what queries and keys of the band rotate by.

    q_rotation, k_rotation: rotation numbers.
    k_copy: index into ``Lowered.k_copies``; -1 where the band reads raw keys.
    dq_step, dk_step: the rotations that take a gradient from the previous band's frame to this band's.
    """

    start: int
    stop: int
    q_rotation: int
    k_rotation: int
    k_copy: int
    dq_step: int
    dk_step: int


class Lowered(NamedTuple):
    """A scheme for one value of ``causal``.

    rotations: (slope, offset) of every rotation; the first is (0, 0), no rotation.
    k_copies: the rotation of each rotated copy of k that the bands read, one per distinct slope.
    k_stops: for each of k_copies, the distance at which the last band that reads it stops.
    rotated_bands: bit b is set where band b rotates its keys.
    rotated_pairs: pairs up to the last one with a nonzero frequency.
    reach: how many distances, at most, the bands cover.
    """

    rotations: tuple[tuple[float, float], ...]
    bands: tuple[LoweredBand, ...]
    k_copies: tuple[int, ...]
    k_stops: tuple[int, ...]
    rotated_bands: int
    rotated_pairs: int
    reach: int

    @property
    def q_rotations(self) -> tuple[int, ...]:
        return tuple(band.q_rotation for band in self.bands)

    @property
    def rotated_key_ranges(self) -> tuple[tuple[int, int], ...]:
        """(rotation, distance at which it stops) for each rotated copy of k."""
        return tuple(zip(self.k_copies, self.k_stops, strict=True))


@lru_cache(maxsize=1024)
def lower(rotary: Rotary, causal: bool) -> Lowered:
    numbers: dict[tuple[float, float], int] = {(0.0, 0.0): 0}
    rotates = any(rotary.frequencies)

    def number(rotation: tuple[float, float]) -> int:
        return numbers.setdefault(rotation, len(numbers)) if rotates else 0

    rows, before = [], None
    for start, stop, slope, offset in rotary.bands_for(causal):
        of_q, of_k = (slope, offset), (slope, 0.0)
        dq_step, dk_step = ((a - c, b - d) for (a, b), (c, d) in zip((of_q, of_k), before or (of_q, of_k), strict=True))
        rows.append((_bound(start), _bound(stop), number(of_q), number(of_k), number(dq_step), number(dk_step)))
        before = of_q, of_k
    k_copies = tuple(dict.fromkeys(k_rotation for *_, k_rotation, _, _ in rows if k_rotation))
    return Lowered(
        rotations=tuple(numbers),
        bands=tuple(
            LoweredBand(start, stop, of_q, of_k, k_copies.index(of_k) if of_k else -1, dq_step, dk_step)
            for start, stop, of_q, of_k, dq_step, dk_step in rows
        ),
        k_copies=k_copies,
        k_stops=tuple(max(stop for _, stop, _, of_k, _, _ in rows if of_k == copy) for copy in k_copies),
        rotated_bands=sum((of_k > 0) << b for b, (_, _, _, of_k, _, _) in enumerate(rows)),
        rotated_pairs=max((m + 1 for m, frequency in enumerate(rotary.frequencies) if frequency), default=0),
        reach=max((stop for _, stop, *_ in rows), default=0) - min((start for start, *_ in rows), default=0),
    )


def _bound(distance: float) -> int:
    return int(max(-UNBOUNDED, min(UNBOUNDED, distance)))
