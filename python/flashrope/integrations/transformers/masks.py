"""The mask function of converted models: what the kernels need of a mask.

A model asks for its masks once per forward pass and passes the answer to every layer. The answer is one of

    None             row r sees keys 0 to r: no cache yet, no padding on the left
    Packed           several sequences in every row of the batch, known from position_ids; no cache
    empty tensor     int32 (0, 1, 1, 1): as None. Compiled models pass it in, see ``check_positions``
    int32 tensor     (3, 1, 1, batch): for every sequence its first key, the end of its keys, and the position of its
                     first query. It has four dimensions because generate passes masks to the model along with a static
                     cache, and the model passes on only masks of four dimensions.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from transformers.masking_utils import causal_mask_function

from ..families import family
from .layer_schemes import attending_layers

__all__ = ["Packed", "check_positions", "describe_mask"]


class Packed(NamedTuple):
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
) -> Packed | torch.Tensor | None:
    """The mask function, which takes the arguments of transformers 4.57 (cache_position) and 5 (q_length, q_offset)."""
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
) -> Packed | torch.Tensor:
    """``_describe`` in a graph, which reads no values: they are only asserted. Nor can it look into closures, but it
    can ask the mask function which keys next to the diagonal a row sees."""
    if mask_function is not causal_mask_function:
        row = torch.arange(q_length - 1, device=device)
        batch = torch.arange(batch_size, device=device)[:, None]
        index = q_offset + row
        ahead = torch.as_tensor(mask_function(batch, 0, index, index + 1))
        torch._assert_async(~ahead.any(), "mask_function: expected a causal mask, got one that shows keys ahead")
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
    """The sequence number of every token in a packed causal mask, or None; refuses masks that are not causal.

    transformers composes a mask function of closures, which only their names tell apart.
    """
    causal, sequence = _parts(mask_function)
    if not causal:
        raise ValueError("mask_function: expected a causal mask, got one that shows keys ahead")
    return sequence


def _parts(function) -> tuple[bool, torch.Tensor | None]:
    """(whether the mask is causal, sequence numbers or None)"""
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
    if name == "sliding_window_overlay":  # the layer has its window
        return False, None
    if name == "packed_sequence_mask_function":
        return False, closed["packed_sequence_mask"].cell_contents
    if name == "remap_positions_for_packed_sequence":
        return _parts(closed["mask_function"].cell_contents)
    raise ValueError(
        f"mask_function: expected causal, sliding windows, padding or packed sequences, got {name}, which the "
        "kernels cannot express (prefix-LM, bidirectional or chunked attention); revert(model) runs it"
    )


def _packed(sequence: torch.Tensor) -> Packed:
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=sequence.numel()).to(
        torch.int32
    )
    return Packed(cu_seqlens, int(cu_seqlens.diff().max()))


def _packed_traced(new: torch.Tensor) -> Packed:
    """As ``_packed``, in a graph: of a fixed size, with empty sequences behind the real ones.

    new: (batch, seqlen - 1), whether a sequence starts in the row after this one.
    """
    starts = torch.nn.functional.pad(new, (1, 0), value=True).flatten()
    rows = torch.arange(starts.numel(), device=starts.device)
    firsts = torch.where(starts, rows, starts.numel()).sort().values
    cu_seqlens = torch.nn.functional.pad(firsts, (0, 1), value=starts.numel()).to(torch.int32)
    return Packed(cu_seqlens, new.shape[1] + 1)


def _first_key(attention_mask: torch.Tensor, q_length: int, q_offset) -> torch.Tensor:
    """(batch,) int32: the padding on the left. Rows of padding on the right are computed, but nobody reads them."""
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
    return real.to(torch.uint8).argmax(-1).to(torch.int32)


# ---- position_ids


def check_positions(module, args, kwargs) -> tuple | None:
    """position_ids must be what the kernels count: the token's slot in the cache, with or without its left padding.

    Returns:
        Arguments of the decoder's forward to use instead, or None. A graph cannot ask whether position_ids, which the
        forward makes if none are given, restart. Where none are given, a mask says that they do not.

    Raises:
        ValueError: another position, and its row and column.
    """
    given, named = args, kwargs
    if args:
        kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    positions = kwargs.get("position_ids")
    if positions is None:
        plain = kwargs.get("attention_mask") is None and kwargs.get("past_key_values") is None
        if (
            plain
            and torch.compiler.is_compiling()
            and len(given) < 2
            and len(attending_layers(module.config)) == module.config.num_hidden_layers
        ):
            x = next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
            return given, named | {"attention_mask": x.new_empty((0, 1, 1, 1), dtype=torch.int32)}
        return None
    if positions.ndim != 2:
        raise ValueError(f"position_ids: expected (batch, seqlen), got shape {tuple(positions.shape)}")
    mask, past, steps = kwargs.get("attention_mask"), kwargs.get("past_key_values"), kwargs.get("cache_position")
    masks_see_packing = family(module.config.model_type).packs
    if mask is None and past is None and masks_see_packing and not _caches(module, kwargs):
        return None  # packed sequences, which the mask function sees
    if isinstance(mask, dict):
        mask = next((m for m in mask.values() if m is not None), None)
    start = steps[0] if steps is not None else 0 if past is None else past.get_seq_length()
    row = torch.arange(positions.shape[1], device=positions.device)
    index = start + row
    if mask is None:
        wrong = positions != index
    else:
        if mask.ndim == 4 and mask.dtype is torch.int32:
            padding = index[0] - mask[2, 0, 0]
            real = index >= padding[:, None]
        elif mask.ndim == 2:
            padding = mask.to(torch.uint8).argmax(-1)
            real = mask.bool().gather(1, index.expand(len(mask), -1).clamp(max=mask.shape[1] - 1))
        else:
            return None  # the layers refuse it
        off, wrong = real & (positions != index), real & (positions != index - padding[:, None])
        wrong = wrong & off.any(-1, keepdim=True)
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), "position_ids do not match the cache")
    elif bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids: expected the token's place in the cache, {int(index[at[1]])}, or that less its padding "
            f"on the left, got {int(positions.expand(wrong.shape)[*at])} in row {at[0]}, column {at[1]}; "
            + ("packed sequences need use_cache=False" if masks_see_packing else "this model packs no sequences")
        )
    return None


def _caches(module, kwargs) -> bool:
    if module.training and getattr(module, "gradient_checkpointing", False):
        return False
    asked = kwargs.get("use_cache")
    return bool(getattr(module.config, "use_cache", False) if asked is None else asked)
