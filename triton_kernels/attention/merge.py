"""Merges attention of the same queries to two sets of keys by their lse."""

import triton
import triton.language as tl

from ..rows import head_view, load_values, tile_offsets
from ..softmax import LOG2_E
from ..tiles import head_program, lse_offset


@triton.jit(do_not_specialize=["first", "rows", "seqlen", "heads"])
def merge_rows(out, lse, more, more_lse, first, rows, seqlen, heads, VARIANT: tl.constexpr):
    """Merges more (batch, rows, heads, head_dim_v) into the rows of out (batch, seqlen, heads, head_dim_v) from
    `first` on. out, more: TensorViews. lse (batch, heads, seqlen) and more_lse (batch, heads, rows) are contiguous.
    Rows that see no key in either set keep out 0 and lse -inf."""
    batch, head, start = head_program(rows, heads, VARIANT.block_m)
    row = start + tl.arange(0, VARIANT.block_m)
    exists = row < rows
    to_lse = lse + lse_offset(None, batch, head, heads, 0, seqlen) + first + row
    a = tl.load(to_lse, mask=exists, other=float("-inf"))  # [M]
    b = tl.load(more_lse + lse_offset(None, batch, head, heads, 0, rows) + row, mask=exists, other=float("-inf"))
    largest = tl.maximum(a, b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp2((a - largest) * LOG2_E), tl.exp2((b - largest) * LOG2_E)
    total = weight_a + weight_b
    unseen = total == 0.0
    total = tl.where(unseen, 1.0, total)
    inverse = 1.0 / total
    loaded = tl.minimum(tl.arange(0, VARIANT.block_m), rows - start - 1)
    to, of = head_view(out, batch, first + start, head, VARIANT), head_view(more, batch, start, head, VARIANT)
    channels = tl.arange(0, VARIANT.block_dv)
    own = load_values(to.ptr, tile_offsets(loaded, to), channels, VARIANT).to(tl.float32)  # [M, DV]
    other = load_values(of.ptr, tile_offsets(loaded, of), channels, VARIANT).to(tl.float32)
    merged = own * (weight_a * inverse)[:, None] + other * (weight_b * inverse)[:, None]
    tl.debug_barrier()  # several warps load the same row: all must have loaded it before one of them writes it
    tl.store(to_lse, tl.where(unseen, float("-inf"), largest + tl.log(total)), mask=exists)
    mask = exists[:, None] & (channels < VARIANT.head_dim_v)[None, :]
    ptrs = to.ptr + tile_offsets(tl.arange(0, VARIANT.block_m), to) + channels[None, :]
    tl.store(ptrs, merged.to(to.ptr.dtype.element_ty), mask=mask)
