"""Pieces the kernels share: strided views, sequences, tile ranges of a band, rotation, online softmax.

Tensors are named by role, shapes by tags such as # [BM, D]. D is BLOCK_D, the power of two that holds head_dim.
"""

from typing import NamedTuple

import triton
import triton.language as tl

FINE_ROWS = tl.constexpr(1024)  # flashrope.cos_sin builds its tables with the same number
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Triton specialises integers inside a tuple by value (multiple of 16? equal to 1? 64 bits?). Strides and sizes depend
# on lengths, so they are passed in a form of which all have the same answers, and no length compiles a kernel anew.
# Numbers outside tuples are do_not_specialize, heads too: one head would otherwise be a constant where the kernels
# expect a scalar of the device.
TAG = 1 << 40
_TAG = tl.constexpr(TAG)


class Strided(NamedTuple):
    """(batch, rows, heads, head_dim), last dimension contiguous; strides in elements, encoded by ``strided``."""

    ptr: object
    batch: object
    row: object
    head: object


class Angles(NamedTuple):
    """Tables of flashrope.cos_sin; ``positions`` (batch, seqlen) float32 when the caller gave them, else None."""

    table: object
    positions: object


class Layout(NamedTuple):
    """What a kernel is compiled for beside its tile. block_d: the power of two that holds head_dim; vec: elements that
    every pointer and stride is a multiple of."""

    head_dim: int
    block_d: int
    rotary_dim: int
    interleaved: bool
    vec: int


class Slots(NamedTuple):
    """Where sequences lie in a cache, int32: seqlens (batch,), block_table (batch, max_pages) or None, leftpad (batch,)
    or None. Encoded by ``encoded``: the keys behind seqlens that were just written, slots a sequence can have, pages of
    the cache."""

    seqlens: object
    block_table: object
    leftpad: object
    seqlen_new: object
    capacity: object
    pages: object


class Rows(NamedTuple):
    """One head's rows: pointer to the first; strides in elements, int64. page is None where rows lie evenly."""

    ptr: object
    row: object
    page: object


class Scales(NamedTuple):
    """score = softmax_scale * temperature; the query at position i by max(log_n_floor, log_n_factor * ln(i + 1))."""

    score: object
    log_n_factor: object
    log_n_floor: object


POINTERS = {Strided: 1, Angles: 2, Slots: 3, Scales: 0}  # the first fields; the others are encoded, or floats


def encoded(number: int) -> int:
    """A whole number for a field of a tuple."""
    return (number << 4) + TAG


def strided(x):
    """Encodes a tensor (batch, rows, heads, head_dim), or a packed one (rows, heads, head_dim), for a kernel."""
    stride = x.stride()
    batch = stride[0] if len(stride) == 4 else 0
    return Strided(
        x, (batch << 4) + TAG, (stride[-3] << 4) + TAG, (stride[-2] << 4) + TAG
    )  # as ``encoded``, without its calls


@triton.jit
def decoded(number):
    return ((number - _TAG) // 16).to(tl.int32)


@triton.jit
def stride(encoded, LAYOUT: tl.constexpr):
    """int64: offsets into a tensor may pass 2^31."""
    VEC: tl.constexpr = LAYOUT.vec
    return tl.multiple_of((encoded - _TAG) // 16, VEC)


@triton.jit
def head_ptr(x, batch, start, head, LAYOUT: tl.constexpr):
    """Pointer to row `start` of one head."""
    offset = batch * stride(x.batch, LAYOUT) + start * stride(x.row, LAYOUT) + head * stride(x.head, LAYOUT)
    VEC: tl.constexpr = LAYOUT.vec
    return x.ptr + tl.multiple_of(offset, VEC)


@triton.jit
def banded_keys(k, rotated_k, slot, batch, start, packed, head, LAYOUT: tl.constexpr):
    """(pointer to a row of one head, row stride) of rotated_k at `slot`, or of the raw keys where slot is -1."""
    ptr = tl.where(
        slot < 0,
        head_ptr(k, batch, start, head, LAYOUT),
        head_ptr(rotated_k, tl.maximum(slot, 0), packed, head, LAYOUT),
    )
    row = tl.where(slot < 0, stride(k.row, LAYOUT), stride(rotated_k.row, LAYOUT))
    VEC: tl.constexpr = LAYOUT.vec
    BYTES: tl.constexpr = 16 if LAYOUT.vec > 1 else 1
    return tl.multiple_of(ptr, BYTES), tl.multiple_of(row, VEC)  # the choice hides what both sides are multiples of


@triton.jit
def band_fields(bands, band):
    """One row of bands, int32 (NUM_BANDS, 7): distances start <= d < stop; the table slots that turn the query and the
    key; the slot of rotated_k, -1 for raw keys; the table slots that lead from the frames of the band before to this
    one's."""
    row = bands + 7 * band
    return (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
    )


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
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def cache_bounds(slots, batch):
    """(first slot, keys) of a sequence, inside the capacity whatever the tensors hold."""
    capacity = decoded(slots.capacity)
    end = tl.minimum(clamp(tl.load(slots.seqlens + batch), 0, capacity) + decoded(slots.seqlen_new), capacity)
    if slots.leftpad is None:
        return 0, end
    else:
        first = clamp(tl.load(slots.leftpad + batch), 0, end)
        return first, end - first


@triton.jit
def page_of(slots, batch, slot, PAGE_SIZE: tl.constexpr):
    """int64: the page of a sequence's slots as the table says, and the row in it; without pages the sequence and the
    slot."""
    if slots.block_table is None:
        return batch.to(tl.int64) + slot * 0, slot.to(tl.int64)
    else:
        max_pages = decoded(slots.capacity) // PAGE_SIZE
        page = tl.load(slots.block_table + batch.to(tl.int64) * max_pages + slot // PAGE_SIZE)
        return page.to(tl.int64), (slot % PAGE_SIZE).to(tl.int64)


@triton.jit
def cached_row(slots, batch, slot, PAGE_SIZE: tl.constexpr):
    """page_of, with a page that exists whatever the table says."""
    page, row = page_of(slots, batch, slot, PAGE_SIZE)
    return clamp(page, 0, decoded(slots.pages) - 1), row


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
def load_rows(ptr, rows, channels, stride_row, LAYOUT: tl.constexpr):
    """[rows, D]; columns without a channel are 0."""
    ptrs = ptr + rows[:, None] * stride_row.to(tl.int32) + channels[None, :]  # within a tile 32 bits suffice
    if LAYOUT.block_d == LAYOUT.head_dim:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(channels < LAYOUT.head_dim)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, value, rows, channels, stride_row, length, LAYOUT: tl.constexpr):
    inside = (rows < length)[:, None] & (channels < LAYOUT.head_dim)[None, :]
    tl.store(
        ptr + rows[:, None] * stride_row.to(tl.int32) + channels[None, :], value.to(ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def inside(rows, length):
    """Rows to load where `length` of a tile's rows exist: the last one stands in for those beyond it. No load needs a
    mask then; what comes of such rows is not stored, or is weighted by 0."""
    return tl.minimum(rows, length - 1)


# ---- rotation
# Queries and keys lie in a tile with the channels of a pair D/2 columns apart (half pairing) or side by side
# (interleaved), so pairs come apart by a reshape, whatever rotary_dim and head_dim are. Both sides of a product use the
# same order.


@triton.jit
def pair_channels(pair, second, LAYOUT: tl.constexpr):
    """Half pairing: the channel of the first (second = 0) or second (1) member of every pair; head_dim or more where
    there is none. second = None: pair counts on from the first members to the second ones. Channels from rotary_dim on
    form pairs that do not turn. Computed by whole vectors of up to 16 bytes, so that the compiler sees them."""
    HALF: tl.constexpr = LAYOUT.rotary_dim // 2
    REST: tl.constexpr = LAYOUT.head_dim // 2 - HALF
    COMMON: tl.constexpr = HALF | REST | LAYOUT.vec
    VEC: tl.constexpr = COMMON & -COMMON  # the largest power of two that divides all three
    if LAYOUT.rotary_dim == LAYOUT.block_d and second is not None:
        return pair + second * HALF
    else:
        vector = pair // VEC
        if second is None:
            second = vector // (LAYOUT.block_d // 2 // VEC)
            vector = vector % (LAYOUT.block_d // 2 // VEC)
        turning = vector + second * (HALF // VEC)
        resting = vector + HALF // VEC + second * (REST // VEC)
        vector = tl.where(
            vector < HALF // VEC, turning, tl.where(vector < (HALF + REST) // VEC, resting, LAYOUT.head_dim // VEC)
        )
        return vector * VEC + pair % VEC


@triton.jit
def tile_channels(LAYOUT: tl.constexpr):
    """The channel of every column of a tile of queries or keys, [D]."""
    columns = tl.arange(0, LAYOUT.block_d)
    if (
        LAYOUT.interleaved
        or LAYOUT.rotary_dim == LAYOUT.block_d
        or (LAYOUT.rotary_dim == 0 and LAYOUT.head_dim == LAYOUT.block_d)
    ):
        return columns
    else:
        return pair_channels(columns, None, LAYOUT)


@triton.jit
def concatenate(left, right):
    """Two [M, N] side by side, [M, 2 N]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def join_pairs(first, second, LAYOUT: tl.constexpr):
    """First and second members, two [M, N], to one tile [M, 2 N] in the order of tile_channels."""
    if LAYOUT.interleaved:
        return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))
    else:
        return concatenate(first, second)


@triton.jit
def split_pairs(x, LAYOUT: tl.constexpr):
    """A tile [M, 2 N] to the first and second members of its pairs, two [M, N]."""
    half: tl.constexpr = x.shape[1] // 2
    if LAYOUT.interleaved:
        return tl.split(tl.reshape(x, (x.shape[0], half, 2)))
    else:
        return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, half)), (0, 2, 1)))


@triton.jit
def load_pairs(ptr, rows, stride_row, FIRST: tl.constexpr, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """float32 first and second members of pairs FIRST .. FIRST + COUNT - 1 of rows, two [M, COUNT]."""
    if LAYOUT.interleaved:
        x = load_rows(ptr, rows, tl.arange(0, 2 * COUNT) + 2 * FIRST, stride_row, LAYOUT)
        return split_pairs(x.to(tl.float32), LAYOUT)
    else:
        pair = tl.arange(0, COUNT) + FIRST
        x = load_rows(ptr, rows, pair_channels(pair, 0, LAYOUT), stride_row, LAYOUT)
        y = load_rows(ptr, rows, pair_channels(pair, 1, LAYOUT), stride_row, LAYOUT)
        return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def rows_at(ptr, offsets, channels, LAYOUT: tl.constexpr):
    """load_rows for rows that lie anywhere: offsets int64 [M] in elements."""
    VEC: tl.constexpr = LAYOUT.vec
    ptrs = ptr + tl.multiple_of(offsets, VEC)[:, None] + channels[None, :]
    if LAYOUT.block_d == LAYOUT.head_dim:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(channels < LAYOUT.head_dim)[None, :], other=0.0)


@triton.jit
def pairs_at(ptr, offsets, LAYOUT: tl.constexpr):
    """load_pairs of all pairs for rows that lie anywhere, in the tensor's own type: two [M, D/2]."""
    if LAYOUT.interleaved:
        return split_pairs(rows_at(ptr, offsets, tl.arange(0, LAYOUT.block_d), LAYOUT), LAYOUT)
    else:
        pair = tl.arange(0, LAYOUT.block_d // 2)
        x = rows_at(ptr, offsets, pair_channels(pair, 0, LAYOUT), LAYOUT)
        y = rows_at(ptr, offsets, pair_channels(pair, 1, LAYOUT), LAYOUT)
        return x, y


@triton.jit
def store_pairs(ptr, first, second, rows, length, stride_row, FIRST: tl.constexpr, LAYOUT: tl.constexpr):
    """Stores pairs of rows from pair FIRST on, two [M, COUNT], each channel in its place."""
    COUNT: tl.constexpr = first.shape[1]
    if LAYOUT.interleaved:
        dtype = ptr.dtype.element_ty
        joined = join_pairs(first.to(dtype), second.to(dtype), LAYOUT)
        store_rows(ptr, joined, rows, tl.arange(0, 2 * COUNT) + 2 * FIRST, stride_row, length, LAYOUT)
    else:
        pair = tl.arange(0, COUNT) + FIRST
        store_rows(ptr, first, rows, pair_channels(pair, 0, LAYOUT), stride_row, length, LAYOUT)
        store_rows(ptr, second, rows, pair_channels(pair, 1, LAYOUT), stride_row, length, LAYOUT)


@triton.jit
def join_angles(cos_a, sin_a, cos_b, sin_b):
    return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b


@triton.jit
def cos_sin(
    angles, slot, table_rows, first, rows, length, FIRST: tl.constexpr, COUNT: tl.constexpr, LAYOUT: tl.constexpr
):
    """cos and sin of pairs FIRST .. FIRST + COUNT - 1 for the turn of table `slot` at positions first + rows (or at
    those rows of the caller's positions, of which `length` exist), two float32 [M, COUNT]; 1 and 0 for pairs that do
    not turn."""
    D: tl.constexpr = LAYOUT.block_d  # a row of the table: cos of D/2 pairs, then sin
    table = angles.table + slot.to(tl.int64) * table_rows * D + FIRST + tl.arange(0, COUNT)
    if angles.positions is not None:
        at = table[None, :] + (first.to(tl.int64) + inside(rows, length))[:, None] * D
        return tl.load(at), tl.load(at + D // 2)
    else:
        # The tile's first position by its two levels, [COUNT]; then rows 0 .. M-1 of the fine level, the same for every
        # tile.
        fine = table + (first % FINE_ROWS) * D
        coarse = table + (first // FINE_ROWS + FINE_ROWS) * D
        start_cos, start_sin = join_angles(
            tl.load(fine), tl.load(fine + D // 2), tl.load(coarse), tl.load(coarse + D // 2)
        )
        at = table[None, :] + rows[:, None] * D
        return join_angles(tl.load(at), tl.load(at + D // 2), start_cos[None, :], start_sin[None, :])


@triton.jit
def cos_sin_at(angles, slot, table_rows, positions, LAYOUT: tl.constexpr):
    """cos_sin of all pairs at positions [M] >= 0, each joined of its own two levels: a row depends on its position
    alone."""
    D: tl.constexpr = LAYOUT.block_d
    table = angles.table + slot.to(tl.int64) * table_rows * D + tl.arange(0, D // 2)
    fine = table[None, :] + (positions % FINE_ROWS)[:, None] * D
    coarse = table[None, :] + (positions // FINE_ROWS + FINE_ROWS)[:, None] * D
    return join_angles(tl.load(fine), tl.load(fine + D // 2), tl.load(coarse), tl.load(coarse + D // 2))


@triton.jit
def turn(first, second, cos, sin):
    """Pairs [M, N] turned by the angle; sin negated turns back."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_chunk(
    ptr,
    angles,
    slot,
    table_rows,
    first,
    rows,
    length,
    stride_row,
    scale,
    FIRST: tl.constexpr,
    TURN: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """A quarter tile's worth of pairs, from FIRST on, loaded, turned and scaled in float32, rounded once."""
    COUNT: tl.constexpr = LAYOUT.block_d // 4
    x, y = load_pairs(ptr, inside(rows, length), stride_row, FIRST, COUNT, LAYOUT)
    if TURN:
        cos, sin = cos_sin(angles, slot, table_rows, first, rows, length, FIRST, COUNT, LAYOUT)
        x, y = turn(x, y, cos, sin)
    dtype = ptr.dtype.element_ty
    return (x * scale[:, None]).to(dtype), (y * scale[:, None]).to(dtype)


@triton.jit
def load_tile(
    ptr, angles, slot, table_rows, first, rows, length, stride_row, scale, TURN: tl.constexpr, LAYOUT: tl.constexpr
):
    """A tile [M, D] loaded, turned by table `slot` if TURN, and scaled. In two chunks: all at once would need the
    registers of the accumulator that lives beside it."""
    x, y = load_chunk(ptr, angles, slot, table_rows, first, rows, length, stride_row, scale, 0, TURN, LAYOUT)
    next_x, next_y = load_chunk(
        ptr, angles, slot, table_rows, first, rows, length, stride_row, scale, LAYOUT.block_d // 4, TURN, LAYOUT
    )
    return join_pairs(concatenate(x, next_x), concatenate(y, next_y), LAYOUT)


@triton.jit
def halves(x):
    """[M, 2 N] to its left and right [M, N]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def turn_tile(tile, angles, slot, table_rows, first, rows, length, LAYOUT: tl.constexpr):
    """A float32 tile [M, D] turned in registers by table `slot`, in two chunks."""
    CHUNK: tl.constexpr = LAYOUT.block_d // 4
    x, y = split_pairs(tile, LAYOUT)
    x, next_x = halves(x)
    y, next_y = halves(y)
    cos, sin = cos_sin(angles, slot, table_rows, first, rows, length, 0, CHUNK, LAYOUT)
    x, y = turn(x, y, cos, sin)
    cos, sin = cos_sin(angles, slot, table_rows, first, rows, length, CHUNK, CHUNK, LAYOUT)
    next_x, next_y = turn(next_x, next_y, cos, sin)
    return join_pairs(concatenate(x, next_x), concatenate(y, next_y), LAYOUT)


@triton.jit
def store_chunk_back(
    ptr,
    x,
    y,
    angles,
    slot,
    table_rows,
    first,
    rows,
    length,
    stride_row,
    scale,
    FIRST: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Stores pairs from FIRST on, a quarter tile each of first and second members, turned back and scaled."""
    cos, sin = cos_sin(angles, slot, table_rows, first, rows, length, FIRST, LAYOUT.block_d // 4, LAYOUT)
    x, y = turn(x, y, cos, -sin)
    store_pairs(ptr, x * scale, y * scale, rows, length, stride_row, FIRST, LAYOUT)


@triton.jit
def store_turned_back(
    ptr, tile, angles, slot, table_rows, first, rows, length, stride_row, scale, LAYOUT: tl.constexpr
):
    """Stores a float32 tile [M, D] that lies in the frame of table `slot`, turned back and scaled, in two chunks."""
    if LAYOUT.rotary_dim == 0:
        store_rows(ptr, tile * scale, rows, tile_channels(LAYOUT), stride_row, length, LAYOUT)
    else:
        x, y = split_pairs(tile, LAYOUT)
        x, next_x = halves(x)
        y, next_y = halves(y)
        store_chunk_back(ptr, x, y, angles, slot, table_rows, first, rows, length, stride_row, scale, 0, LAYOUT)
        store_chunk_back(
            ptr,
            next_x,
            next_y,
            angles,
            slot,
            table_rows,
            first,
            rows,
            length,
            stride_row,
            scale,
            LAYOUT.block_d // 4,
            LAYOUT,
        )


@triton.jit
def query_scale(angles, scales, rows, positions):
    """The log n factor of every query row, float32 [M]; 1 where the scheme has none. rows index angles.positions."""
    if angles.positions is not None:
        position = tl.load(angles.positions + rows)
    else:
        position = positions.to(tl.float32)
    return tl.maximum(scales.log_n_factor * tl.log(tl.maximum(position, 0.0) + 1.0), scales.log_n_floor)


# ---- softmax
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
