"""``Step``: adds new tokens to a cache, if every layer has written their keys and values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from ..calls.autocast import autocast
from ..calls.cache_tables import CacheTables
from ..operators.cache_plan import CachePlan
from ..schemes.rotary import Rotary
from .new_tokens import NewTokens, check_new, check_queries, check_rows
from .storage import Cache


class Step:
    """One step of a cache: new tokens for each of its sequences.

    ``cache.step`` returns one, for use in a ``with`` statement. Entering the statement makes room for the tokens, in
    all layers. Every layer then writes its keys and values once, in any order. Leaving the statement adds the tokens to
    the sequences. If the block raises, or if a layer has written nothing, no token is added, and pages and left padding
    are as before the step.

    Example:
        cache = KVCache(1, 512, heads_kv=2, head_dim=64, dtype=torch.float32, device="cpu", layers=4)
        q, k, v = (torch.randn(1, 40, heads, 64) for heads in (8, 2, 2))  # in a model they differ by layer
        with cache.step(40) as step:
            outs = [step.attend(q, Rotary.rope(64), k, v, layer=layer) for layer in range(4)]

    In a step with a list, ``cache.step([40, 1, 4])``, every sequence gets its own number of tokens. q, k and v are then
    packed: first all rows of the first sequence, then all rows of the second, to the last sequence.

    A step holds only the arguments of the call that made it. Entering it looks up lengths, pages and padding, so it may
    be entered after other calls have changed the cache, and more than once. If its ``with`` statement can never be
    left, ``cache.discard_step()`` undoes the step.

    Attributes:
        cu_seqlens: (n + 1,) int32 on the device, the first row of every sequence in packed q, k and v, then the number
            of all rows. ``cu_seqlens[1:] - 1`` are the last rows of sequences that get tokens. None if the step was
            made with one number.
        seqlens: (n,) int32 on the device, the slots in use before the step.
        block_table: (n, max_pages) int32 on the device; None in a ``KVCache``.
        leftpad: (n,) int32 on the device; None if no sequence has padding on the left.
    """

    cu_seqlens: torch.Tensor | None
    seqlens: torch.Tensor
    block_table: torch.Tensor | None
    leftpad: torch.Tensor | None
    tables: CacheTables

    def __init__(self, cache: Cache, sequences: Sequence[int] | None, new: NewTokens, leftpad: Sequence[int] | None):
        """Only stores the arguments. ``__enter__`` makes room.

        sequences: the numbers of the sequences, None in a ``KVCache``. leftpad: as in the call of ``step``.
        """
        self._cache, self.new, self.thread = cache, new, 0
        self.sequences = None if sequences is None else list(sequences)
        self.given_leftpad = None if leftpad is None else list(leftpad)
        # What the cache looks up when the step is entered: its records of the sequences, their left padding after the
        # step, and what it needs to undo the step.
        self.selected: Any = None
        self.padding: list[int] = []
        self.changes: Any = None
        self._written = 0  # bit n is set if layer n has written its keys
        self._plans: dict[tuple, CachePlan] = {}  # by the options in which layers may differ
        self._reads: CacheTables | None = None  # the tables for layers that were not written to in this step

    def __enter__(self) -> Step:
        cache = self._cache
        cache.refuse_in_step("step")
        cache._open, self.thread = self, threading.get_ident()  # first, so that other threads are refused meanwhile
        try:
            self.tables = cache._begin(self)
        except BaseException:
            cache._open = None
            raise
        self.seqlens, self.block_table, self.leftpad, *_ = self.tables
        self.cu_seqlens = self.tables.cu_seqlens_q
        self._written, self._plans, self._reads = 0, {}, None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cache, self._plans = self._cache, {}
        if cache._open is not self:
            if kind is None:
                raise RuntimeError("step: discarded before its with statement was left; none of its tokens was added")
            return
        cache._open = None
        if kind is None and (not any(self.new.counts) or self._written == (1 << cache.layers) - 1):
            cache._commit(self)
            return
        cache._undo(self)
        if kind is None:
            layer = next(layer for layer in range(cache.layers) if not self._written >> layer & 1)
            raise ValueError(f"layer {layer}: expected {self.new.given} new keys and values in this step, got none")

    def append(
        self, k: torch.Tensor, v: torch.Tensor | None = None, layer: int | None = None, impl: str | None = None
    ) -> None:
        """Writes k, v of a layer, as ``attend`` does, but attends to nothing. Raises the errors of ``attend``."""
        k, v = autocast(k, v)
        layer = self._cache.index(layer)
        self._check_open()
        check_new(k, v, self._cache, self.new)
        self._check_unwritten(layer)
        own = self._cache.cache_layer(layer)
        self._cache.append_plan(self._plans, self.tables, k, layer, impl).append(own, k, v)
        self._written |= 1 << layer

    def attend(
        self,
        q: torch.Tensor,
        rotary: Rotary,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: int | None = None,
        **options,
    ):
        """Writes k, v of a layer, if given, then attends to all its keys.

        Args:
            q: (n, seqlen_q, heads_q, head_dim), or packed (total_new, heads_q, head_dim).
            k, v: (n, seqlen_new, heads_kv, head_dim), or packed (total_new, heads_kv, head_dim). Both None: nothing is
                written, and q attends to the layer's keys, including keys that were written earlier in this step.
            layer: 0 to layers - 1. None is allowed if the cache has one layer.
            rotary, options: as in ``KVCache.attend``.

        Returns:
            out, like q. With return_lse: (out, lse). lse is (n, heads_q, seqlen_q), or packed (heads_q, total_new).

        Raises:
            TypeError, ValueError: an argument is invalid. The message names the argument and says what was expected.
        """
        self._check_open()
        check_queries(q, self.new)
        cache, tables = self._cache, self.tables
        layer = cache.index(layer)
        bit = 1 << layer
        if k is not None or v is not None:
            check_rows(k, v, cache, self.new)
            self._check_unwritten(layer)
        elif not self._written & bit:  # this layer only has the keys from before the step
            if self._reads is None:
                self._reads = tables._replace(new=self.new.in_tables(self.cu_seqlens, appends=False))
            tables = self._reads
        out = cache.attend_planned(self._plans, tables, q, rotary, k, v, layer, options)
        if k is not None:
            self._written |= bit
        return out

    def _check_open(self) -> None:
        if self._cache._open is not self:
            raise RuntimeError("step: not open; call it inside the with statement that opened it")

    def _check_unwritten(self, layer: int) -> None:
        if self._written >> layer & 1:
            raise ValueError(f"layer {layer}: expected k and v once per step, got them a second time")
