"""Runs random operations on a paged cache, and compares it with what every sequence should hold.

Steps, captured steps and copies of the cache are kept and used after other operations (outliving.py).
"""

from __future__ import annotations

import dataclasses

import support
import torch
from flashrope import OutOfPages
from hypothesis import strategies as st
from paged_oracle import Held

from .calls import ROUNDINGS, Case
from .outliving import KINDS, Outliving, around, ragged
from .schemes import make, schemes


@dataclasses.dataclass(frozen=True)
class Walk(Case):
    """Operations on one paged cache: (kind, which sequence, a number, another number, the caller's context).

    shared: whether values are channels of the keys. empty: the number of sequences that are made first and stay empty.
    The other sequences then have the last rows of the block table.
    """

    scheme: str
    page_size: int
    heads_kv: int
    group: int
    cache_dtype: str | None
    shared: bool
    layers: int
    pages: int
    max_seqlen: int | None
    empty: int
    operations: tuple[tuple[str, int, int, int, int], ...]
    seed: int

    def check(self, target: support.Target) -> None:
        cache_dtype = None if target.dtype == torch.float64 else self.cache_dtype
        heads = self.heads_kv * self.group, self.heads_kv
        options = dict(seed=self.seed, max_seqlen=self.max_seqlen, cache_dtype=cache_dtype)
        options |= dict(queries=2**20, roundings=ROUNDINGS[target.dtype])
        if self.shared and not cache_dtype:
            width = make(self.scheme).head_dim
            options["values"] = slice(width // 2 // 8 * 8 if width > 8 else 0, width)
        held = Held(target, self.pages, self.page_size, heads, [make(self.scheme)] * self.layers, **options)
        outliving = Outliving(held)
        empty = [held.allocate() for _ in range(self.empty)]
        for n, (*operation, context) in enumerate(self.operations):
            free = held.cache.free_pages
            try:
                with around(operation[0], context):
                    self.operate(outliving, [name for name in held.tokens if name not in empty], *operation)
            except (OutOfPages, ValueError) as error:
                assert isinstance(error, OutOfPages) or "no room for" in str(error), error
                assert held.cache.free_pages == free
            held.look()
            if n % 4 == 3:
                held.read()
        held.read()
        held.cache.reset()
        assert held.cache.free_pages == self.pages

    def operate(self, outliving: Outliving, names: list[int], kind: str, which: int, number: int, another: int) -> None:
        held = outliving.held
        if kind in KINDS:
            chosen = {names[n % len(names)] for n in (which, another)} if names else ()
            if chosen or kind == "reset":
                outliving.operate(sorted(chosen), kind, which, number)
            return
        outliving.changed()
        if kind == "allocate" or not names:
            held.allocate(number)
            return
        name, other = (names[n % len(names)] for n in (which, another))
        tokens = len(held.tokens[name].positions)
        if kind in ("fork", "free"):
            getattr(held, kind)(name)
        elif kind == "truncate":
            held.truncate(name, number % (tokens + 1))
        elif kind == "reserve":
            held.cache.reserve([name], number)
        elif kind in ("extend", "twice"):
            held.extend(name, other if kind == "extend" else name)
        elif kind == "remove":
            start, stop = sorted(n % (tokens + 1) for n in (number, another))
            held.remove(name, start, stop, close=which % 2 == 0)
        elif kind == "keep":
            held.keep(name, which, number)
        elif kind in ("ragged", "ragged abort"):
            chosen = sorted({names[n % len(names)] for n in (which, number, another)})
            held.write(chosen, ragged(chosen, which + another, number), fails=kind == "ragged abort")
        else:
            held.write(sorted({name, other}), number, fails=kind == "abort")


@st.composite
def walks(draw, longest: int) -> Walk:
    kinds = ("allocate", "fork", "free", "truncate", "reserve", "abort", "extend", "twice", "remove", "remove", "keep")
    kinds += (
        ("attend",) * 3
        + ("ragged",) * 4
        + ("ragged abort",)
        + ("enter step", "update", "replay", "advance") * 2
        + KINDS
    )
    numbers = st.integers(0, 5), st.integers(0, longest), st.integers(0, longest), st.integers(0, 7)
    operation = st.tuples(st.sampled_from(kinds), *numbers)
    return Walk(
        draw(schemes()),
        draw(st.sampled_from((16, 32))),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((None, None, "int8"))),
        draw(st.booleans()),
        draw(st.sampled_from((1, 2))),
        draw(st.sampled_from((3, 5, 12))),
        draw(st.sampled_from((None, None, 40, 64))),
        draw(st.sampled_from((0, 0, 13, 15))),
        tuple(draw(st.lists(operation, min_size=3, max_size=40))),
        draw(st.integers(0, 2**20)),
    )
