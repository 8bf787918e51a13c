"""Computes cos and sin of positions that a cache stores. Every slot has one float32 position, or one for each axis of
an axial scheme.

The host does not know these positions. They may have fractions, and positions of adjacent slots need not be
consecutive. So kernels cannot read cos and sin from a table. They compute an angle as a product of integers, in units
of 2^-64 turn and modulo one turn. The product is exact at every position. See
``flashrope.schemes.cos_sin.TurnRow``.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...schemes import cos_sin
from ..arguments import decode_int

LIMIT = tl.constexpr(cos_sin.MAX_POSITION)
NOWHERE = tl.constexpr(2**31 - 1)
TURN_FIELDS = tl.constexpr(len(cos_sin.TurnRow._fields))
PART = tl.constexpr(2.0**31)
LAST_PART = tl.constexpr(2**31 - 1)
RADIANS = tl.constexpr(6.283185307179586 / 2**32)  # radians in 2^-32 turn
# For |x| up to an eighth of a turn, sin(x) = x + x^3 P(x^2) and cos(x) = 1 - x^2 / 2 + x^4 Q(x^2), with an error of at
# most 3e-9. P and Q are the polynomials with the least maximum error. The constants are their coefficients.
SIN_0, SIN_1, SIN_2 = tl.constexpr(-0.16666651), tl.constexpr(0.00833197869), tl.constexpr(-0.000194956359)
COS_0, COS_1, COS_2 = tl.constexpr(0.0416666456), tl.constexpr(-0.00138873677), tl.constexpr(2.44384519e-05)


class Position(NamedTuple):
    """A position as two int32 numbers. whole: the position rounded down. part: the fraction above it, in units of
    2^-31."""

    whole: object
    part: object


class Turns(NamedTuple):
    """The fields of ``flashrope.schemes.cos_sin.TurnRow`` for one rotation, each [D/2]."""

    step: object
    part: object
    start: object
    factor: object
    axis: object


@triton.jit
def split_position(x, base):
    """Returns the Position of x + base, clamped to -LIMIT and LIMIT. x: float32, where NaN counts as -LIMIT. base:
    integers."""
    x = tl.where(x > -LIMIT, tl.minimum(x, LIMIT), -LIMIT)
    whole = x.to(tl.int32)  # rounds towards 0, so that x - whole below is exact
    part = ((x - whole.to(tl.float32)) * PART).to(tl.int32)
    whole = whole + base - (part < 0).to(tl.int32)
    return Position(tl.minimum(tl.maximum(whole, -LIMIT), LIMIT), part & LAST_PART)


@triton.jit
def as_float(position):
    return position.whole.to(tl.float32) + position.part.to(tl.float32) * (1.0 / PART)


@triton.jit
def load_stored(cache, page, row, base, axis: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the Position of slots on one axis. page, row: the page and the row of each slot. base: integers, added to
    the stored positions. If the cache stores no positions, base is added to the rows instead."""
    if cache.slot_positions is None:
        whole = (base + row).to(tl.int32)
        return Position(whole, tl.zeros_like(whole))
    else:
        rows = VARIANT.page_size if VARIANT.page_size > 0 else decode_int(cache.capacity)
        AXES: tl.constexpr = VARIANT.axes if VARIANT.axes > 0 else 1
        at = (page.to(tl.int64) * rows + row) * AXES + axis
        return split_position(tl.load(cache.slot_positions + at), base)


@triton.jit
def load_turns(table, rotation, VARIANT: tl.constexpr):
    PAIRS: tl.constexpr = VARIANT.block_d // 2
    ptr = table.ptr + rotation.to(tl.int64) * (TURN_FIELDS * PAIRS) + tl.arange(0, PAIRS)
    return Turns(
        step=tl.load(ptr),
        part=tl.load(ptr + PAIRS),
        start=tl.load(ptr + 2 * PAIRS),
        factor=tl.load(ptr + 3 * PAIRS).to(tl.int32).to(tl.float32, bitcast=True),
        axis=tl.load(ptr + 4 * PAIRS).to(tl.int32),
    )


@triton.jit
def of_pairs(found, position, turns, axis: tl.constexpr):
    """Returns the Position by which every pair rotates, [M, 1] or [M, D/2]. Pairs of this axis get `position` [M].
    Other pairs keep `found`, the result for the previous axis."""
    whole, part = position.whole[:, None], position.part[:, None]
    if axis == 0:
        return Position(whole, part)
    else:
        own = (turns.axis == axis)[None, :]
        return Position(tl.where(own, whole, found.whole), tl.where(own, part, found.part))


@triton.jit
def turned(position, turns):
    """Returns the angle of every pair at its Position, [M, D/2], in units of 2^-64 turn."""
    return position.whole.to(tl.int64) * turns.step[None, :] + position.part.to(tl.int64) * turns.part[None, :]


@triton.jit
def cos_sin_of(angle):
    """Returns float32 cos and sin of int64 angles in units of 2^-64 turn."""
    turns = (angle >> 32).to(tl.int32)
    quarter = (turns + (1 << 29)) >> 30
    x = (turns - (quarter << 30)).to(tl.float32) * RADIANS
    square = x * x
    sin = x + x * square * (SIN_0 + square * (SIN_1 + square * SIN_2))
    cos = 1.0 - 0.5 * square + square * square * (COS_0 + square * (COS_1 + square * COS_2))
    odd = (quarter & 1) != 0
    first, second = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -first, first), tl.where((quarter & 2) != 0, -second, second)
