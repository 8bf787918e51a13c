"""Divides cached tokens with explicit positions (calls/visible.py) into runs of consecutive slots and positions.

Attention of a run of queries to a run of keys is attention between two sequences that begin at different positions.
Later keys of a run are at shorter distances, so a causal mask only raises the start of the bands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...calls import addresses
from ...calls.cache_tables import CachePositions, CacheTables
from ...calls.visible import VisibleTokens, of_queries, visible_tokens
from ...schemes.bands import Band, clipped

FARTHEST = 2.0**38  # positions are clamped to [-FARTHEST, FARTHEST]; to the kernels, distances of 2^40 are infinite
LONG_ENOUGH = 8  # average keys per run. With shorter runs, masks over all keys are faster.


def unsupported_positions(positions: CachePositions) -> str:
    """Returns "", because this backend supports all tables."""
    return ""


class Run(NamedTuple):
    """Visible keys of a sequence, in slots [slot, slot + keys), at position, position + 1, ..."""

    slot: int
    keys: int
    position: float
    order: int  # rank of the first key among the sequence's visible keys


class Rows(NamedTuple):
    """Query rows of a sequence: [row, row + rows), at position, position + 1, ..."""

    row: int
    rows: int
    position: float
    order: int  # the first row sees the visible keys up to this rank, inclusive

    @classmethod
    def last(cls, seqlen_q: int, seqlen: int) -> Rows:
        """Returns the rows of a sequence without explicit positions: its last ones."""
        return cls(0, seqlen_q, seqlen - seqlen_q, seqlen - seqlen_q)


class Placed(NamedTuple):
    """The visible keys and the queries of one sequence."""

    keys: list[Run]
    queries: list[float]  # positions of the queries
    seqlen: int  # number of visible keys

    @property
    def long_runs(self) -> bool:
        return len(self.keys) <= LONG_ENOUGH + self.seqlen // LONG_ENOUGH

    def rows(self) -> list[Rows]:
        """Returns the runs of the queries."""
        found: list[Rows] = []
        for row, position in enumerate(self.queries):
            if found and position == found[-1].position + found[-1].rows:
                found[-1] = found[-1]._replace(rows=found[-1].rows + 1)
            else:
                found.append(Rows(row, 1, position, self.seqlen - len(self.queries) + row))
        return found


def bands_between(bands: tuple[Band, ...], causal: bool, rows: Rows, position: float, order: int):
    """Returns (bands, shift) between a run of queries and a run of keys. Row r of the queries is at distance shift + r
    from the first key.

    rows: the run of queries. position, order: position and rank of the first key in the run of keys.
    """
    shift = math.floor(rows.position - position)
    nearest = shift - (rows.order - order)  # distance of the last key that the first row may see under a causal mask
    if not causal or nearest <= 0:
        return bands, shift
    return tuple(clipped(band, nearest, math.inf) for band in bands if band.stop > nearest), shift


def find(tables: CacheTables, k_cache: torch.Tensor, seqlen_q: int) -> list[Placed]:
    """Returns the runs of every sequence. The tables have explicit positions, and the scheme is not axial. The host
    reads the tables."""
    bounds, positions = addresses.bounds(tables, k_cache), tables.positions or CachePositions()
    pages = [None if x is None or tables.block_table is None else x.tolist() for x in positions[:3]]
    found = []
    for b, (first, end) in enumerate(bounds):
        if positions.slot_positions is not None:
            keys = _stored(_visible(tables, k_cache, b, first, end))
        else:
            rows = [None if page is None else page[b] for page in pages]
            keys = _joined(_pages(rows, first, end, k_cache.shape[1] if tables.block_table is not None else end))
        seqlen = keys[-1].order + keys[-1].keys if keys else 0
        if positions.queries is not None:
            queries = clamped(positions.queries[b]).tolist()
        else:
            queries = _of_keys(keys, range(seqlen - seqlen_q, seqlen))
        found.append(Placed(keys, queries, seqlen))
    return found


def clamped(positions: torch.Tensor) -> torch.Tensor:
    """Returns the positions in float64, clamped to finite values."""
    return positions.to(torch.float64).nan_to_num(-FARTHEST).clamp(-FARTHEST, FARTHEST)


def places(tables: CacheTables, k_cache: torch.Tensor, sequence: int, seqlen_q: int):
    """Returns the visible keys of a sequence, with clamped positions, and the positions of its queries, (seqlen_q,) or
    (seqlen_q, axes)."""
    keys = _visible(tables, k_cache, sequence, *addresses.bounds(tables, k_cache)[sequence])
    return keys, clamped(of_queries(tables.positions or CachePositions(), sequence, seqlen_q, keys.position))


def _visible(tables: CacheTables, k_cache: torch.Tensor, sequence: int, first: int, end: int) -> VisibleTokens:
    keys = visible_tokens(tables.positions or CachePositions(), sequence, first, end, tables.block_table, k_cache)
    return keys._replace(position=clamped(keys.position))


def _pages(tables, first: int, end: int, page_size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (slot, stop, position of slot) for the visible rows of each page within the slots [first, end)."""
    page_positions, page_first, page_lengths = tables
    for n in range(first // max(page_size, 1), -(-end // max(page_size, 1))):
        start = 0 if page_first is None else page_first[n]
        stop = page_size if page_lengths is None else start + page_lengths[n]
        slot = max(n * page_size + max(start, 0), first)
        stop = min(n * page_size + min(stop, page_size), end)
        if slot < stop:
            yield slot, stop, slot - first if page_positions is None else page_positions[n] + slot - n * page_size


def _joined(spans) -> list[Run]:
    """Returns the runs of (slot, stop, position) spans. Spans that continue each other in slots and positions become
    one run."""
    runs: list[Run] = []
    order = 0
    for slot, stop, position in spans:
        last = runs[-1] if runs else None
        if last and slot == last.slot + last.keys and position == last.position + last.keys:
            runs[-1] = last._replace(keys=stop - last.slot)
        else:
            runs.append(Run(slot, stop - slot, position, order))
        order += stop - slot
    return runs


def _stored(keys: VisibleTokens) -> list[Run]:
    """Returns the runs of keys whose positions the cache stores. In a run, slots and positions increase by 1."""
    if not keys.slot.numel():
        return []
    breaks = (keys.position.diff() != 1) | (keys.slot.diff() != 1)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist()]
    slots, positions = keys.slot[starts].tolist(), keys.position[starts].tolist()
    counts = [stop - start for start, stop in zip(starts, [*starts[1:], keys.slot.numel()], strict=True)]
    return [Run(*run) for run in zip(slots, counts, positions, starts, strict=True)]


def _of_keys(keys: list[Run], order: range) -> list[float]:
    """Returns the positions of the visible keys with these ranks. Ranks below 0 get the first key's position."""
    found, run = [], len(keys) - 1
    for n in reversed(order):
        while run > 0 and keys[run].order > n:
            run -= 1
        found.append(keys[run].position + max(n, 0) - keys[run].order if keys else 0.0)
    return found[::-1]
