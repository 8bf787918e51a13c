"""The factor on queries by the length of their sequence, ``Rotary.length_scale``: max(1, 0.1 ln(n / length) + 1).

n is how many keys the sequence has in this call. The queries are scaled before the operator, or where all sequences
are equally long softmax_scale is, so backends and kernels do not know of it. (Qwen2.5-1M's engine, with dual chunk
attention; the shape of YaRN's temperature.)
"""

from __future__ import annotations

import math

import torch

from ..backends.calls import ONE_PER_QUERY, CacheLayout
from ..rotary.rotary import Rotary


def length_factor(rotary: Rotary, seqlen: int) -> float:
    """Of a sequence of so many keys; 1 where the scheme has no such scale."""
    if rotary.length_scale is None:
        return 1.0
    return max(1.0, 0.1 * math.log(max(seqlen, 1) / rotary.length_scale) + 1)


def scale_packed(q: torch.Tensor, rotary: Rotary, cu_seqlens_q: torch.Tensor, seqlens_k: torch.Tensor) -> torch.Tensor:
    """q (total_q, heads_q, head_dim), each row by the factor of its sequence; seqlens_k: (sequences,), any integers."""
    if not seqlens_k.shape[0]:
        return q
    row = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].to(torch.int64), row, right=True)
    return _scaled(q, rotary, seqlens_k[sequence.clamp(max=seqlens_k.shape[0] - 1)])


def scale_cached(q: torch.Tensor, rotary: Rotary, layout: CacheLayout, capacity: int) -> torch.Tensor:
    """q of attention_with_cache, or packed, by the factors of its sequences.

    capacity: slots that a sequence can have.
    """
    keys = layout.seqlens.to(torch.int64)
    if layout.seqlen_new == ONE_PER_QUERY:
        keys = keys + layout.cu_seqlens_q.diff()
    else:
        keys = keys + layout.seqlen_new
    keys = keys.clamp(0, capacity)
    if layout.leftpad is not None:
        keys = keys - layout.leftpad.clamp(min=0)
    if layout.cu_seqlens_q is None:
        return _scaled(q, rotary, keys)
    return scale_packed(q, rotary, layout.cu_seqlens_q, keys)


def _scaled(q: torch.Tensor, rotary: Rotary, seqlens: torch.Tensor) -> torch.Tensor:
    """q (n, ...) by the factors of n lengths, rounded once."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    factor = (0.1 * (seqlens.clamp(min=1).to(dtype) / rotary.length_scale).log() + 1).clamp(min=1)
    return (q * factor.view(-1, *(1,) * (q.ndim - 1))).to(q.dtype)
