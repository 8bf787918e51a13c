"""Quantized caches: K and V are stored as 8-bit integers, with a float32 scale per token and key head.

A row x of K or V is stored as a scale s and a row c of integers, and is read as x':

    s = max(abs(x)) / 127        c = round(x / s), ties to even, in [-127, 127]        x' = s * c

A row of zeros has s = 0 and c = 0. If x holds a NaN, s is NaN and c = 0. Infinities count as the largest finite number
of x's dtype (float64: of float32). Everything is computed in float32. Divisions round to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .cache_tables import CacheLayer

LARGEST_CODE = 127


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes x (..., head_dim). Returns int8 (..., head_dim) and float32 scales (...)."""
    limit = torch.finfo(torch.float32 if x.dtype == torch.float64 else x.dtype).max
    x = x.to(torch.float32).clamp(-limit, limit)
    peak = x.abs().amax(-1)
    scale = peak / torch.full_like(peak, LARGEST_CODE)  # on CUDA, PyTorch multiplies by a Python number's reciprocal
    steps = torch.where(scale > 0, scale, torch.inf)[..., None]  # rows of zeros or with a NaN get the integers 0
    return (x / steps).round().nan_to_num(0.0).clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values x' (..., head_dim) in dtype."""
    return codes.to(dtype) * scale.to(dtype)[..., None]


def loaded(layer: CacheLayer, rows: Iterable[Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values that rows of ``layer.rows`` stand for. They have dtype if the layer is quantized or
    has a ``key_weight``. Otherwise they are the rows as they are."""
    k, v, k_scale, v_scale = rows
    if k_scale is not None:
        k, v = dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)
    if layer.key_weight is not None:
        k, v = k.to(dtype) * layer.key_weight, v.to(dtype)
    return k, v


def stores(layer: CacheLayer, k, v=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs (tensor of the cache, new values to write to it) for k and v, and for the scales of a quantized
    cache. v: None if values are channels of the keys."""
    if v is None:
        return [(layer.k, k)]
    if layer.k_scale is None or layer.v_scale is None:
        return [(layer.k, k), (layer.v, v)]
    codes_k, scale_k = quantize(k)
    codes_v, scale_v = quantize(v)
    return [(layer.k, codes_k), (layer.v, codes_v), (layer.k_scale, scale_k), (layer.v_scale, scale_v)]
