"""Compares every kind of kernel with float64 on the CPU, at real sizes. The list of cases is fixed.

python -m bench correct [--device cuda] [--seconds 110] [--scale 1] [--json PATH]

A case runs twice on the same numbers: in bf16 by flashrope's kernels, and in float64 by the reference on the CPU. One
line a case says the largest relative error of the output and of the gradients. The exit code is 1 if a case is wrong or
was not reached.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from flashrope import KVCache, Rotary, attention, attention_varlen, attention_with_cache
from flashrope.console.files import write

from .speed.check import TOLERANCE
from .speed.contestants import own_impl

Results = tuple[torch.Tensor, ...]


class Maker:
    """Makes the tensors of a case. Two makers give the same numbers, rounded to bf16, in their types and on their
    devices."""

    def __init__(self, device: torch.device, dtype: torch.dtype, impl: str):
        self.device, self.dtype, self.impl = device, dtype, impl
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, grad: bool = False) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.generator).bfloat16()
        return numbers.to(self.device, self.dtype).requires_grad_(grad)

    def integers(self, values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)


class Case(NamedTuple):
    name: str
    run: Callable[[Maker], Results]


def training(rotary, seqlen, make, *, heads=2, heads_kv=2, backward=True, at=False, by=None, **options) -> Results:
    """by: the backend that is checked, if it is not the maker's."""
    q, k, v = (make(1, seqlen, count, rotary.head_dim, grad=backward) for count in (heads, heads_kv, heads_kv))
    if at:
        options["positions"] = make.integers(torch.arange(seqlen) * 3 + 5)[None]
    impl = by if by and make.impl != "reference" else make.impl
    out = attention(q, k, v, rotary, impl=impl, **options)
    return (out, *torch.autograd.grad(out, (q, k, v), make(*out.shape))) if backward else (out,)


def packed(rotary, seqlen, make) -> Results:
    lengths = [0, seqlen // 3, seqlen // 3, seqlen // 3 + 7, seqlen]
    q, k, v = (make(seqlen, count, rotary.head_dim, grad=True) for count in (4, 2, 2))
    starts, longest = make.integers(lengths), max(b - a for a, b in zip(lengths, lengths[1:], strict=False))
    out = attention_varlen(q, k, v, rotary, starts, starts, longest, longest, impl=make.impl)
    return (out, *torch.autograd.grad(out, (q, k, v), make(*out.shape)))


def decoding(rotary, lengths, make, *, page=0, tokens=1, captured=False, splits=None) -> Results:
    """Returns one token of each sequence, or several. page: tokens of a page, 0 for a contiguous cache."""
    q, seqlens = make(len(lengths), tokens, 8, rotary.head_dim), make.integers(lengths)
    capacity = -(-max(lengths) // 256) * 256
    k, v = (make(len(lengths), capacity, 2, rotary.head_dim) for _ in range(2))
    options = {"num_splits": splits, "impl": make.impl}
    if page:
        order = torch.arange(len(lengths) * capacity // page).flip(0)
        pages = [x.view(-1, page, *x.shape[2:])[order.to(x.device)] for x in (k, v)]
        options["block_table"] = make.integers(order).view(len(lengths), -1)
        k, v = pages
    call = partial(attention_with_cache, q, k, v, rotary, seqlens, **options)
    return (_captured(call) if captured and make.device.type == "cuda" else call(),)


def _captured(call: Callable) -> torch.Tensor:
    """Returns the result of a replayed CUDA graph, whose buffer was cleared after the capture."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    return out


def quantized(rotary, seqlen, make) -> Results:
    """Returns the output over a cache of int8 values, of a prompt and of one more token. The reference reads float32
    values of its own cache, which has the same int8 values."""
    dtype = torch.float32 if make.dtype == torch.float64 else make.dtype
    cache = KVCache(1, seqlen + 1, 2, rotary.head_dim, dtype, make.device, cache_dtype="int8")
    results = []
    for tokens in (seqlen, 1):
        q, k, v = (make(1, tokens, heads, rotary.head_dim).to(dtype) for heads in (8, 2, 2))
        results.append(cache.attend(q[:, -1:], rotary, k, v, impl=make.impl))
    return tuple(results)


def cases(scale: float = 1.0) -> list[Case]:
    """Returns the fixed list. scale: multiplies all lengths."""

    def n(seqlen: int) -> int:
        return max(80, int(seqlen * scale)) | 1  # odd: no multiple of any tile

    rope, narrow, wide = Rotary.rope(128), Rotary.rope(64), Rotary.rope(512)
    bands, narrow_bands = rope.rectify(n(300)), narrow.rectify(n(300))
    keys = [n(16000), n(700), n(4096)]
    five, ordered = {"deterministic": False}, {"deterministic": True}
    many = [
        ("forward, RoPE, 128 channels", partial(training, rope, n(4096), backward=False)),
        ("forward, ReRoPE, 128 channels", partial(training, bands, n(4096), backward=False)),
        ("backward, five products, RoPE", partial(training, rope, n(2048), **five)),
        ("backward, five products, ReRoPE", partial(training, bands, n(2048), **five)),
        ("backward, stored scores, RoPE", partial(training, rope, n(2048), **ordered)),
        ("backward, stored scores, ReRoPE", partial(training, bands, n(2048), **ordered)),
        ("backward, seven products, 256 channels", partial(training, Rotary.rope(256), n(1024), **ordered)),
        ("backward, 64 channels, HoPE", partial(training, Rotary.hope(64, n(512)), n(2048))),
        ("backward, grouped heads", partial(training, bands, n(2048), heads=8)),
        ("backward, not causal", partial(training, bands, n(1024), causal=False)),
        ("backward, Leaky ReRoPE", partial(training, rope.rectify(n(300), 0.5), n(1024))),
        ("backward, window", partial(training, rope.local(n(300)), n(2048))),
        ("backward, packed sequences", partial(packed, bands, n(2048))),
        ("backward, positions", partial(training, rope, n(1024), at=True)),
        ("PyTorch's kernels, HoPE", partial(training, Rotary.hope(128, n(512)), n(2048), heads=8, by="sdpa")),
        ("PyTorch's kernels, ReRoPE", partial(training, bands, n(2048), heads=8, by="sdpa")),
        ("backward, 512 channels", partial(training, wide, n(1024), heads=1, heads_kv=1)),
        ("decoding, contiguous, splits", partial(decoding, rope, keys[:1])),
        ("decoding, contiguous, shares", partial(decoding, bands, keys)),
        ("decoding, paged, shares", partial(decoding, rope, keys, page=256)),
        ("decoding, paged, four tokens", partial(decoding, bands, keys, page=16, tokens=4)),
        ("decoding, groups of keys, 64 channels", partial(decoding, narrow_bands, keys)),
        ("decoding, groups of keys, splits", partial(decoding, bands, keys, splits=8)),
        ("prefill over a cache, contiguous", partial(decoding, rope, keys, tokens=n(200))),
        ("prefill over a cache, paged", partial(decoding, bands, keys, page=256, tokens=n(200))),
        ("decoding, int8", partial(quantized, bands, n(4096))),
        ("decoding, captured graph", partial(decoding, bands, keys, captured=True)),
        ("decoding, 512 channels", partial(decoding, wide, keys[1:])),
    ]
    return [Case(*each) for each in many]


def error(got: Results, exact: Results) -> float:
    """Returns the largest relative error, or inf if a result is nan."""
    found = [
        float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm())
        for a, b in zip(got, exact, strict=True)
    ]
    return max(value if value == value else float("inf") for value in found)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench correct", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU")
    p.add_argument("--seconds", type=float, default=110.0, help="start no case after this time (default 110)")
    p.add_argument("--scale", type=float, default=1.0, help="multiply all lengths (default 1)")
    p.add_argument("--json", type=Path, metavar="PATH", help="write {case: error} to this file, after every case")
    options = p.parse_args(argv)
    device, end = torch.device(options.device), time.monotonic() + options.seconds
    every, found = cases(options.scale), {}
    bad = []
    for at, case in enumerate(every, 1):
        if time.monotonic() > end:
            print(f"NOT REACHED: {', '.join(each.name for each in every[at - 1 :])}", flush=True)
            bad += [each.name for each in every[at - 1 :]]
            break
        try:
            got = case.run(Maker(device, torch.bfloat16, own_impl(device)))
            exact = case.run(Maker(torch.device("cpu"), torch.float64, "reference"))
            found[case.name] = error(got, exact)
            verdict = "ok" if found[case.name] <= TOLERANCE[torch.bfloat16] else "WRONG"
            print(f"{case.name:<42} error {found[case.name]:.1e}  {verdict}", flush=True)
        except Exception as failure:  # the other cases still run
            found[case.name], verdict = str(failure).split("\n")[0][:200], "FAILED"
            print(f"{case.name:<42} FAILED: {type(failure).__name__}: {found[case.name]}", flush=True)
        if verdict != "ok":
            bad.append(case.name)
        if options.json:
            write(options.json, json.dumps(found, indent=1) + "\n")
    print(f"{len(every) - len(bad)} of {len(every)} cases are correct" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0
