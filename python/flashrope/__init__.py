"""Fused attention for rotary position schemes: RoPE, HoPE, ReRoPE, Leaky ReRoPE, PI, NTK, YaRN and log n in one
pass.

The Triton kernels, ``flashrope.triton_kernels``, lie in the folder triton_kernels at the top of the repository.

The names below are imported on first use, so that the command line can print its help without loading torch. If torch
is already loaded, importing this package also registers its operators, which torch.export.load needs. If torch is
loaded later, ``import flashrope.operators.functional`` registers them.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .cache import CapturedStep, KVCache, OutOfPages, PagedKVCache, Step
    from .calls.cache_tables import CacheLayer, CachePositions, CacheTables, Packed
    from .operators.cache_plan import CachePlan, plan_cache
    from .operators.documents import cu_seqlens_of
    from .operators.functional import (
        attention,
        attention_varlen,
        attention_varlen_with_cache,
        attention_with_cache,
        rotate,
    )
    from .schemes.bands import Band
    from .schemes.rotary import Rotary

__all__ = [
    "Band",
    "CacheLayer",
    "CachePlan",
    "CachePositions",
    "CacheTables",
    "CapturedStep",
    "KVCache",
    "OutOfPages",
    "Packed",
    "PagedKVCache",
    "Rotary",
    "Step",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_varlen_with_cache",
    "attention_with_cache",
    "cu_seqlens_of",
    "plan_cache",
    "rotate",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    _NAMES = {
        "operators.functional": (
            "attention",
            "attention_varlen",
            "attention_varlen_with_cache",
            "attention_with_cache",
            "rotate",
        ),
        "operators.cache_plan": ("CachePlan", "plan_cache"),
        "operators.documents": ("cu_seqlens_of",),
        "calls.cache_tables": ("CacheLayer", "CachePositions", "CacheTables", "Packed"),
        "cache": ("CapturedStep", "KVCache", "OutOfPages", "PagedKVCache", "Step"),
        "schemes.bands": ("Band",),
        "schemes.rotary": ("Rotary",),
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    if "torch" in sys.modules:
        for _name in _MODULES:
            __getattr__(_name)
