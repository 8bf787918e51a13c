"""Measures how much longer a short call of flashrope takes on the CPU than the PyTorch operators that it consists
of."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from flashrope import Rotary, attention, attention_with_cache
from torch.nn.functional import scaled_dot_product_attention

# The backend calls this name as well, because the same operator takes longer when called through torch.ops.
FLASH = torch._scaled_dot_product_flash_attention_for_cpu
WARM_UP_BLOCKS = 5


def host_calls(heads: int, head_dim: int) -> dict[str, Callable]:
    """Returns {name: call}, where every call has one query, at seqlen 1 or over 16 keys in a cache. The calls run
    PyTorch's operators, SDPA or flashrope."""
    q, k, v = (torch.randn(1, 1, heads, head_dim) for _ in range(3))
    leaf = q.clone().requires_grad_()
    hope = Rotary.hope(head_dim, 512)
    one, all16 = (torch.rand(2, seqlen, 1, head_dim).unbind(0) for seqlen in (1, 16))
    cache = tuple(torch.randn(1, 64, heads, head_dim) for _ in range(2))
    seqlens = torch.tensor([15], dtype=torch.int32)

    def rotated(x, cos, sin):
        return (x * cos).addcmul_(x.roll(head_dim // 2, -1), sin).transpose(1, 2)

    def operators():
        return FLASH(rotated(q, *one), rotated(k, *one), v.transpose(1, 2), 0.0, True)[0].transpose(1, 2)

    def cache_operators():
        for x, new in zip(cache, (k, v), strict=True):
            x.narrow(1, 15, 1).copy_(new)
        keys, values = (x.narrow(1, 0, 16) for x in cache)
        return FLASH(rotated(q, *one), rotated(keys, *all16), values.transpose(1, 2), 0.0, False)[0].transpose(1, 2)

    def sdpa():
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    return {
        "the operators of HoPE": operators,
        "SDPA": sdpa,
        "HoPE": lambda: attention(q, k, v, hope),
        "HoPE, recorded for autograd": lambda: attention(leaf, k, v, hope),
        "the operators of the next": cache_operators,
        "HoPE, 16 keys in a cache": lambda: attention_with_cache(q, *cache, hope, seqlens, k=k, v=v),
    }


def host_times(heads: int, head_dim: int, blocks: int = 60, repeats: int = 50) -> tuple[float, float]:
    """Prints the time of each call on one thread.

    Returns:
        By how many microseconds flashrope takes longer than PyTorch's operators, at seqlen 1 and with 16 cached keys.
        Both are medians over the blocks.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking other threads would dominate
    chosen = host_calls(heads, head_dim)
    times = {name: [] for name in chosen}
    for _ in range(blocks + WARM_UP_BLOCKS):
        for name, call in chosen.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - begin) / repeats * 1e6)
    times = {name: of[WARM_UP_BLOCKS:] for name, of in times.items()}
    torch.set_num_threads(threads)
    print(f"\nhost time at seqlen 1, one thread, {blocks} blocks of {repeats} calls")
    for name, of in times.items():
        low, middle, high = quantiles(of, n=4)
        print(f"{name:<28}{middle:>8.1f} us{low:>10.1f} - {high:>8.1f}")
    pairs = (("HoPE", "the operators of HoPE"), ("HoPE, 16 keys in a cache", "the operators of the next"))
    return tuple(median(a - b for a, b in zip(times[call], times[operators], strict=True)) for call, operators in pairs)
