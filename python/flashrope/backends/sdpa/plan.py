"""Plans attention over a cache on the CPU, composed of PyTorch's kernels, for all layers of a step."""

from __future__ import annotations

import torch

from ...calls import addresses
from ...calls.cache_tables import CacheLayer, CacheTables
from ...calls.int8 import stores
from ...calls.plans import Queries
from ...calls.records import CacheCall, RotateCall
from ...schemes.rotary import Rotary
from ..shared.packed import append_packed
from ..shared.precision import without_autocast
from ..shared.step_part import PartsPlan
from .cached import attend
from .rotated import rotate


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> SdpaCachePlan:
    """Plans the layers of a step, as ``CacheBackend`` describes."""
    return SdpaCachePlan(call, attend)


class SdpaCachePlan(PartsPlan):
    """Attention over a cache for the layers of a step, as ``protocol.BackendPlan`` describes it."""

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        append_to_cache(layer, k, v, self._tables, self._rotary)


@without_autocast
def append_to_cache(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None = None
) -> None:
    """Writes new keys and values, as ``CacheBackend`` describes."""
    if rotary is not None and rotary.changes_channels and k.numel():
        k = rotate(k, RotateCall(rotary, None, tables, tables.capacity(layer.k)))
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
