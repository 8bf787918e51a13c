"""Computes ``attention`` and ``attention_varlen`` with the compiled kernels (sequences.py)."""

from __future__ import annotations

import torch

from ...calls.records import AttentionCall, Kept, KeptShapes, refuse, unseen
from ..shared.packed import backward_sequences, forward_sequences
from . import loader, sequences
from .served import unserved_attention


def kept_shapes(k: torch.Tensor, call: AttentionCall) -> KeptShapes:
    """Returns empty shapes, because nothing is saved. To save memory, the backward rotates the keys again, in one pass
    over k."""
    return KeptShapes()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Returns (out like q, lse in float32, None)."""
    refuse("cpu", unserved_attention(q, v, call))
    if call.cu_seqlens_q is None:
        return *_forward(q, k, v, call), None
    return *forward_sequences(_forward, q, k, v, call), None


def backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: Kept | None,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of raw q, k and v. At most one of grad_out and grad_lse is None."""
    refuse("cpu", unserved_attention(q, v, call))
    if call.cu_seqlens_q is None:
        return _backward(grad_out, grad_lse, q, k, v, out, lse, call)
    return backward_sequences(_backward, grad_out, grad_lse, q, k, v, out, lse, call)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall):
    if not (q.numel() and k.numel() and call.bands):
        return unseen(q, v)
    return sequences.forward(loader.required(), q, k, v, call)


def _backward(grad_out, grad_lse, q, k, v, out, lse, call: AttentionCall):
    if not (q.numel() and k.numel() and call.bands):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    return sequences.backward(loader.required(), grad_out, grad_lse, q, k, v, out, lse, call)
