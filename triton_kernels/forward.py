"""Forward: for every tile of queries, for every band, the queries are turned once and meet the band's key tiles.

All bands share one online softmax. Tiles inside a band are not masked, tiles outside are not visited.
"""

import triton
import triton.language as tl

from .tiles import (
    LN_2,
    LOG2_E,
    band_fields,
    banded_keys,
    edge_tile,
    head_ptr,
    in_band,
    inside,
    load_rows,
    load_tile,
    lse_offset,
    online_softmax,
    packed_row,
    query_scale,
    sequence,
    store_rows,
    stride,
    tile_channels,
    tile_range,
)


@triton.jit
def attend_tile(acc, row_max, row_sum, q, keys, values, column, position_q, length_k, start, stop, scale_log2,
                stride_k, stride_v, channels_k, channels, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    rows = tl.arange(0, BLOCK_N)
    safe = inside(rows, length_k - column) if EDGE else rows
    keys += column * stride_k
    values += column * stride_v
    k = load_rows(keys, safe, channels_k, stride_k, LAYOUT)  # [BN, D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BM, BN]
    visible = None
    if EDGE:
        position_k = (column + rows)[None, :]
        visible = in_band(position_q[:, None], position_k, start, stop) & (position_k < length_k)
    weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum, scale_log2, visible)
    v = load_rows(values, safe, channels, stride_v, LAYOUT)  # [BN, D]
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows"])
def attention_forward(q, k, turned_keys, v, out, lse, angles, bands, cu_seqlens_q, cu_seqlens_k,
                      seqlen_q, seqlen_k, max_seqlen_q, table_rows, heads_q, heads_kv, scales,
                      LAYOUT: tl.constexpr, NUM_BANDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """q, k, v Strided; turned_keys Strided (slot, row, head); out (rows, heads_q, head_dim), lse float32: no gaps.
    bands as in band_fields."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # longest first under a causal mask
    batch = tl.program_id(0) // tiles // heads_q
    head = tl.program_id(0) // tiles % heads_q
    head_kv = head // (heads_q // heads_kv)
    start_q, length_q = sequence(cu_seqlens_q, batch, seqlen_q)
    start_k, length_k = sequence(cu_seqlens_k, batch, seqlen_k)
    first = tile * BLOCK_M
    if first >= length_q:
        return

    rows = tl.arange(0, BLOCK_M)
    D: tl.constexpr = LAYOUT.block_d
    channels = tl.arange(0, D)
    channels_k = tile_channels(LAYOUT)
    ahead = length_k - length_q  # bottom-right alignment
    position_q = first + rows + ahead  # [BM]
    last = tl.minimum(first + BLOCK_M, length_q) - 1 + ahead
    table_row = first + tl.maximum(ahead, 0)  # never negative; turned keys stand at j + max(-ahead, 0)
    if angles.positions is not None:
        table_row += batch * seqlen_q

    stride_q = stride(q.row, LAYOUT)
    queries = head_ptr(q, batch, start_q + first, head, LAYOUT)
    stride_v = stride(v.row, LAYOUT)
    values = head_ptr(v, batch, start_k, head_kv, LAYOUT)
    packed_k = packed_row(cu_seqlens_k, batch, start_k, seqlen_k)
    log_n = query_scale(angles, scales, table_row + inside(rows, length_q - first), position_q)
    scale_log2 = scales.score * LOG2_E

    acc = tl.zeros((BLOCK_M, D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for band in tl.static_range(NUM_BANDS):
        start, stop, query_slot, _, keys_slot, _, _ = band_fields(bands, band)
        # A value out of a branch: seen through the joins, Triton would pick a dot operand layout that ldmatrix cannot load.
        if query_slot > 0:
            turned = load_tile(queries, angles, query_slot, table_rows, table_row, rows, length_q - first, stride_q, log_n, True, LAYOUT)  # [BM, D]
        else:
            turned = load_tile(queries, angles, query_slot, table_rows, table_row, rows, length_q - first, stride_q, log_n, False, LAYOUT)

        keys, stride_k = banded_keys(k, turned_keys, keys_slot, batch, start_k, packed_k, head_kv, LAYOUT)
        begin, inner_begin, inner_end, end = tile_range(first + ahead, last, 1 - stop, -start, length_k, BLOCK_N)
        for step in tl.range(0, inner_begin - begin + end - inner_end):
            column = edge_tile(step, begin, inner_begin, inner_end) * BLOCK_N
            acc, row_max, row_sum = attend_tile(acc, row_max, row_sum, turned, keys, values, column, position_q, length_k,
                                                start, stop, scale_log2, stride_k, stride_v, channels_k, channels, LAYOUT, BLOCK_N, True)
        for step in tl.range(inner_begin, inner_end):
            acc, row_max, row_sum = attend_tile(acc, row_max, row_sum, turned, keys, values, step * BLOCK_N, position_q, length_k,
                                                start, stop, scale_log2, stride_k, stride_v, channels_k, channels, LAYOUT, BLOCK_N, False)

    empty = row_sum == 0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    packed_q = packed_row(cu_seqlens_q, batch, start_q, seqlen_q) + first
    store_rows(out + (packed_q * heads_q + head) * LAYOUT.head_dim, acc, rows, channels, heads_q * LAYOUT.head_dim, length_q - first, LAYOUT)
    log_sum = tl.where(empty, float("-inf"), row_max * LN_2 + tl.log(tl.where(empty, 1.0, row_sum)))
    tl.store(lse + lse_offset(cu_seqlens_q, batch, head, heads_q, start_q, seqlen_q) + first + rows, log_sum, mask=rows < length_q - first)
