"""Tests how decoding divides the keys. The choice depends on shapes, and on the resources that the compiled kernel
uses."""

import re
from pathlib import Path

import pytest
from flashrope.backends import cuda
from flashrope.backends.shared.splits import FULL, MULTIPROCESSORS, busy_share, choose_splits, multiprocessor
from flashrope.calls.records import MAX_SPLITS

DECODE_H = (Path(__file__).parents[2] / "csrc" / "decode.h").read_text()
BLOCK_N = 64
PROGRAMS = sorted({batch * heads_kv for batch in range(1, 65) for heads_kv in (1, 2, 5, 8, 32)})
CAPACITIES = [1 << n for n in range(10, 18)] + [1500, 3000, 7777, 100_000]


@pytest.mark.parametrize("multiprocessors", [108, 132])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_device_is_busy(multiprocessors, blocks):
    """The splits keep the device busy for batches of 1 to 64, 1 to 32 KV heads, and 1k to 131k keys."""
    resident = blocks * multiprocessors
    for programs in PROGRAMS:
        for capacity in CAPACITIES:
            tiles = -(-capacity // BLOCK_N)
            splits = choose_splits(programs, tiles, resident)
            assert 1 <= splits <= min(tiles, MAX_SPLITS)
            # One tile per split is the finest division.
            reachable = programs * min(tiles, MAX_SPLITS) >= FULL * resident
            assert busy_share(programs, splits, resident) >= FULL or not reachable, (programs, capacity, splits)


@pytest.mark.parametrize(
    ("programs", "tiles", "resident", "splits"),
    [
        (1, 16, 108, 16),  # too few keys to fill the device: one tile per split
        (8, 2048, 132, 16),  # 128 blocks on 132 multiprocessors, instead of more in two waves
        (128, 2048, 108, 16),  # 2048 blocks in 19 waves; one split would leave 88 SMs idle in the second wave
        (2048, 2048, 108, 1),
        (1, 3, 108, 1),  # not worth a second launch
        (1, 0, 108, 1),
        (1, 100_000, 264, MAX_SPLITS),
    ],
)
def test_examples(programs, tiles, resident, splits):
    assert choose_splits(programs, tiles, resident) == splits


def test_resident_blocks():
    a100 = multiprocessor(80)
    assert a100.resident_blocks(registers=255, shared=0, warps=8) == 1
    assert a100.resident_blocks(registers=128, shared=0, warps=8) == 2
    assert a100.resident_blocks(registers=81, shared=0, warps=8) == 2  # rounded up to 88: units of 256 per warp
    assert a100.resident_blocks(registers=80, shared=0, warps=8) == 3
    assert a100.resident_blocks(registers=128, shared=81 * 1024, warps=8) == 2
    assert a100.resident_blocks(registers=128, shared=82 * 1024, warps=8) == 1
    assert a100.resident_blocks(registers=16, shared=0, warps=1) == 32
    assert multiprocessor(90).resident_blocks(registers=64, shared=110 * 1024, warps=4) == 2


def test_waves_of_a_compute_unit():
    """A SIMD of an AMD GPU has 512 registers per lane and runs at most 8 waves. Registers are allocated in units
    of 8."""
    gpu = multiprocessor("gfx942")
    waves = {registers: gpu.waves(registers) for registers in (1, 64, 65, 72, 73, 128, 129, 256, 512)}
    assert waves == {1: 8, 64: 8, 65: 7, 72: 7, 73: 6, 128: 4, 129: 3, 256: 2, 512: 1}
    assert gpu.resident_blocks(registers=128, shared=16 * 1024, warps=4) == 4
    assert gpu.resident_blocks(registers=129, shared=16 * 1024, warps=4) == 3
    assert gpu.resident_blocks(registers=16, shared=17 * 1024, warps=4) == 3


def test_newer_architectures_take_the_limits_of_the_nearest_older_one():
    assert multiprocessor(87) is MULTIPROCESSORS[86] and multiprocessor(103) is MULTIPROCESSORS[100]
    assert multiprocessor(121) is MULTIPROCESSORS[120]


@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
def test_cuda_fills_the_blocks_that_its_kernel_is_compiled_for(head_dim, monkeypatch):
    def number(function):
        limit, above, else_ = re.search(rf"int {function}\(.*head_dim > (\d+) \? (\d+) : (\d+)", DECODE_H).groups()
        return int(above if head_dim > int(limit) else else_)

    asked = []
    monkeypatch.setattr(cuda, "choose_splits", lambda *args: asked.append(args))
    cuda._default_splits(groups=6, rows=17, capacity=1000, head_dim=head_dim, multiprocessors=108)
    tile = 16 * number("warps_for")
    assert asked == [(12, -(-1000 // tile), 108 * number("blocks_for"))]
