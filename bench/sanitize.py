"""Runs every kernel once on small shapes with odd lengths, for compute-sanitizer.

    python -m bench sanitize --compile [--arch 90] [--jobs 16]
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m bench sanitize

The first command compiles the kernels into Triton's cache, in parallel and without running them. The second command
loads them from there, because compiling under compute-sanitizer would take many times as long.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from flashrope import Rotary, attention, attention_varlen, attention_with_cache
from flashrope.backends.registry import load_backend
from flashrope.backends.triton import launcher
from flashrope.backends.triton.device import compute_capability
from flashrope.console.options import positive

from .machine_code.architectures import NVIDIA
from .progress import steps

HEADS, HEADS_KV, SEQLEN = 4, 2, 197  # SEQLEN is not a multiple of any tile
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case(NamedTuple):
    name: str
    impl: str
    run: Callable[[Callable], None]  # takes make(*shape), which returns a random tensor


def training(rotary: Rotary, causal: bool, make: Callable) -> None:
    q, k, v = (make(1, SEQLEN, heads, rotary.head_dim).requires_grad_() for heads in (HEADS, HEADS_KV, HEADS_KV))
    attention(q, k, v, rotary, causal=causal, impl="triton").sum().backward()


def packed(rotary: Rotary, make: Callable) -> None:
    q, k, v = (make(SEQLEN, heads, rotary.head_dim).requires_grad_() for heads in (HEADS, HEADS_KV, HEADS_KV))
    cu_seqlens = torch.tensor([0, 33, 33, SEQLEN], dtype=torch.int32, device=q.device)
    attention_varlen(q, k, v, rotary, cu_seqlens, cu_seqlens, SEQLEN, SEQLEN, impl="triton").sum().backward()


def with_cache(rotary: Rotary, impl: str, seqlen_q: int, paged: bool, make: Callable) -> None:
    """Runs a call that writes seqlen_q new tokens to the cache and attends to them."""
    q, k, v = (make(2, seqlen_q, heads, rotary.head_dim) for heads in (HEADS, HEADS_KV, HEADS_KV))
    seqlens = torch.tensor([SEQLEN, 3], dtype=torch.int32, device=q.device)
    table = torch.arange(16, dtype=torch.int32, device=q.device).view(2, 8).flip(1).contiguous() if paged else None
    shape = (16, 64) if paged else (2, 512)
    k_cache, v_cache = (make(*shape, HEADS_KV, rotary.head_dim) for _ in range(2))
    attention_with_cache(q, k_cache, v_cache, rotary, seqlens, k=k, v=v, block_table=table, impl=impl)


def baselines(make: Callable) -> None:
    """Runs the kernels of the benchmarks themselves."""
    from .speed.fused_rope import rotate
    from .speed.probe import read

    q, k = (make(2, SEQLEN, heads, 64).requires_grad_() for heads in (HEADS, HEADS_KV))
    cos, sin = (torch.ones(SEQLEN, 32, device=q.device) for _ in range(2))
    sum(x.sum() for x in rotate(q, k, cos, sin)).backward()
    read(torch.randn(100_003, device=q.device))


def cases() -> list[Case]:
    chosen = []
    for head_dim in (64, 128):
        rope = Rotary.rope(head_dim)
        for bands, rotary in (("one band", rope), ("two bands", rope.rectify(50).log_n(64))):
            name = f"{bands}, head_dim {head_dim}"
            chosen.append(Case(name, "triton", partial(training, rotary, True)))
            chosen.append(Case(f"{name}, packed", "triton", partial(packed, rotary)))
            for impl, seqlens in (("triton", (1, 7, 130)), ("cuda", (1, 7))):
                for seqlen_q in seqlens:
                    for paged in (False, True):
                        cached = f"{name}, {seqlen_q} tokens, {'paged' if paged else 'contiguous'} cache, {impl}"
                        chosen.append(Case(cached, impl, partial(with_cache, rotary, impl, seqlen_q, paged)))
        chosen.append(Case(f"two-sided, head_dim {head_dim}", "triton", partial(training, rope.rectify(50), False)))
    return [*chosen, Case("baselines", "triton", baselines)]


def available(chosen: list[Case], device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Returns the cases that can run here. Prints why the others cannot."""
    reasons = {
        impl: load_backend(impl).unsupported_reason(torch.empty(1, 1, HEADS, 64, device=device, dtype=dtype), True)
        for impl in ("triton", "cuda")
    }
    for impl, reason in reasons.items():
        if reason:
            print(f"not run: {sum(case.impl == impl for case in chosen)} cases with impl={impl!r}: {reason}")
    return [case for case in chosen if not reasons[case.impl]]


def launches(arch: int, dtype: torch.dtype) -> list:
    """Returns the distinct launches of all cases except the baselines. The cases run on meta tensors."""
    from .machine_code.offline import caught_launches

    found = {}
    for case in cases():
        if case.impl == "triton" and case.name != "baselines":
            with caught_launches(launcher, arch) as caught:
                case.run(lambda *shape: torch.empty(*shape, device="meta", dtype=dtype))
            found |= {launch.key: launch for launch in caught}
    return list(found.values())


def compile_kernels(arch: int, dtype: torch.dtype, jobs: int) -> int:
    """Compiles the kernels of all cases into Triton's cache. Returns 1 if one does not compile."""
    from .machine_code.offline import compile_all

    chosen, failed = launches(arch, dtype), 0
    print(f"compiling {len(chosen)} kernels for sm_{arch} in {jobs} processes", flush=True)
    for done, (index, error, _) in enumerate(compile_all(chosen, jobs, inspect=lambda compiled: None), 1):
        name = chosen[index].kernel.__name__
        print(f"compiled {done} of {len(chosen)}: {name}" + (f": {error}" if error else ""), flush=True)
        failed += bool(error)
    return int(failed > 0)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench sanitize", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--device", default="cuda", help="default: cuda")
    p.add_argument("--dtype", default="bf16", choices=DTYPES, help="default: bf16")
    p.add_argument("--compile", action="store_true", help="only compile the kernels into Triton's cache, in parallel")
    p.add_argument("--arch", type=int, choices=NVIDIA, help="architecture for --compile (default: the GPU's)")
    p.add_argument("--jobs", type=positive, default=os.cpu_count(), help="compiling processes (default: all cores)")
    options = p.parse_args(argv)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    if options.compile:
        return compile_kernels(options.arch or compute_capability(device), dtype, options.jobs)

    def make(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for case in steps("sanitize", available(cases(), device, dtype), lambda case: case.name):
        case.run(make)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 0
