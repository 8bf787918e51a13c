"""Mutants: launches of the Triton kernels."""

from ..breaks import Group
from ..selections import DECODE

LAUNCHES = (
    *(
        "tests/operators/test_accuracy.py::test_grouped_heads",
        "tests/operators/test_accuracy.py",
        "tests/operators/test_varlen.py",
        "tests/operators/test_backward.py",
        "tests/kernels/test_launches.py",
    ),
    *("-k", "triton or backward or launches"),
)

GROUPS = (
    Group(
        "launches",
        "python/flashrope/backends/triton/attention.py",
        LAUNCHES,
        (
            (
                "log n is applied to the keys",
                "scheme = self.scheme._replace(**UNSCALED._asdict())",
                "scheme = self.scheme",
            ),
            (
                "key heads lack their last program",
                "cdiv(heads, configs.ROTATE_HEADS),\n            len(copies),",
                "max(heads // configs.ROTATE_HEADS, 1),\n            len(copies),",
            ),
            (
                "the table is too short for the keys",
                "coarse_rows(max(q.shape[-3], self.seqlen_k))",
                "coarse_rows(q.shape[-3])",
            ),
            (
                "statistics are too small for packed sequences",
                "(_rows(out) // configs.STATISTICS_ROWS + self.batch) * configs",
                "(-(-_rows(out) // configs.STATISTICS_ROWS)) * configs",
            ),
            (
                "rotated queries without log n are not made",
                "if not any(self.lowered.q_rotations) and self.rotary.query_scale == UNSCALED:",
                "if not any(self.lowered.q_rotations):",
            ),
            (
                "rows outside every sequence are not cleared",
                "        out.zero_()  # rows outside every sequence\n",
                "        pass\n",
            ),
        ),
    ),
    Group(
        "launches",
        "python/flashrope/backends/triton/cached.py",
        DECODE,
        (
            (
                "the workspace of a window is one key short",
                "beyond = max(self.lowered.k_stops) - 1  #",
                "beyond = max(self.lowered.k_stops) - 2  #",
            ),
            (
                "the table ends at the queries",
                "coarse_rows(max(longest, self.capacity))",
                "coarse_rows(longest)",
            ),
            (
                "partial results of packed queries are too few",
                "min(self.seqlen_q, self.batch * self.decode_seqlen)\n",
                "min(self.seqlen_q, self.decode_seqlen)\n",
            ),
        ),
    ),
    Group(
        "launches",
        "python/flashrope/backends/triton/launcher.py",
        ("tests/kernels/test_launches.py", "-k", "would_pick"),
        (
            (
                "a scale in steps is not told apart",
                "            traits += [number is None for number in arg[optional:]]\n",
                "",
            ),
            ("alignment is not told apart", "(x.dtype, x.data_ptr() & 15)", "(x.dtype, 0)"),
            ("types are not told apart", "(x.dtype, x.data_ptr() & 15)", "(x.data_ptr() & 15,)"),
            ("None is not told apart", "traits += (None,) if x is None", "traits += () if x is None"),
            ("options are not told apart", "*_traits(args), *options.items())", "*_traits(args))"),
        ),
    ),
    Group(
        "launches",
        "python/flashrope/backends/triton/plan.py",
        LAUNCHES,
        (
            (
                "queries lack a program for the last tile",
                "(cdiv(self.max_seqlen_q, tile.block_m) * self.batch * self.heads_q,)",
                "(self.max_seqlen_q // tile.block_m * self.batch * self.heads_q,)",
            ),
        ),
    ),
)
