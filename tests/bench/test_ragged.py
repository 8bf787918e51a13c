"""Tests the simulation of decoding batches of unequal lengths, with times that can be counted by hand."""

import csv
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the commands of bench.compiling import it")

from bench import ragged
from bench.compiling import waves

RESULTS = Path(__file__).resolve().parents[2] / "bench/results/model"
DEVICE = waves.Device("small", 2, 1.0, 100.0)
KERNEL = ragged.Kernel(outside=(10.0, 14.0), passes=(5.0, 8.0), block_n=64, tile_bytes=1.0)


@pytest.mark.parametrize(
    ("blocks", "clocks"),
    [
        ([], 0),
        ([[3]], 10 + 3 * 5),
        ([[0]], 10),  # this split has no keys
        ([[3, 2]], 10 + 15 + 10 + 10),  # the block has two pieces, one after the other
        ([[3], [3]], 25),  # each block has its own multiprocessor
        ([[3], [3], [3]], 14 + 3 * 8),  # two blocks share a multiprocessor
        ([[3]] * 5, 38 + 25),  # the fifth block waits for a place
    ],
)
def test_clocks(blocks, clocks):
    assert ragged.clocks(DEVICE, KERNEL, blocks) == pytest.approx(clocks)


def test_places_are_fixed():
    assert ragged.clocks(DEVICE, KERNEL, [[1], [], [], [1, 1]], places=True) == pytest.approx(30)


def test_bandwidth_is_shared():
    narrow = waves.Device("narrow", 2, 1.0, 0.2)  # two blocks ask for 0.4 bytes per clock
    assert ragged.clocks(narrow, KERNEL, [[3], [3]]) == pytest.approx(10 + 3 * 10)


def test_divisions():
    segments = [5, 5, 0, 2]
    assert ragged.splits(segments, 2) == [[3], [2], [3], [2], [0], [0], [1], [1]]
    assert ragged.items(segments, 2, 3) == [[2, 2, 2], [2, 2], [1, 1]]
    assert ragged.shares([25, 5, 0, 12], 4) == [[10], [11], [4, 5, 1], [11]]
    assert ragged.shares(segments, 4) == [[4], [1, 3], [2, 2]]  # one tile more costs less than a second segment
    assert ragged.shares([4] * 3, 7) == [[2]] * 6  # all segments are cut alike
    assert ragged.shares([1], 7) == [[1]]


def test_the_goal_is_reached():
    """With shares, batches of unequal lengths take at most 1.15 times the time in which the memory delivers the
    keys."""
    with open(RESULTS / ragged.RAGGED, newline="") as lines:
        rows = list(csv.DictReader(lines))
    goals = list(ragged.BATCHES)[:5]
    assert {row["lengths"] for row in rows} == set(ragged.BATCHES)
    assert max(float(row["shares"]) for row in rows if row["lengths"] in goals) <= 1.15
