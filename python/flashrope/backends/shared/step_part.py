"""Attention over a cache on the CPU for all layers of a step. What the host reads from the tables is kept for all
layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...calls import addresses
from ...calls.cache_tables import CacheLayer
from ...calls.plans import append_rotary
from ...calls.records import CacheCall, unseen
from . import runs
from .host_rotation import Rotation
from .packed import attend_packed
from .precision import without_autocast
from .runs import Placed


class StepPart:
    """Sequences with the same number of queries each. The tables are read once, because layers differ only in their
    tensors.

    Attributes:
        call: the call that the backend computes, from ``for_backend``. Its queries are not packed.
        key_rotations: cos and sin of blocks of keys at explicit positions.
    """

    def __init__(self, call: CacheCall):
        self.call = call
        self.key_rotations: dict[tuple, Rotation | None] = {}
        self._bounds: list[tuple[int, int]] | None = None
        self._placed: list[Placed] | None = None
        self._places: dict[int, tuple] = {}

    def bounds(self, k_cache: torch.Tensor) -> list[tuple[int, int]]:
        """Returns the slots [first, end) of every sequence, from ``addresses.bounds``. Only the first call reads the
        tables."""
        if self._bounds is None:
            self._bounds = addresses.bounds(self.call.tables, k_cache)
        return self._bounds

    def placed(self, k_cache: torch.Tensor, seqlen_q: int) -> list[Placed]:
        """Returns the runs of visible keys and of queries of every sequence, from ``runs.find``. Only the first call
        computes the runs."""
        if self._placed is None:
            self._placed = runs.find(self.call.tables, k_cache, seqlen_q)
        return self._placed

    def places(self, k_cache: torch.Tensor, sequence: int, seqlen_q: int) -> tuple:
        """Returns the visible keys of a sequence and the positions of its queries, from ``runs.places``. Only the first
        call for a sequence computes this."""
        if sequence not in self._places:
            self._places[sequence] = runs.places(self.call.tables, k_cache, sequence, seqlen_q)
        return self._places[sequence]


class PartsPlan:
    """The method ``attend`` of a ``protocol.BackendPlan``, which divides packed queries into batches of equal lengths.

    attend: a function that takes (q, layer, part, out) and returns (out, lse) of one ``StepPart``. It may write the
        output to out, which is None or a contiguous tensor of the output's shape.
    part_of: makes a ``StepPart`` from a call.
    """

    def __init__(self, call: CacheCall, attend: Callable, part_of: Callable[[CacheCall], StepPart] = StepPart):
        self._tables, self._rotary = call.tables, append_rotary(call)
        self._call = call.for_backend() if call.rotated_keys else call
        self._attend, self._part_of = attend, part_of
        # Made for the first layer: one StepPart, or for packed queries a tuple (sequences, rows, tables, StepPart) for
        # each run of ``addresses.runs``.
        self._parts: list = []

    @without_autocast
    def attend(
        self, q: torch.Tensor, layer: CacheLayer, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call, parts = self._call, self._parts
        if call.tables.packed is None:
            if not parts:
                parts.append(self._part_of(call))
            result, lse = self._attend(q, layer, parts[0], out)
            return _into(out, result), lse
        total_q = q.shape[0]
        if not parts:
            for sequences, rows, tables in addresses.runs(call.tables, total_q):
                parts.append((sequences, rows, tables, self._part_of(call._replace(tables=tables))))
        result, lse = attend_packed(
            lambda batch, own, run: self._attend(batch, own, run[3], _rows_of(out, run, batch)),
            q,
            layer,
            parts,
            total_q,
        )
        return _into(out, result), lse


def joined(
    q: torch.Tensor, layer: CacheLayer, shares: Iterable[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``out_shape``, lse) of a batch from (sequences, (out, lse)) of its shares. Other sequences have
    out 0 and lse -inf. If the first share is the whole batch, nothing is copied."""
    whole: tuple[torch.Tensor, torch.Tensor] | None = None
    for sequences, found in shares:
        if sequences == slice(0, q.shape[0]):
            return found
        out, lse = whole = whole or unseen(q, layer.v)
        out[sequences], lse[sequences] = found
    return whole or unseen(q, layer.v)


def _rows_of(out: torch.Tensor | None, run: tuple, batch: torch.Tensor) -> torch.Tensor | None:
    """Returns the rows of out for a run of packed queries, in the shape of the run's batch."""
    return None if out is None else out[run[1]].view(*batch.shape[:-1], -1)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Returns result. If out is given, copies result to out and returns out."""
    if out is None:
        return result
    return out if out.data_ptr() == result.data_ptr() else out.copy_(result)
