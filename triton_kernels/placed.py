"""Positions of cached tokens as data: which keys a sequence shows, where they stand, and which of them a query reads.

``place_tokens`` runs before the attention. It clamps the tables and finds for every query its own key, its position and
the columns of every band; a column is a slot, counted from the sequence's first. Causality goes by columns and bands go
by positions. Positions that fall along a sequence widen those ranges and change no result.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..lowering import cos_sin
from .arguments import decode_int
from .kv_cache import clamp, load_page, row_in_page, valid_page
from .rotation import add_angles, table_columns
from .tiles import clamp_rows, find_cached_sequence, load_band, row_program

DIGIT = tl.constexpr(cos_sin.FINE_ROWS)
DIGIT_BITS = tl.constexpr(cos_sin.FINE_ROWS.bit_length() - 1)
SIGNED_DIGITS = tl.constexpr(cos_sin.TOP_ROWS // 2)
LIMIT = tl.constexpr(cos_sin.MAX_POSITION)
ENTRY_FIELDS = tl.constexpr(3)  # position of row 0, first shown row, row behind the last shown one
TOKEN_FIELDS = tl.constexpr(2)  # position, last column that it sees; then two columns for every band

# ---- the pass before


class Entries(NamedTuple):
    """Entries of a block table, each with [E] numbers: slot and position of row 0, the shown rows first to stop - 1."""

    slot: object
    position: object
    first: object
    stop: object


@triton.jit
def page_rows(cache, PAGE_SIZE: tl.constexpr):
    """Slots of a page. A contiguous cache has one page a sequence."""
    return PAGE_SIZE if PAGE_SIZE > 0 else decode_int(cache.capacity)


@triton.jit
def read_entries(tables, cache, seq, first_entry, SHAPE: tl.constexpr):
    """SHAPE.block_n Entries of a sequence from `first_entry` on. Those beyond the table show no row."""
    rows = page_rows(cache, SHAPE.page_size)
    entries = decode_int(cache.capacity) // rows
    entry = first_entry + tl.arange(0, SHAPE.block_n)
    exists, entry = entry < entries, tl.minimum(entry, entries - 1)
    at, slot = seq.batch.to(tl.int64) * entries + entry, entry * rows
    position = slot - seq.start_k
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
def store_entries(cache, seq, entries, first_entry, SHAPE: tl.constexpr):
    count = decode_int(cache.capacity) // page_rows(cache, SHAPE.page_size)
    entry = first_entry + tl.arange(0, SHAPE.block_n)
    to = cache.entries + (seq.batch.to(tl.int64) * count + entry) * ENTRY_FIELDS
    tl.store(to, entries.position, mask=entry < count)
    tl.store(to + 1, entries.first, mask=entry < count)
    tl.store(to + 2, entries.stop, mask=entry < count)


@triton.jit
def count_before(counts, N: tl.constexpr):
    """The sum of the counts [N] before each."""
    index = tl.arange(0, N)
    return tl.sum(tl.where(index[None, :] < index[:, None], counts[None, :], 0), 1)


@triton.jit(do_not_specialize=["seqlen_q", "max_seqlen_q"])
def place_tokens(tables, cache, cu_seqlens_q, bands, seqlen_q, max_seqlen_q, CAUSAL: tl.constexpr, SHAPE: tl.constexpr):
    """Fills cache.entries (batch, max_pages, ENTRY_FIELDS), cache.tokens (queries, TOKEN_FIELDS + 2 * num_bands) and
    cache.shown (batch, 2), the number and the last slot of the shown keys. All are int32. A program has SHAPE.block_m
    queries, and takes SHAPE.block_n entries at a time."""
    batch, first = row_program(max_seqlen_q, SHAPE.block_m)
    seq = find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q)
    entries_in_all = decode_int(cache.capacity) // page_rows(cache, SHAPE.page_size)
    total, last = 0, 0
    for n in tl.range(0, entries_in_all, SHAPE.block_n):
        entries = read_entries(tables, cache, seq, n, SHAPE)
        total += tl.sum(entries.stop - entries.first)
        last = tl.maximum(last, tl.max(tl.where(entries.stop > entries.first, entries.slot + entries.stop - 1, 0)))
        if first == 0:
            store_entries(cache, seq, entries, n, SHAPE)
    if first == 0:
        tl.store(cache.shown + 2 * batch, total)
        tl.store(cache.shown + 2 * batch + 1, last)
    if first >= seq.length_q:
        return

    token = first + tl.arange(0, SHAPE.block_m)
    exists = token < seq.length_q
    token = first + clamp_rows(tl.arange(0, SHAPE.block_m), seq.length_q - first)
    own = total - seq.length_q + token  # its own key is the one with so many before it
    row = token + (batch.to(tl.int64) * seqlen_q if cu_seqlens_q is None else seq.start_q)
    column = tl.full((SHAPE.block_m,), -1, tl.int32)
    position = tl.full((SHAPE.block_m,), 0, tl.int32)
    before = 0
    for n in tl.range(0, entries_in_all, SHAPE.block_n):
        entries = read_entries(tables, cache, seq, n, SHAPE)
        counts = entries.stop - entries.first
        begin = before + count_before(counts, SHAPE.block_n)
        index = tl.maximum(own, 0)[:, None] - begin[None, :]
        holds = (index >= 0) & (index < counts[None, :])  # [BM, E], true once at most in a row
        at_row = index + entries.first[None, :]
        column += tl.sum(tl.where(holds, entries.slot[None, :] - seq.start_k + at_row + 1, 0), 1)
        position += tl.sum(tl.where(holds, entries.position[None, :] + at_row, 0), 1)
        before += tl.sum(counts)
    column = tl.where(own >= 0, column, -1)
    if not CAUSAL:
        column = tl.zeros_like(column) + seq.length_k - 1
    if tables.queries is not None:
        position = clamp(tl.load(tables.queries + row), -LIMIT, LIMIT).to(tl.int32)
    to = cache.tokens + row * (TOKEN_FIELDS + 2 * SHAPE.num_bands)
    tl.store(to, position, mask=exists)
    tl.store(to + 1, column, mask=exists)

    NUM_BANDS: tl.constexpr = SHAPE.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(bands, b)
        lowest, highest = (position - band.stop + 1)[:, None], (position - band.start)[:, None]
        begin = tl.zeros_like(column) + seq.length_k
        stop = tl.zeros_like(column)
        for n in tl.range(0, entries_in_all, SHAPE.block_n):
            entries = read_entries(tables, cache, seq, n, SHAPE)
            low = tl.maximum(entries.first[None, :], lowest - entries.position[None, :])
            high = tl.minimum(entries.stop[None, :], highest - entries.position[None, :] + 1)
            start = entries.slot[None, :] - seq.start_k
            begin = tl.minimum(begin, tl.min(tl.where(low < high, start + low, seq.length_k), 1))
            stop = tl.maximum(stop, tl.max(tl.where(low < high, start + high, 0), 1))
        tl.store(to + TOKEN_FIELDS + 2 * b, begin, mask=exists)
        tl.store(to + TOKEN_FIELDS + 2 * b + 1, tl.minimum(stop, column + 1), mask=exists)


# ---- in the attention


class PlacedKeys(NamedTuple):
    """The keys that each row of a tile of queries [M] sees: at positions first to stop - 1, up to a column."""

    first: object
    stop: object
    column: object


class Columns(NamedTuple):
    """Tiles [begin, end) of columns."""

    begin: object
    end: object


class TileEntries(NamedTuple):
    """The fields of cache.entries for the keys of a tile: [N], or scalars if the tile lies in one page."""

    position: object
    first: object
    stop: object


class Places(NamedTuple):
    """The keys of a tile [N]. page, row: where to read; another key of the sequence stands in for those that are not
    shown. position. shown. start: the first position if SHAPE.one_run."""

    page: object
    row: object
    position: object
    shown: object
    start: object


class LastShown(NamedTuple):
    """Page and row of the last key that a sequence shows."""

    page: object
    row: object


@triton.jit
def load_token(cache, token, field, SHAPE: tl.constexpr):
    """A field of these queries [M], which are numbered through all sequences."""
    return tl.load(cache.tokens + token * (TOKEN_FIELDS + 2 * SHAPE.num_bands) + field)


@triton.jit
def band_columns(cache, token, b, SHAPE: tl.constexpr):
    """The Columns, in tiles of SHAPE.block_n, of the keys in a band of any of these queries [M]."""
    begin = tl.min(load_token(cache, token, TOKEN_FIELDS + 2 * b, SHAPE), 0)
    end = tl.max(load_token(cache, token, TOKEN_FIELDS + 2 * b + 1, SHAPE), 0)
    return Columns(begin // SHAPE.block_n, tl.cdiv(end, SHAPE.block_n))


@triton.jit
def placed_keys(position, column, band):
    """The PlacedKeys of queries [M] in a band. column: the last one that each sees."""
    return PlacedKeys(position - band.stop + 1, position - band.start + 1, column)


@triton.jit
def last_shown(cache, batch, SHAPE: tl.constexpr):
    slot = tl.load(cache.shown + 2 * batch + 1)
    page = valid_page(cache, load_page(cache, batch, slot, SHAPE.page_size))
    return LastShown(page, row_in_page(cache, slot, SHAPE.page_size))


@triton.jit
def load_tile_entries(cache, batch, first_slot, slots, SHAPE: tl.constexpr):
    """The TileEntries of the keys in the slots from first_slot on, which may lie behind the sequence. slots [N]: those
    of its keys that exist; the last one stands in for the others."""
    rows = page_rows(cache, SHAPE.page_size)
    entries = decode_int(cache.capacity) // rows
    if SHAPE.one_run:
        entry = tl.minimum(first_slot // rows, entries - 1)
    else:
        entry = slots // rows
    at = cache.entries + (batch.to(tl.int64) * entries + entry) * ENTRY_FIELDS
    return TileEntries(tl.load(at), tl.load(at + 1), tl.load(at + 2))


@triton.jit
def tile_places(cache, entries, page, last, first_slot, slots, SHAPE: tl.constexpr):
    """The Places of a tile with these TileEntries. page: of every key, or of the tile."""
    rows = page_rows(cache, SHAPE.page_size)
    if SHAPE.one_run:
        first_row = first_slot % rows
        row = first_row + tl.arange(0, SHAPE.block_n)
        start = entries.position + first_row
    else:
        row = slots % rows
        start = entries.position
    some = entries.stop > entries.first
    read = clamp(row, entries.first, entries.stop - 1).to(tl.int64)
    page, read = tl.where(some, page, last.page), tl.where(some, read, last.row)
    shown = (row >= entries.first) & (row < entries.stop)
    return Places(page, read, entries.position + row, shown, start)


@triton.jit
def sees(keys, places, column, BLOCK: tl.constexpr):
    """Whether rows with these PlacedKeys see the keys from `column` on, which are at `places`: [M, BLOCK]."""
    position, columns = places.position[None, :], column + tl.arange(0, BLOCK)[None, :]
    in_band = (position >= keys.first[:, None]) & (position < keys.stop[:, None])
    return in_band & (columns <= keys.column[:, None]) & places.shown[None, :]


@triton.jit
def load_digits(ptr, position, D: tl.constexpr):
    """cos and sin of positions [M], each joined from the rows of its three digits, or of one position; ptr [COUNT] or
    [1, COUNT]. The table is that of ``flashrope.lowering.cos_sin.three_level_table``."""
    low = position & (DIGIT - 1)
    middle = ((position >> DIGIT_BITS) & (DIGIT - 1)) + DIGIT
    top = (position >> (2 * DIGIT_BITS)) + (2 * DIGIT + SIGNED_DIGITS)
    low, middle, top = ptr + low * D, ptr + middle * D, ptr + top * D
    cos, sin = add_angles(tl.load(low), tl.load(low + D // 2), tl.load(middle), tl.load(middle + D // 2))
    return add_angles(cos, sin, tl.load(top), tl.load(top + D // 2))


@triton.jit
def placed_cos_sin(table, rotation, position, SHAPE: tl.constexpr):
    """cos and sin [M, D/2] of positions [M]."""
    D: tl.constexpr = SHAPE.block_d
    ptr = table_columns(table, rotation, 0, D // 2, D)
    return load_digits(ptr[None, :], position[:, None], D)


@triton.jit
def placed_key_cos_sin(table, rotation, places, SHAPE: tl.constexpr):
    """cos and sin [N, D/2] of the keys of a tile. If SHAPE.one_run, the rows added to the first key's are the same for
    every tile."""
    if SHAPE.one_run:
        D: tl.constexpr = SHAPE.block_d
        ptr = table_columns(table, rotation, 0, D // 2, D)
        start_cos, start_sin = load_digits(ptr, places.start, D)
        at = ptr[None, :] + tl.arange(0, SHAPE.block_n)[:, None] * D
        return add_angles(tl.load(at), tl.load(at + D // 2), start_cos[None, :], start_sin[None, :])
    else:
        return placed_cos_sin(table, rotation, places.position, SHAPE)
