"""Tests that the compiled kernels give the same bits in any order of blocks and warps."""

import pytest
import support
import test_reproducible
import torch
from flashrope import Rotary, attention
from flashrope.backends.shared.splits import multiprocessor
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

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


STORED = [(64, 0, 1), (64, 40, 2), (128, 0, 2), (128, 70, 1)]


def stored_scores(machine, monkeypatch, head_dim, window, group, orders) -> None:
    """Checks the gradients when each kernel is launched twice: they are within the budget and have the same bits in
    every order."""
    rotary = Rotary.rope(head_dim).rectify(window) if window else Rotary.rope(head_dim)
    p = support.problem(BF16, rotary, 150, 170, heads=2 * group, group=group, batch=2, seed=4, deterministic=True)
    monkeypatch.setattr(configs, "SCORE_BYTES", 2**14 * 8 * 2 * group)  # 8 panels of 16 KB, 2 sequences
    monkeypatch.setattr(configs, "SCORE_BLOCKS", 0)
    want = None
    for seed in range(orders):
        machine.reset(seed=seed, threads=1 + seed % 3)
        machine.launches.clear()
        found = support.run(p, "triton")
        names = [launch.kernel for launch in machine.launches if "grad_" in launch.kernel]
        assert names == ["attention_grad_kv", "attention_grad_q"] * 2
        assert not any(launch.findings for launch in machine.launches)
        if want is None:
            want = found
            assert max(support.excess(found, *support.exact_and_bound(p), BF16.dtype).values()) <= 1
        assert all(torch.equal(found[name], want[name]) for name in support.NAMES)


@pytest.mark.parametrize(("head_dim", "window", "group"), STORED)
def test_stored_gradients_of_scores(machine, monkeypatch, head_dim, window, group):
    stored_scores(machine, monkeypatch, head_dim, window, group, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "window", "group"), STORED)
def test_stored_gradients_of_scores_in_20_orders(machine, monkeypatch, head_dim, window, group):
    stored_scores(machine, monkeypatch, head_dim, window, group, 20)


PARTS = {
    "half": lambda: Rotary.rope(128),
    "interleaved": lambda: Rotary.hope(128, 64, interleaved=True).local(70),
    "partial": lambda: Rotary.rope(128, rotary_dim=32).log_n(50),
    "padded": lambda: Rotary.rope(96),
    "bands": lambda: Rotary.rope(128).rectify(60),
    "wide": lambda: Rotary.rope(256),
    "wide interleaved": lambda: Rotary.hope(256, 64, interleaved=True),
}


@pytest.mark.parametrize("scheme", PARTS)
def test_forward_in_two_parts_of_the_channels(machine, arch, scheme):
    """With 32 rows of 128 channels per warp, or 16 rows of 256, results are within the budget and bitwise the same in
    every order."""
    if "wide" in scheme and multiprocessor(arch).shared_per_block < 128 * 1024:
        pytest.skip("the tile needs 128 KB of shared memory")
    p = support.problem(BF16, PARTS[scheme](), 150, 170, heads=2, seed=3)
    tile = Tile(128, 32, 4, 2) if p.rotary.head_dim <= 128 else Tile(128, 64, 8, 2)
    exact, results = support.exact_and_bound(p), []
    for seed, threads in ((0, 1), (1, 1), (2, 2)):
        machine.reset(seed=seed, threads=threads)
        machine.launches.clear()
        with torch.no_grad(), tiles.forced("forward", tile):
            out, lse = attention(p.q, p.k, p.v, p.rotary, return_lse=True, impl="triton")
        results.append({"out": out, "lse": lse})
        assert not any(launch.findings for launch in machine.launches)
    assert max(support.excess(results[0], *exact, BF16.dtype).values()) <= 1
    assert all(torch.equal(other[name], x) for other in results[1:] for name, x in results[0].items())
