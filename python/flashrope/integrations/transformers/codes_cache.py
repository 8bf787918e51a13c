"""``CodesCache``: a cache of transformers for converted models that holds keys and values in 8 or 4 bits.

A layer keeps rows of bytes: the codes of a key or value, as backends/quantized.py describes them, and behind them the
four bytes of their scale. So everything that transformers does with rows (cropping, selecting sequences, offloading)
moves a scale with its codes. The attention function reads both as views.
"""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ...backends.quantized import quantize
from ...cache.storage import CACHE_DTYPES, check_cache_dtype
from .caches import MARK
from .layer_schemes import attending_layers

SCALE_BYTES = 4


class CodesCache(Cache):
    """Pass it as past_key_values to a model after ``convert``, which then attends to the quantized keys and values.

    All layers keep all tokens, also those that see a sliding window.

    Args:
        config: the model's.
        cache_dtype: "int8" or "int4".

    Raises:
        ValueError: cache_dtype, a head_dim that is no multiple of 8, or layers without attention.
    """

    def __init__(self, config, cache_dtype: str):
        if cache_dtype is None:
            raise ValueError("cache_dtype: expected 'int8' or 'int4', got None")
        config, dtype = config.get_text_config(), CACHE_DTYPES[check_cache_dtype(cache_dtype)]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if head_dim % 8:
            raise ValueError(
                f"cache_dtype: expected a model whose head_dim is a multiple of 8 for {cache_dtype}, got {head_dim}"
            )
        if len(attending_layers(config)) < config.num_hidden_layers:
            raise ValueError(
                f"cache_dtype: expected a model with attention in every layer for {cache_dtype}, got "
                f"{config.model_type} with other layers, whose state is no keys and values"
            )
        super().__init__(layers=[CodesLayer(dtype) for _ in range(config.num_hidden_layers)])

    def update(self, *args, **kwargs):
        """Appends the keys and values of a layer.

        Raises:
            ValueError: the model is not converted.
        """
        if getattr(self, MARK, None) is None and not torch.compiler.is_exporting():
            raise ValueError(
                "past_key_values: a CodesCache is not supported by a stock model (its attention reads no quantized "
                "keys and values); call convert(model) first"
            )
        return super().update(*args, **kwargs)


class CodesLayer(DynamicLayer):
    """The keys and values of a layer, (batch, heads_kv, seqlen, bytes of the codes and the scale)."""

    def __init__(self, code_dtype: torch.dtype):
        super().__init__()
        self.code_dtype = code_dtype

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(self._rows(key_states), self._rows(value_states), *args, **kwargs)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = quantize(x, self.code_dtype)
        return torch.cat((codes, scale[..., None].view(self.code_dtype)), dim=-1)


def holds_codes(rows: torch.Tensor) -> bool:
    return rows.dtype in CACHE_DTYPES.values()


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a layer's keys or values, views."""
    return rows[..., :-SCALE_BYTES], rows.view(torch.float32)[..., -1]
