"""Measures the host time until a call has queued its Triton kernels. Outside CUDA graphs this time limits short
kernels.

    python -m bench host [--blocks 100] [--calls 20] [--arch 80]

Without a GPU the tensors are on the CPU. The kernels are then compiled for --arch but not launched, so everything is
timed except the CUDA driver. On a GPU, attention without position encoding is timed too. A block repeats one call, and
the blocks of the calls alternate. The column "functions" counts the Python and C functions that a call runs in this
thread. This count does not depend on the machine. A decoding step has 32 layers, and its figures are divided by 32.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from flashrope import KVCache, PagedKVCache, Rotary, attention, attention_with_cache
from flashrope.backends import triton as backend
from flashrope.backends.triton import launcher
from flashrope.console.hardware import hardware
from flashrope.console.options import positive

from .. import machine
from ..machine_code import offline
from ..machine_code.architectures import NVIDIA
from ..progress import steps
from .contestants import KERNELS
from .problem import Problem
from .timer import Spread

HEADS, HEADS_KV, HEAD_DIM, SEQLEN = 32, 8, 128, 512
LAYERS, STEPS = 32, ("KVCache.step, one layer", "PagedKVCache.step, one layer")
MIN_CAPACITY = 8192  # slots of the cache: enough for several splits
HOPE, REROPE = Rotary.hope(HEAD_DIM, 8192), Rotary.rope(HEAD_DIM).rectify(512)
COLUMNS = f"{'':<42}{'launches':>9}{'functions':>11}{'median':>12}{'quartiles':>21}"


class Measured(NamedTuple):
    launches: int  # number of Triton launches
    functions: int
    microseconds: Spread


def calls_on(device: torch.device, capacity: int) -> dict[str, Callable]:
    """Returns {name: call} of the calls to time. On a GPU they use impl=None, as most users do: naming a backend takes
    a little longer."""
    impl = None if device.type == "cuda" else "triton"

    def tensor(seqlen, heads, grad=False):
        return torch.zeros(1, seqlen, heads, HEAD_DIM, dtype=torch.bfloat16, device=device, requires_grad=grad)

    q, k, v = tensor(1, HEADS), tensor(1, HEADS_KV), tensor(1, HEADS_KV)
    inputs = [tensor(SEQLEN, heads, grad=True) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    raw, grad_out = [x.detach() for x in inputs], tensor(SEQLEN, HEADS)
    rows = KVCache(1, capacity, HEADS_KV, HEAD_DIM, device=device)
    sizes = HEADS_KV, HEAD_DIM, torch.bfloat16, device
    paged = PagedKVCache(MIN_CAPACITY // 16, 16, *sizes, layers=LAYERS)
    pages = PagedKVCache(-(-capacity // 16), 16, HEADS_KV, HEAD_DIM, device=device)
    sequences, seqlens = [pages.allocate()], torch.full((1,), capacity - 1, dtype=torch.int32, device=device)
    calls = {
        f"attention, HoPE, {SEQLEN} tokens": partial(attention, *raw, HOPE, impl=impl),
        "the same and its backward": lambda: torch.autograd.grad(attention(*inputs, HOPE, impl=impl), inputs, grad_out),
        "attention_with_cache, ReRoPE, one token": partial(
            attention_with_cache, q, rows.k, rows.v, REROPE, seqlens, k=k, v=v, impl=impl
        ),
        "KVCache.attend": partial(rows.attend, q, REROPE, k, v, impl=impl),
        "PagedKVCache.attend": partial(pages.attend, sequences, q, REROPE, k, v, impl=impl),
        STEPS[0]: steps_of(KVCache(1, MIN_CAPACITY, *sizes, layers=LAYERS), q, k, v, impl),
        STEPS[1]: steps_of(paged, q, k, v, impl, [paged.allocate()]),
    }
    if device.type == "cuda":
        problem = Problem(1, SEQLEN, HEADS, HEADS_KV, HEAD_DIM, torch.bfloat16, device)
        with_cache = problem.replace(seqlen=capacity, decoding=True)
        calls |= {
            f"SDPA flash, {SEQLEN} tokens": partial(KERNELS["SDPA flash"](problem), *raw),
            "SDPA flash with a cache, one token": partial(KERNELS["SDPA flash"](with_cache), q, rows.k, rows.v),
        }
    return calls


def steps_of(cache, q, k, v, impl: str | None, *sequences) -> Callable:
    """Returns a function that decodes one token in all layers. It undoes the step at its end, so that the cache never
    fills."""

    def run() -> None:
        with contextlib.suppress(Undo), cache.step(*sequences, 1) as step:
            for layer in range(LAYERS):
                step.attend(q, REROPE, k, v, layer=layer, impl=impl)
            raise Undo

    return run


class Undo(Exception):
    """Undoes a step."""


def functions_of(call: Callable) -> tuple[int, int]:
    """Returns the number of Triton launches, and the total number of function calls, that one call makes."""
    seen = []
    launch, planned = launcher.launch.__code__, launcher.Launch.__call__.__code__

    def notice(frame, event, function):
        if event in ("call", "c_call"):
            again = event == "call" and frame.f_code is launch and frame.f_back.f_code is planned
            seen.append(frame.f_code if event == "call" and not again else None)

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen.count(launch) + seen.count(planned), len(seen) - 1  # - 1: setprofile itself does not count


def measure(device: torch.device, blocks: int, calls: int) -> dict[str, Measured]:
    chosen, counted, times = calls_on(device, max(MIN_CAPACITY, blocks * calls + 2)), {}, {}
    for name in steps("host", list(chosen), say=partial(print, file=sys.stderr, flush=True)):
        chosen[name]()  # the first call compiles
        counted[name], times[name] = functions_of(chosen[name]), []
    layers = {name: LAYERS if name in STEPS else 1 for name in chosen}
    for _ in range(blocks):
        for name, call in chosen.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin, count = time.perf_counter(), max(calls // layers[name], 1)
            for _ in range(count):
                call()
            times[name].append(1e6 * (time.perf_counter() - begin) / count / layers[name])
    return {
        name: Measured(*(round(x / layers[name]) for x in counted[name]), Spread.of(of)) for name, of in times.items()
    }


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench host", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--blocks", type=positive, default=100, help="number of blocks for each call (default 100)")
    p.add_argument(
        "--calls", type=positive, default=20, help="calls per block (default 20; a GPU's queue has room for 20)"
    )
    p.add_argument(
        "--arch", type=int, choices=NVIDIA, default=80, help="architecture to compile for without a GPU (default 80)"
    )
    options = p.parse_args(argv)
    versions, device = machine.versions(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{hardware(device)}, torch {versions['torch']}, triton {versions['triton']}, revision {versions['revision']}"
    )
    if device.type == "cuda":
        found = measure(device, options.blocks, options.calls)
    else:
        print(f"no GPU: compiled for sm_{options.arch}, without the CUDA driver, one thread")
        torch.set_num_threads(1)
        unsupported_reason, backend.unsupported_reason = backend.unsupported_reason, lambda q, cached=False: ""
        try:
            with offline.active(options.arch, offline.AbsentDevice(options.arch, lambda *_: lambda *_: None)):
                found = measure(device, options.blocks, options.calls)
        finally:
            backend.unsupported_reason = unsupported_reason
    print(COLUMNS)
    for name, (launches, functions, spread) in found.items():
        print(
            f"{name:<42}{launches:>9}{functions:>11}{spread.median:>9.1f} us{spread.low:>10.1f} - {spread.high:>8.1f}"
        )
    return 0
