"""Random operations on a cache, against a list of what every sequence's keys and values are there."""

from __future__ import annotations

import contextlib
import dataclasses

import support
import torch
from flashrope import OutOfPages, PagedKVCache
from hypothesis import strategies as st
from paged_oracle import Tokens, look

from .calls import ROUNDINGS, Case
from .schemes import make, schemes


@dataclasses.dataclass(frozen=True)
class Walk(Case):
    """Operations on one paged cache: (kind, which sequence, a number, another number).

    empty: sequences that are made first and stay empty, so that the others have the last rows of the block table.
    """

    scheme: str
    page_size: int
    heads_kv: int
    group: int
    cache_dtype: str | None
    pages: int
    max_seqlen: int | None
    empty: int
    operations: tuple[tuple[str, int, int, int], ...]
    seed: int

    def check(self, target: support.Target) -> None:
        rotary = make(self.scheme)
        shape = self.pages, self.page_size, self.heads_kv, rotary.head_dim
        options = dict(max_seqlen=self.max_seqlen, cache_dtype=self.cache_dtype)
        if target.dtype == torch.float64:
            options["cache_dtype"] = None
        cache = PagedKVCache(*shape, target.dtype, target.device, **options)
        for x in (cache.k, cache.v) if cache.k_scale is None else (cache.k_scale, cache.v_scale):
            x.fill_(torch.nan)
        generator = torch.Generator().manual_seed(self.seed)

        def new(rows: int, heads: int, batch: int = 1) -> torch.Tensor:
            shape = (batch, rows, heads, rotary.head_dim)
            return torch.randn(shape, generator=generator).to(target.device, target.dtype)

        nothing = support.kept(new(0, self.heads_kv)[0], cache.cache_dtype)
        empty = {cache.allocate(): Tokens([], nothing, nothing) for _ in range(self.empty)}
        held: dict[int, Tokens] = {}
        for n, operation in enumerate(self.operations):
            free = cache.free_pages
            try:
                self.operate(cache, held, nothing, new, rotary, target, operation)
            except (OutOfPages, ValueError) as error:
                assert isinstance(error, OutOfPages) or "no room for" in str(error), error
                assert cache.free_pages == free
            look(cache, {**empty, **held})
            if n % 4 == 3:
                self.read(cache, held, new, rotary, target)
        self.read(cache, held, new, rotary, target)
        cache.reset()
        assert cache.free_pages == self.pages

    def operate(self, cache: PagedKVCache, held: dict[int, Tokens], nothing, new, rotary, target, operation) -> None:
        kind, which, number, another = operation
        if kind == "allocate" or not held:
            held[cache.allocate(number)] = Tokens([], nothing, nothing)
            return
        names = sorted(held)
        name, other = (names[n % len(names)] for n in (which, another))
        now = held[name]
        if kind == "fork":
            held[cache.fork(name)] = now
        elif kind == "free":
            cache.free(name)
            del held[name]
        elif kind == "truncate":
            length = number % (len(now.positions) + 1)
            cache.truncate(name, length)
            held[name] = now.parts(slice(0, length))
        elif kind == "reserve":
            cache.reserve([name], number)
        elif kind in ("extend", "twice"):
            added = held[other if kind == "extend" else name]
            cache.extend(name, other if kind == "extend" else name)
            held[name] = now.followed_by(added.k, added.v, added.positions, moved=True)
        elif kind == "remove":
            start, stop = sorted(n % (len(now.positions) + 1) for n in (number, another))
            cache.remove(name, start, stop, close=which % 2 == 0)
            held[name] = now.without(start, stop, which % 2 == 0)
        elif kind == "keep":
            cache.keep(name, which, number)
            gap = max(len(now.positions) - which - number, 0)
            held[name] = now.without(which, which + gap, True) if gap else now
        else:
            self.write(cache, held, sorted({name, other}), number, new, rotary, target, kind == "abort")

    def write(self, cache, held, names: list[int], number: int, new, rotary, target, abort: bool) -> None:
        k, v = (new(number, self.heads_kv, len(names)) for _ in "kv")
        q = new(max(number, 1), self.heads_kv * self.group, len(names))
        if abort:
            with contextlib.suppress(KeyboardInterrupt), cache.step(names, number) as step:
                step.append(k, v)
                raise KeyboardInterrupt
            return
        out, lse = cache.attend(names, q, rotary, k, v, return_lse=True, impl=target.impl)
        for n, name in enumerate(names):
            rows = [support.kept(x[n], cache.cache_dtype) for x in (k, v)]
            held[name] = held[name].followed_by(*rows, list(range(number)))
            if not held[name].moved or len(held[name].positions) >= q.shape[1]:
                self.compare(target, rotary, q[n : n + 1], held[name], out[n : n + 1], lse[n : n + 1])

    def read(self, cache: PagedKVCache, held: dict[int, Tokens], new, rotary, target) -> None:
        """All sequences with tokens, in one call."""
        names = [name for name, sequence in held.items() if sequence.positions]
        if not names:
            return
        q = new(1, self.heads_kv * self.group, len(names))
        out, lse = cache.attend(names, q, rotary, return_lse=True, impl=target.impl)
        for n, name in enumerate(names):
            self.compare(target, rotary, q[n : n + 1], held[name], out[n : n + 1], lse[n : n + 1])

    def compare(self, target, rotary, q, sequence: Tokens, out, lse) -> None:
        zeros = (
            torch.zeros_like(q),
            torch.zeros(1, q.shape[2], q.shape[1], dtype=support.lse_type(target), device=q.device),
        )
        tensors = q, sequence.k[None], sequence.v[None]
        p = support.Problem(*tensors, rotary, grad_out=zeros[0], grad_lse=zeros[1], places=sequence.places(q.shape[1]))
        support.check_budget({"out": out, "lse": lse}, p, target.dtype, roundings=ROUNDINGS[target.dtype])


@st.composite
def walks(draw, longest: int) -> Walk:
    kinds = ("allocate", "fork", "free", "truncate", "reserve", "abort", "extend", "twice", "remove", "remove", "keep")
    kinds += ("attend",) * 5
    numbers = st.integers(0, 5), st.integers(0, longest), st.integers(0, longest)
    operation = st.tuples(st.sampled_from(kinds), *numbers)
    return Walk(
        draw(schemes()),
        draw(st.sampled_from((16, 32))),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((None, None, "int8", "int4"))),
        draw(st.sampled_from((3, 5, 12))),
        draw(st.sampled_from((None, None, 40, 64))),
        draw(st.sampled_from((0, 0, 13, 15))),
        tuple(draw(st.lists(operation, min_size=3, max_size=25))),
        draw(st.integers(0, 2**20)),
    )
