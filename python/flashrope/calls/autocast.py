"""Supports torch.autocast: casts float32 inputs to the autocast dtype, as scaled_dot_product_attention does."""

from __future__ import annotations

import torch

# Computed at import, because torch.compile cannot trace is_autocast_available before torch 2.12.
DEVICES = frozenset(device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device))


def autocast(*tensors):
    """Returns the tensors. Casts float32 tensors if autocast is on for the device of the first tensor."""
    eager_without_autocast = not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled()
    if eager_without_autocast or not isinstance(tensors[0], torch.Tensor):
        return tensors
    if (dtype := _type_on(tensors[0].device.type)) is None:
        return tensors
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors)


def autocast_hint(x: torch.Tensor) -> str:
    """Returns a remark about autocast for errors about the dtype of x, or "" if autocast is off."""
    dtype = _type_on(x.device.type)
    return "" if dtype is None else f"; autocast casts float32 to {dtype}"


def _type_on(device: str) -> torch.dtype | None:
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
