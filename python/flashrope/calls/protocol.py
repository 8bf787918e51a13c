"""Defines the functions of a backend. A backend is a module of ``backends`` that has the functions of
``AttentionBackend``, of ``CacheBackend``, or of both. Backends never import one another.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..schemes.rotary import Rotary
from .cache_tables import CacheLayer, CachePositions, CacheTables
from .plans import Queries
from .records import AttentionCall, CacheCall, Kept, KeptShapes, RotateCall

# Backends whose forward is plain PyTorch. Autograd differentiates it to any order, and compilers trace it.
DIFFERENTIABLE = ("reference",)


class AttentionBackend(Protocol):
    """Serves ``attention`` and ``attention_varlen``."""

    def unsupported_reason(self, q: torch.Tensor, cached: bool = False) -> str:
        """Returns why this backend cannot serve tensors like q, or "". cached: whether the call is
        ``attention_with_cache``."""

    def kept_shapes(self, k: torch.Tensor, call: AttentionCall) -> KeptShapes:
        """Returns the shapes of the tensors that ``forward`` saves for ``backward``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
        """Returns (out, lse, kept). out has ``out_shape`` and is contiguous. lse is float32, or float64 for float64
        inputs. kept: what ``backward`` needs besides out and lse, or None. v may have a different head_dim."""

    def backward(
        self,
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
        """Returns the contiguous gradients of raw q, k and v, with the shapes and dtypes of q, k and v. At most one of
        grad_out and grad_lse is None."""


class RotateBackend(Protocol):
    """Serves ``rotate``, and rotates new keys for caches of rotated keys."""

    def rotate(self, x: torch.Tensor, call: RotateCall) -> torch.Tensor:
        """Returns the rotated x, contiguous. x is not empty, and the scheme changes some of its channels. For new keys
        outside every sequence the result is undefined."""


class BackendPlan(Protocol):
    """Serves ``attention_with_cache`` for all layers of a step. The layers' tensors differ only in addresses and
    strides."""

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Writes new k and v as ``CacheBackend.append_to_cache`` does. If the cache holds rotated keys, k is rotated
        first."""

    def attend(
        self, q: torch.Tensor, layer: CacheLayer, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse). Packed rows outside every sequence have out 0 and lse -inf.

        out: a contiguous tensor of ``out_shape``. If out is given, the result is written to it. lse: (batch,
            heads_q, seqlen_q), or packed (heads_q, total_q), in float32, or float64 for float64 inputs."""


class CacheBackend(Protocol):
    """Serves ``attention_with_cache``.

    CACHE_OPTIONS: those of ``plans.CACHE_OPTIONS`` that the backend supports. With "positions" it is a
    ``PlacingBackend``.
    """

    CACHE_OPTIONS: frozenset

    def unsupported_reason(self, q: torch.Tensor, cached: bool = False) -> str:
        """Returns why this backend cannot serve tensors like q, or ""."""

    def append_to_cache(
        self,
        layer: CacheLayer,
        k: torch.Tensor,
        v: torch.Tensor | None,
        tables: CacheTables,
        rotary: Rotary | None = None,
    ) -> None:
        """Writes k, v (batch, seqlen_new, heads_kv, head_dim), or packed (total_q, heads_kv, head_dim), after the slots
        in use (tables.seqlens), or to tables.slot_mapping if it is given. Drops tokens without a slot or page. v: None
        if values are channels of the keys. The layer's v may then be None, too. rotary: a scheme from
        ``over_rotated_keys``, by which k is rotated first."""

    def plan_cache(self, call: CacheCall, layer: CacheLayer, queries: Queries) -> BackendPlan:
        """Plans the layers of a step, or one call. The host reads no table before ``append`` or ``attend``. call: the
        caller's call. If it has rotated_keys, the plan computes ``call.for_backend()``. layer: any layer. All layers
        have the shapes and dtypes of this layer."""


class PlacingBackend(Protocol):
    """A ``CacheBackend`` that also supports tables with explicit positions."""

    def unsupported_positions(self, positions: CachePositions) -> str:
        """Returns why this backend cannot serve these tables, or "". The reason names the argument. Reads no values of
        the tables."""
