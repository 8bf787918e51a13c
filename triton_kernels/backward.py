"""Backward: delta, then dK and dV by key tile, then dQ by query tile. No atomics: gradients are bit-equal from run to
run.

Both passes read queries and keys already turned. Gradients of turned rows gather in the band's own frame and are turned
back when the band is done.
"""

import triton
import triton.language as tl

from .tiles import (
    LOG2_E,
    band_fields,
    banded_keys,
    edge_tile,
    head_ptr,
    in_band,
    inside,
    load_rows,
    lse_offset,
    packed_row,
    query_scale,
    sequence,
    store_rows,
    store_turned_back,
    stride,
    tile_channels,
    tile_range,
    turn_tile,
)


@triton.jit(do_not_specialize=["seqlen_q", "max_seqlen_q", "heads_q"])
def attention_delta(
    out,
    grad_out,
    grad_lse,
    delta,
    cu_seqlens_q,
    seqlen_q,
    max_seqlen_q,
    heads_q,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = rowsum(out * grad_out) - grad_lse, float32, shaped like lse. out has no gaps, grad_out is Strided."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    first = tl.program_id(0) % tiles * BLOCK_M
    batch = tl.program_id(0) // tiles // heads_q
    head = tl.program_id(0) // tiles % heads_q
    start, length = sequence(cu_seqlens_q, batch, seqlen_q)
    if first >= length:
        return
    rows = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, LAYOUT.block_d)
    safe = inside(rows, length - first)
    offset = lse_offset(cu_seqlens_q, batch, head, heads_q, start, seqlen_q) + first + rows
    packed = packed_row(cu_seqlens_q, batch, start, seqlen_q) + first
    o = load_rows(out + (packed * heads_q + head) * LAYOUT.head_dim, safe, channels, heads_q * LAYOUT.head_dim, LAYOUT)
    g = load_rows(
        head_ptr(grad_out, batch, start + first, head, LAYOUT), safe, channels, stride(grad_out.row, LAYOUT), LAYOUT
    )
    value = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # [BM]
    if grad_lse is not None:
        value -= tl.load(grad_lse + offset, mask=rows < length - first, other=0.0)
    tl.store(delta + offset, value, mask=rows < length - first)


@triton.jit
def grad_kv_step(
    grad_k,
    grad_v,
    k,
    v,
    queries,
    grads,
    lse,
    delta,
    row,
    position_k,
    ahead,
    length_q,
    start,
    stop,
    scale_log2,
    stride_q,
    stride_g,
    channels_k,
    channels,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Adds one query tile's share to grad_k, grad_v [BN, D]; grad_k is missing the factor of the score."""
    rows = tl.arange(0, BLOCK_M)
    queries += row * stride_q
    grads += row * stride_g
    safe = inside(rows, length_q - row) if EDGE else rows
    q = load_rows(queries, safe, channels_k, stride_q, LAYOUT)  # [BM, D]
    if EDGE:
        row_lse = tl.load(lse + row + rows, mask=rows < length_q - row, other=float("inf"))
        row_delta = tl.load(delta + row + rows, mask=rows < length_q - row, other=0.0)
    else:
        row_lse = tl.load(lse + row + rows)
        row_delta = tl.load(delta + row + rows)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BN, BM]
    weights = tl.exp2(scores * scale_log2 - (row_lse * LOG2_E)[None, :])
    if EDGE:
        weights = tl.where(in_band((row + rows + ahead)[None, :], position_k[:, None], start, stop), weights, 0.0)
    g = load_rows(grads, safe, channels, stride_g, LAYOUT)  # [BM, D]
    grad_v = tl.dot(weights.to(g.dtype), g, grad_v, input_precision="ieee")
    grad_weights = tl.dot(v, tl.trans(g), input_precision="ieee")  # [BN, BM]
    grad_scores = weights * (grad_weights - row_delta[None, :])
    grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
    return grad_k, grad_v


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "max_seqlen_k", "table_rows", "heads_q", "heads_kv"])
def attention_grad_kv(
    turned_q,
    k,
    rotated_k,
    v,
    grad_out,
    lse,
    delta,
    grad_k,
    grad_v,
    angles,
    bands,
    cu_seqlens_q,
    cu_seqlens_k,
    seqlen_q,
    seqlen_k,
    max_seqlen_k,
    table_rows,
    heads_q,
    heads_kv,
    scales,
    LAYOUT: tl.constexpr,
    NUM_BANDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """turned_q Strided (band, row, head), rotated_k Strided (slot, row, head); grad_k, grad_v without gaps.
    bands as in band_fields."""
    tiles = tl.cdiv(max_seqlen_k, BLOCK_N)
    tile = tl.program_id(0) % tiles  # the first keys are seen by most queries
    batch = tl.program_id(0) // tiles // heads_kv
    head_kv = tl.program_id(0) // tiles % heads_kv
    start_q, length_q = sequence(cu_seqlens_q, batch, seqlen_q)
    start_k, length_k = sequence(cu_seqlens_k, batch, seqlen_k)
    first = tile * BLOCK_N
    if first >= length_k:
        return

    columns = tl.arange(0, BLOCK_N)
    D: tl.constexpr = LAYOUT.block_d
    channels = tl.arange(0, D)
    channels_k = tile_channels(LAYOUT)
    ahead = length_k - length_q
    position_k = first + columns  # [BN]
    last = tl.minimum(first + BLOCK_N, length_k) - 1
    safe = inside(columns, length_k - first)
    table_row = first + tl.maximum(-ahead, 0)
    if angles.positions is not None:
        table_row += batch * seqlen_k
    packed_q = packed_row(cu_seqlens_q, batch, start_q, seqlen_q)
    packed_k = packed_row(cu_seqlens_k, batch, start_k, seqlen_k) + first
    group = heads_q // heads_kv
    scale_log2 = scales.score * LOG2_E
    stride_q = stride(turned_q.row, LAYOUT)
    stride_g = stride(grad_out.row, LAYOUT)

    v_tile = load_rows(
        head_ptr(v, batch, start_k + first, head_kv, LAYOUT), safe, channels, stride(v.row, LAYOUT), LAYOUT
    )  # [BN, D]
    acc_k = tl.zeros((BLOCK_N, D), tl.float32)
    acc_v = tl.zeros((BLOCK_N, D), tl.float32)
    for band in tl.static_range(NUM_BANDS):
        start, stop, _, key_slot, keys_slot, _, key_step = band_fields(bands, band)
        keys, stride_k = banded_keys(k, rotated_k, keys_slot, batch, start_k + first, packed_k, head_kv, LAYOUT)
        k_tile = load_rows(keys, safe, channels_k, stride_k, LAYOUT)  # [BN, D]
        if NUM_BANDS > 1:
            acc_k = turn_tile(acc_k, angles, key_step, table_rows, table_row, columns, length_k - first, LAYOUT)

        begin, inner_begin, inner_end, end = tile_range(first - ahead, last - ahead, start, stop - 1, length_q, BLOCK_M)
        # Hoisted out of these loops, addresses and masks of the epilogue take the registers that the accumulators need.
        for member in tl.range(0, group, disable_licm=True):
            head = head_kv * group + member
            queries = head_ptr(turned_q, band, packed_q, head, LAYOUT)
            grads = head_ptr(grad_out, batch, start_q, head, LAYOUT)
            offset = lse_offset(cu_seqlens_q, batch, head, heads_q, start_q, seqlen_q)
            for step in tl.range(0, inner_begin - begin + end - inner_end, disable_licm=True):
                row = edge_tile(step, begin, inner_begin, inner_end) * BLOCK_M
                acc_k, acc_v = grad_kv_step(
                    acc_k,
                    acc_v,
                    k_tile,
                    v_tile,
                    queries,
                    grads,
                    lse + offset,
                    delta + offset,
                    row,
                    position_k,
                    ahead,
                    length_q,
                    start,
                    stop,
                    scale_log2,
                    stride_q,
                    stride_g,
                    channels_k,
                    channels,
                    LAYOUT,
                    BLOCK_M,
                    True,
                )
            for step in tl.range(inner_begin, inner_end, disable_licm=True):
                acc_k, acc_v = grad_kv_step(
                    acc_k,
                    acc_v,
                    k_tile,
                    v_tile,
                    queries,
                    grads,
                    lse + offset,
                    delta + offset,
                    step * BLOCK_M,
                    position_k,
                    ahead,
                    length_q,
                    start,
                    stop,
                    scale_log2,
                    stride_q,
                    stride_g,
                    channels_k,
                    channels,
                    LAYOUT,
                    BLOCK_M,
                    False,
                )

    row_elements = heads_kv * LAYOUT.head_dim
    offset = packed_k * row_elements + head_kv * LAYOUT.head_dim
    store_rows(grad_v + offset, acc_v, columns, channels, row_elements, length_k - first, LAYOUT)
    last_key_slot = band_fields(bands, NUM_BANDS - 1)[3]
    store_turned_back(
        grad_k + offset,
        acc_k,
        angles,
        last_key_slot,
        table_rows,
        table_row,
        columns,
        length_k - first,
        row_elements,
        scales.score,
        LAYOUT,
    )


@triton.jit
def grad_q_step(
    grad_q,
    q,
    g,
    row_lse,
    row_delta,
    keys,
    values,
    column,
    position_q,
    length_k,
    start,
    stop,
    scale_log2,
    stride_k,
    stride_v,
    channels_k,
    channels,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Adds one key tile's share to grad_q [BM, D], which is missing the factor of the score."""
    rows = tl.arange(0, BLOCK_N)
    keys += column * stride_k
    values += column * stride_v
    safe = inside(rows, length_k - column) if EDGE else rows
    k = load_rows(keys, safe, channels_k, stride_k, LAYOUT)  # [BN, D]
    v = load_rows(values, safe, channels, stride_v, LAYOUT)  # [BN, D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BM, BN]
    weights = tl.exp2(scores * scale_log2 - (row_lse * LOG2_E)[:, None])
    if EDGE:
        position_k = (column + rows)[None, :]
        weights = tl.where(
            in_band(position_q[:, None], position_k, start, stop) & (position_k < length_k), weights, 0.0
        )
    grad_weights = tl.dot(g, tl.trans(v), input_precision="ieee")  # [BM, BN]
    grad_scores = weights * (grad_weights - row_delta[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision="ieee")


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "max_seqlen_q", "table_rows", "heads_q", "heads_kv"])
def attention_grad_q(
    turned_q,
    k,
    rotated_k,
    v,
    grad_out,
    lse,
    delta,
    grad_q,
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
    LAYOUT: tl.constexpr,
    NUM_BANDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_q without gaps; the other arguments as in attention_grad_kv."""
    tiles = tl.cdiv(max_seqlen_q, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
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
    safe = inside(rows, length_q - first)
    ahead = length_k - length_q
    position_q = first + rows + ahead  # [BM]
    last = tl.minimum(first + BLOCK_M, length_q) - 1 + ahead
    table_row = first + tl.maximum(ahead, 0)
    if angles.positions is not None:
        table_row += batch * seqlen_q
    packed_q = packed_row(cu_seqlens_q, batch, start_q, seqlen_q) + first
    packed_k = packed_row(cu_seqlens_k, batch, start_k, seqlen_k)
    scale_log2 = scales.score * LOG2_E
    stride_v = stride(v.row, LAYOUT)
    values = head_ptr(v, batch, start_k, head_kv, LAYOUT)

    g = load_rows(
        head_ptr(grad_out, batch, start_q + first, head, LAYOUT), safe, channels, stride(grad_out.row, LAYOUT), LAYOUT
    )  # [BM, D]
    offset = lse_offset(cu_seqlens_q, batch, head, heads_q, start_q, seqlen_q) + first + safe
    row_lse = tl.load(lse + offset)
    row_delta = tl.load(delta + offset)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for band in tl.static_range(NUM_BANDS):
        start, stop, _, _, keys_slot, query_step, _ = band_fields(bands, band)
        keys, stride_k = banded_keys(k, rotated_k, keys_slot, batch, start_k, packed_k, head_kv, LAYOUT)
        queries = head_ptr(turned_q, band, packed_q, head, LAYOUT)
        q = load_rows(queries, safe, channels_k, stride(turned_q.row, LAYOUT), LAYOUT)  # [BM, D]
        if NUM_BANDS > 1:
            acc = turn_tile(acc, angles, query_step, table_rows, table_row, rows, length_q - first, LAYOUT)

        begin, inner_begin, inner_end, end = tile_range(first + ahead, last, 1 - stop, -start, length_k, BLOCK_N)
        for step in tl.range(0, inner_begin - begin + end - inner_end):
            column = edge_tile(step, begin, inner_begin, inner_end) * BLOCK_N
            acc = grad_q_step(
                acc,
                q,
                g,
                row_lse,
                row_delta,
                keys,
                values,
                column,
                position_q,
                length_k,
                start,
                stop,
                scale_log2,
                stride_k,
                stride_v,
                channels_k,
                channels,
                LAYOUT,
                BLOCK_N,
                True,
            )
        for step in tl.range(inner_begin, inner_end):
            acc = grad_q_step(
                acc,
                q,
                g,
                row_lse,
                row_delta,
                keys,
                values,
                step * BLOCK_N,
                position_q,
                length_k,
                start,
                stop,
                scale_log2,
                stride_k,
                stride_v,
                channels_k,
                channels,
                LAYOUT,
                BLOCK_N,
                False,
            )

    last_query_slot = band_fields(bands, NUM_BANDS - 1)[2]
    scale = query_scale(angles, scales, table_row + safe, position_q) * scales.score
    store_turned_back(
        grad_q + (packed_q * heads_q + head) * LAYOUT.head_dim,
        acc,
        angles,
        last_query_slot,
        table_rows,
        table_row,
        rows,
        length_q - first,
        heads_q * LAYOUT.head_dim,
        scale[:, None],
        LAYOUT,
    )
