"""Divides the channels of a head into parts. One part rotates. Kernels need not hold the other parts as pairs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .lowered import lower
from .rotary import Rotary

SMALLEST_RUN = 16  # channels that one tensor-core instruction sums over
LARGEST_TILE = 512  # the decode kernel can hold at most this many channels as pairs
LARGEST_PART = 128  # channels; tiles of keys with more channels take longer to load


class Part(NamedTuple):
    """Two contiguous runs of width / 2 channels.

    first: the first channel of the first run. If the part rotates, the first run holds the first members of its pairs,
        and the second run the second members. If pairs are interleaved, both members of a pair are side by side in one
        run.
    second: the first channel of the second run. It is first + width // 2 if the part is contiguous.
    width: the channels of both runs, a power of two, at least 32.
    rotates: whether the channels are pairs that rotate.
    pair: the column of the part's first pair in the cos/sin table, if the part rotates.
    """

    first: int
    second: int
    width: int
    rotates: bool = False
    pair: int = 0


@lru_cache(maxsize=1024)
def channel_parts(rotary: Rotary, causal: bool) -> tuple[Part, ...]:
    """Returns the parts of a head, the rotating part first, or () if kernels should rotate all channels as pairs.

    A head has parts if at most half of its channels rotate and the others can be divided into parts of at least 32
    channels. If more channels rotate, rotating the whole head in one tile takes fewer instructions. A head of more
    than LARGEST_TILE channels always has parts: if nothing rotates, its first pairs have cos 1 and sin 0.
    """
    pairs = lower(rotary, causal).rotated_pairs
    if not pairs and rotary.head_dim <= LARGEST_TILE:
        return ()
    pairs = max(1 << max(pairs - 1, 0).bit_length(), SMALLEST_RUN)
    first, half = rotary.first_channel, len(rotary.frequencies) or pairs
    # The part may be wider than the table. With interleaved pairs, the pairs beyond the table do not rotate.
    room = (rotary.head_dim - first) // 2 if rotary.interleaved else half
    if 4 * pairs > rotary.head_dim or pairs > room:
        return ()
    second = first + (pairs if rotary.interleaved else half)
    rotating = Part(first, second, 2 * pairs, True, first // 2 if rotary.interleaved else 0)
    runs = (0, first), (first + pairs, second), (second + pairs, rotary.head_dim)
    others = _joined([part for run in runs for part in _contiguous(*run)])
    return (rotating, *others) if all(part.width >= 2 * SMALLEST_RUN for part in others) else ()


@lru_cache(maxsize=1024)
def copied_parts(rotary: Rotary, causal: bool) -> tuple[Part, ...]:
    """Returns a tuple with the part that rotates if rotated copies of keys hold only this part, or () if they hold all
    channels.

    Kernels load vectors of up to 16 bytes. A vector must lie either inside or outside the copied channels. Every vector
    does, because both runs of the rotating part start at multiples of SMALLEST_RUN channels: the channels before and
    between them are divided into runs of at least SMALLEST_RUN channels, whose widths are powers of two.
    """
    return channel_parts(rotary, causal)[:1] if lower(rotary, causal).k_copies else ()


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
