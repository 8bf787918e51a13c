"""Describes a cache to backends: ``CacheTables`` for all layers of a step, and a ``CacheLayer`` for each layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

ONE_PER_QUERY = -1  # a value of seqlen_new: queries are packed, and each query has one new key


class CacheLayer(NamedTuple):
    """The keys and values of one layer, for ``plan_cache`` and ``CachePlan.attend``.

    The fields before key_weight hold a row for every token, which new tokens write. The others (LAYER_OPTIONS) hold
    for all tokens, and a backend declares which of them it supports.

    Attributes:
        k: (batch, capacity, heads_kv, head_dim), or with a block table (pages, page_size, heads_kv, head_dim). int8 if
            the cache is quantized. head_dim is a multiple of 8 up to 512. Beyond 256, quantized caches, rotated keys
            and explicit positions are not supported.
        v: like k. If the cache is not quantized, the head_dim of v may be smaller. v may be a view of channels of k,
            such as k[..., :512]. The values are then channels of the keys, and new tokens have no v. Such a view is not
            supported in quantized caches or with rotated keys.
        k_scale, v_scale: float32, the shape of k without the last dimension, any strides; written in place. None if
            the cache is not quantized. q, new keys and values, and out keep their float type. A new row x is written
            as codes ``c = round(x / s)``, ties to even, with the scale ``s = max(abs(x)) / 127``. Attention is computed
            over ``s * c``. A row of zeros has s = 0. A NaN makes s NaN. Infinities count as the largest finite number
            of x's dtype. Rotated keys are rotated before they are quantized. impl="cuda" does not support quantized
            caches.
        key_weight: float32 (head_dim,), factors of the channels of keys before their rotation. Values are not
            multiplied, so a cache that stores only x serves keys g * x and values x, with g as key_weight. Not
            supported with rotated keys or with gradients.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None

    @property
    def rows(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the fields that hold a row for every token: k, v, k_scale and v_scale."""
        return self[:4]

    def part(self, sequences: slice) -> CacheLayer:
        """Returns the layer with only these sequences. The cache must be contiguous, not paged."""
        own: dict[str, Any] = {n: x[sequences] for n, x in zip(self._fields, self.rows, strict=False) if x is not None}
        return self._replace(**own)

    @property
    def first_value(self) -> int | None:
        """Returns the channel of k at which v begins, or None if v is not a view of channels of k."""
        return first_value(self.k, self.v)


LAYER_OPTIONS = CacheLayer._fields[4:]


def first_value(k: torch.Tensor, v: torch.Tensor) -> int | None:
    """Returns the channel of k (..., head_dim) at which v begins, or None if v is not a view of channels of k.

    While torch.compile traces the call, tensors have no addresses. The result is then 0 if v is k or a view of k, else
    None.
    """
    if v.dtype != k.dtype or v.stride() != k.stride() or v.shape[:-1] != k.shape[:-1] or v.device != k.device:
        return None
    if torch.compiler.is_compiling():
        return 0 if v is k or v._base is k else None
    if v is k:
        return 0
    try:
        if k.is_meta or not k.numel() or type(k) is not torch.Tensor:  # such tensors have no addresses
            same = k.untyped_storage()._cdata == v.untyped_storage()._cdata
            first, rest = v.storage_offset() - k.storage_offset(), 0 if same else 1
        else:
            first, rest = divmod(v.data_ptr() - k.data_ptr(), k.itemsize)
    except (RuntimeError, NotImplementedError):  # tensors of torch.func's transforms have no storage
        return None
    return int(first) if not rest and 0 <= first <= k.shape[-1] - v.shape[-1] else None


class Packed(NamedTuple):
    """Packed queries: the queries of all sequences, one sequence after another. Pass it as ``CacheTables.new``.

    Attributes:
        cu_seqlens_q: (batch + 1,) int32. Sequence b has the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        max_seqlen_q: upper bound of the number of query rows of a sequence.
        slot_mapping: (total_q,) int32 or int64, the slot of each query's new key. Slots are counted over the whole
            cache: page * page_size + row. If it is given, seqlens already counts the new keys.
        appends: whether each query brings a new key that is written after the first seqlens slots.
    """

    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    slot_mapping: torch.Tensor | None = None
    appends: bool = False


class CachePositions(NamedTuple):
    """Explicit positions of cached tokens, for ``CacheTables.positions``. The tables include the new keys.

    Because keys are stored unrotated, a page can be reused at any position. Positions must not decrease along a
    sequence; equal positions are allowed. A query sees the keys up to its own key, in the order of slots. Distances,
    windows and log n follow from positions. Self-Extend and dual chunk attention map the positions that the tables
    give. Rotated keys and impl="cuda" are not supported. impl="cpu" supports neither axial schemes nor such maps.
    "triton" takes positions from -(2**29 - 1) to 2**29 - 1, with a resolution of 2**-31.

    Attributes:
        page_positions, page_first, page_lengths: (batch, max_pages) int32, one value per block-table entry. Rows
            [page_first, page_first + page_lengths) of the entry's page are visible, and row r has position
            page_positions + r. seqlens still counts all slots, hidden slots included. Default of page_first: 0. Default
            of page_lengths: all rows from page_first on. Without page_positions, the position of a slot is its index
            minus leftpad. A contiguous cache has no page tables.
        slot_positions: the position of every slot, float32 (pages, page_size) or (batch, capacity). Axial schemes need
            it, with one more dimension, axes. page_positions is added to it. The positions of new keys are written to
            it in place.
        queries: the positions of queries and of new keys, int32, int64 or float32, (batch, seqlen_q) or packed
            (total_q,). Axial schemes need one more dimension, axes. None: the positions continue after the last cached
            key. New keys with slot_mapping and slot_positions need it. Errors call it positions.
    """

    page_positions: torch.Tensor | None = None
    page_first: torch.Tensor | None = None
    page_lengths: torch.Tensor | None = None
    slot_positions: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    @classmethod
    def of(cls, *tables: torch.Tensor | None) -> CachePositions | None:
        """Returns the tables, or None if no table is given."""
        for x in tables:
            if x is not None:
                return cls(*tables)
        return None


class CacheTables(NamedTuple):
    """The tables that say where the sequences of a step are in a cache. The tables are the same for all layers. Pass
    them to ``plan_cache``.

    Sequence b consists of the slots from leftpad[b] to seqlens[b] - 1 and, after these, its new keys. Slot s is row s
    of the cache, or row s % page_size of page block_table[b, s // page_size]. Positions count from leftpad.

    Attributes:
        seqlens: (batch,) int32, the slots in use before the step's new keys, left padding included.
        block_table: (batch, max_pages) int32, the pages of every sequence in the order of its slots. None: the cache is
            contiguous.
        leftpad: (batch,) int32, the first valid slot of every sequence. None: 0.
        new: the number of new keys per sequence, or ``Packed`` queries.
        positions: explicit positions. None: positions follow from slots.
    """

    seqlens: torch.Tensor
    block_table: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    new: int | Packed = 0
    positions: CachePositions | None = None

    @property
    def packed(self) -> Packed | None:
        return self.new if isinstance(self.new, Packed) else None

    @property
    def seqlen_new(self) -> int:
        """Returns the number of new keys of every sequence, or ONE_PER_QUERY."""
        if isinstance(self.new, Packed):
            return ONE_PER_QUERY if self.new.appends else 0
        return self.new

    @property
    def cu_seqlens_q(self) -> torch.Tensor | None:
        return self.new.cu_seqlens_q if isinstance(self.new, Packed) else None

    @property
    def max_seqlen_q(self) -> int:
        return self.new.max_seqlen_q if isinstance(self.new, Packed) else 0

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        return self.new.slot_mapping if isinstance(self.new, Packed) else None

    def capacity(self, k_cache: torch.Tensor) -> int:
        """Returns the largest number of slots of a sequence."""
        slots = k_cache.shape[1]
        return slots if self.block_table is None else self.block_table.shape[1] * slots
