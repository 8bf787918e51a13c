"""Defines ``Part``, a batch of sequences over a cache. A ``Part`` keeps, for all layers, what the host has read from
the tables."""

from __future__ import annotations

from typing import Any

import torch

from .. import addresses
from ..calls import CacheCall
from . import runs
from .rotation import Rotation
from .runs import Placed


class Part:
    """Sequences with the same number of queries each. The tables are read once, because layers differ only in their
    tensors.

    Attributes:
        call: the call that the backend computes, from ``for_backend``. Its queries are not packed.
        key_rotations: cos and sin of blocks of keys at explicit positions.
        described: the C struct of the decode kernel without the tensors of a layer, and the objects it points to.
        filled: the strides for which the struct is valid, and the struct with the tensors of the previous layer.
    """

    def __init__(self, call: CacheCall):
        self.call = call
        self.key_rotations: dict[tuple, Rotation | None] = {}
        self.described: tuple[bytes, Any] | None = None
        self.filled: tuple[tuple, Any] | None = None
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
