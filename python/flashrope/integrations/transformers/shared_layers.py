"""Supports decoders whose last layers read the keys and values of earlier layers (Gemma 4 E2B and E4B).

The last layers append nothing to the cache, so they only need the rows whose logits are requested, which are the last
rows of the call. The decoders therefore drop the other rows before the first layer that reads an earlier layer's keys.
The mask still describes all rows. The decoder's hook passes every layer the number of rows with which the call began.
If a layer gets fewer queries than this number, its queries are the last rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .versions import CACHE

ROWS = "_flashrope_rows"  # the keyword argument that every layer gets: the number of new tokens


def drops_rows(decoder) -> bool:
    """Whether a decoder drops rows before its last layers."""
    shares = getattr(decoder.config, "num_kv_shared_layers", 0) and hasattr(decoder, "_maybe_slice_kv_shared_inputs")
    return bool(shares) and "logits_to_keep" in inspect.signature(decoder.forward).parameters


def count_rows(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments to add to the arguments of a decoder that drops rows.

    Args:
        given: the arguments of the decoder's forward, from ``arguments_of``.
    """
    x = next(x for x in (given.get("inputs_embeds"), given.get("input_ids")) if x is not None)
    # With positions and without a cache, sequences may be packed. Only the masks show whether they are.
    packed = given.get("position_ids") is not None and given.get(CACHE) is None
    return {ROWS: x.shape[1]} | ({"logits_to_keep": None} if packed else {})
