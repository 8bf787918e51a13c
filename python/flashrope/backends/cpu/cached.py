"""Computes ``attention_with_cache`` with the compiled kernels. The cache is read in place.

A few queries per sequence are decoded (decode.py). More queries are computed by the kernel of ``attention``
(sequences.py), one block of slots per sequence. If a sequence is computed on its own, its results are bitwise identical
for a contiguous and for a paged cache. With explicit positions, each run of consecutive slots and positions (runs.py)
is read like a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ...calls.cache_tables import CacheLayer
from ...calls.plans import options_of
from ...calls.records import AttentionCall, CacheCall, out_shape, refuse, unseen
from ..shared.blocks import Block, blocks_of_runs, groups
from ..shared.merging import add_partial
from ..shared.runs import Placed, Rows, bands_between
from ..shared.step_part import joined
from . import decode, loader
from .decode import DecodePart
from .library import Library
from .sequences import Place, forward
from .served import unserved_runs


def attend(
    q: torch.Tensor, layer: CacheLayer, part: DecodePart, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``out_shape``, lse in float32) of a batch of sequences. out: a contiguous tensor of this
    shape, to which the result may be written."""
    library = loader.required()
    if options := options_of(layer, False):  # the kernels need contiguous options
        layer = layer._replace(**{name: getattr(layer, name).contiguous() for name in options})
    placed: list[Placed] | None = None
    if part.call.tables.positions is not None:
        placed = part.placed(layer.k, q.shape[1])
        refuse("cpu", unserved_runs(placed))
    if decode.serves(q, layer):
        return decode.decode(library, q, layer, part, placed, out=out)
    if not (q.numel() and layer.k.numel()):
        return unseen(q, layer.v)
    return joined(q, layer, _shares(library, q, layer, part, placed))


def _shares(
    library: Library, q: torch.Tensor, layer: CacheLayer, part: DecodePart, placed: list[Placed] | None
) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
    """Yields (sequences, their out and lse)."""
    call = part.call
    if placed is None:
        for sequences, seqlen, blocks in groups(layer, part, whole=True):
            rows = [Rows.last(q.shape[1], seqlen)]
            yield sequences, _attend(library, q[sequences], blocks, seqlen, call, layer, rows)
        return
    for b, sequence in enumerate(placed):
        own, blocks = slice(b, b + 1), blocks_of_runs(layer, call.tables.block_table, b, sequence.keys, whole=True)
        yield own, _attend(library, q[own], blocks, sequence.seqlen, call, layer, sequence.rows())


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
    out = q.new_zeros(out_shape(q, layer.v), dtype=torch.float32)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for block in blocks:
        k, v = block.k, block.v
        scales = None if block.k_scale is None or block.v_scale is None else (block.k_scale, block.v_scale)
        for rows in queries:
            bands, shift = bands_between(call.bands, call.causal, rows, block.position, block.order)
            place = Place(bands, shift, rows.position, block.position, seqlen)
            if (rows.rows, k.shape[1]) == whole:
                return forward(library, q, k, v, attention, scales, place, layer=layer)
            if not any(band.start < shift + rows.rows and band.stop > shift - k.shape[1] + 1 for band in bands):
                continue
            own = slice(rows.row, rows.row + rows.rows)
            if scales is None and not library.multiplies(q.dtype, q.shape[1]):
                k, v = k.to(torch.float32), v.to(torch.float32)  # converted once for all runs of queries
            run_out, run_lse = forward(library, q[:, own], k, v, attention, scales, place, torch.float32, layer)
            add_partial(out[:, own].transpose(1, 2), lse[..., own], run_out.transpose(1, 2), run_lse)
    return out.to(q.dtype), lse
