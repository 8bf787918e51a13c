"""transformers' caches under converted models: who filled them, the coordinates of their tokens, and quantized caches.

Keys and values that were computed under one scheme are not valid under another scheme or for the stock model. So the
first call that uses a cache marks it with the conversion. Reading the mark costs no device synchronisation.

Coordinates are for models whose tokens have a time, a row and a column (M-RoPE). Raw keys have no position. So the
decoder's hook takes the coordinates of the new tokens from ``position_ids``, appends them to the coordinates that the
cache carries, and passes both to the layers. After the forward the cache carries the coordinates of all tokens. The
coordinates follow the cache. A crop leaves fewer keys, and the next call reads only the coordinates of the remaining
keys. Reordering, repeating or selecting sequences moves the coordinates with the rows of the cache (``follow_caches``).
A copy of the cache has the coordinates, too. On the CPU, the layers of a step share one table of cos and sin, which has
8 bytes per key and channel and is freed after the step. Triton's kernels compute cos and sin from the coordinates.

A layer of ``CodesCache`` keeps rows of bytes: the quantized values of a key or value (calls/int8.py), then the
four bytes of their scale. So whatever transformers does with rows (cropping, selecting sequences, offloading) moves a
scale with its values. The attention function reads both as views.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ...cache.storage import check_cache_dtype
from ...calls.cache_tables import CacheLayer, CachePositions, CacheTables
from ...calls.checks import MAX_NARROW_HEAD_DIM
from ...calls.int8 import quantize
from ...operators.cache_plan import CachePlan, plan_cache
from ...schemes.families import family
from ...schemes.rotary import Rotary
from .conversion_plan import find_decoder, plan_of
from .layer_schemes import attending_layers
from .versions import CACHE, cache_of

# ---- which conversion filled a cache

MARK = "_flashrope"  # attribute of a cache, which is copied with the cache


def accept_cache(model, cache):
    """Tells a model to trust a cache whose origin is not known, such as one that was read from a file. Returns cache.

    Use it if the cache holds what the model would have written: for a converted model, raw keys computed with the same
    scheme and weights; for a stock model, keys that the library rotated. Nothing checks this.

    Example:
        from transformers import AutoModelForCausalLM, DynamicCache
        from flashrope.integrations.transformers import accept_cache, convert

        model = convert(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        cache = accept_cache(model, DynamicCache())  # filled from a file
    """
    mark = _mark_of(find_decoder(model))
    if mark is None:
        vars(cache).pop(MARK, None)
    else:
        setattr(cache, MARK, mark)
    return cache


def check_cache(decoder, given: Mapping[str, Any]) -> None:
    """Marks an empty cache. Refuses a cache that was filled by another model, or before ``convert`` or ``revert``.

    Args:
        given: the arguments of the decoder's forward, from ``arguments_of``.

    Raises:
        TypeError: the decoder is converted and the cache is not a Cache of transformers.
        ValueError: the cache is refused. The message names the argument of the cache.
    """
    cache = given.get(CACHE)
    if cache is None:
        return
    mark = _mark_of(decoder)
    if not isinstance(cache, Cache):
        if mark is None:
            return  # the stock model decides whether it accepts this cache
        raise TypeError(f"{CACHE}: expected a Cache of transformers, got {type(cache).__name__}")
    if (
        getattr(cache, MARK, None) == mark or torch.compiler.is_exporting()
    ):  # export rebuilds the cache from its tensors
        return
    _check_unfilled(cache, mark)
    if mark is None:
        delattr(cache, MARK)
    else:
        setattr(cache, MARK, mark)


def mark_returned(decoder, args, kwargs, output) -> None:
    """Marks the cache that a forward returns, if the cache has no mark yet, and stores the coordinates of the tokens as
    an attribute of the cache. This is the decoder's forward hook: a forward that was given no cache makes one."""
    cache = cache_of(output)
    if cache is None and isinstance(output, tuple):
        cache = next((each for each in output if isinstance(each, Cache)), None)
    if isinstance(cache, Cache) and getattr(cache, MARK, None) is None and not torch.compiler.is_exporting():
        setattr(cache, MARK, _mark_of(decoder))
    if isinstance(cache, Cache) and COORDINATES in kwargs:
        store_coordinates(cache, kwargs[COORDINATES])


def _mark_of(decoder) -> str | None:
    plan = plan_of(decoder)
    return None if plan is None else plan.mark


def _check_unfilled(cache: Cache, mark: str | None) -> None:
    layers = getattr(cache, "layers", None)
    # layers of linear attention do not have is_initialized
    if layers is not None and not any(getattr(layer, "is_initialized", True) for layer in layers):
        return
    length = cache.get_seq_length()
    if torch.compiler.is_compiling() and isinstance(length, torch.Tensor):
        torch._assert_async(length == 0, f"{CACHE} was filled by another model, or before convert or revert")
    elif int(length):
        wanted, got = ("this conversion", "by another model, or before convert")
        if mark is None:
            wanted, got = ("the stock model", "by a converted model, before revert")
        raise ValueError(
            f"{CACHE}: expected a cache that {wanted} filled, got {int(length)} tokens that were written "
            f"{got}; start a new cache (for a cache that was read from a file, call accept_cache)"
        )


# ---- coordinates of cached tokens

COORDINATES = "_flashrope_coordinates"  # the keyword argument given to every layer, and an attribute of caches


class Coordinates:
    """Holds the coordinates of the tokens of a call.

    Attributes:
        queries: (batch, seqlen_q, axes) float32, for the new tokens.
        keys: (batch, slots, axes) float32, for cached and new tokens. Slots without a token hold arbitrary numbers.
        plans: the plans that the layers of this call share, by the properties in which layers may differ.
    """

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor):
        self.queries, self.keys = queries, keys
        self.plans: dict[tuple, CachePlan] = {}
        self._elsewhere: dict[torch.device, Coordinates] = {}

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Coordinates:
        """Returns the coordinates on a device, the same object for all layers there. accelerate calls this method where
        the layers of a model lie on several devices."""
        queries = self.queries.to(device, non_blocking=non_blocking)
        if queries.device == self.queries.device:
            return self
        if queries.device not in self._elsewhere:
            keys = queries if self.keys is self.queries else self.keys.to(device, non_blocking=non_blocking)
            self._elsewhere[queries.device] = Coordinates(queries, keys)
        return self._elsewhere[queries.device]

    def slots(self, count: int) -> torch.Tensor:
        """Returns the coordinates of all ``count`` slots of a cache, (batch, count, axes).

        Raises:
            ValueError: the cache does not have ``count`` slots.
        """
        if count != self.keys.shape[1]:
            raise ValueError(
                f"{CACHE}: expected a cache that returns the keys of its {self.keys.shape[1]} tokens or slots, "
                f"got {count} keys"
            )
        return self.keys

    def attend(self, q, layer: CacheLayer, rotary: Rotary, end, first, softmax_scale=None, sinks=None) -> torch.Tensor:
        """Computes the attention of one layer over its cache, which holds the new tokens already.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            layer: k and v (batch, slots, heads_kv, head_dim), with scales if they are quantized.
            end, first: (batch,) int32: tokens of a sequence are in the slots first to end - 1. first=None means 0.
            softmax_scale, sinks: as in ``attention_with_cache``.

        Raises:
            ValueError: the backend does not support explicit positions.
        """
        positions = CachePositions(slot_positions=self.slots(layer.k.shape[1]), queries=self.queries)
        tables = CacheTables(end, None, first, 0, positions)
        options = {"like": layer, "rotary": rotary, "seqlen_q": q.shape[1], "heads_q": q.shape[2], "dtype": q.dtype}
        if torch.compiler.is_compiling():  # in a graph, every layer passes the tables to its operator
            return plan_cache(tables, softmax_scale=softmax_scale, **options).attend(q, layer, sinks=sinks)
        alike = rotary, softmax_scale, q.shape, q.dtype, *((x.shape, x.stride()) for x in layer if x is not None)
        if alike not in self.plans:
            self.plans[alike] = plan_cache(tables, softmax_scale=softmax_scale, **options)
        return self.plans[alike].attend(q, layer, sinks=sinks)


def axes_of(decoder) -> int:
    """Returns how many coordinates a position has in a converted decoder: 1 unless the model has M-RoPE."""
    return getattr(plan_of(decoder), "axes", 1)


def read_coordinates(decoder, given: Mapping[str, Any]) -> Coordinates:
    """Returns the coordinates of the tokens of a decoder's forward.

    Args:
        given: the arguments of the forward, from ``arguments_of``.

    Raises:
        ValueError: position_ids or the cache are invalid. The message names the argument.
    """
    cache, steps = given.get(CACHE), given.get("cache_position")
    x = next(x for x in (given.get("inputs_embeds"), given.get("input_ids")) if x is not None)
    length = 0 if cache is None else cache.get_seq_length()
    start = length if steps is None else steps[0]
    queries = _read(given.get("position_ids"), x, start, axes_of(decoder))
    keys = queries if cache is None else _with_cached(cache, queries, length)
    return Coordinates(queries, keys)


def store_coordinates(cache, coordinates: Coordinates) -> None:
    """Stores the coordinates of all tokens of a cache as its attribute."""
    setattr(cache, COORDINATES, coordinates.keys)


def _read(position_ids, x, start, axes: int) -> torch.Tensor:
    """Returns position_ids as the decoder reads them, (batch, seqlen, axes). x: (batch, seqlen, ...), the tokens."""
    batch, seqlen = x.shape[:2]
    if position_ids is None:
        position_ids = (torch.arange(seqlen, device=x.device) + start)[None]
    if position_ids.ndim == 2:
        position_ids = position_ids[None]
    if position_ids.ndim == 3 and position_ids.shape[0] == 1:
        position_ids = position_ids.expand(axes, -1, -1)
    if position_ids.ndim == 3 and position_ids.shape[0] == axes + 1:  # the first row is for the mask
        position_ids = position_ids[1:]
    if position_ids.ndim != 3 or position_ids.shape[0] != axes or position_ids.shape[1] not in (1, batch):
        raise ValueError(
            f"position_ids: expected (batch, seqlen), ({axes}, batch, seqlen) or ({axes + 1}, batch, seqlen) with "
            f"batch {batch}, got shape {tuple(position_ids.shape)}"
        )
    return position_ids.expand(-1, batch, -1).permute(1, 2, 0).to(torch.float32)


def _with_cached(cache: Cache, queries: torch.Tensor, length) -> torch.Tensor:
    """Returns the coordinates of the ``length`` tokens of a cache, followed by the coordinates of the new tokens."""
    cached, seqlen = getattr(cache, COORDINATES, None), queries.shape[1]
    layer = next((each for each in getattr(cache, "layers", ()) if hasattr(each, "max_cache_len")), None)
    if layer is not None:  # a static cache: only the device knows its length
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
            f"{CACHE}: expected a cache that a converted model filled, with {queries.shape[2]} coordinates for each of "
            f"its {length} tokens, got coordinates of {known} tokens"
        )


def _check_batch(cached: torch.Tensor, queries: torch.Tensor) -> None:
    if cached.shape[0] != queries.shape[0]:
        raise ValueError(
            f"{CACHE}: expected a cache of {queries.shape[0]} sequences, the number of sequences of the new tokens, "
            f"got coordinates of {cached.shape[0]} sequences"
        )


def follow_caches() -> None:
    """Makes the methods of ``Cache`` that reorder, repeat or select sequences do the same to the coordinates in the
    cache. Caches that hold no coordinates are not changed."""
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


# ---- quantized caches

SCALE_BYTES = 4


class CodesCache(Cache):
    """Holds quantized keys and values, which a converted model reads in place.

    Use it where memory limits the length or the batch. docs/decoding.md says how much it changes the loss. Pass it as
    the model's cache: ``past_key_values``, or ``cache`` from transformers 5.24 on. All layers keep all tokens, even
    layers with a sliding window.

    Example:
        from transformers import AutoModelForCausalLM
        from flashrope.integrations.transformers import CodesCache, convert

        model = convert(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        prompt = torch.randint(3, 60, (1, 12))
        text = model.generate(prompt, past_key_values=CodesCache(model.config, "int8"), max_new_tokens=4)

    Args:
        config: the configuration of the model.
        cache_dtype: "int8".

    Raises:
        ValueError: cache_dtype is invalid, or the model is not supported: it has a head_dim that is above 256 or not a
            multiple of 8, latent attention, or layers without attention.
    """

    def __init__(self, config, cache_dtype: str):
        if cache_dtype is None:
            raise ValueError("cache_dtype: expected 'int8', got None")
        check_cache_dtype(cache_dtype)
        config = config.get_text_config()
        if family(config.model_type).latent:
            raise ValueError(
                f"cache_dtype: latent attention is not supported (its modules expand what the cache returns), got "
                f"{config.model_type!r}"
            )
        for head_dim in _head_dims(config):
            if head_dim % 8:
                raise ValueError(
                    f"cache_dtype: expected a model whose head_dim is a multiple of 8 for {cache_dtype}, got {head_dim}"
                )
            if head_dim > MAX_NARROW_HEAD_DIM:
                raise ValueError(
                    f"cache_dtype: expected layers of at most {MAX_NARROW_HEAD_DIM} channels for {cache_dtype}, got "
                    f"head_dim {head_dim} in {config.model_type!r}"
                )
        if len(attending_layers(config)) < config.num_hidden_layers:
            raise ValueError(
                f"cache_dtype: expected a model with attention in every layer for {cache_dtype}, got "
                f"{config.model_type} with other layers, which have no keys and values"
            )
        super().__init__(layers=[CodesLayer() for _ in range(config.num_hidden_layers)])

    def update(self, *args, **kwargs):
        """Appends the keys and values of a layer.

        Raises:
            ValueError: the model is not converted.
        """
        if getattr(self, MARK, None) is None and not torch.compiler.is_exporting():
            raise ValueError(
                f"{CACHE}: a CodesCache is not supported by a stock model (its attention reads no quantized "
                "keys and values); call convert(model) first"
            )
        return super().update(*args, **kwargs)


def _head_dims(config) -> set[int]:
    """Returns the values of head_dim of a model's layers."""
    if getattr(config, "is_heterogeneous", False):  # gemma4
        return {config.per_layer_config[layer_type].head_dim for layer_type in set(config.layer_types)}
    return {getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}


class CodesLayer(DynamicLayer):
    """Holds the keys and values of a layer as bytes: (batch, heads_kv, seqlen, bytes of the quantized values and the
    scale)."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(self._rows(key_states), self._rows(value_states), *args, **kwargs)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = quantize(x)
        return torch.cat((codes, scale[..., None].view(torch.int8)), dim=-1)


def holds_codes(rows: torch.Tensor) -> bool:
    return rows.dtype == torch.int8


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (quantized values, scales) of a layer's keys or values, as views."""
    return rows[..., :-SCALE_BYTES], rows.view(torch.float32)[..., -1]
