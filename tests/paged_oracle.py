"""Looks at every sequence of a ``PagedKVCache``: what its tables hand to the kernels, and what lies in its pages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from flashrope import PagedKVCache
from flashrope.backends.quantized import dequantize

UNUSED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a sequence should hold, without its left padding."""

    positions: list[int]
    k: torch.Tensor  # (tokens, heads_kv, head_dim), with several layers (layers, tokens, heads_kv, head_dim)
    v: torch.Tensor
    moved: bool = False  # by extend, remove or keep

    def parts(self, *parts: slice) -> Tokens:
        k, v = (torch.cat([x[..., part, :, :] for part in parts], -3) for x in (self.k, self.v))
        return Tokens([place for part in parts for place in self.positions[part]], k, v, self.moved)

    def followed_by(self, k: torch.Tensor, v: torch.Tensor, positions: Sequence[int], moved: bool = False) -> Tokens:
        """positions: of the new tokens, which move to stand behind the last one, and keep their distances."""
        by = self.positions[-1] + 1 - positions[0] if self.positions and positions else 0
        k, v = torch.cat((self.k, k), -3), torch.cat((self.v, v), -3)
        return Tokens(self.positions + [x + by for x in positions], k, v, self.moved or moved)

    def without(self, start: int, stop: int, close: bool) -> Tokens:
        """What ``remove`` leaves."""
        if start == stop:
            return self
        left, down = self.parts(slice(0, start), slice(stop, None)), (stop - start) * close
        positions = [x - down * (n >= start) for n, x in enumerate(left.positions)]
        return Tokens(positions, left.k, left.v, True)

    def places(self, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``Problem.places`` of the last tokens as queries; None if tokens stand at their slots."""
        if not self.moved:
            return None
        keys = torch.tensor(self.positions, dtype=torch.float64, device=self.k.device)
        return keys[len(keys) - rows :], keys


def look(cache: PagedKVCache, held: Mapping[int, Tokens]) -> None:
    """Checks positions, keys and values of all sequences bit by bit, then the block table and who holds which page."""
    assert set(cache.lengths) == set(held)
    places = visible(cache, list(held))
    several = cache.layers > 1
    for name, tokens in held.items():
        assert [place[0] for place in places[name]] == tokens.positions, f"sequence {name}: other positions"
        pages, rows = ([place[n] for place in places[name]] for n in (1, 2))
        for pool, scale, want in ((cache.k, cache.k_scale, tokens.k), (cache.v, cache.v_scale, tokens.v)):
            got = pool[:, pages, rows] if several else pool[pages, rows]
            if scale is not None:
                got = dequantize(got, scale[:, pages, rows] if several else scale[pages, rows], want.dtype)
            assert torch.equal(got, want), f"sequence {name}: other keys or values"
    check_pages(cache)


def check_pages(cache: PagedKVCache) -> int:
    """Checks every row of the block table, and that every page is free or held as often as it is counted.

    Returns the number of pages that sequences hold. Call ``visible`` first: it brings the table up to date.
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
    """(position, page, row) of every visible token, from the tables that ``attend`` gives to the kernels."""
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
