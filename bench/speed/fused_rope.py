"""Implements RoPE as a good separate kernel. Attention without position encoding is timed after this rotation.

One launch rotates q and k, forward or backward, in place or not. A program handles some rows and a group of heads, and
loads cos and sin once for the group. Every access to q and k moves 16 bytes per thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS, WARPS = 4, 4  # per program
PAIRS = 8 * 32 * WARPS  # pairs of one head per program: a 16-byte vector for each thread in half precision


@triton.jit
def rotate_heads(x, out, row, first_head, heads, exists, cos, sin, HALF: tl.constexpr, HEADS: tl.constexpr):
    pairs = tl.arange(0, HALF)[None, :]
    for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
        at = (row * heads + head)[:, None] * (2 * HALF) + pairs
        first = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(x + at + HALF, mask=exists, other=0.0).to(tl.float32)
        tl.store(out + at, (first * cos - second * sin).to(out.dtype.element_ty), mask=exists)
        tl.store(out + at + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=exists)


@triton.jit
def rotate_rows(
    q, k, out_q, out_k, cos, sin, seqlen, heads_q, heads_k, INVERSE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotates q and k.

    q, k, out_q, out_k: (batch, seqlen, heads, 2 * HALF), contiguous. cos, sin: (seqlen, HALF), float32, contiguous. The
    grid is (tiles of rows * batch, groups of heads). The groups of q's heads come before the groups of k's heads.
    """
    tiles = tl.cdiv(seqlen, ROWS)
    position = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    exists = (position < seqlen)[:, None]
    table = position[:, None] * HALF + tl.arange(0, HALF)[None, :]
    row_cos = tl.load(cos + table, mask=exists, other=1.0)
    row_sin = tl.load(sin + table, mask=exists, other=0.0)
    if INVERSE:
        row_sin = -row_sin
    row = (tl.program_id(0) // tiles).to(tl.int64) * seqlen + position
    groups_q = tl.cdiv(heads_q, HEADS)
    group = tl.program_id(1)
    if group < groups_q:
        rotate_heads(q, out_q, row, group * HEADS, heads_q, exists, row_cos, row_sin, HALF, HEADS)
    else:
        rotate_heads(k, out_k, row, (group - groups_q) * HEADS, heads_k, exists, row_cos, row_sin, HALF, HEADS)


def launch(q, k, out_q, out_k, cos, sin, inverse: bool) -> None:
    batch, seqlen, heads_q, head_dim = q.shape
    heads_k = k.shape[2]
    rows = PAIRS * 2 // head_dim
    grid = (triton.cdiv(seqlen, rows) * batch, triton.cdiv(heads_q, HEADS) + triton.cdiv(heads_k, HEADS))
    options = {"INVERSE": inverse, "HALF": head_dim // 2, "ROWS": rows, "HEADS": HEADS, "num_warps": WARPS}
    rotate_rows[grid](q, k, out_q, out_k, cos, sin, seqlen, heads_q, heads_k, **options)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, in_place):
        ctx.save_for_backward(cos, sin)
        ctx.in_place = in_place
        if in_place:
            ctx.mark_dirty(q, k)
        out_q, out_k = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
        launch(q, k, out_q, out_k, cos, sin, inverse=False)
        return out_q, out_k

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        cos, sin = ctx.saved_tensors
        grad_q, grad_k = grad_q.contiguous(), grad_k.contiguous()
        out_q, out_k = (grad_q, grad_k) if ctx.in_place else (torch.empty_like(grad_q), torch.empty_like(grad_k))
        launch(grad_q, grad_k, out_q, out_k, cos, sin, inverse=True)
        return out_q, out_k, None, None, None


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_place: bool = False):
    """Rotates channels m and m + head_dim / 2 of row i of q and k by the angle of cos[i, m] and sin[i, m].

    Args:
        q, k: (batch, seqlen, heads_q, head_dim) and (batch, seqlen, heads_kv, head_dim), contiguous. head_dim / 2 is a
            power of two.
        cos, sin: (seqlen, head_dim / 2), float32, contiguous.
        in_place: whether to overwrite q and k, and in the backward pass the gradients of the results.

    Returns:
        q and k, rotated.
    """
    half = q.shape[-1] // 2
    if half & (half - 1):
        raise ValueError(f"head_dim: expected a power of two, got {q.shape[-1]}")
    for name, x, shape in (
        ("k", k, (*q.shape[:2], k.shape[2], q.shape[3])),
        ("cos", cos, (q.shape[1], half)),
        ("sin", sin, (q.shape[1], half)),
    ):
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got stride {x.stride()}")
    return _Rotate.apply(q, k, cos, sin, in_place)
