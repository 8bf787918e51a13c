"""Computes ``attention_with_cache`` with the compiled kernels. The cache is read in place.

A few queries per sequence are decoded (decode.py). More queries are computed by the kernel of ``attention`` (tiles.py),
one block of slots per sequence. If a sequence is computed on its own, its results are bitwise identical for a
contiguous and for a paged cache. With explicit positions, each run of consecutive slots and positions (runs.py) is read
like a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..blocks import Block, blocks_of_runs, groups
from ..cache_tables import CacheLayer
from ..calls import AttentionCall, CacheCall, cached_lse_shape, cached_out_shape
from ..merging import add_partial
from ..runs import Placed, Rows, bands_between
from . import decode, loader, tiles
from .decode import DecodePart
from .library import Library
from .served import refuse, unserved_runs


def attend(
    q: torch.Tensor, layer: CacheLayer, part: DecodePart, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``cached_out_shape``, lse in float32) of a batch of sequences. out: a contiguous tensor of this
    shape, to which the result may be written."""
    call, library, seqlen_q = part.call, loader.required(), q.shape[1]
    if layer.key_weight is not None:
        layer = layer._replace(key_weight=layer.key_weight.contiguous())  # required by the kernels
    placed: list[Placed] | None = None
    if call.tables.positions is not None:
        placed = part.placed(layer.k, seqlen_q)
        refuse(unserved_runs(placed))
    if decode.serves(q, layer):
        return decode.decode(library, q, layer, part, placed, out=out)
    result = q.new_zeros(cached_out_shape(q, layer))
    lse = q.new_full(cached_lse_shape(q), float("-inf"), dtype=torch.float32)
    if not (q.numel() and layer.k.numel()):
        return result, lse
    if placed is not None:
        for b, sequence in enumerate(placed):
            own, blocks = slice(b, b + 1), blocks_of_runs(layer, call.tables.block_table, b, sequence.keys, whole=True)
            result[own], lse[own] = _attend(library, q[own], blocks, sequence.seqlen, call, layer, sequence.rows())
        return result, lse
    for sequences, seqlen, blocks in groups(layer, part, whole=True):
        found = _attend(library, q[sequences], blocks, seqlen, call, layer, [Rows.last(seqlen_q, seqlen)])
        if sequences == slice(0, q.shape[0]):
            return found
        result[sequences], lse[sequences] = found
    return result, lse


def _attend(
    library: Library,
    q: torch.Tensor,
    blocks: Iterable[Block],
    seqlen: int,
    call: CacheCall,
    layer: CacheLayer,
    queries: list[Rows],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with each contiguous run of queries to each run of keys that it can see, and returns (out, lse). All
    sequences have seqlen keys. layer: the layer from which the blocks come."""
    attention, whole = AttentionCall(call.rotary, call.causal, call.softmax_scale), (q.shape[1], seqlen)
    out = q.new_zeros(cached_out_shape(q, layer), dtype=torch.float32)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for block in blocks:
        k, v = block.k, block.v
        scales = None if block.k_scale is None or block.v_scale is None else (block.k_scale, block.v_scale)
        for rows in queries:
            bands, shift = bands_between(call.bands, call.causal, rows, block.position, block.order)
            place = tiles.Place(bands, shift, rows.position, block.position, seqlen)
            if (rows.rows, k.shape[1]) == whole:
                return tiles.forward(library, q, k, v, attention, scales, place, key_weight=layer.key_weight)
            if not any(band.start < shift + rows.rows and band.stop > shift - k.shape[1] + 1 for band in bands):
                continue
            own = slice(rows.row, rows.row + rows.rows)
            if scales is None and not library.multiplies(q.dtype, q.shape[1]):
                k, v = k.to(torch.float32), v.to(torch.float32)  # converted once for all runs of queries
            run_out, run_lse = tiles.forward(
                library, q[:, own], k, v, attention, scales, place, torch.float32, layer.key_weight
            )
            add_partial(out[:, own].transpose(1, 2), lse[..., own], run_out.transpose(1, 2), run_lse)
    return out.to(q.dtype), lse
