"""Which conversion filled a cache: raw keys under one scheme are not valid under another, or for the stock model.

A cache bears the conversion's mark from its first call on. Reading it costs no device synchronisation.
"""

from __future__ import annotations

import inspect

import torch
from transformers import Cache

from .coordinates import COORDINATES, store_coordinates
from .plan import find_decoder, plan_of

__all__ = ["accept_cache", "check_cache", "mark_returned"]

MARK = "_flashrope"  # attribute of a cache, and copied with it


def accept_cache(model, cache):
    """Takes a cache whose origin is not known, such as one that was read from a file or built from tensors.

    The caller answers for its contents: raw keys of the same scheme and weights for a converted model, the library's
    rotated keys for a stock one. Returns cache.
    """
    mark = _mark_of(find_decoder(model))
    if mark is None:
        vars(cache).pop(MARK, None)
    else:
        setattr(cache, MARK, mark)
    return cache


def check_cache(decoder, args, kwargs) -> None:
    """Marks an empty cache, and refuses one that was filled by another model or before ``convert`` or ``revert``.

    Raises:
        TypeError, ValueError: past_key_values.
    """
    if args:
        kwargs = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | kwargs
    cache = kwargs.get("past_key_values")
    if cache is None:
        return
    mark = _mark_of(decoder)
    if not isinstance(cache, Cache):
        if mark is None:
            return  # for the stock model to judge
        raise TypeError(f"past_key_values: expected a Cache of transformers, got {type(cache).__name__}")
    if (
        getattr(cache, MARK, None) == mark or torch.compiler.is_exporting()
    ):  # export rebuilds the cache from its tensors
        return
    _check_empty(cache, mark)
    if mark is None:
        delattr(cache, MARK)
    else:
        setattr(cache, MARK, mark)


def mark_returned(decoder, args, kwargs, output) -> None:
    """The decoder's forward hook: marks the cache that a call without one has made, and leaves the coordinates of the
    tokens with it."""
    cache = getattr(output, "past_key_values", None)
    if cache is None and isinstance(output, tuple):
        cache = next((each for each in output if isinstance(each, Cache)), None)
    if isinstance(cache, Cache) and getattr(cache, MARK, None) is None and not torch.compiler.is_exporting():
        setattr(cache, MARK, _mark_of(decoder))
    if isinstance(cache, Cache) and COORDINATES in kwargs:
        store_coordinates(cache, kwargs[COORDINATES])


def _mark_of(decoder) -> str | None:
    plan = plan_of(decoder)
    return None if plan is None else plan.mark


def _check_empty(cache: Cache, mark: str | None) -> None:
    layers = getattr(cache, "layers", None)
    # linear attention's layers do not say
    if layers is not None and not any(getattr(layer, "is_initialized", True) for layer in layers):
        return
    length = cache.get_seq_length()
    if torch.compiler.is_compiling() and isinstance(length, torch.Tensor):
        torch._assert_async(length == 0, "past_key_values was filled by another model, or before convert or revert")
    elif int(length):
        wanted, got = ("this conversion", "by another model, or before convert")
        if mark is None:
            wanted, got = ("the stock model", "by a converted one, before revert")
        raise ValueError(
            f"past_key_values: expected a cache that {wanted} filled, got {int(length)} tokens that were written "
            f"{got}; start a new cache (accept_cache takes one that was read from a file)"
        )
