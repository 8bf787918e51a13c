"""The attention function of converted models, and its registration together with the mask function."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ...backends.cache_tables import CacheLayer
from ...operators.functional import attention, attention_varlen, attention_with_cache, rotate
from ...rotary.rotary import Rotary
from .codes_cache import holds_codes, split_rows
from .continuous_batching import NAME, PAGES, attend_paged, prepare_manager
from .coordinates import COORDINATES, Coordinates, follow_caches
from .masks import Packed, describe_mask
from .plan import scheme_of
from .saved import NOT_CONVERTED

# Arguments of an attention function that this one cannot serve.
UNSUPPORTED = {
    "softcap": "caps its scores",
    "position_bias": "adds a bias to its scores",
    "head_mask": "masks heads",
    "block_indices": "attends to selected blocks of keys",
    "cache": "is served from the pages of a continuous batching that this package does not know",
}


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, s_aux=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, in the signature of transformers' attention functions.

    query: raw, (batch, heads_q, seqlen_q, head_dim). key, value: raw, (batch, heads_kv, seqlen_k, head_dim), which the
    library's cache returns; rows of bytes from a ``CodesCache``. attention_mask: what ``describe_mask`` returned.
    s_aux: attention sinks, (heads_q,). kwargs: with ``Coordinates``, where positions have several numbers.
    """
    scheme = scheme_of(module)
    paged = PAGES in kwargs
    _check_call(module, scheme, dropout, sliding_window, kwargs | {"cache": None} if paged else kwargs)
    if query.dtype != value.dtype and not holds_codes(value):  # autocast: the rotary embedding returns float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    options = {"softmax_scale": scaling, "sinks": s_aux}
    if paged:
        return attend_paged(module, query, key, value, options, kwargs), None
    head_dim = query.shape[-1]
    if head_dim % 8:  # the kernels have tiles of multiples of 8 channels
        query, key, value = (torch.nn.functional.pad(x, (0, -head_dim % 8)) for x in (query, key, value))
        options["softmax_scale"] = head_dim**-0.5 if scaling is None else scaling
    out = _attend(scheme, query, key, value, attention_mask, options, kwargs)
    return (out[..., :head_dim] if head_dim % 8 else out), None


def _attend(scheme, query, key, value, attention_mask, options: dict, kwargs) -> torch.Tensor:
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    seqlen, places = q.shape[1], _places(scheme.rotary, kwargs)
    cu_seqlens_q = kwargs.get("cu_seq_lens_q")
    if cu_seqlens_q is not None and cu_seqlens_q.shape[0] > 2 and not isinstance(attention_mask, Packed):
        raise ValueError(
            "cu_seq_lens_q: expected position_ids beside it, which start anew in every sequence, got "
            f"{cu_seqlens_q.shape[0] - 1} sequences and none"
        )
    whole = attention_mask is None or not isinstance(attention_mask, Packed) and attention_mask.shape[0] == 0
    if holds_codes(v):
        (k, k_scale), (v, v_scale) = split_rows(k), split_rows(v)
        options = options | {"k_scale": k_scale, "v_scale": v_scale}
        if whole:
            end = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
            return _attend_cached(q, k, v, _sized(scheme.at(k.shape[1]), q), end, None, options, places)
    elif whole:
        positions = None if places is None else places.queries
        return attention(q, k[:, :seqlen], v[:, :seqlen], _sized(scheme.at(seqlen), q), positions=positions, **options)
    if isinstance(attention_mask, Packed):
        if places is not None:
            options = options | {"positions": places.queries.flatten(0, 1)}
        return _attend_packed(q, k, v, _sized(scheme.at(attention_mask.max_seqlen), q), attention_mask, options)
    if attention_mask.dtype is not torch.int32 or attention_mask.shape != (3, 1, 1, q.shape[0]):
        raise ValueError(
            "attention_mask: expected None or (batch, keys) of zeros and ones, got a mask of shape "
            f"{tuple(attention_mask.shape)} and type {attention_mask.dtype}, which the kernels cannot express"
        )
    first, end, position = attention_mask.view(3, -1).unbind()
    rotary = scheme.rotary
    if scheme.grows_from < math.inf and (scheme.window or k.shape[1] > scheme.grows_from):
        rotary = scheme.at(int(position.max()) + seqlen)
    rotary = _sized(rotary, q)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, options["sinks"])):
        if places is not None:
            q, k, rotary, options = _rotated(q, k, rotary, places, options)
        return _attend_with_gradients(q, k, v, rotary, first, end, options)
    return _attend_cached(q, k, v, rotary, end, first, options, places)


def _attend_cached(q, k, v, rotary, end, first, options: dict, places: Coordinates | None) -> torch.Tensor:
    if places is None:
        return attention_with_cache(q, k, v, rotary, end, cache_leftpad=first, **options)
    layer = CacheLayer(k, v, options.get("k_scale"), options.get("v_scale"))
    return places.attend(q, layer, rotary, end, first, options["softmax_scale"], options["sinks"])


def _rotated(q, k, rotary: Rotary, places: Coordinates, options: dict):
    """q and k rotated by their coordinates, a scheme that does not rotate, and its options."""
    scale = q.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    q, k = rotate(q, rotary, places.queries), rotate(k, rotary, places.slots(k.shape[1]))
    return q, k, Rotary.none(rotary.head_dim), options | {"softmax_scale": scale * rotary.temperature}


def _sized(rotary: Rotary, q: torch.Tensor) -> Rotary:
    """The scheme for padded channels, which do not rotate."""
    return rotary if rotary.head_dim == q.shape[-1] else _widened(rotary, q.shape[-1])


@lru_cache(maxsize=1024)
def _widened(rotary: Rotary, head_dim: int) -> Rotary:
    return dataclasses.replace(rotary, head_dim=head_dim)


def _attend_packed(q, k, v, rotary, packed: Packed, options: dict) -> torch.Tensor:
    starts, longest = packed
    return _attend_varlen(q, k, v, rotary, starts, starts, longest, options)


def _attend_varlen(q, k, v, rotary, starts_q, starts_k, longest: int, options: dict) -> torch.Tensor:
    q_rows, k_rows, v_rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = attention_varlen(q_rows, k_rows, v_rows, rotary, starts_q, starts_k, longest, longest, **options)
    return out.unflatten(0, q.shape[:2])


def _attend_with_gradients(q, k, v, rotary, first, end, options: dict) -> torch.Tensor:
    """attention_with_cache has no gradients, so the keys [first, end) of every sequence are packed. Without a cache, a
    sequence of keys without queries holds the padding on the left; otherwise the keys are selected."""
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    rows = torch.arange(0, batch * seqlen_q + 1, seqlen_q, dtype=torch.int32, device=q.device)
    if seqlen_q == seqlen_k:
        starts_q = rows.repeat_interleave(2)[:-1]
        starts_k = torch.cat((torch.stack((rows[:-1], rows[:-1] + first), -1).flatten(), rows[-1:]))
        return _attend_varlen(q, k, v, rotary, starts_q, starts_k, seqlen_q, options)
    slot = torch.arange(seqlen_k, device=q.device)
    held = (slot >= first[:, None]) & (slot < end[:, None])
    starts_k = torch.nn.functional.pad(held.sum(-1).cumsum(0), (1, 0)).to(torch.int32)
    out = attention_varlen(q.flatten(0, 1), k[held], v[held], rotary, rows, starts_k, seqlen_q, seqlen_k, **options)
    return out.view(q.shape)


def _places(rotary: Rotary, kwargs) -> Coordinates | None:
    """The coordinates of the tokens, for a layer that rotates by them."""
    if not rotary.axis:
        return None
    if kwargs.get(COORDINATES) is None:
        raise ValueError(
            "kwargs: expected a decoder whose layers hand them to the attention function, got none, and with them no "
            "coordinates of the tokens"
        )
    return kwargs[COORDINATES]


def _check_call(module, scheme, dropout, sliding_window, kwargs) -> None:
    if scheme is None:
        raise ValueError(
            f"{NOT_CONVERTED}; layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) has no scheme"
        )
    if dropout:
        raise ValueError(f"attention_dropout: expected 0, got {dropout}; the kernels have no dropout")
    if sliding_window != scheme.window:
        raise ValueError(
            f"sliding_window: layer {module.layer_idx} was converted with {scheme.window}, its forward asks for "
            f"{sliding_window}; call convert(model) after changing the configuration"
        )
    for name, reason in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: expected None, got {type(kwargs[name]).__name__}; layer {module.layer_idx} {reason}"
            )
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: expected a causal model, got False")


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, describe_mask)
follow_caches()
prepare_manager()
