"""Maps names to backends and checks that a backend serves a call. A backend is imported when it is first used."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ..calls.cache_tables import CachePositions
from ..calls.plans import not_served
from ..calls.records import refuse
from .names import BACKENDS
from .others import reach_by


@cache
def load_backend(impl: str) -> Any:
    """Returns the module of the backend ``impl``. "auto" chooses a backend for each call (chosen.py). The package's own
    backends are imported with import statements, because torch.compile cannot trace import_module."""
    if impl == "triton":
        from . import triton as backend
    elif impl == "cuda":
        from . import cuda as backend
    elif impl == "cpu":
        from . import cpu as backend
    elif impl == "sdpa":
        from . import sdpa as backend
    elif impl == "auto":
        from . import chosen as backend
    elif impl == "reference":
        from . import reference as backend
    else:
        backend = import_module(f".{impl}", __package__)
    return backend


reach_by(load_backend)


def resolve_impl(impl: str | None, q: torch.Tensor, cached: bool = False) -> str:
    """Returns the name of the backend that serves tensors like q. impl: if None, the backend is chosen by device and
    dtype. "auto" stands for the backends among which chosen.py chooses by the rest of the call.

    cached: whether the call is ``attention_with_cache``.

    Raises:
        ValueError: the name is unknown, or the backend cannot serve the call. The message says why.
    """
    if impl is None:
        if q.is_cuda and q.dtype != torch.float64:
            return "triton" if cached else "auto"
        return "auto" if q.is_cpu else "reference"
    if impl not in BACKENDS:
        raise ValueError(f"impl: expected None or one of {', '.join(BACKENDS)}, got {impl!r}")
    if not torch.compiler.is_compiling():  # a graph cannot import modules; the operators do this check at tracing
        check_backend(impl, q, cached)
    return impl


def check_backend(
    impl: str,
    q: torch.Tensor,
    cached: bool = False,
    positions: CachePositions | None = None,
    options: Iterable[str] = (),
) -> None:
    """Raises ValueError if the backend cannot serve tensors like q, or an option of a call over a cache. options: from
    ``plans.options_of``."""
    reason = load_backend(impl).unsupported_reason(q, cached)
    if positions is not None and not reason:
        reason = unsupported_positions(impl, positions)
    for option in options:
        if not reason and option not in load_backend(impl).CACHE_OPTIONS:
            reason = not_served(option)
    refuse(None if impl == "auto" else impl, reason)


def unsupported_positions(impl: str, positions: CachePositions) -> str:
    """Returns why the backend ``impl`` cannot serve explicit positions, or "". The reason names the argument."""
    backend = load_backend(impl)
    return backend.unsupported_positions(positions) if "positions" in backend.CACHE_OPTIONS else not_served("positions")
