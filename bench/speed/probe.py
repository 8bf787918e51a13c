"""Implements a kernel that only reads. Its bandwidth is the ceiling of decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, STEPS, WARPS = 4096, 8, 8  # a thread reads 16 numbers per step, as four vectors of 16 bytes


@triton.jit
def read_blocks(x, sums, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * STEPS * BLOCK
    for step in tl.static_range(STEPS):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < count, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read(x: torch.Tensor) -> torch.Tensor:
    """Writes one sum for every BLOCK * STEPS numbers of a contiguous float32 tensor."""
    programs = triton.cdiv(x.numel(), BLOCK * STEPS)
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)
    read_blocks[(programs,)](x, sums, x.numel(), BLOCK=BLOCK, STEPS=STEPS, num_warps=WARPS)
    return sums
