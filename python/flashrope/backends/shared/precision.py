"""Turns autocast off in backends that are composed of PyTorch's operations, because they choose their own dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns the function, decorated to run without autocast.

    Autocast would compute float32 products in bfloat16, and it refuses to combine float16 with float32 on the CPU.
    """

    @functools.wraps(function)
    def exact(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **options)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **options)

    return exact
