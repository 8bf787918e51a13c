"""Schemes that map positions, over cached tokens at any positions: groups and chunks begin anywhere in a page."""

import pytest
import torch
from flashrope import Rotary, attention_varlen_with_cache
from placing import Case
from support import int32
from test_positions import TARGETS, Entry, Placed
from test_stored_positions import holes

MAPPED = {
    "self_extend": lambda d: Rotary.rope(d).self_extend(24, 4),
    "self_extend_odd_log_n": lambda d: Rotary.rope(d).self_extend(20, 5).log_n(50),
    "dual_chunk": lambda d: Rotary.rope(d).dual_chunk(160, 32, length_scale=30.0),  # chunks of 128
}
SEQUENCES = (  # gaps within a group and over chunks, positions below 0, rows that are forgotten at both ends
    [Entry(-131, 9, 5), Entry(-100), Entry(-3), Entry(120), Entry(0, 0), Entry(250, 13, 1), Entry(270, 6)],
    [Entry(7, 12), Entry(1000), Entry(1022, 11, 3), Entry((1 << 22) + 1, 5)],
    [Entry(126, 3)],
)
EVERY = pytest.mark.parametrize("target", TARGETS, ids=str)
FLOAT32 = pytest.mark.interpreted(lambda target, **given: target.dtype == torch.float32)


@FLOAT32
@EVERY
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("scheme", MAPPED)
def test_decoding(target, scheme, seqlen_q):
    placed = Placed(target, MAPPED[scheme](16), seqlen_q, seqlen_q == 1, sequences=SEQUENCES)
    placed.check(*placed.call())


@FLOAT32
@EVERY
@pytest.mark.parametrize("scheme", MAPPED)
def test_large_pages_and_splits(target, scheme):
    """A tile of keys lies in one page; it begins within a group and ends in another chunk."""
    sequences = [[Entry(-70, 50, 7), Entry(3), Entry(90, 30, 30), Entry(301, 20)], [Entry(5, 9)]]
    placed = Placed(target, MAPPED[scheme](16), 2, False, sequences=sequences, page=64)
    placed.check(*placed.call(num_splits=2))


@pytest.mark.interpreted(lambda target, scheme: target.dtype == torch.float16 and scheme != "self_extend_odd_log_n")
@EVERY
@pytest.mark.parametrize("scheme", MAPPED)
def test_chunk(target, scheme):
    sequences = [[Entry(30 * n - 90, 14, 1) for n in range(9)]]
    placed = Placed(target, MAPPED[scheme](16), 70, False, sequences=sequences)
    placed.check(*placed.call())


@FLOAT32
@EVERY
@pytest.mark.parametrize("scheme", MAPPED)
def test_left_padding_and_queries_of_their_own(target, scheme):
    entries = [[Entry(7), Entry(126), Entry(200, 6)]] * 2
    placed = Placed(target, MAPPED[scheme](16), 2, False, sequences=entries, lengths=[38, 38], pads=[3, 18])
    placed.check(*placed.call())
    positions = int32([[130, 260], [127, 128]], target.device)
    placed.check(*placed.call(positions=positions), positions=positions)


@FLOAT32
@EVERY
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("scheme", ["self_extend", "dual_chunk"])
def test_quantized(target, scheme, codes):
    if target.dtype != torch.float32:
        pytest.skip("one type is enough")
    case = Case(target, (2, 5, 16, 32), 2, lengths=[75, 80], codes=codes)
    case.check(MAPPED[scheme](32), **holes(2, 5, 16))


@FLOAT32
@EVERY
@pytest.mark.parametrize("scheme", MAPPED)
def test_packed(target, scheme):
    """Sequences with 2, 0 and 1 rows."""
    placed = Placed(target, MAPPED[scheme](16), 2, False, sequences=SEQUENCES)
    q = torch.stack([placed.q[row] for row in ((0, 0), (0, 1), (2, 1))])
    out, lse = attention_varlen_with_cache(
        q, placed.k, placed.v, placed.rotary, int32([0, 2, 2, 3], q.device), placed.cache_seqlens, 2,
        block_table=placed.block_table, return_lse=True, impl=target.impl, validate=True, **placed.tables,
    )  # fmt: skip
    for b, first, end in ((0, 0, 2), (2, 2, 3)):
        placed.check_sequence(b, out[None, first:end], lse[None, :, first:end])


@FLOAT32
@EVERY
@pytest.mark.parametrize("scheme", MAPPED)
def test_fractions(target, scheme):
    """Stored positions, and queries just before and behind a key, a group and a chunk."""
    case = Case(target, (2, 5, 16, 32), 3, lengths=[75, 80])
    at = torch.arange(160, dtype=torch.float32).view(10, 16) * 1.375 - 20
    slots = torch.empty_like(at)
    slots[case.block_table.flatten().long().cpu()] = at
    queries = torch.tensor([[88.0, 126.875, 128.125], [127.75, 195.5, 300.25]])
    case.check(MAPPED[scheme](32), queries=queries, slot_positions=slots)
    case.check(MAPPED[scheme](32), slot_positions=slots)
    if scheme == "self_extend":
        case.check(MAPPED[scheme](32), queries=queries)
