"""Compares explicit positions of cached tokens on the CPU with the formula, for runs that span several blocks and
chunks, given by any of the tables."""

import dataclasses

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from flashrope.backends.shared import blocks, runs
from support import SCHEMES, int32
from test_cached_positions import documents
from test_stored_positions import KINDS, over

CPU = [target for target in support.TARGETS if target.impl in ("cpu", "sdpa")]
FLOAT32, FLOAT64 = CPU[0], CPU[-1]
LONG = {"rope": SCHEMES["rope"], "rerope": SCHEMES["rerope"], "log_n": SCHEMES["yarn_leaky_local_log_n"]}
LONG["long_window"] = lambda d: Rotary.rope(d).rectify(600, 3.0).local(1000)
queries = pytest.mark.parametrize("seqlen_q", [1, 3, 70])


def of_documents(target, rotary, seqlen_q, *starts, entries=6, page=PAGE, **options) -> Cached:
    sequences = [documents(entries, each, page) for each in starts]
    return Cached.of_pages(target, rotary, sequences, queries=seqlen_q, page=page, **options)


@pytest.mark.parametrize("target", CPU, ids=str)
@pytest.mark.parametrize("scheme", LONG)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_decoding(target, scheme, seqlen_q):
    """Decoding is right if a run of positions spans several blocks and chunks of the kernel, or only a part of one. The
    second sequence is a single run."""
    starts = {2: 127, 3: 500, 14: 2000, 15: 2064 + 1}, {0: -700}
    of_documents(target, LONG[scheme](64), seqlen_q, *starts, entries=20, page=64, lengths=[1259, 1280]).check()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", LONG)
@pytest.mark.parametrize("target", [FLOAT32, CPU[1], FLOAT64], ids=str)
def test_chunks(target, scheme, causal):
    """Chunks are right if the positions of their queries form two runs. Some rows in the earlier runs of keys are
    hidden."""
    starts = {2: 100, 5: 196, 10: 360}, {1: 32, 4: 800}
    c = of_documents(target, LONG[scheme](32), 90, *starts, entries=12, page=32, lengths=[370, 384], causal=causal)
    c.tables["page_first"][0, 3], c.tables["page_lengths"][0, 3], c.tables["page_lengths"][1, 3] = 5, 17, 0
    c.at(**c.tables).check()


@queries
@pytest.mark.parametrize("rotary", [Rotary.rope(32).log_steps(7), Rotary.rope(32).log_n(20)], ids=["steps", "log n"])
def test_score_scales_at_negative_positions(rotary, seqlen_q):
    """Query scales grow from position 0 on. A negative position counts as 0, because its logarithm would be NaN."""
    c = of_documents(FLOAT32, rotary, seqlen_q, *[{0: -200, 3: -60}] * 2, lengths=[90, 96])
    c.at(**c.tables, positions=torch.arange(seqlen_q) + torch.tensor([[-40], [-3]])).check()


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@queries
@pytest.mark.parametrize("target", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("kind", ["runs", "runs at halves", "scattered", "fractions", "equal"])
def test_stored(target, seqlen_q, paged, kind, monkeypatch):
    """Stored positions are right if they form a few runs. They are also right if every key is a run of its own. The
    backend then uses masks."""
    monkeypatch.setattr(blocks, "MAX_BLOCK", 40)
    monkeypatch.setattr(blocks, "MIN_BLOCK", 40)
    slots = KINDS[kind](torch.arange(192.0).view(2, 96))
    tables = {"page_positions": int32([[page.position for page in documents(6, {}, 100)]] * 2)} if paged else {}
    for scheme, causal in (("rope", True), ("rerope", False), ("hope_rerope_log_n", True)):
        c = over(target, scheme, [87, 96], seqlen_q, page=PAGE * paged, leftpad=[3, 0], capacity=96, causal=causal)
        c.at(slot_positions=c.by_slot(slots), **tables).check()


@pytest.mark.parametrize("seqlen_q", [3, 70])
def test_masks_with_queries_that_see_no_key(seqlen_q):
    """Queries are right in any order. Some queries precede all keys of a block, and their neighbours do not."""
    positions = torch.randint(-20, 190, (2, seqlen_q), generator=torch.Generator().manual_seed(5))
    positions[:, 1] = -5
    slots = (torch.arange(96.0) * 1.5 + 3).repeat(2, 1)
    for scheme in ("rope", "local"):
        over(FLOAT32, scheme, [96, 96], seqlen_q, page=0).at(positions=positions, slot_positions=slots).check()


@queries
def test_factor_by_length(seqlen_q):
    """The factor depends on the number of visible keys in all runs together."""
    c = over(FLOAT32, dataclasses.replace(Rotary.rope(32), length_scale=10.0), [96, 90], seqlen_q)
    lengths = torch.full((2, 6), 16, dtype=torch.int32)
    lengths[:, 2] = 5
    c.at(page_lengths=lengths).check()


@queries
def test_stored_positions_across_hidden_rows(seqlen_q):
    """Stored positions may skip hidden rows: tokens are removed from the middle of a page, and the positions of later
    tokens close the gap."""
    lengths = int32([[16, 9, 16, 16, 3, 16]])
    rows = torch.arange(16) < lengths[0, :, None]
    slots = torch.where(rows, rows.flatten().cumsum(0).view(6, 16) - 1, 0).to(torch.float32)
    c = over(FLOAT32, "rerope", [96], seqlen_q, table=torch.arange(6)[None])
    c.at(slot_positions=slots, page_lengths=lengths).check()


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_sequences_beside_one_with_masks(seqlen_q):
    """Sequences give bitwise the same results with and without a masked sequence in the batch."""
    slots = torch.arange(96.0).repeat(3, 1)
    slots[1] *= 1.5
    together = over(FLOAT32, "rerope", [96] * 3, seqlen_q, page=0).at(slot_positions=slots)
    together.check()
    results = together.call()
    for b in range(3):
        one = slice(b, b + 1)
        alone = together.replace(lengths=[96], sequences=together.problems[one]).at(slot_positions=slots[one])
        for x, y in zip(results, alone.call(), strict=True):
            assert torch.equal(x[one], y)


def test_runs():
    """Consecutive spans are joined into one run if they follow one another in slots and in positions."""
    spans = [(4, 16, 10), (16, 20, 22), (20, 24, 27), (25, 26, 31), (26, 27, 32), (27, 28, 32)]
    found = runs._joined(spans)
    assert found == [runs.Run(4, 16, 10, 0), runs.Run(20, 4, 27, 16), runs.Run(25, 2, 31, 20), runs.Run(27, 1, 32, 22)]
    assert runs._of_keys(found, range(-1, 2)) == [10, 10, 11]
    assert runs._of_keys(found, range(18, 23)) == [29, 30, 31, 32, 32]
