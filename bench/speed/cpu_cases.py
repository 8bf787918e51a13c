"""Makes the contestants of ``python -m bench cpu``: SDPA, the CPU backend composed of PyTorch's kernels, and the CPU
backend with its compiled kernels.

Each contestant gets its tensors in the layout that suits it best. SDPA reads tensors whose heads come first in memory,
as in a ``KVCache``. ``attention`` reads q, k and v in the layout that a model's projections produce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from flashrope import CacheLayer, CacheTables, Rotary, plan_cache, rotate
from flashrope.backends.cpu import library, loader
from flashrope.calls.int8 import dequantize, quantize

from .contestants import KERNELS, Contestant, dense, own, with_rope
from .decode import own_with_cache, rotate_cache
from .problem import Problem

PAGE_SIZES = (256, 64)  # the first that divides the length is used; 64 is for the check, which has 320 keys
SDPA, COMPOSED, COMPILED = "SDPA", "composed", "compiled"


class Entry(NamedTuple):
    name: str
    base: str  # the entry that its time is compared with
    contestant: Contestant
    arrange: Callable[[torch.Tensor], torch.Tensor]  # turns a tensor with rows first into the layout that it reads
    dtype: torch.dtype | None = None  # dtype of its tensors; None: that of the table


def compiled_kernels(target: str | None = None) -> library.Library | None:
    """Returns the installation's compiled kernels for this processor, or for a target by name. Returns None if it has
    none."""
    if target:
        return loader.open_target(target)
    found = loader.find()
    print(f"compiled kernels: {found.target or f'left out: {found.problem}'}")
    return found.library


def rows_first(x: torch.Tensor) -> torch.Tensor:
    return x


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same shape and values, but with the heads first in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_kernels(kernels: library.Library | None, prepare: Callable, problem: Problem) -> Callable:
    """Returns the call that `prepare` makes. The call runs with the given compiled kernels, or without compiled kernels
    if kernels is None."""
    call = prepare(problem)

    def run(*tensors):
        loader.load = lambda: kernels
        return call(*tensors)

    return run


class Stored(NamedTuple):
    """Says how a cache stores keys and values. The heads come first in memory, and the rows are contiguous or in pages
    in random order."""

    scheme: Callable[[Problem], Rotary]
    paged: bool = False
    quantized: bool = False
    rotated_keys: bool = False
    queries: int = 1  # how many of the problem's last queries attend

    def rows(self, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> list[torch.Tensor]:
        """Returns the contents of the cache with the rows first: k and v, or their quantized values and their
        scales."""
        k = rotate(k, rotary) if self.rotated_keys else k
        if not self.quantized:
            return [k, v]
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        return [k, v, k_scale, v_scale]

    def attend(self, q: torch.Tensor, layer: CacheLayer, tables: CacheTables, rotary: Rotary, impl: str | None = None):
        """Plans one call and runs it."""
        sizes = {"seqlen_q": q.shape[1], "heads_q": q.shape[2], "dtype": q.dtype}
        options = {"rotated_keys": self.rotated_keys, "impl": impl}
        return plan_cache(tables, like=layer, rotary=rotary, **sizes, **options).attend(q, layer)

    def queries_of(self, q: torch.Tensor) -> torch.Tensor:
        return q[:, -min(self.queries, -(-q.shape[1] // 2)) :]


def over_cache(stored: Stored, problem: Problem) -> Callable:
    """Returns a call over a cache. The first, untimed call fills the cache."""
    rotary, filled, table = stored.scheme(problem), {}, None
    place = heads_first
    if stored.paged:
        size = next(size for size in PAGE_SIZES if problem.seqlen % size == 0)
        pages = problem.batch * problem.seqlen // size
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        table = order.argsort().to(torch.int32).view(problem.batch, -1)
        place = lambda x: heads_first(x.reshape(pages, size, *x.shape[2:])[order])  # noqa: E731
    seqlens = torch.full((problem.batch,), problem.seqlen, dtype=torch.int32)

    def attend(q, k, v):
        if k.data_ptr() not in filled:
            filled[k.data_ptr()] = k, CacheLayer(*map(place, stored.rows(k, v, rotary)))
        tables = CacheTables(seqlens, table)
        return stored.attend(stored.queries_of(q), filled[k.data_ptr()][1], tables, rotary)

    return attend


def over_stored_rows(stored: Stored, problem: Problem) -> Callable:
    """Returns the float64 reference over the keys and values that the cache stores."""
    rotary = stored.scheme(problem)
    seqlens = torch.full((problem.batch,), problem.seqlen, dtype=torch.int32)

    def attend(q, k, v):
        rows = stored.rows(k.to(problem.dtype), v.to(problem.dtype), rotary)
        if len(rows) > 2:
            rows = [dequantize(codes, scale, torch.float64) for codes, scale in zip(rows[:2], rows[2:], strict=True)]
        layer, tables = CacheLayer(*(x.double() for x in rows)), CacheTables(seqlens)
        return stored.attend(stored.queries_of(q), layer, tables, rotary, "reference")

    return attend


def self_extend(problem: Problem) -> Rotary:
    return problem.rope().self_extend(max(problem.window // 8, 1) * 8, 8)


def dual_chunk(problem: Problem) -> Rotary:
    """Returns dual chunk attention. Its chunks are about as long as the window, rounded to whole tiles."""
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
    name: str,
    base: str,
    scheme: Callable,
    prepare: Callable,
    kernels=None,
    arrange=rows_first,
    ours=False,
    dtype=None,
    exact=None,
):
    contestant = Contestant(name, scheme, partial(with_kernels, kernels, prepare), ours, exact=exact)
    return Entry(name, base, contestant, arrange, dtype)


def forward_entries(kernels, schemes: tuple[str, ...] = ("ReRoPE",), half: bool = False) -> list[Entry]:
    """Returns SDPA and the schemes. half: whether the table is in a 16-bit type. The compiled kernels are then also
    measured in float32."""
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
    """Returns the schemes that map positions, and RoPE."""
    found = []
    for kind, library_ in of_kernels(kernels).items():
        for scheme in ("RoPE", *MAPS):
            of_problem = SCHEMES[scheme]
            prepare = partial(own_with_cache, of_problem, None) if decoding else partial(own, of_problem)
            arrange = heads_first if decoding else rows_first
            found.append(entry(f"{scheme}, {kind}", f"RoPE, {kind}", of_problem, prepare, library_, arrange, True))
    return found


def peer_entries() -> list[Entry]:
    """Returns the alternatives that users have without flashrope."""
    rope = [
        entry(f"{encoding} + SDPA", SDPA, Problem.rope, partial(with_rope, encoding, KERNELS["SDPA flash"]))
        for encoding in ("eager RoPE", "compiled RoPE")
    ]
    return [*rope, entry("ReRoPE, two dense matrices", SDPA, Problem.rerope, dense)]


def training_entries(kernels) -> list[Entry]:
    """Returns the schemes, and RoPE in PyTorch without this package."""
    without = f"eager RoPE + {SDPA}"
    found = [entry(without, without, Problem.rope, partial(with_rope, "eager RoPE", KERNELS["SDPA flash"]))]
    for scheme in ("RoPE", "HoPE", "ReRoPE"):
        found.append(entry(scheme, without, SCHEMES[scheme], partial(own, SCHEMES[scheme]), kernels, ours=True))
    return found


def decoding_entries(kernels, half: bool = False) -> list[Entry]:
    """Returns contestants that decode one token.

    flashrope decodes over a cache of raw keys. The code of ReRoPE's author rotates the cache at every step. It is
    measured in eager PyTorch and compiled.

    half: whether the table is in a 16-bit type. The compiled kernels are then also measured in float32.
    """
    found = [entry(SDPA, SDPA, Problem.none, KERNELS["SDPA flash"], arrange=heads_first)]
    for kind, library_ in of_kernels(kernels).items():
        for scheme in ("ReRoPE", "HoPE"):
            of_problem = SCHEMES[scheme]
            cached = partial(own_with_cache, of_problem, None)
            found.append(entry(f"{scheme}, {kind}", SDPA, of_problem, cached, library_, heads_first, True))
        pages = partial(over_cache, Stored(Problem.rerope, paged=True))
        found.append(entry(f"ReRoPE, {kind}, paged", f"ReRoPE, {kind}", Problem.rerope, pages, library_, ours=True))
        rows = partial(own_with_cache, Problem.rerope, None)
        found.append(entry(f"ReRoPE, {kind}, rows first", SDPA, Problem.rerope, rows, library_, ours=True))
    if half and kernels:
        name, cached = f"ReRoPE, {COMPILED}, float32", partial(own_with_cache, Problem.rerope, None)
        found.append(entry(name, SDPA, Problem.rerope, cached, kernels, heads_first, True, torch.float32))
    for name, encoding in (("rotate the cache", "eager RoPE"), ("compiled rotation", "compiled RoPE")):
        found.append(entry(f"{name}, then SDPA", SDPA, Problem.rerope, partial(rotate_cache, encoding)))
    return found


def quantized_entries(kernels, queries: int = 1) -> list[Entry]:
    """Returns the compiled kernels over caches of every type, contiguous, paged, and with rotated keys."""
    found = []
    for name, stored in (
        ("ReRoPE", Stored(Problem.rerope)),
        ("ReRoPE, paged", Stored(Problem.rerope, paged=True)),
        ("HoPE", Stored(Problem.hope)),
        ("HoPE, paged", Stored(Problem.hope, paged=True)),
        ("HoPE, rotated", Stored(Problem.hope, rotated_keys=True)),
    ):
        for kind in ("float32", "bfloat16", "int8"):
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            of_kind = stored._replace(quantized=kind == "int8", queries=queries)
            each = entry(
                f"{name}, {kind}",
                f"{name}, bfloat16",
                stored.scheme,
                partial(over_cache, of_kind),
                kernels,
                ours=True,
                dtype=dtype,
                exact=partial(over_stored_rows, of_kind),
            )
            found.append(each)
    return found


def for_check(each: Entry) -> Contestant:
    """Returns the contestant with a call that first brings the tensors into its layout, because ``check`` passes
    tensors with the rows first."""

    def prepare(problem: Problem) -> Callable:
        call = each.contestant.prepare(problem)
        return lambda *tensors: call(*map(each.arrange, tensors))

    return dataclasses.replace(each.contestant, prepare=prepare)
