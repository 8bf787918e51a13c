"""``CapturedStep``: keeps the tables of a step in static tensors, for a CUDA graph."""

from __future__ import annotations

from typing import Any

from ..backends.cache_tables import CachePositions, CacheTables


class CapturedStep:
    """A step that a CUDA graph replays. Its tables keep their addresses. ``PagedKVCache.capture`` returns one.

    Attributes:
        tables: the tables for ``plan_cache``, the same tensors at every replay.
        sequences: the sequences of the step, in order.
    """

    def __init__(self, cache: Any, sequences: list[int], seqlen_new: int):
        """Copies the tables of the step. cache: a ``PagedKVCache``."""
        self._cache, self.sequences, self._seqlen_new = cache, sequences, seqlen_new
        self.tables = _copied(cache.tables_of(sequences, seqlen_new))

    def update(self) -> None:
        """Makes room for the new tokens and copies the current tables into the static tensors. Call it before a replay.

        Raises:
            OutOfPages: too few pages are free. The message says how many are missing.
            ValueError: a sequence would exceed max_seqlen; or tokens of a sequence were moved, or padding was added,
                after the capture. Moved tokens and padding need tables that the graph does not read.
        """
        own = self.tables
        now = self._cache.tables_of(self.sequences, self._seqlen_new, positioned=own.positions is not None)
        for name, table, captured in (
            ("positions", now.positions, own.positions),
            ("leftpad", now.leftpad, own.leftpad),
        ):
            if table is not None and captured is None:
                raise ValueError(
                    f"{name}: expected None, because the captured step had no {name}, got tables; capture again"
                )
        own.seqlens.copy_(now.seqlens)
        assert own.block_table is not None and now.block_table is not None
        own.block_table.copy_(now.block_table)
        if own.leftpad is not None:
            own.leftpad.zero_() if now.leftpad is None else own.leftpad.copy_(now.leftpad)
        if own.positions is not None and now.positions is not None:
            for static, table in zip(own.positions[:3], now.positions[:3], strict=True):
                if static is not None and table is not None:
                    static.copy_(table)

    def advance(self) -> None:
        """Counts the tokens that a replay has written to every sequence."""
        self._cache.advance(self.sequences, self._seqlen_new)


def _copied(tables: CacheTables) -> CacheTables:
    """Returns a copy of the tables, in new tensors."""
    seqlens, block_table, leftpad, new, positions = tables
    if positions is not None:
        positions = CachePositions(*(x if x is None else x.clone() for x in positions))
    block_table, leftpad = (x if x is None else x.clone() for x in (block_table, leftpad))
    return CacheTables(seqlens.clone(), block_table, leftpad, new, positions)
