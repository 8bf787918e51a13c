"""Cached tokens whose positions are data: every sequence gives what its shown keys at their positions give."""

import dataclasses
import math

import pytest
import support
import torch
from flashrope import Rotary, attention_varlen_with_cache, attention_with_cache
from flashrope.backends.quantized import dequantize, quantize
from flashrope.backends.registry import load_backend
from support import SCHEMES, int32

PAGE, HEADS, HEADS_KV = 16, 4, 2
ALL = (*support.TARGETS, support.Target("reference", torch.float64, "cpu"))
TARGETS = [t for t in ALL if hasattr(load_backend(t.impl), "unsupported_positions")]


@pytest.fixture(params=TARGETS, ids=str)
def placed_target(request):
    return request.param


@dataclasses.dataclass
class Entry:
    """A page: its rows from first on, so many, from this position."""

    position: int
    length: int = PAGE
    first: int = 0


# Sequences as documents, prompts and answers leave them: pages that follow one another, gaps, equal positions at a
# border, pages that show rows from their middle, or none.
SEQUENCES = (
    [Entry(0), Entry(16), Entry(32, 9)],
    [Entry(5, 4, 3), Entry(12), Entry(60, 0), Entry(60, 7, 9), Entry(75, 12)],
    [Entry(-40, 16), Entry(100, 11), Entry(108, 3, 2)],
    [Entry(1000, 2)],
)


class Placed:
    """q over pages in any order; hidden rows and unused pages are NaN. keys: those that a call finds in the cache.

    lengths, pads: slots of every sequence; without, the last entry ends it and it has no padding. page: rows of one."""

    def __init__(
        self, target, rotary, seqlen_q, new: bool, causal=True, sequences=SEQUENCES, lengths=(), pads=(), page=PAGE
    ):
        self.target, self.rotary, self.causal, self.seqlen_q = target, rotary, causal, seqlen_q
        batch, most = len(sequences), max(map(len, sequences))
        generator = torch.Generator().manual_seed(1)
        table = torch.randperm(batch * most + 2, generator=generator)[: batch * most].view(batch, most)
        shape = batch * most + 2, page, HEADS_KV, rotary.head_dim
        k, v = (support.random(shape, target, seed) for seed in (1, 2))
        self.q = support.random((batch, seqlen_q, HEADS, rotary.head_dim), target, 3)
        hidden = torch.ones(shape[:2], dtype=torch.bool)
        self.places, self.keys, self.lengths = [], [], []
        for b, entries in enumerate(sequences):
            last = entries[-1]
            length = lengths[b] if lengths else (len(entries) - 1) * page + last.first + last.length
            slots = range(pads[b] if pads else 0, length)
            shown = [range(max(e.first, 0), min(e.first + e.length, page)) for e in entries]
            rows = [(s // page, s % page) for s in slots if s % page in shown[s // page]]
            self.places.append([float(entries[n].position + row) for n, row in rows])
            slots = [(int(table[b, n]), row) for n, row in rows]
            for slot in slots:
                hidden[slot] = False
            self.keys.append(slots)
            self.lengths.append(length)
        self.full = k, v
        self.k, self.v = (x.masked_fill(hidden[..., None, None].to(x.device), torch.nan) for x in (k, v))
        self.new = None
        if new:  # the last seqlen_q tokens of every sequence, which lie in its last page
            picked = [
                torch.stack([torch.stack([x[slot] for slot in s[-seqlen_q:]]) for s in self.keys]) for x in (k, v)
            ]
            self.new = picked
            for s in self.keys:
                for slot in s[-seqlen_q:]:
                    self.k[slot], self.v[slot] = torch.nan, torch.nan

        def padded(name, fill):
            values = [[getattr(e, name) for e in row] + [fill] * (most - len(row)) for row in sequences]
            return int32(values, target.device)

        self.block_table = table.int().to(target.device)
        self.tables = {
            "page_positions": padded("position", -7),
            "page_first": padded("first", 99),
            "page_lengths": padded("length", 10**9),
        }
        self.pads = int32(pads, target.device) if pads else None
        used = [n - seqlen_q * new for n in self.lengths]
        self.cache_seqlens = int32(used, target.device)

    def call(self, **options):
        k, v = self.new or (None, None)
        options = {"validate": True, "cache_leftpad": self.pads, **self.tables, **options}
        return attention_with_cache(
            self.q, self.k, self.v, self.rotary, self.cache_seqlens, k=k, v=v, block_table=self.block_table,
            causal=self.causal, return_lse=True, impl=self.target.impl, **options,
        )  # fmt: skip

    def check(self, out, lse, positions=None) -> None:
        for b, slots in enumerate(self.keys):
            if slots:
                self.check_sequence(b, out[b : b + 1], lse[b : b + 1], None if positions is None else positions[b])
            else:
                assert not out[b].any() and (lse[b] == -torch.inf).all()

    def check_sequence(self, b: int, out, lse, positions=None) -> None:
        """out and lse: of the last rows of the sequence's queries."""
        slots, rows = self.keys[b], out.shape[1]
        k, v = (torch.stack([x[slot] for slot in slots])[None] for x in self.full)
        keys = torch.tensor(self.places[b], dtype=torch.float64, device=k.device)
        queries = keys[len(slots) - self.seqlen_q :] if positions is None else positions.double()
        q, places = self.q[b : b + 1, -rows:], (queries[-rows:], keys)
        p = support.Problem(q, k, v, self.rotary, self.causal, places=places)
        p = p.replace(grad_out=torch.zeros_like(p.q), grad_lse=torch.zeros_like(lse))
        support.check_budget({"out": out, "lse": lse}, p, self.target.dtype, f"sequence {b}: ")


@pytest.mark.interpreted(
    lambda placed_target, scheme, new: (
        placed_target.dtype == torch.float16 and new == (scheme == "leaky")
        if scheme in ("rope_partial", "leaky", "yarn_leaky_local_log_n")
        else False
    )
)
@pytest.mark.parametrize("new", [True, False], ids=["append", "read"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_token(placed_target, scheme, new):
    placed = Placed(placed_target, SCHEMES[scheme](16), 1, new)
    placed.check(*placed.call())


@pytest.mark.interpreted(
    lambda placed_target, scheme, causal: placed_target.dtype == torch.float32 and scheme in ("local", "inverse_leaky")
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", ["rope_partial", "rerope", "hope_rerope_log_n", "local", "inverse_leaky"])
def test_two_tokens(placed_target, scheme, causal):
    placed = Placed(placed_target, SCHEMES[scheme](16), 2, True, causal)
    placed.check(*placed.call())


@pytest.mark.interpreted(lambda placed_target, scheme: scheme == "rerope" and placed_target.dtype == torch.float32)
@pytest.mark.parametrize("scheme", ["rope", "rerope", "local"])
def test_queries_at_positions_of_their_own(placed_target, scheme):
    placed = Placed(placed_target, SCHEMES[scheme](16), 2, True)
    positions = int32([[90, 93], [80, 200], [113, 113], [1000, 1001]], placed_target.device)
    placed.check(*placed.call(positions=positions), positions=positions)


def test_the_formula():
    """The reference against the formula by complex numbers, pair by pair and key by key."""
    target = support.Target("reference", torch.float64, "cpu")
    rotary = Rotary.rope(8).rectify(21, 4.0).log_n(20)
    placed = Placed(target, rotary, 2, False)
    out, lse = placed.call()
    for b, slots in enumerate(placed.keys):
        for r in range(2):
            i = placed.places[b][len(slots) - 2 + r]
            for head in range(HEADS):
                scores = []
                for slot, j in list(zip(slots, placed.places[b], strict=True))[: len(slots) - 1 + r]:
                    d = i - j
                    d = d if d < 21 else 21 + (d - 21) / 4
                    x, y = placed.q[b, r, head], placed.full[0][slot][head // 2]
                    turned = torch.complex(y[:4], y[4:]) * torch.exp(-1j * d * rotary.inv_freq)
                    score = (torch.complex(x[:4], x[4:]) * turned.conj()).real.sum() / math.sqrt(8)
                    scores.append(score * max(1.0, math.log(max(i, 0) + 1) / math.log(20)))
                scores = torch.stack(scores)
                torch.testing.assert_close(lse[b, head, r], scores.logsumexp(0))
                values = torch.stack([placed.full[1][slot][head // 2] for slot in slots[: len(scores)]])
                torch.testing.assert_close(out[b, r, head], scores.softmax(0) @ values)


def test_tables_that_say_what_slots_say(placed_target):
    """Bitwise the call without tables."""
    entries = [[Entry(64 * n, 64) for n in range(3)] + [Entry(192, 5)], [Entry(0, 64), Entry(64, 9)]]
    placed = Placed(placed_target, SCHEMES["rerope"](16), 1, False, sequences=entries, page=64)
    bare = placed.call(**dict.fromkeys(placed.tables))
    for given in ({}, {"page_first": None}, {"page_lengths": None}, {"page_positions": None}):
        if "page_first" in given or "page_lengths" in given:
            placed.check(*placed.call(**given))
        for x, y in zip(placed.call(**given), bare, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_stored_positions(placed_target, paged):
    """New keys leave their positions, behind the last key or those given; the next call reads them."""
    rotary, device = SCHEMES["rerope"](16), placed_target.device
    shape = (2, 32, HEADS_KV, 16)
    k, v = (support.random((2, 12, *shape[2:]), placed_target, seed) for seed in (1, 2))
    q = support.random((2, 12, HEADS, 16), placed_target, 3)
    slots = torch.full((4, PAGE) if paged else shape[:2], torch.nan, device=device)
    caches = [torch.full((4, PAGE, HEADS_KV, 16) if paged else shape, torch.nan).to(q) for _ in range(2)]
    options = dict(slot_positions=slots, impl=placed_target.impl, return_lse=True, validate=True)
    if paged:  # slots store what is left of their page's position
        options["block_table"] = int32([[2, 1], [3, 0]], device)
        options["page_positions"] = int32([[3, 20], [-5, 11]], device)
    given = torch.tensor([[0, 1, 2, 7, 7.5], [3, 4, 5, 6, 9]], device=device)
    lengths = int32([0, 0], device)
    first, second, third = slice(0, 5), slice(5, 8), slice(8, 12)
    places = []
    for rows, positions in ((first, given), (second, None), (third, given[:, :4] + 40)):
        new = [x[:, rows].contiguous() for x in (q, k, v)]
        options["positions"] = positions
        out, lse = attention_with_cache(new[0], *caches, rotary, lengths, k=new[1], v=new[2], **options)
        if positions is None:
            positions = places[-1][:, -1:].floor() + 0.5 * (places[-1][:, -1:] % 1 > 0) + torch.arange(1, 4)
        places.append(positions.double())
        keys = torch.cat(places, 1)
        for b in range(2):
            p = support.Problem(
                new[0][b : b + 1], k[b : b + 1, : keys.shape[1]], v[b : b + 1, : keys.shape[1]], rotary,
                places=(positions[b].double(), keys[b]), grad_out=torch.zeros_like(new[0][b : b + 1]),
                grad_lse=torch.zeros_like(lse[b : b + 1]),
            )  # fmt: skip
            support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, p, placed_target.dtype)
        lengths = lengths + (rows.stop - rows.start)


@pytest.mark.interpreted(lambda placed_target, causal, page: placed_target.dtype == torch.float32 and page == 16)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_left_padding(placed_target, causal, page):
    """Padding hides rows of the first page, or all of it. Without page_positions, positions count from it."""
    entries = [[Entry(7, page), Entry(page + 20, page - 3), Entry(3 * page, 6)]] * 2
    options = dict(sequences=entries, lengths=[2 * page + 6] * 2, pads=[3, page + 5], page=page)
    placed = Placed(placed_target, SCHEMES["hope_rerope_log_n"](16), 2, True, causal, **options)
    placed.check(*placed.call())
    out, lse = placed.call(page_positions=None)
    placed.places = [[float(n) for n in range(len(each))] for each in placed.places]
    for b, (pad, length) in enumerate(zip(options["pads"], options["lengths"], strict=True)):
        slots = [s for s in range(pad, length) if not 2 * page - 3 <= s < 2 * page]
        placed.places[b] = [float(s - pad) for s in slots]
    placed.check(out, lse)


@pytest.mark.interpreted(lambda placed_target, scheme: placed_target.dtype == torch.float32)
@pytest.mark.parametrize("scheme", ["rerope", "leaky"])
def test_far_positions(placed_target, scheme):
    """Positions that no cache is as long as, on both sides of 0, and in which every digit counts."""
    far = (1 << 28) + 12345
    entries = [[Entry(-far), Entry(-far + 20), Entry(0), Entry(1 << 21), Entry(far), Entry(far + 18, 5)]]
    placed = Placed(placed_target, SCHEMES[scheme](16), 2, False, sequences=entries)
    placed.check(*placed.call())


HOSTILE = (  # first rows and lengths outside the page, positions that fall, pages that show nothing
    [Entry(40, 2**31 - 1, 3), Entry(-9, 7, 12), Entry(500, 2**31 - 1, 2**31 - 1), Entry(22, 30, -20), Entry(60, 16)],
    [Entry(300, -5, 4), Entry(200, 16, -3), Entry(100, 16), Entry(0, -(2**31), 2**31 - 1)],
    [Entry(0), Entry(16, 7)],
    [Entry(9, 0), Entry(30, 0)],
    [Entry(4, 3, 2), Entry(30, 4)],
)


@pytest.mark.interpreted(lambda placed_target, seqlen_q, scheme: placed_target.dtype == torch.float32)
@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("scheme", ["rerope", "local"])
def test_hostile_tables(placed_target, scheme, seqlen_q):
    """Each sequence gets what its own tables say, as far as rows exist."""
    placed = Placed(
        placed_target, SCHEMES[scheme](16), seqlen_q, False, sequences=HOSTILE, lengths=[71, 64, 23, 32, 32]
    )
    out, lse = placed.call(validate=False)
    for b, slots in enumerate(placed.keys):
        if not seqlen_q <= len(slots):  # the first rows come before the first key
            assert (lse[b, :, : seqlen_q - len(slots)] == -torch.inf).all()
            assert not out[b, : seqlen_q - len(slots)].any()
    long = [b for b, slots in enumerate(placed.keys) if seqlen_q <= len(slots)]
    assert len(long) >= 3 - (seqlen_q > 1)
    placed.keys, placed.places = ([x[b] for b in long] for x in (placed.keys, placed.places))
    placed.q = placed.q[long]
    placed.check(out[long], lse[long])


@pytest.mark.parametrize("target", [t for t in TARGETS if t.impl == "triton" and t.dtype == torch.float32], ids=str)
def test_positions_beyond_the_table_are_at_its_end(target):
    placed = Placed(target, SCHEMES["rope"](16), 1, False)
    for end, far in ((2**29 - 1, 2**31 - 1), (1 - 2**29, -(2**31)), (2**29 - 1, 2**62)):
        given = [torch.full((4, 1), x, device=placed.q.device) for x in (end, far)]
        first, second = (placed.call(positions=x) for x in given)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.interpreted(lambda placed_target, seqlen_q: placed_target.dtype == torch.float16)
@pytest.mark.parametrize("seqlen_q", [70])
def test_chunk(placed_target, seqlen_q):
    """More queries than one step decodes, over pages with gaps."""
    entries = [
        [Entry(30 * n, 14, 1) for n in range(9)],
        [Entry(16 * n) for n in range(8)] + [Entry(300, 9)],
    ]
    placed = Placed(placed_target, SCHEMES["rerope"](16), seqlen_q, False, sequences=entries)
    placed.check(*placed.call())


@pytest.mark.interpreted(lambda placed_target, scheme: placed_target.dtype == torch.float32)
@pytest.mark.parametrize("scheme", ["rerope", "by_length"])
def test_many_pages(placed_target, scheme):
    """More entries than one step of a kernel reads; a scale that counts the shown keys."""
    rotary = SCHEMES["rerope"](16)
    if scheme == "by_length":
        rotary = dataclasses.replace(rotary.scale_rotated(1.5), length_scale=9.0)
    entries = [
        [Entry(5 * n, 3 - n % 2, n % 2) for n in range(150)],
        [Entry(3 * n, n % 4) for n in range(130)],
        [Entry(2, 4)],
    ]
    placed = Placed(placed_target, rotary, 3, False, sequences=entries)
    placed.check(*placed.call())


@pytest.mark.interpreted(lambda placed_target, num_splits: placed_target.dtype == torch.float32)
@pytest.mark.parametrize("num_splits", [2, 7])
def test_splits(placed_target, num_splits):
    entries = [[Entry(20 * n, 13, 2) for n in range(15)], [Entry(5)]]
    placed = Placed(placed_target, SCHEMES["rerope"](16), 3, False, sequences=entries)
    placed.check(*placed.call(num_splits=num_splits))


@pytest.mark.interpreted(lambda placed_target: placed_target.dtype == torch.float32)
def test_contiguous_caches_take_positions_of_queries(placed_target):
    rotary, device = SCHEMES["rerope"](16), placed_target.device
    q, k, v = (support.random((2, n, h, 16), placed_target, h) for n, h in ((2, HEADS), (50, HEADS_KV), (50, HEADS_KV)))
    positions, pads = torch.tensor([[60, 70], [33, 34]], device=device), [4, 0]
    lengths = [41, 50]
    out, lse = attention_with_cache(
        q, k, v, rotary, int32(lengths, device), cache_leftpad=int32(pads, device), positions=positions,
        return_lse=True, impl=placed_target.impl, validate=True,
    )  # fmt: skip
    for b in range(2):
        keys = torch.arange(lengths[b] - pads[b], dtype=torch.float64, device=device)
        kept = slice(pads[b], lengths[b])
        p = support.Problem(
            q[b : b + 1], k[b : b + 1, kept], v[b : b + 1, kept], rotary, places=(positions[b].double(), keys),
            grad_out=torch.zeros_like(q[b : b + 1]), grad_lse=torch.zeros_like(lse[b : b + 1]),
        )  # fmt: skip
        support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, p, placed_target.dtype)


@pytest.mark.interpreted(lambda placed_target: placed_target.dtype == torch.float32)
def test_quantized(placed_target):
    """As the call over a cache of the numbers that the codes stand for."""
    placed = Placed(placed_target, SCHEMES["rerope"](16), 1, False)
    hidden = placed.k.isnan().all(3)
    codes, scales = zip(*(quantize(x.nan_to_num(3.0), torch.int8) for x in (placed.k, placed.v)), strict=True)
    placed.full = tuple(
        dequantize(x, scale, torch.float64).to(placed.q) for x, scale in zip(codes, scales, strict=True)
    )
    placed.k, placed.v = codes
    scales = [scale.masked_fill(hidden, torch.nan) for scale in scales]
    placed.check(*placed.call(k_scale=scales[0], v_scale=scales[1]))


def test_packed(placed_target):
    """Sequences with 2, 0, 1 and 2 rows."""
    rotary = SCHEMES["hope_rerope_log_n"](16)
    placed = Placed(placed_target, rotary, 2, False)
    rows = [(0, 0), (0, 1), (2, 1), (3, 0), (3, 1)]
    q = torch.stack([placed.q[row] for row in rows])
    packed_out, packed_lse = attention_varlen_with_cache(
        q, placed.k, placed.v, rotary, int32([0, 2, 2, 3, 5], q.device), placed.cache_seqlens, 2,
        block_table=placed.block_table, return_lse=True, impl=placed_target.impl, validate=True, **placed.tables,
    )  # fmt: skip
    for b, first, end in ((0, 0, 2), (2, 2, 3), (3, 3, 5)):
        placed.check_sequence(b, packed_out[None, first:end], packed_lse[None, :, first:end])


def test_axial(placed_target):
    """Three coordinates a slot, as a vision-language model's cache has; causality goes by order."""
    rotary = Rotary.axial(24, axes=3)
    target, tokens = placed_target, 20
    q, k, v = (support.random((1, tokens, n, 24), target, seed) for seed, n in enumerate((HEADS, HEADS_KV, HEADS_KV)))
    grid = torch.tensor([[3, n // 4, n % 4] for n in range(12)], device=q.device)
    text = torch.arange(3)[:, None].expand(3, 3), torch.arange(6, 11)[:, None].expand(5, 3)
    positions = torch.cat((text[0], grid, text[1])).to(torch.int32)[None]
    slots = torch.zeros(2, PAGE, 3, device=q.device)
    caches = [torch.full((2, PAGE, HEADS_KV, 24), torch.nan).to(q) for _ in range(2)]
    options = dict(block_table=int32([[1, 0]], q.device), slot_positions=slots, impl=target.impl, return_lse=True)
    results, n = [], 0
    for rows, given in ((15, positions[:, :15]), (4, positions[:, 15:19]), (1, None)):
        new = [x[:, n : n + rows].contiguous() for x in (q, k, v)]
        options["positions"], lengths = given, int32([n], q.device)
        results.append(attention_with_cache(new[0], *caches, rotary, lengths, k=new[1], v=new[2], **options))
        n += rows
    places = positions[0].double()
    out, lse = torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)
    p = support.Problem(
        q, k, v, rotary, places=(places, places), grad_out=torch.zeros_like(q), grad_lse=torch.zeros_like(lse)
    )
    support.check_budget({"out": out, "lse": lse}, p, target.dtype)


def test_backends_that_place_no_tokens_refuse():
    q = torch.zeros(1, 1, HEADS, 16)
    cache = torch.zeros(2, PAGE, HEADS_KV, 16)
    for impl in sorted({t.impl for t in ALL} - {t.impl for t in TARGETS}):
        with pytest.raises(ValueError, match=f"impl='{impl}' .*impl='reference' takes positions"):
            attention_with_cache(
                q, cache, cache, Rotary.rope(16), int32([1], "cpu"), block_table=int32([[0]], "cpu"),
                page_positions=int32([[5]], "cpu"), impl=impl,
            )  # fmt: skip
