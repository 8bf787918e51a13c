"""Loads, stores and joins the tiles of the pairs that rotate together."""

import triton
import triton.language as tl

from ..quantized import as_type, load_words
from ..rows import load_row_parts, load_rows, store_rows


@triton.jit
def pair_channels(pair, second, VARIANT: tl.constexpr):
    """Returns the channel of every pair's first member (second = 0) or second member (second = 1), for half pairing.
    Padding pairs, from head_dim / 2 on, get channels of at least head_dim. If `second` is None, `pair` numbers all
    first members, then all second members. Channels before first_channel and after the rotary channels form pairs that
    do not rotate. The result is computed in whole vectors of up to 16 bytes, so that the compiler can load whole
    vectors."""
    FIRST: tl.constexpr = VARIANT.first_channel
    return pair_places(pair, second, VARIANT.rotary_dim, VARIANT.head_dim, VARIANT.padded_d, FIRST, VARIANT.vec)


@triton.jit
def range_channels(PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the channel of every column of the tile of one of VARIANT.pair_ranges, [2 count]."""
    START: tl.constexpr = VARIANT.pair_ranges[PART].first
    COUNT: tl.constexpr = VARIANT.pair_ranges[PART].count
    columns = tl.arange(0, 2 * COUNT)
    if VARIANT.interleaved:
        return columns + 2 * START
    else:
        FIRST: tl.constexpr = VARIANT.first_channel
        DIMS: tl.constexpr = (VARIANT.rotary_dim, VARIANT.head_dim, VARIANT.padded_d)
        return pair_places(columns, None, DIMS[0], DIMS[1], DIMS[2], FIRST, VARIANT.vec, START, COUNT)


@triton.jit
def pair_places(
    pair,
    second,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,
    START: tl.constexpr = 0,
    COUNT: tl.constexpr = 0,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM // 2 - HALF
    COMMON: tl.constexpr = HALF | REST | FIRST | ALIGNED
    VEC: tl.constexpr = COMMON & -COMMON  # the largest power of two that divides all of them
    if ROTARY_DIM == BLOCK_D and second is not None:
        return pair + second * HALF
    else:
        vector = pair // VEC
        if second is None:
            PAIRS: tl.constexpr = COUNT if COUNT > 0 else BLOCK_D // 2
            second = vector // (PAIRS // VEC)
            vector = vector % (PAIRS // VEC)
        if START > 0:
            vector += START // VEC
        if ROTARY_DIM == BLOCK_D:
            return (vector + second * (HALF // VEC)) * VEC + pair % VEC
        if FIRST == 0:
            rotated = vector + second * (HALF // VEC)
            unrotated = vector + HALF // VEC + second * (REST // VEC)
        else:
            rotated = vector + FIRST // VEC + second * (HALF // VEC)
            unrotated = vector - HALF // VEC + second * (REST // VEC)
            unrotated = tl.where(unrotated < FIRST // VEC, unrotated, unrotated + 2 * HALF // VEC)
        padding = HEAD_DIM // VEC
        rest = tl.where(vector < (HALF + REST) // VEC, unrotated, padding)
        vector = tl.where(vector < HALF // VEC, rotated, rest)
        return vector * VEC + pair % VEC


@triton.jit
def tile_channels(VARIANT: tl.constexpr, PARTS: tl.constexpr = 1, PART: tl.constexpr = 0):
    """Returns the channel of every column of a tile of queries or keys, [D], or of one of its parts."""
    WIDTH: tl.constexpr = VARIANT.block_d // PARTS
    columns = tl.arange(0, WIDTH) + PART * WIDTH
    FULL: tl.constexpr = VARIANT.rotary_dim == VARIANT.block_d
    UNROTATED: tl.constexpr = VARIANT.rotary_dim == 0 and VARIANT.head_dim == VARIANT.block_d
    if VARIANT.interleaved or FULL or UNROTATED:
        return columns
    else:
        return pair_channels(columns, None, VARIANT)


@triton.jit
def key_channels(VARIANT: tl.constexpr):
    """Returns a tuple with the tile_channels of each part of a tile of queries or keys."""
    if len(VARIANT.pair_ranges) > 0:
        channels = ()
        for part in tl.static_range(len(VARIANT.pair_ranges)):
            channels += (range_channels(part, VARIANT),)
        return channels
    elif VARIANT.parts == 1:
        return (tile_channels(VARIANT),)
    else:
        return tile_channels(VARIANT, 2, 0), tile_channels(VARIANT, 2, 1)


@triton.jit
def concatenate(left, right):
    """Joins two tiles [M, N] side by side to one tile [M, 2 N]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def halves(x):
    """Splits x [M, 2 N] into its left and its right half, two tiles [M, N]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def join_pairs(first, second, VARIANT: tl.constexpr):
    """Joins first and second members of pairs, two tiles [M, N], to one tile [M, 2 N] in the order of tile_channels."""
    if VARIANT.interleaved:
        return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))
    else:
        return concatenate(first, second)


@triton.jit
def split_pairs(x, VARIANT: tl.constexpr):
    """Splits a tile that join_pairs has joined into first and second members."""
    if VARIANT.interleaved:
        return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        return halves(x)


@triton.jit
def load_keys(ptr, offsets, channels, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads the rows of keys at offsets [M, 1]. Returns a tile [M, D] in parts, in the order of tile_channels.
    channels: from key_channels. Quantized keys are converted to `dtype` and returned as one part."""
    if ptr.dtype.element_ty == tl.int8:
        return (as_type(load_rows(ptr, offsets, channels[0], VARIANT), dtype),)
    else:
        return load_row_parts(ptr, offsets, channels, VARIANT)


@triton.jit
def load_key_pairs(ptr, offsets, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads all pairs of keys, as load_pairs does: two tiles [M, D/2]. Quantized keys are converted to `dtype`."""
    x, y = load_pairs(ptr, offsets, 0, VARIANT.block_d // 2, VARIANT)
    return as_type(x, dtype), as_type(y, dtype)


@triton.jit
def load_key_words(view, page, row, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads quantized keys that are not rotated, as 16-bit words (``quantized.py``). page, row [M]: where the keys are.
    Returns the two tiles that split_columns would make of a tile in the order of tile_channels."""
    FULL: tl.constexpr = VARIANT.rotary_dim == VARIANT.block_d
    UNROTATED: tl.constexpr = VARIANT.rotary_dim == 0 and VARIANT.head_dim == VARIANT.block_d
    at = tl.arange(0, VARIANT.block_d // 2)
    if not (VARIANT.interleaved or FULL or UNROTATED):
        FIRST: tl.constexpr = VARIANT.first_channel // 2
        VEC: tl.constexpr = VARIANT.code_vec // 2
        at = pair_places(at, None, VARIANT.rotary_dim // 2, VARIANT.head_dim // 2, VARIANT.block_d // 2, FIRST, VEC)
    return load_words(view, page, row, at, VARIANT.head_dim, VARIANT, dtype)


@triton.jit
def load_pair_tiles(ptr, offsets, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Loads pairs FIRST to FIRST + COUNT - 1 of the rows at offsets [M, 1] in memory order. Returns their first and
    second members, two tiles [M, COUNT], or one tile [M, 2 COUNT] of interleaved pairs. pair_tile_channels returns the
    channels of their columns."""
    if VARIANT.interleaved:
        return (load_rows(ptr, offsets, tl.arange(0, 2 * COUNT) + 2 * FIRST, VARIANT),)
    else:
        pair = tl.arange(0, COUNT) + FIRST
        x = load_rows(ptr, offsets, pair_channels(pair, 0, VARIANT), VARIANT)
        y = load_rows(ptr, offsets, pair_channels(pair, 1, VARIANT), VARIANT)
        return x, y


@triton.jit
def pair_tile_channels(FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the channels of the columns that load_pair_tiles loads: two vectors [COUNT], or one vector [2 COUNT]."""
    if VARIANT.interleaved:
        return (tl.arange(0, 2 * COUNT) + 2 * FIRST,)
    else:
        pair = tl.arange(0, COUNT) + FIRST
        return pair_channels(pair, 0, VARIANT), pair_channels(pair, 1, VARIANT)


@triton.jit
def as_pairs(tiles, VARIANT: tl.constexpr):
    """Converts the result of load_pair_tiles to the first and second members of its pairs, two tiles [M, COUNT]."""
    if len(tiles) == 1:
        return split_pairs(tiles[0], VARIANT)
    else:
        return tiles


@triton.jit
def load_pairs(ptr, offsets, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns first and second members of pairs FIRST to FIRST + COUNT - 1 of rows at offsets [M, 1], two tiles [M,
    COUNT]."""
    return as_pairs(load_pair_tiles(ptr, offsets, FIRST, COUNT, VARIANT), VARIANT)


@triton.jit
def store_pairs(view, first, second, rows, FIRST: tl.constexpr, VARIANT: tl.constexpr):
    """Stores COUNT pairs of every row, starting at pair FIRST. first, second: their members, two tiles [M, COUNT]."""
    COUNT: tl.constexpr = first.shape[1]
    if VARIANT.interleaved:
        dtype = view.ptr.dtype.element_ty
        pairs = join_pairs(first.to(dtype), second.to(dtype), VARIANT)
        store_rows(view, pairs, rows, tl.arange(0, 2 * COUNT) + 2 * FIRST, VARIANT)
    else:
        pair = tl.arange(0, COUNT) + FIRST
        store_rows(view, first, rows, pair_channels(pair, 0, VARIANT), VARIANT)
        store_rows(view, second, rows, pair_channels(pair, 1, VARIANT), VARIANT)
