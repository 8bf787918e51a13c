"""torch.autocast: float32 inputs become its type, as in scaled_dot_product_attention."""

from __future__ import annotations

import torch

# Asked at import: torch.compile cannot trace the question before torch 2.12.
DEVICES = frozenset(device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device))


def autocast(*tensors):
    """Returns the tensors, with float32 ones cast where autocast is on. None and other dtypes stay as they are."""
    eager_without_autocast = not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled()
    if eager_without_autocast or not isinstance(tensors[0], torch.Tensor):
        return tensors
    if (dtype := _type_on(tensors[0].device.type)) is None:
        return tensors
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors)


def autocast_hint(x: torch.Tensor) -> str:
    """Returns what an error about the dtype of x says about autocast, or ""."""
    dtype = _type_on(x.device.type)
    return "" if dtype is None else f"; autocast casts float32 to {dtype}"


def _type_on(device: str) -> torch.dtype | None:
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
