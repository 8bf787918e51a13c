"""The online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1)."""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import add_weighted_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Lower bound of the log2 scale. A scale of 0 would turn a masked score of -inf into NaN. With products q @ k up to 1e22
# the bound changes no weight.
MIN_SCALE = tl.constexpr(1e-30)


class SoftmaxState(NamedTuple):
    """The state of the softmax of BM query rows after some tiles of keys.

    acc: the sum of weights @ V, in one, two or four parts of the channels. Each part is float32 [BM, DV / parts].
    row_max: the largest score so far [BM], in log2 units.
    row_sum: the sum of the weights [BM].

    In the decode kernel every field has a first dimension of VARIANT.key_groups if there are several groups of keys.
    """

    acc: object
    row_max: object
    row_sum: object


@triton.jit
def start_softmax(BLOCK_M: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr = 1):
    """Returns the SoftmaxState before the first tile of keys."""
    part = tl.zeros((BLOCK_M, DV // PARTS), tl.float32)
    acc = (part,) * PARTS
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    return SoftmaxState(acc, row_max, row_sum)


@triton.jit
def log2_scale(score_scale):
    """Returns the argument scale_log2 of online_softmax: the score scale (>= 0) times log2(e), and at least
    MIN_SCALE."""
    return tl.maximum(score_scale * LOG2_E, MIN_SCALE)


@triton.jit
def scale_rows(parts, factor):
    """Multiplies every part [..., BM, D] by factor [..., BM]."""
    scaled = ()
    for part in tl.static_range(len(parts)):
        scaled += (parts[part] * tl.expand_dims(factor, -1),)
    return scaled


@triton.jit
def online_softmax(state, scores, scale_log2, visible):
    """Adds one tile of keys to the softmax. Returns (weights [BM, BN], state). The caller must add weights @ V to the
    state's acc, with add_values. The arguments are those of tile_weights."""
    weights, rescale, row_max, row_sum = tile_weights(state.row_max, state.row_sum, scores, scale_log2, visible)
    return weights, SoftmaxState(scale_rows(state.acc, rescale), row_max, row_sum)


@triton.jit
def tile_weights(row_max, row_sum, scores, scale_log2, visible):
    """Returns (weights [BM, BN] of one tile of keys, the factor [BM] of everything that was added to acc before, the
    new row_max, the new row_sum). row_max, row_sum: fields of the SoftmaxState.

    scores: products q @ k [BM, BN], not yet scaled. visible: [BM, BN], or None if all keys are visible. scale_log2 > 0:
    from log2_scale. With groups of keys, tiles are [G, BM, BN / G].
    """
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, len(scores.shape) - 1) * scale_log2)
    finite_max = new_max
    if visible is not None:
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
    weights = tl.exp2(scores * scale_log2 - tl.expand_dims(finite_max, -1))
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(weights, len(weights.shape) - 1)
    return weights, rescale, new_max, row_sum


@triton.jit
def add_values(state, weights, v):
    """Returns the state with weights [BM, BN] @ v [BN, DV] added to acc. v has as many parts as acc."""
    weights = weights.to(v[0].dtype)
    return SoftmaxState(add_weighted_rows(state.acc, weights, v), state.row_max, state.row_sum)


@triton.jit
def start_group_softmax(GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, DV: tl.constexpr):
    """Returns the SoftmaxState of GROUPS groups of keys before their first keys."""
    acc = (tl.zeros((GROUPS, BLOCK_M, DV), tl.float32),)
    row_max = tl.full((GROUPS, BLOCK_M), float("-inf"), tl.float32)
    return SoftmaxState(acc, row_max, tl.zeros((GROUPS, BLOCK_M), tl.float32))


@triton.jit
def merge_groups(state):
    """Merges the states of groups of keys, whose first dimension numbers the groups, into one SoftmaxState."""
    row_max = tl.max(state.row_max, 0)
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)  # a row that has seen no key
    rescale = tl.exp2(state.row_max - finite_max[None, :])  # [G, BM]
    acc = ()
    for part in tl.static_range(len(state.acc)):
        acc += (tl.sum(state.acc[part] * rescale[:, :, None], 0),)
    return SoftmaxState(acc, row_max, tl.sum(state.row_sum * rescale, 0))


@triton.jit
def finish_softmax(state):
    """Returns (out, lse). out is float32, in the parts of acc. lse [BM] is a natural logarithm. Rows that see no key
    have out 0 and lse -inf."""
    empty = state.row_sum == 0
    row_sum = tl.where(empty, 1.0, state.row_sum)
    out = scale_rows(state.acc, 1.0 / row_sum)
    return out, tl.where(empty, float("-inf"), state.row_max * LN_2 + tl.log(row_sum))
