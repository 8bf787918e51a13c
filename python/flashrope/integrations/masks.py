"""What the kernels need to know of a mask, out of what Hugging Face transformers says of one.

A model asks for its masks once per forward pass; every layer then gets the answer, which is one of

    None             row r sees keys 0 to r: no cache yet, no padding on the left
    Packed           several sequences in every row of the batch, told from position_ids; no cache
    int32 tensor     (3, 1, 1, batch): per sequence its first key, the end of its keys, and the position of its first query.
                     Four dimensions, because generate hands masks with a static cache on to the model, which passes on
                     what has four.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.masking_utils import causal_mask_function

__all__ = ["Packed", "layout"]


class Packed(NamedTuple):
    cu_seqlens: torch.Tensor  # (sequences + 1,) int32, into the rows of (batch * seqlen)
    max_seqlen: int


def layout(*, batch_size, kv_length, mask_function, attention_mask=None, q_length=None, q_offset=0, kv_offset=0,
           cache_position=None, device=None, **_) -> Packed | torch.Tensor | None:
    """The mask function that transformers calls, with the arguments of 4.57 (cache_position) and of 5 (q_length, q_offset)."""
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    if mask_function is causal_mask_function and attention_mask is None and isinstance(q_offset, int) and q_offset == 0:
        return None
    return _layout(batch_size, q_length, q_offset, kv_length, kv_offset, mask_function, attention_mask, device)


@torch.compiler.disable  # its answers decide which kernel runs
def _layout(batch_size, q_length, q_offset, kv_length, kv_offset, mask_function, attention_mask, device):
    sequence = _sequence_of(mask_function)  # (batch, q_length) or None
    if sequence is not None and bool(sequence.any()):
        return _packed(sequence.expand(batch_size, q_length))
    first = torch.zeros((), dtype=torch.int32, device=device)
    if attention_mask is not None:
        first = _first_key(attention_mask, q_length, q_offset)
    # One row may be a step of a static cache, whose offset the device alone knows.
    if q_length > 1 and int(q_offset) == 0 and (attention_mask is None or not bool(first.any())):
        return None
    answer = torch.empty(3, 1, 1, batch_size, dtype=torch.int32, device=device)
    answer[0] = (first - kv_offset).clamp(min=0)
    answer[1] = q_offset + q_length - kv_offset
    answer[2] = q_offset - first
    return answer


def _sequence_of(mask_function) -> torch.Tensor | None:
    """The numbers that tell packed sequences apart in a causal mask function, or None; refuses any other mask.

    transformers builds a mask function of parts that close over one another; a part's name is all that tells them apart.
    """
    causal, sequence = _parts(mask_function)
    if not causal:
        raise ValueError("mask_function: expected a causal mask, got one that lets keys ahead be seen")
    return sequence


def _parts(function) -> tuple[bool, torch.Tensor | None]:
    if function is causal_mask_function:
        return True, None
    name = getattr(function, "__qualname__", repr(function)).split(".")[0]
    closed = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True)) if getattr(function, "__closure__", None) else {}
    if name == "and_masks":
        parts = [_parts(part) for part in closed["mask_functions"].cell_contents]
        return any(causal for causal, _ in parts), next((sequence for _, sequence in parts if sequence is not None), None)
    if name == "sliding_window_overlay":  # the layer knows its window
        return False, None
    if name == "packed_sequence_mask_function":
        return False, closed["packed_sequence_mask"].cell_contents
    if name == "remap_positions_for_packed_sequence":
        return _parts(closed["mask_function"].cell_contents)
    raise ValueError(f"mask_function: expected causal, sliding windows, padding or packed sequences, got {name}, which the kernels "
                     "cannot express (prefix-LM, bidirectional or chunked attention); revert(model) runs it")


def _packed(sequence: torch.Tensor) -> Packed:
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=sequence.numel()).to(torch.int32)
    return Packed(cu_seqlens, int(cu_seqlens.diff().max()))


def _first_key(attention_mask: torch.Tensor, q_length: int, q_offset) -> torch.Tensor:
    """(batch,) int32: the padding on the left. Padding on the right hides rows that nobody reads; holes are refused."""
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask: expected (batch, keys) of zeros and ones, got shape {tuple(attention_mask.shape)}")
    real = attention_mask.bool()
    if attention_mask.shape[1] < q_length or not isinstance(q_offset, torch.Tensor) and attention_mask.shape[1] < q_length + q_offset:
        raise ValueError(f"attention_mask: expected one number for each of the {q_offset} cached and {q_length} new tokens, "
                         f"got shape {tuple(attention_mask.shape)}")
    runs = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(-1)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0])
        raise ValueError(f"attention_mask: expected the tokens of a sequence in one piece, got zeros between ones in row {row}; pad "
                         "prompts on the left")
    return real.to(torch.uint8).argmax(-1).to(torch.int32)
