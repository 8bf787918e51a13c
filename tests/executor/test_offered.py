"""Runs the offered combinations of head_dim, page, types and positions on the executor.

By default a sample runs that covers every pair of values. --offered product runs all combinations."""

import support
import torch
from caching import Cached
from flashrope import Rotary
from test_cached_positions import holes

from . import offered

SCHEMES = support.SCHEMES | {
    "rope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 4 * 2),
    "rope_behind": lambda d: Rotary.rope(d, rotary_dim=d // 8 * 2, first_channel=d - d // 8 * 2),
}
LENGTHS = (90, 71)
ENTRIES = 3  # block-table entries that holes() fills


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = offered.product() if metafunc.config.getoption("offered") == "product" else offered.sample()
        metafunc.parametrize("case", cases, ids=str)


def test_combination(machine, case):
    head_dim, page, dtype, cache_dtype, positions = case.offered
    target, rotary = support.Target("triton", dtype, "cpu"), SCHEMES[case.scheme](head_dim)
    if positions is None:
        behind_padding(target, rotary, page, cache_dtype, case)
    else:
        at_positions(target, rotary, page, cache_dtype, positions, case)
    kernels = [launch.kernel for launch in machine.launches]
    chunk = case.seqlen_q > 64 and positions is None
    assert ("attention_chunks" if chunk else "attention_decode") in kernels


def behind_padding(target, rotary, page, cache_dtype, case):
    """Checks a call on padded sequences that appends new keys, and quantizes the keys if the cache is quantized."""
    capacity = -(-96 // page) * page if page else 96
    options = dict(heads=(2, 1), leftpad=(3, 5) if case.padded else None, capacity=capacity, page=page)
    Cached(target, rotary, LENGTHS, case.seqlen_q, cache_dtype=cache_dtype, **options).check()


def at_positions(target, rotary, page, cache_dtype, positions, case):
    rows, pads = page or 32, [0, 2] if case.padded else None
    lengths = [ENTRIES * rows - 5, 2 * rows + 1 - 2 * case.padded]
    options = dict(heads=(2, 1), leftpad=pads, page=page, cache_dtype=cache_dtype, capacity=ENTRIES * rows)
    c, tables = Cached(target, rotary, lengths, case.seqlen_q, new=0, layout="poisoned", **options), {}
    if page:
        tables = holes(2, ENTRIES, page)
    if positions == "stored":
        generator = torch.Generator().manual_seed(7)
        tables["slot_positions"] = torch.randint(-3, 60, c.k_cache.shape[:2], generator=generator) * 1.375
    c.at(**tables).check(validate=False)  # positions may decrease
