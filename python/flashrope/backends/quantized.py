"""Quantized caches: K and V are stored as 8-bit or 4-bit integers, with a float32 scale per token and key head.

A row x of K or V is stored as a scale s and a row c of integers, and is read as x':

    s = max(abs(x)) / m        c = round(x / s), ties to even, in [-m, m]        x' = s * c

A row of zeros has s = 0 and c = 0. If x holds a NaN, s is NaN and c = 0. Infinities count as the largest finite number
of x's dtype (float64: of float32). Everything is computed in float32. Divisions round to nearest.

    int8:   m = 127, one integer per byte.
    uint8:  m = 7, two integers per byte: channel 2 i in the low half, channel 2 i + 1 in the high half, each plus 8.
"""

from __future__ import annotations

import torch

from .cache_tables import CacheLayer

LARGEST_CODE = {torch.int8: 127, torch.uint8: 7}
PER_BYTE = {torch.int8: 1, torch.uint8: 2}


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes x (..., head_dim). Returns int8 (..., head_dim) or uint8 (..., head_dim / 2), and float32 scales
    (...)."""
    limit = torch.finfo(torch.float32 if x.dtype == torch.float64 else x.dtype).max
    x, largest = x.to(torch.float32).clamp(-limit, limit), LARGEST_CODE[dtype]
    peak = x.abs().amax(-1)
    scale = peak / torch.full_like(peak, largest)  # on CUDA, PyTorch multiplies by the reciprocal of a Python number
    steps = torch.where(scale > 0, scale, torch.inf)[..., None]  # rows of zeros or with a NaN get the integers 0
    codes = (x / steps).round().nan_to_num(0.0).clamp(-largest, largest)
    if dtype == torch.int8:
        return codes.to(dtype), scale
    codes = (codes + 8).to(dtype)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values x' (..., head_dim) in dtype."""
    return unpack(codes, dtype) * scale.to(dtype)[..., None]


def unpack(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the integers (..., head_dim) in dtype, not multiplied by their scale."""
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
    return codes.to(dtype)


def stores(layer: CacheLayer, k, v=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs (tensor of the cache, new values to write to it) for k and v, and for the scales of a quantized
    cache. v: None if values are channels of the keys."""
    if v is None:
        return [(layer.k, k)]
    if layer.k_scale is None or layer.v_scale is None:
        return [(layer.k, k), (layer.v, v)]
    codes_k, scale_k = quantize(k, layer.k.dtype)
    codes_v, scale_v = quantize(v, layer.v.dtype)
    return [(layer.k, codes_k), (layer.v, codes_v), (layer.k_scale, scale_k), (layer.v_scale, scale_v)]
