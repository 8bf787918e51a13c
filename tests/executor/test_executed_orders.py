"""The compiled kernels give the same bits in any order of blocks and warps."""

import pytest
import support
import test_reproducible
import torch

BF16 = support.Target("triton", torch.bfloat16, "cpu")


@pytest.mark.parametrize("elements", [0, 8])
def test_again(machine, elements):
    machine.reset(seed=1)
    want = test_reproducible.results(BF16)
    machine.reset(seed=2, threads=2)
    assert test_reproducible.same(test_reproducible.results(BF16, elements), want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_orders_of_blocks_and_warps(machine, seed):
    machine.reset(seed=0)
    want = test_reproducible.results(BF16)
    machine.reset(seed=100 + seed, threads=1 + seed % 3)
    assert test_reproducible.same(test_reproducible.results(BF16), want)
