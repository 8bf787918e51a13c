"""Attention over a cache, for few queries: split over the keys, then combined. The cache holds raw keys, read once.

A tile holds the queries of all heads that share one head of keys: row m is query m // group of the group's head m %
group. Key blocks are counted from the first valid slot, and split s takes blocks s, s + num_splits, ... of every band.
What a sequence gets thus depends on its own keys and on num_splits alone: no padding, page, neighbour or way of cutting
queries into calls changes a bit, and nothing on the host waits for a length.
"""

import triton
import triton.language as tl

from .tiles import (
    LN_2,
    LOG2_E,
    band_fields,
    cache_bounds,
    cached_row,
    clamp,
    cos_sin,
    cos_sin_at,
    decoded,
    in_band,
    inside,
    join_pairs,
    online_softmax,
    page_of,
    pairs_at,
    query_scale,
    rows_at,
    stride,
    tile_range,
    turn,
)


@triton.jit(do_not_specialize=["heads"])
def append_rows(
    k_cache, v_cache, k, v, slots, heads, LAYOUT: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Writes k, v Strided (batch, seqlen_new, heads) behind seqlens. What has no slot, or no page inside the cache, is
    dropped."""
    seqlen_new, capacity = decoded(slots.seqlen_new), decoded(slots.capacity)
    tiles = tl.cdiv(seqlen_new * heads, BLOCK_M)
    batch = tl.program_id(0) // tiles
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = rows // heads, (rows % heads).to(tl.int64)
    slot = clamp(tl.load(slots.seqlens + batch), 0, capacity) + token
    exists = (token < seqlen_new) & (slot < capacity)
    page, row = page_of(slots, batch, tl.minimum(slot, capacity - 1), PAGE_SIZE)
    fits = (exists & (page >= 0) & (page < decoded(slots.pages)))[:, None]
    token = tl.minimum(token, seqlen_new - 1).to(tl.int64)
    channels = tl.arange(0, LAYOUT.block_d)
    fits &= (channels < LAYOUT.head_dim)[None, :]
    batch = batch.to(tl.int64)
    new_k = rows_at(
        k.ptr,
        batch * stride(k.batch, LAYOUT) + token * stride(k.row, LAYOUT) + head * stride(k.head, LAYOUT),
        channels,
        LAYOUT,
    )
    new_v = rows_at(
        v.ptr,
        batch * stride(v.batch, LAYOUT) + token * stride(v.row, LAYOUT) + head * stride(v.head, LAYOUT),
        channels,
        LAYOUT,
    )
    to_k = (
        page * stride(k_cache.batch, LAYOUT) + row * stride(k_cache.row, LAYOUT) + head * stride(k_cache.head, LAYOUT)
    )
    to_v = (
        page * stride(v_cache.batch, LAYOUT) + row * stride(v_cache.row, LAYOUT) + head * stride(v_cache.head, LAYOUT)
    )
    tl.store(k_cache.ptr + to_k[:, None] + channels[None, :], new_k, mask=fits)
    tl.store(v_cache.ptr + to_v[:, None] + channels[None, :], new_v, mask=fits)


@triton.jit
def turn_keys(x, y, angles, slot, table_rows, first, rows, length, LAYOUT: tl.constexpr):
    """Pairs of raw keys [BN, D/2] at positions first + rows, turned in float32 by table `slot` and rounded once.
    `length` of the rows exist."""
    cos, sin = cos_sin(angles, slot, table_rows, first, rows, length, 0, LAYOUT.block_d // 2, LAYOUT)
    turned_x, turned_y = turn(x.to(tl.float32), y.to(tl.float32), cos, sin)
    return turned_x.to(x.dtype), turned_y.to(y.dtype)


@triton.jit
def products(query_x, query_y, x, y, LAYOUT: tl.constexpr):
    """Queries [BM, D/2] times keys [BN, D/2] over first and second members of the pairs, float32 [BM, BN]."""
    if LAYOUT.block_d < 32:  # a tensor core takes 16 channels at least
        return tl.dot(join_pairs(query_x, query_y, LAYOUT), tl.trans(join_pairs(x, y, LAYOUT)), input_precision="ieee")
    else:
        scores = tl.dot(query_x, tl.trans(x), input_precision="ieee")
        return tl.dot(query_y, tl.trans(y), scores, input_precision="ieee")


@triton.jit(do_not_specialize=["seqlen_q", "table_rows", "num_splits", "heads_q", "heads_kv"])
def attention_decode(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    angles,
    bands,
    slots,
    seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    num_splits,
    scales,
    LAYOUT: tl.constexpr,
    NUM_BANDS: tl.constexpr,
    KEY_TURNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """q Strided (batch, seqlen_q, heads_q); caches Strided (batch or page, row, heads_kv); out (num_splits, batch,
    seqlen_q, heads_q, head_dim), lse float32 (num_splits, batch, heads_q, seqlen_q): no gaps. Where there are several
    splits, rows of out whose lse is -inf are not written. bands as in band_fields; bit b of KEY_TURNS tells whether
    band b turns its keys."""
    group = heads_q // heads_kv
    tiles = tl.cdiv(seqlen_q * group, BLOCK_M)
    split = tl.program_id(0) % num_splits
    tile = tl.program_id(0) // num_splits % tiles
    head_kv = tl.program_id(0) // num_splits // tiles % heads_kv
    batch = tl.program_id(0) // num_splits // tiles // heads_kv
    batches = tl.num_programs(0) // num_splits // tiles // heads_kv
    first, length = cache_bounds(slots, batch)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < seqlen_q * group
    rows = inside(rows, seqlen_q * group)
    token, head = rows // group, head_kv * group + rows % group  # [BM]
    ahead = length - seqlen_q  # bottom-right alignment
    position_q = token + ahead
    shift = tl.maximum(-ahead, 0)  # added to all positions where angles are looked up: never negative
    first_q = tile * BLOCK_M // group + ahead
    last_q = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, seqlen_q - 1) + ahead
    queries = (
        batch.to(tl.int64) * stride(q.batch, LAYOUT) + token * stride(q.row, LAYOUT) + head * stride(q.head, LAYOUT)
    )
    log_n = query_scale(angles, scales, rows, position_q)[:, None]
    scale_log2 = scales.score * LOG2_E

    D: tl.constexpr = LAYOUT.block_d
    columns = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, D)
    keys = k_cache.ptr + head_kv * stride(k_cache.head, LAYOUT)
    values = v_cache.ptr + head_kv * stride(v_cache.head, LAYOUT)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for band in tl.static_range(NUM_BANDS):
        start, stop, query_slot, key_slot, _, _, _ = band_fields(bands, band)
        query_x, query_y = pairs_at(q.ptr, queries, LAYOUT)  # [BM, D/2]
        cos, sin = cos_sin_at(angles, query_slot, table_rows, position_q + shift, LAYOUT)
        turned_x, turned_y = turn(query_x.to(tl.float32), query_y.to(tl.float32), cos, sin)
        query_x, query_y = (turned_x * log_n).to(query_x.dtype), (turned_y * log_n).to(query_y.dtype)

        begin, _, _, end = tile_range(first_q, last_q, 1 - stop, -start, length, BLOCK_N)
        begin += (split - begin % num_splits + num_splits) % num_splits  # the split's first block in reach
        for block in tl.range(begin, end, num_splits):
            column = block * BLOCK_N
            page, row = cached_row(slots, batch, first + column + inside(columns, length - column), PAGE_SIZE)
            x, y = pairs_at(
                keys, page * stride(k_cache.batch, LAYOUT) + row * stride(k_cache.row, LAYOUT), LAYOUT
            )  # [BN, D/2]
            if (KEY_TURNS >> band) & 1:
                x, y = turn_keys(x, y, angles, key_slot, table_rows, column + shift, columns, length - column, LAYOUT)
            scores = products(query_x, query_y, x, y, LAYOUT)
            # The same formula in every block, so that a visit in which a row sees nothing changes no bit of it.
            position_k = (column + columns)[None, :]
            visible = in_band(position_q[:, None], position_k, start, stop) & (position_k < length)
            weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum, scale_log2, visible)
            v = rows_at(
                values, page * stride(v_cache.batch, LAYOUT) + row * stride(v_cache.row, LAYOUT), channels, LAYOUT
            )  # [BN, D]
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")

    empty = row_sum == 0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    log_sum = tl.where(empty, float("-inf"), row_max * LN_2 + tl.log(tl.where(empty, 1.0, row_sum)))
    split_batch = split.to(tl.int64) * batches + batch
    tl.store(lse + (split_batch * heads_q + head) * seqlen_q + token, log_sum, mask=exists)
    to = out + ((split_batch * seqlen_q + token) * heads_q + head)[:, None] * LAYOUT.head_dim + channels[None, :]
    written = (
        tl.where(num_splits == 1, exists, exists & (row_sum != 0))[:, None] & (channels < LAYOUT.head_dim)[None, :]
    )
    tl.store(to, acc.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["seqlen_q", "num_splits", "heads_q"])
def combine_splits(
    partial, partial_lse, out, lse, seqlen_q, heads_q, num_splits, LAYOUT: tl.constexpr, BLOCK_S: tl.constexpr
):
    """One row of out per program; partial and partial_lse as attention_decode writes them, float32."""
    D: tl.constexpr = LAYOUT.block_d
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    batch, token, head = row // heads_q // seqlen_q, row // heads_q % seqlen_q, row % heads_q
    lse_row = (batch * heads_q + head) * seqlen_q + token
    channels = tl.arange(0, D)
    has_channel = channels < LAYOUT.head_dim
    splits = tl.arange(0, BLOCK_S)
    largest = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    for first in tl.range(0, num_splits, BLOCK_S):
        largest = tl.maximum(
            largest,
            tl.load(
                partial_lse + (first + splits) * rows + lse_row, mask=first + splits < num_splits, other=float("-inf")
            ),
        )
    largest = tl.max(largest, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # a row without keys
    total = tl.zeros((BLOCK_S,), tl.float32)
    acc = tl.zeros((BLOCK_S, D), tl.float32)
    for first in tl.range(0, num_splits, BLOCK_S):
        log_sum = tl.load(
            partial_lse + (first + splits) * rows + lse_row, mask=first + splits < num_splits, other=float("-inf")
        )
        weights = tl.exp2((log_sum - finite) * LOG2_E)
        at = ((first + splits) * rows + row)[:, None] * LAYOUT.head_dim + channels[None, :]
        piece = tl.load(partial + at, mask=(log_sum > float("-inf"))[:, None] & has_channel[None, :], other=0.0)
        acc += weights[:, None] * piece
        total += weights
    total = tl.sum(total, 0)
    empty = total == 0
    result = tl.sum(acc, 0) / tl.where(empty, 1.0, total)
    tl.store(out + row * LAYOUT.head_dim + channels, result.to(out.dtype.element_ty), mask=has_channel)
    tl.store(lse + lse_row, tl.where(empty, float("-inf"), finite + tl.log2(tl.where(empty, 1.0, total)) * LN_2))
