"""Forward: for every tile of queries and every band, rotate the queries once, then visit the band's key tiles.

All bands share one online softmax. Tiles inside a band need no mask, and tiles outside it are not visited. With a KV
cache, raw keys and values are read in place. Only keys that a band rotates are copied first, by ``rotate_cached_rows``.

The score matrix of a causal scheme of two bands, tile by tile. Rows are queries, columns are keys.

              keys ->
    queries   a
      |       A a            A, a   the near band, distances below the window
      v       m A a          B      the far band, the other distances
              B m A a        m      an edge tile of both bands, visited once for each
              B B m A a
              B B B m A a    small  an edge tile: some of its pairs lie outside the band, which needs a mask
              B B B B m A a  large  an inner tile: no mask. Tiles above the diagonal are not visited

A row of tiles is one program. It visits the edge tiles of a band, then the inner ones: m, a and A for the near band,
then m and B for the far one.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import decode_int
from .codes import load_scales, scale_values, scale_view
from .kv_cache import load_page, row_in_page, valid_page
from .rotation import CosSinTable, load_keys, load_rotated, query_scale, tile_channels
from .softmax import add_values, finish_softmax, log2_scale, online_softmax, start_softmax
from .tiles import (
    HeadView,
    band_keys,
    clamp_rows,
    copied_keys,
    edge_count,
    edge_tile,
    existing_rows,
    find_cached_sequence,
    find_sequence,
    head_view,
    is_visible,
    key_tiles,
    load_band,
    load_cached_values,
    lse_offset,
    packed_row,
    page_offsets,
    prefetch_rows,
    query_program,
    row_exists,
    skip_rows,
    store_values,
    tile_offsets,
    tile_rows,
    visible_keys,
)


class BandQueries(NamedTuple):
    """tile [BM, D], in parts: rotated for a band and scaled. visible: the keys that each row sees. scale_log2: softmax
    scale in log2 units."""

    tile: object
    visible: object
    scale_log2: object


class Keys(NamedTuple):
    """A sequence's keys, as a band reads them. k, v: HeadViews. channels_k, channels_v: the channels to load, in
    parts. first:
    the first key that k holds, 0 without a cache. batch, first_slot: where pages are looked up."""

    k: object
    v: object
    channels_k: object
    channels_v: object
    first: object
    length: object
    batch: object
    first_slot: object


class CopiedKeys(NamedTuple):
    """The rotated copies of a sequence's keys. view: TensorView (copy, row, head). first: the first key that was
    copied, 0 without a cache. row: where key 0 lies, or would lie if it had been copied."""

    view: object
    row: object
    first: object


class KeyScales(NamedTuple):
    """ScaleViews of a quantized cache."""

    k: object
    v: object


@triton.jit
def enter_band(raw, copied, band, head, first, last, maps, ROTATED_K: tl.constexpr, SHAPE: tl.constexpr):
    """(Keys as the band reads them, their tiles) for queries at positions first to last. raw: Keys in place."""
    tiles = key_tiles(band, first, last, raw.length, SHAPE.block_n, maps)
    k = band_keys(raw.k, copied.view, band.k_copy, copied.row, head, ROTATED_K, SHAPE)
    first_key = tl.where(band.k_copy < 0, 0, copied.first)
    keys = Keys(k, raw.v, raw.channels_k, raw.channels_v, first_key, raw.length, raw.batch, raw.first_slot)
    return keys, tiles


@triton.jit
def key_rows(keys, cache, column, EDGE: tl.constexpr, SHAPE: tl.constexpr):
    """The rows to load for the keys from `column` on, counted from there. EDGE: existing keys stand in for missing
    ones."""
    rows = tl.arange(0, SHAPE.block_n)
    if EDGE:
        rows = clamp_rows(rows, keys.length - column)
        if cache.seqlens is not None:
            rows = tl.maximum(rows, keys.first - column)
    return rows


@triton.jit
def load_tile_pages(keys, cache, column, SHAPE: tl.constexpr):
    """The pages of the keys from `column` on, int32 [BN]; 0 without pages. It is safe where there is no such tile."""
    if SHAPE.page_size == 0:
        return 0
    else:
        slot = keys.first_slot + column + key_rows(keys, cache, column, True, SHAPE)
        return load_page(cache, keys.batch, tl.maximum(slot, 0), SHAPE.page_size)


@triton.jit
def prefetch_tile(keys, cache, tiles, SHAPE: tl.constexpr):
    """Prefetches the band's first tile of keys and values, if there is one."""
    if tiles.end > tiles.begin:
        column = edge_tile(tiles, 0) * SHAPE.block_n
        rows = key_rows(keys, cache, column, True, SHAPE)
        prefetch_rows(skip_rows(keys.k, column).ptr, tile_offsets(rows, keys.k), SHAPE.head_dim, SHAPE.block_d)
        prefetch_rows(skip_rows(keys.v, column).ptr, tile_offsets(rows, keys.v), SHAPE.head_dim_v, SHAPE.block_dv)


@triton.jit
def attend_tile(
    state, queries, keys, scales, cache, column, pages, ROTATED_K: tl.constexpr, EDGE: tl.constexpr, SHAPE: tl.constexpr
):
    """One step of the online softmax, over the keys from `column` on. scales: KeyScales, or None. pages: their pages,
    loaded before. ROTATED_K: the keys are a copy, which has no pages. EDGE: some pairs lie outside the band."""
    dtype: tl.constexpr = queries.tile[0].dtype
    rows = key_rows(keys, cache, column, EDGE, SHAPE)
    if SHAPE.page_size > 0:
        page = valid_page(cache, pages)
        row = row_in_page(cache, tl.maximum(keys.first_slot + column + rows, 0), SHAPE.page_size)
    elif scales is not None:
        page, row = keys.batch, tl.maximum(keys.first_slot + column + rows, 0)
    if SHAPE.page_size > 0 and not ROTATED_K:
        k = load_keys(keys.k.ptr, page_offsets(page, row, keys.k), keys.channels_k, SHAPE, dtype)  # [BN, D]
    else:
        k = load_keys(skip_rows(keys.k, column).ptr, tile_offsets(rows, keys.k), keys.channels_k, SHAPE, dtype)
    scores = tl.dot(queries.tile[0], tl.trans(k[0]), input_precision="ieee")  # [BM, BN]
    if SHAPE.parts == 2:
        scores = tl.dot(queries.tile[1], tl.trans(k[1]), scores, input_precision="ieee")
    if scales is not None:
        scores *= load_scales(scales.k, page, row)[None, :]
    visible = is_visible(queries.visible, column, SHAPE.block_n) if EDGE else None
    weights, state = online_softmax(state, scores, queries.scale_log2, visible)
    if SHAPE.page_size > 0:
        v = load_cached_values(keys.v.ptr, page_offsets(page, row, keys.v), keys.channels_v, SHAPE, dtype)  # [BN, DV]
    else:
        ptr = skip_rows(keys.v, column).ptr
        v = load_cached_values(ptr, tile_offsets(rows, keys.v), keys.channels_v, SHAPE, dtype)
    if scales is not None:
        weights, v = scale_values(weights, v, load_scales(scales.v, page, row))
    return add_values(state, weights, v)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows", "heads_q", "heads_kv"])
def attention_forward(
    q,
    k,
    rotated_k,
    v,
    out,
    lse,
    scheme,
    cu_seqlens,
    cache,
    seqlen_q,
    seqlen_k,
    max_seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    SHAPE: tl.constexpr,
):
    """q, k, v: TensorViews; rotated_k: TensorView (copy, row, head); out (rows, heads_q, head_dim_v) and lse float32
    are contiguous. scheme, cu_seqlens: see arguments.py.

    Without a cache the fields of `cache` are None. With one, k and v are (batch or page, row, heads_kv), and seqlen_k
    is `rows` of copied_keys."""
    batch, head, first = query_program(max_seqlen_q, heads_q, SHAPE)
    if cache.seqlens is None:
        seq = find_sequence(cu_seqlens, batch, seqlen_q, seqlen_k)
    else:
        seq = find_cached_sequence(cache, cu_seqlens.q, batch, seqlen_q)
    skip = first >= seq.length_q
    if cache.seqlens is not None and cu_seqlens.q is not None:
        skip |= seq.length_q <= decode_int(cache.decode_seqlen)
    if skip:
        return

    packed_q = packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q)
    rows = tile_rows(first, seq.length_q, seq.length_k, packed_q, scheme, SHAPE.block_m, SHAPE.rotated_keys)
    position = first + rows.index + seq.ahead  # [BM]
    last = tl.minimum(first + SHAPE.block_m, seq.length_q) - 1 + seq.ahead
    head_kv = head // (heads_q // heads_kv)
    queries = head_view(q, batch, seq.start_q + first, head, SHAPE)
    if SHAPE.page_size > 0:
        k_rows, v_rows = head_view(k, 0, 0, head_kv, SHAPE), head_view(v, 0, 0, head_kv, SHAPE)
    else:
        k_rows = head_view(k, batch, seq.start_k, head_kv, SHAPE)
        v_rows = head_view(v, batch, seq.start_k, head_kv, SHAPE)
    if cache.seqlens is None:
        copied = CopiedKeys(rotated_k, packed_row(cu_seqlens.k, batch, seq.start_k, seqlen_k), 0)
    else:
        row, first_copied = copied_keys(cache, cu_seqlens.q, seq, seqlen_k)
        copied = CopiedKeys(rotated_k, row - first_copied, first_copied)
    if SHAPE.parts == 1:
        channels_k, channels_v = (tile_channels(SHAPE),), (tl.arange(0, SHAPE.block_dv),)
    else:
        HALF: tl.constexpr = SHAPE.block_dv // 2
        channels_k = tile_channels(SHAPE, 2, 0), tile_channels(SHAPE, 2, 1)
        channels_v = tl.arange(0, HALF), tl.arange(0, HALF) + HALF
    raw = Keys(k_rows, v_rows, channels_k, channels_v, 0, seq.length_k, batch, seq.start_k)
    scales = None
    if cache.k_scale is not None:
        k_scale = scale_view(cache.k_scale, cache.k_batch, cache.k_row, cache.k_head, head_kv)
        v_scale = scale_view(cache.v_scale, cache.v_batch, cache.v_row, cache.v_head, head_kv)
        scales = KeyScales(k_scale, v_scale)
    # Prefetches the first K and V tile while q is rotated. Not with pages (two lookups) or several bands (spills).
    if SHAPE.page_size == 0 and SHAPE.num_bands == 1:
        band = load_band(scheme.bands, 0)
        ROTATED_K: tl.constexpr = SHAPE.rotated_bands & 1
        keys, tiles = enter_band(raw, copied, band, head_kv, first + seq.ahead, last, scheme.maps, ROTATED_K, SHAPE)
        prefetch_tile(keys, cache, tiles, SHAPE)
    table = CosSinTable(scheme.table, table_rows, scheme.positions, scheme.maps)
    log_n = query_scale(scheme, rows.start + existing_rows(rows), position, seq.length_k)
    scale_log2 = log2_scale(scheme.score_scale)

    state = start_softmax(SHAPE.block_m, SHAPE.block_dv, SHAPE.parts)
    NUM_BANDS: tl.constexpr = SHAPE.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(scheme.bands, b)
        # Keep this branch: without it Triton looks through the joins and picks a layout that ldmatrix cannot load.
        if band.q_rotation > 0:
            tile = load_rotated(queries, table, band.q_rotation, rows, log_n, True, SHAPE)  # [BM, D]
        else:
            tile = load_rotated(queries, table, band.q_rotation, rows, log_n, False, SHAPE)
        keys, tiles = enter_band(
            raw, copied, band, head_kv, first + seq.ahead, last, scheme.maps, (SHAPE.rotated_bands >> b) & 1, SHAPE
        )
        band_queries = BandQueries(tile, visible_keys(position, band, seq.length_k, scheme.maps), scale_log2)
        # Pages are loaded a tile ahead: K and V can only be requested ahead if their pages are known by then.
        pages = load_tile_pages(keys, cache, edge_tile(tiles, 0) * SHAPE.block_n, SHAPE)
        for step in tl.range(0, edge_count(tiles)):
            next_pages = load_tile_pages(keys, cache, edge_tile(tiles, step + 1) * SHAPE.block_n, SHAPE)
            column = edge_tile(tiles, step) * SHAPE.block_n
            state = attend_tile(
                state, band_queries, keys, scales, cache, column, pages, (SHAPE.rotated_bands >> b) & 1, True, SHAPE
            )
            pages = next_pages
        pages = load_tile_pages(keys, cache, tiles.inner_begin * SHAPE.block_n, SHAPE)
        for step in tl.range(tiles.inner_begin, tiles.inner_end):
            next_pages = load_tile_pages(keys, cache, (step + 1) * SHAPE.block_n, SHAPE)
            column = step * SHAPE.block_n
            state = attend_tile(
                state, band_queries, keys, scales, cache, column, pages, (SHAPE.rotated_bands >> b) & 1, False, SHAPE
            )
            pages = next_pages

    result, log_sum = finish_softmax(state)
    out_row = packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q) + first
    out_rows = HeadView(out + (out_row * heads_q + head) * SHAPE.head_dim_v, heads_q * SHAPE.head_dim_v, None)
    store_values(out_rows, result[0], rows, channels_v[0], SHAPE)
    if SHAPE.parts == 2:
        store_values(out_rows, result[1], rows, channels_v[1], SHAPE)
    lse += lse_offset(cu_seqlens.q, batch, head, heads_q, seq.start_q, seqlen_q) + first
    tl.store(lse + rows.index, log_sum, mask=row_exists(rows))
