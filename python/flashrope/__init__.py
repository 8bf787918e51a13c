"""Fused attention for rotary position schemes: RoPE, HoPE, ReRoPE, Leaky ReRoPE, PI, NTK, YaRN and log n in one
pass."""

from ._version import __version__
from .api import attention, attention_varlen, attention_varlen_with_cache, attention_with_cache
from .cache import KVCache, OutOfPages, PagedKVCache, Step
from .rotary import Band, Rotary

__all__ = [
    "Band",
    "KVCache",
    "OutOfPages",
    "PagedKVCache",
    "Rotary",
    "Step",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_varlen_with_cache",
    "attention_with_cache",
]
