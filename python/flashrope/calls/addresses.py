"""Finds the pages, rows and positions of keys in a cache's tables, on the host or on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .cache_tables import ONE_PER_QUERY, CachePositions, CacheTables


class NewRows(NamedTuple):
    """Consecutive new keys of one sequence.

    batch, row, rows: the keys are k[batch, row : row + rows]. batch is 0 if queries are packed.
    position: position of the first key, negative if this key is padding.
    sequence: index of the sequence.
    slot: the first key's slot in the sequence.
    """

    batch: int
    row: int
    rows: int
    position: int
    sequence: int
    slot: int


def bounds(tables: CacheTables, k_cache: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the slots [first, end) of every sequence, clamped to the capacity. The host reads the tables."""
    capacity, lengths = tables.capacity(k_cache) if k_cache.shape[0] else 0, tables.seqlens.tolist()
    counts = [tables.seqlen_new] * len(lengths)
    if tables.seqlen_new == ONE_PER_QUERY:
        assert tables.cu_seqlens_q is not None
        counts = tables.cu_seqlens_q.diff().clamp(min=0).tolist()
    ends = [
        length + new if 0 <= length <= capacity - new else min(min(max(length, 0), capacity) + new, capacity)
        for length, new in zip(lengths, counts, strict=True)
    ]
    if tables.leftpad is None:
        return [(0, end) for end in ends]
    return [(min(max(pad, 0), end), end) for pad, end in zip(tables.leftpad.tolist(), ends, strict=True)]


def new_rows(tables: CacheTables, capacity: int, rows: int) -> list[NewRows]:
    """Returns the new keys of every sequence. The host reads the tables.

    capacity: largest number of slots of a sequence. rows: number of new keys per sequence, or of all sequences together
    if queries are packed.
    """
    sequences = len(lengths := tables.seqlens.tolist())
    pads = [0] * sequences if tables.leftpad is None else tables.leftpad.tolist()
    starts, found = None, []
    if tables.cu_seqlens_q is not None:
        starts = [min(max(start, 0), rows) for start in tables.cu_seqlens_q.tolist()]
    for n, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
        count = rows if starts is None else max(starts[n + 1] - starts[n], 0)
        slot = min(max(length, 0), capacity)
        end = min(slot + (count if tables.seqlen_new == ONE_PER_QUERY else tables.seqlen_new), capacity)
        first = min(max(pad, 0), end)
        batch, row = (n, 0) if starts is None else (0, starts[n])
        if count:
            found.append(NewRows(batch, row, count, end - count - first, n, slot))
    return found


def new_positions(tables: CacheTables, capacity: int, batch: int, rows: int) -> torch.Tensor:
    """Returns the positions of ``new_rows``, int64 (batch, rows). Rows that hold no new key get position 0. batch is 1
    if k is packed."""
    positions = torch.zeros(batch, rows, dtype=torch.int64, device=tables.seqlens.device)
    for each in new_rows(tables, capacity, rows):
        place = positions[each.batch, each.row : each.row + each.rows]
        torch.arange(each.position, each.position + each.rows, out=place)
    return positions


def new_places(tables: CacheTables, k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (page or sequence, row, whether the row exists) of the new keys: int64 and bool (batch, seqlen_new)."""
    batch, device = tables.seqlens.shape[0], tables.seqlens.device
    slot = first_new_slot(tables, k_cache)[:, None] + torch.arange(tables.seqlen_new, device=device)
    return places(tables, k_cache, torch.arange(batch, device=device)[:, None].expand_as(slot), slot)


def first_new_slot(tables: CacheTables, k_cache: torch.Tensor) -> torch.Tensor:
    """Returns the first free slot of every sequence, int64 (batch,), clamped to the capacity."""
    return tables.seqlens.to(torch.int64).clamp(0, tables.capacity(k_cache))


def places(tables: CacheTables, k_cache: torch.Tensor, sequence: torch.Tensor, slot: torch.Tensor):
    """Returns (page or sequence, row, whether the row exists) of the given (sequence, slot) pairs.

    sequence, slot: int64 of the same shape. Slots are at least 0.
    """
    capacity = tables.capacity(k_cache)
    fits = slot < capacity
    if tables.block_table is None:
        return sequence, slot, fits
    if not capacity:
        return slot, slot, fits
    page_size = k_cache.shape[1]
    entry = (slot // page_size).clamp(max=tables.block_table.shape[1] - 1)
    page = tables.block_table[sequence, entry].to(torch.int64)
    return page, slot % page_size, fits & (page >= 0) & (page < k_cache.shape[0])


def mapped_places(tables: CacheTables, k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (page or sequence, row, whether the row exists) of slot_mapping's slots: int64 and bool (total_q,)."""
    slots = tables.slot_mapping.to(torch.int64)
    fits = (slots >= 0) & (slots < k_cache.shape[0] * k_cache.shape[1])
    return slots // max(k_cache.shape[1], 1), slots % max(k_cache.shape[1], 1), fits


def runs(tables: CacheTables, total_q: int) -> Iterator[tuple[slice, slice, CacheTables]]:
    """Divides packed queries into batches in which all sequences have the same number of queries. Yields (sequences,
    query rows, tables) of each batch.

    Consecutive sequences with the same number of queries form one batch. Rows are clamped to total_q. The host reads
    cu_seqlens_q.
    """
    starts = tables.cu_seqlens_q.tolist()
    starts = [min(max(start, 0), total_q) for start in starts]
    lengths = [max(stop - start, 0) for start, stop in zip(starts, starts[1:], strict=False)]
    begin = 0
    while begin < len(lengths):
        end, length = begin + 1, lengths[begin]
        while end < len(lengths) and lengths[end] == length and starts[end] == starts[end - 1] + length:
            end += 1
        if length:
            rows, sequences = slice(starts[begin], starts[begin] + (end - begin) * length), slice(begin, end)
            new = length if tables.seqlen_new == ONE_PER_QUERY else 0
            queries = None if tables.positions is None else tables.positions.queries
            if queries is not None:
                queries = queries[rows].unflatten(0, (end - begin, -1))
            yield sequences, rows, _tables_of(tables, sequences, new, queries)
        begin = end


def batch_of(tables: CacheTables, sequences: slice) -> CacheTables:
    """Returns the tables of these sequences. Queries must not be packed."""
    queries = None if tables.positions is None else tables.positions.queries
    return _tables_of(tables, sequences, tables.new, None if queries is None else queries[sequences])


def _tables_of(tables: CacheTables, sequences: slice, new, queries: torch.Tensor | None) -> CacheTables:
    """Returns the tables of these sequences. new, queries: those of these sequences, for a batch."""
    block_table, leftpad = (None if x is None else x[sequences] for x in (tables.block_table, tables.leftpad))
    positions = tables.positions
    if positions is not None:
        *of_pages, slot_positions, _ = positions
        if slot_positions is not None and block_table is None:
            slot_positions = slot_positions[sequences]
        page_positions, page_first, page_lengths = (x if x is None else x[sequences] for x in of_pages)
        positions = CachePositions(page_positions, page_first, page_lengths, slot_positions, queries)
    return CacheTables(tables.seqlens[sequences], block_table, leftpad, new, positions)


def neighbors(values: list) -> Iterator[slice]:
    """Yields the ranges of a list in which all values are equal."""
    start = 0
    for _, equal in itertools.groupby(values):
        stop = start + len(list(equal))
        yield slice(start, stop)
        start = stop


def token_sequences(cu_seqlens, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two int64 tensors (total,): the sequence of every packed token, and the number of rows of this sequence
    from the token on, the token included. A token outside every sequence gets the last sequence and a number below
    1."""
    ends = cu_seqlens[1:].to(torch.int64)
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, token, right=True).clamp(max=ends.shape[0] - 1)
    return sequence, ends[sequence] - token
