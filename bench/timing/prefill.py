"""Measures prefill and training, with HoPE and with ReRoPE.

    python -m bench hope [--head-dim 128] [--heads 16] [--heads-kv 16] [--seqlens 2048 8192] [--passes forward]
    python -m bench rerope [--head-dim 128] [--window 512] [--seqlens 2048 8192] [--passes forward] [--no-causal]

HoPE and RoPE are compared with attention after a separate rotation: PyTorch's kernels, and flash-attn 2, 3 and 4 where
they are installed. ReRoPE is compared with two calls of PyTorch's kernels whose results are merged, with two
FlexAttention passes, with two dense score matrices, with RoPE by the fastest kernels and with flashrope's HoPE.
"""

from __future__ import annotations

from collections.abc import Callable

from .contestants import prefill_hope, prefill_rerope
from .options import parse, parser, prefill_tables
from .session import Session

CUDA = {
    "heads": 16,
    "heads_kv": 16,
    "head_dim": 128,
    "seqlens": [512, 1024, 2048, 4096, 8192, 16384],
    "tokens": 16384,
    "window": 512,
}
CPU = {"heads": 4, "heads_kv": 4, "head_dim": 64, "seqlens": [512, 1024, 2048, 4096], "tokens": 4096, "window": 256}


def hope(argv: list[str]) -> int:
    what = "Prefill and training with RoPE and HoPE, against attention after a separate rotation."
    return _run("hope", what, CUDA, CPU, prefill_hope, argv)


def rerope(argv: list[str]) -> int:
    what = "Prefill and training with ReRoPE, against two calls, two FlexAttention passes and two dense score matrices."
    cuda, cpu = CUDA | {"seqlens": [2048, 4096, 8192, 16384]}, CPU | {"seqlens": [1024, 2048, 4096]}
    return _run("rerope", what, cuda, cpu, prefill_rerope, argv)


def _run(command: str, what: str, cuda: dict, cpu: dict, contestants: Callable, argv: list[str]) -> int:
    """Times the contestants for every pass and length. contestants: returns the contestants for a device. cuda, cpu:
    the default sizes on a GPU and on the CPU."""
    options = parse(parser(command, what, cuda, cpu), argv)
    session = Session(command, argv, options)
    session.measure(prefill_tables(options, contestants(options.device)))
    session.memory()
    return session.finish()
