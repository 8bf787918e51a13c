"""The pass before attention over explicit positions: it lists the visible tokens of a sequence and their positions."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import decode_int
from ..kv_cache import clamp, load_page, row_in_page, valid_page
from ..rows import clamp_rows
from ..tiles import find_cached_sequence, load_band, row_program
from .explicit_positions import ENTRY_FIELDS, TOKEN_FIELDS, Columns, mapped_keys, page_rows, token_fields
from .stored_positions import (
    LIMIT,
    NOWHERE,
    Position,
    load_stored,
    split_position,
)


class Entries(NamedTuple):
    """Block-table entries, each field [E]: slot and position of row 0, and the visible rows [first, stop). If slots
    store positions, `position` is added to the stored positions."""

    slot: object
    position: object
    first: object
    stop: object


@triton.jit
def read_entries(tables, cache, seq, entry, VARIANT: tl.constexpr):
    """Returns the Entries of a sequence with the indices `entry` [E]. Entries beyond the table have no visible rows."""
    rows = page_rows(cache, VARIANT.page_size)
    entries = decode_int(cache.capacity) // rows
    exists, entry = entry < entries, tl.minimum(entry, entries - 1)
    at, slot = seq.batch.to(tl.int64) * entries + entry, entry * rows
    position = slot - seq.start_k if cache.slot_positions is None else tl.zeros_like(slot)
    if tables.page_positions is not None:
        position = tl.load(tables.page_positions + at)
    begin = tl.zeros_like(at)  # int64: the sum of both tables may exceed 32 bits
    if tables.page_first is not None:
        begin = tl.load(tables.page_first + at).to(tl.int64)
    stop = begin * 0 + rows
    if tables.page_lengths is not None:
        stop = tl.minimum(begin + tl.load(tables.page_lengths + at), stop)
    begin = tl.maximum(begin, tl.maximum(seq.start_k - slot, 0))
    stop = tl.minimum(stop, seq.start_k + seq.length_k - slot)
    stop = tl.where(exists, tl.maximum(stop, begin), begin)
    position = tl.minimum(tl.maximum(position, -LIMIT), LIMIT - rows)
    begin = tl.minimum(begin, rows)
    return Entries(slot, position, begin.to(tl.int32), tl.minimum(stop, rows).to(tl.int32))


@triton.jit
def next_entries(tables, cache, seq, first_entry, VARIANT: tl.constexpr):
    """Returns VARIANT.block_n Entries of a sequence from `first_entry` on."""
    return read_entries(tables, cache, seq, first_entry + tl.arange(0, VARIANT.block_n), VARIANT)


@triton.jit
def store_entries(cache, seq, entries, first_entry, before, VARIANT: tl.constexpr):
    """Writes Entries to cache.entries. before: number of visible keys in earlier entries."""
    count = decode_int(cache.capacity) // page_rows(cache, VARIANT.page_size)
    entry = first_entry + tl.arange(0, VARIANT.block_n)
    to = cache.entries + (seq.batch.to(tl.int64) * count + entry) * (ENTRY_FIELDS + VARIANT.stored)
    tl.store(to, entries.position, mask=entry < count)
    tl.store(to + 1, entries.first, mask=entry < count)
    tl.store(to + 2, entries.stop, mask=entry < count)
    if VARIANT.stored:
        tl.store(to + 3, first_number(entries, before, VARIANT), mask=entry < count)


@triton.jit
def first_number(entries, before, VARIANT: tl.constexpr):
    """Returns the rank that row 0 of each entry has, or would have, among the visible keys. before: number of visible
    keys in earlier entries."""
    return before + count_before(entries.stop - entries.first, VARIANT.block_n) - entries.first


@triton.jit
def read_position(x):
    """Returns the Position of explicit positions x, integer or float."""
    if x.dtype.is_floating():
        return split_position(x, 0)
    else:
        return Position(clamp(x, -LIMIT, LIMIT).to(tl.int32), tl.zeros_like(x).to(tl.int32))


@triton.jit
def count_before(counts, N: tl.constexpr):
    """Returns, for each of the counts [N], the sum of the counts before it."""
    index = tl.arange(0, N)
    return tl.sum(tl.where(index[None, :] < index[:, None], counts[None, :], 0), 1)


@triton.jit
def columns_by_entries(tables, cache, seq, lowest, highest, VARIANT: tl.constexpr):
    """Returns the Columns (begin, end [BM]) that hold all keys at positions lowest to highest [BM]. Bands of axial
    schemes compare ranks. For such schemes, lowest and highest are ranks among the visible keys."""
    entries_in_all = decode_int(cache.capacity) // page_rows(cache, VARIANT.page_size)
    begin = tl.zeros_like(lowest) + seq.length_k
    end = tl.zeros_like(lowest)
    before = 0
    for n in tl.range(0, entries_in_all, VARIANT.block_n):
        entries = next_entries(tables, cache, seq, n, VARIANT)
        position = entries.position
        if VARIANT.axes > 0:
            position = first_number(entries, before, VARIANT)
            before += tl.sum(entries.stop - entries.first)
        low = tl.maximum(entries.first[None, :], lowest[:, None] - position[None, :])
        high = tl.minimum(entries.stop[None, :], highest[:, None] - position[None, :] + 1)
        start = entries.slot[None, :] - seq.start_k
        begin = tl.minimum(begin, tl.min(tl.where(low < high, start + low, seq.length_k), 1))
        end = tl.maximum(end, tl.max(tl.where(low < high, start + high, 0), 1))
    return Columns(begin, end)


@triton.jit
def columns_by_groups(groups, cache, seq, lowest, highest, VARIANT: tl.constexpr):
    """Returns the Columns (begin, end [BM]) that hold all groups of slots with keys at whole positions lowest to
    highest [BM]."""
    groups_in_all = tl.cdiv(decode_int(cache.capacity), VARIANT.block_n)
    begin = tl.zeros_like(lowest) + seq.length_k
    end = tl.zeros_like(lowest)
    for n in tl.range(0, groups_in_all, VARIANT.block_n):
        group = n + tl.arange(0, VARIANT.block_n)
        exists, group = group < groups_in_all, tl.minimum(group, groups_in_all - 1)
        at = groups + (seq.batch.to(tl.int64) * groups_in_all + group) * 2
        nearest, farthest = tl.load(at)[None, :], tl.load(at + 1)[None, :]
        some = exists[None, :] & (nearest <= highest[:, None]) & (farthest >= lowest[:, None])
        start = (group * VARIANT.block_n - seq.start_k)[None, :]
        begin = tl.minimum(begin, tl.min(tl.where(some, tl.maximum(start, 0), seq.length_k), 1))
        end = tl.maximum(end, tl.max(tl.where(some, tl.minimum(start + VARIANT.block_n, seq.length_k), 0), 1))
    return Columns(begin, end)


@triton.jit(do_not_specialize=["seqlen_q"])
def place_slots(tables, cache, cu_seqlens_q, seqlen_q, VARIANT: tl.constexpr):
    """Fills tables.groups (batch, groups, 2): the lowest and the highest whole position of the visible keys in each
    group of VARIANT.block_n slots. If slots store positions of one axis, columns_by_groups finds a band's keys by these
    ranges."""
    groups_in_all = tl.cdiv(decode_int(cache.capacity), VARIANT.block_n)
    batch, group = tl.program_id(0) // groups_in_all, tl.program_id(0) % groups_in_all
    seq = find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q)
    slot = group * VARIANT.block_n + tl.arange(0, VARIANT.block_n)
    rows = page_rows(cache, VARIANT.page_size)
    entries = read_entries(tables, cache, seq, slot // rows, VARIANT)
    visible = (slot - entries.slot >= entries.first) & (slot - entries.slot < entries.stop)
    slot = tl.minimum(slot, decode_int(cache.capacity) - 1)
    page = valid_page(cache, load_page(cache, batch, slot, VARIANT.page_size))
    row = row_in_page(cache, slot, VARIANT.page_size)
    whole = load_stored(cache, page, row, entries.position, 0, VARIANT).whole
    to = tables.groups + tl.program_id(0).to(tl.int64) * 2
    tl.store(to, tl.min(tl.where(visible, whole, NOWHERE), 0))
    tl.store(to + 1, tl.max(tl.where(visible, whole, -NOWHERE), 0))


@triton.jit
def place_queries(tables, cache, batch, row, slot, base, exists, VARIANT: tl.constexpr):
    """Stores the Positions of queries [BM] on every axis. Returns their whole positions on the first axis. Positions
    come from tables.queries, or else from the queries' own keys.

    row: the queries' indices over all sequences. slot: the slots of their own keys. base: what is added to the
    positions that these slots store."""
    COORDINATES: tl.constexpr = VARIANT.axes if VARIANT.axes > 0 else 1
    to = cache.tokens + row * token_fields(VARIANT) + (TOKEN_FIELDS + 2 * VARIANT.num_bands)
    page = valid_page(cache, load_page(cache, batch, slot, VARIANT.page_size))
    slot_row, first = row_in_page(cache, slot, VARIANT.page_size), base
    for axis in tl.static_range(COORDINATES):
        if tables.queries is None:
            place = load_stored(cache, page, slot_row, base, axis, VARIANT)
        else:
            place = read_position(tl.load(tables.queries + row * COORDINATES + axis))
        tl.store(to + 2 * axis, place.whole, mask=exists)
        tl.store(to + 2 * axis + 1, place.part, mask=exists)
        if axis == 0:
            first = place.whole
    return first


@triton.jit(do_not_specialize=["seqlen_q", "max_seqlen_q"])
def place_tokens(
    tables, cache, cu_seqlens_q, bands, maps, seqlen_q, max_seqlen_q, CAUSAL: tl.constexpr, VARIANT: tl.constexpr
):
    """Fills cache.entries (batch, max_pages, ENTRY_FIELDS), cache.tokens (queries, token_fields) and cache.visible
    (batch, 2): the number of visible keys and the slot of the last one. All are int32. A program has VARIANT.block_m
    queries and takes VARIANT.block_n entries at a time."""
    batch, first = row_program(max_seqlen_q, VARIANT.block_m)
    seq = find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q)
    entries_in_all = decode_int(cache.capacity) // page_rows(cache, VARIANT.page_size)
    total, last = 0, 0
    for n in tl.range(0, entries_in_all, VARIANT.block_n):
        entries = next_entries(tables, cache, seq, n, VARIANT)
        if first == 0:
            store_entries(cache, seq, entries, n, total, VARIANT)
        total += tl.sum(entries.stop - entries.first)
        last = tl.maximum(last, tl.max(tl.where(entries.stop > entries.first, entries.slot + entries.stop - 1, 0)))
    if first == 0:
        tl.store(cache.visible + 2 * batch, total)
        tl.store(cache.visible + 2 * batch + 1, last)
    if first >= seq.length_q:
        return

    token = first + tl.arange(0, VARIANT.block_m)
    exists = token < seq.length_q
    token = first + clamp_rows(tl.arange(0, VARIANT.block_m), seq.length_q - first)
    own = total - seq.length_q + token  # rank of the query's own key among the visible keys
    row = token + (batch.to(tl.int64) * seqlen_q if cu_seqlens_q is None else seq.start_q)
    column = tl.full((VARIANT.block_m,), -1, tl.int32)
    position = tl.full((VARIANT.block_m,), 0, tl.int32)
    before = 0
    for n in tl.range(0, entries_in_all, VARIANT.block_n):
        entries = next_entries(tables, cache, seq, n, VARIANT)
        counts = entries.stop - entries.first
        begin = before + count_before(counts, VARIANT.block_n)
        index = tl.maximum(own, 0)[:, None] - begin[None, :]
        holds = (index >= 0) & (index < counts[None, :])  # [BM, E], true at most once in a row
        at_row = index + entries.first[None, :]
        column += tl.sum(tl.where(holds, entries.slot[None, :] - seq.start_k + at_row + 1, 0), 1)
        position += tl.sum(tl.where(holds, entries.position[None, :] + (0 if VARIANT.stored else at_row), 0), 1)
        before += tl.sum(counts)
    if VARIANT.stored:
        slot = tl.maximum(seq.start_k + column, 0)
        position = place_queries(tables, cache, batch, row, slot, position, exists, VARIANT)
        if VARIANT.axes > 0:
            position = own
    elif tables.queries is not None:
        position = read_position(tl.load(tables.queries + row)).whole
    column = tl.where(own >= 0, column, -1)
    if not CAUSAL:
        column = tl.zeros_like(column) + seq.length_k - 1
    to = cache.tokens + row * token_fields(VARIANT)
    tl.store(to, position, mask=exists)
    tl.store(to + 1, column, mask=exists)

    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(bands, b)
        lowest, highest = position - band.stop + 1, position - band.start
        if maps is not None:
            seen = mapped_keys(position, band, maps)
            lowest, highest = seen.first, seen.stop - 1
        if VARIANT.stored and VARIANT.axes == 0:  # lowest - 1, because `sees` may count a key one position higher
            found = columns_by_groups(tables.groups, cache, seq, lowest - 1, highest, VARIANT)
        else:
            found = columns_by_entries(tables, cache, seq, lowest, highest, VARIANT)
        tl.store(to + TOKEN_FIELDS + 2 * b, found.begin, mask=exists)
        tl.store(to + TOKEN_FIELDS + 2 * b + 1, tl.minimum(found.end, column + 1), mask=exists)
