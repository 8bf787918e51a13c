"""Computes the backward in three kernels: row statistics, then dK and dV by key tile, then dQ by query tile. They use
no atomics, so gradients are bitwise reproducible.

The pass for dK and dV and the pass for dQ read rotated queries and keys. The gradient of rotated rows accumulates in
the current band's rotated basis and is rotated back at the end. This is algorithm 2 of FlashAttention-2, divided into
two passes with seven matrix products in total. If the first pass stores the gradients of scores for the second pass
(``score_grads.py``), five products are enough.

If gradients need not be reproducible, the pass for dK and dV also adds dQ up by atomics, in float32 and separately for
every band. ``attention_finish_grad_q`` then replaces the pass for dQ, and the backward takes five products, as in
FlashAttention-2. Each sum is stored in the order of the tensor cores' accumulators, so that no layout has to change
before the atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .. import configs
from ..arguments import band_view
from ..rotating.pairs import key_channels
from ..rotating.rotation import CosSinTable, rotate_tiles, store_tiles_rotated_back
from ..rows import (
    HeadView,
    add_weighted_rows,
    clamp_rows,
    existing_rows,
    first_pair,
    head_view,
    load_row_parts,
    load_value_parts,
    load_values,
    row_exists,
    row_products,
    skip_rows,
    store_values,
    tile_offsets,
    tile_rows,
    value_channels,
    zero_parts,
)
from ..softmax import LOG2_E, log2_scale
from ..tiles import (
    TileRange,
    VisibleRange,
    edge_count,
    edge_tile,
    find_sequence,
    head_program,
    is_visible,
    load_band,
    lse_offset,
    packed_row,
    previous_band,
    query_tiles,
    sequence_rows,
    visible_queries,
)
from .copies import band_rows, load_band_parts
from .score_grads import launch_heads, panel_row, score_matrix, tile_in_panels

# ---- row statistics


STATISTICS_ROWS = tl.constexpr(configs.STATISTICS_ROWS)


@triton.jit
def statistics_offset(packed, batch, head, rows):
    """Returns the offset of a sequence's first row in the row statistics. They are float32 (heads, rows, 2) and hold
    lse in log2 units and delta.

    Sequences start at multiples of STATISTICS_ROWS, so that their tiles load in whole vectors. Sequence b, whose first
    packed row is p, starts at row (p // STATISTICS_ROWS + b) * STATISTICS_ROWS. Sequence b - 1 ends before that row.
    """
    return tl.multiple_of(2 * statistics_row(packed, batch, head, rows), 2 * STATISTICS_ROWS)


@triton.jit
def statistics_row(packed, batch, head, rows):
    """Returns the same offset as ``statistics_offset``, counted in rows, int64."""
    return head.to(tl.int64) * rows + (packed // STATISTICS_ROWS + batch) * STATISTICS_ROWS


@triton.jit
def load_statistics(ptr, BLOCK: tl.constexpr):
    """Returns lse in log2 units and delta of BLOCK rows, two float32 vectors [BLOCK]."""
    return tl.split(tl.reshape(tl.load(ptr + tl.arange(0, 2 * BLOCK)), (BLOCK, 2)))


@triton.jit(do_not_specialize=["statistics_rows", "seqlen_q", "max_seqlen_q", "heads_q"])
def attention_statistics(
    out,
    grad_out,
    lse,
    grad_lse,
    statistics,
    statistics_rows,
    cu_seqlens_q,
    seqlen_q,
    max_seqlen_q,
    heads_q,
    VARIANT: tl.constexpr,
):
    """Computes every row's lse in log2 units, and delta = rowsum(out * grad_out) - grad_lse. Rows that see no key, and
    rows of a tile after the last row, get lse = inf, so that all their weights are 0. out is contiguous. grad_out is a
    TensorView."""
    tl.static_assert(VARIANT.block_m == STATISTICS_ROWS)
    batch, head, first = head_program(max_seqlen_q, heads_q, VARIANT.block_m)
    start, length = sequence_rows(cu_seqlens_q, batch, seqlen_q)
    if first >= length:
        return
    rows = tl.arange(0, VARIANT.block_m)
    channels = tl.arange(0, VARIANT.block_dv)
    exists = rows < length - first
    loaded = clamp_rows(rows, length - first)
    packed = packed_row(cu_seqlens_q, batch, start, seqlen_q)
    out_rows = HeadView(
        out + ((packed + first) * heads_q + head) * VARIANT.head_dim_v, heads_q * VARIANT.head_dim_v, None
    )
    grad_rows = head_view(grad_out, batch, start + first, head, VARIANT)
    o = load_values(out_rows.ptr, tile_offsets(loaded, out_rows), channels, VARIANT)  # [BM, DV]
    g = load_values(grad_rows.ptr, tile_offsets(loaded, grad_rows), channels, VARIANT)  # [BM, DV]
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # [BM]
    offset = lse_offset(cu_seqlens_q, batch, head, heads_q, start, seqlen_q) + first + rows
    row_lse = tl.load(lse + offset, mask=exists, other=float("-inf"))
    lse_log2 = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + offset, mask=exists, other=0.0)
    pairs = tl.join(lse_log2, tl.where(exists, delta, 0.0))  # [BM, 2]
    to = statistics + statistics_offset(packed, batch, head, statistics_rows) + 2 * first
    tl.store(to + (2 * rows[:, None] + tl.arange(0, 2)[None, :]), pairs)


# ---- dK and dV
# A tile of rows, such as [BN, D], is a tuple: of one tile, or of one tile for each of VARIANT.pair_ranges.


class GradKV(NamedTuple):
    """The accumulated gradients of a tile of keys: k [BN, D] and v [BN, DV], float32. k is in the current band's
    rotated basis and is not yet multiplied by the score scale."""

    k: object
    v: object


class KeyTile(NamedTuple):
    """One tile of keys. k: [BN, D]. v: [BN, DV]. visible: the query rows that see each key. scale_log2: softmax scale
    in log2 units. first: the index of the tile's first key."""

    k: object
    v: object
    visible: object
    scale_log2: object
    first: object


class AllQueries(NamedTuple):
    """The queries of all heads and bands. channels_q, channels: the channels of q and of grad_out to load. packed: the
    sequence's packed_row. The other fields are arguments of attention_grad_kv."""

    grad_out: object
    channels_q: object
    channels: object
    statistics: object
    statistics_rows: object
    packed: object


class LoopedQueries(NamedTuple):
    """One head's queries in a band. q, grad_out: HeadViews. channels_q, channels: the channels of q and of grad_out to
    load. statistics: pointer to the head's row statistics. length: the number of rows."""

    q: object
    grad_out: object
    channels_q: object
    channels: object
    statistics: object
    length: object


@triton.jit
def head_queries(queries, band_q, seq, head, VARIANT: tl.constexpr):
    """Returns the LoopedQueries of a head in a band. band_q: TensorView, the queries rotated for the band."""
    q_rows = head_view(band_q, seq.batch, seq.start_q, head, VARIANT)
    grad_rows = head_view(queries.grad_out, seq.batch, seq.start_q, head, VARIANT)
    offset = statistics_offset(queries.packed, seq.batch, head, queries.statistics_rows)
    statistics = queries.statistics + offset
    return LoopedQueries(q_rows, grad_rows, queries.channels_q, queries.channels, statistics, seq.length_q)


# ---- sums in accumulator order
# dQ is added up in blocks of 16 rows and 8 columns, in float32. Every lane of a warp holds four numbers of a block, as
# in an accumulator of mma.sync or wgmma. An instruction adds VARIANT.red_floats numbers per lane. Neighbouring lanes
# add to neighbouring addresses.
# The accumulator is dQ [M, D], or its transpose [D, M] if VARIANT.query_rows is set. In both cases, the blocks of the
# first queries come first.
#
#     lane = row % 8 * 4 + column // 2 % 4
#     half, parity = row // 8 % 2, column % 2              which of the lane's four numbers it is
#     red_floats 0, 1: [half, parity, lane] in memory      one instruction adds 128 contiguous bytes per warp
#     red_floats 4: [lane, half, parity] in memory         one instruction adds 16 contiguous bytes per lane (sm_90)
#
# If the head has VARIANT.pair_ranges, each of them has consecutive blocks in every 16 rows of the sum.

RED = tl.constexpr("red.relaxed.gpu.global.add.f32 [$1], $2; mov.b32 $0, 0;")
RED_4 = tl.constexpr(
    "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
)
RED_4_OPERANDS = tl.constexpr("=r,=r,=r,=r,l,l,l,l,f,f,f,f")


@triton.jit
def add_to_sum(ptr, value, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Adds value, [M, D] or [D, M], to a sum in global memory that has accumulator order. PART: which of
    VARIANT.pair_ranges has the channels of value, or 0 if there are no pair_ranges."""
    START: tl.constexpr = 2 * first_pair(VARIANT.pair_ranges, PART)
    ROWS: tl.constexpr = value.shape[0]
    COLUMNS: tl.constexpr = value.shape[1]
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    if VARIANT.query_rows:
        block = column // 8 * (ROWS // 16) + row // 16
    else:
        BLOCKS: tl.constexpr = VARIANT.padded_d // 8
        block = row // 16 * BLOCKS + column // 8 + START // 8
    lane = row % 8 * 4 + column // 2 % 4
    which = row // 8 % 2 * 2 + column % 2
    # The transpose hides from Triton that these addresses and the operands of other products depend on the same `row`.
    # Without it, Triton would give this product (mma.sync) the layout of those operands, in which several warps compute
    # the same elements.
    ptrs = tl.trans(ptr + block * 128 + (lane * 4 + which if VARIANT.red_floats == 4 else which * 32 + lane))
    if VARIANT.red_floats == 0:
        tl.atomic_add(ptrs, value, sem="relaxed")
    elif VARIANT.red_floats == 1:
        tl.inline_asm_elementwise(RED, "=r,l,f", [ptrs.to(tl.int64), value], tl.int32, False, 1)
    else:
        tl.inline_asm_elementwise(RED_4, RED_4_OPERANDS, [ptrs.to(tl.int64), value], tl.int32, False, 4)


@triton.jit
def load_sum(ptr, M: tl.constexpr, PART: tl.constexpr, VARIANT: tl.constexpr):
    """Returns dQ of M queries, [M, D], from the sum that add_to_sum has added to. PART: as in add_to_sum."""
    START: tl.constexpr = 2 * first_pair(VARIANT.pair_ranges, PART)
    D: tl.constexpr = 2 * VARIANT.pair_ranges[PART].count if len(VARIANT.pair_ranges) > 0 else VARIANT.block_d
    STEP: tl.constexpr = 16 * VARIANT.padded_d  # numbers of 16 rows
    QUERIES: tl.constexpr = M // 8 if VARIANT.query_rows else M // 16  # blocks along each axis
    CHANNELS: tl.constexpr = D // 16 if VARIANT.query_rows else D // 8
    flat = tl.arange(0, M * D)
    if len(VARIANT.pair_ranges) > 0:
        flat = flat // (16 * D) * STEP + flat % (16 * D) + 16 * START
    flat = tl.load(ptr + flat)
    if VARIANT.red_floats == 4:  # a block has the axes row % 8, column // 2 % 4, half, parity
        blocks = tl.permute(tl.reshape(flat, (QUERIES, CHANNELS, 8, 4, 2, 2)), (0, 1, 4, 2, 3, 5))
    else:
        blocks = tl.permute(tl.reshape(flat, (QUERIES, CHANNELS, 2, 2, 8, 4)), (0, 1, 2, 4, 5, 3))
    # A block now has the axes half and row % 8, which make up its rows, then column // 2 % 4 and parity, which make up
    # its columns.
    if VARIANT.query_rows:
        blocks = tl.permute(blocks, (0, 4, 5, 1, 2, 3))
    else:
        blocks = tl.permute(blocks, (0, 2, 3, 1, 4, 5))
    return tl.reshape(blocks, (M, D))


@triton.jit
def only_existing_keys(visible, tiles, rows):
    """Returns the query rows and query tiles that see a key tile. Rows of the key tile beyond the last key load that
    key again, so the result says that no query sees them. If the key tile has such rows, all its query tiles are edge
    tiles."""
    full = rows.first + rows.index.shape[0] <= rows.length
    inner_end = tl.where(full, tiles.inner_end, tiles.inner_begin)
    stop = tl.where(row_exists(rows), visible.stop, visible.first)
    return VisibleRange(visible.first, stop), TileRange(tiles.begin, tiles.inner_begin, inner_end, tiles.end)


# ---- scores of a tile
# The scores of a key tile and a query tile are [BN, BM], or [BM, BN] if VARIANT.query_rows is set
# (``configs.query_rows``).


@triton.jit
def score_products(keys, queries, VARIANT: tl.constexpr):
    """Returns the products of keys [BN, X] and queries [BM, X], in the orientation of the scores."""
    if VARIANT.query_rows:
        return row_products(queries, keys)
    else:  # after a return without else, Triton would compile this product as well
        return row_products(keys, queries)


@triton.jit
def over_keys(x, VARIANT: tl.constexpr):
    """Broadcasts x [BM], one number per query, over the keys of a tile of scores."""
    return x[:, None] if VARIANT.query_rows else x[None, :]


@triton.jit
def swap_axes(x, VARIANT: tl.constexpr):
    """Converts a tile from [BN, BM] to the orientation of the scores, or back. It transposes if VARIANT.query_rows is
    set."""
    return tl.trans(x) if VARIANT.query_rows else x


@triton.jit
def grad_q_product(grad_scores, k, VARIANT: tl.constexpr):
    """Returns the contribution of a key tile to dQ, which ``add_to_sum`` then adds: [BM, D], or [D, BM] if
    VARIANT.query_rows is set."""
    if VARIANT.query_rows:
        return tl.dot(tl.trans(k), tl.trans(grad_scores), input_precision="ieee")
    else:
        return tl.dot(tl.trans(grad_scores), k, input_precision="ieee")


@triton.jit
def add_grad_kv(grad, keys, queries, grad_sum, matrix, row, EDGE: tl.constexpr, VARIANT: tl.constexpr):
    """Adds the contribution of the query tile that starts at `row` to the gradients of a key tile. EDGE: some pairs of
    a query and a key are not in the band. grad_sum: pointer to the head's sum of dQ, or None. matrix: the head's Matrix
    that takes the gradients of scores, or None."""
    q_rows, grad_rows = skip_rows(queries.q, row), skip_rows(queries.grad_out, row)
    rows = tl.arange(0, VARIANT.block_m)
    loaded = clamp_rows(rows, queries.length - row) if EDGE else rows
    q = load_row_parts(q_rows.ptr, tile_offsets(loaded, q_rows), queries.channels_q, VARIANT)  # [BM, D]
    lse_log2, delta = load_statistics(
        queries.statistics + tl.multiple_of(2 * row, 2 * VARIANT.block_m), VARIANT.block_m
    )
    scores = score_products(keys.k, q, VARIANT)
    if EDGE:
        visible = is_visible(keys.visible, row, VARIANT.block_m)  # [BN, BM]
        scores = tl.where(swap_axes(visible, VARIANT), scores, float("-inf"))
    weights = tl.exp2(scores * keys.scale_log2 - over_keys(lse_log2, VARIANT))
    g = load_value_parts(grad_rows.ptr, tile_offsets(loaded, grad_rows), queries.channels, VARIANT)  # [BM, DV]
    # The products for dV and grad_weights are written in a different order for each value of query_rows, and Triton
    # keeps the order as written. With the opposite order, the kernel would spill in its loops.
    if VARIANT.query_rows:
        grad_weights = score_products(keys.v, g, VARIANT)
    grad_v = add_weighted_rows(grad.v, swap_axes(weights.to(g[0].dtype), VARIANT), g)
    if not VARIANT.query_rows:
        grad_weights = score_products(keys.v, g, VARIANT)
    grad_scores = weights * (grad_weights - over_keys(delta, VARIANT))
    grad_scores = grad_scores.to(q[0].dtype)
    grad_k = add_weighted_rows(grad.k, swap_axes(grad_scores, VARIANT), q)
    if matrix is not None:
        elements = tile_in_panels(rows[None, :], tl.arange(0, VARIANT.block_n)[:, None])  # [BN, BM]
        to = panel_row(matrix, row, keys.first) + swap_axes(elements, VARIANT)
        if EDGE:  # the other elements of this tile may belong to another band
            tl.store(to, grad_scores, mask=swap_axes(visible, VARIANT))
        else:
            tl.store(to, grad_scores)
    if grad_sum is not None:  # the sum also has rows for the tile's rows beyond the last query
        first = tl.full((), 0, tl.int64) + row  # `row` is a Python int in the interpreter
        to_sum = grad_sum + first * VARIANT.padded_d
        for part in tl.static_range(len(q)):
            add_to_sum(to_sum, grad_q_product(grad_scores, keys.k[part], VARIANT), part, VARIANT)
    return GradKV(grad_k, grad_v)


@triton.jit(
    do_not_specialize=["statistics_rows", "seqlen_q", "seqlen_k", "max_seqlen_k", "table_rows", "heads_q", "heads_kv"]
)
def attention_grad_kv(
    q,
    k,
    rotated_k,
    v,
    grad_out,
    statistics,
    statistics_rows,
    grad_k,
    grad_v,
    grad_sums,
    score_grads,
    scheme,
    cu_seqlens,
    seqlen_q,
    seqlen_k,
    max_seqlen_k,
    table_rows,
    heads_q,
    heads_kv,
    VARIANT: tl.constexpr,
):
    """Computes dK and dV of a tile of keys.

    q: BandedView of the queries, rotated for each band. rotated_k: TensorView (copy, row, head). grad_k and grad_v
    are contiguous. grad_sums: None, or float32 zeros (band, head, statistics_rows, padded_d). Each band's dQ is added
    there, in accumulator order. It is in the band's rotated basis and is not multiplied by the score scale.
    score_grads: ScoreGrads to fill for attention_grad_q, or None."""
    first_batch, first_head, heads = launch_heads(score_grads, heads_kv, 1)
    batch, head_kv, first = head_program(max_seqlen_k, heads, VARIANT.block_n)
    if score_grads is not None:
        batch += first_batch
        head_kv += first_head
    seq = find_sequence(cu_seqlens, batch, seqlen_q, seqlen_k)
    if first >= seq.length_k:
        return

    packed_k = packed_row(cu_seqlens.k, batch, seq.start_k, seqlen_k)
    rows = tile_rows(first, seq.length_k, seq.length_q, packed_k, scheme, VARIANT.block_n)
    position = first + rows.index  # [BN]
    last = tl.minimum(first + VARIANT.block_n, seq.length_k) - 1
    loaded = existing_rows(rows)
    packed_q = packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q)
    packed_k += first
    table = CosSinTable(scheme.table, table_rows, scheme.positions, scheme.maps)
    channels_k, channels = key_channels(VARIANT), value_channels(VARIANT)
    group = heads_q // heads_kv
    all_queries = AllQueries(grad_out, channels_k, channels, statistics, statistics_rows, packed_q)

    scale_log2 = log2_scale(scheme.score_scale)
    values = head_view(v, batch, seq.start_k + first, head_kv, VARIANT)
    raw = head_view(k, batch, seq.start_k + first, head_kv, VARIANT)
    v_tile = load_value_parts(values.ptr, tile_offsets(loaded, values), channels, VARIANT)  # [BN, DV]
    grad_k_zeros = zero_parts(VARIANT.block_n, VARIANT.block_d, VARIANT)
    grad = GradKV(grad_k_zeros, zero_parts(VARIANT.block_n, VARIANT.block_dv, VARIANT))
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        band = load_band(scheme.bands, b)
        view = band_rows(raw, rotated_k, band.k_copy, packed_k, head_kv, False, VARIANT)
        k_tile = load_band_parts(view, loaded, channels_k, VARIANT)  # [BN, D]
        visible = visible_queries(position, band, seq.ahead, scheme.maps)
        if NUM_BANDS > 1:
            before = previous_band(scheme.bands, b)
            grad = GradKV(rotate_tiles(grad.k, table, band.dk_step, before.dk_step, rows, VARIANT), grad.v)
        tiles = query_tiles(band, first, last, seq.ahead, seq.length_q, VARIANT.block_m, scheme.maps)
        if grad_sums is not None:
            visible, tiles = only_existing_keys(visible, tiles, rows)
        keys = KeyTile(k_tile, v_tile, visible, scale_log2, first)
        band_q = band_view(q, b, VARIANT)
        # disable_licm: if the compiler hoisted the epilogue's addresses and masks out of these loops, they would take
        # registers that the accumulators need.
        for member in tl.range(0, group, disable_licm=True):
            head = head_kv * group + member
            queries = head_queries(all_queries, band_q, seq, head, VARIANT)
            matrix = None
            if score_grads is not None:
                packed = None if cu_seqlens.q is None else packed_q
                matrix = score_matrix(score_grads, packed, batch - first_batch, head - first_head * group)
            grad_sum = grad_sums
            if grad_sums is not None:
                grad_sum += statistics_row(packed_q, batch, b * heads_q + head, statistics_rows) * VARIANT.padded_d
            for step in tl.range(0, edge_count(tiles), disable_licm=True):
                row = edge_tile(tiles, step) * VARIANT.block_m
                grad = add_grad_kv(grad, keys, queries, grad_sum, matrix, row, True, VARIANT)
            for step in tl.range(tiles.inner_begin, tiles.inner_end, disable_licm=True):
                row = step * VARIANT.block_m
                grad = add_grad_kv(grad, keys, queries, grad_sum, matrix, row, False, VARIANT)

    head_row = packed_k * heads_kv + head_kv
    to_v = HeadView(grad_v + head_row * VARIANT.head_dim_v, heads_kv * VARIANT.head_dim_v, None)
    for part in tl.static_range(len(grad.v)):
        store_values(to_v, grad.v[part], rows, channels[part], VARIANT)
    to_k = HeadView(grad_k + head_row * VARIANT.head_dim, heads_kv * VARIANT.head_dim, None)
    last_band = load_band(scheme.bands, NUM_BANDS - 1)
    store_tiles_rotated_back(to_k, grad.k, table, last_band.k_rotation, rows, scheme.score_scale, VARIANT)
