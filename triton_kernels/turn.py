"""Turns keys (before the forward) or queries (before the backward) once per distinct turn, into a workspace.

Done in the inner loop of attention instead, every warp would rotate the whole key tile: 637 to 941 instructions per
iteration on sm_80 at head_dim 64, and spills at 128.
"""

import triton
import triton.language as tl

from .tiles import cos_sin, head_ptr, inside, load_pairs, packed_row, query_scale, sequence, store_pairs, stride, turn


@triton.jit(do_not_specialize=["seqlen", "seqlen_other", "max_seqlen", "table_rows"])
def turn_rows(x, out, slots, angles, cu_seqlens, cu_seqlens_other, seqlen, seqlen_other, max_seqlen, table_rows, heads, scales,
              LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr):
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
    cos, sin = cos_sin(angles, tl.load(slots + slot), table_rows, table_row, rows, length - first, 0, LAYOUT.block_d // 2, LAYOUT)
    log_n = query_scale(angles, scales, table_row + safe, first + rows + length_other - length)[:, None]
    packed = packed_row(cu_seqlens, batch, start, seqlen) + first
    for head in range(tl.program_id(1) * HEADS_PER_PROGRAM, tl.minimum((tl.program_id(1) + 1) * HEADS_PER_PROGRAM, heads)):
        ptr = head_ptr(x, batch, start + first, head, LAYOUT)
        first_x, second_x = load_pairs(ptr, safe, stride(x.row, LAYOUT), 0, LAYOUT.block_d // 2, LAYOUT)
        first_x, second_x = turn(first_x, second_x, cos, sin)  # [BM, D/2]
        ptr = head_ptr(out, slot, packed, head, LAYOUT)
        store_pairs(ptr, first_x * log_n, second_x * log_n, rows, length - first, stride(out.row, LAYOUT), 0, LAYOUT)
