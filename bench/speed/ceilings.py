"""Measures the ceilings that results are shown as shares of: a large matrix product, a copy, and a read.

python -m bench ceilings [--device cuda] [--dtype bf16]
"""

from __future__ import annotations

import argparse
from functools import lru_cache

import torch

from .. import machine
from .options import DTYPES, add_device_option, device_of
from .timer import Spread, Timer, rounds


@lru_cache(maxsize=8)
def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measures the ceilings. A process measures them only once.

    Returns:
        product_tflops: TFLOP/s of a large matrix product of random numbers. copy_gbs: GB/s that a copy reads and
            writes. read_gbs: GB/s of a kernel that reads, and writes next to nothing.
    """
    gpu, timer = device.type == "cuda", Timer(device)
    size = 8192 if gpu else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    count = min(2**30, timer.free_bytes() // 32) if gpu else 2**26  # 4 GB if there is room, or 256 MB
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source), "read": reader(source)}
    median = {name: Spread.of(times).median for name, times in rounds(calls, timer, 1.0, min_rounds=5).items()}
    return {
        "product_tflops": 2 * size**3 / median["product"] / 1e9,
        "copy_gbs": 2 * 4 * source.numel() / median["copy"] / 1e6,
        "read_gbs": 4 * source.numel() / median["read"] / 1e6,
    }


def reader(source: torch.Tensor):
    """Returns a call that reads a float32 tensor once and writes next to nothing."""
    if source.device.type == "cpu":
        return source.sum
    from .probe import read

    return lambda: read(source)


def text(measured: dict[str, float]) -> str:
    return (
        f"measured here: product {measured['product_tflops']:.3g} TFLOP/s, copy {measured['copy_gbs']:.3g} GB/s "
        f"(read and written), read {measured['read_gbs']:.3g} GB/s"
    )


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench ceilings", description=__doc__.split("\n")[0], allow_abbrev=False)
    add_device_option(p)
    p.add_argument("--dtype", choices=DTYPES, help="type of the product (default: bf16 on a GPU, fp32 on the CPU)")
    options = p.parse_args(argv)
    device = device_of(p, options.device)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    print(f"{machine.describe(device)['hardware']}, {dtype}")
    print(text(ceilings(device, DTYPES[dtype])))
    return 0
