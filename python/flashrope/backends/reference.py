"""The formula of banded rotary attention written out in plain PyTorch: dense, differentiable, any float type.

The tests hold the other implementations against this one in float64.
"""

from __future__ import annotations

import torch

from ..cos_sin import cos_sin
from ..rotary import Rotary
from .base import CacheCall, AttentionCall, places_behind


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    return ""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); computes in float64 for float64 inputs and in float32 for all others."""
    if call.cu_seqlens_q is None:
        return one_length(q, k, v, call)
    out = torch.zeros_like(q)
    lse = q.new_full(call.lse_shape(q), float("-inf"), dtype=accumulation_type(q))
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        piece, piece_lse = one_length(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], call)
        out = out.index_copy(0, torch.arange(q0, q1, device=q.device), piece[0])
        lse = lse.index_copy(1, torch.arange(q0, q1, device=q.device), piece_lse[0])
    return out, lse


def append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table) -> None:
    """Writes k, v (batch, seqlen_new, heads_kv, head_dim) to the slots behind cache_seqlens. What has no place is
    dropped."""
    page, row, fits = places_behind(k_cache, cache_seqlens, block_table, k.shape[1])
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[page[fits], row[fits]] = new[fits]


def attention_with_cache(q, k_cache, v_cache, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): for every sequence its keys gathered, then the plain formula. Lengths are kept inside the capacity
    and page numbers inside the cache, whatever the tables hold."""
    rows = []
    for b, (first, end) in enumerate(call.bounds(k_cache)):
        keys = slice(first, end)
        if call.block_table is None:
            k, v = k_cache[b, keys], v_cache[b, keys]
        else:
            slot = torch.arange(first, end, device=q.device)
            page = call.block_table[b, slot // k_cache.shape[1]].to(torch.int64).clamp(0, k_cache.shape[0] - 1)
            k, v = (cache[page, slot % k_cache.shape[1]] for cache in (k_cache, v_cache))
        rows.append(
            one_length(q[b : b + 1], k[None], v[None], AttentionCall(call.rotary, call.causal, call.softmax_scale))
        )
    out = torch.cat([out for out, _ in rows]) if rows else torch.empty_like(q)
    lse = (
        torch.cat([lse for _, lse in rows])
        if rows
        else q.new_empty(0, q.shape[2], q.shape[1], dtype=accumulation_type(q))
    )
    return out, lse


def one_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    rotary, dtype, device = call.rotary, q.dtype, q.device
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.to(accumulation_type(x)) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)

    i = torch.arange(seqlen_q, dtype=torch.float64, device=device) + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, dtype=torch.float64, device=device)
    distance = i[:, None] - j[None, :]
    position_q = i if call.positions is None else call.positions
    position_k = j if call.positions is None else call.positions

    factor, floor = call.log_n
    if factor:
        log_n = (factor * torch.log(position_q.to(torch.float64).clamp(min=0) + 1)).clamp(min=floor)
        q = q * log_n[..., None, None].to(q)

    seen = torch.zeros_like(distance, dtype=torch.bool)
    scores = torch.zeros(q.shape[0], q.shape[2], seqlen_q, seqlen_k, dtype=q.dtype, device=device)
    for start, stop, slope, offset in call.bands:
        inside = (distance >= start) & (distance < stop)
        turned_q = turn(q, rotary, slope * position_q + offset)
        turned_k = turn(k, rotary, slope * position_k)
        scores = torch.where(inside, call.score_scale * torch.einsum("bihd,bjhd->bhij", turned_q, turned_k), scores)
        seen = seen | inside

    empty = ~seen.any(dim=-1)
    scores = scores.masked_fill(~(seen | empty[:, None]), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if seqlen_k else scores.new_zeros(scores.shape[:-1])
    weights = torch.exp(scores - lse[..., None]).masked_fill(empty[:, None], 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v).to(dtype)
    return out, lse.masked_fill(empty, float("-inf"))


def turn(x: torch.Tensor, rotary: Rotary, position: torch.Tensor) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) with its first rotary_dim channels turned; position (seqlen,) or (batch,
    seqlen)."""
    if rotary.rotary_dim == 0:
        return x
    cos, sin = (table[..., None, :].to(x) for table in cos_sin(rotary, position))
    paired, rest = x[..., : rotary.rotary_dim], x[..., rotary.rotary_dim :]
    if rotary.interleaved:
        first, second = paired[..., 0::2], paired[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = paired.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def accumulation_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
