"""Decoding one token with a cache of raw keys: time, and bytes of keys and values per second.

    python -m bench decode [--heads 32] [--heads-kv 8] [--head-dim 128] [--seqlens 8192 131072] [--window 512]

The ceiling of the bandwidth is that of a kernel that only reads. By default the batch shrinks as the context grows, so
that the cache always has the same size. On a GPU every contestant is replayed as a CUDA graph.
"""

from __future__ import annotations

from . import options as bench_options
from .decoding import contestants
from .options import Table
from .session import Session

CUDA = {
    "heads": 32,
    "heads_kv": 8,
    "head_dim": 128,
    "seqlens": [4096, 16384, 65536, 131072],
    "tokens": 131072,
    "window": 512,
}
CPU = {"heads": 8, "heads_kv": 8, "head_dim": 64, "seqlens": [4096, 8192, 16384, 32768], "tokens": 32768, "window": 512}


def main(argv: list[str]) -> int:
    options = bench_options.parse(bench_options.parser("decode", __doc__, CUDA, CPU), argv)
    session = Session("decode", argv, options)
    session.measure(tables(options, session.run.device["cache_bytes"]))
    session.memory()
    return session.finish()


def tables(options, cache_bytes: int) -> list[Table]:
    chosen = []
    for seqlen in options.seqlens:
        p = bench_options.problem(options, seqlen, decoding=True)
        fits = ", fits the last-level cache" if p.bytes_of_cache() <= cache_bytes else ""
        title = f"one token, {seqlen} keys, batch {p.batch}, cache {p.bytes_of_cache() / 2**20:.0f} MiB{fits}"
        chosen.append(Table(title, contestants(options.device), p, recorded=True))
    return chosen
