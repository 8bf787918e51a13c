"""Positions of cached tokens on the CPU: runs of several blocks and chunks, in any tables, against the formula."""

import dataclasses

import pytest
import support
import torch
from flashrope import Rotary, attention_with_cache
from flashrope.backends.cpu import cached, runs
from placing import Case
from support import SCHEMES, int32

CPU = [target for target in support.TARGETS if target.impl == "cpu"]
FLOAT32, FLOAT64 = CPU[0], CPU[3]
CODES = {"int8": torch.int8, "int4": torch.uint8}


def documents(entries: int, page: int, starts: dict[int, int]) -> torch.Tensor:
    """page_positions of one sequence: pages follow one another, but for the entries that start elsewhere."""
    positions, position = [], 0
    for n in range(entries):
        position = starts.get(n, position)
        positions.append(position)
        position += page
    return int32(positions)


def batch_of(*rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows)


LONG = {"rope": SCHEMES["rope"], "rerope": SCHEMES["rerope"], "log_n": SCHEMES["yarn_leaky_local_log_n"]}
LONG["long_window"] = lambda d: Rotary.rope(d).rectify(600, 3.0).local(1000)


@pytest.mark.parametrize("target", CPU, ids=str)
@pytest.mark.parametrize("scheme", LONG)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_decoding(target, scheme, seqlen_q):
    """Runs of several blocks and chunks of the kernel, and of a part of one; the second sequence is one run."""
    case = Case(target, (2, 20, 64, 64), seqlen_q, lengths=[1259, 1280])
    starts = {2: 127, 3: 500, 14: 2000, 15: 2064 + 1}
    case.check(LONG[scheme](64), page_positions=batch_of(documents(20, 64, starts), documents(20, 64, {0: -700})))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", LONG)
@pytest.mark.parametrize("target", [FLOAT32, CPU[1], FLOAT64], ids=str)
def test_chunks(target, scheme, causal):
    """Queries that lie in two runs of their own, behind others that they see in part; hidden rows between them."""
    case = Case(target, (2, 12, 32, 32), 90, lengths=[370, 384])
    positions = batch_of(documents(12, 32, {2: 100, 5: 196, 10: 360}), documents(12, 32, {1: 32, 4: 800}))
    first, lengths = torch.zeros(2, 12, dtype=torch.int32), torch.full((2, 12), 32, dtype=torch.int32)
    first[0, 3], lengths[0, 3], lengths[1, 3] = 5, 17, 0
    case.check(LONG[scheme](32), causal, page_positions=positions, page_first=first, page_lengths=lengths)


@pytest.mark.parametrize("seqlen_q", [1, 5, 70])
@pytest.mark.parametrize("codes", CODES)
def test_quantized(codes, seqlen_q):
    case = Case(FLOAT32, (2, 9, 16, 32), seqlen_q, lengths=[140, 129], codes=CODES[codes])
    positions = batch_of(documents(9, 16, {3: 90}), documents(9, 16, {1: 16, 8: 200}))
    case.check(SCHEMES["rerope"](32), page_positions=positions)


@pytest.mark.parametrize("seqlen_q", [1, 2, 80])
@pytest.mark.parametrize("target", [FLOAT32, FLOAT64], ids=str)
def test_hostile_tables(target, seqlen_q):
    """Holes, positions that fall, rows beyond the page, pages outside the cache: no row is read that is not shown."""
    table = torch.tensor([[0, -5, 3, 10**6, 4, 1], [5, 5, 5, 2, 2, 2], [1, 0, 3, 4, 5, 2**31 - 1], [0] * 6])
    case = Case(target, (4, 6, 16, 16), seqlen_q, table=table, lengths=[91, 10**9, 96, -3])
    big = 2**31 - 1
    page_positions = int32([[50, 40, 66, -(10**6), 0, 60], [0] * 6, [-big, big, 0, 16, 32, -big], [big] * 6])
    page_first = int32([[0, 3, 16, -4, 9, 0], [-big, big, -1, 20, 0, 1], [0] * 6, [big] * 6])
    page_lengths = int32([[16, 99, 16, 9, 7, 16], [big, big, 3, 3, -1, 4], [-5, 0, 16, big, 1, 7], [-big] * 6])
    for scheme in ("rope", "rerope", "local"):
        case.check(SCHEMES[scheme](16), page_positions=page_positions, page_first=page_first, page_lengths=page_lengths)
        case.check(SCHEMES[scheme](16), page_first=page_first, page_lengths=page_lengths)
        case.check(SCHEMES[scheme](16), page_positions=page_positions)


@pytest.mark.parametrize("seqlen_q", [1, 4, 66])
@pytest.mark.parametrize("target", [FLOAT32, CPU[2], FLOAT64], ids=str)
def test_queries_of_their_own(target, seqlen_q):
    """Before, between and behind the keys, in runs or not; order still hides the keys behind each."""
    case = Case(target, (2, 6, 16, 32), seqlen_q, lengths=[90, 96])
    positions = batch_of(documents(6, 16, {3: 100}), documents(6, 16, {1: 16}))
    generator = torch.Generator().manual_seed(5)
    for queries in (
        torch.arange(seqlen_q) + torch.tensor([[40], [200]]),
        torch.randint(-20, 160, (2, seqlen_q), generator=generator),
        torch.randint(0, 99, (2, seqlen_q), generator=generator).to(torch.float32) + 0.25,
        torch.tensor([[99.25], [15.25]]).expand(-1, seqlen_q).contiguous(),  # just before a run, which is unseen
    ):
        for scheme in ("rope", "hope_rerope_log_n", "local"):
            case.check(SCHEMES[scheme](32), queries=queries, page_positions=positions)


@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
@pytest.mark.parametrize("rotary", [Rotary.rope(32).log_steps(7), Rotary.rope(32).log_n(20)], ids=["steps", "log n"])
def test_score_scales_at_negative_positions(rotary, seqlen_q):
    """Query scales grow from position 0 on. A position below counts as 0, where a logarithm would be NaN."""
    case = Case(FLOAT32, (2, 6, 16, 32), seqlen_q, lengths=[90, 96])
    queries = torch.arange(seqlen_q) + torch.tensor([[-40], [-3]])
    case.check(rotary, queries=queries, page_positions=batch_of(*[documents(6, 16, {0: -200, 3: -60})] * 2))


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
@pytest.mark.parametrize("target", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("kind", ["runs", "runs at halves", "scattered", "fractions", "pairs"])
def test_stored(target, seqlen_q, paged, kind, monkeypatch):
    """Positions in the cache: a few runs, or one to every key, which take masks."""
    monkeypatch.setattr(cached, "MAX_BLOCK", 40)
    monkeypatch.setattr(cached, "MIN_BLOCK", 40)
    case = Case(target, (2, 6, 16, 32), seqlen_q, lengths=[90, 96], leftpad=[3, 0])
    case = case if paged else case.contiguous()
    at = torch.arange(case.k.shape[:2].numel(), dtype=torch.float32).view(case.k.shape[:2])
    if paged:  # in the order of the sequences
        at[case.block_table.flatten().long()] = torch.arange(192, dtype=torch.float32).view(12, 16)
    steps = {
        "runs": at + 7 * (at // 24),
        "runs at halves": at + 7 * (at // 24) + 0.5,
        "scattered": at * 3 - at % 3,
        "fractions": at * 1.5,
        "pairs": at // 2,
    }
    slots = steps[kind]
    tables = {}
    if paged:
        tables["page_positions"] = documents(6, 100, {}).expand(2, -1).contiguous()
    for scheme in ("rope", "rerope", "hope_rerope_log_n"):
        for causal in (True, False):
            case.check(SCHEMES[scheme](32), causal, slot_positions=slots, **tables)


@pytest.mark.parametrize("seqlen_q", [3, 70])
def test_masks_with_queries_that_see_no_key(seqlen_q):
    """Queries in any order: some between two others are before all keys of a block."""
    case = Case(FLOAT32, (2, 6, 16, 32), seqlen_q).contiguous()
    queries = torch.randint(-20, 190, (2, seqlen_q), generator=torch.Generator().manual_seed(5))
    queries[:, 1] = -5
    slots = (torch.arange(96.0) * 1.5 + 3).repeat(2, 1)
    for scheme in ("rope", "local"):
        case.check(SCHEMES[scheme](32), queries=queries, slot_positions=slots)


@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
def test_factor_by_length(seqlen_q):
    """It counts the keys that are shown, in all runs."""
    case = Case(FLOAT32, (2, 6, 16, 32), seqlen_q, lengths=[96, 90])
    lengths = torch.full((2, 6), 16, dtype=torch.int32)
    lengths[:, 2] = 5
    case.check(dataclasses.replace(Rotary.rope(32), length_scale=10.0), page_lengths=lengths)


@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
def test_stored_positions_across_hidden_rows(seqlen_q):
    """Tokens are removed from the middle of a page, and the stored positions behind them close up."""
    case = Case(FLOAT32, (1, 6, 16, 32), seqlen_q, table=torch.arange(6)[None])
    lengths = int32([[16, 9, 16, 16, 3, 16]])
    shown_rows = torch.arange(16) < lengths[0, :, None]
    slots = torch.where(shown_rows, shown_rows.flatten().cumsum(0).view(6, 16) - 1, 0).to(torch.float32)
    case.check(SCHEMES["rerope"](32), slot_positions=slots, page_lengths=lengths)


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_sequences_beside_one_with_masks(seqlen_q):
    """Their results are those without it, to the bit."""
    case = Case(FLOAT32, (3, 6, 16, 32), seqlen_q).contiguous()
    slots = torch.arange(96.0).repeat(3, 1)
    slots[1] *= 1.5
    case.check(SCHEMES["rerope"](32), slot_positions=slots)
    call = dict(return_lse=True, impl="cpu")
    together = attention_with_cache(
        case.q, case.k, case.v, SCHEMES["rerope"](32), case.seqlens, slot_positions=slots, **call
    )
    for b in range(3):
        q, k, v, seqlens, positions = (x[b : b + 1] for x in (case.q, case.k, case.v, case.seqlens, slots))
        alone = attention_with_cache(q, k, v, SCHEMES["rerope"](32), seqlens, slot_positions=positions, **call)
        for x, y in zip(together, alone, strict=True):
            assert torch.equal(x[b : b + 1], y)


def test_runs():
    """Spans that follow one another are one run, in slots and in positions."""
    spans = [(4, 16, 10), (16, 20, 22), (20, 24, 27), (25, 26, 31), (26, 27, 32), (27, 28, 32)]
    found = runs._joined(spans)
    assert found == [runs.Run(4, 16, 10, 0), runs.Run(20, 4, 27, 16), runs.Run(25, 2, 31, 20), runs.Run(27, 1, 32, 22)]
    assert runs._of_keys(found, range(-1, 2)) == [10, 10, 11]
    assert runs._of_keys(found, range(18, 23)) == [29, 30, 31, 32, 32]


@pytest.mark.parametrize("seqlen_q", [1, 3, 70])
@pytest.mark.parametrize("target", [FLOAT32, FLOAT64], ids=str)
def test_left_padding(target, seqlen_q):
    """Slots of padding are not shown, and positions count behind it where no table gives them."""
    case = Case(target, (2, 6, 16, 32), seqlen_q, lengths=[93, 96], leftpad=[5, 20])
    lengths = torch.full((2, 6), 16, dtype=torch.int32)
    lengths[:, 3] = 9
    positions = batch_of(documents(6, 16, {3: 100}), documents(6, 16, {1: 16}))
    for scheme in ("hope_rerope_log_n", "log_n_trained"):
        case.check(SCHEMES[scheme](32), page_lengths=lengths)
        case.check(SCHEMES[scheme](32), page_positions=positions)


@pytest.mark.parametrize("slot", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_numbers_that_are_no_positions(slot, seqlen_q):
    """In one sequence, they change no other."""
    case = Case(FLOAT32, (2, 6, 16, 32), seqlen_q).contiguous()
    slots = torch.arange(96.0).repeat(2, 1)
    call = dict(return_lse=True, impl="cpu")
    results = []
    for value in (20.0, slot):
        slots[0, 20] = value
        results.append(
            attention_with_cache(
                case.q, case.k, case.v, SCHEMES["rerope"](32), case.seqlens, slot_positions=slots, **call
            )
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[1], b[1])
