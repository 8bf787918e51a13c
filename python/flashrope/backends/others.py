"""How a backend reaches another one. Backends never import one another: the registry, which imports them all, gives its
function to this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LOAD: list[Callable[[str], Any]] = []


def reach_by(load: Callable[[str], Any]) -> None:
    """Stores the registry's ``load_backend``."""
    _LOAD[:] = [load]


def backend(name: str) -> Any:
    """Returns the module of a backend."""
    return _LOAD[0](name)
