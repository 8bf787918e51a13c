"""Mutants of the Triton kernels. The tests run them in Triton's interpreter."""

from .breaks import Group

FORWARD = (
    "tests/test_needles.py",
    "tests/test_tiles.py",
    "tests/test_bands.py",
    "tests/test_accuracy.py",
    "-k",
    "triton",
)
BACKWARD = ("tests/test_backward.py", "tests/test_accuracy.py", "tests/test_varlen.py", "-k", "triton")
DECODE = (
    "tests/test_decode_triton.py",
    "tests/test_decode.py",
    "tests/test_decode_varlen.py",
    "-k",
    "triton or Triton or not cpu",
)
VARLEN = ("tests/test_varlen.py", "tests/test_decode_varlen.py", "-k", "triton")

GROUPS = (
    Group(
        "tiles",
        "triton_kernels/tiles.py",
        FORWARD,
        (
            ("the window reaches one key too far", "distance < band.stop)\n", "distance <= band.stop)\n"),
            (
                "a query sees one key too many behind the band",
                "return VisibleRange(position_q - band.stop + 1, tl.minimum(position_q - band.start + 1, length))",
                "return VisibleRange(position_q - band.stop, tl.minimum(position_q - band.start + 1, length))",
            ),
            (
                "a query misses the first key of the band",
                "return VisibleRange(position_q - band.stop + 1, tl.minimum(position_q - band.start + 1, length))",
                "return VisibleRange(position_q - band.stop + 2, tl.minimum(position_q - band.start + 1, length))",
            ),
            (
                "a query sees the key after its own",
                "return VisibleRange(position_q - band.stop + 1, tl.minimum(position_q - band.start + 1, length))",
                "return VisibleRange(position_q - band.stop + 1, tl.minimum(position_q - band.start + 2, length))",
            ),
            (
                "keys beyond the last are seen",
                "return VisibleRange(position_q - band.stop + 1, tl.minimum(position_q - band.start + 1, length))",
                "return VisibleRange(position_q - band.stop + 1, position_q - band.start + 1)",
            ),
            (
                "the first tile of a band is dropped",
                "    begin = tl.maximum(of_first.first, 0) // BLOCK\n",
                "    begin = tl.cdiv(tl.maximum(of_first.first, 0), BLOCK)\n",
            ),
            (
                "the last tile of a band is dropped",
                "    end = tl.cdiv(tl.maximum(tl.minimum(of_last.stop, length), 0), BLOCK)\n",
                "    end = tl.maximum(tl.minimum(of_last.stop, length), 0) // BLOCK\n",
            ),
            (
                "the first inner tile comes one too early",
                "    inner_begin = tl.cdiv(tl.maximum(of_last.first, 0), BLOCK)\n",
                "    inner_begin = tl.maximum(of_last.first, 0) // BLOCK\n",
            ),
            (
                "the first inner tile is off by one key",
                "    inner_begin = tl.cdiv(tl.maximum(of_last.first, 0), BLOCK)\n",
                "    inner_begin = tl.cdiv(tl.maximum(of_last.first - 1, 0), BLOCK)\n",
            ),
            (
                "the last inner tile comes one too late",
                "    inner_end = tl.maximum(tl.minimum(of_first.stop, length), 0) // BLOCK\n",
                "    inner_end = tl.cdiv(tl.maximum(tl.minimum(of_first.stop, length), 0), BLOCK)\n",
            ),
            (
                "the last inner tile is off by one key",
                "    inner_end = tl.maximum(tl.minimum(of_first.stop, length), 0) // BLOCK\n",
                "    inner_end = tl.maximum(tl.minimum(of_first.stop + 1, length), 0) // BLOCK\n",
            ),
            (
                "an inner tile is visited twice",
                "tl.where(step >= tiles.inner_begin - tiles.begin, tiles.inner_end - tiles.inner_begin, 0)\n",
                "tl.where(step >= tiles.inner_begin - tiles.begin, tiles.inner_end - tiles.inner_begin - 1, 0)\n",
            ),
            (
                "a tile of packed rows starts at the wrong position",
                "        start = first + packed.to(tl.int32)\n",
                "        start = first\n",
            ),
            (
                "positions of queries ahead of the keys are not shifted",
                "        start = first + tl.maximum(length_other - length, 0)\n",
                "        start = first + length_other - length\n",
            ),
            (
                "rows of the other head are read",
                "    offset = batch * stride_batch + start * stride_row + head * decode_stride(x.stride_head, SHAPE)\n",
                "    offset = batch * stride_batch + start * stride_row + (head + 1) * decode_stride(x.stride_head, SHAPE)\n",
            ),
            (
                "the batch is left out of an address",
                "    offset = batch * stride_batch + start * stride_row + head * decode_stride(x.stride_head, SHAPE)\n",
                "    offset = start * stride_row + head * decode_stride(x.stride_head, SHAPE)\n",
            ),
            (
                "rows that do not exist are stored",
                "    exists = row_exists(rows)[:, None] & (channels < HEAD_DIM)[None, :]\n",
                "    exists = (rows.index >= 0)[:, None] & (channels < HEAD_DIM)[None, :]\n",
            ),
            (
                "channels beyond head_dim are stored",
                "    exists = row_exists(rows)[:, None] & (channels < HEAD_DIM)[None, :]\n",
                "    exists = row_exists(rows)[:, None] & (channels >= 0)[None, :]\n",
            ),
            (
                "channels of v beyond head_dim_v are read",
                "mask=(channels < SHAPE.head_dim_v)[None, :]",
                "mask=(channels >= 0)[None, :]",
            ),
            (
                "a band reads raw keys where it should read rotated ones",
                "    ptr = tl.where(k_copy < 0, raw.ptr, copy.ptr)\n",
                "    ptr = tl.where(k_copy <= 0, raw.ptr, copy.ptr)\n",
            ),
            (
                "the last row of a tile is read twice",
                "    return tl.minimum(rows, count - 1)\n",
                "    return tl.minimum(rows, count - 2)\n",
            ),
        ),
    ),
    Group(
        "tiles",
        "triton_kernels/tiles.py",
        VARLEN,
        (
            (
                "a packed sequence takes a row of the next",
                "        return start.to(tl.int64), stop - start\n",
                "        return start.to(tl.int64), stop - start + 1\n",
            ),
            (
                "a packed sequence starts one row late",
                "        return start.to(tl.int64), stop - start\n",
                "        return start.to(tl.int64) + 1, stop - start - 1\n",
            ),
            (
                "lse of packed rows goes to another head",
                "        return head.to(tl.int64) * seqlen + start\n",
                "        return start.to(tl.int64)\n",
            ),
            (
                "copied keys of packed queries start at the wrong row",
                "        start = seq.start_q + seq.start_q // (decode_int(cache.decode_seqlen) + 1) * rows\n",
                "        start = seq.start_q + seq.start_q // decode_int(cache.decode_seqlen) * rows\n",
            ),
        ),
    ),
    Group(
        "softmax",
        "triton_kernels/softmax.py",
        FORWARD,
        (
            (
                "the accumulator is not rescaled",
                "SoftmaxState(state.acc * rescale[:, None], new_max, row_sum)",
                "SoftmaxState(state.acc, new_max, row_sum)",
            ),
            (
                "the row sum is not rescaled",
                "state.row_sum * rescale + tl.sum(weights, 1)",
                "state.row_sum + tl.sum(weights, 1)",
            ),
            ("the maximum lacks the scale", "tl.max(scores, 1) * scale_log2)", "tl.max(scores, 1))"),
            ("lse lacks ln 2", "state.row_max * LN_2 + tl.log(row_sum)", "state.row_max + tl.log(row_sum)"),
            ("lse lacks the sum", "state.row_max * LN_2 + tl.log(row_sum)", "state.row_max * LN_2"),
            (
                "a row without keys is NaN",
                '        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet\n',
                "        finite_max = new_max\n",
            ),
            (
                "weights are powers of e in base 2",
                "tl.maximum(score_scale * LOG2_E, MIN_SCALE)",
                "tl.maximum(score_scale, MIN_SCALE)",
            ),
            ("a scale of 0 gives NaN", "tl.maximum(score_scale * LOG2_E, MIN_SCALE)", "score_scale * LOG2_E"),
        ),
    ),
    Group(
        "rotation",
        "triton_kernels/rotation.py",
        FORWARD,
        (
            (
                "rotation by the negative angle",
                "first * cos - second * sin, second * cos + first * sin",
                "first * cos + second * sin, second * cos - first * sin",
            ),
            (
                "one member of a pair is not rotated",
                "first * cos - second * sin, second * cos + first * sin",
                "first * cos - second * sin, second",
            ),
            (
                "the coarse row is one too early",
                "    coarse = ptr + (position // FINE_ROWS + FINE_ROWS) * D\n",
                "    coarse = ptr + (position // FINE_ROWS + FINE_ROWS - 1) * D\n",
            ),
            (
                "the fine row is one too far",
                "    fine = ptr + (position % FINE_ROWS) * D\n",
                "    fine = ptr + ((position + 1) % FINE_ROWS) * D\n",
            ),
            (
                "the second half of the pairs repeats the first",
                "    NEXT: tl.constexpr = SHAPE.block_d // 4\n    x, y = load_rotated_chunk(view, table, rotation, rows, scale, 0, ROTATE, SHAPE)\n",
                "    NEXT: tl.constexpr = 0\n    x, y = load_rotated_chunk(view, table, rotation, rows, scale, 0, ROTATE, SHAPE)\n",
            ),
            ("log n counts from 0", "tl.log(tl.maximum(position, 0.0) + 1.0)", "tl.log(tl.maximum(position, 1.0))"),
            (
                "log n has no floor",
                "tl.maximum(scheme.log_n_factor * tl.log(tl.maximum(position, 0.0) + 1.0), scheme.log_n_floor)",
                "scheme.log_n_factor * tl.log(tl.maximum(position, 0.0) + 1.0) + scheme.log_n_floor",
            ),
            (
                "blocks of rows are rotated by the wrong rows",
                "(tl.arange(0, M // BLOCK) * BLOCK)[:, None] * D",
                "(tl.arange(0, M // BLOCK))[:, None] * D",
            ),
            (
                "interleaved pairs are split as halves",
                "    if SHAPE.interleaved or FULL or UNROTATED:\n",
                "    if FULL or UNROTATED:\n",
            ),
            (
                "channels beyond rotary_dim rotate",
                "        rest = tl.where(vector < (HALF + REST) // VEC, unrotated, padding)\n        vector = tl.where(vector < HALF // VEC, rotated, rest)\n",
                "        vector = rotated\n",
            ),
        ),
    ),
    Group(
        "forward",
        "triton_kernels/rotation.py",
        ("tests/test_query_scales.py",),
        (("steps of log n are not rounded down", "steps = tl.floor(tl.div_rn(", "steps = (tl.div_rn("),),
    ),
    Group(
        "rotation",
        "triton_kernels/rotation.py",
        BACKWARD,
        (
            (
                "gradients are rotated forth, not back",
                "    x, y = rotate(x, y, cos, -sin)\n    store_pairs",
                "    x, y = rotate(x, y, cos, sin)\n    store_pairs",
            ),
            (
                "the gradient of unrotated channels lacks the scale",
                "store_rows(view, tile * scale, rows, tile_channels(SHAPE), SHAPE)",
                "store_rows(view, tile, rows, tile_channels(SHAPE), SHAPE)",
            ),
            (
                "a gradient is stored without its scale",
                "store_pairs(view, x * scale, y * scale, rows, FIRST, SHAPE)",
                "store_pairs(view, x, y, rows, FIRST, SHAPE)",
            ),
        ),
    ),
    Group(
        "rotate",
        "triton_kernels/rotate.py",
        FORWARD,
        (
            (
                "heads of the last program are left out",
                "    for head in range(begin, tl.minimum(end, heads)):\n        view = head_view(x, batch",
                "    for head in range(begin, tl.minimum(end, heads - 1)):\n        view = head_view(x, batch",
            ),
            (
                "log n of the rotated queries goes by the row",
                "first + rows.index + length_other - length)[:, None]",
                "first + rows.index)[:, None]",
            ),
        ),
    ),
    Group(
        "rotate",
        "triton_kernels/rotate.py",
        DECODE,
        (
            (
                "a tile of cached keys that a band reads is skipped",
                "(first + SHAPE.block_m <= seq.ahead - stop + 1)",
                "(first <= seq.ahead - stop + 1)",
            ),
            (
                "cached keys are rotated one position off",
                "    rows = Rows(tl.arange(0, SHAPE.block_m), first + shift, first, seq.length_k)\n",
                "    rows = Rows(tl.arange(0, SHAPE.block_m), first + shift + 1, first, seq.length_k)\n",
            ),
        ),
    ),
    Group(
        "forward",
        "triton_kernels/forward.py",
        FORWARD,
        (
            (
                "a query group reads the wrong key head",
                "    head_kv = head // (heads_q // heads_kv)\n    queries",
                "    head_kv = head % heads_kv\n    queries",
            ),
            (
                "queries lie one position early",
                "    position = first + rows.index + seq.ahead  # [BM]\n",
                "    position = first + rows.index + seq.ahead - 1  # [BM]\n",
            ),
            (
                "the last rows of a tile see the next tile",
                "    last = tl.minimum(first + SHAPE.block_m, seq.length_q) - 1 + seq.ahead\n",
                "    last = first + SHAPE.block_m - 1 + seq.ahead\n",
            ),
            (
                "the last query of a tile loses its tile",
                "    last = tl.minimum(first + SHAPE.block_m, seq.length_q) - 1 + seq.ahead\n",
                "    last = tl.minimum(first + SHAPE.block_m, seq.length_q) - 2 + seq.ahead\n",
            ),
            (
                "log n of the first tile serves all",
                "    log_n = log_n_scale(scheme, rows.start + existing_rows(rows), position)\n",
                "    log_n = log_n_scale(scheme, rows.start + existing_rows(rows), position - first)\n",
            ),
            (
                "edge tiles are not masked",
                "column, pages, (SHAPE.rotated_bands >> b) & 1, True, SHAPE)",
                "column, pages, (SHAPE.rotated_bands >> b) & 1, False, SHAPE)",
            ),
            (
                "lse lies one row early",
                "packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q) + first\n    out_rows",
                "packed_row(cu_seqlens.q, batch, seq.start_q, seqlen_q)\n    out_rows",
            ),
            (
                "an inner tile is dropped",
                "        for step in tl.range(tiles.inner_begin, tiles.inner_end):\n            next_pages",
                "        for step in tl.range(tiles.inner_begin + 1, tiles.inner_end):\n            next_pages",
            ),
            (
                "an edge tile is dropped",
                "        for step in tl.range(0, edge_count(tiles)):\n            next_pages",
                "        for step in tl.range(1, edge_count(tiles)):\n            next_pages",
            ),
        ),
    ),
    Group(
        "backward",
        "triton_kernels/backward.py",
        BACKWARD,
        (
            (
                "delta lacks the gradient of lse",
                "        delta -= tl.load(grad_lse",
                "        delta -= 0 * tl.load(grad_lse",
            ),
            (
                "delta has the wrong sign",
                "    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # [BM]\n",
                "    delta = -tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # [BM]\n",
            ),
            ("lse of the backward is in natural units", 'float("inf"), row_lse * LOG2_E)', 'float("inf"), row_lse)'),
            (
                "rows without keys get weights",
                '    lse_log2 = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)\n',
                "    lse_log2 = row_lse * LOG2_E\n",
            ),
            (
                "dK lacks a rotation between bands",
                "rotate_tile(grad.k, table, band.dk_step, before, rows, SHAPE), grad.v)",
                "grad.k, grad.v)",
            ),
            (
                "dK is rotated back by the first band",
                "    store_rotated_back(to_k, grad.k, table, last_band.k_rotation,",
                "    store_rotated_back(to_k, grad.k, table, load_band(scheme.bands, 0).k_rotation,",
            ),
            (
                "dQ lacks a rotation between bands",
                "            acc = rotate_tile(acc, table, band.dq_step, before, rows, SHAPE)\n",
                "            acc = acc\n",
            ),
            (
                "dQ lacks log n",
                "    scale = log_n_scale(scheme, rows.start + loaded, position) * scheme.score_scale\n",
                "    scale = log_n_scale(scheme, rows.start + loaded, position) * 0 + scheme.score_scale\n",
            ),
            (
                "dQ lacks the softmax scale",
                "    scale = log_n_scale(scheme, rows.start + loaded, position) * scheme.score_scale\n",
                "    scale = log_n_scale(scheme, rows.start + loaded, position)\n",
            ),
            (
                "dK lacks the softmax scale",
                "last_band.k_rotation, rows, scheme.score_scale, SHAPE)",
                "last_band.k_rotation, rows, 1.0, SHAPE)",
            ),
            (
                "only one query head of a group counts",
                "        for member in tl.range(0, group, disable_licm=True):\n",
                "        for member in tl.range(0, 1, disable_licm=True):\n",
            ),
            (
                "statistics of the next head are read",
                "            head_statistics = statistics + statistics_offset(packed_q, batch, head, statistics_rows)\n",
                "            head_statistics = statistics + statistics_offset(packed_q, batch, head_kv, statistics_rows)\n",
            ),
            (
                "dV uses masked-out weights of edge tiles",
                '        scores = tl.where(is_visible(keys.visible, row, SHAPE.block_m), scores, float("-inf"))\n',
                '        scores = tl.where(is_visible(keys.visible, row - 1, SHAPE.block_m), scores, float("-inf"))\n',
            ),
            (
                "a query tile of dK is dropped",
                "            for step in tl.range(tiles.inner_begin, tiles.inner_end, disable_licm=True):\n",
                "            for step in tl.range(tiles.inner_begin, tiles.inner_end - 1, disable_licm=True):\n",
            ),
            (
                "a key tile of dQ is dropped",
                "        for step in tl.range(tiles.inner_begin, tiles.inner_end):\n            acc",
                "        for step in tl.range(tiles.inner_begin, tiles.inner_end - 1):\n            acc",
            ),
            (
                "dQ reads keys of the wrong copy",
                "        keys = KeyRows(view, values, channels_k, channels, seq.length_k)\n",
                "        keys = KeyRows(raw, values, channels_k, channels, seq.length_k)\n",
            ),
            (
                "dQ of a band is rotated by the next (atomics)",
                "                rotation = load_band(scheme.bands, b).q_rotation\n",
                "                rotation = load_band(scheme.bands, 0).q_rotation\n",
            ),
            (
                "keys behind the last add to dQ (atomics)",
                "    stop = tl.where(row_exists(rows), visible.stop, visible.first)\n",
                "    stop = visible.stop\n",
            ),
        ),
    ),
    Group(
        "decode",
        "triton_kernels/decode.py",
        DECODE,
        (
            (
                "the first new key overwrites the last old one",
                "        slot = clamp(tl.load(cache.seqlens + batch), 0, capacity) + token\n",
                "        slot = clamp(tl.load(cache.seqlens + batch), 0, capacity) + token - 1\n",
            ),
            (
                "new keys go to a full cache",
                "        exists = (token < count) & (slot < capacity)\n",
                "        exists = token < count\n",
            ),
            (
                "a negative slot is written to",
                "        exists = (token < count) & (slot >= 0)\n",
                "        exists = token < count\n",
            ),
            (
                "pages that do not exist are written to",
                "    return page, row, exists & (page >= 0) & (page < decode_int(cache.pages))\n",
                "    return page, row, exists & (page >= 0)\n",
            ),
            (
                "values are stored as keys",
                "    tl.store(v_cache.ptr + to_v + channels[None, :], new_v, mask=mask)\n",
                "    tl.store(v_cache.ptr + to_v + channels[None, :], new_k, mask=mask)\n",
            ),
            (
                "the positions of a decode step are not shifted",
                "    shift = tl.maximum(-ahead, 0) if scheme.maps is None else 0\n",
                "    shift = 0\n",
            ),
            (
                "cached keys are rotated one position off",
                "        rows = Rows(columns, column + keys.shift, column, keys.length)\n",
                "        rows = Rows(columns, column + keys.shift + 1, column, keys.length)\n",
            ),
            (
                "a split misses its first block",
                "    begin = blocks.begin + (split - blocks.begin % num_splits + num_splits) % num_splits",
                "    begin = blocks.begin + num_splits + (split - blocks.begin % num_splits + num_splits) % num_splits",
            ),
            (
                "splits share a block",
                "        for block in tl.range(begin, blocks.end, num_splits):\n",
                "        for block in tl.range(begin, blocks.end, tl.maximum(num_splits - 1, 1)):\n",
            ),
            (
                "queries of a group are mixed up",
                "    token, head = rows // group, head_kv * group + rows % group  # [BM]\n",
                "    token, head = rows // group, head_kv * group + rows // length_q % group  # [BM]\n",
            ),
            (
                "log n of decoding goes by the row",
                "    log_n = log_n_scale(scheme, rows, position)[:, None]\n",
                "    log_n = log_n_scale(scheme, rows, token)[:, None]\n",
            ),
            (
                "splits are combined without their weights",
                "        weights = tl.exp2((log_sum - finite) * LOG2_E)\n",
                '        weights = tl.where(log_sum > float("-inf"), 1.0, 0.0)\n',
            ),
            (
                "lse of combined splits lacks the maximum",
                "finite + tl.log2(tl.where(empty, 1.0, total)) * LN_2",
                "tl.log2(tl.where(empty, 1.0, total)) * LN_2",
            ),
            (
                "the last split is left out",
                "        at, mask = (first + splits) * rows + lse_row, first + splits < num_splits\n        log_sum",
                "        at, mask = (first + splits) * rows + lse_row, first + splits < num_splits - 1\n        log_sum",
            ),
        ),
    ),
    Group(
        "decode",
        "triton_kernels/kv_cache.py",
        DECODE,
        (
            (
                "left padding is ignored",
                "        first = clamp(tl.load(cache.leftpad + batch), 0, end)\n",
                "        first = clamp(tl.load(cache.leftpad + batch), 0, 0)\n",
            ),
            ("new keys are not counted", "0, capacity) + new, capacity)", "0, capacity), capacity)"),
            (
                "lengths beyond the capacity are believed",
                "    end = tl.minimum(clamp(tl.load(cache.seqlens + batch), 0, capacity) + new, capacity)\n",
                "    end = clamp(tl.load(cache.seqlens + batch), 0, capacity) + new\n",
            ),
            ("the page of the next slot is read at page edges", "+ slot // PAGE_SIZE)", "+ (slot + 1) // PAGE_SIZE)"),
            (
                "another sequence's pages are read",
                "cache.block_table + batch.to(tl.int64) * max_pages",
                "cache.block_table + (batch.to(tl.int64) + 1) * max_pages",
            ),
            (
                "page numbers are not clamped",
                "    return clamp(page, 0, decode_int(cache.pages) - 1).to(tl.int64)\n",
                "    return page.to(tl.int64)\n",
            ),
            (
                "the last page is clamped away",
                "    return clamp(page, 0, decode_int(cache.pages) - 1).to(tl.int64)\n",
                "    return clamp(page, 0, decode_int(cache.pages) - 2).to(tl.int64)\n",
            ),
        ),
    ),
)
