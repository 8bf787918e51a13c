"""What the commands' options share: checks with the messages a user sees."""

from __future__ import annotations

import argparse
import importlib.util

import torch

MOST_THREADS = 8  # more slow down matrices as small as these models'


class BadInput(ValueError):
    """An option that cannot be served; the message names it."""


def positive(text: str) -> int:
    """An argparse type."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def device(name: str) -> torch.device:
    """Of the option --device: auto, cpu, cuda or cuda:N. Raises BadInput."""
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
            f"--device: {name} was asked for, torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return chosen


def need(*packages: str, extra: str = "demo") -> None:
    """Raises BadInput where a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"needs {', '.join(missing)}: pip install 'flashrope[{extra}]'")
