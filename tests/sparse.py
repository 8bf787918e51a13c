"""Makes tensors that take memory only where they are touched, for offsets beyond 2^31 elements and 2^32 bytes.

Under ``Sparse``, large tensors that the package creates are sparse too. They start as zeros, and calls that fill them
do nothing.
"""

from __future__ import annotations

import itertools
import math
import mmap

import torch
from torch.overrides import TorchFunctionMode

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the value on Linux; Python has the name from 3.12 on
LARGE = 2**26  # elements


def empty(shape, dtype: torch.dtype, strides=None) -> torch.Tensor:
    """Returns zeros. strides: in elements; None: contiguous."""
    shape = tuple(shape)
    if strides is None:
        strides = list(itertools.accumulate(reversed((*shape[1:], 1)), lambda a, b: a * b))[::-1]
    elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def spread(x: torch.Tensor, strides) -> torch.Tensor:
    """Returns the same numbers with these strides."""
    return empty(x.shape, x.dtype, strides).copy_(x)


def at_end(x: torch.Tensor, total: int, dim: int = 0) -> torch.Tensor:
    """Returns a tensor that ends with the rows of x. The last of its `total` rows are x, in contiguous memory."""
    shape = [total if n == dim else size for n, size in enumerate(x.shape)]
    room = empty(shape, x.dtype)
    room.narrow(dim, total - x.shape[dim], x.shape[dim]).copy_(x)
    return room


_T = torch.Tensor
MAKERS = (torch.empty, torch.zeros, torch.empty_like, torch.zeros_like, _T.new_empty, _T.new_zeros, _T.new_full)
FILLERS = (_T.zero_, _T.fill_)


class Sparse(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in FILLERS and args[0].numel() > LARGE:
            return args[0]
        if function in MAKERS:
            like = next((x for x in args if isinstance(x, torch.Tensor)), None)
            if function in (torch.empty_like, torch.zeros_like):
                shape = like.shape
            else:
                shape = args[0 if like is None else 1 :]
                shape = shape[0] if shape and not isinstance(shape[0], int) else shape
            if math.prod(shape) > LARGE:
                return empty(shape, kwargs.get("dtype") or (torch.float32 if like is None else like.dtype))
        return function(*args, **kwargs)
