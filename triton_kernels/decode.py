"""Computes attention over a KV cache for few queries. The cache holds raw keys. They are divided among programs, and
``combine.py`` combines the programs' results.

A tile holds the queries of all heads that share a key head: row m is query m // group of the group's head m % group.
Key blocks are counted from the first valid slot, and nothing on the host waits for a length. There are two ways to
divide the keys:

shares: programs have equal shares of the blocks of all sequences (``shares.py``). Padding and pages change no bit of a
sequence's result. The lengths of the other sequences can change its last bits, because they decide where a sequence is
cut.
splits: split s of a sequence takes blocks s, s + num_splits, ... of every band. So a sequence's result depends only on
its own queries and keys and on num_splits. Neither the other sequences nor the division of queries into calls changes a
bit of it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import decode_int, decode_int64, decode_stride
from .channels import load_query_parts, load_raw_parts, load_rotated_parts, shared_channels
from .combine import store_nothing, store_piece, store_segment, store_split
from .explicit_positions import (
    band_columns,
    explicit_key_cos_sin,
    explicit_keys,
    explicit_query_cos_sin,
    last_visible,
    load_query_position,
    load_tile_entries,
    load_token,
    sees,
    tile_places,
)
from .kv_cache import clamp, load_page, row_in_page, valid_page
from .quantized import (
    hide_codes,
    key_parts,
    load_scales,
    load_words,
    scale_values,
    scale_view,
    split_columns,
    store_codes,
    value_parts,
)
from .rotation import (
    CosSinTable,
    as_pairs,
    join_hidden,
    join_pairs,
    load_cos_sin,
    load_cos_sin_at,
    load_cos_sin_from,
    load_key_pairs,
    load_key_words,
    load_pair_tiles,
    load_pairs,
    load_tile_map,
    mapped_start,
    query_scale,
    rotate,
)
from .shares import PIECE_FIELDS, SHARE_FIELDS, WHOLE
from .softmax import (
    SoftmaxState,
    add_values,
    log2_scale,
    merge_groups,
    online_softmax,
    start_group_softmax,
    start_softmax,
)
from .stored_positions import as_float
from .tiles import (
    TileRows,
    clamp_rows,
    find_cached_sequence,
    float_value_parts,
    head_view,
    key_tiles,
    load_band,
    load_cached_values,
    load_rows,
    load_values,
    page_offsets,
    row_products,
    row_program,
    sees_columns,
    sequence_rows,
    value_channels,
    visible_keys,
)


@triton.jit
def token_offsets(x, batch, token, head, VARIANT: tl.constexpr):
    """Returns the offsets [M, 1] of tokens of a TensorView, int64."""
    offset = batch.to(tl.int64) * decode_stride(x.stride_batch, VARIANT) + token * decode_stride(x.stride_row, VARIANT)
    return (offset + head * decode_stride(x.stride_head, VARIANT))[:, None]


@triton.jit
def find_slots(cache, batch, token, count, token_slots, VARIANT: tl.constexpr):
    """Returns (page, row, whether the slot exists) of a sequence's `count` new tokens, int64.

    token_slots: the caller's slot of every token, counted over the whole cache. If None, tokens follow
    cache.seqlens."""
    capacity = decode_int(cache.capacity)
    if token_slots is None:
        slot = clamp(tl.load(cache.seqlens + batch), 0, capacity) + token
        exists = (token < count) & (slot < capacity)
        last = tl.minimum(slot, capacity - 1)
        page = load_page(cache, batch, last, VARIANT.page_size).to(tl.int64)
        row = row_in_page(cache, last, VARIANT.page_size)
    else:
        slot = tl.load(token_slots + tl.minimum(token, count - 1)).to(tl.int64)
        exists = (token < count) & (slot >= 0)
        rows = VARIANT.page_size if VARIANT.page_size > 0 else capacity
        page, row = slot // rows, slot % rows
    return page, row, exists & (page >= 0) & (page < decode_int(cache.pages))


@triton.jit(do_not_specialize=["seqlen", "max_seqlen", "heads"])
def append_rows(k_cache, v_cache, k, v, cache, cu_seqlens, seqlen, max_seqlen, heads, VARIANT: tl.constexpr):
    """Appends k, v (batch, seqlen, heads), or packed (total, heads), at cache.seqlens, or writes them to the slots in
    cache.slot_mapping. Quantizes them if the cache is quantized. Drops keys without a slot or a page. k_cache, v_cache,
    k and v are TensorViews. If values are channels of the keys, v_cache and v are None, and VARIANT.head_dim_v is 0."""
    batch, first = row_program(max_seqlen * heads, VARIANT.block_m)
    start, count = sequence_rows(cu_seqlens, batch, seqlen)
    rows = first + tl.arange(0, VARIANT.block_m)
    if first >= count * heads:
        return
    token, head = rows // heads, (rows % heads).to(tl.int64)
    page, row, exists = find_slots(cache, batch, token, count, cache.slot_mapping, VARIANT)
    token = start + tl.minimum(token, count - 1)
    channels = tl.arange(0, VARIANT.block_d)
    mask = exists[:, None] & (channels < VARIANT.head_dim)[None, :]
    new_k = load_rows(k.ptr, token_offsets(k, batch, token, head, VARIANT), channels, VARIANT)
    if VARIANT.head_dim_v > 0:
        channels_v = tl.arange(0, VARIANT.block_dv)
        mask_v = exists[:, None] & (channels_v < VARIANT.head_dim_v)[None, :]
        new_v = load_values(v.ptr, token_offsets(v, batch, token, head, VARIANT), channels_v, VARIANT)
    to_k = token_offsets(k_cache, page, row, head, VARIANT)
    if VARIANT.head_dim_v > 0:
        to_v = token_offsets(v_cache, page, row, head, VARIANT)
    if cache.k_scale is None:
        tl.store(k_cache.ptr + to_k + channels[None, :], new_k, mask=mask)
        if VARIANT.head_dim_v > 0:
            tl.store(v_cache.ptr + to_v + channels_v[None, :], new_v, mask=mask_v)
    else:
        k_scale = store_codes(k_cache.ptr, to_k, new_k, exists, VARIANT.head_dim)
        v_scale = store_codes(v_cache.ptr, to_v, new_v, exists, VARIANT.head_dim_v)
        to_k = page * decode_int64(cache.k_batch) + row * decode_int64(cache.k_row) + head * decode_int64(cache.k_head)
        to_v = page * decode_int64(cache.v_batch) + row * decode_int64(cache.v_row) + head * decode_int64(cache.v_head)
        tl.store(cache.k_scale + to_k, k_scale, mask=exists)
        tl.store(cache.v_scale + to_v, v_scale, mask=exists)


class Program(NamedTuple):
    """The work of one program: a split of the keys, a tile of query rows, a key head and a sequence. batches: the
    number of sequences."""

    split: object
    tile: object
    head_kv: object
    batch: object
    batches: object


@triton.jit
def find_program(tiles, heads_kv, num_splits):
    """Returns the Program of this program id. tiles: number of tiles of query rows per sequence and key head."""
    split = tl.program_id(0) % num_splits
    tile = tl.program_id(0) // num_splits % tiles
    head_kv = tl.program_id(0) // num_splits // tiles % heads_kv
    batch = tl.program_id(0) // num_splits // tiles // heads_kv
    batches = tl.num_programs(0) // num_splits // tiles // heads_kv
    return Program(split, tile, head_kv, batch, batches)


class Blocks(NamedTuple):
    """Key blocks first, first + step, ..., below stop. If the keys are divided into splits, stop is None in a program's
    own Blocks. They are then the blocks b of every band with b % step == first."""

    first: object
    stop: object
    step: object


class QueryRows(NamedTuple):
    """The query rows of a tile, each field [BM]. exists: whether the row exists. token: the index of its token in the
    sequence. head: its query head. position: its position."""

    exists: object
    token: object
    head: object
    position: object


class BandQueries(NamedTuple):
    """The queries of a tile in one band. parts: the rotated queries, in tiles of the same channels as the tiles of the
    band's keys. visible: the keys that each row sees. scale_log2: softmax scale in log2 units."""

    parts: object
    visible: object
    scale_log2: object


class CachedKeys(NamedTuple):
    """A sequence's keys. k, v: HeadViews of the cache. first_slot: slot of the first key. length: number of keys.
    shift: added to positions before they are looked up, so that no position is negative. It is 0 if the scheme maps
    positions or if the caller's keys are already rotated. k_scale, v_scale: ScaleViews of a quantized cache, else None.
    last: LastVisible if positions are explicit, else None. weight: factors on the channels of keys before rotation,
    float32 [D], or None."""

    k: object
    v: object
    k_scale: object
    v_scale: object
    cache: object
    batch: object
    first_slot: object
    length: object
    table: object
    shift: object
    last: object
    weight: object = None


@triton.jit
def part_scores(queries, keys, VARIANT: tl.constexpr):
    """Returns the products of queries and keys, float32 [BM, BN], or [G, BM, BN / G] with G groups of keys. Both are
    tuples of tiles with the same channels."""
    if VARIANT.block_d < 32:  # a tensor core takes at least 16 channels
        q, k = join_pairs(queries[0], queries[1], VARIANT), join_pairs(keys[0], keys[1], VARIANT)
        return tl.dot(q, tl.trans(hide_codes(k) if VARIANT.code_vec > 0 else k), input_precision="ieee")
    else:
        return row_products(queries, keys)


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
def scale_of_pairs(
    keys, scale, FIRST: tl.constexpr, COUNT: tl.constexpr, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns the factors on the first and on the second members of rotated query pairs. They are `scale` [BM, 1],
    times the key weights if the keys do not rotate."""
    if keys.weight is None or ROTATE_K:
        return scale, scale
    else:
        x, y = load_pair_weights(keys, FIRST, COUNT, VARIANT)
        return scale * x, scale * y


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
def find_rows(program, seq, group, VARIANT: tl.constexpr):
    """Returns the QueryRows of a tile. group: number of query heads per key head."""
    rows = program.tile * VARIANT.block_m + tl.arange(0, VARIANT.block_m)
    exists = rows < seq.length_q * group
    rows = clamp_rows(rows, seq.length_q * group)
    token, head = rows // group, program.head_kv * group + rows % group
    return QueryRows(exists, token, head, token + seq.ahead)


@triton.jit
def load_query_pairs(
    q,
    offsets,
    rows,
    band,
    keys,
    scale,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ROTATE_K: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Returns pairs FIRST to FIRST + COUNT - 1 of queries at offsets [BM, 1], rotated and scaled: two tiles [BM,
    COUNT]."""
    x, y = load_pairs(q.ptr, offsets, FIRST, COUNT, VARIANT)
    position = rows.position + keys.shift
    cos, sin = load_cos_sin_at(keys.table, band.q_rotation, position, FIRST, COUNT, VARIANT)
    scale_x, scale_y = scale_of_pairs(keys, scale, FIRST, COUNT, ROTATE_K, VARIANT)
    return rotate_pairs(x, y, cos, sin, scale_x, scale_y, q.ptr.dtype.element_ty)


@triton.jit
def load_query_halves(q, offsets, rows, band, keys, scale, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns all pairs of queries, rotated and scaled, in two tiles for each of VARIANT.parts parts."""
    PARTS: tl.constexpr = VARIANT.parts
    COUNT: tl.constexpr = VARIANT.block_d // 2 // PARTS
    tiles = ()
    for part in tl.static_range(PARTS):
        tiles += load_query_pairs(q, offsets, rows, band, keys, scale, part * COUNT, COUNT, ROTATE_K, VARIANT)
    return tiles


@triton.jit
def load_query_channels(q, offsets, position, band, keys, scale, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns queries at positions [BM] and offsets [BM, 1], rotated and scaled, in the tiles of VARIANT.channels."""
    FIRST: tl.constexpr = VARIANT.channels[0].pair
    COUNT: tl.constexpr = VARIANT.channels[0].width // 2
    cos, sin = load_cos_sin_at(keys.table, band.q_rotation, position, FIRST, COUNT, VARIANT)  # [BM, COUNT]
    return load_query_parts(q.ptr, offsets, cos, sin, scale, keys.weight, ROTATE_K, VARIANT)


@triton.jit
def repeat_queries(tiles, VARIANT: tl.constexpr):
    """Returns tiles of queries [BM, N] once for every group of keys, [G, BM, N]."""
    repeated = ()
    for part in tl.static_range(len(tiles)):
        repeated += (repeat_tile(tiles[part], VARIANT),)
    return repeated


@triton.jit
def repeat_tile(tile, VARIANT: tl.constexpr):
    """Returns a tile [M, N] once for every group of keys, [G, M, N]."""
    GROUPS: tl.constexpr = VARIANT.key_groups
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    return tl.broadcast_to(tile[None, :, :], (GROUPS, M, N))


@triton.jit
def rotate_queries(
    q,
    offsets,
    rows,
    token,
    column,
    band,
    keys,
    scheme,
    scale,
    ROTATE_K: tl.constexpr,
    PARTS: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Returns the BandQueries of a band. offsets, scale [BM, 1]: offset and query scale of every row. token [BM]: the
    index of each row's token over all sequences. column [BM]: the last column that each row sees. Both are None without
    explicit positions. ROTATE_K: whether the band's keys rotate. PARTS: the number of tiles that load_key_words returns
    for the band's keys, or 1 if the keys are loaded as pairs."""
    if len(VARIANT.channels) > 0:
        tiles = load_query_channels(q, offsets, rows.position + keys.shift, band, keys, scale, ROTATE_K, VARIANT)
    elif column is None:
        tiles = load_query_halves(q, offsets, rows, band, keys, scale, ROTATE_K, VARIANT)
    else:
        x, y = load_pairs(q.ptr, offsets, 0, VARIANT.block_d // 2, VARIANT)  # [BM, D/2]
        cos, sin = explicit_query_cos_sin(keys.table, band.q_rotation, keys.cache, token, rows.position, VARIANT)
        scale_x, scale_y = scale_of_pairs(keys, scale, 0, VARIANT.block_d // 2, ROTATE_K, VARIANT)
        tiles = rotate_pairs(x, y, cos, sin, scale_x, scale_y, q.ptr.dtype.element_ty)
    if column is None:
        visible = visible_keys(rows.position, band, keys.length, scheme.maps)
    else:
        visible = explicit_keys(rows.position, column, band, keys.cache, token, scheme.maps, VARIANT)
    if VARIANT.key_groups > 1:
        tiles = repeat_queries(tiles, VARIANT)
    if PARTS > 1:
        tile = join_hidden(tiles[0], tiles[1], keys.length > 0, VARIANT)
        return BandQueries(split_columns(tile, PARTS), visible, log2_scale(scheme.score_scale))
    else:
        return BandQueries(tiles, visible, log2_scale(scheme.score_scale))


@triton.jit
def start_shared_softmax(VARIANT: tl.constexpr):
    """Returns the initial SoftmaxState with one accumulator for every tile of keys that holds values."""
    BLOCK_M: tl.constexpr = VARIANT.block_m
    channels = shared_channels(VARIANT)
    state, acc = start_softmax(BLOCK_M, 16), ()
    for part in tl.static_range(len(channels)):
        acc += (tl.zeros((BLOCK_M, channels[part].shape[0]), tl.float32),)
    return SoftmaxState(acc, state.row_max, state.row_sum)


@triton.jit
def own_blocks(blocks, own):
    """Returns the Blocks of a band that a program takes. blocks: all blocks of the band. own: the program's Blocks."""
    if own.stop is None:
        first = blocks.begin + (own.first - blocks.begin % own.step + own.step) % own.step
        return Blocks(first, blocks.end, own.step)
    else:
        return Blocks(tl.maximum(blocks.begin, own.first), tl.minimum(blocks.end, own.stop), own.step)


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
    slot = keys.first_slot + column + clamp_rows(block_keys(VARIANT), keys.length - column)
    return tl.maximum(slot, 0)  # negative if there are no keys


@triton.jit
def load_block_pages(keys, column, VARIANT: tl.constexpr):
    """Returns the pages of the block of keys that starts at `column`, int32 in the shape of block_keys, or one page if
    every block lies in one page."""
    if keys.cache.leftpad is None and VARIANT.page_size > 0 and VARIANT.page_size % VARIANT.block_n == 0:
        slots = tl.maximum(tl.minimum(column, keys.length - 1), 0)
    else:
        slots = block_slots(keys, column, VARIANT)
    return load_page(keys.cache, keys.batch, slots, VARIANT.page_size)


@triton.jit
def load_block_entries(keys, column, VARIANT: tl.constexpr):
    """Returns the TileEntries of the block of keys that starts at `column`."""
    slots = block_slots(keys, column, VARIANT)
    return load_tile_entries(keys.cache, keys.batch, keys.first_slot + column, slots, VARIANT)


@triton.jit
def key_cos_sin(keys, rotation, k_map, column, FIRST: tl.constexpr, COUNT: tl.constexpr, VARIANT: tl.constexpr):
    """Returns cos and sin [..., COUNT] of pairs FIRST to FIRST + COUNT - 1, for the block of keys that starts at
    `column`. k_map: the TileMap of the band's keys if VARIANT.aligned_maps, else None."""
    if VARIANT.aligned_maps:
        return load_cos_sin_from(keys.table, rotation, mapped_start(k_map, column), k_map.index, FIRST, COUNT, VARIANT)
    else:
        rows = TileRows(block_keys(VARIANT), column + keys.shift, column, keys.length)
        return load_cos_sin(keys.table, rotation, rows, FIRST, COUNT, VARIANT)


@triton.jit
def load_key_channels(
    keys, offsets, band, k_map, column, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr
):
    """Returns a block of keys in the operands of VARIANT.channels, and a tuple of their raw tiles that hold values.
    column: the block's first key. offsets [BN, 1]: where the keys are."""
    if ROTATE_K:
        FIRST: tl.constexpr = VARIANT.channels[0].pair
        COUNT: tl.constexpr = VARIANT.channels[0].width // 2
        cos, sin = key_cos_sin(keys, band.k_rotation, k_map, column, FIRST, COUNT, VARIANT)
        return load_rotated_parts(keys.k.ptr, offsets, cos, sin, keys.weight, VARIANT, dtype)
    else:
        return load_raw_parts(keys.k.ptr, offsets, VARIANT)


@triton.jit
def load_key_range(
    keys,
    offsets,
    band,
    k_map,
    column,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ROTATE_K: tl.constexpr,
    VARIANT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Returns (pairs FIRST to FIRST + COUNT - 1 of a block of keys, their raw tiles). The pairs are two tiles [BN,
    COUNT]. column: the block's first key. offsets [BN, 1]: where the keys are."""
    raw = load_pair_tiles(keys.k.ptr, offsets, FIRST, COUNT, VARIANT)
    pairs = as_pairs(raw, VARIANT)
    if ROTATE_K:
        cos, sin = key_cos_sin(keys, band.k_rotation, k_map, column, FIRST, COUNT, VARIANT)
        x, y = weigh_pairs(pairs[0], pairs[1], keys, FIRST, COUNT, VARIANT)
        pairs = rotate_pairs(x, y, cos, sin, 1.0, 1.0, dtype)
    return pairs, raw


@triton.jit
def load_key_halves(
    keys, offsets, band, k_map, column, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr
):
    """Returns (all pairs of a block of keys, their raw tiles). The pairs are two tiles for each of VARIANT.parts parts.
    column: the block's first key."""
    PARTS: tl.constexpr = VARIANT.parts
    COUNT: tl.constexpr = VARIANT.block_d // 2 // PARTS
    tiles, values = (), ()
    for part in tl.static_range(PARTS):
        pairs, raw = load_key_range(keys, offsets, band, k_map, column, part * COUNT, COUNT, ROTATE_K, VARIANT, dtype)
        tiles += pairs
        values += raw
    return tiles, values


@triton.jit
def rotate_all_pairs(k, keys, band, k_map, column, places, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns the pairs k of a block of keys, multiplied by the key weights and rotated: two tiles [BN, D/2]. column:
    the block's first key.

    places: the Places of the keys if positions are explicit, else None."""
    if places is None:
        cos, sin = key_cos_sin(keys, band.k_rotation, k_map, column, 0, VARIANT.block_d // 2, VARIANT)
    else:
        cos, sin = explicit_key_cos_sin(keys.table, band.k_rotation, keys.cache, places, VARIANT)
    x, y = weigh_pairs(k[0], k[1], keys, 0, VARIANT.block_d // 2, VARIANT)
    return rotate_pairs(x, y, cos, sin, 1.0, 1.0, dtype)


@triton.jit
def attend_block(
    state,
    queries,
    keys,
    band,
    k_map,
    column,
    pages,
    entries,
    ROTATE_K: tl.constexpr,
    K_PARTS: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Does one step of the online softmax, over the block of keys that starts at `column`. pages, entries: the pages
    and the TileEntries of these keys, already loaded.

    k_map: the TileMap of the band's keys if VARIANT.aligned_maps, else None. K_PARTS: as in rotate_queries."""
    slots = block_slots(keys, column, VARIANT)
    row = row_in_page(keys.cache, slots, VARIANT.page_size)
    page = valid_page(keys.cache, pages)
    places = None
    if entries is not None:
        places = tile_places(keys.cache, entries, page, keys.last, keys.first_slot + column, slots, VARIANT)
        page, row = places.page, places.row
    dtype: tl.constexpr = queries.parts[0].dtype
    if K_PARTS > 1:
        k = load_key_words(keys.k, page, row, K_PARTS, VARIANT, dtype)
    elif len(VARIANT.channels) > 0:
        at = page_offsets(page, row, keys.k)
        k, v = load_key_channels(keys, at, band, k_map, column, ROTATE_K, VARIANT, dtype)
    elif VARIANT.parts > 1:
        at = page_offsets(page, row, keys.k)
        k, v = load_key_halves(keys, at, band, k_map, column, ROTATE_K, VARIANT, dtype)
    elif VARIANT.first_value >= 0:
        v = load_pair_tiles(keys.k.ptr, page_offsets(page, row, keys.k), 0, VARIANT.block_d // 2, VARIANT)
        k = as_pairs(v, VARIANT)
        if ROTATE_K:
            k = rotate_all_pairs(k, keys, band, k_map, column, places, VARIANT, dtype)
    else:
        # int8 keys that rotate are converted to float32 at once, because rotate_pairs works in float32.
        k_dtype: tl.constexpr = tl.float32 if ROTATE_K and keys.k.ptr.dtype.element_ty == tl.int8 else dtype
        k = load_key_pairs(keys.k.ptr, page_offsets(page, row, keys.k), VARIANT, k_dtype)  # [BN, D/2]
        if ROTATE_K:
            k = rotate_all_pairs(k, keys, band, k_map, column, places, VARIANT, dtype)
    scores = part_scores(queries.parts, k, VARIANT)
    if keys.k_scale is not None:
        scores *= load_scales(keys.k_scale, page, row)[None, :]
    # Every block is masked, not only edge blocks. A block in which a row sees no key changes no bit of the row's
    # result.
    if places is None:
        visible = sees_columns(queries.visible, column, tl.expand_dims(block_keys(VARIANT), -2))
    else:
        visible = sees(queries.visible, places, column, keys.table.maps, VARIANT)
    weights, state = online_softmax(state, scores, queries.scale_log2, visible)
    PARTS: tl.constexpr = len(state.acc)
    if VARIANT.first_value >= 0:
        v = v  # these are the raw tiles of the keys
    elif VARIANT.code_vec > 0 and PARTS > 1:
        at = tl.arange(0, VARIANT.block_d // PARTS)
        v = load_words(keys.v, page, row, at, VARIANT.head_dim, PARTS, VARIANT, dtype)
    else:
        channels = value_channels(VARIANT)
        v = load_cached_values(
            keys.v.ptr, page_offsets(page, row, keys.v), channels, VARIANT, dtype
        )  # [BN, DV] in parts
    if keys.v_scale is not None:
        weights, v = scale_values(weights, v, load_scales(keys.v_scale, page, row))
    return add_values(state, weights, v)


@triton.jit
def attend_blocks(
    q,
    k_cache,
    v_cache,
    key_weight,
    scheme,
    cu_seqlens_q,
    cache,
    seqlen_q,
    table_rows,
    program,
    seq,
    group,
    own,
    VARIANT: tl.constexpr,
):
    """Returns (the SoftmaxState of a tile of query rows after the key blocks `own`, its QueryRows). group: number of
    query heads per key head. The other arguments are those of attention_decode."""
    tile, head_kv, batch = program.tile, program.head_kv, program.batch
    rows = find_rows(program, seq, group, VARIANT)
    shift = tl.maximum(-seq.ahead, 0) if scheme.maps is None and not VARIANT.rotated_keys else 0
    first_q = tile * VARIANT.block_m // group + seq.ahead
    last_q = tl.minimum((tile * VARIANT.block_m + VARIANT.block_m - 1) // group, seq.length_q - 1) + seq.ahead
    offsets = token_offsets(q, batch, seq.start_q + rows.token, rows.head, VARIANT)
    length, token, last_column, last = seq.length_k, None, None, None
    if cache.tokens is not None:
        token = rows.token + (batch.to(tl.int64) * seqlen_q if cu_seqlens_q is None else seq.start_q)
        position, last_column = load_token(cache, token, 0, VARIANT), load_token(cache, token, 1, VARIANT)
        rows, length = QueryRows(rows.exists, rows.token, rows.head, position), tl.load(cache.visible + 2 * batch)
        last = last_visible(cache, batch, VARIANT)
    position = rows.position
    if VARIANT.stored and VARIANT.axes == 0:
        position = as_float(load_query_position(cache, token, 0, VARIANT))
    scale = query_scale(scheme, rows.token, position, length)[:, None]
    table = CosSinTable(scheme.table, table_rows, None, scheme.maps)
    head_k, head_v = head_view(k_cache, 0, 0, head_kv, VARIANT), head_view(v_cache, 0, 0, head_kv, VARIANT)
    k_scale, v_scale = None, None
    if cache.k_scale is not None:
        k_scale = scale_view(cache.k_scale, cache.k_batch, cache.k_row, cache.k_head, head_kv)
        v_scale = scale_view(cache.v_scale, cache.v_batch, cache.v_row, cache.v_head, head_kv)
    start_k, length_k = seq.start_k, seq.length_k
    keys = CachedKeys(head_k, head_v, k_scale, v_scale, cache, batch, start_k, length_k, table, shift, last, key_weight)

    CODES: tl.constexpr = k_cache.ptr.dtype.element_ty
    V_PARTS: tl.constexpr = float_value_parts(VARIANT.parts, VARIANT.block_dv) * value_parts(
        CODES, VARIANT.code_vec, VARIANT.block_d, VARIANT.head_dim
    )
    K_PARTS: tl.constexpr = key_parts(
        CODES, VARIANT.code_vec, VARIANT.block_d, VARIANT.head_dim, VARIANT.rotary_dim, VARIANT.first_channel
    )
    if VARIANT.first_value >= 0:
        state = start_shared_softmax(VARIANT)
    elif VARIANT.key_groups > 1:
        state = start_group_softmax(VARIANT.key_groups, VARIANT.block_m, VARIANT.block_dv)
    else:
        state = start_softmax(VARIANT.block_m, VARIANT.block_dv, V_PARTS)
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(scheme.bands, b)
        # Passed inline on purpose: assigning a constexpr expression to a name makes Triton treat it as a runtime value.
        queries = rotate_queries(
            q,
            offsets,
            rows,
            token,
            last_column,
            band,
            keys,
            scheme,
            scale,
            (VARIANT.rotated_bands >> b) & 1,
            1 if (VARIANT.rotated_bands >> b) & 1 else K_PARTS,
            VARIANT,
        )
        k_map = load_tile_map(scheme.maps, band.k_rotation, block_keys(VARIANT)) if VARIANT.aligned_maps else None
        if token is None:
            blocks = key_tiles(band, first_q, last_q, seq.length_k, VARIANT.block_n, scheme.maps)
        else:
            blocks = band_columns(cache, token, b, VARIANT)
        taken = own_blocks(blocks, own)
        begin = taken.first
        pages = load_block_pages(keys, begin * VARIANT.block_n, VARIANT)
        entries = None
        if token is not None:
            entries = load_block_entries(keys, begin * VARIANT.block_n, VARIANT)
        for block in tl.range(begin, taken.stop, taken.step):
            # Pages are loaded one block ahead. Otherwise the pipeline could not load K and V ahead.
            next_pages = load_block_pages(keys, (block + taken.step) * VARIANT.block_n, VARIANT)
            if token is not None:
                next_entries = load_block_entries(keys, (block + taken.step) * VARIANT.block_n, VARIANT)
            state = attend_block(
                state,
                queries,
                keys,
                band,
                k_map,
                block * VARIANT.block_n,
                pages,
                entries,
                (VARIANT.rotated_bands >> b) & 1,
                1 if (VARIANT.rotated_bands >> b) & 1 else K_PARTS,
                VARIANT,
            )
            pages = next_pages
            if token is not None:
                entries = next_entries
    if VARIANT.key_groups > 1:
        state = merge_groups(state)
    return state, rows


@triton.jit
def decode_share(
    q,
    k_cache,
    v_cache,
    key_weight,
    out,
    lse,
    scheme,
    cu_seqlens_q,
    cache,
    seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    batches,
    workspace,
    VARIANT: tl.constexpr,
):
    """Computes the pieces of a program's share. If queries are not packed, programs also divide the sequences without
    keys among themselves and store their results."""
    if cu_seqlens_q is None:
        for batch in tl.range(tl.program_id(0), batches, tl.num_programs(0)):
            if tl.load(workspace.empty + batch) > 0:
                store_nothing(out, lse, batch, seqlen_q * heads_q, VARIANT)
    share = workspace.shares + tl.program_id(0) * SHARE_FIELDS
    first_piece, pieces = tl.load(share), tl.load(share + 1)
    for n in tl.range(0, pieces):
        piece = workspace.pieces + (first_piece + n).to(tl.int64) * PIECE_FIELDS
        batch, head_kv, tile, part = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 5)
        own = Blocks(tl.load(piece + 3), tl.load(piece + 4), 1)
        program = Program(0, tile, head_kv, batch, batches)
        seq = find_cached_sequence(cache, cu_seqlens_q, batch, seqlen_q)
        state, rows = attend_blocks(
            q,
            k_cache,
            v_cache,
            key_weight,
            scheme,
            cu_seqlens_q,
            cache,
            seqlen_q,
            table_rows,
            program,
            seq,
            heads_q // heads_kv,
            own,
            VARIANT,
        )
        if part == WHOLE:
            store_segment(out, lse, state, rows, program, seq, cu_seqlens_q, seqlen_q, heads_q, VARIANT)
        else:
            store_piece(workspace, state, rows, part, VARIANT)


@triton.jit(do_not_specialize=["seqlen_q", "table_rows", "heads_q", "heads_kv", "num_splits", "batches"])
def attention_decode(
    q,
    k_cache,
    v_cache,
    key_weight,
    out,
    lse,
    scheme,
    cu_seqlens_q,
    cache,
    seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    num_splits,
    batches,
    workspace,
    VARIANT: tl.constexpr,
):
    """Computes attention of few queries over a KV cache. q, k_cache, v_cache: TensorViews. key_weight: float32
    (head_dim,), or None.

    With VARIANT.shares, every program has a share of the work. out (batch, seqlen_q, heads_q, head_dim_v) and lse
    float32 (batch, heads_q, seqlen_q), packed or not, are contiguous. workspace: a Workspace, or None without
    VARIANT.shares.

    Otherwise, num_splits programs divide the keys of a tile of query rows. out is (num_splits, batch, seqlen_q,
    heads_q, head_dim_v) and lse (num_splits, batch, heads_q, seqlen_q). With packed queries they have the rows of
    ``partial_rows``. With several splits, rows of out whose lse is -inf are not written."""
    if VARIANT.shares:
        decode_share(
            q,
            k_cache,
            v_cache,
            key_weight,
            out,
            lse,
            scheme,
            cu_seqlens_q,
            cache,
            seqlen_q,
            table_rows,
            heads_q,
            heads_kv,
            batches,
            workspace,
            VARIANT,
        )
        return
    group = heads_q // heads_kv
    max_seqlen_q = seqlen_q if cu_seqlens_q is None else decode_int(cache.decode_seqlen)
    program = find_program(tl.cdiv(max_seqlen_q * group, VARIANT.block_m), heads_kv, num_splits)
    seq = find_cached_sequence(cache, cu_seqlens_q, program.batch, seqlen_q)
    if cu_seqlens_q is not None:
        if (program.tile * VARIANT.block_m >= seq.length_q * group) | (seq.length_q > max_seqlen_q):
            return
    own = Blocks(program.split, None, num_splits)
    state, rows = attend_blocks(
        q,
        k_cache,
        v_cache,
        key_weight,
        scheme,
        cu_seqlens_q,
        cache,
        seqlen_q,
        table_rows,
        program,
        seq,
        group,
        own,
        VARIANT,
    )
    store_split(out, lse, state, rows, program, seq, cu_seqlens_q, seqlen_q, max_seqlen_q, heads_q, num_splits, VARIANT)
