"""Runs the compiled kernels of cached tokens with explicit positions on the executor."""

import pytest
import support
import torch
from caching import Page
from support import int32
from test_cached_positions import BIG, SEQUENCES, holes
from test_cached_positions import over as over_pages
from test_stored_positions import coordinates, over

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
PAGES = [  # pages have 64 rows, so that a tile of keys lies in one page
    [Page(-70, 50, 7), Page(0, 64), Page(64, 0), Page(90, 30, 30), Page((1 << 22) + 3, 20)],
    [Page(5, 9)],
]
PADDED = [[Page(3), Page(20, 9), Page(40)]] * 2
CHUNK = [[Page(30 * n, 14, 1) for n in range(9)]]
LARGE = dict(sequences=PAGES, page=64)
CASES = {  # (target, scheme, head_dim, queries, num_splits), options
    "rerope-d64-bf16": ((BF16, "rerope", 64, 1, None), dict(new=1)),
    "rerope-one-run-d64-bf16": ((BF16, "rerope", 64, 2, None), dict(new=2, **LARGE)),
    "leaky-one-run-d128-fp16": ((FP16, "leaky", 128, 1, 3), LARGE),
    "local-full-d40-bf16": ((BF16, "local", 40, 2, None), dict(causal=False)),
    "log-n-padded-d16-fp32": ((FP32, "hope_rerope_log_n", 16, 1, None),
                              dict(sequences=PADDED, lengths=[35, 30], leftpad=[5, 18])),
    "chunk-d64-bf16": ((BF16, "rerope", 64, 70, None), dict(sequences=CHUNK)),
    "self-extend-d64-bf16": ((BF16, "self_extend", 64, 2, None), dict(sequences=SEQUENCES)),
    "dual-chunk-one-run-d64-bf16": ((BF16, "dual_chunk", 64, 2, 2), LARGE),
    "self-extend-one-run-d128-bf16": ((BF16, "self_extend", 128, 1, None), LARGE),
}  # fmt: skip
QUICK = ("rerope-d64-bf16", "rerope-one-run-d64-bf16")
FULL = dict(heads=(4, 2))


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if x in QUICK else ()) for x in CASES])
def test_cached(machine, name):
    (target, scheme, head_dim, queries, num_splits), options = CASES[name]
    c = over_pages(target, scheme, queries=queries, head_dim=head_dim, **FULL, **options)
    c.check(num_splits=num_splits)
    kernels = [launch.kernel for launch in machine.launches]
    assert "place_tokens" in kernels and "attention_decode" in kernels


WRONG = [
    [Page(40, BIG, 3), Page(-9, 7, 12), Page(500, BIG, BIG), Page(22, 30, -20), Page(60, 16)],
    [Page(300, -5, 4), Page(200, 16, -3), Page(100, 16), Page(0, -(2**31), BIG)],
]


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_hostile_tables(machine, seqlen_q):
    """The executor watches the bounds of every tensor. A sequence whose tables are right is bitwise unchanged."""
    results = []
    for sequences, lengths in ((SEQUENCES, (41, 71, 28, 2)), (WRONG, (71, 64, 28, 20))):
        sequences = [*sequences[:2], [Page(0), Page(30, 12)], SEQUENCES[3]]
        c = over_pages(BF16, "rerope", sequences, seqlen_q, lengths=lengths, **FULL)
        results.append(c.call(validate=False))
    (out, lse), (got_out, got_lse) = results
    assert torch.equal(out[2], got_out[2]) and torch.equal(lse[2], got_lse[2])


def test_packed(machine):
    """A step, a sequence without rows and chunks give the right results in one call."""
    over_pages(BF16, "rerope", queries=(1, 0, 2, 2), head_dim=64, **FULL).check(num_splits=1)


STORED = {  # (target, scheme, rows of a page, head_dim)
    "mrope-d64-bf16": (BF16, "mrope", 16, 64),
    "mrope-one-run-d128-bf16": (BF16, "mrope_interleaved", 64, 128),
    "rerope-d64-fp16": (FP16, "rerope", 16, 64),
    "leaky-one-run-d64-bf16": (BF16, "leaky", 64, 64),
    "local-d40-fp32": (FP32, "local", 16, 40),
    "dual-chunk-d64-bf16": (BF16, "dual_chunk", 64, 64),
    "self-extend-fp32": (FP32, "self_extend", 16, 32),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if "d64" in x else ()) for x in STORED])
def test_stored_positions(machine, name):
    """Stored positions may be fractions, whole numbers or far from 0, and bands select their keys by these
    positions."""
    target, scheme, page, head_dim = STORED[name]
    c = over(target, scheme, [3 * page - 5, 2 * page + 1], head_dim=head_dim, page=page, **FULL)
    axial = c.rotary.axis
    slots = coordinates(c, 3 if axial else 0, high=40) * 1.375
    c.at(slot_positions=slots, **holes(2, 3, page)).check(validate=False)
    kernels = [launch.kernel for launch in machine.launches]
    assert ("place_slots" in kernels) == (not axial) and "attention_decode" in kernels


CODES = {  # (target, rows of a page, head_dim, left padding)
    "int8-pages-of-16-d64-fp16": (FP16, 16, 64, None),
    "int8-padded-d64-bf16": (BF16, 64, 64, [0, 9]),
    "int8-pages-of-32-d16-fp16": (FP16, 32, 16, None),
    "int8-pages-of-16-d8-bf16": (BF16, 16, 8, None),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if "d64" in x else ()) for x in CODES])
def test_codes(machine, name):
    """Quantized caches with stored positions are right for tiles of 16 keys and for tiles with fewer than four bytes
    per lane. With 16 keys, the product with the weights adds up 16 terms."""
    target, page, head_dim, leftpad = CODES[name]
    lengths, options = [3 * page - 5, 2 * page + 1 - 9 * bool(leftpad)], dict(cache_dtype="int8", leftpad=leftpad)
    c = over(target, "rope", lengths, 1, head_dim, page, **options, **FULL)
    c.at(**holes(2, 3, page)).check(validate=False)


@pytest.mark.parametrize("scheme", ["rerope", "self_extend"])
def test_queries_at_fractions(machine, scheme):
    """Queries at fractional positions are right over a cache without stored positions. Its keys are at whole
    positions."""
    c = over(BF16, scheme, [43, 33], head_dim=64, **FULL)
    c.at(positions=torch.tensor([[40.25, 71.5], [-3.75, 90.625]]), **holes(2, 3, 16)).check(validate=False)


@pytest.mark.parametrize("scheme", ["mrope", "rerope"])
def test_stored_positions_that_are_no_numbers(machine, scheme):
    """Stored positions that are NaN or infinite affect only their own sequence. The tables of that sequence point
    outside the cache."""
    c, results = over(BF16, scheme, [10**9, 37], table=torch.arange(6).view(2, 3), **FULL), []
    slots = coordinates(c, 3 * (scheme == "mrope"))
    tables = {"page_first": int32([[0] * 3] * 2), "page_lengths": int32([[16] * 3] * 2)}
    for wrong in (False, True):
        if wrong:
            slots[:3] = torch.nan
            slots[1], slots[2] = 3e38, -torch.inf
            c.block_table[0] = int32([BIG, -7, 1])
            tables["page_first"][0], tables["page_lengths"][0] = int32([-9, BIG, 3]), BIG
        results.append(c.call(slot_positions=slots, num_splits=1, validate=False, **tables))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[1], b[1])
