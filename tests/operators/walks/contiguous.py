"""Runs random operations on a ``KVCache``, and compares it with a list of rows per sequence. Steps and copies of the
cache are kept and used after other operations."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle

import pytest
import support
import torch
from flashrope import KVCache, attention_with_cache
from hypothesis import strategies as st

from .calls import ROUNDINGS, Case
from .schemes import make, schemes

CAPACITY = 40
Row = tuple[torch.Tensor, torch.Tensor]  # k and v of one token, (layers, heads_kv, head_dim)


@dataclasses.dataclass(frozen=True)
class ContiguousWalk(Case):
    """Operations on one contiguous cache: (kind, which sequence, a number, the caller's context)."""

    scheme: str
    batch: int
    heads_kv: int
    group: int
    layers: int
    operations: tuple[tuple[str, int, int, int], ...]
    seed: int

    def check(self, target: support.Target) -> None:
        walk = _Walk(self, target)
        for n, (kind, which, number, context) in enumerate(self.operations):
            with torch.inference_mode(context % 3 == 1):
                walk.operate(kind, which, number)
            walk.look()
            if n % 4 == 3:
                walk.read()
        walk.read()


class _Walk:
    def __init__(self, case: ContiguousWalk, target: support.Target):
        self.target, self.case, self.rotary = target, case, make(case.scheme)
        shape = case.batch, CAPACITY, case.heads_kv, self.rotary.head_dim
        self.cache = KVCache(*shape, target.dtype, target.device, layers=case.layers)
        self.rows: list[list[Row]] = [[] for _ in range(case.batch)]  # padding included
        self.padding = [0] * case.batch
        self.steps: list = []  # (step, seqlen_new, leftpad)
        self.generator = torch.Generator().manual_seed(case.seed)

    def new(self, seqlen: int, heads: int) -> torch.Tensor:
        shape = self.case.layers, self.case.batch, seqlen, heads, self.rotary.head_dim
        return torch.randn(shape, generator=self.generator).to(self.target.device, self.target.dtype)

    def operate(self, kind: str, which: int, number: int) -> None:
        cache, b = self.cache, which % self.case.batch
        if kind == "make":
            self.steps.append((cache.step(number), number, None))
        elif kind == "make padded":
            leftpad = [(which + i) % (number + 1) for i in range(self.case.batch)]
            if all(self.may_pad(i, pad, number) for i, pad in enumerate(leftpad)):
                self.steps.append((cache.step(number, leftpad), number, leftpad))
        elif kind in ("enter", "abort", "discard") and self.steps:
            self.enter(*self.steps[which % len(self.steps)], kind)
        elif kind == "advance":
            self.advance(number)
        elif kind == "truncate":
            length = number % (len(self.rows[b]) + 1)
            cache.truncate(b, length)
            self.shorten(b, length)
        elif kind == "reset":
            cache.reset(b if number % 2 else None)
            for each in [b] if number % 2 else range(self.case.batch):
                self.shorten(each, 0)
        elif kind in ("pickle", "copy"):
            everything = cache, [step for step, *_ in self.steps]
            self.cache, steps = (
                pickle.loads(pickle.dumps(everything)) if kind == "pickle" else copy.deepcopy(everything)
            )
            self.steps = [(step, *rest) for step, (_, *rest) in zip(steps, self.steps, strict=True)]
            cache.k.fill_(99)
            cache.seqlens.fill_(77)

    def may_pad(self, b: int, pad: int, new: int) -> bool:
        length, old = len(self.rows[b]), self.padding[b]
        return pad == old or length == old and old <= pad <= length + new

    def shorten(self, b: int, length: int) -> None:
        self.rows[b] = self.rows[b][:length]
        self.padding[b] = min(self.padding[b], length)

    def fits(self, count: int) -> bool:
        return max(map(len, self.rows)) + count <= CAPACITY

    def enter(self, step, count: int, leftpad: list[int] | None, kind: str) -> None:
        expected = ""
        if leftpad is not None and not all(self.may_pad(b, pad, count) for b, pad in enumerate(leftpad)):
            expected = "^leftpad of entry|no room for"
        if not self.fits(count):
            expected = "no room for"
        k, v = (self.new(count, self.case.heads_kv) for _ in "kv")
        if expected:
            with pytest.raises(ValueError, match=expected), step:
                raise AssertionError("the step was entered")
            return
        if kind == "discard":
            step.__enter__()
            step.append(k[0], v[0], 0)
            self.cache.discard_step()
            with pytest.raises(RuntimeError, match="^step: discarded"):
                step.__exit__(None, None, None)
            return
        with contextlib.suppress(KeyboardInterrupt), step:
            for layer in range(self.case.layers):
                step.append(k[layer], v[layer], layer)
            if kind == "abort":
                raise KeyboardInterrupt
        if kind == "enter":
            self.written(k, v, leftpad)

    def written(self, k, v, leftpad: list[int] | None = None) -> None:
        for b, rows in enumerate(self.rows):
            rows += [(k[:, b, n], v[:, b, n]) for n in range(k.shape[2])]
        self.padding = list(leftpad or self.padding)

    def advance(self, count: int) -> None:
        """Writes as a replayed CUDA graph does, and counts the tokens."""
        if not self.fits(count):
            with pytest.raises(ValueError, match="no room for"):
                self.cache.advance(count)
            return
        k, v = (self.new(count, self.case.heads_kv) for _ in "kv")
        q = self.new(1, self.case.heads_kv * self.case.group)
        options = dict(impl=self.target.impl, cache_leftpad=self.cache.leftpad)
        for layer in range(self.case.layers):
            own = self.cache.layer(layer)
            attention_with_cache(q[layer], *own, self.rotary, self.cache.seqlens, k=k[layer], v=v[layer], **options)
        self.cache.advance(count)
        self.written(k, v)

    def look(self) -> None:
        cache, lengths = self.cache, [len(rows) for rows in self.rows]
        assert cache.lengths == cache.seqlens.tolist() == lengths
        assert cache.padding == cache.leftpad.tolist() == self.padding
        for b, rows in enumerate(self.rows):
            for layer in range(self.case.layers):
                for x, n in zip(cache.layer(layer), (0, 1), strict=True):
                    for place in range(self.padding[b], len(rows)):
                        assert torch.equal(x[b, place], rows[place][n][layer]), f"sequence {b}, slot {place}"

    def read(self) -> None:
        """Attends to all sequences and checks the results."""
        q = self.new(1, self.case.heads_kv * self.case.group)
        for layer in range(self.case.layers):
            options = dict(layer=layer, return_lse=True, impl=self.target.impl)
            out, lse = self.cache.attend(q[layer], self.rotary, **options)
            for b, rows in enumerate(self.rows):
                own, seen = slice(b, b + 1), rows[self.padding[b] :]
                k, v = (
                    torch.stack([row[n][layer] for row in seen])[None] if seen else self.cache.layer(layer)[n][own, :0]
                    for n in (0, 1)
                )
                p = support.Problem(q[layer][own], k, v, self.rotary)
                p = p.replace(grad_out=torch.zeros_like(p.q), grad_lse=torch.zeros_like(lse[own]))
                got = {"out": out[own], "lse": lse[own]}
                support.check_budget(got, p, self.target.dtype, f"sequence {b}: ", ROUNDINGS[self.target.dtype])


@st.composite
def contiguous_walks(draw, longest: int) -> ContiguousWalk:
    kinds = ("make", "make padded", "enter", "enter", "enter", "advance", "advance", "truncate", "reset")
    kinds += ("abort", "discard", "pickle", "copy")
    operation = st.tuples(st.sampled_from(kinds), *(st.integers(0, most) for most in (5, longest // 2, 5)))
    return ContiguousWalk(
        draw(schemes()),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2))),
        tuple(draw(st.lists(operation, min_size=3, max_size=30))),
        draw(st.integers(0, 2**20)),
    )
