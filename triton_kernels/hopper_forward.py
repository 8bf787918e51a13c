"""Forward for sm_90 in Gluon: one warp loads key and value tiles by TMA, two groups of four warps compute.

The same mathematics as ``forward``: queries rotated once per band, all bands under one online softmax, only the tiles
of a band visited. Each group has 64 query rows. It issues the scores of a tile before the product of the previous
tile's weights with its values, so that the tensor cores work while the softmax runs.

Tiles go through rings in shared memory. ``full`` of a ring's slot says that the tile has arrived, ``empty`` that both
groups are done with it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .rotation import FINE_ROWS, CosSinTable, add_angles, concatenate, join_pairs, log_n_scale, rotate, split_pairs
from .softmax import SoftmaxState, finish_softmax, log2_scale, softmax_weights
from .tiles import (
    HeadView,
    Rows,
    edge_count,
    edge_tile,
    existing_rows,
    head_view,
    in_band,
    key_tiles,
    load_band,
    load_rows,
    lse_offset,
    packed_row,
    query_program,
    row_exists,
    store_rows,
    tile_offsets,
)

GROUPS = gl.constexpr(2)
GROUP_ROWS = gl.constexpr(64)
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)  # of TMA descriptors
# Of 168 for every thread. At 24 the producer would spill what the other warps keep from before the switch.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)


class Ring(NamedTuple):
    """Tiles (STAGES, 1, BN, 1, D) in shared memory, and two barriers for each."""

    tiles: object
    full: object
    empty: object


class Call(NamedTuple):
    """What only the consumers need."""

    q: object
    out: object
    lse: object
    scheme: object
    table: object
    heads_q: object


class Problem(NamedTuple):
    """What all warps of a program share. first: its first query row; ahead: seqlen_k - seqlen_q."""

    batch: object
    head: object
    head_kv: object
    first: object
    seqlen_q: object
    seqlen_k: object
    ahead: object
    bands: object


# ---- layouts


@gluon.constexpr_function
def row_layout(columns):
    """Rows of 16-byte vectors of 16-bit elements, for four warps."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def product_layout(columns):
    """A product of a warp group, [64, columns] float32."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def tile_layout(rank):
    """Rows of head_dim elements in 128-byte blocks, swizzled: what TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


# ---- rings


@gluon.jit
def new_ring(dtype: gl.constexpr, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    TILE: gl.constexpr = [STAGES, 1, SHAPE.block_n, 1, SHAPE.head_dim]
    tiles = gl.allocate_shared_memory(dtype, TILE, tile_layout(4))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=GROUPS)
    return Ring(tiles, full, empty)


@gluon.jit
def load_tile(ring, descriptor, outer, column, head, n, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """Producer: requests the n-th tile of the program, rows from `column` on. Rows behind the sequence arrive as 0."""
    slot = n % STAGES
    mbarrier.wait(ring.empty.index(slot), n // STAGES & 1 ^ 1)
    mbarrier.expect(ring.full.index(slot), SHAPE.block_n * SHAPE.head_dim * 2)
    tma.async_copy_global_to_shared(descriptor, [outer, column, head, 0], ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def wait_tile(ring, n, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """Consumer: the n-th tile [BN, D], as soon as it has arrived."""
    mbarrier.wait(ring.full.index(n % STAGES), n // STAGES & 1)
    return ring.tiles.index(n % STAGES).reshape([SHAPE.block_n, SHAPE.head_dim])


@gluon.jit
def release_tile(ring, n, STAGES: gl.constexpr):
    mbarrier.arrive(ring.empty.index(n % STAGES))


# ---- producer


@gluon.jit
def band_tiles(problem, band, SHAPE: gl.constexpr):
    """The key tiles that a band visits, edges first."""
    last = gl.minimum(problem.first + SHAPE.block_m, problem.seqlen_q) - 1 + problem.ahead
    return key_tiles(band, problem.first + problem.ahead, last, problem.seqlen_k, SHAPE.block_n)


@gluon.jit
def visited_tile(tiles, step):
    """The step-th tile: the edges of the range, then its inside."""
    edges = edge_count(tiles)
    return gl.where(step < edges, edge_tile(tiles, step), tiles.inner_begin + step - edges)


@gluon.jit
def produce(k, rotated_k, v, keys, values, problem, batches, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    n = 0
    NUM_BANDS: gl.constexpr = SHAPE.num_bands
    for b in gl.static_range(NUM_BANDS):
        band = load_band(problem.bands, b)
        tiles = band_tiles(problem, band, SHAPE)
        for step in range(tiles.end - tiles.begin):
            column = visited_tile(tiles, step) * SHAPE.block_n
            if (SHAPE.rotated_bands >> b) & 1:
                outer = band.k_copy * batches + problem.batch
                load_tile(keys, rotated_k, outer, column, problem.head_kv, n, STAGES, SHAPE)
            else:
                load_tile(keys, k, problem.batch, column, problem.head_kv, n, STAGES, SHAPE)
            load_tile(values, v, problem.batch, column, problem.head_kv, n, STAGES, SHAPE)
            n += 1


# ---- consumers: queries


@gluon.jit
def group_rows(rows, LAYOUT: gl.constexpr):
    """Rows, with their index [64] along the first dimension of a layout."""
    return Rows(gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT)), rows.start, rows.first, rows.length)


@gluon.jit
def load_cos_sin(table, rotation, row, pair, SHAPE: gl.constexpr):
    """cos and sin of table rows [64] and pairs [N], two float32 [64, N]. See ``rotation.load_cos_sin``."""
    D: gl.constexpr = SHAPE.block_d  # a table row: cos of D/2 pairs, then sin
    ptr = table.ptr + rotation.to(gl.int64) * table.rows * D + pair
    if table.positions is not None:
        at = ptr[None, :] + row.to(gl.int64)[:, None] * D
        return gl.load(at), gl.load(at + D // 2)
    else:
        fine = ptr[None, :] + (row % FINE_ROWS)[:, None] * D
        coarse = ptr[None, :] + (row // FINE_ROWS + FINE_ROWS)[:, None] * D
        return add_angles(gl.load(fine), gl.load(fine + D // 2), gl.load(coarse), gl.load(coarse + D // 2))


@gluon.jit
def load_pairs(view, rows, FIRST: gl.constexpr, SHAPE: gl.constexpr):
    """First and second members of D/4 pairs of every row, from pair FIRST on, two [64, D/4]."""
    COUNT: gl.constexpr = SHAPE.head_dim // 4
    COLUMNS: gl.constexpr = 2 * COUNT if SHAPE.interleaved else COUNT
    LAYOUT: gl.constexpr = row_layout(COLUMNS)
    offsets = tile_offsets(existing_rows(group_rows(rows, LAYOUT)), view)
    channels = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    if SHAPE.interleaved:
        return split_pairs(load_rows(view.ptr, offsets, channels + 2 * FIRST, SHAPE), SHAPE)
    else:
        first = load_rows(view.ptr, offsets, channels + FIRST, SHAPE)
        return first, load_rows(view.ptr, offsets, channels + FIRST + SHAPE.head_dim // 2, SHAPE)


@gluon.jit
def load_rotated_chunk(view, rows, ahead, call, rotation, FIRST: gl.constexpr, SHAPE: gl.constexpr):
    """D/4 pairs of every row, rotated and scaled by log n in float32, rounded once."""
    x, y = load_pairs(view, rows, FIRST, SHAPE)
    LAYOUT: gl.constexpr = x.type.layout
    x, y = x.to(gl.float32), y.to(gl.float32)
    own = group_rows(rows, LAYOUT)
    row = rows.start + existing_rows(own)
    if rotation > 0:
        pair = gl.arange(0, SHAPE.head_dim // 4, gl.SliceLayout(0, LAYOUT)) + FIRST
        cos, sin = load_cos_sin(call.table, rotation, row, pair, SHAPE)
        x, y = rotate(x, y, cos, sin)
    scale = log_n_scale(call.scheme, row, rows.first + own.index + ahead)
    dtype: gl.constexpr = view.ptr.dtype.element_ty
    return (x * scale[:, None]).to(dtype), (y * scale[:, None]).to(dtype)


@gluon.jit
def store_rotated(queries, view, rows, ahead, call, rotation, SHAPE: gl.constexpr):
    """Fills queries [64, D] in shared memory. In two chunks, as in ``rotation``, for the sake of registers."""
    NEXT: gl.constexpr = SHAPE.head_dim // 4
    x, y = load_rotated_chunk(view, rows, ahead, call, rotation, 0, SHAPE)
    next_x, next_y = load_rotated_chunk(view, rows, ahead, call, rotation, NEXT, SHAPE)
    queries.store(join_pairs(concatenate(x, next_x), concatenate(y, next_y), SHAPE))
    fence_async_shared()


# ---- consumers: tiles


class Group(NamedTuple):
    """What a warp group reads. queries [64, D]: in shared memory. position [64]: of its queries."""

    queries: object
    k_ring: object
    v_ring: object
    position: object
    scale_log2: object


@gluon.jit
def start_scores(group, n, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """Issues queries @ keys of the n-th tile, [64, BN]."""
    k = wait_tile(group.k_ring, n, STAGES, SHAPE)
    LAYOUT: gl.constexpr = product_layout(SHAPE.block_n)
    zeros = gl.full([GROUP_ROWS, SHAPE.block_n], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(group.queries, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def pack_pairs(weights, dtype: gl.constexpr):
    """float32 [64, BN] as pairs of 16-bit numbers, int32 [64, BN/2]. As single numbers carried from tile to tile, they
    would be packed and unpacked once more in every iteration."""
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    first, second = gl.split(gl.reshape(weights, (weights.shape[0], weights.shape[1] // 2, 2)))
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [first, second], gl.int32, True, 1)


@gluon.jit
def unpack_pairs(pairs, dtype: gl.constexpr, SHAPE: gl.constexpr):
    """pack_pairs' numbers [64, BN], as the first operand of a product."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1
    )
    weights = gl.reshape(gl.join(first, second), (pairs.shape[0], 2 * pairs.shape[1])).to(dtype, bitcast=True)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, product_layout(SHAPE.block_d), 2))


@gluon.jit
def start_values(group, acc, weights, n, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """Issues acc + weights @ values of the n-th tile, [64, D]."""
    v = wait_tile(group.v_ring, n, STAGES, SHAPE)
    return warpgroup_mma(unpack_pairs(weights, v.dtype, SHAPE), v, acc, is_async=True)


@gluon.jit
def weigh(group, state, scores, band, column, seqlen_k, EDGE: gl.constexpr, SHAPE: gl.constexpr):
    """The softmax step of scores [64, BN]: (packed weights, factor [64, 1] for acc, the new state with the old acc)."""
    visible = None
    if EDGE:
        position_k = (column + gl.arange(0, SHAPE.block_n, gl.SliceLayout(0, scores.type.layout)))[None, :]
        visible = in_band(group.position[:, None], position_k, band) & (position_k < seqlen_k)
    weights, rescale, row_max, row_sum = softmax_weights(state, scores, group.scale_log2, visible)
    OUT: gl.constexpr = product_layout(SHAPE.block_d)
    weights = pack_pairs(weights, group.queries.dtype)
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    return weights, rescale, SoftmaxState(state.acc, row_max, row_sum)


@gluon.jit
def attend_first(group, state, band, column, seqlen_k, n, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """The first tile of a band: its weights, and the state that lacks their product with the values."""
    scores = warpgroup_mma_wait(0, [start_scores(group, n, STAGES, SHAPE)])
    release_tile(group.k_ring, n, STAGES)
    weights, rescale, state = weigh(group, state, scores, band, column, seqlen_k, True, SHAPE)
    return weights, SoftmaxState(state.acc * rescale, state.row_max, state.row_sum)


@gluon.jit
def attend_next(
    group, weights, state, band, column, seqlen_k, n, EDGE: gl.constexpr, STAGES: gl.constexpr, SHAPE: gl.constexpr
):
    """The n-th tile: its scores and the product of the previous weights are issued, then its softmax runs."""
    scores = start_scores(group, n, STAGES, SHAPE)
    acc = start_values(group, state.acc, weights, n - 1, STAGES, SHAPE)
    scores = warpgroup_mma_wait(1, [scores])
    release_tile(group.k_ring, n, STAGES)
    weights, rescale, state = weigh(group, state, scores, band, column, seqlen_k, EDGE, SHAPE)
    acc = warpgroup_mma_wait(0, [acc])
    release_tile(group.v_ring, n - 1, STAGES)
    return weights, SoftmaxState(acc * rescale, state.row_max, state.row_sum)


@gluon.jit
def attend_band(group, state, band, tiles, seqlen_k, n, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """All tiles of a band; the first is the program's n-th."""
    column = visited_tile(tiles, 0) * SHAPE.block_n
    weights, state = attend_first(group, state, band, column, seqlen_k, n, STAGES, SHAPE)
    edges = gl.maximum(edge_count(tiles), 1)
    count = tiles.end - tiles.begin
    for step in range(1, edges):
        column = visited_tile(tiles, step) * SHAPE.block_n
        weights, state = attend_next(group, weights, state, band, column, seqlen_k, n + step, True, STAGES, SHAPE)
    for step in range(edges, count):
        weights, state = attend_next(group, weights, state, band, 0, seqlen_k, n + step, False, STAGES, SHAPE)
    last = n + count - 1
    acc = warpgroup_mma_wait(0, [start_values(group, state.acc, weights, last, STAGES, SHAPE)])
    release_tile(group.v_ring, last, STAGES)
    return SoftmaxState(acc, state.row_max, state.row_sum)


@gluon.jit
def consume(GROUP: gl.constexpr, call, problem, queries, keys, values, STAGES: gl.constexpr, SHAPE: gl.constexpr):
    """One warp group: its 64 rows of queries against all tiles."""
    first = problem.first + GROUP * GROUP_ROWS
    start = first + gl.maximum(problem.ahead, 0)
    if call.scheme.positions is not None:
        start += problem.batch * problem.seqlen_q
    rows = Rows(None, start, first, problem.seqlen_q)
    view = head_view(call.q, problem.batch, first, problem.head, SHAPE)
    SCORES: gl.constexpr = product_layout(SHAPE.block_n)
    OUT: gl.constexpr = product_layout(SHAPE.block_d)
    position = first + problem.ahead + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES))
    group = Group(queries.index(GROUP), keys, values, position, log2_scale(call.scheme.score_scale))
    acc = gl.full([GROUP_ROWS, SHAPE.block_d], 0.0, gl.float32, OUT)
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    state = SoftmaxState(acc, row_max, row_sum)
    n = 0
    NUM_BANDS: gl.constexpr = SHAPE.num_bands
    for b in gl.static_range(NUM_BANDS):
        band = load_band(problem.bands, b)
        tiles = band_tiles(problem, band, SHAPE)
        if tiles.end > tiles.begin:
            store_rotated(group.queries, view, rows, problem.ahead, call, band.q_rotation, SHAPE)
            state = attend_band(group, state, band, tiles, problem.seqlen_k, n, STAGES, SHAPE)
        n += tiles.end - tiles.begin

    row_max = gl.convert_layout(state.row_max, gl.SliceLayout(1, OUT))
    row_sum = gl.convert_layout(state.row_sum, gl.SliceLayout(1, OUT))
    result, log_sum = finish_softmax(SoftmaxState(state.acc, row_max, row_sum))
    store_out(group.queries, result, log_sum, call, problem, rows, SHAPE)


@gluon.jit
def store_out(staging, result, log_sum, call, problem, rows, SHAPE: gl.constexpr):
    """Stores result [64, D], through shared memory for the sake of wide stores, and log_sum [64]."""
    LAYOUT: gl.constexpr = row_layout(SHAPE.head_dim)
    staging.store(result.to(staging.dtype))
    row = packed_row(None, problem.batch, None, problem.seqlen_q) + rows.first
    heads = call.heads_q
    view = HeadView(call.out + (row * heads + problem.head) * SHAPE.head_dim, heads * SHAPE.head_dim, None)
    channels = gl.arange(0, SHAPE.head_dim, gl.SliceLayout(0, LAYOUT))
    store_rows(view, staging.load(LAYOUT), group_rows(rows, LAYOUT), channels, SHAPE)
    OUT: gl.constexpr = product_layout(SHAPE.block_d)
    own = group_rows(rows, OUT)
    offset = lse_offset(None, problem.batch, problem.head, heads, None, problem.seqlen_q) + rows.first
    gl.store(call.lse + offset + own.index, log_sum, mask=row_exists(own))


# ---- the kernel


@gluon.jit(do_not_specialize=["seqlen_q", "seqlen_k", "batches", "table_rows", "heads_q", "heads_kv"])
def hopper_forward(
    q,
    k,
    rotated_k,
    v,
    out,
    lse,
    scheme,
    seqlen_q,
    seqlen_k,
    batches,
    table_rows,
    heads_q,
    heads_kv,
    STAGES: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """q: TensorView. k, v: tensor descriptors (batch, seqlen_k, heads_kv, head_dim); rotated_k the same, its copies one
    after the other along batch. out (batch, seqlen_q, heads_q, head_dim) and lse float32 are contiguous. scheme: see
    arguments.py. STAGES: slots of each ring."""
    batch, head, first = query_program(seqlen_q, heads_q, SHAPE)
    head_kv = head // (heads_q // heads_kv)
    problem = Problem(batch, head, head_kv, first, seqlen_q, seqlen_k, seqlen_k - seqlen_q, scheme.bands)
    queries = gl.allocate_shared_memory(k.dtype, [GROUPS, GROUP_ROWS, SHAPE.head_dim], tile_layout(2))
    keys = new_ring(k.dtype, STAGES, SHAPE)
    values = new_ring(k.dtype, STAGES, SHAPE)
    fence_async_shared()
    call = Call(q, out, lse, scheme, CosSinTable(scheme.table, table_rows, scheme.positions, None), heads_q)
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), call, problem, queries, keys, values, STAGES, SHAPE)),
            (consume, (gl.constexpr(1), call, problem, queries, keys, values, STAGES, SHAPE)),
            (produce, (k, rotated_k, v, keys, values, problem, batches, STAGES, SHAPE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
