"""Plans attention over a cache with the compiled kernels for all layers of a step."""

from __future__ import annotations

import torch

from ...calls.cache_tables import CacheLayer, CacheTables
from ...calls.plans import Queries
from ...calls.records import CacheCall, refuse
from ...schemes.rotary import Rotary
from ..shared.step_part import PartsPlan
from . import loader, rotated
from .cached import attend
from .decode import DecodePart
from .served import unserved_cache


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> CpuCachePlan:
    """Plans the layers of a step, as ``CacheBackend`` describes."""
    refuse("cpu", unserved_cache(queries, layer, call))
    return CpuCachePlan(call)


def append_to_cache(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None = None
) -> None:
    """Writes new keys and values, as ``CacheBackend`` describes."""
    rotated.Append(loader.required(), tables, rotary).run(layer, k, v)


class CpuCachePlan(PartsPlan):
    """Attention over a cache for the layers of a step, as ``protocol.BackendPlan`` describes it."""

    def __init__(self, call: CacheCall):
        super().__init__(call, attend, DecodePart)
        self._append: rotated.Append | None = None

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        if self._append is None:
            self._append = rotated.Append(loader.required(), self._tables, self._rotary)
        self._append.run(layer, k, v)
