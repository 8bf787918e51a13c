"""Code that backends share to plan attention over a cache once for all layers of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..schemes.rotary import Rotary
from ..schemes.rotated_keys import over_rotated_keys
from .cache_tables import LAYER_OPTIONS, CacheLayer
from .records import CacheCall


class Queries(NamedTuple):
    """The properties of q that a plan needs. q is (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q,
    head_dim)."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: torch.Tensor) -> Queries:
        return cls(q.shape, q.dtype, q.device)


CACHE_OPTIONS = frozenset(("positions", "rotated_keys", *LAYER_OPTIONS))


def options_of(layer: CacheLayer, rotated_keys: bool) -> list[str]:
    """Returns the CACHE_OPTIONS of a layer, besides positions."""
    given = [name for name in LAYER_OPTIONS if getattr(layer, name) is not None]
    return [*given, "rotated_keys"] if rotated_keys else given


def not_served(option: str) -> str:
    """Returns the reason with which a backend refuses one of CACHE_OPTIONS."""
    kind = "explicit positions of cached tokens are" if option == "positions" else f"{option} is"
    return f"{kind} not supported by its kernels; use impl='triton'"


def append_rotary(call: CacheCall) -> Rotary | None:
    """Returns the scheme that rotates new keys before they are written, or None if the cache holds raw keys."""
    return over_rotated_keys(call.rotary) if call.rotated_keys else None


def attend_once(backend, q: torch.Tensor, layer: CacheLayer, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over one layer's cache with a plan for one call. Returns out and lse. backend: a ``CacheBackend``."""
    return backend.plan_cache(call, layer, Queries.of(q)).attend(q, layer)


class EachLayer:
    """A plan that prepares nothing, and calls a backend's functions ``append`` and ``attend`` for every layer."""

    def __init__(self, append: Callable, attend: Callable, call: CacheCall):
        self._append, self._attend, self._rotary, self._tables = append, attend, append_rotary(call), call.tables
        self._call = call.for_backend() if call.rotated_keys else call

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._append(layer, k, v, self._tables, self._rotary)

    def attend(
        self, q: torch.Tensor, layer: CacheLayer, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, lse = self._attend(q, layer, self._call)
        return (result, lse) if out is None else (out.copy_(result), lse)
