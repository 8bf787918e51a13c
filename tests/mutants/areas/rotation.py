"""Mutants: Triton: rotation."""

from ..breaks import Group
from ..selections import BACKWARD, FORWARD

GROUPS = (
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
            (
                "log n counts from 0",
                "tl.log(tl.maximum(position, 0.0) + 1.0)",
                "tl.log(tl.maximum(position, 1.0))",
            ),
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
)
