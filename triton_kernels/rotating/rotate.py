"""Rotates keys (before the forward) or queries (before the backward) once per distinct rotation, into a workspace.

If the inner loop of attention rotated keys, every warp would have to rotate the whole key tile. On sm_80 that takes 637
to 941 instructions per iteration at head_dim 64, and spills registers at head_dim 128.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import decode_int
from ..kv_cache import load_page, row_in_page, valid_page
from ..rows import TileRows, existing_rows, head_view, page_offsets, store_channels, tile_offsets, tile_rows
from ..tiles import copied_keys, find_cached_sequence, packed_row, row_program, sequence_rows
from .channels import load_part, operand_tiles
from .pairs import join_pairs, load_key_pairs, store_pairs
from .rotation import CosSinTable, load_cos_sin, query_scale, rotate


@triton.jit
def load_copied_cos_sin(table, rotation, rows, VARIANT: tl.constexpr):
    """Loads cos and sin of a rotation for the pairs that a copy holds: the pairs of the first of VARIANT.channels, or
    all pairs if there are no parts. Returns two tiles [M, N]."""
    PART: tl.constexpr = len(VARIANT.channels) > 0
    FIRST: tl.constexpr = VARIANT.channels[0].pair if PART else 0
    COUNT: tl.constexpr = VARIANT.channels[0].width // 2 if PART else VARIANT.block_d // 2
    return load_cos_sin(table, rotation, rows, FIRST, COUNT, VARIANT)


@triton.jit
def load_copied_pairs(view, offsets, VARIANT: tl.constexpr):
    """Loads the pairs that a copy holds from the rows at offsets [M, 1]. Returns first and second members, two float32
    tiles [M, N]."""
    if len(VARIANT.channels) > 0:
        x, y = operand_tiles(load_part(view.ptr, offsets, 0, VARIANT), 0, VARIANT)
    else:
        x, y = load_key_pairs(view.ptr, offsets, VARIANT, tl.float32)
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def store_copied_pairs(view, first, second, rows, VARIANT: tl.constexpr):
    """Stores the pairs that a copy holds. first, second: their members, two tiles [M, N]. If VARIANT.channels has
    parts, a row of the copy has only the channels of the first part, in the order that ``copies.py`` reads."""
    if len(VARIANT.channels) > 0:
        store_part(view, first, second, rows, VARIANT)
    else:
        store_pairs(view, first, second, rows, 0, VARIANT)


@triton.jit
def store_part(view, first, second, rows, VARIANT: tl.constexpr):
    """Stores the part that rotates, two tiles [M, width / 2], in rows of `width` channels, as ``copies.py`` reads
    them."""
    WIDTH: tl.constexpr = VARIANT.channels[0].width
    if VARIANT.interleaved:
        dtype = view.ptr.dtype.element_ty
        pairs = join_pairs(first.to(dtype), second.to(dtype), VARIANT)
        store_channels(view, pairs, rows, tl.arange(0, WIDTH), WIDTH)
    else:
        pair = tl.arange(0, WIDTH // 2)
        store_channels(view, first, rows, pair, WIDTH)
        store_channels(view, second, rows, pair + WIDTH // 2, WIDTH)


@triton.jit(do_not_specialize=["seqlen", "seqlen_other", "max_seqlen", "table_rows", "heads"])
def rotate_rows(
    x,
    out,
    rotations,
    scheme,
    cu_seqlens,
    cu_seqlens_other,
    seqlen,
    seqlen_other,
    max_seqlen,
    table_rows,
    heads,
    cache,
    HEADS_PER_PROGRAM: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Writes one rotated copy of x for every rotation.

    x: TensorView. out: TensorView (copy, row, head). If VARIANT.channels has parts, out holds only the first part.
    rotations: int32, the rotation of every copy. cu_seqlens_other, seqlen_other: the lengths of k if x holds queries,
    and of q if x holds keys. cache: the CacheLayout if x holds the new keys of a cache, which are the last keys of
    every sequence. Otherwise a CacheLayout whose fields are all None."""
    batch, first = row_program(max_seqlen, VARIANT.block_m)
    if cache.seqlens is None:
        start, length = sequence_rows(cu_seqlens, batch, seqlen)
        _, length_other = sequence_rows(cu_seqlens_other, batch, seqlen_other)
    else:
        seq = find_cached_sequence(cache, cu_seqlens, batch, seqlen)
        start, length, length_other = seq.start_q, seq.length_q, seq.length_k
    if first >= length:
        return
    packed = packed_row(cu_seqlens, batch, start, seqlen)
    rows = tile_rows(first, length, length_other, packed, scheme, VARIANT.block_m, VARIANT.rotated_keys)
    loaded = existing_rows(rows)
    copy = tl.program_id(2)
    table = CosSinTable(scheme.table, table_rows, scheme.positions, scheme.maps)
    cos, sin = load_copied_cos_sin(table, tl.load(rotations + copy), rows, VARIANT)
    log_n = query_scale(scheme, rows.start + loaded, first + rows.index + length_other - length, length_other)[:, None]
    packed += first
    begin, end = tl.program_id(1) * HEADS_PER_PROGRAM, (tl.program_id(1) + 1) * HEADS_PER_PROGRAM
    for head in range(begin, tl.minimum(end, heads)):
        view = head_view(x, batch, start + first, head, VARIANT)
        first_x, second_x = load_copied_pairs(view, tile_offsets(loaded, view), VARIANT)
        first_x, second_x = rotate(first_x, second_x, cos, sin)
        to = head_view(out, copy, packed, head, VARIANT)
        store_copied_pairs(to, first_x * log_n, second_x * log_n, rows, VARIANT)


class KeyRange(NamedTuple):
    """The rotation of a copy of k, and the distance at which the last band that reads the copy stops."""

    rotation: object
    stop: object


KEY_RANGE_FIELDS = tl.constexpr(len(KeyRange._fields))


@triton.jit
def find_key_range(key_ranges, copy):
    row = key_ranges + KEY_RANGE_FIELDS * copy
    return KeyRange(rotation=tl.load(row), stop=tl.load(row + 1))


@triton.jit(do_not_specialize=["seqlen_q", "rows_out", "max_rows", "table_rows", "heads"])
def rotate_cached_rows(
    k_cache,
    out,
    key_ranges,
    table,
    maps,
    cache,
    cu_seqlens_q,
    seqlen_q,
    rows_out,
    max_rows,
    table_rows,
    heads,
    HEADS_PER_PROGRAM: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Writes rotated copies of the last keys of every sequence of a cache. ``tiles.copied_keys`` says which keys.

    k_cache: TensorView (batch or page, row, head). out: TensorView (copy, row, head). If VARIANT.channels has parts,
    it holds only the first part. key_ranges: int32 (copies, 2), rows of KeyRange. A tile is skipped if all its keys are
    at a distance of `stop` or more from all queries. table, maps: as in Scheme. rows_out: how many of a sequence's last
    keys are copied, the argument `rows` of copied_keys. max_rows: the largest number of keys of a sequence in a
    copy."""
    batch, row_out = row_program(max_rows, VARIANT.block_m)
    seq = find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q)
    packed, first = copied_keys(cache, cu_seqlens_q, seq, rows_out)
    first += row_out
    copy = tl.program_id(2)
    copied = find_key_range(key_ranges, copy)
    skip = (first >= seq.length_k) | (first + VARIANT.block_m <= seq.ahead - copied.stop + 1)
    if cu_seqlens_q is not None:
        skip |= seq.length_q <= decode_int(cache.decode_seqlen)
    if skip:
        return
    shift = tl.maximum(-seq.ahead, 0)  # avoids negative positions, as in tile_rows
    rows = TileRows(tl.arange(0, VARIANT.block_m), first + shift, first, seq.length_k)
    cos_sin_table = CosSinTable(table, table_rows, None, maps)
    cos, sin = load_copied_cos_sin(cos_sin_table, copied.rotation, rows, VARIANT)
    slot = seq.start_k + first + existing_rows(rows)
    page = valid_page(cache, load_page(cache, batch, slot, VARIANT.page_size))
    row = row_in_page(cache, slot, VARIANT.page_size)
    packed += row_out
    begin, end = tl.program_id(1) * HEADS_PER_PROGRAM, (tl.program_id(1) + 1) * HEADS_PER_PROGRAM
    for head in range(begin, tl.minimum(end, heads)):
        view = head_view(k_cache, 0, 0, head, VARIANT)
        x, y = load_copied_pairs(view, page_offsets(page, row, view), VARIANT)
        x, y = rotate(x, y, cos, sin)
        store_copied_pairs(head_view(out, copy, packed, head, VARIANT), x, y, rows, VARIANT)
