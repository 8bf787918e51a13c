"""Rotates tiles: finds the channels of pairs, loads cos and sin of positions, and applies them.

In a tile the channels of a pair lie D/2 columns apart (half pairing) or side by side (interleaved), for any rotary_dim
and head_dim. So a reshape separates the first members of the pairs from the second members. Queries and keys have the
same channel order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...schemes import cos_sin
from ..rows import existing_rows, first_pair, store_rows, tile_offsets
from .pairs import concatenate, halves, join_pairs, key_channels, load_pairs, split_pairs, store_pairs

FINE_ROWS = tl.constexpr(cos_sin.FINE_ROWS)
BLOCK_ROWS = tl.constexpr(16)  # rows of a block in load_cos_sin_by_blocks

# ---- cos and sin


class CosSinTable(NamedTuple):
    """ptr: cos and sin (rotations, rows, 2, D/2) of ``flashrope.schemes.cos_sin``. rows: table rows per rotation.
    positions, maps: as in Scheme. If positions is not None, the table has one row for each token of the batch."""

    ptr: object
    rows: object
    positions: object
    maps: object = None


class RowRotation(NamedTuple):
    """One row of Scheme.maps. ``flashrope.schemes.lowered.RowMap`` says what the fields mean."""

    chunk: object
    group: object
    last: object
    is_query: object


ROW_MAP_FIELDS = tl.constexpr(len(RowRotation._fields))


@triton.jit
def load_row_map(maps, rotation):
    row = maps + ROW_MAP_FIELDS * rotation
    return RowRotation(chunk=tl.load(row), group=tl.load(row + 1), last=tl.load(row + 2), is_query=tl.load(row + 3))


@triton.jit
def mapped_positions(row_map, position):
    """Returns the mapped position of rows at these positions [M]. It is at most the row's own position. It is 0 for
    rows at negative positions, which see no key."""
    position = tl.maximum(position, 0)
    position = tl.where(row_map.chunk > 0, position % tl.maximum(row_map.chunk, 1), position)
    return tl.minimum(position // row_map.group, row_map.last)


@triton.jit
def mapped_rows(maps, rotation, rows):
    """Returns the mapped_positions of a tile's rows. The first row is at position rows.start if the rows are queries,
    and at rows.first if they are keys."""
    row_map = load_row_map(maps, rotation)
    position = tl.where(row_map.is_query != 0, rows.start, rows.first) + existing_rows(rows)
    return mapped_positions(row_map, position)


class TileMap(NamedTuple):
    """A RowRotation for tiles of keys. chunk, group: as in RowRotation. index: n // group for key n of the tile,
    in the shape of the tile's keys."""

    chunk: object
    group: object
    index: object


@triton.jit
def load_tile_map(maps, rotation, keys):
    """Returns the TileMap of a rotation for the `keys` of a tile, numbered from 0. VARIANT.aligned_maps must hold. Call
    it before the loop over tiles: the division is then outside the loop, and the compiler can also load the cos and sin
    of `index` there."""
    group = tl.load(maps + ROW_MAP_FIELDS * rotation + 1)
    return TileMap(tl.load(maps + ROW_MAP_FIELDS * rotation), group, keys // group)


@triton.jit
def mapped_start(tile_map, start):
    """Returns the mapped position of a tile's first key, which is at `start`. For the other keys, add tile_map.index
    to it."""
    start = tl.where(tile_map.chunk > 0, start % tl.maximum(tile_map.chunk, 1), start)
    return start // tile_map.group


@triton.jit
def add_angles(cos_a, sin_a, cos_b, sin_b):
    return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b


# The functions below return cos and sin of pairs FIRST to FIRST + COUNT - 1, two float32 tiles [M, COUNT]. Pairs that
# do not rotate have cos 1 and sin 0. A table row holds cos of D/2 pairs, then sin.


@triton.jit
def table_columns(table, rotation, FIRST: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr):
    """Returns pointers [COUNT] to the cos values in a rotation's first table row."""
    return table.ptr + rotation.to(tl.int64) * table.rows * D + FIRST + tl.arange(0, COUNT)


@triton.jit
def load_cos_sin(table, rotation, rows, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns cos and sin of a tile's rows (TileRows)."""
    D: tl.constexpr = VARIANT.block_d
    if table.positions is not None:
        ptr = table_columns(table, rotation, FIRST, COUNT, D)
        row = rows.start.to(tl.int64) + existing_rows(rows)
        at = ptr[None, :] + row[:, None] * D
        return tl.load(at), tl.load(at + D // 2)
    elif table.maps is not None:
        ptr = table_columns(table, rotation, FIRST, COUNT, D)
        return load_each(ptr, mapped_rows(table.maps, rotation, rows), D)
    else:
        return load_cos_sin_from(table, rotation, rows.start, rows.index, FIRST, COUNT, VARIANT)


@triton.jit
def load_cos_sin_from(table, rotation, start, index, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns cos and sin of positions start + index [M]. The table rows of `index` are the same for every tile."""
    D: tl.constexpr = VARIANT.block_d
    ptr = table_columns(table, rotation, FIRST, COUNT, D)
    start_cos, start_sin = load_start(ptr, start, VARIANT)
    at = ptr[None, :] + tl.expand_dims(index, -1) * D
    return add_angles(tl.load(at), tl.load(at + D // 2), start_cos[None, :], start_sin[None, :])


@triton.jit
def load_cos_sin_at(table, rotation, position, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns cos and sin of positions [M], which the scheme may map. A position gives the same bits in every tile.
    Positions may be negative only if VARIANT.rotated_keys is set."""
    D: tl.constexpr = VARIANT.block_d
    ptr = table_columns(table, rotation, FIRST, COUNT, D)
    if table.maps is not None:
        position = mapped_positions(load_row_map(table.maps, rotation), position)
    if VARIANT.rotated_keys:
        cos, sin = load_each(ptr, tl.abs(position), D)
        return cos, tl.where((position < 0)[:, None], -sin, sin)
    else:
        return load_each(ptr, position, D)


@triton.jit
def load_each(ptr, position, D: tl.constexpr):
    """Returns cos and sin of positions [M], each combined from a fine and a coarse table row. ptr: [COUNT]."""
    fine = ptr[None, :] + (position % FINE_ROWS)[:, None] * D
    coarse = ptr[None, :] + (position // FINE_ROWS + FINE_ROWS)[:, None] * D
    return add_angles(tl.load(fine), tl.load(fine + D // 2), tl.load(coarse), tl.load(coarse + D // 2))


@triton.jit
def load_two_levels(ptr, position, D: tl.constexpr):
    """Returns cos and sin [COUNT] of one position, combined from a fine and a coarse table row. ptr: [COUNT]."""
    fine = ptr + (position % FINE_ROWS) * D
    coarse = ptr + (position // FINE_ROWS + FINE_ROWS) * D
    return add_angles(tl.load(fine), tl.load(fine + D // 2), tl.load(coarse), tl.load(coarse + D // 2))


@triton.jit
def load_start(ptr, position, VARIANT: tl.constexpr):
    """Returns cos and sin [COUNT] of a tile's first row. Its position may be negative if VARIANT.rotated_keys is
    set."""
    if VARIANT.rotated_keys:
        cos, sin = load_two_levels(ptr, tl.abs(position), VARIANT.block_d)
        return cos, tl.where(position < 0, -sin, sin)
    else:
        return load_two_levels(ptr, position, VARIANT.block_d)


@triton.jit
def load_cos_sin_by_blocks(table, rotation, rows, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Does what load_cos_sin does, but reads B + M / B table rows instead of M, where B is BLOCK_ROWS. The result
    passes through shared memory, so call it before loops, not in them."""
    if table.positions is not None or table.maps is not None:
        return load_cos_sin(table, rotation, rows, FIRST, COUNT, VARIANT)
    else:
        M: tl.constexpr = rows.index.shape[0]
        BLOCK: tl.constexpr = BLOCK_ROWS if M > BLOCK_ROWS else M
        D: tl.constexpr = VARIANT.block_d
        ptr = table_columns(table, rotation, FIRST, COUNT, D)
        start_cos, start_sin = load_start(ptr, rows.start, VARIANT)
        at = ptr[None, :] + (tl.arange(0, M // BLOCK) * BLOCK)[:, None] * D
        first_cos, first_sin = add_angles(tl.load(at), tl.load(at + D // 2), start_cos[None, :], start_sin[None, :])
        at = ptr[None, :] + tl.arange(0, BLOCK)[:, None] * D
        row_cos, row_sin = tl.load(at)[None, :, :], tl.load(at + D // 2)[None, :, :]
        first_cos, first_sin = first_cos[:, None, :], first_sin[:, None, :]
        cos, sin = add_angles(row_cos, row_sin, first_cos, first_sin)  # [M / BLOCK, BLOCK, COUNT]
        return tl.reshape(cos, (M, COUNT)), tl.reshape(sin, (M, COUNT))


@triton.jit
def query_scale(scheme, rows, positions, length):
    """Returns the scheme's factor on every query row of a sequence of `length` keys, float32 [M]. rows [M]: indices
    into scheme.positions. positions [M]: used if scheme.positions is None."""
    if scheme.positions is not None:
        position = tl.load(scheme.positions + rows)
    else:
        position = positions.to(tl.float32)
    if scheme.log_n_every is not None:
        steps = tl.floor(tl.div_rn(tl.maximum(position, 0.0) + scheme.log_n_first, scheme.log_n_every))
        scale = scheme.log_n_factor * tl.log(steps + 1.0) + 1.0
    else:
        scale = tl.maximum(scheme.log_n_factor * tl.log(tl.maximum(position, 0.0) + 1.0), scheme.log_n_floor)
    if scheme.length_scale is not None:
        growth = tl.log(tl.maximum(length, 1).to(tl.float32) / scheme.length_scale)
        scale *= tl.maximum(0.1 * growth + 1.0, 1.0)
    return scale


# ---- rotating
# A tile is rotated in two chunks of D/4 pairs. One chunk of D/2 pairs would need registers that the accumulator holds.
# Queries of more than 256 channels are rotated in chunks of CHUNK_PAIRS pairs.

CHUNK_PAIRS = tl.constexpr(64)


@triton.jit
def rotate(first, second, cos, sin):
    """Rotates pairs: first and second members, two tiles [M, N]. With -sin it rotates back."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_rotated_chunk(
    view,
    table,
    rotation,
    rows,
    scale,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ROTATE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Loads COUNT pairs of every row, starting at pair FIRST. Rotates them if ROTATE is set and multiplies them by
    scale [M], in float32, then rounds once."""
    offsets = tile_offsets(existing_rows(rows), view)
    x, y = load_pairs(view.ptr, offsets, FIRST, COUNT, VARIANT)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if ROTATE:
        if VARIANT.num_bands > 1:  # the accumulator is live: loading by blocks would spill in the inner loop
            cos, sin = load_cos_sin(table, rotation, rows, FIRST, COUNT, VARIANT)
        else:
            cos, sin = load_cos_sin_by_blocks(table, rotation, rows, FIRST, COUNT, VARIANT)
        x, y = rotate(x, y, cos, sin)
    dtype = view.ptr.dtype.element_ty
    return (x * scale[:, None]).to(dtype), (y * scale[:, None]).to(dtype)


@triton.jit
def load_rotated_pairs(
    view,
    table,
    rotation,
    rows,
    scale,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ROTATE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Does what load_rotated_chunk does, in chunks of at most CHUNK_PAIRS pairs."""
    if COUNT <= CHUNK_PAIRS:
        return load_rotated_chunk(view, table, rotation, rows, scale, FIRST, COUNT, ROTATE, VARIANT)
    else:
        HALF: tl.constexpr = COUNT // 2
        x, y = load_rotated_chunk(view, table, rotation, rows, scale, FIRST, HALF, ROTATE, VARIANT)
        more_x, more_y = load_rotated_chunk(view, table, rotation, rows, scale, FIRST + HALF, HALF, ROTATE, VARIANT)
        return concatenate(x, more_x), concatenate(y, more_y)


@triton.jit
def load_rotated_range(
    view, table, rotation, rows, scale, PART: tl.constexpr, ROTATE: tl.constexpr, VARIANT: tl.constexpr
):
    """Loads and rotates the tile of one of VARIANT.pair_ranges."""
    FIRST: tl.constexpr = VARIANT.pair_ranges[PART].first
    COUNT: tl.constexpr = VARIANT.pair_ranges[PART].count
    x, y = load_rotated_pairs(view, table, rotation, rows, scale, FIRST, COUNT, ROTATE, VARIANT)
    return join_pairs(x, y, VARIANT)


@triton.jit
def load_rotated_ranges(view, table, rotation, rows, scale, ROTATE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns load_rotated_range of all VARIANT.pair_ranges."""
    tiles = ()
    for part in tl.static_range(len(VARIANT.pair_ranges)):
        tiles += (load_rotated_range(view, table, rotation, rows, scale, part, ROTATE, VARIANT),)
    return tiles


@triton.jit
def load_rotated(view, table, rotation, rows, scale, ROTATE: tl.constexpr, VARIANT: tl.constexpr):
    """Loads a tile [M, D], rotates it if ROTATE is set and multiplies it by scale [M]. Returns it in VARIANT.parts
    channel parts, or in a tile for each of VARIANT.pair_ranges."""
    if len(VARIANT.pair_ranges) > 0:
        return load_rotated_ranges(view, table, rotation, rows, scale, ROTATE, VARIANT)
    else:
        return load_rotated_head(view, table, rotation, rows, scale, ROTATE, VARIANT)


@triton.jit
def load_rotated_head(view, table, rotation, rows, scale, ROTATE: tl.constexpr, VARIANT: tl.constexpr):
    """Does what load_rotated does if there are no pair_ranges."""
    NEXT: tl.constexpr = VARIANT.block_d // 4
    x, y = load_rotated_pairs(view, table, rotation, rows, scale, 0, NEXT, ROTATE, VARIANT)
    next_x, next_y = load_rotated_pairs(view, table, rotation, rows, scale, NEXT, NEXT, ROTATE, VARIANT)
    if VARIANT.parts == 1:
        return (join_pairs(concatenate(x, next_x), concatenate(y, next_y), VARIANT),)
    elif VARIANT.interleaved:
        return join_pairs(x, y, VARIANT), join_pairs(next_x, next_y, VARIANT)
    else:
        return concatenate(x, next_x), concatenate(y, next_y)


@triton.jit
def load_rotated_hidden(view, table, rotation, rows, scale, VARIANT: tl.constexpr):
    """Calls load_rotated with a rotation number that is known only at run time. Hides from Triton that the tile was
    joined from pairs.

    Symptom without the branch: Triton looks through the joins and picks a layout that ldmatrix cannot load. So keep the
    branch, although applying rotation 0 (the identity) would give the same tile. The branch also saves that work."""
    if rotation > 0:
        tile = load_rotated(view, table, rotation, rows, scale, True, VARIANT)  # [BM, D]
    else:
        tile = load_rotated(view, table, rotation, rows, scale, False, VARIANT)
    return tile


@triton.jit
def join_hidden(x, y, holds, VARIANT: tl.constexpr):
    """Returns join_pairs(x, y). Hides from Triton that the tile was joined. holds: a condition that Triton cannot
    decide, true wherever the tile is used.

    Symptom without the branch: Triton looks through the join and picks a layout that ldmatrix cannot load."""
    tile = tl.zeros((x.shape[0], 2 * x.shape[1]), x.dtype)
    if holds:
        tile = join_pairs(x, y, VARIANT)
    return tile


@triton.jit
def rotate_step(x, y, table, step, before, rows, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Rotates COUNT pairs of a gradient, starting at pair FIRST, from the previous band's rotated basis to this band's.

    Without maps, the rotation `step` does this. With maps, no single rotation can do it. Then `before`, the previous
    band's step, is undone, and `step` is applied."""
    if table.maps is None:
        cos, sin = load_cos_sin(table, step, rows, FIRST, COUNT, VARIANT)
        return rotate(x, y, cos, sin)
    else:
        cos, sin = load_cos_sin(table, before, rows, FIRST, COUNT, VARIANT)
        x, y = rotate(x, y, cos, -sin)
        cos, sin = load_cos_sin(table, step, rows, FIRST, COUNT, VARIANT)
        return rotate(x, y, cos, sin)


@triton.jit
def rotate_tile(tile, table, step, before, rows, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Applies rotate_step to a float32 tile in registers. PART: the tile's index in VARIANT.pair_ranges, if there are
    any."""
    FIRST: tl.constexpr = first_pair(VARIANT.pair_ranges, PART)
    CHUNK: tl.constexpr = tile.shape[1] // 4
    x, y = split_pairs(tile, VARIANT)
    x, next_x = halves(x)
    y, next_y = halves(y)
    x, y = rotate_step(x, y, table, step, before, rows, FIRST, CHUNK, VARIANT)
    next_x, next_y = rotate_step(next_x, next_y, table, step, before, rows, FIRST + CHUNK, CHUNK, VARIANT)
    return join_pairs(concatenate(x, next_x), concatenate(y, next_y), VARIANT)


@triton.jit
def rotate_tiles(tiles, table, step, before, rows, VARIANT: tl.constexpr):
    """Applies rotate_tile to the tiles of a head."""
    rotated = ()
    for part in tl.static_range(len(tiles)):
        rotated += (rotate_tile(tiles[part], table, step, before, rows, part, VARIANT),)
    return rotated


@triton.jit
def store_chunk_rotated_back(view, x, y, table, rotation, rows, scale, FIRST: tl.constexpr, VARIANT: tl.constexpr):
    """Rotates pairs of every row back, starting at pair FIRST, multiplies them by scale and stores them. x, y: the
    members of the pairs."""
    cos, sin = load_cos_sin(table, rotation, rows, FIRST, x.shape[1], VARIANT)
    x, y = rotate(x, y, cos, -sin)
    store_pairs(view, x * scale, y * scale, rows, FIRST, VARIANT)


@triton.jit
def store_rotated_back(view, tile, channels, table, rotation, rows, scale, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Applies the inverse of a rotation to a float32 tile, multiplies the tile by scale and stores it. channels: those
    of the tile's columns. PART: the tile's index in VARIANT.pair_ranges, if there are any."""
    if VARIANT.rotary_dim == 0:
        store_rows(view, tile * scale, rows, channels, VARIANT)
    else:
        FIRST: tl.constexpr = first_pair(VARIANT.pair_ranges, PART)
        NEXT: tl.constexpr = FIRST + tile.shape[1] // 4
        x, y = split_pairs(tile, VARIANT)
        x, next_x = halves(x)
        y, next_y = halves(y)
        store_chunk_rotated_back(view, x, y, table, rotation, rows, scale, FIRST, VARIANT)
        store_chunk_rotated_back(view, next_x, next_y, table, rotation, rows, scale, NEXT, VARIANT)


@triton.jit
def store_tiles_rotated_back(view, tiles, table, rotation, rows, scale, VARIANT: tl.constexpr):
    """Applies store_rotated_back to the tiles of a head."""
    channels = key_channels(VARIANT)
    for part in tl.static_range(len(tiles)):
        store_rotated_back(view, tiles[part], channels[part], table, rotation, rows, scale, part, VARIANT)
