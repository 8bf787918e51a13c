"""Computes ``attention`` and ``attention_varlen`` on the CPU with torch's flash kernel. Memory is linear in the
lengths.

Each band is divided into pieces that the kernel computes without a mask: rectangles, and triangles that its is_causal
describes. The pieces of a row are merged by their lse, as in ring attention.

Torch's kernel requires the same head_dim for q, k and v. If v has a different head_dim than q and k, the tensors with
the smaller head_dim are padded with zero channels.

Half-precision inputs are computed in float32, and only the results are rounded. This is at least as fast as torch's
half-precision kernels, whose float16 backward is about twenty times slower.
"""

from __future__ import annotations

from typing import Any

import torch

from ...calls.records import AttentionCall
from ..shared.host_rotation import rotate, rotation_for, upcast
from ..shared.packed import backward_sequences, forward_sequences
from ..shared.precision import without_autocast
from .pieces import (
    Piece,
    RotationPieces,
    attn_mask,
    cast_results,
    flash,
    flash_backward,
    flash_scale,
    gather_keys,
    gather_rows,
    merge_partials,
    narrow,
    plan,
    scatter_tile,
    single_piece,
    widen,
    windows,
)


@without_autocast
def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall):
    """Returns (out like q, lse in float32 or float64)."""
    return _attend(q, k, v, call) if call.cu_seqlens_q is None else forward_sequences(_attend, q, k, v, call)


@without_autocast
def backward(grad_out, grad_lse, q, k, v, out, lse, call: AttentionCall):
    """Returns the gradients of raw q, k and v. At most one of grad_out and grad_lse is None."""
    if call.cu_seqlens_q is None:
        return _attend_backward(grad_out, grad_lse, q, k, v, out, lse, call)
    return backward_sequences(_attend_backward, grad_out, grad_lse, q, k, v, out, lse, call)


# ---- batches of sequences of equal length


def _plan(q: torch.Tensor, k: torch.Tensor, call: AttentionCall) -> tuple[RotationPieces, ...]:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    return plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q) if q.numel() and k.numel() else ()


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out with the shape of ``out_shape``, and lse (batch, heads_q, seqlen_q)."""
    rotary, seqlen_q, seqlen_k, head_dim_v = call.rotary, q.size(1), k.size(1), v.size(-1)
    width, scale = max(rotary.head_dim, head_dim_v), flash_scale(call, seqlen_k)
    v = widen(upcast(v), width)
    if call.positions is None and q.numel():
        single = single_piece(rotary, call.causal, seqlen_q, seqlen_k, v.dtype)
        if single:  # nothing to merge: short calls skip the bookkeeping
            out, lse = flash(
                widen(rotate(q, single.q_rotation, rotary), width).transpose(1, 2),
                widen(rotate(k, single.k_rotation, rotary), width).transpose(1, 2),
                v.transpose(1, 2),
                0.0,
                single.piece.causal,
                scale=scale,
            )
            return cast_results(narrow(out, head_dim_v).transpose(1, 2), lse, q.dtype)
    partials = []
    for queries, keys, pieces in _plan(q, k, call):
        rotated_q = widen(rotate(q, rotation_for(q, call, queries, seqlen_k - seqlen_q, True), rotary), width)
        rotated_k = widen(rotate(k, rotation_for(k, call, keys, 0, False), rotary), width)
        for piece in pieces:
            out, lse = flash(
                gather_rows(rotated_q, piece),
                gather_keys(rotated_k, piece),
                gather_keys(v, piece),
                0.0,
                piece.causal and not piece.width,
                attn_mask=attn_mask(piece, rotated_q.dtype),
                scale=scale,
            )
            partials.append((piece, narrow(out, head_dim_v), lse))
    return merge_partials(partials, q, head_dim_v)


def _attend_backward(
    grad_out, grad_lse, q, k, v, out, lse, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotary, seqlen_q, seqlen_k, head_dim, head_dim_v = call.rotary, q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    width, lse, scale = max(head_dim, head_dim_v), lse.transpose(1, 2), flash_scale(call, seqlen_k)
    out, upcast_v = widen(upcast(out), width), widen(upcast(v), width)
    grad_out = torch.zeros_like(out) if grad_out is None else widen(upcast(grad_out), width)
    if grad_lse is not None:
        # dS = P * (dO.V - dO.O + dlse). An extra channel holds dlse in dO, 1 in V, and 0 in O, q and k.
        grad_out = _add_channel(grad_out, grad_lse.transpose(1, 2))
        upcast_v, out = _add_channel(upcast_v, 1.0), _add_channel(out, 0.0)
    grad_q = grad_k = grad_v = None
    for q_map, k_map, pieces in _plan(q, k, call):
        q_rotation = rotation_for(q, call, q_map, seqlen_k - seqlen_q, True)
        k_rotation = rotation_for(k, call, k_map, 0, False)
        rotated_q, rotated_k = (
            widen(rotate(x, rotation, rotary), width) for x, rotation in ((q, q_rotation), (k, k_rotation))
        )
        if grad_lse is not None:
            rotated_q, rotated_k = _add_channel(rotated_q, 0.0), _add_channel(rotated_k, 0.0)
        grad_rotated_q: Any = None
        grad_rotated_k: Any = None
        for piece in pieces:
            piece_q, piece_k, piece_v = flash_backward(
                gather_rows(grad_out, piece),
                gather_rows(rotated_q, piece),
                gather_keys(rotated_k, piece),
                gather_keys(upcast_v, piece),
                gather_rows(out, piece),
                gather_rows(lse, piece),
                0.0,
                piece.causal and not piece.width,
                attn_mask=attn_mask(piece, rotated_q.dtype),
                scale=scale,
            )
            rows, keys = (piece.row, piece.rows), (piece.key, piece.keys)
            grad_rotated_q = _accumulate(grad_rotated_q, piece_q[..., :head_dim], q.shape, *rows, piece)
            grad_rotated_k = _accumulate(grad_rotated_k, piece_k[..., :head_dim], k.shape, *keys, piece)
            grad_v = _accumulate(grad_v, piece_v[..., :head_dim_v], v.shape, *keys, piece)
        band_q = rotate(grad_rotated_q, q_rotation, rotary, inverse=True)
        band_k = rotate(grad_rotated_k, k_rotation, rotary, inverse=True)
        grad_q = band_q if grad_q is None else grad_q.add_(band_q)
        grad_k = band_k if grad_k is None else grad_k.add_(band_k)
    if not call.score_scale:
        grad_q = grad_k = None
    grad_q, grad_k, grad_v = (
        x.new_zeros(x.shape) if grad is None else grad.to(x.dtype).contiguous()
        for x, grad in ((q, grad_q), (k, grad_k), (v, grad_v))
    )
    return grad_q, grad_k, grad_v


def _add_channel(x: torch.Tensor, value) -> torch.Tensor:
    """Returns x with eight more channels: value, then zeros. The kernel needs a head_dim that is a multiple of
    eight."""
    wider = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
    wider[..., :-8] = x
    wider[..., -8] = value
    return wider


def _accumulate(total, piece_grad, shape, first: int, count: int, piece: Piece) -> torch.Tensor:
    """Adds the gradient of one piece to total (batch, seqlen, heads, head_dim) and returns total. If total is None, it
    is created."""
    if total is None:
        if count == shape[1] and not piece.reversed:
            return piece_grad.transpose(1, 2)
        total = piece_grad.new_zeros(shape)
    windows(total, first, count, piece).add_(scatter_tile(piece_grad, piece))
    return total
