"""Lays out gradients of scores in memory. ``attention_grad_kv`` stores them, and ``attention_grad_q`` multiplies them
with the keys.

A head of a sequence has a matrix with a row for every query and a column for every key. It lies in memory as contiguous
panels of PANEL_ROWS x PANEL_KEYS. A row of panels has as many panels as its last query needs. Under a causal mask the
first row has `width` panels, and each further row has `growth` panels more than the row before it. So a matrix takes
about half of the memory of a rectangle. Without a causal mask, every row has `width` panels.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .. import configs
from ..arguments import decode_int, decode_int64

PANEL_ROWS, PANEL_KEYS = tl.constexpr(configs.PANEL_ROWS), tl.constexpr(configs.PANEL_KEYS)
SMALLEST_TILE = tl.constexpr(configs.SMALLEST_TILE)
PANEL = tl.constexpr(configs.PANEL_ROWS * configs.PANEL_KEYS)  # elements


class Matrix(NamedTuple):
    """The gradients of one head's scores. ptr: pointer to the first panel. width: panels in the first row of panels.
    growth: how many panels every row has more than the row before it."""

    ptr: object
    width: object
    growth: object


@triton.jit
def launch_heads(score_grads, heads, group):
    """Returns (first batch index, first head, how many heads) of a launch. group: number of these heads per key head.
    score_grads: ScoreGrads, or None if the launch has all `heads`."""
    if score_grads is None:
        return 0, 0, heads
    else:
        first, count = decode_int(score_grads.head) * group, decode_int(score_grads.heads) * group
        return decode_int(score_grads.batch), first, count


@triton.jit
def score_matrix(score_grads, packed, batch, head):
    """Returns the Matrix of a query head of a sequence. packed: the sequence's first row if sequences are packed, or
    None. batch, head: counted from the first of the launch."""
    width, growth = decode_int(score_grads.width), decode_int(score_grads.growth)
    if packed is None:
        panels = batch * decode_int64(score_grads.stride_batch)
    else:
        panels = (packed // PANEL_ROWS + batch) * width
    panels += head * decode_int64(score_grads.stride_head)
    return Matrix(score_grads.ptr + panels * PANEL, width, growth)


@triton.jit
def panel_row(matrix, row, column):
    """Returns the pointer to a tile's first element. row, column: that element. All rows of the tile must lie in one
    row of panels."""
    row, column = tl.full((), 0, tl.int32) + row, tl.full((), 0, tl.int32) + column  # Python ints in the interpreter
    tl.assume(row >= 0)  # lets the compiler divide by shifting
    tl.assume(column >= 0)
    at = row // PANEL_ROWS
    panels = at * matrix.width + at * (at - 1) // 2 * matrix.growth + column // PANEL_KEYS
    offset = panels.to(tl.int64) * PANEL + (row % PANEL_ROWS * PANEL_KEYS + column % PANEL_KEYS)
    return matrix.ptr + tl.multiple_of(offset, SMALLEST_TILE)


@triton.jit
def tile_in_panels(rows, keys):
    """Returns the offsets of a tile's elements from its first element.

    rows, keys: indices in the tile, broadcastable.
    """
    return rows * PANEL_KEYS + keys // PANEL_KEYS * PANEL + keys % PANEL_KEYS
