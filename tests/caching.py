"""Builds calls over caches and compares their results with float64.

``Cached`` writes sequences into a contiguous cache, or into pages in shuffled order. All memory that the call must not
read is NaN: free slots, padding, hidden rows, and the slots of keys that come with the call. ``call`` runs the public
call, ``expected`` gives one problem of ``support`` for each sequence, and ``check`` compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import support
import torch
from flashrope import (
    CacheLayer,
    CachePositions,
    CacheTables,
    Packed,
    Rotary,
    attention_varlen_with_cache,
    attention_with_cache,
    plan_cache,
)
from flashrope.backends.registry import load_backend

PAGE = 16
UNUSED = 2147480000  # a block-table entry beyond the end of a sequence. Any value is allowed there.
# Every backend that takes explicit positions.
POSITIONED = [*support.TARGETS, support.Target("reference", torch.float64, "cpu")]
POSITIONED = [t for t in POSITIONED if "positions" in load_backend(t.impl).CACHE_OPTIONS]
POSITIONS = ("page_positions", "page_first", "page_lengths", "slot_positions", "positions")
page_sizes = pytest.mark.parametrize("page_size", [0, PAGE], ids=["contiguous", "paged"])


class Page(NamedTuple):
    """A block-table entry: rows [first, first + length) of the page are visible, and row r is at position + r."""

    position: int
    length: int = PAGE
    first: int = 0


@dataclasses.dataclass
class Cached:
    """A call over a cache.

    lengths: the tokens of each sequence after its padding, including the new ones. queries: the number of query rows of
    every sequence, or a list with one number per sequence. With a list, the queries are packed. new: the number of keys
    of every sequence that come with the call. None: every query brings one key. mapped: packed keys come with a
    slot_mapping.
    page: the page size in rows, or 0 for a contiguous cache. capacity: the slots of a sequence. table: the block table;
    the default is a shuffled one. tables: explicit positions, {name of the call's argument: tensor}. stored: maps the
    keys (1, tokens, heads_kv, head_dim) to what the cache stores. None: it stores the keys. layout:
    contiguous, poisoned (a window of a larger buffer of NaN), heads first, shared (K and V in one buffer), or for
    quantized caches vllm or odd bytes. sequences: problems that hold the tokens. None: random ones, drawn from the
    seed. sinks: one per query head. head_dim_v: the width of the values. None: the width of the keys. values: the
    channels of the keys that are the values. Values then have no memory of their own. key_weight: multiplies the keys
    of the call.
    """

    target: support.Target
    rotary: Rotary
    lengths: Sequence[int]
    queries: int | Sequence[int] = 1
    new: int | None = None
    mapped: bool = False
    heads: tuple[int, int] = (4, 2)
    page: int = 0
    capacity: int | None = None
    leftpad: Sequence[int] | None = None
    causal: bool = True
    cache_dtype: str | None = None
    table: torch.Tensor | None = None
    tables: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None
    layout: str = "contiguous"
    sequences: list[support.Problem] | None = None
    seed: int = 0
    sinks: torch.Tensor | None = None
    head_dim_v: int | None = None
    values: slice | None = None
    key_weight: torch.Tensor | None = None

    @classmethod
    def packed(cls, target, rotary, sizes, **options) -> Cached:
        """Returns a call with packed queries. sizes: (number of query rows, length including them) of every
        sequence."""
        queries, lengths = zip(*sizes, strict=True)
        return cls(target, rotary, lengths, queries, **options)

    @classmethod
    def of_pages(cls, target, rotary, sequences: Sequence[Sequence[Page]], page=PAGE, **options) -> Cached:
        """Builds a call that reads sequences of ``Page``. By default a sequence ends with its last visible row."""
        lengths = [(len(pages) - 1) * page + pages[-1].first + pages[-1].length for pages in sequences]
        options = {"lengths": lengths, "layout": "poisoned", "new": 0, **options}
        most = max(map(len, sequences))

        def padded(name: str, fill: int) -> torch.Tensor:
            return support.int32([[getattr(x, name) for x in row] + [fill] * (most - len(row)) for row in sequences])

        tables = {"page_positions": padded("position", -7), "page_first": padded("first", 99)}
        tables["page_lengths"] = padded("length", 10**9)
        return cls(target, rotary, page=page, capacity=most * page, tables=tables, **options)

    def __post_init__(self):
        batch, device = len(self.lengths), self.target.device
        self.key_weight = None if self.key_weight is None else self.key_weight.to(device)
        self.tables = {name: x if x is None else x.to(device) for name, x in self.tables.items()}
        self.is_packed = not isinstance(self.queries, int)
        self.sizes = list(self.queries) if self.is_packed else [self.queries] * batch
        self.news = self.sizes if self.new is None else [self.new] * batch
        self.pads = list(self.leftpad or [0] * batch)
        ends = [pad + n for pad, n in zip(self.pads, self.lengths, strict=True)]
        unit = self.page or PAGE
        self.slots = self.capacity or -(-max(*ends, 1) // unit) * unit
        if self.table is not None:
            self.slots = self.table.shape[1] * self.page
        self.ends = [min(max(end, 0), self.slots) for end in ends]
        self.block_table = self._block_table() if self.page else None
        self._fill()
        before = [end - n * (not self.mapped) for end, n in zip(ends, self.news, strict=True)]
        self.cache_seqlens = support.int32(before, device)
        self.cache_leftpad = support.int32(self.leftpad, device) if self.leftpad else None
        self.cu_seqlens_q = support.int32([0, *torch.tensor(self.sizes).cumsum(0).tolist()], device)
        rows = [p.q[0] for p in self.problems]
        self.q = torch.cat(rows) if self.is_packed else torch.stack(rows)

    def _block_table(self) -> torch.Tensor:
        """Assigns pages in shuffled order and leaves two unused. The first and the last page are always in use, because
        invalid page numbers are clamped to these."""
        if self.table is not None:
            self.pages = self.table.numel()
            return self.table.int().to(self.target.device)
        used = [-(-end // self.page) for end in self.ends]
        self.pages = max(sum(used) + 2, len(used) * self.slots // self.page)
        inner = 1 + torch.randperm(self.pages - 2, generator=torch.Generator().manual_seed(3))
        free = iter([0, self.pages - 1, *inner.tolist()])
        entries = self.slots // self.page
        rows = [[next(free) for _ in range(n)] + [UNUSED] * (entries - n) for n in used]
        return support.int32(rows, self.target.device)

    def _fill(self) -> None:
        sequences, heads, device = self.sequences, self.heads, self.target.device
        if sequences is None:
            options = dict(heads=heads[0], group=heads[0] // heads[1], causal=self.causal)
            options["head_dim_v"] = self.head_dim_v
            sequences = [
                support.problem(
                    self.target, self.rotary, rows, max(end - pad, 0), seed=10 * b + 1000 * self.seed, **options
                )
                for b, (rows, end, pad) in enumerate(zip(self.sizes, self.ends, self.pads, strict=True))
            ]
        if self.values is not None:
            sequences = [p.replace(v=p.k[..., self.values]) for p in sequences]
        shape = (self.pages, self.page) if self.page else (len(sequences), self.slots)
        whole = [x.new_full((*shape, *x.shape[2:]), torch.nan) for x in (sequences[0].k, sequences[0].v)]
        kept = [x.clone() for x in whole]
        for b, p in enumerate(sequences):
            place = self.places(b)
            whole[0][place], whole[1][place] = p.k[0], p.v[0]
        self.problems, self.visible = [], []
        hidden = torch.ones(shape, dtype=torch.bool, device=device)
        for b, p in enumerate(sequences):
            place, position = self._visible(b)
            k, v = whole[0][place][None], whole[1][place][None]
            self.problems.append(p.replace(k=k, v=v, places=self._positions(b, position)))
            self.visible.append(place)
            kept[0][place], kept[1][place] = k[0] if self.stored is None else self.stored(k)[0].to(k), v[0]
            hidden[place] = False
        new = [[x[len(x) - n :] for x in place] for place, n in zip(self.visible, self.news, strict=True)]
        self.new_places = [torch.cat(x) for x in zip(*new, strict=True)]
        self.k_new, self.v_new = (x[tuple(self.new_places)] for x in whole)
        self.slot_mapping = self.new_places[0] * shape[1] + self.new_places[1] if self.mapped else None
        hidden[tuple(self.new_places)] = True
        self.scales: dict[str, torch.Tensor] = {}
        k, v = (x.masked_fill(hidden[..., None, None], torch.nan) for x in kept)
        self.k_cache, self.v_cache = self._quantized(k, v) if self.cache_dtype else laid_out(self.layout, k, v)
        if self.values is not None:
            self.v_cache = self.k_cache[..., self.values]
        self.before = self.k_cache.clone(), self.v_cache.clone()

    def places(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (page, row) of every slot of a sequence from the end of its padding to its last token. In a
        contiguous cache it is (b, slot)."""
        slot = torch.arange(min(max(self.pads[b], 0), self.ends[b]), self.ends[b], device=self.target.device)
        if not self.page:
            return torch.full_like(slot, b), slot
        return self.block_table[b, slot // self.page].long().clamp(0, self.pages - 1), slot % self.page

    def _visible(self, b: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns (page, row) and position of the tokens that queries may see."""
        page, row = self.places(b)
        position = torch.arange(len(row), dtype=torch.float64, device=row.device)
        seen, given = torch.ones_like(row, dtype=torch.bool), {n: x for n, x in self.tables.items() if x is not None}
        base: torch.Tensor | float = 0.0
        if self.page:
            entry = (position.long() + min(max(self.pads[b], 0), self.ends[b])) // self.page
            own = {name: given[name][b, entry].long() for name in given if name.startswith("page_")}
            first = own.get("page_first", torch.zeros_like(row))
            seen = (row >= first) & (row - first < own.get("page_lengths", first + self.page))
            if "page_positions" in own:
                base = own["page_positions"].double()
                position = base + row
        if "slot_positions" in given:
            position = given["slot_positions"][page, row].double()
            position = position + (base[:, None] if position.ndim > 1 and isinstance(base, torch.Tensor) else base)
        return (page[seen], row[seen]), position[seen]

    def _positions(self, b: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns ``Problem.places``. Queries before the first key get the position of that key. They attend to
        nothing."""
        if all(x is None for x in self.tables.values()):
            return None
        if (given := self.tables.get("positions")) is not None:
            return (given[self.rows(b)] if self.is_packed else given[b]).double(), keys
        last = torch.arange(len(keys) - self.sizes[b], len(keys), device=keys.device).clamp(min=0)
        return keys[last] if len(keys) else keys.new_zeros(len(last), *keys.shape[1:]), keys

    def _quantized(self, *caches: torch.Tensor) -> list[torch.Tensor]:
        """Returns the quantized caches. Rows that must not be read get random values and a scale of NaN."""
        codes, scales = [], []
        for x in caches:
            numbers, scale = quantized(x)
            packed = numbers.to(torch.int8)
            garbage = torch.randint(-128, 128, packed.shape, generator=torch.Generator().manual_seed(5)).to(packed)
            codes.append(torch.where(x.isnan().all(-1, keepdim=True), garbage, packed))
            scales.append(scale.float())
        if self.layout == "vllm":
            *codes, scales[0], scales[1] = vllm_layout(codes, scales)
        self.scales = {"k_scale": scales[0], "v_scale": scales[1]}
        return [odd_bytes(x) for x in codes] if self.layout == "odd bytes" else codes

    # ---- what tests use

    def replace(self, **changes) -> Cached:
        return dataclasses.replace(self, **changes)

    def at(self, **tables: torch.Tensor | None) -> Cached:
        """Returns the same call with these explicit positions: page_positions, page_first, page_lengths,
        slot_positions, and positions of the queries."""
        return dataclasses.replace(self, tables=tables)

    def by_slot(self, values: torch.Tensor) -> torch.Tensor:
        """Returns slot_positions for this cache. values: (batch, slots, ...), the positions of every sequence's slots
        in order."""
        if not self.page:
            return values
        pages = values.new_zeros(self.pages, self.page, *values.shape[2:])
        for b, table in enumerate(self.block_table.cpu().long()):
            used = table != UNUSED
            pages[table[used]] = values[b].unflatten(0, (-1, self.page))[used]
        return pages

    def rows(self, b: int) -> slice:
        """Returns the rows of a sequence in packed queries."""
        return slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))

    def new_keys(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns k and v in the shape that the call takes."""
        if not sum(self.news):
            return None, None
        keys = self.k_new, self.v_new
        if not self.is_packed:
            keys = tuple(x.unflatten(0, (len(self.lengths), -1)) for x in keys)
        return (keys[0], None) if self.values is not None else keys

    def parts(self) -> tuple[CacheTables, CacheLayer]:
        """Returns the arguments of ``plan_cache``."""
        new = self.news[0]
        if self.is_packed:
            new = Packed(self.cu_seqlens_q, max(self.sizes), self.slot_mapping, not self.mapped and sum(self.news) > 0)
        tables = dict(self.tables)
        positions = CachePositions(queries=tables.pop("positions", None), **tables) if self.tables else None
        tables = CacheTables(self.cache_seqlens, self.block_table, self.cache_leftpad, new, positions)
        return tables, CacheLayer(self.k_cache, self.v_cache, **self.scales, key_weight=self.key_weight)

    def arguments(self) -> tuple[Callable, dict]:
        """Returns ``cached_call`` and its arguments."""
        k, v = self.new_keys()
        given = {
            "q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "rotary": self.rotary, "k": k, "v": v,
            "cache_seqlens": self.cache_seqlens, "block_table": self.block_table, "cache_leftpad": self.cache_leftpad,
            "causal": self.causal, "sinks": self.sinks, "key_weight": self.key_weight, **self.scales, **self.tables,
        }  # fmt: skip
        if self.stored is not None:
            given["rotated_keys"] = True
        if not self.is_packed:
            return cached_call, given
        packed = {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": max(self.sizes), "slot_mapping": self.slot_mapping}
        return cached_call, given | packed

    def call(self, **options):
        """Runs the public call and returns its (out, lse). The call writes the new keys to the caches."""
        call, arguments = self.arguments()
        placed = set(POSITIONS) & (arguments | options).keys()
        impl = self.target.of_any_positions if placed else self.target.impl
        return call(**arguments | {"return_lse": True, "impl": impl, "validate": True} | options)

    def expected(self) -> list[support.Problem]:
        """Returns a problem for each sequence. It has the sequence's queries, and the visible tokens as the cache
        stores them."""
        kept = dequantized if self.cache_dtype else (lambda x: x)
        problems = [p.replace(k=kept(p.k), v=kept(p.v), sinks=self.sinks) for p in self.problems]
        if self.key_weight is None:
            return problems
        return [p.replace(k=p.k.double() * self.key_weight.double()) for p in problems]

    def judge(
        self, out: torch.Tensor, lse: torch.Tensor, sequences: Sequence[int] | None = None, roundings: int = 1
    ) -> None:
        """Checks every sequence, or only the given ones, against the error budget. roundings: as in
        support.check_budget."""
        assert out.dtype == self.target.dtype and lse.dtype == support.lse_type(self.target)
        for b, p in enumerate(self.expected()):
            if not self.sizes[b] or sequences is not None and b not in sequences:
                continue
            if self.is_packed:
                got = {"out": out[None, self.rows(b)], "lse": lse[None, :, self.rows(b)]}
            else:
                got = {"out": out[b : b + 1], "lse": lse[b : b + 1]}
            if p.k.shape[1]:
                support.check_budget(got, p, self.target.dtype, f"sequence {b}: ", roundings)
            else:
                assert not got["out"].any() and (got["lse"] == -torch.inf).all()

    def check(self, roundings: int = 1, **options) -> None:
        """Runs the call, checks every sequence, and checks what was written to the cache."""
        lengths = self.cache_seqlens.clone()
        self.judge(*self.call(**options), roundings=roundings)
        assert torch.equal(lengths, self.cache_seqlens)
        if self.cache_dtype:
            self._check_codes()
        elif self.stored is None:
            for before, new in zip(self.before, (self.k_new, self.v_new), strict=True):
                before[tuple(self.new_places)] = new
            assert same(self.k_cache, self.before[0], self.v_cache, self.before[1])

    def _check_codes(self) -> None:
        """Checks that the quantized values and scales of all tokens, including the new ones, follow the formula."""
        caches = (self.k_cache, self.scales["k_scale"], "k"), (self.v_cache, self.scales["v_scale"], "v")
        for b, (p, place) in enumerate(zip(self.problems, self.visible, strict=True)):
            for cache, scales, name in caches:
                codes, scale = quantized(getattr(p, name)[0])
                assert torch.equal(scales[place], scale.float()), f"scales of sequence {b}"
                assert torch.equal(cache[place], codes.to(torch.int8)), f"codes of sequence {b}"


# ---- the public calls

# Arguments that a test gives by name, and that the functions do not have: they enter through ``plan_cache``.
PLANNED = ("rotated_keys", "k_scale", "v_scale", "key_weight", "slot_mapping", *POSITIONS)


def door(given: dict) -> Callable:
    """Returns the public function that takes these arguments, or ``planned``."""
    if any(given.get(name) is not None for name in PLANNED):
        return planned
    return attention_with_cache if given.get("cu_seqlens_q") is None else attention_varlen_with_cache


def cached_call(*tensors, **given):
    """Calls ``attention_with_cache`` or ``attention_varlen_with_cache``, or ``planned`` for arguments that only a plan
    has. tensors: q, k_cache, v_cache, rotary and the lengths, as in the two functions."""
    packed = ("cu_seqlens_q", "cache_seqlens", "max_seqlen_q")
    lengths = packed if len(tensors) > 5 else packed[1:2]
    given |= dict(zip(("q", "k_cache", "v_cache", "rotary", *lengths), tensors, strict=False))
    call = door(given)
    return call(**given if call is planned else {name: x for name, x in given.items() if name not in PLANNED})


def planned(
    q,
    k_cache,
    v_cache,
    rotary,
    cache_seqlens,
    *,
    cu_seqlens_q=None,
    max_seqlen_q=0,
    k=None,
    v=None,
    block_table=None,
    cache_leftpad=None,
    slot_mapping=None,
    k_scale=None,
    v_scale=None,
    key_weight=None,
    page_positions=None,
    page_first=None,
    page_lengths=None,
    slot_positions=None,
    positions=None,
    sinks=None,
    return_lse=False,
    **options,
):
    """Attends once with a plan of ``plan_cache``. options: its options."""
    new, layer = 0 if k is None else k.shape[1], CacheLayer(k_cache, v_cache, k_scale, v_scale, key_weight)
    if cu_seqlens_q is not None:
        new = Packed(cu_seqlens_q, max_seqlen_q, slot_mapping, k is not None and slot_mapping is None)
    explicit = CachePositions.of(page_positions, page_first, page_lengths, slot_positions, positions)
    tables = CacheTables(cache_seqlens, block_table, cache_leftpad, new, explicit)
    sizes = {"seqlen_q": q.shape[-3], "heads_q": q.shape[-2], "dtype": q.dtype}
    plan = plan_cache(tables, like=layer, rotary=rotary, **sizes, **options)
    return plan.attend(q, layer, k, v, sinks=sinks, return_lse=return_lse)


def same(*pairs: torch.Tensor) -> bool:
    """Whether both tensors of each consecutive pair (x, y), (z, w), ... have equal values. NaN equals NaN."""
    return all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(pairs[::2], pairs[1::2], strict=True))


def laid_out(layout: str, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    if layout == "heads first":
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    if layout == "shared":
        return list(torch.cat((k, v), -1).split((k.shape[-1], v.shape[-1]), -1))
    if layout == "poisoned":
        pages, rows, heads, _ = k.shape
        rooms = [x.new_full((pages, rows + 3, heads + 2, x.shape[-1] + 8), torch.nan) for x in (k, v)]
        windows = [room[:, 1 : 1 + rows, 1 : 1 + heads, :-8] for room in rooms]
        return [window.copy_(x) for window, x in zip(windows, (k, v), strict=True)]
    assert layout == "contiguous"
    return [k.clone(), v.clone()]


# ---- quantized caches, computed by the formula


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (quantized values, scale) of rows x (..., head_dim) in float64. Every scale is a float32 number."""
    largest, limit = 127, min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max)
    x = x.double().clamp(-limit, limit)
    scale = (x.abs().amax(-1) / largest).float().double()
    codes = (x / scale[..., None]).nan_to_num(0.0).clamp(-largest, largest)
    # The kernels divide in float32. A quotient that is close to a half in float64 may be exactly a half in float32.
    return codes.float().round().double(), scale


def dequantized(x: torch.Tensor) -> torch.Tensor:
    codes, scale = quantized(x)
    return codes * scale[..., None]


def vllm_layout(codes, scale):
    """Writes k and v with their scales into one buffer, in which a head of a slot is K | scale of K | V | scale
    of V."""
    (k, v), rows, width = codes, codes[0].shape[:-1], codes[0].shape[-1]
    half = width + 4
    buffer = torch.full((*rows, 2 * half), 113, dtype=torch.uint8, device=k.device)
    caches = [buffer[..., i * half : i * half + width].view(k.dtype) for i in range(2)]
    floats = buffer.view(torch.float32)
    scales = [floats[..., (i * half + width) // 4] for i in range(2)]
    for to, x in zip((*caches, *scales), (k, v, *scale), strict=True):
        to.copy_(x)
    return (*caches, *scales)


def odd_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Returns the same values in rows that are one byte longer."""
    room = codes.new_zeros(*codes.shape[:-1], codes.shape[-1] + 1)
    return room[..., :-1].copy_(codes)


def check_needles(rotary: Rotary, edges: set[int], keys: int, seqlen_q: int = 1, heads_kv: int = 1, group: int = 1):
    """Checks the CPU backend in float32 over sequences in which only one key differs from zero. Each key next to an
    edge has a sequence of its own. Also checks that pages give the same bits as a contiguous cache."""
    target = support.Target("cpu", torch.float32, "cpu")
    needles = sorted({edge + d for edge in edges for d in (-1, 0)} & set(range(keys)))
    p = support.problem(target, rotary, seqlen_q, keys, batch=len(needles), heads=heads_kv, group=group)
    for b, j in enumerate(needles):
        needle = 3 * p.k[b, j]
        p.k[b] = 0
        p.k[b, j] = needle
    options = dict(cache_seqlens=support.int32([keys] * len(needles)), return_lse=True, impl="cpu")
    out, lse = attention_with_cache(p.q, p.k, p.v, rotary, **options)
    support.check_budget({"out": out, "lse": lse}, p, torch.float32)
    pages = (x.view(-1, PAGE, *x.shape[2:]) for x in (p.k, p.v))
    table = torch.arange(len(needles) * keys // PAGE, dtype=torch.int32).view(len(needles), -1)
    got = attention_with_cache(p.q, *pages, rotary, block_table=table, **options)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
