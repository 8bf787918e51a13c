"""A cache as backends see it: ``CacheTables`` are the same in all layers of a step, a ``CacheLayer`` is one layer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

ONE_PER_QUERY = -1  # sentinel for seqlen_new: queries are packed and each brings one new key


class CacheLayer(NamedTuple):
    """The keys and values of one layer, for ``plan_cache`` and ``CachePlan.attend``.

    Attributes:
        k: (batch, capacity, heads_kv, head_dim), or with a block table (pages, page_size, heads_kv, head_dim). int8 or
            uint8 if the cache is quantized.
        v: like k.
        k_scale, v_scale: float32, the shapes of k and v without their last dimension, if the cache is quantized.
        key_weight: float32 (head_dim,), multiplies keys before their rotation (not computed by any backend yet).
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None

    def of_sequences(self, sequences: slice) -> CacheLayer:
        """The rows of these sequences, if the layer is contiguous."""
        k, v, k_scale, v_scale, key_weight = self
        k_scale, v_scale = (x if x is None else x[sequences] for x in (k_scale, v_scale))
        return CacheLayer(k[sequences], v[sequences], k_scale, v_scale, key_weight)


class Packed(NamedTuple):
    """Queries of all sequences behind one another, as ``new`` of ``CacheTables``.

    Attributes:
        cu_seqlens_q: (batch + 1,) int32. Sequence b has the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        max_seqlen_q: upper bound of the number of query rows of a sequence.
        slot_mapping: (total_q,) int32 or int64, the slot of each query's new key in the whole cache, page * page_size +
            row. seqlens then counts the new keys already.
        appends: each query brings one new key, which is written behind seqlens.
    """

    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    slot_mapping: torch.Tensor | None = None
    appends: bool = False


class CachePositions(NamedTuple):
    """Explicit positions of cached tokens, which backends/shown.py defines. They describe the pages with the new keys.

    Attributes:
        page_positions, page_first, page_lengths: (batch, max_pages) int32.
        slot_positions: float32 (pages, page_size) or (batch, capacity), with one more dimension for axes.
        queries: (batch, seqlen_q) or packed (total_q,), with one more dimension for axes. None: their keys' positions.
    """

    page_positions: torch.Tensor | None = None
    page_first: torch.Tensor | None = None
    page_lengths: torch.Tensor | None = None
    slot_positions: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    @classmethod
    def of(cls, *tables: torch.Tensor | None) -> CachePositions | None:
        """The tables, or None if no table is given."""
        for x in tables:
            if x is not None:
                return cls(*tables)
        return None

    def of_sequences(self, sequences: slice, rows: slice, paged: bool) -> CachePositions:
        """The tables of a run of packed sequences, as a batch. rows: the queries of the run."""
        *tables, slot_positions, queries = self
        if slot_positions is not None and not paged:
            slot_positions = slot_positions[sequences]
        if queries is not None:
            queries = queries[rows].unflatten(0, (sequences.stop - sequences.start, -1))
        page_positions, page_first, page_lengths = (x if x is None else x[sequences] for x in tables)
        return CachePositions(page_positions, page_first, page_lengths, slot_positions, queries)


class NewRows(NamedTuple):
    """New keys of one sequence that follow one another.

    batch, row, rows: which rows of k; packed: batch is 0.
    position: of the first. Below 0: of padding.
    slot: of the first, behind the keys that the sequence has.
    """

    batch: int
    row: int
    rows: int
    position: int
    sequence: int
    slot: int


class CacheTables(NamedTuple):
    """Where the sequences of a step lie in every layer of a cache, for ``plan_cache``.

    Sequence b holds slots leftpad[b] to seqlens[b] + its new keys. Slot s is row s of the cache, or row s % page_size
    of page block_table[b, s // page_size]. Positions count from leftpad.

    Attributes:
        seqlens: (batch,) int32, the slots in use before the step's new keys, left padding included.
        block_table: (batch, max_pages) int32, the page of every page_size slots. None: the cache is contiguous.
        leftpad: (batch,) int32, the first valid slot of every sequence. None: 0.
        new: the number of new keys per sequence, or ``Packed`` queries.
        positions: explicit positions. None: positions follow from slots.
    """

    seqlens: torch.Tensor
    block_table: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    new: int | Packed = 0
    positions: CachePositions | None = None

    @property
    def packed(self) -> Packed | None:
        return self.new if isinstance(self.new, Packed) else None

    @property
    def seqlen_new(self) -> int:
        """The new keys of every sequence, or ONE_PER_QUERY."""
        if isinstance(self.new, Packed):
            return ONE_PER_QUERY if self.new.appends else 0
        return self.new

    @property
    def cu_seqlens_q(self) -> torch.Tensor | None:
        return self.new.cu_seqlens_q if isinstance(self.new, Packed) else None

    @property
    def max_seqlen_q(self) -> int:
        return self.new.max_seqlen_q if isinstance(self.new, Packed) else 0

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        return self.new.slot_mapping if isinstance(self.new, Packed) else None

    def capacity(self, k_cache: torch.Tensor) -> int:
        """Slots that a sequence can have."""
        slots = k_cache.shape[1]
        return slots if self.block_table is None else self.block_table.shape[1] * slots

    def bounds(self, k_cache: torch.Tensor) -> list[tuple[int, int]]:
        """The slots [first, end) of every sequence, read by the host and clamped to the capacity."""
        new, capacity = self.seqlen_new, self.capacity(k_cache) if k_cache.shape[0] else 0
        ends = [
            length + new if 0 <= length <= capacity - new else min(min(max(length, 0), capacity) + new, capacity)
            for length in self.seqlens.tolist()
        ]
        if self.leftpad is None:
            return [(0, end) for end in ends]
        return [(min(max(pad, 0), end), end) for pad, end in zip(self.leftpad.tolist(), ends, strict=True)]

    def new_rows(self, capacity: int, rows: int) -> list[NewRows]:
        """The new keys of every sequence, whose sequences have `capacity` slots. Read by the host.

        rows: of a sequence's new keys, or packed the rows of all.
        """
        sequences = len(lengths := self.seqlens.tolist())
        pads = [0] * sequences if self.leftpad is None else self.leftpad.tolist()
        starts, found = None, []
        if self.cu_seqlens_q is not None:
            starts = [min(max(start, 0), rows) for start in self.cu_seqlens_q.tolist()]
        for n, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
            count = rows if starts is None else max(starts[n + 1] - starts[n], 0)
            slot = min(max(length, 0), capacity)
            end = min(slot + (count if self.seqlen_new == ONE_PER_QUERY else self.seqlen_new), capacity)
            first = min(max(pad, 0), end)
            batch, row = (n, 0) if starts is None else (0, starts[n])
            if count:
                found.append(NewRows(batch, row, count, end - count - first, n, slot))
        return found

    def new_positions(self, capacity: int, batch: int, rows: int) -> torch.Tensor:
        """The positions in ``new_rows``, int64 (batch, rows); packed: batch is 1. Other rows are at 0."""
        positions = torch.zeros(batch, rows, dtype=torch.int64, device=self.seqlens.device)
        for each in self.new_rows(capacity, rows):
            place = positions[each.batch, each.row : each.row + each.rows]
            torch.arange(each.position, each.position + each.rows, out=place)
        return positions

    def new_places(self, k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(page or sequence, row, whether that place exists), int64 and bool (batch, seqlen_new), of the new keys."""
        batch, device = self.seqlens.shape[0], self.seqlens.device
        slot = self.first_new_slot(k_cache)[:, None] + torch.arange(self.seqlen_new, device=device)
        return self.places(k_cache, torch.arange(batch, device=device)[:, None].expand_as(slot), slot)

    def first_new_slot(self, k_cache: torch.Tensor) -> torch.Tensor:
        """int64 (batch,), within the capacity."""
        return self.seqlens.to(torch.int64).clamp(0, self.capacity(k_cache))

    def places(self, k_cache: torch.Tensor, sequence: torch.Tensor, slot: torch.Tensor):
        """As ``new_places``, of slots of sequences, int64 of one shape. A slot is at least 0."""
        capacity = self.capacity(k_cache)
        fits = slot < capacity
        if self.block_table is None:
            return sequence, slot, fits
        if not capacity:
            return slot, slot, fits
        page_size = k_cache.shape[1]
        entry = (slot // page_size).clamp(max=self.block_table.shape[1] - 1)
        page = self.block_table[sequence, entry].to(torch.int64)
        return page, slot % page_size, fits & (page >= 0) & (page < k_cache.shape[0])

    def mapped_places(self, k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``new_places``, of shape (total_q,), from slot_mapping."""
        slots = self.slot_mapping.to(torch.int64)
        fits = (slots >= 0) & (slots < k_cache.shape[0] * k_cache.shape[1])
        return slots // max(k_cache.shape[1], 1), slots % max(k_cache.shape[1], 1), fits

    def runs(self, total_q: int) -> Iterator[tuple[slice, slice, CacheTables]]:
        """Packed queries as batches of equal length: (sequences, query rows, their tables). Read by the host.

        Neighbors with as many queries form one batch. Rows are clamped to the total_q that there are.
        """
        starts = self.cu_seqlens_q.tolist()
        starts = [min(max(start, 0), total_q) for start in starts]
        lengths = [max(stop - start, 0) for start, stop in zip(starts, starts[1:], strict=False)]
        begin = 0
        while begin < len(lengths):
            end, length = begin + 1, lengths[begin]
            while end < len(lengths) and lengths[end] == length and starts[end] == starts[end - 1] + length:
                end += 1
            if length:
                rows = slice(starts[begin], starts[begin] + (end - begin) * length)
                yield slice(begin, end), rows, self._of(slice(begin, end), rows, length)
            begin = end

    def _of(self, sequences: slice, rows: slice, seqlen_q: int) -> CacheTables:
        positions = self.positions
        if positions is not None:
            positions = positions.of_sequences(sequences, rows, self.block_table is not None)
        block_table, leftpad = (None if x is None else x[sequences] for x in (self.block_table, self.leftpad))
        new = seqlen_q if self.seqlen_new == ONE_PER_QUERY else 0
        return CacheTables(self.seqlens[sequences], block_table, leftpad, new, positions)
