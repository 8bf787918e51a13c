"""Keeps tensors on their device after they were built once: tables of cos and sin, and tables of bands."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

MANY = 1000  # number of results at which a function warns that they stay in memory
F = TypeVar("F", bound=Callable)
_building = threading.Lock()


def kept_on_device(what: str) -> Callable[[F], F]:
    """Decorates build(*key), which makes tensors on the device that is the last argument. Results are cached by key.

    On a GPU the results live as long as the process: a captured CUDA graph may point to them, and a kernel on another
    stream may still read them. On the CPU the 256 most recently used results are kept.

    what: what is built, for messages.

    Raises:
        RuntimeError: the first use with these arguments is inside a CUDA graph capture.
    """

    def decorate(build: Any) -> Any:
        kept: dict[tuple, object] = {}
        recent = lru_cache(maxsize=256)(build)

        def make(*key):
            with _building:  # two threads must not build two copies: one would be freed
                if key not in kept:
                    refuse_capture(f"{what} of this scheme")
                    kept[key] = _on_another_thread(build, key)
                    if len(kept) == MANY:
                        _warn_of_many(what, key[-1])
                return kept[key]

        @wraps(build)
        def lookup(*key):
            found = kept.get(key)
            if found is not None:
                return found
            return recent(*key) if key[-1].type == "cpu" else make(*key)

        return lookup

    return decorate


def _warn_of_many(what: str, device: torch.device) -> None:
    warnings.warn(
        f"flashrope has made the {what} of {MANY} different schemes. They stay on {device} until the process ends, "
        "because CUDA graphs may use them. Avoid a new Rotary for every step.",
        stacklevel=4,
    )


def _on_another_thread(build: Callable, key: tuple):
    """Runs build(*key) on a separate thread, because the calling thread may be in inference mode, or may allocate from
    the pool of a CUDA graph, which reclaims that memory later (with torch.compile's "reduce-overhead"). Copies from
    the host are complete when this function returns, so every stream may read the tensors."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(build, *key).result()


def refuse_capture(what: str) -> None:
    """Raises RuntimeError if a CUDA graph is being captured on the current stream. what: the tensors that would have to
    be made now, for the message."""
    if is_capturing():
        raise RuntimeError(
            f"flashrope cannot make the {what} while a CUDA graph is being captured. Make one call with the same "
            "arguments before the capture."
        )


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
