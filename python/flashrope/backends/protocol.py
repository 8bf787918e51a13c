"""What a backend provides. A backend is a module of this package that has the functions of ``AttentionBackend``, of
``CacheBackend``, or of both. Backends never import one another.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..rotary.rotary import Rotary
from .cache_tables import CacheLayer, CachePositions, CacheTables
from .calls import AttentionCall, CacheCall, Kept, KeptShapes, RotateCall
from .plans import Queries


class AttentionBackend(Protocol):
    """Serves ``attention`` and ``attention_varlen``."""

    def unsupported_reason(self, q: torch.Tensor, cached: bool = False) -> str:
        """Why this backend cannot serve tensors like q ("" if it can); cached: in ``attention_with_cache``."""

    def kept_shapes(self, k: torch.Tensor, call: AttentionCall) -> KeptShapes:
        """Shapes of what ``forward`` keeps for ``backward``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
        """out of ``out_shape`` and contiguous, lse in float32 (float64 for float64 inputs), what is kept; None for
        nothing. v may be of another width than q and k."""

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
        """Gradients of raw q, k and v, like them and contiguous. At most one of grad_out and grad_lse is None."""


class RotateBackend(Protocol):
    """Serves ``rotate``, and new keys for caches of rotated keys."""

    def rotate(self, x: torch.Tensor, call: RotateCall) -> torch.Tensor:
        """Like x and contiguous. x is not empty, and the scheme changes some of its channels. New keys outside every
        sequence become anything."""


class CachePlan(Protocol):
    """``attention_with_cache`` for the layers of a step, whose tensors differ in their addresses and strides alone."""

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes new k and v as ``CacheBackend.append_to_cache`` does, rotated first if the cache holds rotated
        keys."""

    def attend(
        self, q: torch.Tensor, layer: CacheLayer, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what ``CacheBackend.attention_with_cache`` does. out: where to write out, contiguous and like q."""


class CacheBackend(Protocol):
    """Serves ``attention_with_cache``."""

    def unsupported_reason(self, q: torch.Tensor, cached: bool = False) -> str:
        """Why this backend cannot serve tensors like q ("" if it can)."""

    def append_to_cache(
        self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor, tables: CacheTables, rotary: Rotary | None = None
    ) -> None:
        """Writes k, v (batch, seqlen_new, heads_kv, head_dim), or packed (total_q, heads_kv, head_dim), behind
        tables.seqlens or where tables.slot_mapping says; drops what has no slot or page. rotary: of
        ``over_rotated_keys``; rotates k by its positions first. The CUDA backend leaves that to the caller."""

    def attention_with_cache(
        self, q: torch.Tensor, layer: CacheLayer, call: CacheCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out like q and contiguous, lse (batch, heads_q, seqlen_q) as in ``AttentionBackend.forward``, or packed
        (heads_q, total_q). Packed rows outside every sequence get 0 and -inf. call: of ``for_backend``."""

    def plan_cache(self, call: CacheCall, layer: CacheLayer, queries: Queries) -> CachePlan:
        """Plans the layers of a step. Reads tables on the host at the earliest in ``append`` and ``attend``. call: as
        the caller made it, not ``for_backend``. layer: one of the layers; all others have its shapes and types."""


class PlacingBackend(Protocol):
    """What a ``CacheBackend`` has besides that serves calls whose tables have explicit positions."""

    def unsupported_positions(self, positions: CachePositions) -> str:
        """Why this backend cannot serve these tables, which argument it is ("" if it can). Reads no values."""
