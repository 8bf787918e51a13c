"""Runs converted models under transformers' continuous batching (``generate_batch``), from version 5.19 on.

transformers packs the new tokens of all requests in one row and keeps keys and values in pages. Layers that see all
keys read the pages in place. Sliding layers have a ring of slots instead, from which transformers gathers the keys.
transformers gives all layers the head_dim and the number of key heads of the configuration. For a converted model whose
layers differ in these two numbers (Gemma 4), the pages of each layer type get the numbers of that type. Layers that
share the keys of an earlier layer (Gemma 4, Gemma 3n) read that layer's pages and have no pages of their own. Versions
before 5.19 pass other arguments and are not supported.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ...calls.cache_tables import CacheLayer, CacheTables, Packed
from ...operators.cache_plan import CachePlan, plan_cache
from ...operators.functional import attention_varlen
from ...schemes.families import family
from .caches import axes_of
from .conversion_plan import NAME, scheme_of
from .embeddings import ATTRIBUTE

__all__ = ["Batch", "Pages", "attend_paged", "prepare_manager", "with_pages"]

CACHE = "cache"  # the decoder's argument with transformers' pages, in every version
BATCH = "_flashrope_batch"  # the argument that passes the ``Batch`` to every layer

try:
    from transformers.generation.continuous_batching.cache_allocators import CacheAllocator  # since 5.19

    SUPPORTED = hasattr(CacheAllocator, "get_cache_for_block_table") and hasattr(
        ContinuousBatchingManager, "switch_to_cb_friendly_attn"
    )
except ImportError:
    SUPPORTED = False


class Pages(NamedTuple):
    """The pages that hold the keys of a batch of n requests, for layers of one type."""

    block_table: torch.Tensor  # (n, pages) int32
    seqlens: torch.Tensor  # (n,) int32, including the new tokens if ``slots`` is given, else without them
    slots: torch.Tensor | None  # (tokens,) int64, the slots of the new keys; None: the slots after seqlens
    plans: dict[tuple, CachePlan]  # the plans of the layers, by the properties in which layers may differ


class Batch(NamedTuple):
    """Data that all layers of a forward share.

    Attributes:
        cache: transformers' ``PagedAttentionCache``.
        pages: {layer type: Pages}, without the layer types for which transformers gathers the keys.
        gathered: {layer: (keys, values)}, the keys and values of sliding layers, (1, heads_kv, keys, head_dim).
    """

    cache: Any
    pages: dict[str, Pages]
    gathered: dict[int, tuple[torch.Tensor, torch.Tensor]]


class NewKeys:
    """Replaces transformers' pages in attention modules. Some of these modules call ``update`` to append keys to the
    pages and gather all keys.

    ``attend_paged`` appends to the pages itself, so ``update`` only returns the new keys and values.
    """

    def update(self, key_states, value_states, *_, **__):
        return key_states, value_states


def with_pages(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a decoder's forward, with a ``Batch`` for all its layers.

    The mask is replaced by an unused tensor, which transformers passes on unchanged. Nothing reads the mask, and making
    a real mask would wait for the device.
    """
    positions, cache = kwargs["position_ids"], kwargs[CACHE]
    pages = {
        allocator.layer_type: _pages(allocator, kwargs)
        for allocator in cache.cache_allocators.values()
        if allocator.supports_block_table
    }
    batch = Batch(cache, pages, {})
    return kwargs | {CACHE: NewKeys(), BATCH: batch, "attention_mask": positions.new_zeros(1, 1, 1, 1)}


def _pages(allocator, kwargs) -> Pages:
    starts = kwargs["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
    lengths = starts.diff()
    if kwargs.get("block_table") is not None:  # one token of every request
        new = kwargs["cu_seq_lens_q"].to(torch.int32).diff()
        return Pages(kwargs["block_table"][allocator.index].contiguous(), lengths - new, None, {})
    slots, read = kwargs["write_index"][allocator.index], kwargs["read_index"][allocator.index]
    index = read if read.numel() else slots  # the slots of all keys; without cached keys all keys are new
    size = allocator.tokens_per_page
    longest = kwargs["max_length_k"][allocator.layer_type]
    first = starts[:-1, None] + torch.arange(0, max(longest, 1), size, device=index.device)  # first key of every page
    block_table = (index[first.clamp(max=index.numel() - 1)] // size).to(torch.int32)
    return Pages(block_table, lengths, slots, {})


def attend_paged(module, query, key, value, options, kwargs) -> torch.Tensor:
    """Computes the attention of one layer of a batch.

    query, key, value: raw, (1, heads, tokens, head_dim). options: softmax_scale and sinks.

    Returns:
        (1, tokens, heads_q, head_dim).
    """
    batch: Batch = kwargs[BATCH]
    cache, rotary = batch.cache, getattr(module, ATTRIBUTE).rotary
    allocator = cache.layer_to_allocator[module.layer_idx]
    # A layer without pages reads the pages of the last layer of its type that has pages.
    layer = min(module.layer_idx, allocator.layer_indices[-1])
    starts, longest = kwargs["cu_seq_lens_q"].to(torch.int32), kwargs["max_length_q"]
    pages = batch.pages.get(allocator.layer_type)
    if pages is None:
        starts_k = kwargs["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
        longest_k = kwargs["max_length_k"][allocator.layer_type]
        if layer == module.layer_idx:
            batch.gathered[layer] = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
        q, k, v = (x[0].transpose(0, 1) for x in (query, *batch.gathered[layer]))
        return attention_varlen(q, k, v, rotary, starts, starts_k, longest, longest_k, **options)[None]
    q = query[0].transpose(0, 1)
    k, v = (x[0].transpose(0, 1) if layer == module.layer_idx else None for x in (key, value))
    k_pages, v_pages = allocator.get_cache_for_block_table(layer)
    packed = Packed(starts, longest, pages.slots, appends=pages.slots is None)
    tables = CacheTables(pages.seqlens, pages.block_table, new=packed)
    own, scale = CacheLayer(k_pages, v_pages), options["softmax_scale"]
    alike = rotary, scale, q.shape, k_pages.shape, k_pages.stride(), v_pages.stride()
    if (plan := pages.plans.get(alike)) is None:
        rows, heads = q.shape[:2]
        plan = plan_cache(tables, like=own, rotary=rotary, seqlen_q=rows, heads_q=heads, softmax_scale=scale)
        if not torch.compiler.is_compiling():
            pages.plans[alike] = plan
    return plan.attend(q, own, k, v, sinks=options["sinks"])[None]


# ---- transformers' manager


def conversion_of(model) -> Any:
    """Returns the record that ``convert`` has stored on the decoder of a model, or None."""
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and ATTRIBUTE in vars(module):
            return vars(module)[ATTRIBUTE]
    return None


def _check(model, config) -> None:
    """Checks that the model and the configuration are supported. It is called before any request is accepted.

    Raises:
        ValueError: the model or the configuration is not supported. The message names the argument and says what was
            expected.
    """
    if not SUPPORTED:
        raise ValueError(
            "generate_batch: expected transformers 5.19 or newer for continuous batching of a converted model, got "
            f"{transformers.__version__}, whose continuous batching passes other arguments; use generate, or "
            "revert(model)"
        )
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if reason := family(model_type or "").not_batched:
            raise ValueError(
                f"model: not supported in continuous batching ({model_type} {reason}), got {model_type!r}; use generate"
            )
    page_size = getattr(config, "page_size", 256)
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"page_size: expected 16, 32, 64, ... for continuous batching, got {page_size}")
    for module in model.modules():
        if (axes := axes_of(module)) > 1:
            raise ValueError(
                "model: positions of several coordinates are not supported in continuous batching (its pages keep no "
                f"coordinates of keys), got {axes} coordinates; use generate"
            )
        if (grows_from := getattr(scheme_of(module), "grows_from", math.inf)) < math.inf:
            raise ValueError(
                "model: expected a rotary table that does not depend on the length, because continuous batching has "
                f"requests of many lengths in a batch, got one that changes beyond {grows_from} tokens; give "
                "convert a rotary, or use generate"
            )


def prepare_manager() -> None:
    """Makes transformers' manager accept converted models, or raise an error for models that are not supported. Stock
    models are not affected."""
    stock_init = ContinuousBatchingManager.__init__
    if hasattr(stock_init, "_flashrope"):
        return

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        given = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments
        conversion = conversion_of(given["model"])
        if conversion is not None:
            _check(given["model"], given.get("continuous_batching_config"))
        self._flashrope = conversion
        stock_init(self, *args, **kwargs)

    __init__._flashrope = True  # type: ignore[attr-defined]
    ContinuousBatchingManager.__init__ = __init__
    if not SUPPORTED:
        return
    stock_switch = ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(stock_switch)
    def switch_to_cb_friendly_attn(self, model, *args, **kwargs):
        conversion = conversion_of(model)
        if conversion is not self._flashrope:
            raise ValueError(
                "persistent_manager: expected a manager that was made after the last convert or revert, so that its "
                "pages hold keys of this scheme; call model.destroy_cached_continuous_batching_manager()"
            )
        if conversion is None:
            stock_switch(self, model, *args, **kwargs)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    _offer_block_tables()
    _fit_pages_to_layers()


def _fit_pages_to_layers() -> None:
    """Makes transformers' pages of a converted model fit the layers that use them.

    transformers has one allocator of pages for each layer type, which gives every layer pages of one head_dim and
    number of key heads. The allocator reads both numbers from the configuration and fails if they differ between
    layers. For a converted model, an allocator gets the numbers of its first layer, because all layers of a type have
    the same numbers. Memory is planned with the largest numbers. Layers that share an earlier layer's keys get no
    pages.
    """
    from transformers.generation.continuous_batching import cache
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

    def largest(name: str, stock):
        @functools.wraps(stock)
        def find(config):
            layers = _layers_that_differ(config)
            return max(getattr(layer, name) for layer in layers) if layers else stock(config)

        return find

    cache.find_head_dim = largest("head_dim", cache.find_head_dim)
    cache.find_num_key_value_heads = largest("num_key_value_heads", cache.find_num_key_value_heads)
    stock_init = FullAttentionCacheAllocator.__init__  # the allocator of sliding layers calls it, too

    @functools.wraps(stock_init)
    def __init__(self, *args, config, num_key_value_heads, layer_indices, **kwargs):
        if config._attn_implementation == NAME:
            first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
            layer_indices = [each for each in layer_indices if each < first_shared]
        if layers := _layers_that_differ(config):
            if num_key_value_heads != cache.find_num_key_value_heads(config):
                raise ValueError(
                    "tp_plan: tensor parallelism is not supported in continuous batching of a model whose layers "
                    f"differ in head_dim or key heads, got {num_key_value_heads} key heads per rank"
                )
            config = layers[layer_indices[0]]
            num_key_value_heads = config.num_key_value_heads
        given = {"config": config, "num_key_value_heads": num_key_value_heads, "layer_indices": layer_indices}
        stock_init(self, *args, **given, **kwargs)

    FullAttentionCacheAllocator.__init__ = __init__


def _layers_that_differ(config) -> Sequence[Any]:
    """Returns the layers' configurations for a converted model whose layers differ, and () for other models."""
    if config._attn_implementation != NAME or not getattr(config, "is_heterogeneous", False):
        return ()
    return list(config.per_layer_config)


def _offer_block_tables() -> None:
    """Makes transformers pass block tables for batches of one token per request, as it does for flash attention's
    kernel. Otherwise the host would list the slots of all keys in every step."""
    from transformers.generation.continuous_batching import initialization

    stock = getattr(initialization, "ensure_decode_fast_path_is_available", None)
    if stock is None:
        return

    @functools.wraps(stock)
    def ensure_decode_fast_path_is_available(config, cb_config, *args, **kwargs):
        types = initialization.group_layers_by_attn_type(config)
        allocators = (initialization.ATTN_TYPE_TO_ALLOCATOR[each] for each in types)
        if config._attn_implementation == NAME and all(each.supports_block_table for each in allocators):
            return
        stock(config, cb_config, *args, **kwargs)

    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available
