"""``CapturedStep``: keeps the tables of a step in static tensors, for a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls.cache_tables import CachePositions, CacheTables
from .new_tokens import NewTokens


class CapturedStep:
    """A step that a CUDA graph replays. Its tables keep their addresses. ``PagedKVCache.capture`` returns one.

    Attributes:
        tables: the tables for ``plan_cache``, the same tensors at every replay.
        sequences: the sequences of the step, in order.
    """

    def __init__(self, cache: Any, sequences: list[int], seqlen_new: int, total_new: int | None):
        """Copies the tables of the step. The arguments are those of ``PagedKVCache.capture``. cache: the cache."""
        self._cache, self.sequences, self._seqlen_new, self._total_new = cache, sequences, seqlen_new, total_new
        self._updated: list | None = None  # where the new tokens go, from update() until advance()
        self._new = self._new_tokens(None if total_new is None else [0] * len(sequences))
        with cache.tables_of(sequences, self._new, positioned=False) as tables:
            self.tables = _copied(tables)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tables = _copied(self.tables)

    def _new_tokens(self, seqlen_new: Sequence[int] | None) -> NewTokens:
        if self._total_new is None:
            if seqlen_new is not None:
                raise ValueError(
                    f"seqlen_new: expected None, because capture() fixed {self._seqlen_new} for every sequence, "
                    f"got {seqlen_new!r}; capture with total_new"
                )
            return NewTokens.of(self._seqlen_new, self.sequences)
        if seqlen_new is None or isinstance(seqlen_new, int):
            raise TypeError(f"seqlen_new: expected a list, one number per sequence, got {seqlen_new!r}")
        new = NewTokens.of(seqlen_new, self.sequences, most=self._seqlen_new)
        if sum(new.counts) > self._total_new:
            raise ValueError(
                f"seqlen_new: expected at most {self._total_new} tokens in all, total_new of capture(), "
                f"got {sum(new.counts)}"
            )
        return NewTokens(new.counts, (self._total_new,), self._seqlen_new)

    def update(self, seqlen_new: Sequence[int] | None = None) -> None:
        """Makes room for the new tokens and copies the current tables into the static tensors. Call it before a replay.

        It may be called again before the replay. If it raises, lengths and pages are as before the call.

        Args:
            seqlen_new: the number of new tokens of every sequence. None if the step was captured without total_new.

        Raises:
            OutOfPages: too few pages are free. The message says how many are missing.
            TypeError, ValueError: seqlen_new is invalid; or a sequence was freed or would exceed max_seqlen; or tokens
                of a sequence were moved, or padding was added, after the capture. Moved tokens and padding need tables
                that the graph does not read.
            RuntimeError: a step of the cache is open.
        """
        self._cache.refuse_in_step("update")
        self._updated = None
        own, new = self.tables, self._new_tokens(seqlen_new)
        with self._cache.tables_of(self.sequences, new, own.positions is not None) as now:
            for name, table, captured in (
                ("positions", now.positions, own.positions),
                ("leftpad", now.leftpad, own.leftpad),
            ):
                if table is not None and captured is None:
                    raise ValueError(
                        f"{name}: expected None, because the captured step had no {name}, got tables; capture again"
                    )
            if own.leftpad is not None and now.leftpad is None:
                own.leftpad.zero_()
            for static, table in zip(_tensors(own), _tensors(now), strict=True):
                if static is not None and table is not None:
                    static.copy_(table)
            self._updated, self._new = self._cache.slots_of(self.sequences), new

    def advance(self) -> None:
        """Counts the tokens that a replay has written to every sequence. Call it once after every ``update``.

        Raises:
            RuntimeError: ``update`` was not called since the last ``advance``; or a step of the cache is open.
            ValueError: a sequence was freed or changed after ``update``. No token is counted, because the replay wrote
                to slots that are not the next ones of this sequence any more.
        """
        self._cache.refuse_in_step("advance")
        if self._updated is None:
            raise RuntimeError("advance: expected one call of update() before every advance(), got none since the last")
        now = self._cache.slots_of(self.sequences)
        for name, before, after in zip(self.sequences, self._updated, now, strict=True):
            if before != after:
                raise ValueError(
                    f"advance: expected sequence {name} as it was at update(), got a sequence that was changed since; "
                    "call update() and replay again"
                )
        self._cache.advance(self.sequences, self._new.counts)
        self._updated = None


def _tensors(tables: CacheTables) -> list[torch.Tensor | None]:
    positions = tables.positions or CachePositions()
    return [tables.seqlens, tables.block_table, tables.leftpad, tables.cu_seqlens_q, *positions]


def _copied(tables: CacheTables) -> CacheTables:
    """Returns a copy of the tables, in new tensors that can be written in inference mode and outside of it."""
    with torch.inference_mode(False):
        seqlens, block_table, leftpad, starts, *positions = (x if x is None else x.clone() for x in _tensors(tables))
    assert seqlens is not None
    packed = tables.packed
    new = tables.new if packed is None or starts is None else packed._replace(cu_seqlens_q=starts)
    return CacheTables(seqlens, block_table, leftpad, new, CachePositions.of(*positions))
