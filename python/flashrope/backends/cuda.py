"""CUDA C++ kernels. None is part of this version: the place they will be dispatched from."""

from __future__ import annotations

import torch


def refusal(q: torch.Tensor, cached: bool = False) -> str:
    return "the CUDA extension serves decoding only and is not part of this version; use impl='triton'"
