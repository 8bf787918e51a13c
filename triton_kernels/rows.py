"""The rows of a tile: how they are found, loaded and stored."""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import decode_code_stride, decode_stride
from .quantized import as_type, has_ptx

L2_LINE = tl.constexpr(128)  # bytes
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


class TileRows(NamedTuple):
    """The rows of a tile. index [M]: 0 to M - 1. start: the row of the cos/sin table for the tile's first row. first:
    the first row's index in its sequence. length: the sequence's number of rows. Kernels use first and length
    separately, so a field for length - first would take one more register."""

    index: object
    start: object
    first: object
    length: object


@triton.jit
def tile_rows(first, length, length_other, packed, scheme, BLOCK: tl.constexpr, ROTATED_KEYS: tl.constexpr = False):
    """Returns the TileRows that start at row `first` of a sequence's queries or keys. length: the number of these rows.
    length_other: the number of keys if the rows are queries, and of queries if they are keys. packed: the sequence's
    packed_row, which is also its first row in the table of explicit positions.

    Query row 0 is at position length_k - length_q. If that is negative, queries and keys are shifted so that no
    position is negative. If the scheme maps positions, or if the caller's keys are already rotated (ROTATED_KEYS),
    nothing is shifted, and `start` of the result is valid only for queries."""
    if scheme.positions is not None:
        start = first + packed.to(tl.int32)
    elif scheme.maps is not None or ROTATED_KEYS:
        start = first + length_other - length
    else:
        start = first + tl.maximum(length_other - length, 0)
    return TileRows(tl.arange(0, BLOCK), start, first, length)


@triton.jit
def clamp_rows(rows, count):
    """Returns the rows to load if only the first `count` rows of a tile exist. Rows beyond the last one load that row
    again, so that loads need no mask. Their results are not stored, or have weight 0."""
    return tl.minimum(rows, count - 1)


@triton.jit
def existing_rows(rows):
    """Returns the rows of TileRows to load, as clamp_rows does."""
    return clamp_rows(rows.index, rows.length - rows.first)


@triton.jit
def row_exists(rows):
    return rows.index < rows.length - rows.first


class HeadView(NamedTuple):
    """Rows of one head. ptr points to the first row. Strides are in elements. In a paged cache, stride_batch is the
    stride of pages."""

    ptr: object
    stride_row: object
    stride_batch: object


@triton.jit
def head_view(x, batch, start, head, VARIANT: tl.constexpr):
    """Returns the HeadView of one head of a TensorView, starting at row `start`."""
    if x.ptr.dtype.element_ty.primitive_bitwidth == 8:
        return code_view(x, batch, start, head, VARIANT)
    else:
        VEC: tl.constexpr = VARIANT.vec
        stride_batch, stride_row = decode_stride(x.stride_batch, VARIANT), decode_stride(x.stride_row, VARIANT)
        offset = batch * stride_batch + start * stride_row + head * decode_stride(x.stride_head, VARIANT)
        return HeadView(x.ptr + tl.multiple_of(offset, VEC), stride_row, stride_batch)


@triton.jit
def code_view(x, batch, start, head, VARIANT: tl.constexpr):
    """Returns head_view for quantized keys or values, whose rows may be aligned to less than 16 bytes."""
    VEC: tl.constexpr = VARIANT.code_vec
    stride_batch, stride_row = decode_code_stride(x.stride_batch, VARIANT), decode_code_stride(x.stride_row, VARIANT)
    offset = batch * stride_batch + start * stride_row + head * decode_code_stride(x.stride_head, VARIANT)
    return HeadView(tl.multiple_of(x.ptr + tl.multiple_of(offset, VEC), VEC), stride_row, stride_batch)


@triton.jit
def skip_rows(view, rows):
    """Returns the view that starts `rows` rows later."""
    return HeadView(view.ptr + rows * view.stride_row, view.stride_row, view.stride_batch)


@triton.jit
def choose_view(condition, left, right, VARIANT: tl.constexpr):
    """Returns the HeadView `left` if the condition holds, else `right`. stride_batch is that of `left`.

    Symptom with a bare tl.where: rows are loaded in pieces of less than 16 bytes, because tl.where hides that both
    pointers are aligned. tl.multiple_of restores the alignment. It must be in the same function as the tl.where,
    because Triton ignores tl.multiple_of on an argument of a function."""
    VEC: tl.constexpr = VARIANT.vec
    BYTES: tl.constexpr = 16 if VARIANT.vec > 1 else 1
    ptr = tl.where(condition, left.ptr, right.ptr)
    stride_row = tl.where(condition, left.stride_row, right.stride_row)
    return HeadView(tl.multiple_of(ptr, BYTES), tl.multiple_of(stride_row, VEC), left.stride_batch)


@triton.jit
def band_keys(raw, rotated_k, k_copy, packed, head, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the HeadView of the keys that a band reads: the raw keys if k_copy is -1, else copy k_copy of rotated_k
    (copy, row, head), starting at row `packed`. If the raw keys are quantized, ROTATED_K chooses between raw keys and
    copy."""
    copy = head_view(rotated_k, tl.maximum(k_copy, 0), packed, head, VARIANT)
    if raw.ptr.dtype == copy.ptr.dtype:
        return choose_view(k_copy < 0, raw, copy, VARIANT)
    else:
        return copy if ROTATED_K else raw


@triton.jit
def tile_offsets(rows, view):
    """Returns the offsets [M, 1] of a tile's rows from its first row, int32, which suffices within a tile."""
    return rows[:, None] * view.stride_row.to(tl.int32)


@triton.jit
def page_offsets(page, row, view):
    """Returns the offsets [..., 1] of rows [...] in a cache, int64."""
    return tl.expand_dims(page * view.stride_batch + row * view.stride_row, -1)


@triton.jit
def load_rows(ptr, offsets, channels, VARIANT: tl.constexpr):
    """Loads the channels [N] of the rows at offsets [M, 1], as a tile [M, N]. Channels beyond head_dim are 0."""
    return load_channels(ptr, offsets, channels, VARIANT.head_dim, VARIANT.padded_d)


@triton.jit
def load_values(ptr, offsets, channels, VARIANT: tl.constexpr):
    """Loads rows of v, of out, or of their gradients."""
    return load_channels(ptr, offsets, channels, VARIANT.head_dim_v, VARIANT.block_dv)


@triton.jit
def load_channels(ptr, offsets, channels, HEAD_DIM: tl.constexpr, PADDED_D: tl.constexpr):
    ptrs = ptr + offsets + channels[None, :]
    if PADDED_D == HEAD_DIM:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(channels < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_parts(ptr, offsets, channels, HEAD_DIM: tl.constexpr, PADDED_D: tl.constexpr):
    """Loads the rows at offsets [M, 1] in parts. channels: a tuple with the channels of each part."""
    tiles = ()
    for part in tl.static_range(len(channels)):
        tiles += (load_channels(ptr, offsets, channels[part], HEAD_DIM, PADDED_D),)
    return tiles


@triton.jit
def load_row_parts(ptr, offsets, channels, VARIANT: tl.constexpr):
    """Loads rows of q or k as load_rows does, in parts. channels: a tuple with the channels of each part."""
    return load_parts(ptr, offsets, channels, VARIANT.head_dim, VARIANT.padded_d)


@triton.jit
def load_value_parts(ptr, offsets, channels, VARIANT: tl.constexpr):
    """Loads rows of v or of the gradient of out in parts. channels: a tuple with the channels of each part."""
    PADDED_D: tl.constexpr = VARIANT.padded_d if len(VARIANT.pair_ranges) > 0 else VARIANT.block_dv
    return load_parts(ptr, offsets, channels, VARIANT.head_dim_v, PADDED_D)


@triton.jit
def zero_parts(M: tl.constexpr, WIDTH: tl.constexpr, VARIANT: tl.constexpr):
    """Returns float32 zeros [M, WIDTH], or a tile of zeros for each of VARIANT.pair_ranges."""
    if len(VARIANT.pair_ranges) > 0:
        tiles = ()
        for part in tl.static_range(len(VARIANT.pair_ranges)):
            tiles += (zero_part(M, part, VARIANT),)
        return tiles
    else:
        return (tl.zeros((M, WIDTH), tl.float32),)


@triton.jit
def zero_part(M: tl.constexpr, PART: tl.constexpr, VARIANT: tl.constexpr):
    WIDTH: tl.constexpr = 2 * VARIANT.pair_ranges[PART].count
    return tl.zeros((M, WIDTH), tl.float32)


@triton.jit
def row_products(left, right):
    """Returns the products of all rows of left [..., M, X] with all rows of right [..., N, X], [..., M, N]. left,
    right: tuples of tiles with the same channels."""
    products = tl.dot(left[0], tl.trans(right[0]), input_precision="ieee")
    for part in tl.static_range(1, len(right)):
        products = tl.dot(left[part], tl.trans(right[part]), products, input_precision="ieee")
    return products


@triton.jit
def add_weighted_rows(acc, weights, rows):
    """Returns acc [..., M, X] plus weights [..., M, N] times rows [..., N, X]. acc, rows: tuples of tiles with the same
    channels."""
    added = ()
    for part in tl.static_range(len(rows)):
        added += (tl.dot(weights, rows[part], acc[part], input_precision="ieee"),)
    return added


@triton.jit
def pack_pairs(x, dtype: tl.constexpr):
    """Rounds float32 [M, N] to a 16-bit type, and returns neighbouring columns as one number, int32 [M, N / 2].

    A loop carries such a tile in registers. Triton takes a 16-bit tile that a loop carries into a product for a loaded
    one, and sends it through shared memory."""
    CONVERT: tl.constexpr = "cvt.rn.bf16x2.f32" if dtype == tl.bfloat16 else "cvt.rn.f16x2.f32"
    M: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    first, second = tl.split(tl.reshape(x, (M, PAIRS, 2)))
    return tl.inline_asm_elementwise(CONVERT + " $0, $2, $1;", "=r,r,r", [first, second], tl.int32, True, 1)


@triton.jit
def unpack_pairs(packed, dtype: tl.constexpr):
    """Returns the tile [M, N] of a 16-bit type that pack_pairs has packed."""
    UNPACK: tl.constexpr = "mov.b32 {$0, $1}, $2;"
    first, second = tl.inline_asm_elementwise(UNPACK, "=h,=h,r", [packed], (tl.int16, tl.int16), True, 1)
    M: tl.constexpr = packed.shape[0]
    N: tl.constexpr = 2 * packed.shape[1]
    return tl.reshape(tl.join(first, second), (M, N)).to(dtype, bitcast=True)


@triton.constexpr_function
def first_pair(pair_ranges, part):
    """Returns the first pair of a tile of a head. It is 0 if there are no VARIANT.pair_ranges, so that a head has one
    tile."""
    return pair_ranges[part][0] if len(pair_ranges) > 0 else 0


@triton.constexpr_function
def float_value_parts(parts, block_dv):
    """Returns the number of parts of a tile of values or of the result. parts: VARIANT.parts. The result is 1 if a part
    would otherwise have fewer than 16 channels, the minimum of a tensor core."""
    return parts if block_dv >= 32 else 1


@triton.jit
def value_channels(VARIANT: tl.constexpr):
    """Returns a tuple with the channels of each part of a tile of v or of out."""
    if len(VARIANT.pair_ranges) > 0:
        channels = ()
        for part in tl.static_range(len(VARIANT.pair_ranges)):
            channels += (part_value_channels(part, VARIANT),)
        return channels
    elif float_value_parts(VARIANT.parts, VARIANT.block_dv) == 1:
        return (tl.arange(0, VARIANT.block_dv),)
    else:
        HALF: tl.constexpr = VARIANT.block_dv // 2
        return tl.arange(0, HALF), tl.arange(0, HALF) + HALF


@triton.jit
def part_value_channels(PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the channels of the tile of v of one of VARIANT.pair_ranges."""
    FIRST: tl.constexpr = 2 * VARIANT.pair_ranges[PART].first
    WIDTH: tl.constexpr = 2 * VARIANT.pair_ranges[PART].count
    return tl.arange(0, WIDTH) + FIRST


@triton.jit
def load_cached_values(ptr, offsets, channels, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads rows of v at offsets [M, 1], as load_parts does. Quantized values are converted to `dtype` and returned as
    one part."""
    if ptr.dtype.element_ty == tl.int8:
        return (as_type(load_values(ptr, offsets, channels[0], VARIANT), dtype),)
    else:
        return load_value_parts(ptr, offsets, channels, VARIANT)


@triton.jit
def prefetch_rows(ptr, offsets, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Starts to load the rows at offsets [M, 1] into the L2 cache. It does not wait for them and holds no data in
    registers."""
    if has_ptx():
        LINE: tl.constexpr = L2_LINE * 8 // ptr.dtype.element_ty.primitive_bitwidth  # elements
        LINES: tl.constexpr = BLOCK_D // LINE if BLOCK_D > LINE else 1
        channels = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
        ptrs = ptr + offsets + channels[None, :]
        tl.inline_asm_elementwise(PREFETCH, "=r,l", [ptrs.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def store_rows(view, value, rows, channels, VARIANT: tl.constexpr):
    """Stores the elements of value [M, N] whose row and channel exist. rows: TileRows."""
    store_channels(view, value, rows, channels, VARIANT.head_dim)


@triton.jit
def store_values(view, value, rows, channels, VARIANT: tl.constexpr):
    """Stores rows of out or of the gradient of v."""
    store_channels(view, value, rows, channels, VARIANT.head_dim_v)


@triton.jit
def store_channels(view, value, rows, channels, HEAD_DIM: tl.constexpr):
    exists = row_exists(rows)[:, None] & (channels < HEAD_DIM)[None, :]
    ptrs = view.ptr + tile_offsets(rows.index, view) + channels[None, :]
    tl.store(ptrs, value.to(view.ptr.dtype.element_ty), mask=exists)
