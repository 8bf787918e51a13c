"""What a backend provides. A backend is a module of this package that has the functions of ``AttentionBackend``, of
``CacheBackend``, or of both. Backends never import one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..rotary.rotary import Rotary
from .calls import AttentionCall, CacheCall, CacheLayout, Kept, KeptShapes, RotateCall
from .shown import Positions


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


class CacheBackend(Protocol):
    """Serves ``attention_with_cache``."""

    def unsupported_reason(self, q: torch.Tensor, cached: bool = False) -> str:
        """As in ``AttentionBackend``."""

    def append_to_cache(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: CacheLayout,
        rotary: Rotary | None = None,
    ) -> None:
        """Writes k, v (batch, seqlen_new, heads_kv, head_dim), or packed (total_q, heads_kv, head_dim), behind
        layout.seqlens or where layout.slot_mapping says; drops what has no slot or page. rotary: of
        ``over_rotated_keys``; rotates k by its positions first. The CUDA backend leaves that to the caller."""

    def attention_with_cache(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: CacheCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out like q and contiguous, lse (batch, heads_q, seqlen_q) as in ``AttentionBackend.forward``, or packed
        (heads_q, total_q). Packed rows outside every sequence get 0 and -inf."""


class PlacingBackend(Protocol):
    """What a ``CacheBackend`` has besides that serves calls whose layout has positions."""

    def unsupported_positions(self, positions: Positions) -> str:
        """Why this backend cannot serve these tables, which argument it is ("" if it can). Reads no values."""


class PreparingBackend(Protocol):
    """What a ``CacheBackend`` may have besides."""

    def prepare(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        call: CacheCall,
    ) -> Callable[..., None] | None:
        """Runs nothing. Gives a function of these six tensors, and of k_scale and v_scale if the layout has them, that
        appends k and v, attends and writes out, for this layer and all others of the call whose tensors differ in
        their addresses alone; None: not for such a call. All are packed, over pages. call: as from the caller, not
        ``for_backend``."""
