"""The backends of the attention operators: triton, cuda, cpu and reference. ``base`` says what a backend is."""

from .base import BACKENDS, AttentionCall, CacheCall, CacheLayout, Kept, KeptShapes, load_backend, resolve_impl

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "CacheCall",
    "CacheLayout",
    "Kept",
    "KeptShapes",
    "load_backend",
    "resolve_impl",
]
