"""Mutants: Triton: rotated queries and keys."""

from ..breaks import Group
from ..selections import DECODE, FORWARD

GROUPS = (
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
                "first + rows.index + length_other - length, length_other)[:, None]",
                "first + rows.index, length_other)[:, None]",
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
                "(first + SHAPE.block_m <= seq.ahead - copied.stop + 1)",
                "(first <= seq.ahead - copied.stop + 1)",
            ),
            (
                "cached keys are rotated one position off",
                "    rows = TileRows(tl.arange(0, SHAPE.block_m), first + shift, first, seq.length_k)\n",
                "    rows = TileRows(tl.arange(0, SHAPE.block_m), first + shift + 1, first, seq.length_k)\n",
            ),
        ),
    ),
)
