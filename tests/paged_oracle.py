"""Models what every sequence of a ``PagedKVCache`` should hold, and compares it with the cache's tables and pages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import support
import torch
from flashrope import PagedKVCache
from flashrope.calls.int8 import dequantize

UNUSED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens that a sequence should hold, without its left padding."""

    positions: list[int]
    k: torch.Tensor  # (layers, tokens, heads_kv, head_dim)
    v: torch.Tensor
    moved: bool = False  # whether extend, remove or keep changed the sequence

    def parts(self, *parts: slice) -> Tokens:
        k, v = (torch.cat([x[..., part, :, :] for part in parts], -3) for x in (self.k, self.v))
        return Tokens([place for part in parts for place in self.positions[part]], k, v, self.moved)

    def followed_by(self, k: torch.Tensor, v: torch.Tensor, positions: Sequence[int], moved: bool = False) -> Tokens:
        """Returns these tokens followed by new tokens. positions: the positions of the new tokens. All of them are
        shifted by the same number, so that the first follows the last old token."""
        by = self.positions[-1] + 1 - positions[0] if self.positions and positions else 0
        k, v = torch.cat((self.k, k), -3), torch.cat((self.v, v), -3)
        return Tokens(self.positions + [x + by for x in positions], k, v, self.moved or moved)

    def without(self, start: int, stop: int, close: bool) -> Tokens:
        """Returns the tokens that ``remove`` leaves."""
        if start == stop:
            return self
        left, down = self.parts(slice(0, start), slice(stop, None)), (stop - start) * close
        positions = [x - down * (n >= start) for n, x in enumerate(left.positions)]
        return Tokens(positions, left.k, left.v, True)

    def places(self, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns ``Problem.places`` with the last tokens as queries, or None if the position of every token is its
        slot."""
        if not self.moved:
            return None
        keys = torch.tensor(self.positions, dtype=torch.float64, device=self.k.device)
        return keys[len(keys) - rows :], keys


def look(cache: PagedKVCache, held: Mapping[int, Tokens]) -> None:
    """Checks positions, keys and values of all sequences bit by bit. Then checks the block table and the reference
    counts of all pages."""
    assert set(cache.lengths) == set(held)
    places = visible(cache, list(held))
    several = cache.layers > 1
    for name, tokens in held.items():
        assert [place[0] for place in places[name]] == tokens.positions, f"sequence {name}: other positions"
        pages, rows = ([place[n] for place in places[name]] for n in (1, 2))
        for pool, scale, want in ((cache.k, cache.k_scale, tokens.k), (cache.v, cache.v_scale, tokens.v)):
            got, scale = (x if x is None or several else x[None] for x in (pool, scale))
            got = got[:, pages, rows]
            if scale is not None:
                got = dequantize(got, scale[:, pages, rows], want.dtype)
            assert torch.equal(got, want), f"sequence {name}: other keys or values"
    check_pages(cache)


def check_pages(cache: PagedKVCache) -> int:
    """Checks every row of the block table, and that every page is either free or has the right reference count.

    Returns the number of pages that sequences hold. Call ``visible`` first, because it brings the table up to date.
    """
    pool, sequences = cache._pool, cache._sequences.values()
    held = Counter(page for sequence in sequences for page in sequence.pages)
    assert pool.references == [held[page] for page in range(cache.pages)]
    assert sorted(pool.free) == [page for page in range(cache.pages) if not held[page]], "a page is lost"
    if not pool.changed:
        rows = {sequence.row: sequence.pages for sequence in sequences}
        assert len(rows) == len(sequences)
        for row, entries in enumerate(pool.table.tolist()):
            pages = rows.get(row, [])
            assert entries == pages + [UNUSED] * (cache.max_pages - len(pages)), f"row {row} of the block table"
    return len(held)


def visible(cache: PagedKVCache, names: list[int]) -> dict[int, list[tuple[int, int, int]]]:
    """Returns (position, page, row) of every visible token, from the tables that ``attend`` gives to the kernels."""
    chosen = [cache._sequences[name] for name in names]
    tables = cache._pool.tables(chosen, [sequence.leftpad for sequence in chosen])
    pads = [0] * len(names) if tables.leftpad is None else tables.leftpad.tolist()
    starts = None
    if tables.positions is not None:
        starts = [x.tolist() for x in tables.positions[:3]]  # page_positions, page_first, page_lengths
    found: dict[int, list[tuple[int, int, int]]] = {}
    for b, (name, length, pages) in enumerate(
        zip(names, tables.seqlens.tolist(), tables.block_table.tolist(), strict=True)
    ):
        found[name] = []
        for slot in range(pads[b], length):
            n, row = divmod(slot, cache.page_size)
            position, first, count = (slot - pads[b] - row, 0, cache.page_size)
            if starts is not None:
                position, first, count = (x[b][n] for x in starts)
            if first <= row < first + count:
                found[name].append((position + row, pages[n], row))
    return found


Counts = int | list[int]  # new tokens of every sequence, or of each sequence, whose tensors are then packed


def by_sequence(x: torch.Tensor, counts: Counts, dim: int, packed_dim: int) -> Sequence[torch.Tensor]:
    """Returns the rows of each sequence. dim: the dimension of sequences. packed_dim: that of packed rows."""
    return x.unbind(dim) if isinstance(counts, int) else x.split(counts, packed_dim)


class Held:
    """A ``PagedKVCache`` with a scheme for every layer, and the tokens that each of its sequences should hold.

    The cache is filled with NaN at first. queries: how many of a sequence's new tokens attend, at most. Packed tokens
    all attend. roundings: see ``support.check_budget``.
    """

    def __init__(self, target, pages, page_size, heads, schemes, seed=0, queries=2, roundings=1, **options):
        self.target, self.heads, self.schemes, self.queries, self.roundings = target, heads, schemes, queries, roundings
        shape = pages, page_size, heads[1], schemes[0].head_dim
        self.cache = PagedKVCache(*shape, target.dtype, target.device, layers=len(schemes), **options)
        for x in (
            (self.cache.k, self.cache.v) if self.cache.k_scale is None else (self.cache.k_scale, self.cache.v_scale)
        ):
            x.fill_(torch.nan)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens: dict[int, Tokens] = {}
        self.padding: dict[int, int] = {}
        self.worst = 0.0  # the largest ratio of an error to the allowed error

    def new(self, batch: int, seqlen: int, heads: int) -> torch.Tensor:
        """Returns random rows (layers, batch, seqlen, heads, head_dim)."""
        shape = len(self.schemes), batch, seqlen, heads, self.schemes[0].head_dim
        return torch.randn(shape, generator=self.generator, device="cpu").to(self.target.device, self.target.dtype)

    def new_rows(self, names: list[int], counts: Counts, heads: int) -> torch.Tensor:
        """Returns random rows (layers, sequences, count, heads, head_dim), or packed (layers, total, heads, ...)."""
        if isinstance(counts, int):
            return self.new(len(names), counts, heads)
        return self.new(1, sum(counts), heads)[:, 0]

    def new_keys(self, names: list[int], counts: Counts) -> tuple[torch.Tensor, torch.Tensor, list]:
        """Returns random keys, their values, and for each layer the values to pass to the cache."""
        k = self.new_rows(names, counts, self.heads[1])
        if self.cache.values is not None:
            return k, k[..., self.cache.values], [None] * len(k)
        v = self.new_rows(names, counts, self.heads[1])
        return k, v, list(v)

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        return support.kept(x, self.cache.cache_dtype)

    # ---- tokens

    def write(self, names: list[int], counts: Counts, leftpad: list[int] | None = None, fails: bool = False) -> None:
        """Appends tokens in one step, attends with the last of them in every layer, and checks the results.

        fails: the step ends in an error after one of the layers has written.
        """
        k, v, given = self.new_keys(names, counts)
        queries = max(min(counts, self.queries), 1) if isinstance(counts, int) else counts
        q = self.new_rows(names, queries, self.heads[0])
        options = dict(return_lse=True, impl=self.target.of_any_positions, validate=leftpad is None)
        last = int(torch.randint(len(self.schemes), (), generator=self.generator, device="cpu"))
        if len(self.schemes) == 1 and not fails:
            options["seqlen_new"] = None if isinstance(counts, int) else counts
            results = [self.cache.attend(names, q[0], self.schemes[0], k[0], given[0], leftpad=leftpad, **options)]
        else:
            results = []
            with contextlib.suppress(KeyboardInterrupt), self.cache.step(names, counts, leftpad) as step:
                for n, x in enumerate(self.schemes):
                    results.append(step.attend(q[n], x, k[n], given[n], layer=n, **options))
                    if fails and n == last:
                        raise KeyboardInterrupt
        if not fails:
            self.written(names, k, v, leftpad, counts)
            self.compare(names, q, results, counts)

    def written(self, names: list[int], k, v, leftpad: list[int] | None = None, counts: Counts = 0) -> None:
        """Adds new tokens to the model. The first leftpad tokens of a sequence are padding. counts: a list if k and v
        are packed (layers, total, heads_kv, head_dim)."""
        each = (by_sequence(x, counts, 1, 1) for x in (k, v))
        for b, (name, own_k, own_v) in enumerate(zip(names, *each, strict=True)):
            pad = leftpad[b] if leftpad and not self.tokens[name].positions else 0
            pad = min(max(pad - self.padding[name], 0), own_k.shape[1])
            rows = [self.kept(x[:, pad:]) for x in (own_k, own_v)]
            self.tokens[name] = self.tokens[name].followed_by(*rows, range(own_k.shape[1] - pad))
            self.padding[name] += pad

    def compare(self, names: list[int], q: torch.Tensor, results, counts: Counts = 0) -> None:
        """Checks (out, lse) of every layer against the error budget. counts: a list if q is packed."""
        outs = [by_sequence(out, counts, 0, 0) for out, _ in results]
        lses = [by_sequence(lse, counts, 0, 1) for _, lse in results]
        for b, (name, queries) in enumerate(zip(names, by_sequence(q, counts, 1, 1), strict=True)):
            tokens, rows = self.tokens[name], queries.shape[1]
            if not rows or tokens.moved and len(tokens.positions) < rows:
                continue  # queries before the first key have no position
            for n in range(len(results)):
                k, v = tokens.k[n, None], tokens.v[n, None]
                p = support.Problem(queries[n, None], k, v, self.schemes[n], places=tokens.places(rows))
                got = {"out": outs[n][b][None], "lse": lses[n][b][None]}
                p = p.replace(grad_out=torch.zeros_like(got["out"]), grad_lse=torch.zeros_like(got["lse"]))
                ratios = support.check_budget(got, p, self.target.dtype, f"sequence {name}: ", self.roundings)
                self.worst = max(self.worst, *ratios.values())

    def read(self) -> None:
        """Attends to all sequences that have tokens, with one call per layer, and checks the results."""
        if names := [name for name, tokens in self.tokens.items() if tokens.positions]:
            q, options = (
                self.new(len(names), 1, self.heads[0]),
                dict(return_lse=True, impl=self.target.of_any_positions),
            )
            options["validate"] = True
            layers = enumerate(self.schemes)
            self.compare(names, q, [self.cache.attend(names, q[n], x, layer=n, **options) for n, x in layers])

    def look(self) -> None:
        """Checks the lengths and the padding, and the tokens, tables and pages of every sequence."""
        assert self.cache.lengths == {n: len(x.positions) + self.padding[n] for n, x in self.tokens.items()}
        assert self.cache.padding == self.padding
        look(self.cache, self.tokens)

    # ---- the calls of the cache, and what they should do

    def allocate(self, length: int = 0) -> int:
        name = self.cache.allocate(length)
        nothing = [self.kept(x[:, 0]) for x in self.new_keys([name], 0)[:2]]
        self.tokens[name], self.padding[name] = Tokens([], *nothing), 0
        return name

    def sequence(self, count: int) -> int:
        """Creates a sequence of `count` tokens."""
        name = self.allocate()
        self.write([name], count)
        return name

    def fork(self, name: int) -> int:
        child = self.cache.fork(name)
        self.tokens[child], self.padding[child] = self.tokens[name], self.padding[name]
        return child

    def free(self, name: int) -> None:
        self.cache.free(name)
        del self.tokens[name], self.padding[name]

    def truncate(self, name: int, length: int) -> None:
        self.cache.truncate(name, length)
        pad = self.padding[name] = min(self.padding[name], length)
        self.tokens[name] = self.tokens[name].parts(slice(0, length - pad))

    def extend(self, name: int, other: int) -> None:
        added = self.tokens[other]
        self.cache.extend(name, other)
        self.tokens[name] = self.tokens[name].followed_by(added.k, added.v, added.positions, moved=True)
        self.padding[name] = 0

    def remove(self, name: int, start: int, stop: int, close: bool = True) -> None:
        self.cache.remove(name, start, stop, close)
        self._without(name, start, stop, close)

    def keep(self, name: int, first: int, last: int) -> None:
        self.cache.keep(name, first, last)
        self._without(name, first, max(len(self.tokens[name].positions) - last, first), True)

    def _without(self, name: int, start: int, stop: int, close: bool) -> None:
        self.tokens[name] = self.tokens[name].without(start, stop, close)
        self.padding[name] *= start == stop

    def refused(self, message: str, call) -> None:
        """Checks that the call raises ValueError, and that every sequence and every page is as before."""
        before = self.pages()
        with pytest.raises(ValueError, match=message):
            call()
        assert self.pages() == before
        self.look()

    def pages(self) -> dict[int, list[int]]:
        return {name: list(sequence.pages) for name, sequence in self.cache._sequences.items()}
