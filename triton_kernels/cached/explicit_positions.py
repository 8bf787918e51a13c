"""Handles explicit positions of cached tokens: finds the visible keys, their positions, and which keys a query reads.

``place_tokens`` runs before the attention kernel. It clamps positions and rows in the caller's tables to valid ones.
For every query it stores the query's position, the last column that the query sees, and the range of columns that holds
each band's keys. A column is the index of a slot, counted from the sequence's first slot. The causal mask compares
columns, and bands compare positions. If positions decrease along a sequence, the ranges of columns are wider, but
results do not change.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...schemes import cos_sin
from ..arguments import decode_int
from ..kv_cache import clamp, load_page, row_in_page, valid_page
from ..rotating.rotation import add_angles, load_row_map, table_columns
from ..tiles import VisibleRange, band_unit, clamp_rows, find_cached_sequence, load_band, row_program
from .stored_positions import (
    LIMIT,
    NOWHERE,
    Position,
    cos_sin_of,
    load_stored,
    load_turns,
    of_pairs,
    split_position,
    turned,
)

DIGIT = tl.constexpr(cos_sin.FINE_ROWS)
DIGIT_BITS = tl.constexpr(cos_sin.FINE_ROWS.bit_length() - 1)
SIGNED_DIGITS = tl.constexpr(cos_sin.TOP_ROWS // 2)
ENTRY_FIELDS = tl.constexpr(3)  # position of row 0, first visible row, row after the last visible one
TOKEN_FIELDS = tl.constexpr(2)  # position, last column that the token sees; then two columns for every band
# If VARIANT.stored, an entry has one more field: the rank of its row 0 among the visible keys. A token then has, after
# its other fields, a Position for every axis.

# ---- maps


@triton.jit
def floor_div(x, n):
    """Returns x / n, rounded down, also for negative x."""
    quotient = tl.where(x < 0, -1 - x, x) // n
    return tl.where(x < 0, -1 - quotient, quotient)


@triton.jit
def mapped_position(maps, rotation, position):
    """Returns a Position mapped by the rotation's row of Scheme.maps, as ``rotary.bands.PositionMap`` does."""
    row_map = load_row_map(maps, rotation)
    chunk, whole = tl.maximum(row_map.chunk, 1), position.whole
    whole = tl.where(row_map.chunk > 0, whole - floor_div(whole, chunk) * chunk, whole)
    whole = floor_div(whole, row_map.group)
    part = tl.where((row_map.group > 1) | (whole >= row_map.last), 0, position.part)
    return Position(tl.minimum(whole, row_map.last), part)


@triton.jit
def mapped_keys(position, band, maps):
    """Returns, for queries at whole positions [M], the range of whole positions at which they see keys in a band. The
    scheme must have maps."""
    unit = band_unit(maps)
    own = floor_div(position, unit)
    stop = tl.minimum((own - band.start + 1) * unit, position + 1)
    return VisibleRange((own - band.stop + 1) * unit, stop)


# ---- the pass before the attention


class Entries(NamedTuple):
    """Block-table entries, each field [E]: slot and position of row 0, and the visible rows [first, stop). If slots
    store positions, `position` is added to the stored positions."""

    slot: object
    position: object
    first: object
    stop: object


@triton.jit
def page_rows(cache, PAGE_SIZE: tl.constexpr):
    """Returns the number of slots of a page. A contiguous cache has one page per sequence."""
    return PAGE_SIZE if PAGE_SIZE > 0 else decode_int(cache.capacity)


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
def token_fields(VARIANT: tl.constexpr):
    COORDINATES: tl.constexpr = 0 if not VARIANT.stored else VARIANT.axes if VARIANT.axes > 0 else 1
    return TOKEN_FIELDS + 2 * VARIANT.num_bands + 2 * COORDINATES


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


class Columns(NamedTuple):
    """A range [begin, end) of columns, or of tiles of columns."""

    begin: object
    end: object


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


# ---- in the attention


class PlacedKeys(NamedTuple):
    """The keys that each row of a tile of queries [M] sees. They are at positions first to stop - 1 and in columns up
    to `column`. part: the fractional part of the row's own position, if slots store positions of one axis."""

    first: object
    stop: object
    column: object
    part: object


class MappedKeys(NamedTuple):
    """PlacedKeys of a scheme with maps. position: the position of each row, rounded down (``Position.whole``).
    by_chunk: whether first and stop are chunk boundaries, which are compared with positions that are rounded down."""

    first: object
    stop: object
    column: object
    part: object
    position: object
    by_chunk: object


class TileEntries(NamedTuple):
    """The fields of cache.entries for the keys of a tile: [N], or scalars if the tile lies in one page."""

    position: object
    first: object
    stop: object


class NumberedEntries(NamedTuple):
    """TileEntries of an axial scheme. number: the rank of row 0 among the visible keys."""

    position: object
    first: object
    stop: object
    number: object


class Places(NamedTuple):
    """The keys of a tile, each field [N].

    page, row: where to load the key. A hidden key is replaced by another key of the sequence, which is then masked.
    position: the whole position, which bands compare. For axial schemes, the rank among the visible keys.
    visible: whether the key is visible.
    start: if VARIANT.stored, what is added to stored positions. If not, and if VARIANT.one_run, the position of the
        tile's first key.
    part: the fractional part of the position, if slots store positions of one axis.
    """

    page: object
    row: object
    position: object
    visible: object
    start: object
    part: object


class LastVisible(NamedTuple):
    """The page and the row of a sequence's last visible key."""

    page: object
    row: object


@triton.jit
def load_token(cache, token, field, VARIANT: tl.constexpr):
    """Loads a field of cache.tokens for queries [M]. token: their indices over all sequences."""
    return tl.load(cache.tokens + token * token_fields(VARIANT) + field)


@triton.jit
def band_columns(cache, token, b, VARIANT: tl.constexpr):
    """Returns the Columns, in tiles of VARIANT.block_n, that hold all keys that any of these queries [M] sees in band
    b."""
    begin = tl.min(load_token(cache, token, TOKEN_FIELDS + 2 * b, VARIANT), 0)
    end = tl.max(load_token(cache, token, TOKEN_FIELDS + 2 * b + 1, VARIANT), 0)
    return Columns(begin // VARIANT.block_n, tl.cdiv(end, VARIANT.block_n))


@triton.jit
def load_query_position(cache, token, axis: tl.constexpr, VARIANT: tl.constexpr):
    """Loads the Position of these queries [M] on an axis. VARIANT.stored must hold."""
    FIELD: tl.constexpr = TOKEN_FIELDS + 2 * VARIANT.num_bands + 2 * axis
    return Position(load_token(cache, token, FIELD, VARIANT), load_token(cache, token, FIELD + 1, VARIANT))


@triton.jit
def explicit_keys(position, column, band, cache, token, maps, VARIANT: tl.constexpr):
    """Returns the PlacedKeys of queries [M] in a band. column: the last column that each query sees. token: the
    queries' indices over all sequences."""
    part = position
    if VARIANT.stored and VARIANT.axes == 0:
        part = load_query_position(cache, token, 0, VARIANT).part
    if maps is None:
        return PlacedKeys(position - band.stop + 1, position - band.start + 1, column, part)
    else:
        seen = mapped_keys(position, band, maps)
        return MappedKeys(seen.first, seen.stop, column, part, position, tl.load(maps) > 0)


@triton.jit
def last_visible(cache, batch, VARIANT: tl.constexpr):
    slot = tl.load(cache.visible + 2 * batch + 1)
    page = valid_page(cache, load_page(cache, batch, slot, VARIANT.page_size))
    return LastVisible(page, row_in_page(cache, slot, VARIANT.page_size))


@triton.jit
def load_tile_entries(cache, batch, first_slot, slots, VARIANT: tl.constexpr):
    """Returns the TileEntries of the keys in a tile of slots. first_slot: the tile's first slot, which may be beyond
    the sequence's end. slots [N]: slots of existing keys; beyond the last key they repeat its slot."""
    rows = page_rows(cache, VARIANT.page_size)
    entries = decode_int(cache.capacity) // rows
    if VARIANT.one_run:
        entry = tl.minimum(first_slot // rows, entries - 1)
    else:
        entry = slots // rows
    at = cache.entries + (batch.to(tl.int64) * entries + entry) * (ENTRY_FIELDS + VARIANT.stored)
    if VARIANT.axes > 0:
        return NumberedEntries(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    else:
        return TileEntries(tl.load(at), tl.load(at + 1), tl.load(at + 2))


@triton.jit
def tile_places(cache, entries, page, last, first_slot, slots, VARIANT: tl.constexpr):
    """Returns the Places of a tile with these TileEntries. page: the page of every key, or one page for the tile. last:
    LastVisible."""
    rows = page_rows(cache, VARIANT.page_size)
    if VARIANT.one_run:
        first_row = first_slot % rows
        row = first_row + tl.arange(0, VARIANT.block_n)
        start = entries.position + first_row
    else:
        row = slots % rows
        start = entries.position
    some = entries.stop > entries.first
    read = clamp(row, entries.first, entries.stop - 1).to(tl.int64)
    page, read = tl.where(some, page, last.page), tl.where(some, read, last.row)
    visible = (row >= entries.first) & (row < entries.stop)
    if not VARIANT.stored:
        return Places(page, read, entries.position + row, visible, start, row)
    elif VARIANT.axes > 0:
        return Places(page, read, entries.number + row, visible, entries.position, row)
    else:
        stored = load_stored(cache, page, read, entries.position, 0, VARIANT)
        return Places(page, read, stored.whole, visible, entries.position, stored.part)


@triton.jit
def sees(keys, places, column, maps, VARIANT: tl.constexpr):
    """Returns whether each row of PlacedKeys sees each key of the tile that starts at `column`, [M, BN]. places: the
    Places of these keys."""
    position, columns = places.position[None, :], column + tl.arange(0, VARIANT.block_n)[None, :]
    exists = places.visible[None, :]
    if VARIANT.stored and VARIANT.axes == 0:  # keys with a larger fraction than the query count as one position higher
        beyond = (places.part[None, :] > keys.part[:, None]).to(tl.int32)
        if maps is not None:
            exists = exists & (position + beyond <= keys.position[:, None])
            beyond = tl.where(keys.by_chunk, 0, beyond)
        position += beyond
    in_band = (position >= keys.first[:, None]) & (position < keys.stop[:, None])
    return in_band & (columns <= keys.column[:, None]) & exists


@triton.jit
def load_digits(ptr, position, D: tl.constexpr):
    """Returns cos and sin of one position or of positions [M, 1], combined from the table rows of a position's three
    digits.

    ptr: [COUNT] or [1, COUNT], into the table of ``flashrope.schemes.cos_sin.three_level_table``."""
    low = position & (DIGIT - 1)
    middle = ((position >> DIGIT_BITS) & (DIGIT - 1)) + DIGIT
    top = (position >> (2 * DIGIT_BITS)) + (2 * DIGIT + SIGNED_DIGITS)
    low, middle, top = ptr + low * D, ptr + middle * D, ptr + top * D
    cos, sin = add_angles(tl.load(low), tl.load(low + D // 2), tl.load(middle), tl.load(middle + D // 2))
    return add_angles(cos, sin, tl.load(top), tl.load(top + D // 2))


@triton.jit
def explicit_cos_sin(table, rotation, position, VARIANT: tl.constexpr):
    """Returns cos and sin [M, D/2] of positions [M], which the scheme may map."""
    D: tl.constexpr = VARIANT.block_d
    if table.maps is not None:
        position = mapped_position(table.maps, rotation, Position(position, position)).whole
    ptr = table_columns(table, rotation, 0, D // 2, D)
    return load_digits(ptr[None, :], position[:, None], D)


@triton.jit
def explicit_query_cos_sin(table, rotation, cache, token, position, VARIANT: tl.constexpr):
    """Returns cos and sin [M, D/2] of queries at positions [M]. token: the queries' indices over all sequences."""
    if VARIANT.stored:
        COORDINATES: tl.constexpr = VARIANT.axes if VARIANT.axes > 0 else 1
        turns, found = load_turns(table, rotation, VARIANT), None
        for axis in tl.static_range(COORDINATES):
            place = load_query_position(cache, token, axis, VARIANT)
            if table.maps is not None:
                place = mapped_position(table.maps, rotation, place)
            found = of_pairs(found, place, turns, axis)
        cos, sin = cos_sin_of(turned(found, turns) + turns.start[None, :])
        return cos * turns.factor[None, :], sin * turns.factor[None, :]
    else:
        return explicit_cos_sin(table, rotation, position, VARIANT)


@triton.jit
def explicit_key_cos_sin(table, rotation, cache, places, VARIANT: tl.constexpr):
    """Returns cos and sin [N, D/2] of the keys of a tile. If VARIANT.one_run, the angles of the tile's first key are
    combined with table rows that are the same for every tile."""
    if VARIANT.stored:  # rotations of keys have no offset and no factor, so turns.start and turns.factor are not read
        turns = load_turns(table, rotation, VARIANT)
        if VARIANT.axes == 0:
            place = Position(places.position, places.part)
            if table.maps is not None:
                place = mapped_position(table.maps, rotation, place)
            found = of_pairs(None, place, turns, 0)
        else:
            found = None
            AXES: tl.constexpr = VARIANT.axes
            for axis in tl.static_range(AXES):
                at = load_stored(cache, places.page, places.row, places.start, axis, VARIANT)
                found = of_pairs(found, at, turns, axis)
        return cos_sin_of(turned(found, turns))
    elif VARIANT.one_run and table.maps is None:
        D: tl.constexpr = VARIANT.block_d
        ptr = table_columns(table, rotation, 0, D // 2, D)
        start_cos, start_sin = load_digits(ptr, places.start, D)
        at = ptr[None, :] + tl.arange(0, VARIANT.block_n)[:, None] * D
        return add_angles(tl.load(at), tl.load(at + D // 2), start_cos[None, :], start_sin[None, :])
    else:
        return explicit_cos_sin(table, rotation, places.position, VARIANT)
