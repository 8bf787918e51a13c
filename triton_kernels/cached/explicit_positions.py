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
from ..tiles import VisibleRange, band_unit
from .stored_positions import (
    Position,
    cos_sin_of,
    load_stored,
    load_turns,
    of_pairs,
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


@triton.jit
def page_rows(cache, PAGE_SIZE: tl.constexpr):
    """Returns the number of slots of a page. A contiguous cache has one page per sequence."""
    return PAGE_SIZE if PAGE_SIZE > 0 else decode_int(cache.capacity)


@triton.jit
def token_fields(VARIANT: tl.constexpr):
    COORDINATES: tl.constexpr = 0 if not VARIANT.stored else VARIANT.axes if VARIANT.axes > 0 else 1
    return TOKEN_FIELDS + 2 * VARIANT.num_bands + 2 * COORDINATES


class Columns(NamedTuple):
    """A range [begin, end) of columns, or of tiles of columns."""

    begin: object
    end: object


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
