"""Computes ``attention`` and its gradients with the compiled kernels of csrc/cpu/forward.cpp and
csrc/cpu/backward.cpp."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...calls.cache_tables import CacheLayer
from ...calls.records import AttentionCall, out_shape
from ...schemes.bands import Band, PositionMap
from ..shared.host_rotation import Rotation, rotation_for
from .library import (
    DTYPES,
    INT8,
    BackwardCall,
    BandLimits,
    ForwardBand,
    ForwardCall,
    Library,
    Table,
    TensorStruct,
    point_to_options,
)


class Place(NamedTuple):
    """The positions of queries and keys that are only a part of a sequence, and the bands between them."""

    bands: tuple[Band, ...]
    shift: int  # query row r is at distance shift + r from the first key
    position_q: float  # position of the first query row
    position_k: float  # position of the first key
    seqlen: int  # number of keys of the whole sequence


def forward(
    library: Library,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    place: Place | None = None,
    out_type: torch.dtype | None = None,
    layer: CacheLayer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``out_shape``, lse in float32).

    scales: (k_scale, v_scale), each (batch, seqlen_k, heads_kv), if k and v are quantized. out_type: float32 or q's
        dtype. None: q's dtype. layer: the layer of a cache to which k and v belong.
    """
    (batch, seqlen_q, heads_q, _), dtype = q.shape, out_type or q.dtype
    multiplied = library.multiplies(q.dtype, seqlen_q)
    if not multiplied and (scales is not None or dtype != q.dtype):
        q = q.to(torch.float32)
        if scales is None:
            k, v = k.to(torch.float32), v.to(torch.float32)
    out = q.new_empty(out_shape(q, v), dtype=dtype if multiplied else q.dtype)
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)
    c, _tables = _describe(library, q, k, v, out, lse, call, place)
    if scales is not None:
        c.dtype = INT8
        c.k_scale, c.v_scale = (TensorStruct.of(x) for x in scales)
    c.float32_out = out.dtype == torch.float32
    if layer is not None:
        point_to_options(c, layer)
    if library.forward(c, q.dtype):
        raise MemoryError("attention: no memory for the rotated keys")
    return out.to(dtype), lse


def backward(
    library: Library,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the contiguous gradients of raw q, k and v, with the shapes and dtypes of q, k and v."""
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    c = BackwardCall()
    c.forward, _tables = _describe(library, q, k, v, out, lse, call)
    c.grad_out, c.grad_q, c.grad_k, c.grad_v = (TensorStruct.of(x) for x in (grad_out, *grads))
    c.grad_lse = None if grad_lse is None else grad_lse.data_ptr()
    if library.backward(c, q.dtype):
        raise MemoryError("attention: no memory for the gradients in float32")
    return grads


def _describe(library, q, k, v, out, lse, call, place: Place | None = None) -> tuple[ForwardCall, list]:
    """Returns the call, and the tables that it points to. The tables must exist until the kernel has run."""
    (batch, seqlen_q, heads_q, head_dim), rotary = q.shape, call.rotary
    seqlen_k, heads_kv = k.shape[1:3]
    if place is None:
        place = Place(call.bands, seqlen_k - seqlen_q, seqlen_k - seqlen_q, 0, seqlen_k)
    c = ForwardCall(lse=lse.data_ptr(), pairs=len(rotary.frequencies), interleaved=rotary.interleaved)
    c.first_channel = rotary.first_channel
    c.q, c.k, c.v, c.out = (TensorStruct.of(x) for x in (q, k, v, out))
    c.batch, c.seqlen_q, c.seqlen_k, c.shift = batch, seqlen_q, seqlen_k, place.shift
    c.heads_q, c.heads_kv, c.head_dim, c.head_dim_v = heads_q, heads_kv, head_dim, out.shape[-1]
    copies: list[PositionMap] = []  # the position map of each rotated copy of k
    tables = []
    for n, band in enumerate(place.bands):
        if band.keys not in copies:
            tables.append(rotation_for(k, call, band.keys, place.position_k, False))
            c.k_copies[len(copies)] = table_of(tables[-1])
            copies.append(band.keys)
        tables.append(rotation_for(q, call, band.queries, place.position_q, True))
        c.bands[n] = ForwardBand(BandLimits.of(band), table_of(tables[-1]), copies.index(band.keys))
    c.num_bands, c.num_copies = len(place.bands), len(copies)
    c.scale = call.score_scale * call.rotary.query_scale.of_length(place.seqlen)
    c.dtype, c.threads, c.parallel_for = DTYPES[q.dtype], torch.get_num_threads(), library.parallel_for
    return c, tables


def table_of(rotation: Rotation | None) -> Table:
    """Returns a Table with the addresses of cos and sin, which are ([batch,] rows, 1, channels). Dimensions of size 1
    broadcast."""
    table = Table()
    for name, x in zip(("cos", "sin"), rotation or (), strict=False):
        if x is not None:
            setattr(table, name, x.data_ptr())
            setattr(table, f"{name}_batch", x.stride(0) if x.ndim == 4 and x.shape[0] > 1 else 0)
            setattr(table, f"{name}_row", x.stride(-3) if x.shape[-3] > 1 else 0)
    return table
