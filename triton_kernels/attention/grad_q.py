"""Computes dQ: a pass of its own, and the sums of a pass that also computes dK and dV."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import band_view
from ..rotating.pairs import key_channels, split_pairs, store_pairs
from ..rotating.rotation import CosSinTable, load_cos_sin, query_scale, rotate, rotate_tiles, store_tiles_rotated_back
from ..rows import (
    HeadView,
    add_weighted_rows,
    clamp_rows,
    existing_rows,
    first_pair,
    head_view,
    load_row_parts,
    load_value_parts,
    row_products,
    skip_rows,
    tile_offsets,
    tile_rows,
    value_channels,
    zero_parts,
)
from ..softmax import log2_scale
from ..tiles import (
    edge_count,
    edge_tile,
    find_sequence,
    is_visible,
    key_tiles,
    load_band,
    packed_row,
    previous_band,
    query_program,
    row_program,
    visible_keys,
)
from .backward import load_sum, statistics_offset, statistics_row
from .copies import band_rows, load_band_parts, skip_band_rows
from .score_grads import PANEL_KEYS, launch_heads, panel_row, score_matrix, tile_in_panels


class GradQueryTile(NamedTuple):
    """One tile of queries. q: [BM, D]. grad_out: [BM, DV]. lse_log2, delta: [BM]. visible: the keys that each row sees.
    scale_log2: softmax scale in log2 units. first: the index of the tile's first row. matrix: the Matrix that
    attention_grad_kv filled, or None."""

    q: object
    grad_out: object
    lse_log2: object
    delta: object
    visible: object
    scale_log2: object
    first: object
    matrix: object


class LoopedKeys(NamedTuple):
    """The keys of a band. k: from band_rows. v: HeadView. channels_k, channels: the channels to load.
    length: the number of keys."""

    k: object
    v: object
    channels_k: object
    channels: object
    length: object


@triton.jit
def add_grad_q(grad_q, queries, keys, column, EDGE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns grad_q [BM, D] plus the contribution of the key tile that starts at `column`, without the score scale.
    EDGE: some pairs of a query and a key are not in the band."""
    columns = tl.arange(0, VARIANT.block_n)
    loaded = clamp_rows(columns, keys.length - column) if EDGE else columns
    k_rows, v_rows = skip_band_rows(keys.k, column, VARIANT), skip_rows(keys.v, column)
    k = load_band_parts(k_rows, loaded, keys.channels_k, VARIANT)  # [BN, D]
    if queries.matrix is not None:
        stored = panel_row(queries.matrix, queries.first, column)
        stored += tile_in_panels(tl.arange(0, VARIANT.block_m)[:, None], columns[None, :])
        if EDGE:
            visible = is_visible(queries.visible, column, VARIANT.block_n)
            grad_scores = tl.load(stored, mask=visible, other=0.0)
        else:
            grad_scores = tl.load(stored)
        return add_weighted_rows(grad_q, grad_scores, k)
    v = load_value_parts(v_rows.ptr, tile_offsets(loaded, v_rows), keys.channels, VARIANT)  # [BN, DV]
    scores = row_products(queries.q, k)  # [BM, BN]
    if EDGE:
        scores = tl.where(is_visible(queries.visible, column, VARIANT.block_n), scores, float("-inf"))
    weights = tl.exp2(scores * queries.scale_log2 - queries.lse_log2[:, None])
    grad_weights = row_products(queries.grad_out, v)  # [BM, BN]
    grad_scores = weights * (grad_weights - queries.delta[:, None])
    return add_weighted_rows(grad_q, grad_scores.to(k[0].dtype), k)


@triton.jit(
    do_not_specialize=["statistics_rows", "seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows", "heads_q", "heads_kv"]
)
def attention_grad_q(
    q,
    k,
    rotated_k,
    v,
    grad_out,
    statistics,
    statistics_rows,
    grad_q,
    score_grads,
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
    """Computes dQ of a tile of queries. grad_q is contiguous. score_grads: ScoreGrads that attention_grad_kv has
    filled, or None. The other arguments are those of attention_grad_kv."""
    first_batch, first_head, heads = launch_heads(score_grads, heads_q, heads_q // heads_kv)
    batch, head, first = query_program(max_seqlen_q, heads, VARIANT)
    if score_grads is not None:
        batch += first_batch
        head += first_head
    seq = find_sequence(cu_seqlens, batch, seqlen_q, seqlen_k)
    if first >= seq.length_q:
        return

    packed_q = packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q)
    rows = tile_rows(first, seq.length_q, seq.length_k, packed_q, scheme, VARIANT.block_m)
    position = first + rows.index + seq.ahead  # [BM]
    last = tl.minimum(first + VARIANT.block_m, seq.length_q) - 1 + seq.ahead
    loaded = existing_rows(rows)
    head_kv = head // (heads_q // heads_kv)
    out_row = packed_q + first
    packed_k = packed_row(cu_seqlens.k, batch, seq.start_k, seqlen_k)
    table = CosSinTable(scheme.table, table_rows, scheme.positions, scheme.maps)
    channels_k, channels = key_channels(VARIANT), value_channels(VARIANT)
    raw = head_view(k, batch, seq.start_k, head_kv, VARIANT)
    values = head_view(v, batch, seq.start_k, head_kv, VARIANT)

    grad_rows = head_view(grad_out, batch, seq.start_q + first, head, VARIANT)
    g = load_value_parts(grad_rows.ptr, tile_offsets(loaded, grad_rows), channels, VARIANT)  # [BM, DV]
    row_statistics = statistics + statistics_offset(packed_q, batch, head, statistics_rows)
    row_statistics += 2 * (first + loaded)
    lse_log2, delta = tl.load(row_statistics), tl.load(row_statistics + 1)
    scale_log2 = log2_scale(scheme.score_scale)
    acc = zero_parts(VARIANT.block_m, VARIANT.block_d, VARIANT)
    matrix, length_k = None, seq.length_k
    if score_grads is not None:
        packed = None if cu_seqlens.q is None else packed_q
        matrix = score_matrix(score_grads, packed, batch - first_batch, head - first_head)
        if cu_seqlens.q is not None:  # a packed sequence may be longer than the caller's max_seqlen_k
            length_k = tl.minimum(length_k, matrix.width * PANEL_KEYS)
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(scheme.bands, b)
        view = band_rows(raw, rotated_k, band.k_copy, packed_k, head_kv, False, VARIANT)
        keys = LoopedKeys(view, values, channels_k, channels, seq.length_k)
        q_rows = head_view(band_view(q, b, VARIANT), batch, seq.start_q + first, head, VARIANT)
        q_tile = load_row_parts(q_rows.ptr, tile_offsets(loaded, q_rows), channels_k, VARIANT)  # [BM, D]
        visible = visible_keys(position, band, seq.length_k, scheme.maps)
        queries = GradQueryTile(q_tile, g, lse_log2, delta, visible, scale_log2, first, matrix)
        if NUM_BANDS > 1:
            before = previous_band(scheme.bands, b)
            acc = rotate_tiles(acc, table, band.dq_step, before.dq_step, rows, VARIANT)
        tiles = key_tiles(band, first + seq.ahead, last, length_k, VARIANT.block_n, scheme.maps)
        for step in tl.range(0, edge_count(tiles)):
            acc = add_grad_q(acc, queries, keys, edge_tile(tiles, step) * VARIANT.block_n, True, VARIANT)
        for step in tl.range(tiles.inner_begin, tiles.inner_end):
            acc = add_grad_q(acc, queries, keys, step * VARIANT.block_n, False, VARIANT)

    last_band = load_band(scheme.bands, NUM_BANDS - 1)
    scale = query_scale(scheme, rows.start + loaded, position, seq.length_k) * scheme.score_scale
    to_q = HeadView(grad_q + (out_row * heads_q + head) * VARIANT.head_dim, heads_q * VARIANT.head_dim, None)
    store_tiles_rotated_back(to_q, acc, table, last_band.q_rotation, rows, scale[:, None], VARIANT)


@triton.jit
def finish_part(
    grad_q, grad_sums, statistics_rows, scheme, table, seq, rows, packed_q, head, heads, scale, PART: tl.constexpr,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Rotates the sums of all bands of a head back, adds them, multiplies the result by scale [BM] and stores it. PART:
    an index of VARIANT.pair_ranges, whose pairs are handled. Handles all pairs if there are no pair_ranges."""
    FIRST: tl.constexpr = first_pair(VARIANT.pair_ranges, PART)
    PAIRS: tl.constexpr = VARIANT.pair_ranges[PART].count if len(VARIANT.pair_ranges) > 0 else VARIANT.block_d // 2
    BLOCK_M: tl.constexpr = VARIANT.block_m
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    x, y = tl.zeros((BLOCK_M, PAIRS), tl.float32), tl.zeros((BLOCK_M, PAIRS), tl.float32)
    for b in tl.static_range(NUM_BANDS):
        row = statistics_row(packed_q, seq.batch, b * heads + head, statistics_rows) + rows.first
        band_sum = load_sum(grad_sums + row * VARIANT.padded_d, BLOCK_M, PART, VARIANT)
        band_x, band_y = split_pairs(band_sum, VARIANT)  # [BM, PAIRS]
        if VARIANT.rotary_dim:
            rotation = load_band(scheme.bands, b).q_rotation
            cos, sin = load_cos_sin(table, rotation, rows, FIRST, PAIRS, VARIANT)
            band_x, band_y = rotate(band_x, band_y, cos, -sin)
        x += band_x
        y += band_y
    to = head_view(grad_q, seq.batch, seq.start_q + rows.first, head, VARIANT)
    store_pairs(to, x * scale[:, None], y * scale[:, None], rows, FIRST, VARIANT)


@triton.jit(do_not_specialize=["statistics_rows", "seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows", "heads"])
def attention_finish_grad_q(
    grad_sums,
    statistics_rows,
    grad_q,
    scheme,
    cu_seqlens,
    seqlen_q,
    seqlen_k,
    max_seqlen_q,
    table_rows,
    heads,
    HEADS_PER_PROGRAM: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Computes dQ. Rotates each band's sum back from the band's rotated basis and adds the results. grad_sums: filled
    by attention_grad_kv. grad_q: TensorView."""
    batch, first = row_program(max_seqlen_q, VARIANT.block_m)
    seq = find_sequence(cu_seqlens, batch, seqlen_q, seqlen_k)
    if first >= seq.length_q:
        return
    packed_q = packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q)
    rows = tile_rows(first, seq.length_q, seq.length_k, packed_q, scheme, VARIANT.block_m)
    loaded = existing_rows(rows)
    table = CosSinTable(scheme.table, table_rows, scheme.positions, scheme.maps)
    position = first + rows.index + seq.ahead
    scale = query_scale(scheme, rows.start + loaded, position, seq.length_k) * scheme.score_scale  # [BM]
    PARTS: tl.constexpr = len(VARIANT.pair_ranges) if len(VARIANT.pair_ranges) > 0 else 1
    begin, end = tl.program_id(1) * HEADS_PER_PROGRAM, (tl.program_id(1) + 1) * HEADS_PER_PROGRAM
    for head in range(begin, tl.minimum(end, heads)):
        for part in tl.static_range(PARTS):
            finish_part(
                grad_q,
                grad_sums,
                statistics_rows,
                scheme,
                table,
                seq,
                rows,
                packed_q,
                head,
                heads,
                scale,
                part,
                VARIANT,
            )
