"""The backends of the attention operators. They share the call descriptions of ``base`` and never import one another."""

from .base import BACKENDS, AttentionCall, CacheCall, load_backend, resolve_impl

__all__ = ["BACKENDS", "AttentionCall", "CacheCall", "load_backend", "resolve_impl"]
