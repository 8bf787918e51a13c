"""Mutants: Triton: tiles of a band, rows, addresses."""

from ..breaks import Group

FORWARD = (
    "tests/kernels/test_tiles.py",
    "tests/operators/test_needles.py",
    "tests/operators/test_accuracy.py",
    "tests/rotary/test_bands.py",
    "-k",
    "triton or test_tiles",
)
VARLEN = (
    "tests/operators/test_varlen.py",
    "tests/kernels/test_tiles.py::test_copied_keys_of_packed_queries_have_room",
    "tests/caches/test_decode_varlen.py",
    "-k",
    "triton or room",
)

GROUPS = (
    Group(
        "tiles",
        "triton_kernels/tiles.py",
        FORWARD,
        (
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
                "    begin = tl.maximum(first_row.first, 0) // BLOCK\n",
                "    begin = tl.cdiv(tl.maximum(first_row.first, 0), BLOCK)\n",
            ),
            (
                "the last tile of a band is dropped",
                "    end = tl.cdiv(tl.maximum(tl.minimum(last_row.stop, length), 0), BLOCK)\n",
                "    end = tl.maximum(tl.minimum(last_row.stop, length), 0) // BLOCK\n",
            ),
            (
                "the first inner tile comes one too early",
                "    inner_begin = tl.cdiv(tl.maximum(last_row.first, 0), BLOCK)\n",
                "    inner_begin = tl.maximum(last_row.first, 0) // BLOCK\n",
            ),
            (
                "the first inner tile is off by one key",
                "    inner_begin = tl.cdiv(tl.maximum(last_row.first, 0), BLOCK)\n",
                "    inner_begin = tl.cdiv(tl.maximum(last_row.first - 1, 0), BLOCK)\n",
            ),
            (
                "the last inner tile comes one too late",
                "    inner_end = tl.maximum(tl.minimum(first_row.stop, length), 0) // BLOCK\n",
                "    inner_end = tl.cdiv(tl.maximum(tl.minimum(first_row.stop, length), 0), BLOCK)\n",
            ),
            (
                "the last inner tile is off by one key",
                "    inner_end = tl.maximum(tl.minimum(first_row.stop, length), 0) // BLOCK\n",
                "    inner_end = tl.maximum(tl.minimum(first_row.stop + 1, length), 0) // BLOCK\n",
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
                "load_channels(ptr, offsets, channels, SHAPE.head_dim_v, SHAPE.block_dv)",
                "load_channels(ptr, offsets, channels, SHAPE.block_dv, SHAPE.block_dv)",
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
)
