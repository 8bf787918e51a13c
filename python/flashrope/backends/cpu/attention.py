"""Banded rotary attention on the CPU, composed of torch's own flash kernel for the CPU. Memory is linear in the
lengths.

Each band is cut into pieces that kernel computes without a mask: rectangles, and triangles that are exactly its
is_causal, some of them with time reversed. The pieces of a row are merged by their lse, as ring attention does.

All types below float32 are computed in float32: it is at least as fast here as torch's half-precision kernels (its
float16 backward is some twenty times slower), and nothing but the results is rounded.
"""

from __future__ import annotations

import torch

from ..base import AttentionCall

from .pieces import Piece, flash, joined, keys_of, like_queries, mask, one_piece, plan, rows_of, uncut, windows
from .rotation import accumulation_type, turn, turns_for, upcast

flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    return "" if q.device.type == "cpu" else f"its tensors must lie on the CPU, q is on {q.device}"


def rotated_k_shape(k: torch.Tensor, call: AttentionCall) -> tuple[int, ...]:
    """Keys are turned again in the backward: that costs one pass over k, keeping them costs its size."""
    return (0,)


def forward(q, k, v, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, None]:
    """(out like q, lse float32 or float64, no turned keys); shapes are those of ``AttentionCall``."""
    if call.cu_seqlens_q is None:
        return *_attend(q, k, v, call), None
    out = q.new_zeros(q.shape)
    lse = q.new_full(call.lse_shape(q), float("-inf"), dtype=accumulation_type(q))
    for rows, keys in _sequences(call):
        out[rows], lse[:, rows] = (x[0] for x in _attend(q[None, rows], k[None, keys], v[None, keys], call))
    return out, lse, None


def backward(
    grad_out, grad_lse, q, k, v, out, lse, rotated_k, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of raw q, k and v, like q, k and v; one of grad_out and grad_lse may be None."""
    if call.cu_seqlens_q is None:
        return _attend_backward(grad_out, grad_lse, q, k, v, out, lse, call)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for rows, keys in _sequences(call):
        grad_q[rows], grad_k[keys], grad_v[keys] = (
            x[0]
            for x in _attend_backward(
                None if grad_out is None else grad_out[None, rows],
                None if grad_lse is None else grad_lse[None, :, rows],
                q[None, rows],
                k[None, keys],
                v[None, keys],
                out[None, rows],
                lse[None, :, rows],
                call,
            )
        )
    return grad_q, grad_k, grad_v


def _sequences(call: AttentionCall):
    """(rows, keys) of every packed sequence, as slices."""
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        yield slice(q0, q1), slice(k0, k1)


# ---- one batch of sequences of one length


def _attend(q, k, v, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, lse (batch, heads_q, seqlen_q)."""
    seqlen_q, seqlen_k, v = q.size(1), k.size(1), upcast(v)
    whole = (
        one_piece(call.rotary, call.causal, seqlen_q, seqlen_k, v.dtype)
        if call.positions is None and q.numel()
        else None
    )
    if whole:  # nothing to merge: short calls are spared the bookkeeping
        piece, turns_q, turns_k = whole
        out, lse = flash(
            turn(q, turns_q, call.rotary).transpose(1, 2),
            turn(k, turns_k, call.rotary).transpose(1, 2),
            v.transpose(1, 2),
            0.0,
            piece.causal,
            scale=call.score_scale,
        )
        return like_queries(out.transpose(1, 2), lse, q)
    parts = []
    for slope, offset, pieces in (
        plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q) if q.numel() and k.numel() else ()
    ):
        turned_q = turn(q, turns_for(q, call, slope, offset, seqlen_k - seqlen_q, True), call.rotary)
        turned_k = turn(k, turns_for(k, call, slope, 0.0, 0, False), call.rotary)
        for piece in pieces:
            parts.append(
                (
                    piece,
                    *flash(
                        rows_of(turned_q, piece),
                        keys_of(turned_k, piece),
                        keys_of(v, piece),
                        0.0,
                        piece.causal and not piece.width,
                        attn_mask=mask(piece, turned_q.dtype),
                        scale=call.score_scale,
                    ),
                )
            )
    return joined(parts, q)


def _attend_backward(
    grad_out, grad_lse, q, k, v, out, lse, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotary, seqlen_q, seqlen_k = call.rotary, q.shape[1], k.shape[1]
    out, wide_v, lse = upcast(out), upcast(v), lse.transpose(1, 2)
    grad_out = torch.zeros_like(out) if grad_out is None else upcast(grad_out)
    if grad_lse is not None:
        # dS = P * (dO.V - dO.O + dlse): dlse rides in dO as one more channel, against 1 in V and 0 in O.
        grad_out, wide_v, out = _widen(grad_out, grad_lse.transpose(1, 2)), _widen(wide_v, 1.0), _widen(out, 0.0)
    grad_q = grad_k = grad_v = None
    for slope, offset, pieces in (
        plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q) if q.numel() and k.numel() else ()
    ):
        turns_q = turns_for(q, call, slope, offset, seqlen_k - seqlen_q, True)
        turns_k = turns_for(k, call, slope, 0.0, 0, False)
        turned_q, turned_k = turn(q, turns_q, rotary), turn(k, turns_k, rotary)
        if grad_lse is not None:
            turned_q, turned_k = _widen(turned_q, 0.0), _widen(turned_k, 0.0)
        of_q = of_k = None
        for piece in pieces:
            piece_q, piece_k, piece_v = (
                x[..., : q.shape[-1]]
                for x in flash_backward(
                    rows_of(grad_out, piece),
                    rows_of(turned_q, piece),
                    keys_of(turned_k, piece),
                    keys_of(wide_v, piece),
                    rows_of(out, piece),
                    rows_of(lse, piece),
                    0.0,
                    piece.causal and not piece.width,
                    attn_mask=mask(piece, turned_q.dtype),
                    scale=call.score_scale,
                )
            )
            of_q = _add(of_q, piece_q, q.shape, piece.row, piece.rows, piece)
            of_k = _add(of_k, piece_k, k.shape, piece.key, piece.keys, piece)
            grad_v = _add(grad_v, piece_v, v.shape, piece.key, piece.keys, piece)
        of_q, of_k = turn(of_q, turns_q, rotary, back=True), turn(of_k, turns_k, rotary, back=True)
        grad_q = of_q if grad_q is None else grad_q.add_(of_q)
        grad_k = of_k if grad_k is None else grad_k.add_(of_k)
    return tuple(
        x.new_zeros(x.shape) if grad is None else grad.to(x.dtype).contiguous()
        for x, grad in ((q, grad_q), (k, grad_k), (v, grad_v))
    )


def _widen(x: torch.Tensor, last) -> torch.Tensor:
    """x with eight more channels: last, then zeros."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
    wide[..., :-8] = x
    wide[..., -8] = last
    return wide


def _add(total, piece_grad, shape, first: int, count: int, piece: Piece) -> torch.Tensor:
    """total (batch, seqlen, heads, head_dim), or None, plus the gradient of one piece."""
    if total is None:
        if count == shape[1] and not piece.reversed:
            return piece_grad.transpose(1, 2)
        total = piece_grad.new_zeros(shape)
    windows(total, first, count, piece).add_(uncut(piece_grad, piece))
    return total
