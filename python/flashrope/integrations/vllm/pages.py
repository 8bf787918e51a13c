"""vLLM's pages as the cache calls take them. Nothing here imports vLLM."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...backends.quantized import PER_BYTE

CODES = {"int8_per_token_head": torch.int8, "int4_per_token_head": torch.uint8}  # by vLLM's name of a cache dtype
SCALE_BYTES = 4  # behind the codes of a row, float32


class Pages(NamedTuple):
    """The cache of one layer: vLLM's tensor and views of it, as ``attention_varlen_with_cache`` takes them."""

    kv_cache: torch.Tensor
    k: torch.Tensor  # (blocks, block_size, heads_kv, head_dim), or codes
    v: torch.Tensor
    k_scale: torch.Tensor | None = None  # (blocks, block_size, heads_kv), of codes
    v_scale: torch.Tensor | None = None


def row_bytes(head_size: int, cache_dtype: torch.dtype) -> int:
    """Bytes of one key or value in codes of this type, its scale included."""
    return head_size // PER_BYTE[cache_dtype] + SCALE_BYTES


def split_pages(kv_cache: torch.Tensor, head_size: int) -> Pages:
    """kv_cache: (blocks, heads_kv, block_size, columns), any strides of the first three dimensions.

    A head of a slot is K | V, 2 * head_size columns; in int8 and uint8 K | scale of K | V | scale of V.
    """
    rows = kv_cache.transpose(1, 2)
    if kv_cache.dtype not in PER_BYTE:
        return Pages(kv_cache, *rows.split(head_size, dim=-1))
    half = row_bytes(head_size, kv_cache.dtype)
    codes = half - SCALE_BYTES
    floats = rows.view(torch.float32)
    k, v = rows[..., :codes], rows[..., half : half + codes]
    return Pages(kv_cache, k, v, floats[..., codes // 4], floats[..., (half + codes) // 4])
