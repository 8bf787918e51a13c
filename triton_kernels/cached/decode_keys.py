"""Loads the keys and values of a sequence for the decode kernel, block by block.

The kernel's loop calls, for every block of a band:

look_up            to load its page numbers, one block ahead of the other calls,
find_block         to find where its keys lie,
load_block_keys    to load its keys, rotated if the band rotates keys, in the tiles of the score product,
see_block          to learn which of its keys each query sees, and
load_block_values  to load its values. If values are channels of the keys, these are tiles that load_block_keys has
                   already loaded.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..kv_cache import load_page, row_in_page, valid_page
from ..quantized import key_parts, load_words, value_parts
from ..rotating.channels import load_raw_parts, load_rotated_parts
from ..rotating.pairs import as_pairs, load_key_pairs, load_key_words, load_pair_tiles, load_pairs
from ..rotating.rotation import load_cos_sin, load_cos_sin_from, mapped_start, rotate
from ..rows import TileRows, clamp_rows, load_cached_values, page_offsets, value_channels
from ..tiles import sees_columns
from .explicit_positions import explicit_key_cos_sin, load_tile_entries, sees, tile_places


class SequenceKeys(NamedTuple):
    """The keys and values of a sequence and key head.

    k, v: HeadViews of the cache.
    cached: CachedKeys, where the sequence lies in the cache.
    length: number of keys.
    table: CosSinTable.
    shift: added to positions before they are looked up, so that no position is negative. It is 0 if the scheme maps
        positions or if the caller's keys are already rotated.
    last: LastVisible if positions are explicit, else None.
    weight: factors on the channels of keys before rotation, float32 [D], or None.
    """

    k: object
    v: object
    cached: object
    length: object
    table: object
    shift: object
    last: object
    weight: object


class KeySource(NamedTuple):
    """The keys and values that a band reads. keys: SequenceKeys. rotation: the band's k_rotation. tile_map: the TileMap
    of the band's keys if VARIANT.aligned_maps, else None."""

    keys: object
    rotation: object
    tile_map: object


class KeyBlock(NamedTuple):
    """The place of a block of keys in the cache.

    column: the first key of the block.
    page, row: the page and the row of each key, in the shape of block_keys.
    """

    column: object
    page: object
    row: object


class PlacedBlock(NamedTuple):
    """A KeyBlock if positions are explicit. places: the Places of the keys."""

    column: object
    page: object
    row: object
    places: object


@triton.jit
def block_keys(VARIANT: tl.constexpr):
    """Returns the numbers 0 to BN - 1 of the keys of a block in the shape of the block's keys, [BN]. With G groups of
    keys the shape is [G, BN / G], and group g has BN / G consecutive keys."""
    if VARIANT.key_groups == 1:
        return tl.arange(0, VARIANT.block_n)
    else:
        GROUP: tl.constexpr = VARIANT.block_n // VARIANT.key_groups
        return tl.arange(0, VARIANT.key_groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def block_slots(keys, column, VARIANT: tl.constexpr):
    """Returns the slots of the block of keys that starts at `column`, in the shape of block_keys. Beyond the last key
    they repeat its slot."""
    slot = keys.cached.first_slot + column + clamp_rows(block_keys(VARIANT), keys.length - column)
    return tl.maximum(slot, 0)  # negative if there are no keys


@triton.jit
def page_slots(keys, column, VARIANT: tl.constexpr):
    """Returns the slots whose pages are those of the block of keys that starts at `column`: one slot if every block
    lies in one page, or else one per group, [G, 1], if every group does, or else the block_slots."""
    GROUP: tl.constexpr = VARIANT.block_n // VARIANT.key_groups
    if keys.cached.layout.leftpad is not None or VARIANT.page_size == 0 or VARIANT.page_size % GROUP > 0:
        return block_slots(keys, column, VARIANT)
    else:
        first = column
        if VARIANT.page_size % VARIANT.block_n > 0:
            first += tl.arange(0, VARIANT.key_groups)[:, None] * GROUP
        return tl.maximum(tl.minimum(first, keys.length - 1), 0)


@triton.jit
def look_up(keys, column, VARIANT: tl.constexpr):
    """Returns what find_block needs for the block of keys that starts at `column`: (pages,) or, if positions are
    explicit, (pages, TileEntries). The pages are int32, in the shape of page_slots. The call is safe even if no block
    starts at `column`, because slots are clamped."""
    cached = keys.cached
    slots = page_slots(keys, column, VARIANT)
    pages = load_page(cached.layout, cached.batch, slots, VARIANT.page_size)
    if keys.last is None:
        return (pages,)
    else:
        slots = block_slots(keys, column, VARIANT)
        first_slot = cached.first_slot + column
        return pages, load_tile_entries(cached.layout, cached.batch, first_slot, slots, VARIANT)


@triton.jit
def find_block(keys, column, found, VARIANT: tl.constexpr):
    """Returns the KeyBlock that starts at `column`, or the PlacedBlock if positions are explicit. found: from
    look_up."""
    cache = keys.cached.layout
    slots = block_slots(keys, column, VARIANT)
    row = row_in_page(cache, slots, VARIANT.page_size)
    page = valid_page(cache, found[0])
    if keys.last is None:
        return KeyBlock(column, page, row)
    else:
        places = tile_places(cache, found[1], page, keys.last, keys.cached.first_slot + column, slots, VARIANT)
        return PlacedBlock(column, places.page, places.row, places)


@triton.jit
def see_block(queries, keys, block, VARIANT: tl.constexpr):
    """Returns whether each row of the BandQueries sees each key of the block, [BM, BN], or [G, BM, BN / G] with G
    groups of keys."""
    if keys.last is None:
        return sees_columns(queries.visible, block.column, tl.expand_dims(block_keys(VARIANT), -2))
    else:
        return sees(queries.visible, block.places, block.column, keys.table.maps, VARIANT)


# ---- keys


@triton.jit
def load_block_keys(source, block, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns (the keys of a block, their raw tiles that hold values). The keys are a tuple of tiles of `dtype`: first
    and second members of pairs, rotated if ROTATE_K, or the operands of VARIANT.channels, or the tiles of words."""
    view = source.keys.k
    CODES: tl.constexpr = view.ptr.dtype.element_ty
    PARTS: tl.constexpr = key_parts(
        CODES, ROTATE_K, VARIANT.code_vec, VARIANT.block_d, VARIANT.head_dim, VARIANT.rotary_dim, VARIANT.first_channel
    )
    if PARTS > 1:
        return load_key_words(view, block.page, block.row, VARIANT, dtype), ()
    elif len(VARIANT.channels) > 0:
        return load_key_channels(source, block, ROTATE_K, VARIANT, dtype)
    elif VARIANT.parts > 1:
        return load_key_halves(source, block, ROTATE_K, VARIANT, dtype)
    elif VARIANT.first_value >= 0:
        raw = load_pair_tiles(view.ptr, page_offsets(block.page, block.row, view), 0, VARIANT.block_d // 2, VARIANT)
        return rotate_all_pairs(as_pairs(raw, VARIANT), source, block, ROTATE_K, VARIANT, dtype), raw
    else:
        # int8 keys that rotate are converted to float32 at once, because rotate_pairs works in float32.
        k_dtype: tl.constexpr = tl.float32 if ROTATE_K and CODES == tl.int8 else dtype
        k = load_key_pairs(view.ptr, page_offsets(block.page, block.row, view), VARIANT, k_dtype)  # [BN, D/2]
        return rotate_all_pairs(k, source, block, ROTATE_K, VARIANT, dtype), ()


@triton.jit
def rotate_pairs(x, y, cos, sin, scale_x, scale_y, dtype: tl.constexpr):
    """Rotates and scales the members of pairs [M, D/2] in float32. Rounds them once, to `dtype`."""
    rotated_x, rotated_y = rotate(x.to(tl.float32), y.to(tl.float32), cos, sin)
    return (rotated_x * scale_x).to(dtype), (rotated_y * scale_y).to(dtype)


@triton.jit
def load_pair_weights(keys, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the key weights of the members of pairs FIRST to FIRST + COUNT - 1, two tiles [1, COUNT]."""
    return load_pairs(keys.weight, tl.zeros((1, 1), tl.int32), FIRST, COUNT, VARIANT)


@triton.jit
def weigh_pairs(x, y, keys, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Multiplies the members of key pairs [BN, COUNT] by their weights in float32. Returns them unchanged without
    weights."""
    if keys.weight is None:
        return x, y
    else:
        weight_x, weight_y = load_pair_weights(keys, FIRST, COUNT, VARIANT)
        return x.to(tl.float32) * weight_x, y.to(tl.float32) * weight_y


@triton.jit
def key_cos_sin(source, column, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns cos and sin [..., COUNT] of pairs FIRST to FIRST + COUNT - 1, for the block of keys that starts at
    `column`."""
    keys, rotation = source.keys, source.rotation
    if VARIANT.aligned_maps:
        start = mapped_start(source.tile_map, column)
        return load_cos_sin_from(keys.table, rotation, start, source.tile_map.index, FIRST, COUNT, VARIANT)
    else:
        rows = TileRows(block_keys(VARIANT), column + keys.shift, column, keys.length)
        return load_cos_sin(keys.table, rotation, rows, FIRST, COUNT, VARIANT)


@triton.jit
def load_key_channels(source, block, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns a block of keys in the operands of VARIANT.channels, and a tuple of their raw tiles that hold values."""
    keys, offsets = source.keys, page_offsets(block.page, block.row, source.keys.k)
    if ROTATE_K:
        FIRST: tl.constexpr = VARIANT.channels[0].pair
        COUNT: tl.constexpr = VARIANT.channels[0].width // 2
        cos, sin = key_cos_sin(source, block.column, FIRST, COUNT, VARIANT)
        return load_rotated_parts(keys.k.ptr, offsets, cos, sin, keys.weight, VARIANT, dtype)
    else:
        return load_raw_parts(keys.k.ptr, offsets, VARIANT)


@triton.jit
def load_key_range(
    source,
    block,
    offsets,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ROTATE_K: tl.constexpr,
    VARIANT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Returns (pairs FIRST to FIRST + COUNT - 1 of a block of keys, their raw tiles). The pairs are two tiles [BN,
    COUNT]. offsets [BN, 1]: where the keys are."""
    keys = source.keys
    raw = load_pair_tiles(keys.k.ptr, offsets, FIRST, COUNT, VARIANT)
    pairs = as_pairs(raw, VARIANT)
    if ROTATE_K:
        cos, sin = key_cos_sin(source, block.column, FIRST, COUNT, VARIANT)
        x, y = weigh_pairs(pairs[0], pairs[1], keys, FIRST, COUNT, VARIANT)
        pairs = rotate_pairs(x, y, cos, sin, 1.0, 1.0, dtype)
    return pairs, raw


@triton.jit
def load_key_halves(source, block, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns (all pairs of a block of keys, their raw tiles). The pairs are two tiles for each of VARIANT.parts
    parts."""
    PARTS: tl.constexpr = VARIANT.parts
    COUNT: tl.constexpr = VARIANT.block_d // 2 // PARTS
    offsets = page_offsets(block.page, block.row, source.keys.k)
    tiles, values = (), ()
    for part in tl.static_range(PARTS):
        pairs, raw = load_key_range(source, block, offsets, part * COUNT, COUNT, ROTATE_K, VARIANT, dtype)
        tiles += pairs
        values += raw
    return tiles, values


@triton.jit
def rotate_all_pairs(k, source, block, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns the pairs k of a block of keys, two tiles [BN, D/2]. If ROTATE_K, they are multiplied by the key weights
    and rotated."""
    keys = source.keys
    if not ROTATE_K:
        return k
    else:
        if keys.last is None:
            cos, sin = key_cos_sin(source, block.column, 0, VARIANT.block_d // 2, VARIANT)
        else:
            cache = keys.cached.layout
            cos, sin = explicit_key_cos_sin(keys.table, source.rotation, cache, block.places, VARIANT)
        x, y = weigh_pairs(k[0], k[1], keys, 0, VARIANT.block_d // 2, VARIANT)
        return rotate_pairs(x, y, cos, sin, 1.0, 1.0, dtype)


# ---- values


@triton.jit
def load_block_values(source, block, raw, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns the values of a block in the parts of the accumulator, [BN, DV] or [G, BN / G, DV]. raw: the raw tiles
    that load_block_keys returned."""
    view = source.keys.v
    PARTS: tl.constexpr = value_parts(view.ptr.dtype.element_ty, VARIANT.code_vec, VARIANT.block_d)
    if VARIANT.first_value >= 0:
        return raw
    elif PARTS > 1:
        at = tl.arange(0, VARIANT.block_d // 2)
        return load_words(view, block.page, block.row, at, VARIANT.head_dim, VARIANT, dtype)
    else:
        channels = value_channels(VARIANT)
        return load_cached_values(view.ptr, page_offsets(block.page, block.row, view), channels, VARIANT, dtype)
