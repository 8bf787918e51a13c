"""What both caches share: storage, argument checks, uploads to the device."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch

from ..checks import DTYPES


class Cache:
    k: torch.Tensor
    v: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of k and v."""
        return self.k.nbytes + self.v.nbytes


def allocate_storage(shape: tuple[int, int], heads_kv, head_dim, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, (*shape, heads_kv, head_dim), after the checks of the arguments.

    On the CPU the heads come first in memory, so that the keys of a head are contiguous: decoding reads them in half
    the time. On a GPU the rows come first.
    """
    heads_kv, head_dim = check_integer("heads_kv", heads_kv, 1), check_integer("head_dim", head_dim, 8, 256)
    if head_dim % 8:
        raise ValueError(f"head_dim: expected a multiple of 8 up to 256, got {head_dim}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64, got {dtype}")
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside it
        if (torch.get_default_device() if device is None else torch.device(device)).type == "cpu":
            outer, slots = shape
            k, v = (torch.empty(outer, heads_kv, slots, head_dim, dtype=dtype, device=device) for _ in range(2))
            return k.transpose(1, 2), v.transpose(1, 2)
        k, v = (torch.empty(*shape, heads_kv, head_dim, dtype=dtype, device=device) for _ in range(2))
    return k, v


def describe(k: torch.Tensor) -> str:
    return f"heads_kv={k.shape[2]}, head_dim={k.shape[3]}, dtype={k.dtype}, device={str(k.device)!r}"


def upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values on the device. From pinned memory, so the host does not wait for the copy."""
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def check_integer(name: str, value, minimum: int = 0, maximum: int | None = None) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        limit = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{name}: expected at least {minimum}{limit}, got {value}")
    return number


def check_queries(q, batch: int) -> None:
    if isinstance(q, torch.Tensor) and (q.ndim != 4 or q.shape[0] != batch):
        raise ValueError(f"q: expected shape ({batch}, seqlen_q, heads_q, head_dim), got {tuple(q.shape)}")


def check_new(k, v, cache: torch.Tensor, batch: int) -> int:
    """seqlen_new of the new k, v (batch, seqlen_new, heads_kv, head_dim)."""
    heads_kv, head_dim = cache.shape[2:]
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads_kv, head_dim) or x.shape[1] != k.shape[1]:
            seqlen_new = "seqlen_new" if x is k else k.shape[1]
            raise ValueError(
                f"{name}: expected shape ({batch}, {seqlen_new}, {heads_kv}, {head_dim}), got {tuple(x.shape)}"
            )
        if x.dtype != cache.dtype:
            raise TypeError(f"{name}: expected {cache.dtype} as the cache, got {x.dtype}")
        if x.device != cache.device:
            raise ValueError(f"{name}: expected device {cache.device} as the cache, got {x.device}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name}: expected no gradient to be asked for; use torch.no_grad(), or attention in training"
            )
    return k.shape[1]
