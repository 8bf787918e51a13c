"""``KVCache``: one row of slots per sequence."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from .. import ops
from ..api import attention_with_cache
from ..backends import CacheLayout, resolve_impl
from ..rotary import Rotary
from .shared import Cache, allocate_storage, check_integer, check_new, check_queries, describe, upload


class KVCache(Cache):
    """The raw keys and values of a batch of sequences, with ``capacity`` slots each, for one layer of a model.

    Args:
        batch: number of sequences.
        capacity: slots per sequence.
        heads_kv, head_dim: of k and v; head_dim is a multiple of 8 up to 256.
        dtype: float16, bfloat16, float32 or float64.
        device: None is torch's default.

    Attributes:
        k, v: (batch, capacity, heads_kv, head_dim), uninitialized beyond the lengths. On the CPU a view of
            heads-first storage, which is faster to read there.
        seqlens: (batch,) int32 on the device, the slots in use. It is always the same tensor.
        nbytes: bytes of k and v.

    A full cache raises ValueError. A call that raises leaves the cache unchanged.

    A CUDA graph does not replay what the host does. Capture ``attention_with_cache(q, cache.k, cache.v, rotary,
    cache.seqlens, k, v)`` and call ``cache.advance(k.shape[1])`` after every replay. Check ``lengths`` before it,
    because the kernels drop keys that have no slot. Compiled models do the same.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        heads_kv: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ):
        self.batch, self.capacity = check_integer("batch", batch, 1), check_integer("capacity", capacity, 1)
        self.k, self.v = allocate_storage((self.batch, self.capacity), heads_kv, head_dim, dtype, device)
        with torch.inference_mode(False):
            self.seqlens = torch.zeros(batch, dtype=torch.int32, device=self.k.device)
        self._lengths = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """The slots in use of every sequence, known to the host."""
        return list(self._lengths)

    def append(self, k: torch.Tensor, v: torch.Tensor, impl: str | None = None) -> None:
        """Appends k, v (batch, seqlen_new, heads_kv, head_dim), seqlen_new tokens to every sequence.

        If sequences get different numbers of tokens, append the largest number and ``truncate`` the others.

        Raises:
            TypeError, ValueError: names the argument, what was expected and what came, or the sequence without room.
        """
        seqlen_new = check_new(k, v, self.k, self.batch)
        self._check_room(seqlen_new)
        impl = resolve_impl(impl, k[:, :1], cached=True)
        ops.append_to_cache(self.k, self.v, k, v, CacheLayout(self.seqlens, seqlen_new=seqlen_new), impl)
        self._count(seqlen_new)

    def attend(
        self, q: torch.Tensor, rotary: Rotary, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **options
    ):
        """Appends k, v to every sequence, if given, then attends to all keys in the cache.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            k, v: (batch, seqlen_new, heads_kv, head_dim), or both None.
            rotary, options: as in ``attention_with_cache``: cache_leftpad, causal, softmax_scale, return_lse, impl,
                num_splits, validate.

        Returns:
            out, like q; with return_lse (out, lse), lse (batch, heads_q, seqlen_q).

        Raises:
            TypeError, ValueError: names the argument, what was expected and what came, or the sequence without room.
        """
        check_queries(q, self.batch)
        seqlen_new = check_new(k, v, self.k, self.batch) if k is not None or v is not None else 0
        self._check_room(seqlen_new)
        result = attention_with_cache(q, self.k, self.v, rotary, self.seqlens, k, v, block_table=None, **options)
        self._count(seqlen_new)
        return result

    def advance(self, seqlen_new: int) -> None:
        """Counts seqlen_new tokens that a replayed CUDA graph has written to every sequence. No room: ValueError."""
        seqlen_new = check_integer("seqlen_new", seqlen_new)
        self._check_room(seqlen_new)
        self._count(seqlen_new)

    def _count(self, seqlen_new: int) -> None:
        if seqlen_new:
            self.seqlens.add_(seqlen_new)
            self._lengths = [length + seqlen_new for length in self._lengths]

    def truncate(self, sequence: int | None, length: int | Sequence[int]) -> None:
        """Drops the tokens from ``length`` on, such as those that speculative decoding rejects.

        Args:
            sequence: index in the batch; None for all sequences.
            length: at most the present length, else ValueError; for all sequences one length or a list of them.
        """
        lengths: Any = length
        if sequence is not None:
            lengths = self.lengths
            lengths[check_integer("sequence", sequence, 0, self.batch - 1)] = length
        elif isinstance(length, numbers.Integral):
            lengths = [length] * self.batch
        if not isinstance(lengths, Sequence) or len(lengths) != self.batch:
            raise ValueError(f"length: expected a number or {self.batch} of them, got {length!r}")
        self._lengths = [
            check_integer(f"length of sequence {b}", new, 0, self._lengths[b]) for b, new in enumerate(lengths)
        ]
        self.seqlens.copy_(upload(self._lengths, torch.int32, self.seqlens.device))

    def reset(self, sequence: int | None = None) -> None:
        """Empties one sequence, given by its index in the batch, or all."""
        self.truncate(sequence, 0)

    def _check_room(self, seqlen_new: int) -> None:
        longest = max(self._lengths)
        if longest + seqlen_new > self.capacity:
            raise ValueError(
                f"sequence {self._lengths.index(longest)} has {longest} of {self.capacity} slots in use: "
                f"no room for {seqlen_new}"
            )

    def __repr__(self) -> str:
        return (
            f"KVCache(batch={self.batch}, capacity={self.capacity}, {describe(self.k)}; {min(self._lengths)} to "
            f"{max(self._lengths)} slots in use, {self.nbytes:,} bytes)"
        )
