"""The calls that a backend receives: attention, and attention with a KV cache, without q, k and v."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from ..rotary.bands import EVERYWHERE, Band, PositionMap
from ..rotary.rotary import Rotary
from ..rotary.rotated import over_rotated_keys
from .shown import Positions

MAX_SPLITS = 256  # csrc/decode.h has the same number
ONE_PER_QUERY = -1  # in the place of a number of new keys: packed queries, each of which brings its own key


class Kept(NamedTuple):
    """What the forward keeps for the backward; empty, of shape (0,), where it keeps nothing.

    rotated_k: rotated keys (copies, rows, heads_kv, head_dim), of k's dtype.
    table: cos and sin of given positions, float32 (rotations, batch, seqlen, 2, pairs).
    """

    rotated_k: torch.Tensor
    table: torch.Tensor


class KeptShapes(NamedTuple):
    """The shapes of ``Kept``."""

    rotated_k: tuple[int, ...] = (0,)
    table: tuple[int, ...] = (0,)


class _Scheme:
    """What follows from rotary, causal and softmax_scale."""

    __slots__ = ()
    rotary: Rotary
    causal: bool
    softmax_scale: float

    @property
    def bands(self) -> tuple[Band, ...]:
        return self.rotary.bands_for(self.causal)

    @property
    def score_scale(self) -> float:
        """softmax_scale and the scheme's temperature, applied to the float32 scores."""
        return self.softmax_scale * self.rotary.temperature


@dataclasses.dataclass(slots=True)  # frozen would double the time to make one
class AttentionCall(_Scheme):
    """One call of attention or attention_varlen, without q, k and v.

    Packed sequences (cu_seqlens_q is given): q (total_q, heads_q, head_dim), lse (heads_q, total_q).
    Otherwise: q (batch, seqlen_q, heads_q, head_dim), lse (batch, heads_q, seqlen_q).
    """

    rotary: Rotary
    causal: bool
    softmax_scale: float
    positions: torch.Tensor | None = None  # (batch, seqlen) or (batch, seqlen, axes); packed: batch is 1
    cu_seqlens_q: torch.Tensor | None = None  # (sequences + 1,) int32
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    # False: gradients may differ from run to run by rounding, in a backend that has a faster backward for it. None:
    # only where it is predicted to be faster, and torch does not ask for deterministic algorithms.
    deterministic: bool | None = True

    def packed_sequences(self) -> Iterator[tuple[slice, slice, AttentionCall]]:
        """(query rows, key rows, call with its own positions) of every packed sequence. Read by the host."""
        starts_q, starts_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            rows, given = slice(q0, q1), self.positions
            sequence = self if given is None else dataclasses.replace(self, positions=given[:, rows])
            yield rows, slice(k0, k1), sequence

    def lse_shape(self, q: torch.Tensor) -> tuple[int, ...]:
        return (q.shape[1], q.shape[0]) if self.cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])


class NewRows(NamedTuple):
    """New keys of one sequence that follow one another.

    batch, row, rows: which rows of k; packed: batch is 0.
    position: of the first. Below 0: of padding.
    slot: of the first, behind the keys that the sequence has.
    """

    batch: int
    row: int
    rows: int
    position: int
    sequence: int
    slot: int


class CacheLayout(NamedTuple):
    """Where sequences lie in a cache.

    The caches are (batch, capacity, heads_kv, head_dim), or with a block_table (pages, page_size, heads_kv, head_dim).
    Sequence b holds slots leftpad[b] to seqlens[b] + seqlen_new. Slot s is row s of the cache, or row s % page_size of
    page block_table[b, s // page_size]. Positions count from leftpad.

    With k_scale and v_scale the caches hold codes, int8 or uint8, as quantized.py describes them. With positions,
    tokens stand where shown.py says.

    Packed queries (cu_seqlens_q is given): sequence b has the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], and
    seqlen_new is 0 or ONE_PER_QUERY. slot_mapping places new keys in slots of the whole cache, page * page_size + row;
    seqlens then counts them already.

    The kernels have a tuple (triton_kernels/arguments.py) and a struct (csrc/decode.h) of this name.
    """

    seqlens: torch.Tensor  # (batch,) int32, without the seqlen_new keys that this call adds
    block_table: torch.Tensor | None = None  # (batch, max_pages) int32
    leftpad: torch.Tensor | None = None  # (batch,) int32
    seqlen_new: int = 0
    cu_seqlens_q: torch.Tensor | None = None  # (batch + 1,) int32
    slot_mapping: torch.Tensor | None = None  # (total_q,) int32 or int64
    max_seqlen_q: int = 0  # of packed queries: upper bound of their lengths
    k_scale: torch.Tensor | None = None  # float32, the caches' shape without its last dimension; a layer's own
    v_scale: torch.Tensor | None = None
    positions: Positions | None = None  # None: those of their slots
    kept: dict | None = None  # by ``once``, for calls whose tensors hold the same but for scales: a step's layers

    def once(self, key: Hashable, read: Callable[[], Any]):
        """read(), what the host reads from these tensors, scales aside; the same again where the layout keeps it."""
        if self.kept is None:
            return read()
        if key not in self.kept:
            self.kept[key] = read()
        return self.kept[key]

    def capacity(self, k_cache: torch.Tensor) -> int:
        """Slots that a sequence can have."""
        slots = k_cache.shape[1]
        return slots if self.block_table is None else self.block_table.shape[1] * slots

    def bounds(self, k_cache: torch.Tensor) -> list[tuple[int, int]]:
        """The slots [first, end) of every sequence, read by the host and clamped to the capacity."""
        new, capacity = self.seqlen_new, self.capacity(k_cache) if k_cache.shape[0] else 0
        ends = [
            length + new if 0 <= length <= capacity - new else min(min(max(length, 0), capacity) + new, capacity)
            for length in self.seqlens.tolist()
        ]
        if self.leftpad is None:
            return [(0, end) for end in ends]
        return [(min(max(pad, 0), end), end) for pad, end in zip(self.leftpad.tolist(), ends, strict=True)]

    def new_rows(self, capacity: int, rows: int) -> list[NewRows]:
        """The new keys of every sequence, whose sequences have `capacity` slots. Read by the host.

        rows: of a sequence's new keys, or packed the rows of all.
        """
        sequences = len(lengths := self.seqlens.tolist())
        pads = [0] * sequences if self.leftpad is None else self.leftpad.tolist()
        starts, found = None, []
        if self.cu_seqlens_q is not None:
            starts = [min(max(start, 0), rows) for start in self.cu_seqlens_q.tolist()]
        for n, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
            count = rows if starts is None else max(starts[n + 1] - starts[n], 0)
            slot = min(max(length, 0), capacity)
            end = min(slot + (count if self.seqlen_new == ONE_PER_QUERY else self.seqlen_new), capacity)
            first = min(max(pad, 0), end)
            batch, row = (n, 0) if starts is None else (0, starts[n])
            if count:
                found.append(NewRows(batch, row, count, end - count - first, n, slot))
        return found

    def new_positions(self, capacity: int, batch: int, rows: int) -> torch.Tensor:
        """The positions in ``new_rows``, int64 (batch, rows); packed: batch is 1. Other rows are at 0."""
        positions = torch.zeros(batch, rows, dtype=torch.int64, device=self.seqlens.device)
        for each in self.new_rows(capacity, rows):
            place = positions[each.batch, each.row : each.row + each.rows]
            torch.arange(each.position, each.position + each.rows, out=place)
        return positions

    def new_places(self, k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(page or sequence, row, whether that place exists), int64 and bool (batch, seqlen_new), of the new keys."""
        batch, device = self.seqlens.shape[0], self.seqlens.device
        slot = self.first_new_slot(k_cache)[:, None] + torch.arange(self.seqlen_new, device=device)
        return self.places(k_cache, torch.arange(batch, device=device)[:, None].expand_as(slot), slot)

    def first_new_slot(self, k_cache: torch.Tensor) -> torch.Tensor:
        """int64 (batch,), within the capacity."""
        return self.seqlens.to(torch.int64).clamp(0, self.capacity(k_cache))

    def places(self, k_cache: torch.Tensor, sequence: torch.Tensor, slot: torch.Tensor):
        """As ``new_places``, of slots of sequences, int64 of one shape. A slot is at least 0."""
        capacity = self.capacity(k_cache)
        fits = slot < capacity
        if self.block_table is None:
            return sequence, slot, fits
        if not capacity:
            return slot, slot, fits
        page_size = k_cache.shape[1]
        entry = (slot // page_size).clamp(max=self.block_table.shape[1] - 1)
        page = self.block_table[sequence, entry].to(torch.int64)
        return page, slot % page_size, fits & (page >= 0) & (page < k_cache.shape[0])

    def mapped_places(self, k_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``new_places``, of shape (total_q,), from slot_mapping."""
        slots = self.slot_mapping.to(torch.int64)
        fits = (slots >= 0) & (slots < k_cache.shape[0] * k_cache.shape[1])
        return slots // max(k_cache.shape[1], 1), slots % max(k_cache.shape[1], 1), fits

    def runs(self, total_q: int) -> Iterator[tuple[slice, slice, CacheLayout]]:
        """Packed queries as batches of equal length: (sequences, query rows, their layout without scales). Read by the
        host.

        Neighbors with as many queries form one batch. Rows are clamped to the total_q that there are.
        """
        starts = self.cu_seqlens_q.tolist()
        starts = [min(max(start, 0), total_q) for start in starts]
        lengths = [max(stop - start, 0) for start, stop in zip(starts, starts[1:], strict=False)]
        begin = 0
        while begin < len(lengths):
            end, length = begin + 1, lengths[begin]
            while end < len(lengths) and lengths[end] == length and starts[end] == starts[end - 1] + length:
                end += 1
            if length:
                rows = slice(starts[begin], starts[begin] + (end - begin) * length)
                yield slice(begin, end), rows, self._of(slice(begin, end), rows, length)
            begin = end

    def _of(self, sequences: slice, rows: slice, seqlen_q: int) -> CacheLayout:
        positions = self.positions
        if positions is not None:
            positions = positions.of_sequences(sequences, rows, self.block_table is not None)
        block_table, leftpad = (None if x is None else x[sequences] for x in (self.block_table, self.leftpad))
        seqlen_new = seqlen_q if self.seqlen_new == ONE_PER_QUERY else 0
        kept: dict | None = None if self.kept is None else {}
        return CacheLayout(self.seqlens[sequences], block_table, leftpad, seqlen_new, positions=positions, kept=kept)

    def scale_run(self, sequences: slice, run: CacheLayout) -> CacheLayout:
        """The layout of one of ``runs``, with its scales."""
        if self.k_scale is None:
            return run
        scales: tuple = (self.k_scale, self.v_scale)
        if self.block_table is None:
            scales = tuple(x[sequences] for x in scales)
        return run._replace(k_scale=scales[0], v_scale=scales[1])


@dataclasses.dataclass(slots=True)
class CacheCall(_Scheme):
    """One call of attention_with_cache, without q (batch, seqlen_q, heads_q, head_dim) and the caches.

    With packed queries: of attention_varlen_with_cache, q (total_q, heads_q, head_dim), lse (heads_q, total_q).
    """

    rotary: Rotary
    causal: bool
    softmax_scale: float
    layout: CacheLayout
    num_splits: int = 0  # 0: the backend chooses by shape
    rotated_keys: bool = False  # the cache holds keys as rotate gives them

    positions = None  # positions count from layout.leftpad

    def for_backend(self) -> CacheCall:
        """A call over rotated keys as backends take it: its bands rotate queries alone."""
        scheme = over_rotated_keys(self.rotary), self.causal, self.softmax_scale
        return CacheCall(*scheme, self.layout, self.num_splits, self.rotated_keys)

    def with_layout(self, layout: CacheLayout) -> CacheCall:
        scheme = self.rotary, self.causal, self.softmax_scale
        return CacheCall(*scheme, layout, self.num_splits, self.rotated_keys)


@dataclasses.dataclass(slots=True)
class RotateCall:
    """One call of rotate, without x (batch, seqlen, heads, head_dim).

    Row r stands at position r, or at positions[..., r]. With a layout x are new keys for a cache, the last rows of
    every sequence; x may then be packed, (total, heads, head_dim).
    """

    rotary: Rotary  # of over_rotated_keys: all its bands rotate queries alike
    positions: torch.Tensor | None = None  # (batch, seqlen) or (batch, seqlen, axes)
    layout: CacheLayout | None = None
    capacity: int = 0  # slots of a sequence in that cache

    @property
    def position_map(self) -> PositionMap:
        return self.rotary.bands[0].queries if self.rotary.bands else EVERYWHERE.queries


def out_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Like q, as wide as v."""
    return (*q.shape[:-1], v.shape[-1])


def cached_lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """(batch, heads_q, seqlen_q), or packed (heads_q, total_q)."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])


def accumulation_type(x: torch.Tensor) -> torch.dtype:
    """The type of lse, and the one to compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row, of head_dim elements, of these tensors of one type starts at a multiple of 16 bytes."""
    # Also in dimensions of size 1: kernels form the addresses of rows that are not there, and mask them.
    addresses, strides = 0, 0
    for x in tensors:
        addresses |= x.data_ptr()
        for stride in x.stride()[:-1]:
            strides |= stride
    return (strides * tensors[0].element_size() | addresses) % 16 == 0


@cache
def multiprocessors(device: torch.device) -> int:
    """An A100's 108 where there is no GPU, as when kernels are interpreted or compiled offline."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 108
