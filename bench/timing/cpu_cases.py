"""What ``python -m bench cpu`` compares: SDPA, the CPU backend composed of PyTorch's kernels, and its compiled kernels.

Each gets its tensors in the layout that suits it best. SDPA reads tensors whose heads come first in memory, which is
what ``KVCache`` stores; attention reads q, k and v as a model's projections leave them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from flashrope import Rotary, attention_with_cache
from flashrope.backends.cpu import library, loader

from .contestants import KERNELS, Contestant, dense, own, with_rope
from .decode import own_with_cache, rotate_cache
from .problem import Problem

PAGE_SIZES = (256, 64)  # the first that divides the length; the check before the timing has 320 keys
SDPA, COMPOSED, COMPILED = "SDPA", "composed", "compiled"


class Entry(NamedTuple):
    name: str
    base: str  # the entry that its ratio refers to
    contestant: Contestant
    arrange: Callable[[torch.Tensor], torch.Tensor]  # from rows first in memory to the layout that it reads
    dtype: torch.dtype | None = None  # of its tensors, where it is not that of the table


def compiled_kernels(target: str | None = None) -> library.Library | None:
    """The compiled kernels of the installation, if it has them: for this processor, or of a target by name."""
    if target:
        return library.Library(loader.FOLDER / f"{target}.so")
    found = loader.find()
    print(f"compiled kernels: {found.target or f'left out: {found.problem}'}")
    return found.library


def rows_first(x: torch.Tensor) -> torch.Tensor:
    return x


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose heads come first in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_kernels(kernels: library.Library | None, prepare: Callable, problem: Problem) -> Callable:
    """The call of `prepare` with these compiled kernels, or without any."""
    call = prepare(problem)

    def run(*tensors):
        loader.load = lambda: kernels
        return call(*tensors)

    return run


def paged(scheme: Callable, problem: Problem) -> Callable:
    """attention_with_cache over pages in random order, whose heads come first in memory."""
    size = next(size for size in PAGE_SIZES if problem.seqlen % size == 0)
    pages = problem.batch * problem.seqlen // size
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    table = order.argsort().to(torch.int32).view(problem.batch, -1)
    seqlens = torch.full((problem.batch,), problem.seqlen, dtype=torch.int32)
    rotary, pools = scheme(problem), {}

    def pool(x):
        if x.data_ptr() not in pools:  # made in the first, untimed call
            pools[x.data_ptr()] = x, heads_first(x.reshape(pages, size, *x.shape[2:])[order])
        return pools[x.data_ptr()][1]

    return lambda q, k, v: attention_with_cache(q, pool(k), pool(v), rotary, seqlens, block_table=table, impl="cpu")


def self_extend(problem: Problem) -> Rotary:
    return problem.rope().self_extend(max(problem.window // 8, 1) * 8, 8)


def dual_chunk(problem: Problem) -> Rotary:
    """Chunks of about a window, in whole tiles."""
    chunk = max(problem.window // 128, 1) * 128
    return problem.rope().dual_chunk(chunk + 64, 64)


SCHEMES = {
    "RoPE": Problem.rope,
    "HoPE": Problem.hope,
    "ReRoPE": Problem.rerope,
    "Self-Extend": self_extend,
    "dual chunk": dual_chunk,
}
MAPS = ("Self-Extend", "dual chunk")


def of_kernels(kernels) -> dict[str, library.Library | None]:
    return {COMPOSED: None, COMPILED: kernels} if kernels else {COMPOSED: None}


def entry(
    name: str, base: str, scheme: Callable, prepare: Callable, kernels=None, arrange=rows_first, ours=False, dtype=None
):
    contestant = Contestant(name, scheme, partial(with_kernels, kernels, prepare), ours)
    return Entry(name, base, contestant, arrange, dtype)


def forward_entries(kernels, schemes: tuple[str, ...] = ("ReRoPE",), half: bool = False) -> list[Entry]:
    """SDPA and the schemes. half: in a type below float32, and compiled in float32 too."""
    found = [entry(SDPA, SDPA, Problem.none, KERNELS["SDPA flash"], arrange=heads_first)]
    for scheme in schemes:
        prepare = partial(own, SCHEMES[scheme])
        for kind, library_ in of_kernels(kernels).items():
            found.append(entry(f"{scheme}, {kind}", SDPA, SCHEMES[scheme], prepare, library_, ours=True))
        if half and kernels:
            name = f"{scheme}, {COMPILED}, float32"
            found.append(entry(name, SDPA, SCHEMES[scheme], prepare, kernels, ours=True, dtype=torch.float32))
    return found


def map_entries(kernels, decoding: bool) -> list[Entry]:
    """Schemes that map positions, and RoPE."""
    found = []
    for kind, library_ in of_kernels(kernels).items():
        for scheme in ("RoPE", *MAPS):
            of_problem = SCHEMES[scheme]
            prepare = partial(own_with_cache, of_problem, "cpu") if decoding else partial(own, of_problem)
            arrange = heads_first if decoding else rows_first
            found.append(entry(f"{scheme}, {kind}", f"RoPE, {kind}", of_problem, prepare, library_, arrange, True))
    return found


def peer_entries() -> list[Entry]:
    """What users have without flashrope."""
    rope = [
        entry(f"{encoding} + SDPA", SDPA, Problem.rope, partial(with_rope, encoding, KERNELS["SDPA flash"]))
        for encoding in ("eager RoPE", "compiled RoPE")
    ]
    return [*rope, entry("ReRoPE, two dense matrices", SDPA, Problem.rerope, dense)]


def decoding_entries(kernels, half: bool = False) -> list[Entry]:
    """One token over a cache of raw keys, or as in ReRoPE's author's code, which rotates the cache at every step.

    half: as in ``forward_entries``.
    """
    found = [entry(SDPA, SDPA, Problem.none, KERNELS["SDPA flash"], arrange=heads_first)]
    for kind, library_ in of_kernels(kernels).items():
        for scheme in ("ReRoPE", "HoPE"):
            of_problem = SCHEMES[scheme]
            cached = partial(own_with_cache, of_problem, "cpu")
            found.append(entry(f"{scheme}, {kind}", SDPA, of_problem, cached, library_, heads_first, True))
        pages = partial(paged, Problem.rerope)
        found.append(entry(f"ReRoPE, {kind}, paged", f"ReRoPE, {kind}", Problem.rerope, pages, library_, ours=True))
        rows = partial(own_with_cache, Problem.rerope, "cpu")
        found.append(entry(f"ReRoPE, {kind}, rows first", SDPA, Problem.rerope, rows, library_, ours=True))
    if half and kernels:
        name, cached = f"ReRoPE, {COMPILED}, float32", partial(own_with_cache, Problem.rerope, "cpu")
        found.append(entry(name, SDPA, Problem.rerope, cached, kernels, heads_first, True, torch.float32))
    rotates = partial(rotate_cache, "eager RoPE")
    return [*found, entry("rotate the cache, then SDPA", SDPA, Problem.rerope, rotates)]


def for_check(each: Entry) -> Contestant:
    """The contestant with its tensors arranged in the call, as ``check`` gives them rows first."""

    def prepare(problem: Problem) -> Callable:
        call = each.contestant.prepare(problem)
        return lambda *tensors: call(*map(each.arrange, tensors))

    return dataclasses.replace(each.contestant, prepare=prepare)
