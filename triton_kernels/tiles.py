"""Finds a program's sequence, and the tiles that a band covers. rows.py loads and stores the rows of a tile.

Comments such as # [BM, D] give shapes. BM, BN, D and DV are VARIANT's block_m, block_n, block_d and block_dv.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import decode_int
from .kv_cache import cache_bounds

# ---- sequences


class TileSequence(NamedTuple):
    """One sequence of the batch. start_q, start_k: the sequence's first row of q and of k if tensors are packed, else
    0. With a cache, start_k is the sequence's first slot. ahead: length_k - length_q. Query row r is at position
    r + ahead."""

    batch: object
    start_q: object
    length_q: object
    start_k: object
    length_k: object
    ahead: object


@triton.jit
def find_sequence(cu_seqlens, batch, seqlen_q, seqlen_k):
    start_q, length_q = sequence_rows(cu_seqlens.q, batch, seqlen_q)
    start_k, length_k = sequence_rows(cu_seqlens.k, batch, seqlen_k)
    return TileSequence(batch, start_q, length_q, start_k, length_k, length_k - length_q)


@triton.jit
def find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q):
    """Returns the TileSequence of a batch index. cu_seqlens_q: None if queries are not packed."""
    start_q, length_q = sequence_rows(cu_seqlens_q, batch, seqlen_q)
    start_k, length_k = cache_bounds(cache, batch, None if cu_seqlens_q is None else length_q)
    return TileSequence(batch, start_q, length_q, start_k, length_k, length_k - length_q)


@triton.jit
def copied_keys(cache, cu_seqlens_q, seq, rows):
    """Returns (the sequence's first row in rotated_k, the first key that is copied there).

    rotated_k holds the last `rows` keys of every sequence. With packed queries it holds the last length_q + rows keys
    of every sequence that `attention_chunks` serves."""
    if cu_seqlens_q is None:
        return seq.batch.to(tl.int64) * rows, tl.maximum(seq.length_k - rows, 0)
    else:
        # A sequence with a copy has more than decode_seqlen queries. So at most start_q // (decode_seqlen + 1) of the
        # sequences before this one have a copy, and at most all of them.
        before = tl.minimum(seq.start_q // (decode_int(cache.decode_seqlen) + 1), seq.batch)
        start = seq.start_q + before * rows
        return start, tl.maximum(seq.length_k - seq.length_q - rows, 0)


@triton.jit
def sequence_rows(cu_seqlens, batch, seqlen):
    """Returns (first row, length) of a sequence. cu_seqlens: None if tensors are not packed. If they are, seqlen is the
    total number of rows, and both results are clamped to it."""
    if cu_seqlens is None:
        return tl.full((), 0, tl.int64), seqlen
    else:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), seqlen)
        stop = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch + 1), start), seqlen)
        return start.to(tl.int64), stop - start


@triton.jit
def packed_row(cu_seqlens, batch, start, seqlen):
    """Returns the sequence's first row in a contiguous tensor (batch * seqlen or total, ...)."""
    if cu_seqlens is None:
        return batch.to(tl.int64) * seqlen
    else:
        return start


@triton.jit
def lse_offset(cu_seqlens, batch, head, heads, start, seqlen):
    """Returns the offset of a sequence's first row in lse, which is (batch, heads, seqlen) or packed (heads, total)."""
    if cu_seqlens is None:
        return (batch.to(tl.int64) * heads + head) * seqlen
    else:
        return head.to(tl.int64) * seqlen + start


# ---- what a program works on


@triton.jit
def row_program(max_seqlen, BLOCK: tl.constexpr):
    """Returns (batch, first row) of a program that serves several heads."""
    tiles = tl.cdiv(max_seqlen, BLOCK)
    return tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK


@triton.jit
def head_program(max_seqlen, heads, BLOCK: tl.constexpr):
    """Returns (batch, head, first row) of a program. Programs for the first rows start first. If the rows are keys,
    these programs take longest, because most queries see the first keys."""
    tiles = tl.cdiv(max_seqlen, BLOCK)
    first = tl.program_id(0) % tiles * BLOCK
    return tl.program_id(0) // tiles // heads, tl.program_id(0) // tiles % heads, first


@triton.jit
def query_program(max_seqlen_q, heads_q, VARIANT: tl.constexpr):
    """Returns (batch, query head, first query row) of a program. Programs for the last queries start first. Under a
    causal mask these programs take longest."""
    tiles = tl.cdiv(max_seqlen_q, VARIANT.block_m)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // heads_q
    head = tl.program_id(0) // tiles % heads_q
    return batch, head, tile * VARIANT.block_m


# ---- bands and their tiles


class BandRow(NamedTuple):
    """One row of the band table. ``flashrope.schemes.lowered.LoweredBand`` says what the fields mean."""

    start: object
    stop: object
    q_rotation: object
    k_rotation: object
    k_copy: object
    dq_step: object
    dk_step: object


BAND_FIELDS = tl.constexpr(len(BandRow._fields))


@triton.jit
def load_band(bands, band):
    row = bands + BAND_FIELDS * band
    return BandRow(
        start=tl.load(row),
        stop=tl.load(row + 1),
        q_rotation=tl.load(row + 2),
        k_rotation=tl.load(row + 3),
        k_copy=tl.load(row + 4),
        dq_step=tl.load(row + 5),
        dk_step=tl.load(row + 6),
    )


@triton.jit
def previous_band(bands, band: tl.constexpr):
    """Returns the BandRow before `band`, or band 0 if `band` is 0."""
    return load_band(bands, band - 1 if band > 0 else 0)


class VisibleRange(NamedTuple):
    """The rows [first, stop) of the other side that each row of a tile [M] sees in a band. The other side of queries is
    keys, and the other side of keys is queries."""

    first: object
    stop: object


@triton.jit
def visible_keys(position_q, band, length, maps=None):
    """Returns the VisibleRange of queries at position_q [M] over `length` keys. maps: Scheme.maps."""
    if maps is None:
        return VisibleRange(position_q - band.stop + 1, tl.minimum(position_q - band.start + 1, length))
    else:
        unit = band_unit(maps)
        stop = tl.minimum((position_q // unit - band.start + 1) * unit, position_q + 1)
        return VisibleRange((position_q // unit - band.stop + 1) * unit, tl.minimum(stop, length))


@triton.jit
def visible_queries(position_k, band, ahead, maps=None):
    """Returns the VisibleRange of keys at position_k [M] over query rows. Query row r is at position r + ahead."""
    if maps is None:
        return VisibleRange(position_k + band.start - ahead, position_k + band.stop - ahead)
    else:
        unit = band_unit(maps)
        first = tl.maximum((position_k // unit + band.start) * unit, position_k)
        return VisibleRange(first - ahead, (position_k // unit + band.stop) * unit - ahead)


@triton.jit
def band_unit(maps):
    """Returns the unit of a band's start and stop, in positions: the chunk length if bands count chunks, else 1."""
    return tl.maximum(tl.load(maps), 1)


@triton.jit
def is_visible(visible, first, BLOCK: tl.constexpr):
    """Returns whether each of M rows sees each of the columns `first` to `first` + BLOCK - 1 of the other side,
    [M, BLOCK]."""
    return sees_columns(visible, first, tl.arange(0, BLOCK)[None, :])


@triton.jit
def sees_columns(visible, first, columns):
    """Returns whether each of M rows sees each of the columns first + columns of the other side. columns: [1, N], or
    [G, 1, N] for G groups."""
    return (columns >= (visible.first - first)[:, None]) & (columns < (visible.stop - first)[:, None])


class TileRange(NamedTuple):
    """Tiles [begin, end) hold visible (query, key) pairs. In tiles [inner_begin, inner_end) every pair is visible."""

    begin: object
    inner_begin: object
    inner_end: object
    end: object


@triton.jit
def tile_range(first, last, reach_first, reach_last, length, BLOCK: tl.constexpr):
    """Returns the tiles of BLOCK columns that rows first..last see. Row x sees columns x + reach_first to x +
    reach_last within [0, length)."""
    first_row = VisibleRange(first + reach_first, first + reach_last + 1)
    return visible_tiles(first_row, VisibleRange(last + reach_first, last + reach_last + 1), length, BLOCK)


@triton.jit
def visible_tiles(first_row, last_row, length, BLOCK: tl.constexpr):
    """Returns the tiles of BLOCK columns, within [0, length), that a run of rows sees. first_row, last_row: the
    VisibleRange of its first and of its last row. Neither bound may decrease from the first row to the last."""
    begin = tl.maximum(first_row.first, 0) // BLOCK
    end = tl.cdiv(tl.maximum(tl.minimum(last_row.stop, length), 0), BLOCK)
    end = tl.maximum(end, begin)
    inner_begin = tl.cdiv(tl.maximum(last_row.first, 0), BLOCK)
    inner_begin = tl.minimum(tl.maximum(inner_begin, begin), end)
    inner_end = tl.maximum(tl.minimum(first_row.stop, length), 0) // BLOCK
    inner_end = tl.minimum(tl.maximum(inner_end, inner_begin), end)
    return TileRange(begin, inner_begin, inner_end, end)


@triton.jit
def key_tiles(band, first_q, last_q, length_k, BLOCK: tl.constexpr, maps=None):
    """Returns a band's TileRange of keys for queries at positions first_q to last_q."""
    if maps is None:
        return tile_range(first_q, last_q, 1 - band.stop, -band.start, length_k, BLOCK)
    else:
        first_row, last_row = visible_keys(first_q, band, length_k, maps), visible_keys(last_q, band, length_k, maps)
        return visible_tiles(first_row, last_row, length_k, BLOCK)


@triton.jit
def query_tiles(band, first_k, last_k, ahead, length_q, BLOCK: tl.constexpr, maps=None):
    """Returns a band's TileRange of queries for keys first_k to last_k."""
    if maps is None:
        return tile_range(first_k - ahead, last_k - ahead, band.start, band.stop - 1, length_q, BLOCK)
    else:
        first_row, last_row = visible_queries(first_k, band, ahead, maps), visible_queries(last_k, band, ahead, maps)
        return visible_tiles(first_row, last_row, length_q, BLOCK)


@triton.jit
def edge_count(tiles):
    return tiles.inner_begin - tiles.begin + tiles.end - tiles.inner_end


@triton.jit
def edge_tile(tiles, step):
    """Returns the step-th tile of [begin, inner_begin) followed by [inner_end, end)."""
    return (
        tiles.begin + step + tl.where(step >= tiles.inner_begin - tiles.begin, tiles.inner_end - tiles.inner_begin, 0)
    )
