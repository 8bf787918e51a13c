"""Mutants: Triton: online softmax."""

from ..breaks import Group
from ..selections import FORWARD

FIRST = ("tests/operators/test_accuracy.py::test_softmax_scale", *FORWARD)

GROUPS = (
    Group(
        "softmax",
        "triton_kernels/softmax.py",
        FIRST,
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
            (
                "the maximum lacks the scale",
                "tl.max(scores, 1) * scale_log2)",
                "tl.max(scores, 1))",
            ),
            (
                "lse lacks ln 2",
                "state.row_max * LN_2 + tl.log(row_sum)",
                "state.row_max + tl.log(row_sum)",
            ),
            (
                "lse lacks the sum",
                "state.row_max * LN_2 + tl.log(row_sum)",
                "state.row_max * LN_2",
            ),
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
            (
                "a scale of 0 gives NaN",
                "tl.maximum(score_scale * LOG2_E, MIN_SCALE)",
                "score_scale * LOG2_E",
            ),
        ),
    ),
)
