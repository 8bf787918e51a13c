"""Turns keys (before the forward) or queries (before the backward) once per distinct turn, into a workspace.

Done in the inner loop of attention instead, every warp would rotate the whole key tile: 637 to 941 instructions per
iteration on sm_80 at head_dim 64, and spills at 128.
"""

import triton
import triton.language as tl

from .tiles import head_ptr, load_turned, packed_row, query_scale, sequence, store_rows, stride, turn_factors


@triton.jit(do_not_specialize=["seqlen", "seqlen_other", "max_seqlen", "table_rows"])
def turn_rows(x, out, slots, angles, cu_seqlens, cu_seqlens_other, seqlen, seqlen_other, max_seqlen, table_rows, heads, scales,
              HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
              VEC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr):
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
    channels = tl.arange(0, BLOCK_D)
    row_valid = rows < length - first
    table_row = first + rows + tl.maximum(length_other - length, 0)
    if angles.positions is not None:
        table_row += batch * seqlen
    slot = tl.program_id(2)
    cos, sin = turn_factors(angles, tl.load(slots + slot), table_rows, table_row, row_valid, channels, PAIRS, ROTARY_DIM, INTERLEAVED)
    log_n = query_scale(angles, scales, table_row, first + rows + length_other - length, row_valid)
    packed = packed_row(cu_seqlens, batch, start, seqlen) + first
    for head in range(tl.program_id(1) * HEADS_PER_PROGRAM, tl.minimum((tl.program_id(1) + 1) * HEADS_PER_PROGRAM, heads)):
        ptr = head_ptr(x, batch, start + first, head, VEC)
        turned = load_turned(ptr, rows, row_valid, channels, stride(x.row, VEC), cos, sin, HEAD_DIM, ROTARY_DIM, INTERLEAVED)  # [BM, D]
        turned *= log_n[:, None]
        store_rows(head_ptr(out, slot, packed, head, VEC), turned, rows, channels, stride(out.row, VEC), length - first, HEAD_DIM)
