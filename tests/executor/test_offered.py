"""Every offered combination of head_dim, page, type, bit width and positions, on the executor.

By default a sample in which every two values meet; --offered product runs all."""

import support
import torch
from flashrope import Rotary
from placing import Case
from test_decode import cached
from test_quantized import check
from test_stored_positions import holes

from . import offered

SCHEMES = support.SCHEMES | {"rope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 4 * 2)}
LENGTHS = (90, 71)
ENTRIES = 3  # that holes() fills


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
    """New keys are appended, and quantized if the cache is."""
    capacity = -(-96 // page) * page if page else 96
    pads = (3, 5) if case.padded else None
    c = cached(target, rotary, LENGTHS, case.seqlen_q, heads=2, leftpad=pads, capacity=capacity, page_size=page)
    if cache_dtype:
        check(c, target, cache_dtype)
    else:
        c.check(target)


def at_positions(target, rotary, page, cache_dtype, positions, case):
    rows = page or 32
    lengths = [ENTRIES * rows - 5, 2 * rows + 1]
    codes, pads = cache_dtype and offered.CODES[cache_dtype], [0, 2] if case.padded else None
    shape, tables = (2, ENTRIES, rows, rotary.head_dim), {}
    placed = Case(target, shape, case.seqlen_q, heads=(2, 1), lengths=lengths, codes=codes, leftpad=pads)
    if page:
        tables = holes(2, ENTRIES, page)
    else:
        placed = placed.contiguous()
    if positions == "stored":
        generator = torch.Generator().manual_seed(7)
        tables["slot_positions"] = torch.randint(-3, 60, placed.k.shape[:2], generator=generator) * 1.375
    placed.check(rotary, **tables)
