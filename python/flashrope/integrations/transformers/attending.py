"""The attention function and the mask function that transformers calls in converted models.

A model asks for its masks once per forward pass, and passes the result of ``describe_mask`` to every layer. The result
is one of

    None             row r sees keys 0 to r: no cache yet, no padding on the left
    PackedRows           several sequences in every row of the batch, known from position_ids; no cache
    empty tensor     int32 (0, 1, 1, 1), with the same meaning as None. Compiled models pass it, see positions.py
    int32 tensor     (3, 1, 1, batch): for every sequence its first key, the end of its keys, and the position of its
                     first query. The tensor has four dimensions because generate passes masks to the model along with a
                     static cache, and the model passes on only masks of four dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ...calls.cache_tables import CacheLayer, CacheTables
from ...operators.functional import attention, attention_varlen, plan_and_attend, rotate
from ...schemes.rotary import Rotary
from .caches import COORDINATES, Coordinates, follow_caches, holds_codes, split_rows
from .checkpointing import check_recomputed
from .continuous_batching import BATCH, attend_paged, prepare_manager
from .conversion_plan import NAME, NOT_CONVERTED, SAVED, scheme_of
from .one_tensor import (
    absorb,
    holds_latents,
    holds_unweighted,
    key_weight_of,
    latent_scheme,
    project_values,
    weighted_keys,
)
from .positions import LENGTH, left_padding
from .shared_layers import ROWS

# Arguments of attention functions that ``attention_forward`` does not support, and the reason for each.
UNSUPPORTED = {
    "softcap": "caps its scores",
    "position_bias": "adds a bias to its scores",
    "head_mask": "masks heads",
    "block_indices": "attends to selected blocks of keys",
    "cache": "reads the pages of a kind of continuous batching that this package does not support",
}


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, s_aux=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes the attention of one layer, with the signature of transformers' attention functions.

    query: raw, (batch, heads_q, seqlen_q, head_dim). key, value: raw, (batch, heads_kv, seqlen_k, head_dim), as the
    library's cache returns them. A ``CodesCache`` returns rows of bytes instead. attention_mask: what ``describe_mask``
    returned.
    s_aux: attention sinks, (heads_q,). kwargs: other arguments of the layer, including ``Coordinates`` if a position
        has several coordinates.
    """
    scheme = scheme_of(module)
    paged = BATCH in kwargs
    _check_call(module, scheme, dropout, sliding_window, kwargs | {"cache": None} if paged else kwargs)
    if query.dtype != value.dtype and not holds_codes(value):  # autocast: the rotary embedding returns float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    options = {"softmax_scale": scaling, "sinks": s_aux}
    if holds_latents(module, value):
        rotary = _rotary_of(scheme, kwargs)
        return _attend_latents(module, rotary, query, key, value, attention_mask, options), None
    if holds_unweighted(value):
        weight = key_weight_of(module)
        if _reads_cache(query, key, weight, attention_mask):
            options["key_weight"] = weight.detach()
        else:
            key = weighted_keys(value, weight)
    if paged:
        return attend_paged(module, query, key, value, options, kwargs), None
    head_dim, width = query.shape[-1], value.shape[-1]
    if head_dim % 8:  # the kernels need a multiple of 8 channels
        query, key = (torch.nn.functional.pad(x, (0, -head_dim % 8)) for x in (query, key))
        options["softmax_scale"] = head_dim**-0.5 if scaling is None else scaling
    if holds_codes(value):
        width = head_dim
    elif width % 8:
        value = torch.nn.functional.pad(value, (0, -width % 8))
    out = _attend(_rotary_of(scheme, kwargs), query, key, value, attention_mask, options, kwargs)
    return (out if out.shape[-1] == width else out[..., :width]), None


def _rotary_of(scheme, kwargs) -> Rotary:
    """Returns the scheme of a layer for the positions of this call."""
    if scheme.grows_from == math.inf:
        return scheme.rotary
    if LENGTH not in kwargs:
        raise ValueError(
            "model: a frequency table that depends on the length is not supported by this decoder (its layers do not "
            f"pass keyword arguments on to attention), got one that changes beyond {scheme.grows_from:,} tokens; give "
            "convert a rotary"
        )
    return scheme.at(kwargs[LENGTH])


def _attend(rotary: Rotary, query, key, value, attention_mask, options: dict, kwargs) -> torch.Tensor:
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    seqlen, places = kwargs.get(ROWS, q.shape[1]), _places(rotary, kwargs, q.device)  # seqlen includes dropped rows
    rotary = _sized(rotary, q)
    cu_seqlens_q = kwargs.get("cu_seq_lens_q")
    if cu_seqlens_q is not None and cu_seqlens_q.shape[0] > 2 and not isinstance(attention_mask, PackedRows):
        raise ValueError(
            "cu_seq_lens_q: expected position_ids as well, which restart in every sequence, got "
            f"{cu_seqlens_q.shape[0] - 1} sequences without position_ids"
        )
    whole = attention_mask is None or not isinstance(attention_mask, PackedRows) and attention_mask.shape[0] == 0
    if holds_codes(v):
        (k, k_scale), (v, v_scale) = split_rows(k), split_rows(v)
        options = options | {"k_scale": k_scale, "v_scale": v_scale}
        if whole:
            end = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
            return _attend_cached(q, k, v, rotary, end, None, options, places)
    elif whole:
        positions = None if places is None else places.queries
        return attention(q, k[:, :seqlen], v[:, :seqlen], rotary, positions=positions, **options)
    if isinstance(attention_mask, PackedRows):
        if places is not None:
            options = options | {"positions": places.queries.flatten(0, 1)}
        return _attend_packed(q, k, v, rotary, attention_mask, options)
    if attention_mask.dtype is not torch.int32 or attention_mask.shape != (3, 1, 1, q.shape[0]):
        raise ValueError(
            "attention_mask: expected None or (batch, keys) of zeros and ones, got a mask of shape "
            f"{tuple(attention_mask.shape)} and type {attention_mask.dtype}, which the kernels cannot express"
        )
    first, end, _ = attention_mask.view(3, -1).unbind()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, options["sinks"])):
        if places is not None:
            q, k, rotary, options = _rotated(q, k, rotary, places, options)
        return _attend_with_gradients(q, k, v, rotary, first, end, options)
    return _attend_cached(q, k, v, rotary, end, first, options, places)


def _reads_cache(query, key, weight, attention_mask) -> bool:
    """Whether keys and values can be read in place, because nothing needs gradients or padded channels. weight: the
    key_weight of the layer."""
    masked = attention_mask is not None and not isinstance(attention_mask, PackedRows) and attention_mask.shape[0] != 0
    return (
        masked
        and not query.shape[-1] % 8
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, weight)))
    )


def _attend_latents(module, rotary: Rotary, query, rows, latents, attention_mask, options: dict) -> torch.Tensor:
    """Computes the attention of one layer over rows of latents (see ``LatentCache``).

    query: (batch, heads, seqlen_q, head_dim). rows, latents: (batch, 1, seqlen_k, ...).
    """
    q, k, v = absorb(module, query).transpose(1, 2), rows.transpose(1, 2), latents.transpose(1, 2)
    first, end, _ = attention_mask.view(3, -1).unbind()
    out = _attend_cached(q, k, v, latent_scheme(module, rotary), end, first, options, None)
    return project_values(module, out)


def _attend_cached(q, k, v, rotary, end, first, options: dict, places: Coordinates | None) -> torch.Tensor:
    layer = CacheLayer(k, v, *(options.get(name) for name in CacheLayer._fields[2:]))
    scale, sinks = options["softmax_scale"], options["sinks"]
    if places is not None:
        return places.attend(q, layer, rotary, end, first, scale, sinks)
    return plan_and_attend(q, layer, None, None, CacheTables(end, None, first), rotary, (True, scale), sinks, False)


def _rotated(q, k, rotary: Rotary, places: Coordinates, options: dict):
    """Returns q and k rotated by their coordinates, a scheme that does not rotate, and the options for attention with
    this scheme."""
    scale = q.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    q, k = rotate(q, rotary, places.queries), rotate(k, rotary, places.slots(k.shape[1]))
    return q, k, Rotary.none(rotary.head_dim), options | {"softmax_scale": scale * rotary.temperature}


def _sized(rotary: Rotary, q: torch.Tensor) -> Rotary:
    """Returns the scheme for the head_dim of q. Channels that were added as padding do not rotate."""
    return rotary if rotary.head_dim == q.shape[-1] else _widened(rotary, q.shape[-1])


@lru_cache(maxsize=1024)
def _widened(rotary: Rotary, head_dim: int) -> Rotary:
    return dataclasses.replace(rotary, head_dim=head_dim)


def _attend_packed(q, k, v, rotary, packed: PackedRows, options: dict) -> torch.Tensor:
    starts, longest = packed
    return _attend_varlen(q, k, v, rotary, starts, starts, longest, options)


def _attend_varlen(q, k, v, rotary, starts_q, starts_k, longest: int, options: dict) -> torch.Tensor:
    q_rows, k_rows, v_rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = attention_varlen(q_rows, k_rows, v_rows, rotary, starts_q, starts_k, longest, longest, **options)
    return out.unflatten(0, q.shape[:2])


def _attend_with_gradients(q, k, v, rotary, first, end, options: dict) -> torch.Tensor:
    """Attends to the keys [first, end) of every sequence, with gradients. attention_with_cache has no gradients.

    The sequences are packed. Without a cache, the left padding of each sequence becomes a sequence of its own, with
    keys but no queries. With a cache, the visible keys are selected.
    """
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
    return out.unflatten(0, q.shape[:2])


def _places(rotary: Rotary, kwargs, device: torch.device) -> Coordinates | None:
    """Returns the coordinates of the tokens, on the device of the layer, if the layer rotates by them, else None."""
    if not rotary.axis:
        return None
    if kwargs.get(COORDINATES) is None:
        raise ValueError(
            "kwargs: expected a decoder whose layers pass keyword arguments on to the attention function, got no "
            "coordinates of the tokens"
        )
    return kwargs[COORDINATES].to(device)


def _check_call(module, scheme, dropout, sliding_window, kwargs) -> None:
    if scheme is None:
        raise ValueError(
            f"{NOT_CONVERTED}; layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) has no scheme"
        )
    check_recomputed(scheme)
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


# ---- masks


class PackedRows(NamedTuple):
    cu_seqlens: torch.Tensor  # (sequences + 1,) int32, row numbers in (batch * seqlen)
    max_seqlen: int


def describe_mask(
    *,
    batch_size,
    kv_length,
    mask_function,
    attention_mask=None,
    q_length=None,
    q_offset=0,
    kv_offset=0,
    cache_position=None,
    device=None,
    **_,
) -> PackedRows | torch.Tensor | None:
    """Describes a mask. The arguments are those of transformers 4.57 (cache_position) and of 5 (q_length, q_offset)."""
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    if mask_function is causal_mask_function and attention_mask is None and isinstance(q_offset, int) and q_offset == 0:
        return None
    arguments = (batch_size, q_length, q_offset, kv_offset, mask_function, attention_mask, device)
    if torch.compiler.is_compiling():
        return _describe_traced(*arguments, uncached=q_length == kv_length)
    return _describe(*arguments)


def _describe(batch_size, q_length, q_offset, kv_offset, mask_function, attention_mask, device):
    sequence = _sequence_of(mask_function)  # (batch, q_length) or None
    if sequence is not None and bool(sequence.any()):
        return _packed(sequence.expand(batch_size, q_length))
    first = torch.zeros((), dtype=torch.int32, device=device)
    if attention_mask is not None:
        first = _first_key(attention_mask, q_length, q_offset)
    # A single row may be a step with a static cache, whose offset is only known to the device.
    if q_length > 1 and int(q_offset) == 0 and (attention_mask is None or not bool(first.any())):
        return None
    return _ranges(batch_size, q_length, q_offset, kv_offset, first, device)


def _describe_traced(
    batch_size, q_length, q_offset, kv_offset, mask_function, attention_mask, device, uncached: bool
) -> PackedRows | torch.Tensor:
    """Does what ``_describe`` does, inside a graph. A graph cannot branch on values, so an assertion in the graph
    checks that the mask is causal. A graph cannot look into closures either, so this function calls the mask function
    to find which keys next to the diagonal a row sees."""
    if mask_function is not causal_mask_function:
        row = torch.arange(q_length - 1, device=device)
        batch = torch.arange(batch_size, device=device)[:, None]
        index = q_offset + row
        ahead = torch.as_tensor(mask_function(batch, 0, index, index + 1))
        torch._assert_async(~ahead.any(), "mask_function: expected a causal mask, got one where queries see later keys")
        if uncached and attention_mask is None:
            seen = torch.as_tensor(mask_function(batch, 0, row + 1, row)).expand(batch_size, q_length - 1)
            return _packed_traced(~seen)
    first = torch.zeros((), dtype=torch.int32, device=device)
    if attention_mask is not None:
        first = _first_key(attention_mask, q_length, q_offset)
    return _ranges(batch_size, q_length, q_offset, kv_offset, first, device)


def _ranges(batch_size, q_length, q_offset, kv_offset, first, device) -> torch.Tensor:
    answer = torch.empty(3, 1, 1, batch_size, dtype=torch.int32, device=device)
    answer[0] = (first - kv_offset).clamp(min=0)
    answer[1] = q_offset + q_length - kv_offset
    answer[2] = q_offset - first
    return answer


def _sequence_of(mask_function) -> torch.Tensor | None:
    """Returns the sequence number of every token in a packed causal mask, or None without packing. Raises for other
    masks.

    transformers builds a mask function from closures, and closures can be told apart only by their names.
    """
    causal, sequence = _parts(mask_function)
    if not causal:
        raise ValueError("mask_function: expected a causal mask, got one where queries see later keys")
    return sequence


def _parts(function) -> tuple[bool, torch.Tensor | None]:
    """Returns (whether the mask is causal, sequence numbers or None)."""
    if function is causal_mask_function:
        return True, None
    name = getattr(function, "__qualname__", repr(function)).split(".")[0]
    closed = {}
    if getattr(function, "__closure__", None):
        closed = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    if name == "and_masks":
        parts = [_parts(part) for part in closed["mask_functions"].cell_contents]
        return any(causal for causal, _ in parts), next(
            (sequence for _, sequence in parts if sequence is not None), None
        )
    if name == "sliding_window_overlay":  # attention_forward gets the window from the layer
        return False, None
    if name == "packed_sequence_mask_function":
        return False, closed["packed_sequence_mask"].cell_contents
    if name == "remap_positions_for_packed_sequence":
        return _parts(closed["mask_function"].cell_contents)
    raise ValueError(
        f"mask_function: expected causal, sliding windows, padding or packed sequences, got {name}, which the "
        "kernels cannot express (prefix-LM, bidirectional or chunked attention); use revert(model) for such masks"
    )


def _packed(sequence: torch.Tensor) -> PackedRows:
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=sequence.numel()).to(
        torch.int32
    )
    return PackedRows(cu_seqlens, int(cu_seqlens.diff().max()))


def _packed_traced(new: torch.Tensor) -> PackedRows:
    """Returns what ``_packed`` returns, inside a graph: tables of a fixed size, which end with empty sequences.

    new: (batch, seqlen - 1), whether a sequence starts in the row after this one.
    """
    starts = torch.nn.functional.pad(new, (1, 0), value=True).flatten()
    rows = torch.arange(starts.numel(), device=starts.device)
    firsts = torch.where(starts, rows, starts.numel()).sort().values
    cu_seqlens = torch.nn.functional.pad(firsts, (0, 1), value=starts.numel()).to(torch.int32)
    return PackedRows(cu_seqlens, new.shape[1] + 1)


def _first_key(attention_mask: torch.Tensor, q_length: int, q_offset) -> torch.Tensor:
    """Returns the length of the left padding up to the last token of the call, (batch,) int32. Rows of padding on the
    right are computed, too, but their results are not used."""
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected (batch, keys) of zeros and ones, got shape {tuple(attention_mask.shape)}"
        )
    real = attention_mask.bool()
    traced = torch.compiler.is_compiling()
    on_host = not isinstance(q_offset, torch.Tensor) or q_offset.is_cpu and not traced
    cached = int(q_offset) if on_host else 0  # do not wait for the device
    if attention_mask.shape[1] < cached + q_length:
        raise ValueError(
            f"attention_mask: expected one number for each of the {cached} cached and {q_length} new tokens, got "
            f"shape {tuple(attention_mask.shape)}"
        )
    runs = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(-1)
    if traced:
        torch._assert_async((runs <= 1).all(), "attention_mask: expected sequences without gaps")
    elif bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0])
        raise ValueError(
            f"attention_mask: expected the tokens of a sequence without gaps, got zeros between ones in row {row}; "
            "pad prompts on the left"
        )
    return left_padding(real).clamp(max=q_offset + q_length).to(torch.int32)


# ---- registration


def _refuse(*args, **kwargs):
    raise ValueError(NOT_CONVERTED)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, describe_mask)
AttentionInterface.register(SAVED, _refuse)
AttentionMaskInterface.register(SAVED, _refuse)
follow_caches()
prepare_manager()
