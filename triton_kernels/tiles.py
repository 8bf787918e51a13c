"""Pieces the kernels share: strided views, sequences, tile ranges of a band, rotation, online softmax.

Tensors are named by role, shapes by tags such as # [BM, D]. D is BLOCK_D, the power of two that holds head_dim.
"""

from typing import NamedTuple

import triton
import triton.language as tl

FINE_ROWS = tl.constexpr(1024)  # flashrope.angles builds its tables with the same number
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Triton specialises integers inside a tuple by value (multiple of 16? equal to 1? 64 bits?). Strides depend on lengths,
# so they are passed in a form of which all have the same answers, and no length compiles a kernel anew.
_STRIDE_TAG = tl.constexpr(1 << 40)


class Strided(NamedTuple):
    """(batch, rows, heads, head_dim), last dimension contiguous; strides in elements, encoded by ``strided``."""

    ptr: object
    batch: object
    row: object
    head: object


class Angles(NamedTuple):
    """Tables of flashrope.angles; ``positions`` (batch, seqlen) float32 when the caller gave them, else None."""

    table: object
    positions: object


class Scales(NamedTuple):
    """score = softmax_scale * temperature; the query at position i by max(log_n_floor, log_n_factor * ln(i + 1))."""

    score: object
    log_n_factor: object
    log_n_floor: object


def strided(x):
    """Encodes a tensor (batch, rows, heads, head_dim), or a packed one (rows, heads, head_dim), for a kernel."""
    batch, row, head = x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])
    return Strided(x, *((s << 4) + _STRIDE_TAG.value for s in (batch, row, head)))


@triton.jit
def stride(encoded, VEC: tl.constexpr):
    """int64: offsets into a tensor may pass 2^31."""
    return tl.multiple_of((encoded - _STRIDE_TAG) // 16, VEC)


@triton.jit
def head_ptr(x, batch, start, head, VEC: tl.constexpr):
    """Pointer to row `start` of one head."""
    offset = batch * stride(x.batch, VEC) + start * stride(x.row, VEC) + head * stride(x.head, VEC)
    return x.ptr + tl.multiple_of(offset, VEC)


@triton.jit
def sequence(cu_seqlens, batch, seqlen):
    """(first row, length) of sequence `batch`. Packed: seqlen is the total, and the lengths are kept inside it,
    whatever cu_seqlens holds."""
    if cu_seqlens is None:
        return tl.full((), 0, tl.int64), seqlen
    else:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), seqlen)
        stop = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch + 1), start), seqlen)
        return start.to(tl.int64), stop - start


@triton.jit
def packed_row(cu_seqlens, batch, start, seqlen):
    """Row of a tensor without gaps (batch * seqlen or total rows) at which the sequence starts."""
    if cu_seqlens is None:
        return batch.to(tl.int64) * seqlen
    else:
        return start


@triton.jit
def lse_offset(cu_seqlens, batch, head, heads, start, seqlen):
    """lse is (batch, heads, seqlen), or (heads, total) when packed."""
    if cu_seqlens is None:
        return (batch.to(tl.int64) * heads + head) * seqlen
    else:
        return head.to(tl.int64) * seqlen + start


@triton.jit
def tile_range(first, last, reach_first, reach_last, length, BLOCK: tl.constexpr):
    """Tiles of BLOCK columns for rows first..last, where row x sees columns x + reach_first .. x + reach_last within
    [0, length). Tiles [begin, end) are touched; in [inner_begin, inner_end) every row sees every column."""
    begin = tl.maximum(first + reach_first, 0) // BLOCK
    end = tl.cdiv(tl.maximum(tl.minimum(last + reach_last + 1, length), 0), BLOCK)
    end = tl.maximum(end, begin)
    inner_begin = tl.cdiv(tl.maximum(last + reach_first, 0), BLOCK)
    inner_begin = tl.minimum(tl.maximum(inner_begin, begin), end)
    inner_end = tl.maximum(tl.minimum(first + reach_last + 1, length), 0) // BLOCK
    inner_end = tl.minimum(tl.maximum(inner_end, inner_begin), end)
    return begin, inner_begin, inner_end, end


@triton.jit
def edge_tile(step, begin, inner_begin, inner_end):
    """The step-th tile of [begin, inner_begin) followed by [inner_end, end)."""
    return begin + step + tl.where(step >= inner_begin - begin, inner_end - inner_begin, 0)


@triton.jit
def load_rows(ptr, rows, channels, stride_row, length, HEAD_DIM: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[rows, D]; channels from HEAD_DIM on are 0, and with MASK_ROWS rows outside [0, length) too."""
    ptrs = ptr + rows[:, None] * stride_row.to(tl.int32) + channels[None, :]  # within a tile 32 bits suffice
    if MASK_ROWS:
        inside = (rows < length)[:, None]
        if channels.shape[0] != HEAD_DIM:
            inside = inside & (channels < HEAD_DIM)[None, :]
        return tl.load(ptrs, mask=inside, other=0.0)
    elif channels.shape[0] != HEAD_DIM:
        return tl.load(ptrs, mask=(channels < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_rows(ptr, value, rows, channels, stride_row, length, HEAD_DIM: tl.constexpr):
    inside = (rows < length)[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * stride_row + channels[None, :], value.to(ptr.dtype.element_ty), mask=inside)


# ---- rotation -----------------------------------------------------------------------------------------------------------


@triton.jit
def partner_channel(channels, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other channel of the pair; channels that are not paired are their own."""
    if INTERLEAVED:
        other = channels ^ 1
    else:
        half: tl.constexpr = ROTARY_DIM // 2
        other = tl.where(channels < half, channels + half, channels - half)
    return tl.where(channels < ROTARY_DIM, other, channels)


@triton.jit
def swap_pairs(x, channels, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x [M, D] with the channels of every pair exchanged, in registers."""
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        return tl.reshape(tl.join(second, first), (x.shape[0], x.shape[1]))
    else:
        index = partner_channel(channels, ROTARY_DIM, INTERLEAVED)
        return tl.gather(x, tl.broadcast_to(index[None, :], (x.shape[0], x.shape[1])), 1)


@triton.jit
def turn_factors(angles, slot, table_rows, rows, row_valid, channels, PAIRS: tl.constexpr, ROTARY_DIM: tl.constexpr,
                 INTERLEAVED: tl.constexpr):
    """(cos, signed sin), float32 [M, D], with turned = x * cos + swap_pairs(x) * sin.

    rows are positions, or rows of the table where the caller gave positions. Angle addition joins the two levels.
    """
    if INTERLEAVED:
        pair = channels // 2
        sign = tl.where(channels % 2 == 0, -1.0, 1.0)
    else:
        half: tl.constexpr = ROTARY_DIM // 2
        pair = tl.where(channels < half, channels, channels - half)
        sign = tl.where(channels < half, -1.0, 1.0)
    inside = row_valid[:, None] & (channels < ROTARY_DIM)[None, :]
    table = angles.table + slot.to(tl.int64) * table_rows * (2 * PAIRS)
    if angles.positions is not None:
        at = table + rows.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
        cos = tl.load(at, mask=inside, other=1.0)
        sin = tl.load(at + PAIRS, mask=inside, other=0.0)
    else:
        fine = table + (rows % FINE_ROWS)[:, None] * (2 * PAIRS) + pair[None, :]
        coarse = table + (rows // FINE_ROWS + FINE_ROWS)[:, None] * (2 * PAIRS) + pair[None, :]
        cos_fine = tl.load(fine, mask=inside, other=1.0)
        sin_fine = tl.load(fine + PAIRS, mask=inside, other=0.0)
        cos_coarse = tl.load(coarse, mask=inside, other=1.0)
        sin_coarse = tl.load(coarse + PAIRS, mask=inside, other=0.0)
        cos = cos_fine * cos_coarse - sin_fine * sin_coarse
        sin = sin_fine * cos_coarse + cos_fine * sin_coarse
    return cos, sin * sign[None, :]


@triton.jit
def turn(x, cos, sin, channels, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x float32 [M, D] turned in registers; sin negated turns back."""
    return x * cos + swap_pairs(x, channels, ROTARY_DIM, INTERLEAVED) * sin


@triton.jit
def load_turned(ptr, rows, row_valid, channels, stride_row, cos, sin, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
                INTERLEAVED: tl.constexpr):
    """Loads [M, D] and turns it in float32. Half pairing loads the partner again, from cache: cheaper than a shuffle."""
    inside = row_valid[:, None] & (channels < HEAD_DIM)[None, :]
    row_ptrs = ptr + rows[:, None] * stride_row.to(tl.int32)
    x = tl.load(row_ptrs + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTARY_DIM == 0:
        return x
    elif INTERLEAVED:
        return turn(x, cos, sin, channels, ROTARY_DIM, INTERLEAVED)
    else:
        other = partner_channel(channels, ROTARY_DIM, INTERLEAVED)
        y = tl.load(row_ptrs + other[None, :], mask=inside, other=0.0).to(tl.float32)
        return x * cos + y * sin


@triton.jit
def query_scale(angles, scales, rows, positions, row_valid):
    """The log n factor of every query row, float32 [M]; 1 where the scheme has none. rows index angles.positions."""
    if angles.positions is not None:
        position = tl.load(angles.positions + rows, mask=row_valid, other=0.0)
    else:
        position = positions.to(tl.float32)
    return tl.maximum(scales.log_n_factor * tl.log(tl.maximum(position, 0.0) + 1.0), scales.log_n_floor)


# ---- softmax ------------------------------------------------------------------------------------------------------------


@triton.jit
def online_softmax(scores, row_max, row_sum, scale_log2, visible):
    """One step over scores [BM, BN] (raw products; log2 units after scale_log2 >= 0).

    Returns weights [BM, BN], the factor for what was accumulated before [BM], and the new row_max, row_sum.
    """
    if visible is not None:
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
        weights = tl.exp2(scores - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def in_band(position_q, position_k, start, stop):
    """Broadcasts: whether the distance lies in the band."""
    distance = position_q - position_k
    return (distance >= start) & (distance < stop)
