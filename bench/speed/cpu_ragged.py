"""Measures how much slower the CPU decodes a batch of unequal lengths than a batch of equal lengths with as many keys.

    python -m bench cpu-ragged [--threads 2] [--rounds 15]

A step decodes one token of every sequence over a cache with pages of 256 rows. The two batches are timed alternately.
The ratio is the median time with unequal lengths divided by the median time with equal lengths.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from flashrope import Rotary, attention_with_cache

from ..machine import describe

PAGE_SIZE, WINDOW = 256, 512
RAGGED = [32768] + [1024] * 15
EQUAL = [sum(RAGGED) // len(RAGGED)] * len(RAGGED)
SIZES = ((8, 8, 64, torch.float32), (8, 2, 128, torch.bfloat16))  # heads_q, heads_kv, head_dim, dtype


def step(lengths: Sequence[int], heads: int, heads_kv: int, head_dim: int, dtype) -> Callable[[Rotary], object]:
    """Returns a function that takes a scheme and decodes one token of every sequence. lengths: keys of each
    sequence."""
    pages = [-(-keys // PAGE_SIZE) for keys in lengths]
    cache = torch.randn(2, sum(pages), PAGE_SIZE, heads_kv, head_dim).to(dtype)
    table, first = torch.zeros(len(lengths), max(pages), dtype=torch.int32), 0
    for row, count in zip(table, pages, strict=True):
        row[:count] = torch.arange(first, first + count)
        first += count
    q = torch.randn(len(lengths), 1, heads, head_dim).to(dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    return lambda rotary: attention_with_cache(q, *cache, rotary, seqlens, block_table=table, impl=None)


def seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Returns the median time of each call in seconds. A round runs all calls once. The first two rounds do not
    count."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 2):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [statistics.median(own[2:]) for own in times]


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench cpu-ragged", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    p.add_argument("--rounds", type=int, default=15)
    options = p.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    name = describe(torch.device("cpu"))["name"]
    print(f"{name}, {options.threads} threads, 1 x 32,768 + 15 x 1,024 keys against 16 x {EQUAL[0]:,}")
    for heads, heads_kv, head_dim, dtype in SIZES:
        steps = [step(lengths, heads, heads_kv, head_dim, dtype) for lengths in (RAGGED, EQUAL)]
        for name, rotary in ("RoPE", Rotary.rope(head_dim)), ("ReRoPE", Rotary.rope(head_dim).rectify(WINDOW)):
            ragged, equal = seconds([lambda step=step, rotary=rotary: step(rotary) for step in steps], options.rounds)
            sizes = f"{name}, {heads} query and {heads_kv} key heads of {head_dim}, {str(dtype).removeprefix('torch.')}"
            print(f"{sizes}: {1e3 * ragged:.1f} ms, {1e3 * equal:.1f} ms, ratio {ragged / equal:.2f}")
    return 0
