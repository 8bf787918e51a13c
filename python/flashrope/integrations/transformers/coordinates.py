"""Coordinates of cached tokens, for models whose tokens stand at a time, a row and a column (M-RoPE).

A cache of transformers holds keys and values, and raw keys have no position. So the decoder's hook takes the
coordinates of the new tokens from ``position_ids``, adds them to those that the cache bears, and passes both to the
layers. Behind the forward the cache bears them all.

They follow the cache: a crop leaves fewer keys, and the next call reads the coordinates of those alone; a reorder, a
repeat or a selection of sequences moves them with the rows of the cache (``follow_caches``); a copy has them, too.

The layers of a step share one table of their cos and sin, 8 bytes per key and channel, which is freed after the step.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import Cache

from ...backends.cache_tables import CacheLayer, CachePositions, CacheTables
from ...operators.cache_plan import CachePlan, plan_cache
from ...rotary.rotary import Rotary
from .plan import plan_of

__all__ = [
    "COORDINATES",
    "Coordinates",
    "axes_of",
    "follow_caches",
    "store_coordinates",
    "with_coordinates",
]

COORDINATES = "_flashrope_coordinates"  # the argument of every layer, and the attribute of a cache


class Coordinates:
    """Where the tokens of a call stand.

    Attributes:
        queries: (batch, seqlen_q, axes) float32, of the new tokens.
        keys: (batch, slots, axes) float32, of cached and new tokens. Slots without a token hold anything.
        plans: the plans that the layers of this call share, by what layers may differ in.
    """

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor):
        self.queries, self.keys = queries, keys
        self.plans: dict[tuple, CachePlan] = {}

    def slots(self, count: int) -> torch.Tensor:
        """(batch, count, axes), of all slots of a cache. Raises ValueError if it has another number of them."""
        if count != self.keys.shape[1]:
            raise ValueError(
                f"past_key_values: expected a cache that returns the keys of its {self.keys.shape[1]} tokens or slots, "
                f"got {count} keys"
            )
        return self.keys

    def attend(self, q, layer: CacheLayer, rotary: Rotary, end, first, softmax_scale=None, sinks=None) -> torch.Tensor:
        """Attention of one layer over its cache, which holds the new tokens already.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            layer: k and v (batch, slots, heads_kv, head_dim), with scales if they are quantized.
            end, first: (batch,) int32, the slots of every sequence. first may be None.
            softmax_scale, sinks: as in ``attention_with_cache``.

        Raises:
            ValueError: the backend takes no explicit positions.
        """
        positions = CachePositions(slot_positions=self.slots(layer.k.shape[1]), queries=self.queries)
        tables = CacheTables(end, None, first, 0, positions)
        options = {"like": layer, "rotary": rotary, "seqlen_q": q.shape[1], "heads_q": q.shape[2], "dtype": q.dtype}
        if torch.compiler.is_compiling():  # the operator of each layer gets the tables
            return plan_cache(tables, softmax_scale=softmax_scale, **options).attend(q, layer, sinks=sinks)
        alike = rotary, softmax_scale, q.shape, q.dtype, *((x.shape, x.stride()) for x in layer if x is not None)
        if alike not in self.plans:
            self.plans[alike] = plan_cache(tables, softmax_scale=softmax_scale, **options)
        return self.plans[alike].attend(q, layer, sinks=sinks)


def axes_of(decoder) -> int:
    """The coordinates of a position in a converted decoder; 1: it is one number."""
    return getattr(plan_of(decoder), "axes", 1)


def with_coordinates(decoder, args, kwargs) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a decoder's forward, with ``Coordinates`` for its layers.

    Raises:
        ValueError: position_ids or past_key_values.
    """
    given = kwargs
    if args:
        given = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | kwargs
    cache, steps = given.get("past_key_values"), given.get("cache_position")
    x = next(x for x in (given.get("inputs_embeds"), given.get("input_ids")) if x is not None)
    length = 0 if cache is None else cache.get_seq_length()
    start = length if steps is None else steps[0]
    queries = _read(given.get("position_ids"), x, start, axes_of(decoder))
    keys = queries if cache is None else _with_cached(cache, queries, length)
    return args, kwargs | {COORDINATES: Coordinates(queries, keys)}


def store_coordinates(cache, coordinates: Coordinates) -> None:
    """Leaves the coordinates of all its tokens with a cache."""
    setattr(cache, COORDINATES, coordinates.keys)


def _read(position_ids, x, start, axes: int) -> torch.Tensor:
    """(batch, seqlen, axes) of position_ids as the decoder reads them, which has tokens like x (batch, seqlen, ...)."""
    batch, seqlen = x.shape[:2]
    if position_ids is None:
        position_ids = (torch.arange(seqlen, device=x.device) + start)[None]
    if position_ids.ndim == 2:
        position_ids = position_ids[None]
    if position_ids.ndim == 3 and position_ids.shape[0] == 1:
        position_ids = position_ids.expand(axes, -1, -1)
    if position_ids.ndim == 3 and position_ids.shape[0] == axes + 1:  # behind those that the mask is made of
        position_ids = position_ids[1:]
    if position_ids.ndim != 3 or position_ids.shape[0] != axes or position_ids.shape[1] not in (1, batch):
        raise ValueError(
            f"position_ids: expected (batch, seqlen), ({axes}, batch, seqlen) or ({axes + 1}, batch, seqlen) with "
            f"batch {batch}, got shape {tuple(position_ids.shape)}"
        )
    return position_ids.expand(-1, batch, -1).permute(1, 2, 0).to(torch.float32)


def _with_cached(cache: Cache, queries: torch.Tensor, length) -> torch.Tensor:
    """The coordinates of a cache's tokens, length in number, and behind them those of the new ones."""
    cached, seqlen = getattr(cache, COORDINATES, None), queries.shape[1]
    layer = next((each for each in getattr(cache, "layers", ()) if hasattr(each, "max_cache_len")), None)
    if layer is not None:  # a static cache: its length is known to the device alone
        if cached is None:
            _check_empty(cache, 0, queries)
            cached = queries.new_zeros(queries.shape[0], layer.max_cache_len, queries.shape[2])
        _check_batch(cached, queries)
        return cached.index_copy(1, length + torch.arange(seqlen, device=queries.device), queries)
    if not length:
        return queries
    if cached is None or cached.shape[1] < length:
        _check_empty(cache, 0 if cached is None else cached.shape[1], queries)
    assert cached is not None
    _check_batch(cached, queries)
    return torch.cat((cached[:, :length].to(queries.device), queries), 1)


def _check_empty(cache: Cache, known: int, queries: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    if length := int(cache.get_seq_length()):
        raise ValueError(
            f"past_key_values: expected the {queries.shape[2]} coordinates of each of its {length} tokens, which "
            f"a converted model leaves with the cache that it fills, got those of {known} tokens"
        )


def _check_batch(cached: torch.Tensor, queries: torch.Tensor) -> None:
    if cached.shape[0] != queries.shape[0]:
        raise ValueError(
            f"past_key_values: expected a cache of {queries.shape[0]} sequences, as the new tokens, got the "
            f"coordinates of {cached.shape[0]}"
        )


# ---- transformers' caches


def follow_caches() -> None:
    """Makes coordinates follow the methods of ``Cache`` that move sequences. Caches without any are not affected."""
    _follow("reorder_cache", lambda x, beam_idx: x.index_select(0, beam_idx.to(x.device)))
    _follow("batch_repeat_interleave", lambda x, repeats: x.repeat_interleave(repeats, dim=0))
    _follow("batch_select_indices", lambda x, indices: x[indices.to(x.device)])


def _follow(name: str, move) -> None:
    stock = getattr(Cache, name)
    if hasattr(stock, "_flashrope"):
        return

    @functools.wraps(stock)
    def method(self, argument, *args, **kwargs):
        result = stock(self, argument, *args, **kwargs)
        coordinates = getattr(self, COORDINATES, None)
        if coordinates is not None:
            setattr(self, COORDINATES, move(coordinates, argument))
        return result

    method._flashrope = True  # type: ignore[attr-defined]
    setattr(Cache, name, method)
