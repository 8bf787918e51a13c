"""The compiled kernels of cached tokens whose positions are data, on the executor."""

import pytest
import support
import torch
from flashrope import attention_varlen_with_cache, attention_with_cache
from placing import Case
from support import int32
from test_mapped_positions import MAPPED
from test_positions import HOSTILE, SEQUENCES, Entry, Placed
from test_stored_positions import AXIAL, coordinates, holes

SCHEMES = support.SCHEMES | MAPPED
BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
PAGES = [  # of 64 rows: a tile of keys lies in one
    [Entry(-70, 50, 7), Entry(0, 64), Entry(64, 0), Entry(90, 30, 30), Entry((1 << 22) + 3, 20)],
    [Entry(5, 9)],
]
CASES = {
    "rerope-d64-bf16": dict(target=BF16, scheme="rerope", head_dim=64, seqlen_q=1),
    "rerope-one-run-d64-bf16": dict(target=BF16, scheme="rerope", head_dim=64, seqlen_q=2, sequences=PAGES, page=64),
    "leaky-one-run-d128-fp16": dict(
        target=FP16, scheme="leaky", head_dim=128, seqlen_q=1, sequences=PAGES, page=64, num_splits=3
    ),
    "local-full-d40-bf16": dict(target=BF16, scheme="local", head_dim=40, seqlen_q=2, causal=False),
    "log-n-padded-d16-fp32": dict(
        target=FP32,
        scheme="hope_rerope_log_n",
        head_dim=16,
        seqlen_q=1,
        sequences=[[Entry(3), Entry(20, 9), Entry(40)]] * 2,
        lengths=[40, 48],
        pads=[5, 18],
    ),
    "chunk-d64-bf16": dict(
        target=BF16, scheme="rerope", head_dim=64, seqlen_q=70, sequences=[[Entry(30 * n, 14, 1) for n in range(9)]]
    ),
    "self-extend-d64-bf16": dict(target=BF16, scheme="self_extend", head_dim=64, seqlen_q=2),
    "dual-chunk-one-run-d64-bf16": dict(
        target=BF16, scheme="dual_chunk", head_dim=64, seqlen_q=2, sequences=PAGES, page=64, num_splits=2
    ),
    "self-extend-one-run-d128-bf16": dict(
        target=BF16, scheme="self_extend", head_dim=128, seqlen_q=1, sequences=PAGES, page=64
    ),
}
QUICK = ("rerope-d64-bf16", "rerope-one-run-d64-bf16")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if x in QUICK else ()) for x in CASES])
def test_cached(machine, name):
    options = {"new": name in QUICK, "sequences": SEQUENCES, **CASES[name]}
    num_splits, rotary = options.pop("num_splits", None), SCHEMES[options.pop("scheme")](options.pop("head_dim"))
    placed = Placed(options.pop("target"), rotary, **options)
    placed.check(*placed.call(num_splits=num_splits))
    kernels = [launch.kernel for launch in machine.launches]
    assert "place_tokens" in kernels and "attention_decode" in kernels


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_hostile_tables(machine, seqlen_q):
    """The executor watches the bounds of every tensor. A sequence whose tables are right is bitwise unchanged."""
    results = []
    for sequences, lengths in ((SEQUENCES, (41, 71, 28, 2)), (HOSTILE, (71, 64, 28, 20))):
        sequences = [*sequences[:2], [Entry(0), Entry(30, 12)], sequences[3]]
        placed = Placed(BF16, SCHEMES["rerope"](16), seqlen_q, False, sequences=sequences, lengths=lengths)
        results.append(placed.call(validate=False))
    (out, lse), (got_out, got_lse) = results
    assert torch.equal(out[2], got_out[2]) and torch.equal(lse[2], got_lse[2])


def test_packed(machine):
    """A step, no rows and a chunk, as the calls of each alone."""
    placed = Placed(BF16, SCHEMES["rerope"](64), 2, False)
    out, lse = placed.call(num_splits=1)
    rows = [(0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    q = torch.stack([placed.q[row] for row in rows])
    packed_out, packed_lse = attention_varlen_with_cache(
        q, placed.k, placed.v, placed.rotary, int32([0, 1, 1, 3, 5], "cpu"), placed.cache_seqlens, 2,
        block_table=placed.block_table, return_lse=True, impl="triton", num_splits=1, **placed.tables,
    )  # fmt: skip
    for n, (b, r) in enumerate(rows):
        torch.testing.assert_close(packed_out[n], out[b, r], rtol=2**-8, atol=0)
        torch.testing.assert_close(packed_lse[:, n], lse[b, :, r], rtol=0, atol=1e-6)


STORED = {  # (target, scheme, pages of so many rows, head_dim)
    "mrope-d64-bf16": (BF16, AXIAL["mrope"], 16, 64),
    "mrope-one-run-d128-bf16": (BF16, AXIAL["mrope_interleaved"], 64, 128),
    "rerope-d64-fp16": (FP16, SCHEMES["rerope"], 16, 64),
    "leaky-one-run-d64-bf16": (BF16, SCHEMES["leaky"], 64, 64),
    "local-d40-fp32": (FP32, SCHEMES["local"], 16, 40),
    "dual-chunk-d64-bf16": (BF16, SCHEMES["dual_chunk"], 64, 64),
    "self-extend-fp32": (FP32, SCHEMES["self_extend"], 16, 32),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if "d64" in x else ()) for x in STORED])
def test_stored_positions(machine, name):
    """Positions with parts, whole ones and far ones; bands find their keys by them."""
    target, scheme, page, head_dim = STORED[name]
    case, rotary = Case(target, (2, 3, page, head_dim), 2, lengths=[3 * page - 5, 2 * page + 1]), scheme(head_dim)
    slots = coordinates(case, 3, high=40) * 1.375 if rotary.axis else coordinates(case, 1, high=40)[..., 0] * 1.375
    case.check(rotary, slot_positions=slots, **holes(2, 3, page))
    kernels = [launch.kernel for launch in machine.launches]
    assert ("place_slots" in kernels) == (not rotary.axis) and "attention_decode" in kernels


CODES = {  # (target, page, head_dim, type of the codes, left padding)
    "int4-pages-of-16-d64-fp16": (FP16, 16, 64, torch.uint8, None),
    "int4-pages-of-16-d40-bf16": (BF16, 16, 40, torch.uint8, None),
    "int4-padded-d64-bf16": (BF16, 64, 64, torch.uint8, [0, 9]),
    "int4-pages-of-32-d16-fp16": (FP16, 32, 16, torch.uint8, None),
    "int8-pages-of-16-d8-bf16": (BF16, 16, 8, torch.int8, None),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if "d64" in x else ()) for x in CODES])
def test_codes(machine, name):
    """Tiles of 16 keys, whose product with the weights adds up 16 terms. Tiles with fewer than four bytes a lane."""
    target, page, head_dim, codes, leftpad = CODES[name]
    lengths = [3 * page - 5, 2 * page + 1]
    case = Case(target, (2, 3, page, head_dim), 1, lengths=lengths, codes=codes, leftpad=leftpad)
    case.check(SCHEMES["rope"](head_dim), **holes(2, 3, page))


@pytest.mark.parametrize("scheme", ["rerope", "self_extend"])
def test_queries_at_fractions(machine, scheme):
    """Beside keys at whole positions, which the cache does not store."""
    case = Case(BF16, (2, 3, 16, 64), 2, lengths=[43, 33])
    case.check(SCHEMES[scheme](64), queries=torch.tensor([[40.25, 71.5], [-3.75, 90.625]]), **holes(2, 3, 16))


@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_stored_positions_that_are_no_numbers(machine, scheme):
    """In the sequence beside, with tables that lead outside the cache."""
    case = Case(BF16, (2, 3, 16, 32), 2, lengths=[10**9, 37], table=torch.arange(6).view(2, 3))
    axial, slots, results = scheme == "mrope", coordinates(case, 3), []
    rotary, slots = (AXIAL if axial else SCHEMES)[scheme](32), slots if axial else slots[..., 0].contiguous()
    tables = {"page_first": int32([[0] * 3] * 2), "page_lengths": int32([[16] * 3] * 2)}
    for wrong in (False, True):
        if wrong:
            slots[:3] = torch.nan
            slots[1], slots[2] = 3e38, -torch.inf
            case.block_table[0] = int32([2**31 - 1, -7, 1])
            tables["page_first"][0], tables["page_lengths"][0] = int32([-9, 2**31 - 1, 3]), 2**31 - 1
        results.append(
            attention_with_cache(
                case.q, case.k, case.v, rotary, case.seqlens, block_table=case.block_table, slot_positions=slots,
                return_lse=True, impl="triton", num_splits=1, **tables,
            )
        )  # fmt: skip
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[1], b[1])
