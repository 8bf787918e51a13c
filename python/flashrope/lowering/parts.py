"""A head in parts: one that rotates, and others that a kernel need neither rotate nor hold as pairs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..rotary.rotary import Rotary
from .lowered import lower

SMALLEST_RUN = 16  # channels that one product of tensor cores adds up
LARGEST_TILE = 512  # channels that the decode kernel takes as pairs
LARGEST_PART = 128  # channels; larger tiles of keys take longer to fill


class Part(NamedTuple):
    """Two runs of width / 2 channels.

    first: the first channel of the first run. In a part that rotates, this run holds the first members of its pairs,
        or with interleaved pairs all of them lie in the two runs together.
    second: the first channel of the second run; first + width // 2 where the part is contiguous.
    width: a power of two, at least 32.
    rotates: whether the runs are pairs that rotate.
    pair: the first pair of a part that rotates, in the cos/sin table.
    """

    first: int
    second: int
    width: int
    rotates: bool = False
    pair: int = 0


@lru_cache(maxsize=1024)
def channel_parts(rotary: Rotary, causal: bool) -> tuple[Part, ...]:
    """Returns the parts of a head, the rotating one first, or () where all channels are better taken as pairs.

    A head has parts where at most half of its channels rotate and the others divide into parts of 32 channels and more.
    With more rotating pairs, rotating all of them in one tile takes fewer instructions. Beyond LARGEST_TILE channels a
    head is always divided: if nothing rotates, the first pairs have cos 1 and sin 0.
    """
    pairs = lower(rotary, causal).rotated_pairs
    if not pairs and rotary.head_dim <= LARGEST_TILE:
        return ()
    pairs = max(1 << max(pairs - 1, 0).bit_length(), SMALLEST_RUN)
    first, half = rotary.first_channel, len(rotary.frequencies) or pairs
    # Interleaved pairs of the table are followed by others that do not rotate.
    room = (rotary.head_dim - first) // 2 if rotary.interleaved else half
    if 4 * pairs > rotary.head_dim or pairs > room:
        return ()
    second = first + (pairs if rotary.interleaved else half)
    rotating = Part(first, second, 2 * pairs, True, first // 2 if rotary.interleaved else 0)
    runs = (0, first), (first + pairs, second), (second + pairs, rotary.head_dim)
    others = _joined([part for run in runs for part in _contiguous(*run)])
    return (rotating, *others) if all(part.width >= 2 * SMALLEST_RUN for part in others) else ()


def _contiguous(start: int, stop: int) -> Iterator[Part]:
    """Returns the parts of a run, the widest first."""
    while start < stop:
        width = min(1 << (stop - start).bit_length() - 1, LARGEST_PART)
        yield Part(start, start + width // 2, width)
        start += width


def _joined(parts: list[Part]) -> list[Part]:
    """Joins contiguous parts of equal width, two by two, up to LARGEST_PART channels."""
    width = SMALLEST_RUN
    while width < LARGEST_PART:
        same = [x for x in parts if x.width == width and x.second == x.first + width // 2]
        for a, b in zip(same[::2], same[1::2], strict=False):
            parts = [x for x in parts if x not in (a, b)] + [Part(a.first, b.first, 2 * width)]
        width *= 2
    return sorted(parts)
