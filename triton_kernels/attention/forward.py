"""Computes the forward. For every tile of queries and every band it rotates the queries once, then visits the band's
key tiles.

All bands share one online softmax. Tiles inside a band need no mask, and tiles outside it are not visited. If a band
rotates keys, it reads a rotated copy that ``rotate_rows`` has written before. ``attention_forward`` serves training and
prefill without a cache. ``chunks.py`` has the kernel for long queries over a cache, which runs the same loops.

The score matrix of a causal scheme of two bands, tile by tile. Rows are queries, columns are keys.

              keys ->
    queries   a
      |       A a            A, a   the near band, distances below the window
      v       m A a          B      the far band, the other distances
              B m A a        m      an edge tile of both bands, visited once for each
              B B m A a
              B B B m A a    a, m   edge tiles: some (query, key) pairs lie outside the band, so scores need a mask
              B B B B m A a  A, B   inner tiles: no mask. Tiles above the diagonal are not visited

One program computes one row of tiles. It visits the edge tiles of a band, then its inner tiles: m, a and A for the near
band, then m and B for the far band.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..rotating.pairs import key_channels
from ..rotating.rotation import CosSinTable, load_rotated_hidden, query_scale
from ..rows import (
    HeadView,
    add_weighted_rows,
    existing_rows,
    head_view,
    pack_pairs,
    row_exists,
    row_products,
    store_values,
    tile_rows,
    unpack_pairs,
    value_channels,
    zero_parts,
)
from ..softmax import (
    SoftmaxState,
    add_values,
    finish_softmax,
    log2_scale,
    online_softmax,
    scale_rows,
    start_softmax,
    tile_weights,
)
from ..tiles import (
    edge_count,
    edge_tile,
    find_sequence,
    is_visible,
    load_band,
    lse_offset,
    packed_row,
    query_program,
    visible_keys,
)
from .keys import (
    CopiedKeys,
    Keys,
    enter_band,
    find_rows,
    load_tile_keys,
    load_tile_pages,
    load_tile_values,
    prefetch_tile,
    scale_scores,
    scale_weights,
)


class QueryTile(NamedTuple):
    """The rows of a tile of queries. rows: TileRows. position: the position of every row [BM]. last: the position of
    the last row that exists."""

    rows: object
    position: object
    last: object


class BandQueries(NamedTuple):
    """The queries of a tile in one band. tile: the rotated queries times their query_scale, a tuple of one or more
    channel parts. visible: the VisibleRange of the queries. scale_log2: from log2_scale."""

    tile: object
    visible: object
    scale_log2: object


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows", "heads_q", "heads_kv"])
def attention_forward(
    q,
    k,
    rotated_k,
    v,
    result,
    scheme,
    cu_seqlens,
    seqlen_q,
    seqlen_k,
    max_seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    VARIANT: tl.constexpr,
):
    """Computes attention of whole sequences.

    q, k, v: TensorViews. rotated_k: TensorView (copy, row, head). result, scheme, cu_seqlens: see arguments.py."""
    batch, head, first = query_program(max_seqlen_q, heads_q, VARIANT)
    seq = find_sequence(cu_seqlens, batch, seqlen_q, seqlen_k)
    if first >= seq.length_q:
        return
    tile = query_tile(first, seq, packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q), scheme, VARIANT)
    head_kv = head // (heads_q // heads_kv)
    queries = head_view(q, batch, seq.start_q + first, head, VARIANT)
    k_rows = head_view(k, batch, seq.start_k, head_kv, VARIANT)
    v_rows = head_view(v, batch, seq.start_k, head_kv, VARIANT)
    copied = CopiedKeys(rotated_k, packed_row(cu_seqlens.k, batch, seq.start_k, seqlen_k), None)
    raw = Keys(k_rows, v_rows, key_channels(VARIANT), value_channels(VARIANT), None, seq.length_k, None)
    state = attend_bands(queries, tile, seq, raw, copied, head_kv, scheme, table_rows, VARIANT)
    store_result(state, result, cu_seqlens.q, seq, tile.rows, head, heads_q, seqlen_q, raw.channels_v, VARIANT)


@triton.jit
def query_tile(first, seq, packed_q, scheme, VARIANT: tl.constexpr):
    """Returns the QueryTile that starts at row `first` of a sequence. packed_q: the sequence's first row in packed
    tensors."""
    rows = tile_rows(first, seq.length_q, seq.length_k, packed_q, scheme, VARIANT.block_m, VARIANT.rotated_keys)
    position = first + rows.index + seq.ahead
    return QueryTile(rows, position, tl.minimum(first + VARIANT.block_m, seq.length_q) - 1 + seq.ahead)


@triton.jit
def attend_bands(queries, tile, seq, raw, copied, head_kv, scheme, table_rows, VARIANT: tl.constexpr):
    """Returns the SoftmaxState of a tile of queries after all bands. queries: HeadView of the tile's raw rows. tile:
    QueryTile. raw: the sequence's raw Keys. copied: CopiedKeys."""
    rows = tile.rows
    # Prefetches the first tile of K and V while q is rotated. With pages, a prefetch would first have to look up the
    # page numbers. With several bands, a prefetch would spill registers.
    if VARIANT.page_size == 0 and VARIANT.num_bands == 1:
        band = load_band(scheme.bands, 0)
        ROTATED_K: tl.constexpr = VARIANT.rotated_bands & 1
        k, tiles = enter_band(
            raw, copied, band, head_kv, rows.first + seq.ahead, tile.last, scheme.maps, ROTATED_K, VARIANT
        )
        first_key = copied.first
        if copied.first is not None:
            first_key = tl.where(band.k_copy < 0, 0, copied.first)
        # Keys are built here, because Triton 3.6 cannot return a tuple with a field that is None.
        keys = Keys(k, raw.v, raw.channels_k, raw.channels_v, first_key, raw.length, raw.cached)
        prefetch_tile(keys, tiles, VARIANT)
    table = CosSinTable(scheme.table, table_rows, scheme.positions, scheme.maps)
    log_n = query_scale(scheme, rows.start + existing_rows(rows), tile.position, seq.length_k)
    scale_log2 = log2_scale(scheme.score_scale)

    state = start_softmax(VARIANT.block_m, VARIANT.block_dv, VARIANT.parts)
    if len(VARIANT.pair_ranges) > 0:
        acc = zero_parts(VARIANT.block_m, VARIANT.block_dv, VARIANT)
        state = SoftmaxState(acc, state.row_max, state.row_sum)
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(scheme.bands, b)
        rotated = load_rotated_hidden(queries, table, band.q_rotation, rows, log_n, VARIANT)  # [BM, D]
        k, tiles = enter_band(
            raw,
            copied,
            band,
            head_kv,
            rows.first + seq.ahead,
            tile.last,
            scheme.maps,
            (VARIANT.rotated_bands >> b) & 1,
            VARIANT,
        )
        first_key = copied.first
        if copied.first is not None:
            first_key = tl.where(band.k_copy < 0, 0, copied.first)
        keys = Keys(k, raw.v, raw.channels_k, raw.channels_v, first_key, raw.length, raw.cached)
        band_queries = BandQueries(rotated, visible_keys(tile.position, band, seq.length_k, scheme.maps), scale_log2)
        state = attend_band(state, band_queries, keys, tiles, (VARIANT.rotated_bands >> b) & 1, VARIANT)
    return state


@triton.jit
def attend_band(state, queries, keys, tiles, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the SoftmaxState after a band's edge tiles and inner tiles. ROTATED_K: the keys are a rotated copy."""
    # Page numbers are loaded one tile ahead. Otherwise the pipeline could not load K and V ahead.
    pages = load_tile_pages(keys, edge_tile(tiles, 0) * VARIANT.block_n, VARIANT)
    for step in tl.range(0, edge_count(tiles)):
        next_pages = load_tile_pages(keys, edge_tile(tiles, step + 1) * VARIANT.block_n, VARIANT)
        column = edge_tile(tiles, step) * VARIANT.block_n
        state = attend_tile(state, queries, keys, column, pages, ROTATED_K, True, VARIANT)
        pages = next_pages
    if VARIANT.lagged:
        return attend_inner_lagged(state, queries, keys, tiles, ROTATED_K, VARIANT)
    else:
        return attend_inner(state, queries, keys, tiles, ROTATED_K, VARIANT)


@triton.jit
def attend_inner(state, queries, keys, tiles, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the SoftmaxState after a band's inner tiles."""
    pages = load_tile_pages(keys, tiles.inner_begin * VARIANT.block_n, VARIANT)
    for step in tl.range(tiles.inner_begin, tiles.inner_end):
        next_pages = load_tile_pages(keys, (step + 1) * VARIANT.block_n, VARIANT)
        column = step * VARIANT.block_n
        state = attend_tile(state, queries, keys, column, pages, ROTATED_K, False, VARIANT)
        pages = next_pages
    return state


@triton.jit
def attend_inner_lagged(state, queries, keys, tiles, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr):
    """Does what attend_inner does, for contiguous keys in 16 bits, with weights @ V one tile late.

    The product of the tile before is issued after the scores of a tile, and runs on the tensor cores while the softmax
    of the tile runs elsewhere. acc is rescaled one tile late, too. In the first pass the late weights are 0, so an
    infinite value of the first tile gives NaN."""
    dtype: tl.constexpr = queries.tile[0].dtype
    acc, row_max, row_sum = state.acc, state.row_max, state.row_sum
    BM: tl.constexpr = VARIANT.block_m
    PAIRS: tl.constexpr = VARIANT.block_n // 2
    late, rescale = tl.zeros((BM, PAIRS), tl.int32), tl.full((BM,), 1.0, tl.float32)
    for step in tl.range(tiles.inner_begin, tiles.inner_end):
        scores, at = tile_scores(queries, keys, step * VARIANT.block_n, 0, ROTATED_K, False, VARIANT)
        before = tl.maximum(step - 1, tiles.inner_begin) * VARIANT.block_n
        v = load_tile_values(keys, before, at, VARIANT, dtype)  # [BN, DV]
        acc = add_weighted_rows(scale_rows(acc, rescale), unpack_pairs(late, dtype), v)
        weights, rescale, row_max, row_sum = tile_weights(row_max, row_sum, scores, queries.scale_log2, None)
        late = pack_pairs(weights, dtype)
    if tiles.inner_end > tiles.inner_begin:
        last = (tiles.inner_end - 1) * VARIANT.block_n
        v = load_tile_values(keys, last, find_rows(keys, last, 0, False, VARIANT), VARIANT, dtype)
        acc = add_weighted_rows(scale_rows(acc, rescale), unpack_pairs(late, dtype), v)
    return SoftmaxState(acc, row_max, row_sum)


@triton.jit
def tile_scores(queries, keys, column, pages, ROTATED_K: tl.constexpr, EDGE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns (scores [BM, BN] of the tile of keys that starts at `column`, its KeyRows). The arguments are those of
    attend_tile."""
    at = find_rows(keys, column, pages, EDGE, VARIANT)
    k = load_tile_keys(keys, column, at, ROTATED_K, VARIANT, queries.tile[0].dtype)  # [BN, D]
    return scale_scores(row_products(queries.tile, k), keys, at, VARIANT), at


@triton.jit
def attend_tile(
    state, queries, keys, column, pages, ROTATED_K: tl.constexpr, EDGE: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns the SoftmaxState after the tile of keys that starts at `column`. pages: the pages of these keys, from
    load_tile_pages. EDGE: some (query, key) pairs of the tile are not visible."""
    dtype: tl.constexpr = queries.tile[0].dtype
    scores, at = tile_scores(queries, keys, column, pages, ROTATED_K, EDGE, VARIANT)
    visible = is_visible(queries.visible, column, VARIANT.block_n) if EDGE else None
    weights, state = online_softmax(state, scores, queries.scale_log2, visible)
    v = load_tile_values(keys, column, at, VARIANT, dtype)  # [BN, DV]
    weights, v = scale_weights(weights, v, keys, at, VARIANT)
    return add_values(state, weights, v)


@triton.jit
def store_result(state, result, cu_seqlens_q, seq, rows, head, heads_q, seqlen_q, channels_v, VARIANT: tl.constexpr):
    """Stores out and lse of a tile of queries. state: SoftmaxState after all bands. channels_v: from value_channels."""
    out, log_sum = finish_softmax(state)
    out_row = packed_row(cu_seqlens_q, seq.batch, seq.start_q, seqlen_q) + rows.first
    ptr = result.out + (out_row * heads_q + head) * VARIANT.head_dim_v
    view = HeadView(ptr, heads_q * VARIANT.head_dim_v, None)
    for part in tl.static_range(len(out)):
        store_values(view, out[part], rows, channels_v[part], VARIANT)
    lse_row = lse_offset(cu_seqlens_q, seq.batch, head, heads_q, seq.start_q, seqlen_q) + rows.first
    tl.store(result.lse + lse_row + rows.index, log_sum, mask=row_exists(rows))
