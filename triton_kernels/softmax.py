"""The online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1)."""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Lower bound of the log2 scale: a scale of 0 would turn a masked -inf into NaN. It changes no weight of products up to
# 1e22.
MIN_SCALE = tl.constexpr(1e-30)


class SoftmaxState(NamedTuple):
    """acc: one or two parts of the channels, float32 [BM, DV] or twice [BM, DV / 2]; row_max [BM], in log2 units;
    row_sum [BM]."""

    acc: object
    row_max: object
    row_sum: object


@triton.jit
def start_softmax(BLOCK_M: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr = 1):
    part = tl.zeros((BLOCK_M, DV // PARTS), tl.float32)
    acc = (part,) if PARTS == 1 else (part, part)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    return SoftmaxState(acc, row_max, row_sum)


@triton.jit
def log2_scale(score_scale):
    """scale_log2 of online_softmax: the softmax scale (>= 0) for weights that are powers of 2."""
    return tl.maximum(score_scale * LOG2_E, MIN_SCALE)


@triton.jit
def scale_rows(parts, factor):
    """Parts of the channels times factor [BM]."""
    if len(parts) == 1:
        return (parts[0] * factor[:, None],)
    else:
        return parts[0] * factor[:, None], parts[1] * factor[:, None]


@triton.jit
def online_softmax(state, scores, scale_log2, visible):
    """One tile's step. scores [BM, BN] are raw products, in log2 units after scale_log2 > 0; visible [BM, BN] or None.

    Returns weights [BM, BN] and the state. Its acc is rescaled and still lacks weights @ V.
    """
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(state.row_max, tl.max(scores, 1) * scale_log2)
    finite_max = new_max
    if visible is not None:
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
    weights = tl.exp2(scores * scale_log2 - finite_max[:, None])
    rescale = tl.exp2(state.row_max - finite_max)
    row_sum = state.row_sum * rescale + tl.sum(weights, 1)
    return weights, SoftmaxState(scale_rows(state.acc, rescale), new_max, row_sum)


@triton.jit
def add_values(state, weights, v):
    """The state with weights [BM, BN] @ v [BN, DV] added; v in as many parts as acc."""
    weights = weights.to(v[0].dtype)
    first = tl.dot(weights, v[0], state.acc[0], input_precision="ieee")
    if len(v) == 1:
        return SoftmaxState((first,), state.row_max, state.row_sum)
    else:
        second = tl.dot(weights, v[1], state.acc[1], input_precision="ieee")
        return SoftmaxState((first, second), state.row_max, state.row_sum)


@triton.jit
def finish_softmax(state):
    """out float32, in the parts of acc, and lse [BM], natural log. Rows without keys: 0 and -inf."""
    empty = state.row_sum == 0
    row_sum = tl.where(empty, 1.0, state.row_sum)
    out = scale_rows(state.acc, 1.0 / row_sum)
    return out, tl.where(empty, float("-inf"), state.row_max * LN_2 + tl.log(row_sum))
