"""A window with attention sinks (StreamingLLM, arXiv 2309.17453, section 3.2): a baseline that reads any length.

The text is read in pieces. After each piece the cache keeps its first tokens, the sinks, and its last ones. Positions
count what is in the cache, so they stay below the training length. What the cache has dropped cannot be found again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .model import keep_logits, rope_type_by_length

PIECE = 256  # tokens that are read at once


class Kept(NamedTuple):
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


@torch.no_grad()
def read_prompt(model, ids: torch.Tensor, cache, kept: Kept | None = None):
    """Returns the model's output for the last piece of ids, int64 (batch, seqlen), with one row of logits.

    cache: an empty cache to fill, or None for one of transformers' own.
    kept: read in pieces and cut the cache between them. None: read everything at once.
    """
    from ..integrations.transformers.versions import CACHE, cache_of

    out = None
    for piece in ids.split(PIECE if kept else max(ids.shape[1], 1), dim=1):
        if out is not None and kept:
            kept.cut(cache := cache_of(out))
        given = {} if cache is None else {CACHE: cache}
        out = model(piece, use_cache=True, **given, **keep_logits(model, 1))
    return out


def check_streams(model) -> None:
    """
    Raises:
        ValueError: the model cannot be read over a cache that is cut.
    """
    from transformers import DynamicCache

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
    if kinds:
        raise ValueError(f"sinks: a cache with layers of the type {', '.join(sorted(kinds))} is not supported")
    if kind := rope_type_by_length(model):
        raise ValueError(f"sinks: rope type {kind} is not supported, its frequencies depend on the length")
