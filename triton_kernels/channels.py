"""Loads queries and keys in the parts of ``VARIANT.channels``, of which only the first rotates.

A part is two runs of width / 2 channels (``flashrope.lowering.parts.Part``). The part that rotates is loaded as two
tiles, the first and the second members of its pairs. Any other part is loaded as one tile. The score is the sum of the
tiles' products. Functions take the index of a part, because a NamedTuple that is passed as an argument would no longer
be constexpr.
"""

import triton
import triton.language as tl

from .rotation import rotate, split_pairs


@triton.jit
def part_channels(PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the channels of a part, [width]. They are computed in whole vectors of VARIANT.vec channels, so that the
    compiler can load those."""
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


@triton.jit
def load_part(ptr, offsets, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Loads a part of the rows at offsets [M, 1]. Returns two tiles [M, width / 2], the first and the second members of
    its pairs, if the part rotates, else one tile [M, width]."""
    HALF: tl.constexpr = VARIANT.channels[PART].width // 2
    FIRST: tl.constexpr = VARIANT.channels[PART].first
    SECOND: tl.constexpr = VARIANT.channels[PART].second
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    if not ROTATES:
        return (tl.load(ptr + offsets + part_channels(PART, VARIANT)[None, :]),)
    elif VARIANT.interleaved:
        return split_pairs(tl.load(ptr + offsets + part_channels(PART, VARIANT)[None, :]), VARIANT)
    else:
        pair = tl.arange(0, HALF)[None, :]
        return tl.load(ptr + offsets + (pair + FIRST)), tl.load(ptr + offsets + (pair + SECOND))


@triton.jit
def rotate_part(tiles, cos, sin, scale, PART: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns the tiles of a part in `dtype`, rotated if the part rotates, and multiplied by scale. Computes in float32
    and rounds once. scale: None for 1."""
    ROTATES: tl.constexpr = VARIANT.channels[PART].rotates
    if ROTATES:
        x, y = rotate(tiles[0].to(tl.float32), tiles[1].to(tl.float32), cos, sin)
        if scale is not None:
            x, y = x * scale, y * scale
        return x.to(dtype), y.to(dtype)
    elif scale is None:
        return tiles
    else:
        return ((tiles[0].to(tl.float32) * scale).to(dtype),)


@triton.jit
def load_raw_parts(ptr, offsets, VARIANT: tl.constexpr):
    """Loads all parts of the rows at offsets [M, 1] and returns their tiles, unrotated."""
    tiles = ()
    for part in tl.static_range(len(VARIANT.channels)):
        tiles += load_part(ptr, offsets, part, VARIANT)
    return tiles


@triton.jit
def load_rotated_parts(ptr, offsets, cos, sin, scale, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Loads all parts of the rows at offsets [M, 1] and returns their tiles, as rotate_part does. cos, sin [M,
    width / 2]: for the part that rotates."""
    tiles = ()
    for part in tl.static_range(len(VARIANT.channels)):
        tiles += rotate_part(load_part(ptr, offsets, part, VARIANT), cos, sin, scale, part, VARIANT, dtype)
    return tiles
