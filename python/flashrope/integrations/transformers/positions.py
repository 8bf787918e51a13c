"""Checks the position_ids of converted models, and finds the length of a call.

The kernels count positions from the first token of a sequence. Scores of most schemes depend only on distances, so
position_ids only have to rise by one from token to token. Log n, Self-Extend and dual chunk attention also depend on
where the count begins: under them position_ids have to begin at 0. Frequency tables that grow (dynamic, longrope)
depend on the largest position of a call, as in transformers. The decoder's hook passes this number to all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...schemes.families import family
from .conversion_plan import plan_of
from .layer_schemes import attending_layers
from .versions import CACHE, CACHES_WITHOUT_GRADIENTS

LENGTH = "_flashrope_length"  # the keyword argument given to every layer if tables grow: the largest position plus one

FROM_ZERO = (
    "positions that count from 0 after the left padding of every sequence (log n, Self-Extend and dual chunk attention "
    "depend on where the count begins)"
)
COUNT_FROM_ZERO = "subtract the first position of the sequence, or omit position_ids"


def left_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    """Returns how many zeros precede the first one in every row of a mask, (batch,). In a row of zeros, all count."""
    real = attention_mask.bool()
    return torch.where(real.any(-1), real.to(torch.uint8).argmax(-1), real.shape[1])


def add_length(decoder, given: Mapping[str, Any], positions: torch.Tensor | None) -> dict[str, Any]:
    """Returns the arguments to add to a decoder's forward if a frequency table of it grows, else {}.

    Args:
        given: the arguments of the forward, from ``arguments_of``.
        positions: the positions of the tokens, of any shape. None: the slots of the tokens, as in transformers.
    """
    if not getattr(plan_of(decoder), "grows", False):
        return {}
    if positions is not None:
        return {LENGTH: int(positions.max()) + 1}
    start, tokens = _start(given), next(x for x in map(given.get, ("inputs_embeds", "input_ids")) if x is not None)
    return {LENGTH: int(start) + tokens.shape[1]}


def _start(given: Mapping[str, Any]) -> Any:
    """Returns the slot of the first token of a call, an int or a tensor of one number."""
    past, steps = given.get(CACHE), given.get("cache_position")
    return steps[0] if steps is not None else 0 if past is None else past.get_seq_length()


def check_positions(decoder, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks that position_ids are the positions that the kernels count: the slot of each token in the cache, excluding
    the left padding. If scores depend only on distances, the slots may include the padding.

    Args:
        given: the arguments of the decoder's forward, from ``arguments_of``.

    Returns:
        Arguments to add to ``given``, or {}. If no position_ids are given, the forward makes position_ids that do not
        restart, so no sequences are packed. A compiled graph cannot read the values of position_ids, so an added empty
        mask tells the layers that nothing is packed.

    Raises:
        ValueError: position_ids has other positions. The message names one wrong position with its row and column.
    """
    positions, mask, past = given.get("position_ids"), given.get("attention_mask"), given.get(CACHE)
    if positions is None:
        if (
            mask is None
            and past is None
            and torch.compiler.is_compiling()
            and len(attending_layers(decoder.config)) == decoder.config.num_hidden_layers
        ):
            x = next(x for x in (given.get("input_ids"), given.get("inputs_embeds")) if x is not None)
            return {"attention_mask": x.new_empty((0, 1, 1, 1), dtype=torch.int32)}
        return {}
    if positions.ndim != 2:
        raise ValueError(f"position_ids: expected (batch, seqlen), got shape {tuple(positions.shape)}")
    from_zero, packs = getattr(plan_of(decoder), "from_zero", False), family(decoder.config.model_type).packs
    if mask is None and past is None and packs and not _caches(decoder, given):
        if from_zero:  # sequences may be packed; the mask function shows whether they are
            starts = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True)
            _refuse(positions, starts & (positions != 0), FROM_ZERO, COUNT_FROM_ZERO)
        return {}
    if isinstance(mask, dict):  # by layer type; the mask of recurrent layers has two dimensions and no cached tokens
        mask = max((m for m in mask.values() if m is not None), key=lambda m: m.ndim, default=None)
    slots = _start(given) + torch.arange(positions.shape[1], device=positions.device)
    real, padding = slots >= 0, torch.zeros_like(slots[:1])
    if mask is not None:
        if mask.ndim == 4 and mask.dtype is torch.int32:
            padding = slots[0] - mask[2, 0, 0]
            real = slots >= padding[:, None]
        elif mask.ndim == 2:
            padding = left_padding(mask)
            real = mask.bool().gather(1, slots.expand(len(mask), -1).clamp(max=mask.shape[1] - 1))
        else:
            return {}  # the layers raise an error for such a mask
    shift = positions - (slots - padding[:, None])
    accepted = [torch.zeros_like(padding)]
    if not from_zero:
        accepted.append(padding)
    if past is not None and positions.shape[1] == 1:
        # generate numbers the new tokens of an empty prompt from 1 (transformers 5). All slots before them are padding.
        accepted.append(padding.clamp(max=1))
    fits = torch.stack([(~real | (shift == each[:, None])).all(-1) for each in accepted]).any(0)
    remedy = "packed sequences need use_cache=False" if packs else "this model does not support packed sequences"
    if from_zero:
        expected, remedy = FROM_ZERO, f"{COUNT_FROM_ZERO}; {remedy}"
    else:
        expected = "the token's slot in the cache, {slot}, or this slot minus the left padding"
    _refuse(positions, real & (shift != 0) & ~fits[:, None], expected, remedy, slots)
    return {}


def _refuse(positions: torch.Tensor, wrong: torch.Tensor, expected: str, remedy: str, slots=None) -> None:
    """Raises an error if any position is wrong.

    wrong: (batch, seqlen) bool. expected, remedy: texts for the message. slots: (seqlen,), for ``expected``.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), "position_ids do not match the positions that the kernels count")
    elif bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        got, slot = int(positions.expand(wrong.shape)[row, column]), None if slots is None else int(slots[column])
        if slots is not None and (held := int(slots[0])):
            remedy = (
                f"the cache holds {held} tokens, also the ones that generate added; for another prompt with the same "
                "beginning, call join_passages again, or pass copy.deepcopy(cache) to generate the first time"
            )
        raise ValueError(
            f"position_ids: expected {expected.format(slot=slot)}, got {got} in row {row}, column {column}; {remedy}"
        )


def _caches(decoder, given: Mapping[str, Any]) -> bool:
    """Whether a forward without a cache creates a cache."""
    replays = torch.is_grad_enabled() or not CACHES_WITHOUT_GRADIENTS
    if decoder.training and getattr(decoder, "gradient_checkpointing", False) and replays:
        return False
    asked = given.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", False) if asked is None else asked)
