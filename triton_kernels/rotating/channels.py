"""Loads queries and keys in the parts of ``VARIANT.channels``, of which only the first rotates.

A part is two contiguous runs of width / 2 channels (``schemes.head_parts.Part``). The part that rotates gives two
operands of the score product, the first and the second members of its pairs. Any other part gives one operand. The
score is the sum of the operands' products. Functions take the index of a part, because a NamedTuple that is passed as
an argument would no longer be constexpr.

If values are channels of the keys, a raw tile of keys is also a tile of values: it is loaded once, and the compiler
gives both products the same shared memory.
"""

import triton
import triton.language as tl

from .pairs import as_pairs, pair_tile_channels
from .rotation import rotate


@triton.jit
def part_channels(PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the channels of a part, [width]. They are computed in whole vectors of VARIANT.vec channels, so that the
    compiler can load whole vectors."""
    WIDTH: tl.constexpr = VARIANT.channels[PART].width
    FIRST: tl.constexpr = VARIANT.channels[PART].first
    GAP: tl.constexpr = VARIANT.channels[PART].second - FIRST - WIDTH // 2
    column = tl.arange(0, WIDTH)
    if GAP == 0:
        return column + FIRST
    else:
        VEC: tl.constexpr = VARIANT.vec
        vector = column // VEC
        vector += tl.where(vector < WIDTH // 2 // VEC, FIRST // VEC, (FIRST + GAP) // VEC)
        return vector * VEC + column % VEC


@triton.constexpr_function
def holds_values(first, second, width, first_value, head_dim_v):
    """Whether one of the two runs of a part has channels that are values."""
    if first_value < 0:
        return False
    return any(run < first_value + head_dim_v and first_value < run + width // 2 for run in (first, second))


@triton.jit
def load_part(ptr, offsets, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Loads a part of the rows at offsets [M, 1] in memory order: one tile [M, width], or two [M, width / 2] for the
    two runs of a part that rotates in half pairing."""
    HALF: tl.constexpr = VARIANT.channels[PART].width // 2
    FIRST: tl.constexpr = VARIANT.channels[PART].first
    SECOND: tl.constexpr = VARIANT.channels[PART].second
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    if not ROTATES or VARIANT.interleaved:
        return (tl.load(ptr + offsets + part_channels(PART, VARIANT)[None, :]),)
    else:
        pair = tl.arange(0, HALF)[None, :]
        return tl.load(ptr + offsets + (pair + FIRST)), tl.load(ptr + offsets + (pair + SECOND))


@triton.jit
def part_tile_channels(PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the channels of the columns that load_part loads."""
    HALF: tl.constexpr = VARIANT.channels[PART].width // 2
    FIRST: tl.constexpr = VARIANT.channels[PART].first
    SECOND: tl.constexpr = VARIANT.channels[PART].second
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    if not ROTATES or VARIANT.interleaved:
        return (part_channels(PART, VARIANT),)
    else:
        return tl.arange(0, HALF) + FIRST, tl.arange(0, HALF) + SECOND


@triton.jit
def part_values(tiles, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns `tiles` if the part holds values, else (). tiles: from load_part or part_tile_channels."""
    FIRST: tl.constexpr = VARIANT.channels[PART].first
    SECOND: tl.constexpr = VARIANT.channels[PART].second
    WIDTH: tl.constexpr = VARIANT.channels[PART].width
    if holds_values(FIRST, SECOND, WIDTH, VARIANT.first_value, VARIANT.head_dim_v):
        return tiles
    else:
        return ()


@triton.jit
def load_weights(weight, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the key weights of a part's channels, in the tiles that operand_tiles makes, [1, width or width / 2]."""
    return operand_tiles(load_part(weight, tl.zeros((1, 1), tl.int32), PART, VARIANT), PART, VARIANT)


@triton.jit
def operand_tiles(tiles, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Converts the tiles of load_part to operands of a product: the first and second members of pairs in two tiles if
    the part rotates, else the tiles themselves."""
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    if ROTATES:
        return as_pairs(tiles, VARIANT)
    else:
        return tiles


@triton.jit
def query_part(tiles, cos, sin, scale, weight, ROTATE_K: tl.constexpr, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Rotates the operands of queries if the part rotates, and scales them. Works in float32 and rounds once. weight:
    the key weights, or None. They multiply the queries if this part of the keys is not rotated."""
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    dtype: tl.constexpr = tiles[0].dtype
    if ROTATES:
        x, y = rotate(tiles[0].to(tl.float32), tiles[1].to(tl.float32), cos, sin)
        x, y = x * scale, y * scale
        if weight is not None and not ROTATE_K:
            weights = load_weights(weight, PART, VARIANT)
            x, y = x * weights[0], y * weights[1]
        return x.to(dtype), y.to(dtype)
    else:
        x = tiles[0].to(tl.float32) * scale
        if weight is not None:
            x *= load_weights(weight, PART, VARIANT)[0]
        return (x.to(dtype),)


@triton.jit
def key_part(tiles, cos, sin, weight, PART: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """If the part rotates, multiplies the operands of keys by their weights and rotates them, in float32 and with one
    rounding. Returns the operands of any other part unchanged. weight: the key weights, or None."""
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    if ROTATES:
        x, y = tiles[0].to(tl.float32), tiles[1].to(tl.float32)
        if weight is not None:
            weights = load_weights(weight, PART, VARIANT)
            x, y = x * weights[0], y * weights[1]
        x, y = rotate(x, y, cos, sin)
        return x.to(dtype), y.to(dtype)
    else:
        return tiles


@triton.jit
def load_query_parts(ptr, offsets, cos, sin, scale, weight, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns all operands of queries at offsets [M, 1]. The first part is rotated by cos and sin [M, width / 2].
    scale: [M, 1]. weight: the key weights, or None. ROTATE_K: whether the keys of the band rotate."""
    tiles = ()
    for part in tl.static_range(len(VARIANT.channels)):
        raw = operand_tiles(load_part(ptr, offsets, part, VARIANT), part, VARIANT)
        tiles += query_part(raw, cos, sin, scale, weight, ROTATE_K, part, VARIANT)
    return tiles


@triton.jit
def load_raw_parts(ptr, offsets, VARIANT: tl.constexpr):
    """Loads all parts of the keys at offsets [M, 1]. Returns (their operands without rotation, the tiles that hold
    values)."""
    tiles, values = (), ()
    for part in tl.static_range(len(VARIANT.channels)):
        raw = load_part(ptr, offsets, part, VARIANT)
        tiles += operand_tiles(raw, part, VARIANT)
        values += part_values(raw, part, VARIANT)
    return tiles, values


@triton.jit
def load_rotated_parts(ptr, offsets, cos, sin, weight, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads all parts of the keys at offsets [M, 1]. Returns (their operands, the raw tiles that hold values). The
    first part is rotated by cos and sin [M, width / 2]. weight: the key weights, or None."""
    tiles, values = (), ()
    for part in tl.static_range(len(VARIANT.channels)):
        raw = load_part(ptr, offsets, part, VARIANT)
        tiles += key_part(operand_tiles(raw, part, VARIANT), cos, sin, weight, part, VARIANT, dtype)
        values += part_values(raw, part, VARIANT)
    return tiles, values


@triton.jit
def shared_channels(VARIANT: tl.constexpr):
    """Returns the channel numbers of the key tiles that are also value tiles, in the order in which the decode kernel
    loads them."""
    channels = ()
    if len(VARIANT.channels) > 0:
        for part in tl.static_range(len(VARIANT.channels)):
            channels += part_values(part_tile_channels(part, VARIANT), part, VARIANT)
    else:
        PARTS: tl.constexpr = VARIANT.parts
        COUNT: tl.constexpr = VARIANT.block_d // 2 // PARTS
        for part in tl.static_range(PARTS):
            channels += pair_tile_channels(part * COUNT, COUNT, VARIANT)
    return channels
