"""The compiled kernels give the same bits in any order of blocks and warps, at any address. Run like ``cases.py``."""

import pytest
import support
import test_reproducible
import torch

from .cases import odd

BF16 = support.Target("triton", torch.bfloat16, "cpu")


@pytest.mark.quick
@pytest.mark.parametrize("elements", [0, 8])
def test_again(machine, elements):
    machine.reset(seed=1)
    want = test_reproducible.results(BF16)
    machine.reset(seed=2, threads=2)
    assert test_reproducible.same(test_reproducible.results(BF16, elements), want)


@pytest.mark.slow
def test_addresses_that_are_no_multiple_of_16(machine):
    """Another kernel, which sums in the same order."""
    p = support.problem(BF16, support.SCHEMES["rerope"](64), 150, seed=1)
    want = support.run(p, "triton")
    far = {name: odd(getattr(p, name)) for name in ("q", "k", "v", "grad_out")}
    got = support.run(p.replace(**far), "triton")
    assert {name for name in support.NAMES if not torch.equal(got[name], want[name])} == set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_orders_of_blocks_and_warps(machine, seed):
    machine.reset(seed=0)
    want = test_reproducible.results(BF16)
    machine.reset(seed=100 + seed, threads=1 + seed % 3)
    assert test_reproducible.same(test_reproducible.results(BF16), want)
