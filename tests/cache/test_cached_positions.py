"""Compares calls over cached tokens with explicit positions with attention over the visible tokens at these
positions."""

import dataclasses
import math

import pytest
import support
import torch
from caching import PAGE, POSITIONED, Cached, Page, cached_call
from flashrope import Rotary
from flashrope.schemes.cos_sin import MAX_POSITION
from support import SCHEMES, int32

MAPPED = {
    "self_extend": lambda d: Rotary.rope(d).self_extend(24, 4),
    "self_extend_odd_log_n": lambda d: Rotary.rope(d).self_extend(20, 5).log_n(50),
    "dual_chunk": lambda d: Rotary.rope(d).dual_chunk(160, 32, length_scale=30.0),  # chunks of 128
}
EVERY = SCHEMES | MAPPED
EVERY["by_length"] = lambda d: dataclasses.replace(SCHEMES["rerope"](d).scale_rotated(1.5), length_scale=9.0)
# Sequences as documents, prompts and answers produce them: consecutive pages, gaps, equal positions at a border,
# pages whose visible rows begin in the middle, and pages without visible rows.
SEQUENCES = (
    [Page(0), Page(16), Page(32, 9)],
    [Page(5, 4, 3), Page(12), Page(60, 0), Page(60, 7, 9), Page(75, 12)],
    [Page(-40, 16), Page(100, 11), Page(108, 3, 2)],
    [Page(1000, 2)],
)
# Sequences for position maps. Groups and chunks begin anywhere in a page, gaps lie within a group and across chunks,
# and some positions are negative.
FOR_MAPS = (
    [Page(-131, 9, 5), Page(-100), Page(-3), Page(120), Page(0, 0), Page(250, 13, 1), Page(270, 6)],
    [Page(7, 12), Page(1000), Page(1022, 11, 3), Page((1 << 22) + 1, 5)],
    [Page(126, 3)],
)
targets = pytest.mark.parametrize("target", POSITIONED, ids=str)
exact_targets = pytest.mark.parametrize(
    "target", [t for t in POSITIONED if t.dtype == torch.float32 or t.impl == "reference"], ids=str
)
in_float32 = pytest.mark.interpreted(lambda target, **given: target.dtype == torch.float32)


def over(target, scheme: str, sequences=None, queries=1, head_dim=16, **options) -> Cached:
    """Returns a call over pages that reads a cache and appends nothing."""
    sequences = sequences or (FOR_MAPS if scheme in MAPPED else SEQUENCES)
    options = {"heads": (2, 1) if target.slow else (4, 2), **options}
    return Cached.of_pages(target, EVERY[scheme](head_dim), sequences, queries=queries, **options)


def documents(entries: int, starts: dict[int, int], page=PAGE) -> list[Page]:
    """Returns pages at consecutive positions. The entries in `starts` begin at the given position."""
    pages, position = [], 0
    for n in range(entries):
        position = starts.get(n, position)
        pages.append(Page(position, page))
        position += page
    return pages


def holes(batch: int, entries: int, page: int) -> dict[str, torch.Tensor]:
    """Returns tables of pages with decreasing positions. Some pages have visible rows that begin in the middle, others
    have no visible rows."""
    first, lengths = torch.zeros(batch, entries, dtype=torch.int32), torch.full((batch, entries), page).int()
    first[0, 1], lengths[0, 1], lengths[-1, 2], lengths[-1, 0] = 5, page - 7, 0, 3
    positions = 100 - 30 * torch.arange(batch * entries, dtype=torch.int32).view(batch, entries)
    return dict(page_positions=positions, page_first=first, page_lengths=lengths)


@pytest.mark.interpreted(
    lambda target, scheme: (
        scheme in (MAPPED if target.dtype == torch.float32 else ("rope_partial", "leaky", "yarn_leaky_local_log_n"))
    )
)
@pytest.mark.parametrize("scheme", [*SCHEMES, *MAPPED])
@targets
def test_one_token(target, scheme):
    """Every other scheme reads a cache to which the call appends nothing."""
    over(target, scheme, new=1 - list(EVERY).index(scheme) % 2).check()


@pytest.mark.interpreted(
    lambda target, scheme, causal: target.dtype == torch.float32 and scheme in ("local", "inverse_leaky")
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", ["rope_partial", "rerope", "hope_rerope_log_n", "local", "inverse_leaky"])
@targets
def test_two_tokens(target, scheme, causal):
    over(target, scheme, queries=2, new=2, causal=causal).check()


@in_float32
@pytest.mark.parametrize("scheme", MAPPED)
@targets
def test_maps_of_several_tokens(target, scheme):
    """Position maps are right for several queries, also where a tile of keys lies in one page, begins within a group
    and ends in another chunk."""
    over(target, scheme, queries=3).check()
    sequences = [[Page(-70, 50, 7), Page(3), Page(90, 30, 30), Page(301, 20)], [Page(5, 9)]]
    over(target, scheme, sequences, queries=2, page=64).check(num_splits=2)


def test_the_formula():
    """The reference equals the formula in complex numbers, computed for each pair and key."""
    target, rotary = support.Target("reference", torch.float64, "cpu"), Rotary.rope(8).rectify(21, 4.0).log_n(20)
    c = Cached.of_pages(target, rotary, SEQUENCES, queries=2)
    out, lse = c.call()
    for b, p in enumerate(c.expected()):
        positions, rows = p.places[1].tolist(), p.k.shape[1]
        for r, head in ((r, head) for r in range(2) for head in range(4)):
            i, seen, scores = positions[rows - 2 + r], rows - 1 + r, []
            for j, y in zip(positions[:seen], p.k[0, :, head // 2], strict=False):
                d = i - j if i - j < 21 else 21 + (i - j - 21) / 4
                x = p.q[0, r, head]
                rotated = torch.complex(y[:4], y[4:]) * torch.exp(-1j * d * rotary.inv_freq)
                score = (torch.complex(x[:4], x[4:]) * rotated.conj()).real.sum() / math.sqrt(8)
                scores.append(score * max(1.0, math.log(max(i, 0) + 1) / math.log(20)))
            scores = torch.stack(scores)
            torch.testing.assert_close(lse[b, head, r], scores.logsumexp(0))
            torch.testing.assert_close(out[b, r, head], scores.softmax(0) @ p.v[0, :seen, head // 2])


@targets
def test_tables_that_say_what_slots_say(target):
    """Tables that hold the tokens' default positions give bitwise the same results as a call without tables."""
    sequences = [[*documents(3, {}, 64), Page(192, 5)], [Page(0, 64), Page(64, 9)]]
    c = over(target, "rerope", sequences, page=64)
    bare = c.call(**dict.fromkeys(c.tables))
    c.judge(*bare)
    for given in ({}, {"page_first": None}, {"page_lengths": None}, {"page_positions": None}):
        assert all(map(torch.equal, c.call(**given), bare))


# ---- explicit positions of queries


@pytest.mark.interpreted(
    lambda target, seqlen_q, kind: target.dtype == torch.float32 and seqlen_q == 2 and kind != "around"
)
@pytest.mark.parametrize("kind", ["around", "random", "fractions", "just before a run"])
@pytest.mark.parametrize("seqlen_q", [1, 2, 66])
@targets
def test_queries_of_their_own(target, seqlen_q, kind):
    """Queries may have positions before, between and after those of the keys. Causality still follows the order of the
    tokens."""
    generator = torch.Generator().manual_seed(5)
    queries = {
        "around": torch.arange(seqlen_q) + torch.tensor([[40], [200]]),
        "random": torch.randint(-20, 160, (2, seqlen_q), generator=generator),
        "fractions": torch.randint(0, 99, (2, seqlen_q), generator=generator) + 0.25,
        "just before a run": torch.tensor([[99.25], [15.25]]).expand(-1, seqlen_q).contiguous(),
    }[kind]
    sequences = [documents(6, {3: 100}), documents(6, {1: 16})]
    schemes = ("rerope",) if target.slow else ("hope_rerope_log_n", "local", "self_extend")
    for scheme in schemes:
        c = over(target, scheme, sequences, seqlen_q, lengths=[90, 96])
        c.at(**c.tables, positions=queries).check()


@in_float32
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("scheme", ["rope", "hope_rerope_log_n"])
@targets
def test_positions_of_queries_beside_holes_and_padding(target, scheme, paged):
    options = dict(new=0, leftpad=[3, 0], page=PAGE * paged, layout="poisoned")
    c, tables = Cached(target, SCHEMES[scheme](32), [72, 80], 2, **options), holes(2, 5, 16) if paged else {}
    for queries in (torch.tensor([[40.25, 71.5], [-3.75, 60.625]]), int32([[90, 93], [-4, 113]])):
        c.at(positions=queries, **tables).check(validate=False)


@pytest.mark.parametrize("target", [t for t in POSITIONED if t.impl == "triton" and t.dtype == torch.float32], ids=str)
def test_positions_beyond_the_table_are_at_its_end(target):
    c = over(target, "rope")
    for end, far in ((2**29 - 1, 2**31 - 1), (1 - 2**29, -(2**31)), (2**29 - 1, 2**62)):
        first, second = (c.call(positions=torch.full((4, 1), x, device=c.q.device)) for x in (end, far))
        assert all(map(torch.equal, first, second))


# ---- padding, lengths, pages


@pytest.mark.interpreted(lambda target, seqlen_q, causal, page: target.dtype == torch.float32 and seqlen_q == 2)
@pytest.mark.parametrize(
    ("seqlen_q", "causal", "page"), [(2, True, 16), (2, False, 16), (2, True, 64), (70, True, 16), (70, False, 64)]
)
@targets
def test_left_padding(target, seqlen_q, causal, page):
    """Padding hides some or all rows of the first page. Without page_positions, positions count from the end of the
    padding."""
    pads, slots = [3, page + 5], 2 * page + 6
    options = dict(lengths=[slots - pad for pad in pads], leftpad=pads, page=page, causal=causal)
    sequences = [[Page(7, page), Page(page + 20, page - 3), Page(3 * page, 6)]] * 2
    schemes = ["hope_rerope_log_n"] if target.slow else ["hope_rerope_log_n", "log_n_trained"]
    for scheme in schemes + ["self_extend_odd_log_n"] * causal:
        c = over(target, scheme, sequences, seqlen_q, **options)
        c.check()
        c.at(page_lengths=c.tables["page_lengths"]).check()


@in_float32
@pytest.mark.parametrize("scheme", ["rerope", "leaky"])
@targets
def test_far_positions(target, scheme):
    """Positions far beyond the length of any cache are exact, on both sides of 0, to the last digit."""
    far = (1 << 28) + 12345
    pages = [Page(-far), Page(-far + 20), Page(0), Page(1 << 21), Page(far), Page(far + 18, 5)]
    over(target, scheme, [pages], 2).check()


BIG = 2**31 - 1
HOSTILE = {  # hidden pages, decreasing positions, rows beyond the page, pages outside the cache or used twice
    "table": [[0, -5, 3, 10**6, 4, 1], [5, 5, 5, 2, 2, 2], [1, 0, 3, 4, 5, BIG], [0] * 6, [7, 8, 9, 10, 11, 12]],
    "lengths": [91, 10**9, 96, -3, 83],
    "page_positions": [[50, 40, 66, -(10**6), 0, 60], [0] * 6, [-BIG, BIG, 0, 16, 32, -5], [BIG] * 6, [3, 22] * 3],
    "page_first": [[0, 3, 16, -4, 9, 0], [-BIG, BIG, -1, 20, 0, 1], [0] * 6, [BIG] * 6, [40, -9, BIG, -20, 4, 2]],
    "page_lengths": [[16, 99, 16, 9, 7, 16], [BIG, BIG, 3, 3, -1, 4], [-5, 0, 16, BIG, 1, 7], [-BIG] * 6,
                     [BIG, 7, BIG, 30, -5, 3]],
}  # fmt: skip


def hostile(target, rotary, seqlen_q: int, **options) -> Cached:
    """Returns a call with invalid tables. The expected result of each sequence uses the rows of its own tables that
    exist."""
    tables = {name: int32(x) for name, x in HOSTILE.items() if name.startswith("page_")}
    options |= dict(
        new=0, heads=(2, 1), page=PAGE, table=torch.tensor(HOSTILE["table"]), tables=tables, layout="poisoned"
    )
    return Cached(target, rotary, HOSTILE["lengths"], seqlen_q, **options)


@pytest.mark.interpreted(
    lambda target, seqlen_q, scheme: (
        target.dtype == torch.float32 and (scheme, seqlen_q) in (("rerope", 20), ("local", 1))
    )
)
@pytest.mark.parametrize(("scheme", "seqlen_q"), [("rerope", 20), ("rerope", 80), ("local", 1), ("local", 20)])
@targets
def test_hostile_tables(target, scheme, seqlen_q):
    c = hostile(target, SCHEMES[scheme](16), seqlen_q)
    c.check(validate=False)
    if not target.slow:
        first, lengths = c.tables["page_first"], c.tables["page_lengths"]
        c.at(page_first=first, page_lengths=lengths).check(validate=False)
        inside = c.tables["page_positions"].clamp(-MAX_POSITION, MAX_POSITION)  # here all of these pages are visible
        c.at(page_positions=inside).check(validate=False)


@pytest.mark.interpreted(
    lambda target, scheme, causal: (
        target.dtype == torch.float16 and causal and scheme in ("rerope", "self_extend", "dual_chunk")
    )
)
@pytest.mark.parametrize(
    ("scheme", "causal"),
    [*((x, True) for x in (*MAPPED, "rope", "rerope", "yarn_leaky_local_log_n")), ("rerope", False), ("local", False)],
)
@targets
def test_chunk(target, scheme, causal):
    """Chunks with more queries than the decode kernel takes work over pages with gaps. The positions of the
    queries form several consecutive runs, and the positions of the earlier keys form further runs."""
    pages = [Page(30 * n - 90 * (scheme in MAPPED), 14, 1) for n in range(9)]
    sequences = [pages, [*documents(8, {2: 60, 5: 156}), Page(300, 9)]][: 1 if target.slow else 2]
    over(target, scheme, sequences, 70, heads=(2, 1), causal=causal).check()


@pytest.mark.interpreted(lambda target, scheme: target.dtype == torch.float32 and scheme == "by_length")
@pytest.mark.parametrize("scheme", ["rerope", "by_length"])
@targets
def test_many_pages(target, scheme):
    """Sequences may have more block-table entries than a kernel reads in one step. The scheme's scale depends on
    the number of visible keys."""
    sequences = [[Page(5 * n, 3 - n % 2, n % 2) for n in range(140)], [Page(2, 4)]]
    over(target, scheme, sequences, 3, heads=(2, 1)).check()


@in_float32
@pytest.mark.parametrize("num_splits", [2, 7])
@targets
def test_splits(target, num_splits):
    over(target, "rerope", [[Page(20 * n, 13, 2) for n in range(15)], [Page(5)]], 3).check(num_splits=num_splits)


@pytest.mark.interpreted(lambda target, seqlen_q, scheme: target.dtype == torch.float32 and seqlen_q == 2)
@pytest.mark.parametrize("seqlen_q", [1, 2, 70])
@pytest.mark.parametrize("scheme", ["rerope", "self_extend", "dual_chunk"])
@exact_targets
def test_quantized(target, scheme, seqlen_q):
    c = Cached(target, EVERY[scheme](32), [75, 80], seqlen_q, new=0, page=PAGE, cache_dtype="int8")
    c.at(**holes(2, 5, 16)).check(validate=False)


@in_float32
@pytest.mark.parametrize("scheme", ["hope_rerope_log_n", *MAPPED])
@targets
def test_packed(target, scheme):
    """Packed sequences with 2, 0, 1 and 2 query rows give the results of the formula."""
    sequences = [*FOR_MAPS, [Page(1000, 2)]] if scheme in MAPPED else SEQUENCES
    over(target, scheme, sequences, queries=(2, 0, 1, 2)).check()


def test_backends_that_place_no_tokens_refuse():
    q, cache = torch.zeros(1, 1, 4, 16), torch.zeros(2, PAGE, 2, 16)
    for impl in sorted({t.impl for t in support.TARGETS} - {t.impl for t in POSITIONED}):
        with pytest.raises(ValueError, match=f"impl='{impl}' .* do not support explicit positions"):
            cached_call(
                q, cache, cache, Rotary.rope(16), int32([1], "cpu"), block_table=int32([[0]], "cpu"),
                page_positions=int32([[5]], "cpu"), impl=impl,
            )  # fmt: skip
