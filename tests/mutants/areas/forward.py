"""Mutants: Triton: forward."""

from ..breaks import Group
from ..selections import FORWARD

FIRST = ("tests/operators/test_accuracy.py::test_grouped_heads", *FORWARD)

GROUPS = (
    Group(
        "forward",
        "triton_kernels/forward.py",
        FIRST,
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
                "rows behind the last query only turn inner tiles into masked ones, and a masked tile changes no bit",
            ),
            (
                "the last query of a tile loses its tile",
                "    last = tl.minimum(first + SHAPE.block_m, seq.length_q) - 1 + seq.ahead\n",
                "    last = tl.minimum(first + SHAPE.block_m, seq.length_q) - 2 + seq.ahead\n",
            ),
            (
                "log n of the first tile serves all",
                "    log_n = query_scale(scheme, rows.start + existing_rows(rows), position, seq.length_k)\n",
                "    log_n = query_scale(scheme, rows.start + existing_rows(rows), position - first, seq.length_k)\n",
            ),
            (
                "edge tiles are not masked",
                "column, pages, (SHAPE.rotated_bands >> b) & 1, True, SHAPE\n",
                "column, pages, (SHAPE.rotated_bands >> b) & 1, False, SHAPE\n",
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
        "forward",
        "triton_kernels/rotation.py",
        ("tests/rotary/test_query_scales.py",),
        (
            (
                "steps of log n are not rounded down",
                "steps = tl.floor(tl.div_rn(",
                "steps = (tl.div_rn(",
            ),
        ),
    ),
)
