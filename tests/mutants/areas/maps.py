"""Mutants of position maps: Self-Extend and dual chunk attention, from the scheme to the kernels."""

from ..breaks import Group

FORMULA = ("tests/rotary/test_maps.py", "-k", "not cpu and not triton")
KERNELS = ("tests/rotary/test_maps.py", "tests/caches/test_maps_decode.py", "-k", "triton")
ROWS = ("tests/kernels/test_tiles_cos_sin.py", *KERNELS[:2], "-k", "triton or rows_that_a_map_gives")
CPU = ("tests/rotary/test_maps.py", "tests/caches/test_maps_decode.py", "-k", "not triton")

GROUPS = (
    Group(
        "maps",
        "python/flashrope/rotary/bands.py",
        FORMULA,
        (
            (
                "a map groups before it takes the remainder",
                "        if self.chunk:\n            positions = positions % self.chunk\n        if self.group > 1:\n            positions = positions // self.group\n",
                "        if self.group > 1:\n            positions = positions // self.group\n        if self.chunk:\n            positions = positions % self.chunk\n",
            ),
            (
                "grouped positions are not rounded down",
                "            positions = positions // self.group\n",
                "            positions = positions / self.group\n",
            ),
            (
                "a map lacks its offset",
                "        return self.slope * positions + self.offset\n",
                "        return self.slope * positions\n",
            ),
            (
                "a map stops one position late",
                "            positions = positions.clamp(max=self.last)\n",
                "            positions = positions.clamp(max=self.last + 1)\n",
            ),
            (
                "keys are offset as queries are",
                "        return PositionMap(self.slope, 0.0, self.chunk, self.group)\n",
                "        return PositionMap(self.slope, self.offset, self.chunk, self.group)\n",
            ),
            (
                "queries are not grouped",
                "        return PositionMap(self.slope, self.offset, self.chunk, self.group, self.last)\n",
                "        return PositionMap(self.slope, self.offset, self.chunk, 1, self.last)\n",
            ),
            (
                "keys ahead in the same chunk are seen",
                "    return (difference >= band.start) & (difference < band.stop) & (position_k <= position_q)\n",
                "    return (difference >= band.start) & (difference < band.stop)\n",
            ),
            (
                "the next chunk begins one key late",
                "    difference = position_q // band.chunk - position_k // band.chunk\n",
                "    difference = position_q // band.chunk - (position_k - 1) // band.chunk\n",
            ),
            (
                "the least distance of a band of chunks is one too large",
                "    return max((band.start - 1) * band.chunk + 1, 0), band.stop * band.chunk\n",
                "    return max((band.start - 1) * band.chunk + 2, 0), band.stop * band.chunk\n",
            ),
            (
                "the largest distance of a band of chunks is a chunk short",
                "    return max((band.start - 1) * band.chunk + 1, 0), band.stop * band.chunk\n",
                "    return max((band.start - 1) * band.chunk + 1, 0), (band.stop - 1) * band.chunk\n",
            ),
            (
                "positions below 0 are accepted",
                '    if band.offset < 0:\n        raise ValueError(\n            f"{name}.offset',
                '    if band.offset < -9:\n        raise ValueError(\n            f"{name}.offset',
            ),
        ),
    ),
    Group(
        "maps",
        "python/flashrope/rotary/bands.py",
        FORMULA,
        (
            (
                "Self-Extend's far band lacks w / g",
                "float(window - window // group), group)",
                "float(window), group)",
            ),
            (
                "dual chunk's second band is off by one",
                "MappedBand(1, 2, 1.0, float(chunk), 1, chunk, last - chunk)",
                "MappedBand(1, 2, 1.0, float(chunk), 1, chunk, last - chunk + 1)",
            ),
        ),
    ),
    Group(
        "maps",
        "python/flashrope/rotary/rotary.py",
        FORMULA,
        (
            (
                "dual chunk's third band ends at 2 s",
                "chunked(chunk, min(2 * chunk - 1, chunk_size))",
                "chunked(chunk, min(2 * chunk, chunk_size))",
            ),
        ),
    ),
    Group(
        "maps",
        "python/flashrope/lowering/lowered.py",
        (*KERNELS[:2], "tests/rotary/test_lowering.py", "-k", "triton or what_kernels_get"),
        (
            (
                "maps of queries are those of keys",
                "        row_map = RowMap(*map(_bound, rotation[2:]), int(is_query)) if mapped else ()\n",
                "        row_map = RowMap(*map(_bound, rotation[2:]), 0) if mapped else ()\n",
            ),
            (
                "rotations that differ in the map alone share a number",
                "numbers.setdefault((scale, rotation.slope, rotation.offset, *row_map), len(numbers))",
                "numbers.setdefault((scale, rotation.slope, rotation.offset, *row_map[:1], 1, UNBOUNDED, *row_map[3:]), len(numbers))",
            ),
            (
                "bands over chunks start and stop at distances",
                "_bound(band.start, chunk), _bound(band.stop, chunk), *numbered",
                "*map(_bound, band.distances), *numbered",
            ),
            (
                "an open end overflows in positions",
                "    limit = UNBOUNDED // max(chunk, 1)\n",
                "    limit = UNBOUNDED\n",
            ),
            (
                "the first map has no chunk",
                "RowMap(chunk, 1, UNBOUNDED, 0)",
                "RowMap(0, 1, UNBOUNDED, 0)",
            ),
        ),
    ),
    Group(
        "maps",
        "triton_kernels/rotation.py",
        ROWS,
        (
            (
                "the map of the next rotation is read",
                "    row = maps + ROW_MAP_FIELDS * rotation\n",
                "    row = maps + ROW_MAP_FIELDS * (rotation + 1)\n",
            ),
            (
                "queries take the rows of keys",
                "    position = tl.where(row_map.is_query != 0, rows.start, rows.first) + existing_rows(rows)\n",
                "    position = rows.first + existing_rows(rows)\n",
            ),
            (
                "positions are not taken modulo the chunk",
                "    position = tl.where(row_map.chunk > 0, position % tl.maximum(row_map.chunk, 1), position)\n",
                "    position = position + 0 * row_map.chunk\n",
            ),
            (
                "a chunk is one position longer",
                "position % tl.maximum(row_map.chunk, 1), position)",
                "position % tl.maximum(row_map.chunk + 1, 1), position)",
            ),
            (
                "a group begins one position early",
                "    return tl.minimum(position // row_map.group, row_map.last)\n",
                "    return tl.minimum((position + 1) // row_map.group, row_map.last)\n",
            ),
            (
                "positions of queries have no end",
                "    return tl.minimum(position // row_map.group, row_map.last)\n",
                "    return position // row_map.group + 0 * row_map.last\n",
            ),
            (
                "negative positions are read before the table",
                "    position = tl.maximum(position, 0)\n    position = tl.where(row_map.chunk",
                "    position = tl.where(row_map.chunk",
            ),
            (
                "gradients enter the next band by its own angle alone",
                "        x, y = rotate(x, y, cos, -sin)\n        cos, sin = load_cos_sin(table, step",
                "        cos, sin = load_cos_sin(table, step",
            ),
            (
                "gradients leave the band before by the wrong sign",
                "        x, y = rotate(x, y, cos, -sin)\n        cos, sin = load_cos_sin(table, step",
                "        x, y = rotate(x, y, cos, sin)\n        cos, sin = load_cos_sin(table, step",
            ),
        ),
    ),
    Group(
        "maps",
        "triton_kernels/tiles.py",
        KERNELS,
        (
            (
                "a query sees the key after its own in its chunk",
                "position_q // unit - band.start + 1) * unit, position_q + 1)\n",
                "position_q // unit - band.start + 1) * unit, position_q + 2)\n",
            ),
            (
                "a band of chunks begins one key late",
                "        return VisibleRange((position_q // unit - band.stop + 1) * unit, tl.minimum(stop, length))\n",
                "        return VisibleRange((position_q // unit - band.stop + 1) * unit + 1, tl.minimum(stop, length))\n",
            ),
            (
                "a band of chunks begins one key early",
                "        return VisibleRange((position_q // unit - band.stop + 1) * unit, tl.minimum(stop, length))\n",
                "        return VisibleRange((position_q // unit - band.stop + 1) * unit - 1, tl.minimum(stop, length))\n",
            ),
            (
                "dK counts rows before a key in its chunk",
                "        first = tl.maximum((position_k // unit + band.start) * unit, position_k)\n",
                "        first = (position_k // unit + band.start) * unit\n",
            ),
            (
                "dK lacks the last row of a chunk",
                "        return VisibleRange(first - ahead, (position_k // unit + band.stop) * unit - ahead)\n",
                "        return VisibleRange(first - ahead, (position_k // unit + band.stop) * unit - ahead - 1)\n",
            ),
            (
                "bands over distances are counted in chunks of two",
                "    return tl.maximum(tl.load(maps), 1)\n",
                "    return tl.maximum(tl.load(maps), 2)\n",
            ),
            (
                "mapped queries are shifted",
                "        start = first + length_other - length\n",
                "        start = first\n",
            ),
        ),
    ),
    Group(
        "maps",
        "triton_kernels/backward.py",
        KERNELS,
        (
            (
                "dK reads tiles as if nothing were mapped",
                "        tiles = query_tiles(band, first, last, seq.ahead, seq.length_q, SHAPE.block_m, scheme.maps)\n",
                "        tiles = query_tiles(band, first, last, seq.ahead, seq.length_q, SHAPE.block_m)\n",
            ),
            (
                "dK of a mapped band is rotated back by the queries' map",
                "    store_rotated_back(to_k, grad.k, table, last_band.k_rotation,",
                "    store_rotated_back(to_k, grad.k, table, last_band.q_rotation,",
            ),
        ),
    ),
    Group(
        "maps",
        "triton_kernels/decode.py",
        KERNELS,
        (
            (
                "mapped keys of a cache are shifted",
                "    shift = tl.maximum(-seq.ahead, 0) if scheme.maps is None else 0\n",
                "    shift = tl.maximum(-seq.ahead, 0) if scheme.maps is None else 1\n",
            ),
        ),
    ),
    Group(
        "maps",
        "python/flashrope/backends/cpu/pieces.py",
        CPU,
        (
            (
                "the chunk before is left out",
                "        begin = 0 if band.stop > n else (n + 1 - int(band.stop)) * chunk\n",
                "        begin = 0 if band.stop > n else (n + 2 - int(band.stop)) * chunk\n",
            ),
            (
                "rows of a chunk begin one late",
                "        low, high = max(n * chunk, row_0, 0), min((n + 1) * chunk, row_0 + seqlen_q)\n",
                "        low, high = max(n * chunk + 1, row_0, 0), min((n + 1) * chunk, row_0 + seqlen_q)\n",
            ),
            (
                "earlier chunks end one key short",
                "min((n + 1 - int(band.start)) * chunk, n * chunk, key_end)",
                "min((n + 1 - int(band.start)) * chunk, n * chunk - 1, key_end)",
            ),
            (
                "a chunk's own keys are seen whole",
                "                for piece in _past_pieces(0, math.inf, high - low, own_end - own, low - own)\n",
                "                for piece in _past_pieces(0, math.inf, high - low, own_end - own, own_end - own)\n",
            ),
        ),
    ),
    Group(
        "maps",
        "python/flashrope/backends/cpu/cached.py",
        CPU,
        (
            (
                "blocks of a cache count chunks from their first key",
                "        start = position if chunk_of(call.bands) else 0\n",
                "        start = 0\n",
            ),
        ),
    ),
)
