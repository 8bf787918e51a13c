"""Forward: for every tile of queries, for every band, the queries are turned once and meet the band's key tiles.

All bands share one online softmax. Tiles inside a band are not masked, tiles outside are not visited. Over a cache, raw
keys and values are read where they lie; only keys that a band turns have been copied, by turn_cached_rows.
"""

import triton
import triton.language as tl

from .tiles import (
    LN_2,
    LOG2_E,
    Rows,
    band_fields,
    banded_keys,
    cache_bounds,
    cached_row,
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
    rows_at,
    sequence,
    store_rows,
    stride,
    tile_channels,
    tile_range,
)


@triton.jit
def attend_tile(
    acc,
    row_max,
    row_sum,
    q,
    keys,
    values,
    slots,
    batch,
    first_slot,
    first_key,
    column,
    position_q,
    length_k,
    start,
    stop,
    scale_log2,
    channels_k,
    channels,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    EDGE: tl.constexpr,
):
    """keys and values are Rows; first_key the first one that may be read, None where that is the sequence's first."""
    rows = tl.arange(0, BLOCK_N)
    safe = inside(rows, length_k - column) if EDGE else rows
    if EDGE and first_key is not None:
        safe = tl.maximum(safe, first_key - column)
    if PAGE_SIZE > 0:
        page, row = cached_row(slots, batch, first_slot + column + safe, PAGE_SIZE)
    if PAGE_SIZE > 0 and not TURNED:
        k = rows_at(keys.ptr, page * keys.page + row * keys.row, channels_k, LAYOUT)  # [BN, D]
    else:
        k = load_rows(keys.ptr + column * keys.row, safe, channels_k, keys.row, LAYOUT)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BM, BN]
    visible = None
    if EDGE:
        position_k = (column + rows)[None, :]
        visible = in_band(position_q[:, None], position_k, start, stop) & (position_k < length_k)
    weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum, scale_log2, visible)
    if PAGE_SIZE > 0:
        v = rows_at(values.ptr, page * values.page + row * values.row, channels, LAYOUT)  # [BN, D]
    else:
        v = load_rows(values.ptr + column * values.row, safe, channels, values.row, LAYOUT)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows", "heads_q", "heads_kv"])
def attention_forward(
    q,
    k,
    rotated_k,
    v,
    out,
    lse,
    angles,
    bands,
    cu_seqlens_q,
    cu_seqlens_k,
    seqlen_q,
    seqlen_k,
    max_seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    scales,
    slots,
    LAYOUT: tl.constexpr,
    NUM_BANDS: tl.constexpr,
    KEY_TURNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """q, k, v Strided; rotated_k Strided (slot, row, head); out (rows, heads_q, head_dim), lse float32: no gaps.
    bands as in band_fields. Where slots has seqlens, k and v are a cache (batch or page, row, heads_kv) and seqlen_k
    counts the rows that each sequence has in rotated_k. Where PAGE_SIZE is not 0, bit b of KEY_TURNS tells whether
    band b turns its keys."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # longest first under a causal mask
    batch = tl.program_id(0) // tiles // heads_q
    head = tl.program_id(0) // tiles % heads_q
    head_kv = head // (heads_q // heads_kv)
    start_q, length_q = sequence(cu_seqlens_q, batch, seqlen_q)
    if slots.seqlens is None:
        start_k, length_k = sequence(cu_seqlens_k, batch, seqlen_k)
    else:
        start_k, length_k = cache_bounds(slots, batch)
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
    if PAGE_SIZE > 0:
        values = Rows(head_ptr(v, 0, 0, head_kv, LAYOUT), stride_v, stride(v.batch, LAYOUT))
    else:
        values = Rows(head_ptr(v, batch, start_k, head_kv, LAYOUT), stride_v, None)
    packed_k = packed_row(cu_seqlens_k, batch, start_k, seqlen_k)
    turned_begin = None
    if slots.seqlens is not None:
        turned_begin = tl.maximum(length_k - seqlen_k, 0)
        packed_k -= turned_begin
    log_n = query_scale(angles, scales, table_row + inside(rows, length_q - first), position_q)
    scale_log2 = scales.score * LOG2_E

    acc = tl.zeros((BLOCK_M, D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for band in tl.static_range(NUM_BANDS):
        start, stop, query_slot, _, keys_slot, _, _ = band_fields(bands, band)
        # A value out of a branch: seen through the joins, Triton would pick a dot operand layout that ldmatrix cannot
        # load.
        if query_slot > 0:
            turned = load_tile(
                queries,
                angles,
                query_slot,
                table_rows,
                table_row,
                rows,
                length_q - first,
                stride_q,
                log_n,
                True,
                LAYOUT,
            )  # [BM, D]
        else:
            turned = load_tile(
                queries,
                angles,
                query_slot,
                table_rows,
                table_row,
                rows,
                length_q - first,
                stride_q,
                log_n,
                False,
                LAYOUT,
            )

        if PAGE_SIZE > 0:
            ptr, row = banded_keys(k, rotated_k, keys_slot, 0, 0, packed_k, head_kv, LAYOUT)
            keys = Rows(ptr, row, stride(k.batch, LAYOUT))
        else:
            ptr, row = banded_keys(k, rotated_k, keys_slot, batch, start_k, packed_k, head_kv, LAYOUT)
            keys = Rows(ptr, row, None)
        first_key = None if slots.seqlens is None else tl.where(keys_slot < 0, 0, turned_begin)
        begin, inner_begin, inner_end, end = tile_range(first + ahead, last, 1 - stop, -start, length_k, BLOCK_N)
        for step in tl.range(0, inner_begin - begin + end - inner_end):
            column = edge_tile(step, begin, inner_begin, inner_end) * BLOCK_N
            acc, row_max, row_sum = attend_tile(
                acc,
                row_max,
                row_sum,
                turned,
                keys,
                values,
                slots,
                batch,
                start_k,
                first_key,
                column,
                position_q,
                length_k,
                start,
                stop,
                scale_log2,
                channels_k,
                channels,
                LAYOUT,
                BLOCK_N,
                PAGE_SIZE,
                (KEY_TURNS >> band) & 1,
                True,
            )
        for step in tl.range(inner_begin, inner_end):
            acc, row_max, row_sum = attend_tile(
                acc,
                row_max,
                row_sum,
                turned,
                keys,
                values,
                slots,
                batch,
                start_k,
                first_key,
                step * BLOCK_N,
                position_q,
                length_k,
                start,
                stop,
                scale_log2,
                channels_k,
                channels,
                LAYOUT,
                BLOCK_N,
                PAGE_SIZE,
                (KEY_TURNS >> band) & 1,
                False,
            )

    empty = row_sum == 0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    packed_q = packed_row(cu_seqlens_q, batch, start_q, seqlen_q) + first
    store_rows(
        out + (packed_q * heads_q + head) * LAYOUT.head_dim,
        acc,
        rows,
        channels,
        heads_q * LAYOUT.head_dim,
        length_q - first,
        LAYOUT,
    )
    log_sum = tl.where(empty, float("-inf"), row_max * LN_2 + tl.log(tl.where(empty, 1.0, row_sum)))
    tl.store(
        lse + lse_offset(cu_seqlens_q, batch, head, heads_q, start_q, seqlen_q) + first + rows,
        log_sum,
        mask=rows < length_q - first,
    )
