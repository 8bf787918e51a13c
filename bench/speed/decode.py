"""Measures decoding of one token with a cache of raw keys: time, and bytes of keys and values per second.

    python -m bench decode [--heads 32] [--heads-kv 8] [--head-dim 128] [--seqlens 8192 131072] [--window 512]

A kernel that only reads measures the bandwidth ceiling. By default the batch shrinks as the context grows, so that the
cache always has the same size. On a GPU every contestant is replayed as a CUDA graph.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from flashrope import attention_with_cache

from . import options as bench_options
from .contestants import ENCODINGS, KERNELS, SDPA, Contestant, Unavailable, own_impl
from .options import Table
from .problem import THETA_BASE, Problem
from .session import Session
from .settings import with_groups

CUDA = {
    "heads": 32,
    "heads_kv": 8,
    "head_dim": 128,
    "seqlens": [4096, 16384, 65536, 131072],
    "tokens": 131072,
    "window": 512,
}
CPU = {"heads": 8, "heads_kv": 8, "head_dim": 64, "seqlens": [4096, 8192, 16384, 32768], "tokens": 32768, "window": 512}
PAGE_SIZE, OWN_PAGE_SIZE = 16, 256  # PAGE_SIZE is for FlashInfer, OWN_PAGE_SIZE for flashrope


def _key_positions(problem: Problem) -> torch.Tensor:
    """Returns the position that every key is rotated to under ReRoPE if the query is not rotated. It is minus the
    rectified distance between query and key."""
    slots = torch.arange(problem.seqlen, device=problem.device)
    return -(problem.seqlen - 1 - slots).clamp(max=problem.window)


def rotate_cache(encoding: str, problem: Problem):
    """Returns a call that rotates the whole cache at every step, as the code of ReRoPE's author does."""
    rotate, attend = ENCODINGS[encoding](problem, _key_positions(problem)), KERNELS["SDPA flash"](problem)
    return lambda q, k, v: attend(q, rotate(k), v)


def upstream_flash_attn(problem: Problem):
    """Returns a call of the flash-attn kernel that splits the keys. It does not rotate."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from None
    return lambda q, k, v: flash_attn_with_kvcache(q, k, v, causal=True)


def flashinfer_rope(problem: Problem):
    """Returns a call of FlashInfer over pages of raw keys, in which the kernel rotates all keys. The measured time does
    not include planning."""
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from None
    if problem.seqlen % PAGE_SIZE:
        raise Unavailable(f"seqlen is not a multiple of its page size, {PAGE_SIZE}")
    pages = problem.seqlen // PAGE_SIZE
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=problem.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=problem.group >= 4)
    starts, every = (
        torch.arange(count, dtype=torch.int32, device=problem.device)
        for count in (problem.batch + 1, problem.batch * pages)
    )
    wrapper.plan(
        starts * pages,
        every,
        torch.full_like(starts[1:], PAGE_SIZE),
        problem.heads,
        problem.heads_kv,
        problem.head_dim,
        PAGE_SIZE,
        pos_encoding_mode="ROPE_LLAMA",
        rope_theta=THETA_BASE,
        q_data_type=problem.dtype,
        kv_data_type=problem.dtype,
    )

    def attend(q, k, v):
        cache = tuple(x.view(-1, PAGE_SIZE, problem.heads_kv, problem.head_dim) for x in (k, v))
        return wrapper.run(q[:, 0], cache)[:, None]

    return attend


def own_with_cache(scheme, impl: str | None, problem: Problem, paged: bool = False):
    if impl == "cuda" and problem.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    rotary, impl = scheme(problem), impl or own_impl(problem.device)
    seqlens = torch.full((problem.batch,), problem.seqlen, dtype=torch.int32, device=problem.device)
    if impl == "cuda":
        from flashrope.backends.registry import load_backend

        if reason := load_backend(impl).unsupported_reason(
            torch.empty(1, 1, 1, problem.head_dim, dtype=problem.dtype, device=problem.device), cached=True
        ):
            raise Unavailable(reason)
    if not paged:
        return lambda q, k, v: attention_with_cache(q, k, v, rotary, seqlens, impl=impl)
    if problem.seqlen % OWN_PAGE_SIZE:
        raise Unavailable(f"seqlen is not a multiple of the page size, {OWN_PAGE_SIZE}")
    count = problem.batch * (problem.seqlen // OWN_PAGE_SIZE)
    table = torch.arange(count, dtype=torch.int32, device=problem.device).view(problem.batch, -1)

    def attend(q, k, v):
        pages = tuple(x.view(-1, OWN_PAGE_SIZE, problem.heads_kv, problem.head_dim) for x in (k, v))
        return attention_with_cache(q, *pages, rotary, seqlens, block_table=table, impl=impl)

    return attend


def contestants(device: torch.device) -> list[Contestant]:
    """Returns peers without position encoding, peers that rotate, and flashrope. "CUDA" in a name of flashrope means
    its CUDA C++ extension."""

    def rotated_cache(problem: Problem) -> int:
        return problem.bytes_of_cache() * (2 if device.type == "cuda" else 4)

    chosen = [Contestant(f"SDPA {which}", Problem.none, KERNELS[f"SDPA {which}"]) for which in SDPA]
    chosen += [
        Contestant("flash-attn 2", Problem.none, upstream_flash_attn),
        Contestant("FlashInfer, RoPE", Problem.rope, flashinfer_rope),
    ]
    chosen += [
        Contestant(
            f"{how} rotation of the cache + SDPA flash",
            Problem.rerope,
            partial(rotate_cache, f"{how} RoPE"),
            scratch=rotated_cache,
        )
        for how in ("fused", "compiled", "eager")
        if how != "compiled" or device.type == "cpu"
    ]
    ours = [
        ("NoPE", Problem.none, None, False),
        ("RoPE", Problem.rope, None, False),
        ("RoPE, paged", Problem.rope, None, True),
        ("ReRoPE", Problem.rerope, None, False),
        ("ReRoPE, paged", Problem.rerope, None, True),
        ("ReRoPE, CUDA", Problem.rerope, "cuda", False),
    ]
    chosen += [
        Contestant(f"flashrope {name}", scheme, partial(own_with_cache, scheme, impl, paged=paged), ours=True)
        for name, scheme, impl, paged in ours
    ]
    return [dataclasses.replace(contestant, moved=Problem.bytes_of_cache, ceiling="read_gbs") for contestant in chosen]


def parsed(argv: list[str], needs_device: bool = True):
    p = bench_options.parser("decode", __doc__, CUDA, CPU)
    p.add_argument("--groups", action="store_true", help="also time groups of keys and one group, wherever they fit")
    return bench_options.parse(p, argv, needs_device)


def main(argv: list[str]) -> int:
    options = parsed(argv)
    session = Session("decode", argv, options)
    session.measure(tables(options, session.run.device["cache_bytes"]))
    session.memory()
    return session.finish()


def tables(options, cache_bytes: int) -> list[Table]:
    chosen, every = [], contestants(options.device)
    every += with_groups(every) if options.groups else []
    for p in bench_options.problems(options, decoding=True):
        fits = ", fits the last-level cache" if p.bytes_of_cache() <= cache_bytes else ""
        title = f"one token, {p.seqlen} keys, batch {p.batch}, cache {p.bytes_of_cache() / 2**20:.0f} MiB{fits}"
        chosen.append(Table(title, every, p, recorded=True))
    return chosen
