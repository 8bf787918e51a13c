"""Computes attention over a cache on the CPU for all layers of a step. ``CachePlan`` reads the tables once."""

from __future__ import annotations

import torch

from ...rotary.rotary import Rotary
from .. import addresses
from ..cache_tables import CacheLayer, CacheTables
from ..calls import CacheCall, RotateCall
from ..packed import append_packed, attend_packed
from ..plans import Queries, append_rotary
from ..precision import without_autocast
from ..quantized import stores
from . import loader, rotated
from .cached import attend
from .part import Part


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> CachePlan:
    """Plans the layers of a step, as ``CacheBackend`` describes."""
    return CachePlan(call)


def append_to_cache(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None = None
) -> None:
    """Writes new keys and values, as ``CacheBackend`` describes."""
    if (compiled := loader.load()) and rotated.appends(k, rotary):
        if k.numel() and layer.k.numel():
            rotated.Append(compiled, tables, rotary).run(layer, k, v)
        return
    _append(layer, k, v, tables, rotary)


class CachePlan:
    """Attention over a cache for the layers of a step, as ``protocol.CachePlan`` describes it."""

    def __init__(self, call: CacheCall):
        self._tables, self._rotary = call.tables, append_rotary(call)
        self._call = call.for_backend() if call.rotated_keys else call
        self._append: rotated.Append | None = None
        self._parts: list[tuple] = []

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        if (compiled := loader.load()) and rotated.appends(k, self._rotary):
            if self._append is None:
                self._append = rotated.Append(compiled, self._tables, self._rotary)
            if k.numel() and layer.k.numel():
                self._append.run(layer, k, v)
        else:
            _append(layer, k, v, self._tables, self._rotary)

    def attend(
        self, q: torch.Tensor, layer: CacheLayer, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _attend(q, layer, self._call, self._parts, out)


@without_autocast
def _append(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None
) -> None:
    """Does the same as ``append_to_cache``, with PyTorch's kernels."""
    if rotary is not None and rotary.changes_channels and k.numel():
        k = rotated.rotate(k, RotateCall(rotary, None, tables, tables.capacity(layer.k)))
    if tables.packed is not None:
        return append_packed(append_to_cache, layer, k, v, tables)
    batch, seqlen_new, _, _ = k.shape
    new = stores(layer, k, v)
    if tables.block_table is None:
        lengths = tables.seqlens.tolist()
        length = max(lengths[0], 0) if batch else 0
        if lengths == lengths[:1] * batch and length + seqlen_new <= layer.k.shape[1]:
            for cache, x in new:
                cache.narrow(1, length, seqlen_new).copy_(x)  # takes half the time of assigning to a slice
            return
    page, row, fits = addresses.new_places(tables, layer.k)
    places = page[fits], row[fits]
    for cache, x in new:
        cache.index_put_(places, x[fits])


@without_autocast
def _attend(q: torch.Tensor, layer: CacheLayer, call: CacheCall, parts: list, out: torch.Tensor | None):
    """Attends over one layer.

    parts: a list that the plan's layers share. The first layer fills it. Without packed queries it gets one ``Part``.
    With packed queries it gets a tuple (sequences, rows, tables, ``Part``) for each run of ``addresses.runs``.
    """
    if call.tables.packed is None:
        if not parts:
            parts.append(Part(call))
        result, lse = attend(q, layer, parts[0], out)
        return _into(out, result), lse
    total_q = q.shape[0]
    if not parts:
        runs = addresses.runs(call.tables, total_q)
        parts += [(sequences, rows, tables, Part(call.with_tables(tables))) for sequences, rows, tables in runs]
    result, lse = attend_packed(
        lambda batch, own, run: attend(batch, own, run[3], _rows_of(out, run, batch)), q, layer, parts, total_q
    )
    return _into(out, result), lse


def _rows_of(out: torch.Tensor | None, run: tuple, batch: torch.Tensor) -> torch.Tensor | None:
    """Returns the rows of out for a run of packed queries, in the shape of the run's batch."""
    return None if out is None else out[run[1]].view(batch.shape)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Returns result. If out is given, copies result to out and returns out."""
    if out is None:
        return result
    return out if out.data_ptr() == result.data_ptr() else out.copy_(result)
