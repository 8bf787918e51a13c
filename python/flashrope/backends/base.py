"""Implementations of the attention operators. They share this call description and never import one another."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from ..rotary import Band, Rotary

UNBOUNDED = 1 << 30
BACKENDS = ("triton", "cuda", "cpu", "reference")


class _Scheme:
    """What follows from rotary, causal and softmax_scale."""

    __slots__ = ()

    @property
    def bands(self) -> tuple[Band, ...]:
        return self.rotary.bands_for(self.causal)

    @property
    def score_scale(self) -> float:
        """softmax_scale and the scheme's temperature, applied to the float32 scores."""
        return self.softmax_scale * self.rotary.temperature

    @property
    def log_n(self) -> tuple[float, float]:
        """(factor, floor): the query at position i is scaled by max(floor, factor * ln(i + 1))."""
        if self.rotary.log_n_scale is None:
            return 0.0, 1.0
        train_length, clip = self.rotary.log_n_scale
        return 1 / math.log(train_length), 1.0 if clip else 0.0


@dataclasses.dataclass(slots=True)  # not frozen: that would double the time to make one
class AttentionCall(_Scheme):
    """What one attention call asks for, beside q, k and v.

    Packed sequences (cu_seqlens_q is given): q (total_q, heads_q, head_dim), lse (heads_q, total_q).
    Otherwise: q (batch, seqlen_q, heads_q, head_dim), lse (batch, heads_q, seqlen_q).
    """

    rotary: Rotary
    causal: bool
    softmax_scale: float
    positions: torch.Tensor | None = None  # (batch, seqlen) or (batch, seqlen, axes)
    cu_seqlens_q: torch.Tensor | None = None  # (sequences + 1,) int32
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    def lse_shape(self, q: torch.Tensor) -> tuple[int, ...]:
        return (q.shape[1], q.shape[0]) if self.cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])


@dataclasses.dataclass(slots=True)
class CacheCall(_Scheme):
    """What one call over a cache asks for, beside q (batch, seqlen_q, heads_q, head_dim) and the caches.

    The caches are (batch, capacity, heads_kv, head_dim), or with a block_table (pages, page_size, heads_kv, head_dim).
    Sequence b holds the keys at slots cache_leftpad[b] to cache_seqlens[b] + seqlen_new, of which slot s is row s of
    the cache, or row s % page_size of page block_table[b, s // page_size]. Positions count from cache_leftpad.
    """

    rotary: Rotary
    causal: bool
    softmax_scale: float
    cache_seqlens: torch.Tensor  # (batch,) int32, without the seqlen_new keys that were just written
    seqlen_new: int = 0
    block_table: torch.Tensor | None = None  # (batch, max_pages) int32
    cache_leftpad: torch.Tensor | None = None  # (batch,) int32
    num_splits: int = 0  # 0: as the shapes suggest

    positions = None  # counted from cache_leftpad

    def capacity(self, k_cache: torch.Tensor) -> int:
        """Slots that a sequence can have."""
        return slots_of(k_cache, self.block_table)

    def bounds(self, k_cache: torch.Tensor) -> list[tuple[int, int]]:
        """The slots [first, end) that every sequence holds, read by the host and kept inside the capacity."""
        (rows, slots, *_), table, new = k_cache.shape, self.block_table, self.seqlen_new
        capacity = 0 if not rows else slots if table is None else table.shape[1] * slots
        ends = [
            length + new if 0 <= length <= capacity - new else min(min(max(length, 0), capacity) + new, capacity)
            for length in self.cache_seqlens.tolist()
        ]
        if self.cache_leftpad is None:
            return [(0, end) for end in ends]
        return [(min(max(pad, 0), end), end) for pad, end in zip(self.cache_leftpad.tolist(), ends, strict=True)]


def slots_of(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


def places_behind(
    k_cache, cache_seqlens, block_table, seqlen_new: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(page or sequence, row, whether there is such a place), int64 (batch, seqlen_new), of the slots behind
    cache_seqlens."""
    capacity = slots_of(k_cache, block_table)
    slot = cache_seqlens.to(torch.int64).clamp(0, capacity)[:, None] + torch.arange(
        seqlen_new, device=cache_seqlens.device
    )
    fits = slot < capacity
    if block_table is None:
        return torch.arange(slot.shape[0], device=slot.device)[:, None].expand_as(slot), slot, fits
    if not capacity:
        return slot, slot, fits
    page = block_table.to(torch.int64).gather(1, (slot // k_cache.shape[1]).clamp(max=block_table.shape[1] - 1))
    return page, slot % k_cache.shape[1], fits & (page >= 0) & (page < k_cache.shape[0])


def distance(bound: float) -> int:
    """A band's bound for kernels that count in 32 bits, with room to add positions."""
    return int(max(-UNBOUNDED, min(UNBOUNDED, bound)))


def aligned(x: torch.Tensor) -> bool:
    """Whether every row, of head_dim elements, starts at a multiple of 16 bytes."""
    if x.data_ptr() % 16:
        return False
    return x.is_contiguous() or all(
        s * x.element_size() % 16 == 0 for s in x.stride()[:-1]
    )  # head_dim is a multiple of 8


@cache
def multiprocessors(device: torch.device) -> int:
    """An A100's where there is no such device, as when kernels are interpreted or compiled for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 108


@cache
def load_backend(impl: str) -> ModuleType:
    return import_module(f".{impl}", __package__)


def resolve_impl(impl: str | None, q: torch.Tensor, cached: bool = False) -> str:
    """The implementation to use for tensors like q, over a cache or not; raises with the reason where the one asked for
    cannot serve."""
    if impl is None:
        if q.is_cuda and q.dtype != torch.float64:
            return "triton"
        return "cpu" if q.is_cpu else "reference"
    if impl not in BACKENDS:
        raise ValueError(f"impl: expected None or one of {', '.join(BACKENDS)}, got {impl!r}")
    reason = load_backend(impl).unsupported_reason(q, cached)
    if reason:
        raise ValueError(f"impl={impl!r} cannot serve this call: {reason}")
    return impl
