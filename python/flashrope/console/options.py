"""Code for options that several commands share: types, checks, and error messages. This file loads torch only to find a
device."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_THREADS = 8  # the small models get slower with more threads


class BadInput(ValueError):
    """Raised for an option with an invalid value. The message names the option."""


def positive(text: str) -> int:
    """Parses a positive integer, for use as an argparse type."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def device(name: str) -> torch.device:
    """Returns the device of the option --device: auto, cpu, cuda or cuda:N. Raises BadInput."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise BadInput(f"--device: expected auto, cpu, cuda or cuda:N, got {name}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise BadInput(f"--device: expected auto, cpu, cuda or cuda:N, got {name}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            f"--device: got {name}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return chosen


def cores() -> int:
    """Returns the number of CPU cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets torch's number of CPU threads to ``count`` within the block, and restores the previous number after it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def need(*packages: str, extra: str = "demo") -> None:
    """Raises BadInput if a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"needs {', '.join(missing)}: pip install 'flashrope[{extra}]'")
