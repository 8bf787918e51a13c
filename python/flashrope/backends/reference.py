"""Computes the formula of banded rotary attention in plain PyTorch: dense, differentiable, for every float type.

This file is the specification. The tests compare the other backends with it in float64.
"""

from __future__ import annotations

import torch

from ..calls import addresses
from ..calls.cache_tables import CacheLayer, CachePositions, CacheTables
from ..calls.int8 import loaded, stores
from ..calls.plans import CACHE_OPTIONS as CACHE_OPTIONS
from ..calls.plans import EachLayer, Queries
from ..calls.records import AttentionCall, CacheCall, Kept, KeptShapes, RotateCall, accumulation_type, out_shape, unseen
from ..calls.visible import of_queries, visible_tokens
from ..schemes.bands import STILL
from ..schemes.cos_sin import cos_sin
from ..schemes.rotary import Rotary
from ..schemes.scales import UNSCALED
from .shared.packed import append_packed, attend_packed
from .shared.precision import without_autocast


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    """Returns "", because this backend serves every call."""
    return ""


def unsupported_positions(positions: CachePositions) -> str:
    """Returns "", because this backend supports all tables."""
    return ""


def kept_shapes(k: torch.Tensor, call: AttentionCall) -> KeptShapes:
    """Returns no shapes: nothing is saved for the backward."""
    return KeptShapes()


@without_autocast
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Returns (out, lse, None), computed in float64 for float64 inputs and in float32 for all others."""
    if call.cu_seqlens_q is None:
        return *dense_attention(q, k, v, call), None
    out, lse = unseen(q, v)
    none = slice(0, 0)
    empty = call._replace(positions=None if call.positions is None else call.positions[:, none])
    for rows, keys, sequence in ((none, none, empty), *call.packed_sequences()):  # out has a graph without sequences
        sequence_out, sequence_lse = dense_attention(q[None, rows], k[None, keys], v[None, keys], sequence)
        index = torch.arange(rows.start, rows.stop, device=q.device)
        out = out.index_copy(0, index, sequence_out[0])
        lse = lse.index_copy(1, index, sequence_lse[0])
    return out, lse, None


@without_autocast
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
    """Returns the gradients of raw q, k and v: runs ``forward`` again and lets autograd differentiate it."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        results = zip(forward(inputs[0], inputs[1], inputs[2], call), (grad_out, grad_lse), strict=False)
    pairs = [(result, grad) for result, grad in results if grad is not None and result.requires_grad]
    grads: tuple[torch.Tensor | None, ...] = (None, None, None)
    if pairs:
        outputs, grad_outputs = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)
    grad_q, grad_k, grad_v = (
        x.new_zeros(x.shape) if grad is None else grad.contiguous() for x, grad in zip((q, k, v), grads, strict=True)
    )
    return grad_q, grad_k, grad_v


@without_autocast
def append_to_cache(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None = None
) -> None:
    """Writes new keys and values, as ``CacheBackend`` describes."""
    if rotary is not None:
        k = rotate(k, RotateCall(rotary, None, tables, tables.capacity(layer.k)))
    if tables.packed is not None:
        return append_packed(append_to_cache, layer, k, v, tables)
    page, row, fits = addresses.new_places(tables, layer.k)
    for cache, new in stores(layer, k, v):
        cache[page[fits], row[fits]] = new[fits]


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> EachLayer:
    """Plans the layers of a step, as ``CacheBackend`` describes."""
    return EachLayer(append_to_cache, attention_with_cache, call)


@without_autocast
def attention_with_cache(q: torch.Tensor, layer: CacheLayer, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse). Gathers the keys of every sequence, then applies the plain formula.

    Lengths are clamped to the capacity, and page numbers to the cache, so wrong tables cannot address memory outside
    the buffers.
    """
    tables, results = call.tables, []
    if tables.packed is not None:

        def attend(q, layer, run):
            return attention_with_cache(q, layer, call._replace(tables=run[2]))

        return attend_packed(attend, q, layer, list(addresses.runs(tables, q.shape[0])), q.shape[0])
    positions = tables.positions or CachePositions()
    for b, (first, end) in enumerate(addresses.bounds(tables, layer.k)):
        keys = visible_tokens(positions, b, first, end, tables.block_table, layer.k)
        rows = (x if x is None else x[keys.page, keys.row] for x in layer.rows)
        k, v = loaded(layer, rows, accumulation_type(q))
        sequence, places = AttentionCall(call.rotary, call.causal, call.softmax_scale), None
        if tables.positions is not None:
            places = of_queries(positions, b, q.shape[1], keys.position), keys.position
        results.append(dense_attention(q[b : b + 1], k[None], v[None], sequence, places=places))
    if not results:
        lse = q.new_empty(0, q.shape[2], q.shape[1], dtype=accumulation_type(q))
        return q.new_empty(out_shape(q, layer.v)), lse
    out, lse = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    return out, lse


@without_autocast
def rotate(x: torch.Tensor, call: RotateCall) -> torch.Tensor:
    """Rotates x by the positions of the call, as ``RotateBackend`` describes."""
    rotary, positions = call.rotary, call.positions
    if call.tables is not None:
        positions = addresses.new_positions(call.tables, call.capacity, x.shape[0] if x.ndim == 4 else 1, x.shape[-3])
        positions = positions if x.ndim == 4 else positions[0]
    elif positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    wide = scale_rotated(x.to(accumulation_type(x)), rotary)
    return rotate_by(wide, rotary, call.position_map.of(positions)).to(x.dtype).contiguous()


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    sinks: torch.Tensor | None = None,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a batch of sequences of equal length. Shapes are as in ``flashrope.attention``.

    sinks: (heads_q,), as in ``flashrope.attention``. In this function the softmax itself counts the sinks, while
        ``flashrope.attention`` adds them to the results of a backend.
    places: float64 positions of queries and of keys, (seqlen,) or (seqlen, axes), from which distances are computed.
        The causal mask compares indices. Cannot be combined with call.positions: if that is set, bands compare indices,
        not positions.
    """
    rotary, dtype, device = call.rotary, q.dtype, q.device
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.to(accumulation_type(x)) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)

    i = torch.arange(seqlen_q, dtype=torch.float64, device=device) + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, dtype=torch.float64, device=device)
    q_position = i if call.positions is None else call.positions
    k_position = j if call.positions is None else call.positions
    allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if places is not None:
        q_position, k_position = places
        if call.causal:
            allowed = j <= i[:, None]
        if not rotary.axis:
            i, j = places

    if call.rotary.query_scale != UNSCALED:
        q = q * call.rotary.query_scale.of(q_position, seqlen_k)[..., None, None].to(q)
    if rotary.rotated_scale != 1:
        q = scale_rotated(q, rotary)

    visible = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    scores = torch.zeros(q.shape[0], q.shape[2], seqlen_q, seqlen_k, dtype=q.dtype, device=device)
    for band in call.bands:
        in_band = band.holds(i[:, None], j[None, :]) & allowed
        rotated_q = rotate_by(q, rotary, band.queries.of(q_position))
        # Keys that do not rotate are used as they are, because rotating an infinity by angle 0 would give NaN.
        rotated_k = k if band.keys == STILL else rotate_by(k, rotary, band.keys.of(k_position))
        band_scores = call.score_scale * torch.einsum("bihd,bjhd->bhij", rotated_q, rotated_k)
        scores = torch.where(in_band, band_scores, scores)
        visible = visible | in_band

    if sinks is not None:  # sinks are one more column of the scores, without a value
        column = sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores.masked_fill(~visible, float("-inf")), column), dim=-1)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1)[..., :-1], v).to(dtype).contiguous()
        return out, torch.logsumexp(scores, dim=-1)
    empty = ~visible.any(dim=-1)  # rows without keys: out is 0, lse is -inf
    scores = scores.masked_fill(~(visible | empty[:, None]), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if seqlen_k else scores.sum(-1)  # 0, with a graph
    weights = torch.exp(scores - lse[..., None]).masked_fill(empty[:, None], 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v).to(dtype).contiguous()
    return out, lse.masked_fill(empty, float("-inf"))


def rotate_by(x: torch.Tensor, rotary: Rotary, position: torch.Tensor) -> torch.Tensor:
    """Rotates the rotary_dim channels of x (batch, seqlen, heads, head_dim) from first_channel on.

    position: (seqlen,) or (batch, seqlen), with one more dimension, axes, for an axial scheme.
    """
    if rotary.rotary_dim == 0:
        return x
    cos, sin = (table[..., None, :].to(x) for table in cos_sin(rotary, position))
    before, paired, rest = table_channels(x, rotary)
    if rotary.interleaved:
        first, second = paired[..., 0::2], paired[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = paired.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((before, rotated, rest), dim=-1)


def scale_rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Returns x (..., head_dim) with the channels that form pairs multiplied by rotated_scale."""
    before, paired, rest = table_channels(x, rotary)
    return torch.cat((before, paired * rotary.rotated_scale, rest), dim=-1)


def table_channels(x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three slices of x (..., head_dim): the channels before the pairs, the channels that form pairs, and the
    channels after the pairs."""
    first, stop = rotary.first_channel, rotary.first_channel + rotary.rotary_dim
    return x[..., :first], x[..., first:stop], x[..., stop:]
