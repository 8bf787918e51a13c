"""Mutants: Triton: backward."""

from ..breaks import Group
from ..selections import BACKWARD

GROUPS = (
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
            (
                "lse of the backward is in natural units",
                'float("inf"), row_lse * LOG2_E)',
                'float("inf"), row_lse)',
            ),
            (
                "rows without keys get weights",
                '    lse_log2 = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)\n',
                "    lse_log2 = row_lse * LOG2_E\n",
            ),
            (
                "dK lacks a rotation between bands",
                "rotate_tile(grad.k, table, band.dk_step, before.dk_step, rows, SHAPE), grad.v)",
                "grad.k, grad.v)",
            ),
            (
                "dK is rotated back by the first band",
                "    store_rotated_back(to_k, grad.k, table, last_band.k_rotation,",
                "    store_rotated_back(to_k, grad.k, table, load_band(scheme.bands, 0).k_rotation,",
            ),
            (
                "dQ lacks a rotation between bands",
                "            acc = rotate_tile(acc, table, band.dq_step, before.dq_step, rows, SHAPE)\n",
                "            acc = acc\n",
            ),
            (
                "dQ lacks log n",
                "    scale = query_scale(scheme, rows.start + loaded, position, seq.length_k) * scheme.score_scale\n    to_q",
                "    scale = query_scale(scheme, rows.start + loaded, position, seq.length_k) * 0 + scheme.score_scale\n    to_q",
            ),
            (
                "dQ lacks the softmax scale",
                "    scale = query_scale(scheme, rows.start + loaded, position, seq.length_k) * scheme.score_scale\n    to_q",
                "    scale = query_scale(scheme, rows.start + loaded, position, seq.length_k)\n    to_q",
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
                "    offset = statistics_offset(queries.packed, seq.batch, head, queries.statistics_rows)\n",
                "    offset = statistics_offset(queries.packed, seq.batch, head // 2, queries.statistics_rows)\n",
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
)
