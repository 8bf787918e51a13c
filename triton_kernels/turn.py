"""Turns keys (before the forward, over a cache those that it turns) or queries (before the backward) once per distinct
turn, into a workspace.

Done in the inner loop of attention instead, every warp would rotate the whole key tile: 637 to 941 instructions per
iteration on sm_80 at head_dim 64, and spills at 128.
"""

import triton
import triton.language as tl

from .tiles import (
    cache_bounds,
    cached_row,
    cos_sin,
    head_ptr,
    inside,
    load_pairs,
    packed_row,
    pairs_at,
    query_scale,
    sequence,
    store_pairs,
    stride,
    turn,
)


@triton.jit(do_not_specialize=["seqlen", "seqlen_other", "max_seqlen", "table_rows", "heads"])
def turn_rows(
    x,
    out,
    slots,
    angles,
    cu_seqlens,
    cu_seqlens_other,
    seqlen,
    seqlen_other,
    max_seqlen,
    table_rows,
    heads,
    scales,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    """x Strided (batch, row, head); out Strided (slot, row, head); slots int32: the table slot of every slot of out.
    The "other" lengths are those of the keys for queries, and of the queries for keys."""
    tiles = tl.cdiv(max_seqlen, BLOCK_M)
    batch = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_M
    start, length = sequence(cu_seqlens, batch, seqlen)
    _, length_other = sequence(cu_seqlens_other, batch, seqlen_other)
    if first >= length:
        return
    rows = tl.arange(0, BLOCK_M)
    safe = inside(rows, length - first)
    table_row = first + tl.maximum(length_other - length, 0)
    if angles.positions is not None:
        table_row += batch * seqlen
    slot = tl.program_id(2)
    cos, sin = cos_sin(
        angles, tl.load(slots + slot), table_rows, table_row, rows, length - first, 0, LAYOUT.block_d // 2, LAYOUT
    )
    log_n = query_scale(angles, scales, table_row + safe, first + rows + length_other - length)[:, None]
    packed = packed_row(cu_seqlens, batch, start, seqlen) + first
    for head in range(
        tl.program_id(1) * HEADS_PER_PROGRAM, tl.minimum((tl.program_id(1) + 1) * HEADS_PER_PROGRAM, heads)
    ):
        ptr = head_ptr(x, batch, start + first, head, LAYOUT)
        first_x, second_x = load_pairs(ptr, safe, stride(x.row, LAYOUT), 0, LAYOUT.block_d // 2, LAYOUT)
        first_x, second_x = turn(first_x, second_x, cos, sin)  # [BM, D/2]
        ptr = head_ptr(out, slot, packed, head, LAYOUT)
        store_pairs(ptr, first_x * log_n, second_x * log_n, rows, length - first, stride(out.row, LAYOUT), 0, LAYOUT)


@triton.jit(do_not_specialize=["seqlen_q", "rows_out", "table_rows", "heads"])
def turn_cached_rows(
    cache,
    out,
    turns,
    slots,
    angles,
    seqlen_q,
    rows_out,
    table_rows,
    heads,
    LAYOUT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    """The last rows_out keys of every sequence, or all where it has fewer: cache Strided (batch or page, row, head),
    out Strided (slot, row, head) with rows_out rows for each sequence. turns int32 (slots of out, 2): the table slot,
    and the distance at which the last band that uses it stops; keys beyond that from all seqlen_q queries are left out
    by whole tiles."""
    tiles = tl.cdiv(rows_out, BLOCK_M)
    batch = tl.program_id(0) // tiles
    row_out = tl.program_id(0) % tiles * BLOCK_M
    start, length = cache_bounds(slots, batch)
    first = tl.maximum(length - rows_out, 0) + row_out
    slot = tl.program_id(2)
    table_slot, reach = tl.load(turns + 2 * slot), tl.load(turns + 2 * slot + 1)
    if first >= length or first + BLOCK_M <= length - seqlen_q - reach + 1:
        return
    rows = tl.arange(0, BLOCK_M)
    shift = tl.maximum(seqlen_q - length, 0)  # as in attention_forward
    cos, sin = cos_sin(
        angles, table_slot, table_rows, first + shift, rows, length - first, 0, LAYOUT.block_d // 2, LAYOUT
    )
    page, row = cached_row(slots, batch, start + first + inside(rows, length - first), PAGE_SIZE)
    offsets = page * stride(cache.batch, LAYOUT) + row * stride(cache.row, LAYOUT)
    packed = packed_row(None, batch, start, rows_out) + row_out
    for head in range(
        tl.program_id(1) * HEADS_PER_PROGRAM, tl.minimum((tl.program_id(1) + 1) * HEADS_PER_PROGRAM, heads)
    ):
        x, y = pairs_at(head_ptr(cache, 0, 0, head, LAYOUT), offsets, LAYOUT)
        x, y = turn(x.to(tl.float32), y.to(tl.float32), cos, sin)  # [BM, D/2]
        store_pairs(
            head_ptr(out, slot, packed, head, LAYOUT), x, y, rows, length - first, stride(out.row, LAYOUT), 0, LAYOUT
        )
