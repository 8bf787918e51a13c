"""Every kernel once on small shapes with odd lengths, for compute-sanitizer: python -m bench.sanitize [--device cuda]

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m bench.sanitize
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from flashrope import Rotary, attention, attention_varlen, attention_with_cache
from flashrope.backends import load_backend
from flashrope.backends import triton as kernels

HEADS, HEADS_KV, SEQLEN = 4, 2, 197  # no multiple of any tile


def training(rotary: Rotary, impl: str, make: Callable, causal: bool = True) -> None:
    q, k, v = (make(1, SEQLEN, heads, rotary.head_dim).requires_grad_() for heads in (HEADS, HEADS_KV, HEADS_KV))
    attention(q, k, v, rotary, causal=causal, impl=impl).sum().backward()


def packed(rotary: Rotary, impl: str, make: Callable) -> None:
    q, k, v = (make(SEQLEN, heads, rotary.head_dim).requires_grad_() for heads in (HEADS, HEADS_KV, HEADS_KV))
    starts = torch.tensor([0, 33, 33, SEQLEN], dtype=torch.int32, device=q.device)
    attention_varlen(q, k, v, rotary, starts, starts, SEQLEN, SEQLEN, impl=impl).sum().backward()


def over_cache(rotary: Rotary, impl: str, make: Callable, seqlen_q: int, paged: bool) -> None:
    """One token, several, or a chunk; what goes in is written behind the keys that are there."""
    q, k, v = (make(2, seqlen_q, heads, rotary.head_dim) for heads in (HEADS, HEADS_KV, HEADS_KV))
    seqlens = torch.tensor([SEQLEN, 3], dtype=torch.int32, device=q.device)
    table = torch.arange(16, dtype=torch.int32, device=q.device).view(2, 8).flip(1).contiguous() if paged else None
    shape = (16, 64) if paged else (2, 512)
    k_cache, v_cache = (make(*shape, HEADS_KV, rotary.head_dim) for _ in range(2))
    attention_with_cache(q, k_cache, v_cache, rotary, seqlens, k, v, table, impl=impl)


def baselines(make: Callable) -> None:
    from .fused_rope import rotate
    from .probe import read

    q, k = (make(2, SEQLEN, heads, 64).requires_grad_() for heads in (HEADS, HEADS_KV))
    cos, sin = (torch.ones(SEQLEN, 32, device=q.device) for _ in range(2))
    sum(x.sum() for x in rotate(q, k, cos, sin)).backward()
    read(torch.randn(100_003, device=q.device))


def main() -> None:
    p = argparse.ArgumentParser("python -m bench.sanitize")
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = p.parse_args()

    def make(*shape):
        return torch.randn(*shape, device=options.device, dtype=getattr(torch, options.dtype))

    def run(name, function, *args):
        function(*args)
        if options.device != "cpu":
            torch.cuda.synchronize()
        print(f"ran {name}", flush=True)

    for head_dim in (64, 128):
        rope = Rotary.rope(head_dim)
        for name, rotary in (("one band", rope), ("two bands", rope.rectify(50).log_n(64))):
            run(f"{name}, head_dim {head_dim}", training, rotary, "triton", make)
            run(f"{name}, head_dim {head_dim}, packed", packed, rotary, "triton", make)
            for impl in ("triton", "cuda"):
                reason = (kernels if impl == "triton" else load_backend("cuda")).unsupported_reason(
                    make(1, 1, HEADS, head_dim), cached=True
                )
                if reason:
                    print(f"not run: over a cache, {impl}: {reason}")
                    continue
                for seqlen_q in (1, 7, 130) if impl == "triton" else (1, 7):
                    for paged in (False, True):
                        run(
                            f"{name}, head_dim {head_dim}, {seqlen_q} tokens over {'pages' if paged else 'a cache'}, {impl}",
                            over_cache,
                            rotary,
                            impl,
                            make,
                            seqlen_q,
                            paged,
                        )
        run(f"two-sided, head_dim {head_dim}", training, rope.rectify(50), "triton", make, False)
    run("baselines", baselines, make)


if __name__ == "__main__":
    main()
