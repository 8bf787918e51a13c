"""Reads text of any length with a window and attention sinks, as a baseline (StreamingLLM, arXiv 2309.17453,
section 3.2).

The text is read in pieces. After each piece the cache keeps its first tokens, which are the sinks, and its last tokens.
Positions count the tokens in the cache, so they stay below the training length. Dropped tokens cannot be found again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PIECE = 256  # tokens that are read at once


class KeptTokens(NamedTuple):
    """The tokens that stay in the cache between two pieces."""

    first: int
    last: int

    def cut(self, cache) -> None:
        """Drops everything between the first and the last tokens from a cache of raw keys.

        cache: a ``DynamicCache`` of a converted model.
        """
        for layer in cache.layers:
            if layer.keys.shape[-2] > self.first + self.last:
                layer.keys, layer.values = (self._ends(x) for x in (layer.keys, layer.values))

    def _ends(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., : self.first, :], x[..., -self.last :, :]), -2)
