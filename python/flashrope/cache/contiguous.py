"""``KVCache``: stores each sequence of a batch in one row of slots."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from ..calls.cache_tables import CacheTables
from ..schemes.rotary import Rotary
from .new_tokens import NewTokens, check_integer, check_padding, check_queries
from .step import Step
from .storage import Cache, OpenStep, describe, upload


class KVCache(Cache):
    """Holds the keys and values of a batch of sequences, with ``capacity`` slots each, for one layer or for all.

    Use it if the batch and the largest length are known. ``PagedKVCache`` is for sequences that come and go, share
    prefixes, or have unknown lengths. ``attention_with_cache`` is for buffers that you allocate yourself.

    Example:
        cache = KVCache(batch=2, capacity=512, heads_kv=2, head_dim=64, dtype=torch.float32, device="cpu")
        q, k, v = (torch.randn(2, 40, heads, 64) for heads in (8, 2, 2))
        rotary = Rotary.rope(64).rectify(window=256)
        prompt = cache.attend(q[:, :39], rotary, k[:, :39], v[:, :39])
        token = cache.attend(q[:, 39:], rotary, k[:, 39:], v[:, 39:])

    Args:
        batch: number of sequences.
        capacity: slots per sequence.
        heads_kv, head_dim: the number of key heads, and the channels per head of k and v. head_dim is a multiple of 8
            up to 512, or up to 256 with cache_dtype or rotated_keys.
        dtype: float16, bfloat16, float32 or float64.
        device: None: torch's default device.
        layers: number of layers. All layers share the lengths and the left padding.
        rotated_keys: None: keys are stored raw, and every call may use another scheme. A Rotary, or a list with one
            Rotary per layer: keys are rotated once, when they are written, as ``rotate`` does, and steps rotate only
            queries. The scheme must be one that ``rotate`` accepts. Calls with another scheme raise an error. The
            option ``cache_leftpad`` also raises an error, because it would move positions.
        cache_dtype: None: the cache has the type dtype. "int8": it holds quantized values of 8 bits with a scale per
            token and key head, in about half of the bytes of bfloat16. q, k, v and out have the type dtype. ``attend``
            and ``append`` quantize k and v. The attribute k_scale of ``CacheLayer`` describes the format.
        head_dim_v: head_dim of v, a multiple of 8 up to head_dim. Default: head_dim. A quantized cache supports only
            the default.
        values: a slice: these channels of the stored keys are the values. Their number is a multiple of 8 up to 512.
            Calls then pass k without v, and the cache needs no memory for v. Use it for latent attention, and for
            models whose keys are the values times a weight per channel, then rotated (see key_weight in
            ``attention_with_cache``). head_dim may then be 576. Cannot be combined with rotated_keys, cache_dtype or
            head_dim_v. None: v has its own memory.

    Attributes:
        k, v: (batch, capacity, heads_kv, head_dim or head_dim_v), with several layers (layers, batch, ...). Slots
            beyond the lengths are uninitialized. On the CPU, k and v are views of heads-first storage, which is faster
            to read there if the cache is long. ``layer(i)`` returns k and v of one layer.
        seqlens: (batch,) int32 on the device, the slots in use, left padding included. The attribute is always the same
            tensor.
        leftpad: (batch,) int32 on the device, the number of padding slots on the left. The attribute is always the same
            tensor.
        k_scale, v_scale: the scales of a quantized cache, float32, with k's shape without the last dimension. None if
            the cache is not quantized. ``scales(i)`` returns the scales of one layer.
        rotated_keys: the Rotary of every layer, or None.
        nbytes: bytes of k and v, and of their scales.

    Example with values that are channels of the stored keys, in half the memory:
        cache = KVCache(2, 512, heads_kv=1, head_dim=64, dtype=torch.float32, device="cpu", values=slice(0, 64))
        q, x, weight = torch.randn(2, 40, 8, 64), torch.randn(2, 40, 1, 64), torch.rand(64)
        out = cache.attend(q, Rotary.rope(64), x, key_weight=weight)  # keys are weight * x, values x

    With several layers new tokens are written in steps. ``with cache.step(seqlen_new) as step`` checks once that there
    is room, and every layer calls ``step.attend(q, rotary, k, v, layer=i)``. When the block ends, the new tokens are
    counted in all layers. If the block raises, no layer counts them.

    Prompts of different lengths are padded on the left. ``leftpad`` of the first step gives the number of padding
    tokens of every sequence. The cache remembers the padding until the sequence is truncated to fewer slots than the
    padding. Positions count from the first token after the padding.

    A full cache raises ValueError. A call that raises leaves the cache unchanged. Under torch.autocast float32 q, k
    and v become the autocast type, as in ``attention``, so make the cache in that type.

    A CUDA graph does not replay what the host does. Capture ``attention_with_cache(q, *cache.layer(i), rotary,
    cache.seqlens, k=k, v=v)`` of every layer and call ``cache.advance(k.shape[1])`` after every replay. Before every
    replay check ``lengths``, because the kernels drop keys that have no slot. Compiled models need the same calls and
    checks.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        heads_kv: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layers: int = 1,
        rotated_keys: Rotary | Sequence[Rotary] | None = None,
        cache_dtype: str | None = None,
        head_dim_v: int | None = None,
        values: slice | None = None,
    ):
        self.batch, self.capacity = check_integer("batch", batch, 1), check_integer("capacity", capacity, 1)
        self._allocate(
            (self.batch, self.capacity),
            heads_kv,
            head_dim,
            dtype,
            device,
            layers,
            rotated_keys,
            cache_dtype,
            head_dim_v,
            values,
        )
        with torch.inference_mode(False):
            self.seqlens, self.leftpad = torch.zeros(2, batch, dtype=torch.int32, device=self.k.device).unbind()
        self._lengths, self._padding = [0] * batch, [0] * batch

    @property
    def lengths(self) -> list[int]:
        """Returns the number of slots in use of every sequence, left padding included. Does not wait for the device."""
        return list(self._lengths)

    @property
    def padding(self) -> list[int]:
        """Returns the left padding of every sequence. Does not wait for the device."""
        return list(self._padding)

    def step(self, seqlen_new: int | Sequence[int], leftpad: Sequence[int] | None = None) -> Step:
        """Returns the step in which every layer gets seqlen_new tokens of every sequence.

        Args:
            seqlen_new: number of new tokens of every sequence. A list, with one number per sequence: q, k and v of the
                step are packed, (total_new, heads, head_dim), in the order of the sequences.
            leftpad: the number of padding slots at the start of each sequence. It may grow only while a sequence holds
                no tokens. Otherwise pass the present number. None: the padding does not change.

        Raises:
            TypeError, ValueError: an argument is invalid, or a sequence has no room. The message names the argument or
                the sequence.
            RuntimeError: a step of this cache is open.
        """
        new = NewTokens.of(seqlen_new, range(self.batch))
        check_padding(leftpad, self._padding, self._lengths, new)
        return Step(self, None, new, leftpad)

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        impl: str | None = None,
        leftpad: Sequence[int] | None = None,
        seqlen_new: Sequence[int] | None = None,
    ) -> None:
        """Appends k, v (batch, seqlen_new, heads_kv, head_dim): seqlen_new tokens to every sequence.

        With several layers, k and v have a leading dimension of layers. leftpad: as in ``step``. seqlen_new: as in
        ``attend``, for packed k and v.

        Raises:
            TypeError, ValueError: an argument is invalid, or a sequence has no room. The message names the argument or
                the sequence.
        """
        if self.layers == 1:
            self.refuse_new("append")
        self._append(self.step(self._new_of(k, v, seqlen_new, self.batch), leftpad), k, v, impl)

    def attend(
        self,
        q: torch.Tensor,
        rotary: Rotary,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: int | None = None,
        leftpad: Sequence[int] | None = None,
        seqlen_new: Sequence[int] | None = None,
        **options,
    ):
        """Appends k, v to every sequence, if given, then attends to all keys in the cache.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            k, v: (batch, seqlen_new, heads_kv, head_dim), or both None. k and v must be None if the cache has several
                layers, whose new keys and values are written in a ``step``.
            layer: 0 to layers - 1, the layer whose keys are read. None is allowed if the cache has one layer.
            leftpad: as in ``step``.
            seqlen_new: None, or for packed q, k and v (total_new, heads, head_dim) a list: the number of rows of every
                sequence.
            rotary, options: as in ``attention_with_cache``: cache_leftpad, causal, softmax_scale, return_lse, impl,
                num_splits, validate, key_weight (of the layer).

        Returns:
            out, like q. With return_lse: (out, lse). lse is (batch, heads_q, seqlen_q), or packed (heads_q, total_new).

        Raises:
            TypeError, ValueError: an argument is invalid, or a sequence has no room. The message names the argument or
                the sequence.
        """
        if k is None and v is None and leftpad is None:
            new = NewTokens.of(seqlen_new or 0, range(self.batch))
            check_queries(q, new)
            tables = self._tables(new, self._padding, appends=False)
            return self.attend_planned({}, tables, q, rotary, k, v, layer, options)
        self.refuse_new("attend")
        with self.step(self._new_of(k, v, seqlen_new, self.batch), leftpad) as step:
            return step.attend(q, rotary, k, v, layer, **options)

    def advance(self, seqlen_new: int | Sequence[int]) -> None:
        """Counts seqlen_new tokens that a replayed CUDA graph has written to every sequence, or to each sequence its
        number in a list. Raises ValueError if there is no room for them."""
        self.refuse_in_step("advance")
        new = NewTokens.of(seqlen_new, range(self.batch))
        self._check_room(new)
        self._count(new)

    def _count(self, new: NewTokens) -> None:
        if any(new.counts):
            self.seqlens.add_(upload(new.counts, torch.int32, self.seqlens.device) if new.packed else new.longest)
            self._lengths = [length + count for length, count in zip(self._lengths, new.counts, strict=True)]

    def truncate(self, sequence: int | None, length: int | Sequence[int]) -> None:
        """Drops the tokens from ``length`` on, in all layers: for example guesses that speculative decoding rejects.

        Args:
            sequence: index in the batch. None: all sequences.
            length: the new length in slots, left padding included. If it exceeds the current length, ValueError is
                raised. For all sequences, one length or a list of lengths.
        """
        self.refuse_in_step("truncate")
        lengths: Any = length
        if sequence is not None:
            lengths = self.lengths
            lengths[check_integer("sequence", sequence, 0, self.batch - 1)] = length
        elif isinstance(length, numbers.Integral):
            lengths = [length] * self.batch
        if not isinstance(lengths, Sequence) or len(lengths) != self.batch:
            raise ValueError(f"length: expected a number or a list of {self.batch} numbers, got {length!r}")
        self._lengths = [
            check_integer(f"length of sequence {b}", new, 0, self._lengths[b]) for b, new in enumerate(lengths)
        ]
        self.seqlens.copy_(upload(self._lengths, torch.int32, self.seqlens.device))
        self._pad([min(pad, length) for pad, length in zip(self._padding, self._lengths, strict=True)])

    def reset(self, sequence: int | None = None) -> None:
        """Removes all tokens of one sequence, given by its index in the batch, or of all sequences."""
        self.truncate(sequence, 0)

    def _tables(self, new: NewTokens, padding: list[int], appends: bool) -> CacheTables:
        device, leftpad = self.leftpad.device, None
        if any(padding):
            leftpad = self.leftpad if padding == self._padding else upload(padding, torch.int32, device)
        starts = upload(new.starts, torch.int32, device) if new.packed else None
        return CacheTables(self.seqlens, None, leftpad, new.in_tables(starts, appends))

    def _begin(self, step: OpenStep) -> CacheTables:
        self._check_room(step.new)
        step.padding = check_padding(step.given_leftpad, self._padding, self._lengths, step.new)
        return self._tables(step.new, step.padding, appends=True)

    def _commit(self, step: OpenStep) -> None:
        self._count(step.new)
        self._pad(step.padding)

    def _undo(self, step: OpenStep) -> None:
        pass  # keys and values that the step wrote lie beyond the lengths, so they do not count

    def _pad(self, padding: list[int]) -> None:
        if padding != self._padding:
            self._padding = padding
            self.leftpad.copy_(upload(padding, torch.int32, self.leftpad.device))

    def _check_room(self, new: NewTokens) -> None:
        most, b = max((n + count, -b) for b, (n, count) in enumerate(zip(self._lengths, new.counts, strict=True)))
        if most > self.capacity:
            raise ValueError(
                f"sequence {-b} has {self._lengths[-b]} of {self.capacity} slots in use: no room for {new.counts[-b]}"
            )

    def __repr__(self) -> str:
        return (
            f"KVCache(batch={self.batch}, capacity={self.capacity}, {describe(self)}; {min(self._lengths)} to "
            f"{max(self._lengths)} slots in use, {self.nbytes:,} bytes)"
        )
