"""Random operations on a cache, against a list of what every sequence's keys and values are there."""

from __future__ import annotations

import dataclasses

import support
import torch
from flashrope import OutOfPages, PagedKVCache
from hypothesis import strategies as st

from .calls import ROUNDINGS, Case
from .schemes import make, schemes

PAGES = 12


@dataclasses.dataclass
class Sequence:
    """What a sequence should hold: raw keys and values (length, heads_kv, head_dim)."""

    k: torch.Tensor
    v: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Walk(Case):
    """Operations on one paged cache: (kind, which sequence, a number)."""

    scheme: str
    page_size: int
    heads_kv: int
    group: int
    cache_dtype: str | None
    operations: tuple[tuple[str, int, int], ...]
    seed: int

    def check(self, target: support.Target) -> None:
        rotary = make(self.scheme)
        shape = PAGES, self.page_size, self.heads_kv, rotary.head_dim
        cache_dtype = None if target.dtype == torch.float64 else self.cache_dtype
        cache = PagedKVCache(*shape, target.dtype, target.device, cache_dtype=cache_dtype)
        for x in (cache.k, cache.v) if cache_dtype is None else (cache.k_scale, cache.v_scale):
            x.fill_(torch.nan)
        held: dict[int, Sequence] = {}
        generator = torch.Generator().manual_seed(self.seed)

        def new(rows: int, heads: int) -> torch.Tensor:
            shape = (1, rows, heads, rotary.head_dim)
            return torch.randn(shape, generator=generator).to(target.device, target.dtype)

        for kind, which, number in self.operations:
            name = sorted(held)[which % len(held)] if held else None
            free = cache.free_pages
            try:
                if kind == "allocate" or name is None:
                    held[cache.allocate(number)] = Sequence(new(0, self.heads_kv)[0], new(0, self.heads_kv)[0])
                elif kind == "fork":
                    held[cache.fork(name)] = dataclasses.replace(held[name])
                elif kind == "free":
                    cache.free(name)
                    del held[name]
                elif kind == "truncate":
                    length = number % (len(held[name].k) + 1)
                    cache.truncate(name, length)
                    held[name] = Sequence(held[name].k[:length], held[name].v[:length])
                elif kind == "reserve":
                    cache.reserve([name], number)
                else:
                    k, v, q = (
                        new(number, self.heads_kv),
                        new(number, self.heads_kv),
                        new(max(number, 1), self.heads_kv * self.group),
                    )
                    if kind == "abort":
                        try:
                            with cache.step([name], number) as step:
                                step.append(k, v)
                                raise KeyboardInterrupt
                        except KeyboardInterrupt:
                            pass
                    else:
                        now, rows = held[name], [support.kept(x[0], cache_dtype) for x in (k, v)]
                        after = Sequence(torch.cat((now.k, rows[0])), torch.cat((now.v, rows[1])))
                        out, lse = cache.attend([name], q, rotary, k, v, return_lse=True, impl=target.impl)
                        held[name] = after
                        self.compare(target, rotary, q, after, out, lse)
            except OutOfPages:
                assert cache.free_pages == free
            assert cache.lengths == {name: len(sequence.k) for name, sequence in held.items()}
        for name, sequence in held.items():
            if len(sequence.k):
                q = new(1, self.heads_kv * self.group)
                out, lse = cache.attend([name], q, rotary, return_lse=True, impl=target.impl)
                self.compare(target, rotary, q, sequence, out, lse)
        cache.reset()
        assert cache.free_pages == PAGES

    def compare(self, target, rotary, q, sequence: Sequence, out, lse) -> None:
        zeros = (
            torch.zeros_like(q),
            torch.zeros(1, q.shape[2], q.shape[1], dtype=support.lse_type(target), device=q.device),
        )
        p = support.Problem(q, sequence.k[None], sequence.v[None], rotary, grad_out=zeros[0], grad_lse=zeros[1])
        support.check_budget({"out": out, "lse": lse}, p, target.dtype, roundings=ROUNDINGS[target.dtype])


@st.composite
def walks(draw, longest: int) -> Walk:
    kinds = ("allocate", "fork", "free", "truncate", "reserve", "attend", "attend", "attend", "attend", "abort")
    operation = st.tuples(st.sampled_from(kinds), st.integers(0, 5), st.integers(0, longest))
    return Walk(
        draw(schemes()),
        draw(st.sampled_from((16, 32))),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((None, None, "int8", "int4"))),
        tuple(draw(st.lists(operation, min_size=3, max_size=25))),
        draw(st.integers(0, 2**20)),
    )
