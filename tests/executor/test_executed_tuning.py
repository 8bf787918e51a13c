"""Tests flashrope tune with the executor as the device: candidates run, wrong candidates are dropped and named, winners
are used.

Times mean nothing here.
"""

import argparse

import pytest
import support
import torch
from flashrope.backends import tuned_tiles as store
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.lab.commands import tune as command
from flashrope.lab.tuning import candidates, measure
from flashrope.lab.tuning.timer import Spread
from flashrope.lab.tuning.workloads import Workload
from flashrope.triton_kernels.configs import Tile

pytestmark = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")
CPU = torch.device("cpu")
BF16 = support.Target("triton", torch.bfloat16, "cpu")
GRIDS = {
    "forward": ((64,), (32, 64), (4,), (2,)),
    "grad_kv": ((32,), (64,), (4,), (2,)),
    "grad_q": ((64,), (32,), (4,), (2,)),
    "grad_qkv": ((32,), (64,), (4,), (2,)),
    "decode": ((16,), (32,), (4,), (2,)),
}
SMALL, OTHER = Tile(64, 32, 4, 2), Tile(64, 64, 4, 2)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "path", lambda: tmp_path / "tiles.json")
    for direction, grid in GRIDS.items():
        monkeypatch.setitem(candidates.GRIDS, direction, grid)
    store.tuned.cache_clear(), tiles.choose.cache_clear()
    yield tmp_path / "tiles.json"
    store.tuned.cache_clear(), tiles.choose.cache_clear()


def tune(*words) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.tune(CPU, parser.parse_args([*words, "--jobs", "1"]))


def test_the_winner_serves_and_wrong_candidates_are_dropped(machine, arch, monkeypatch, capsys, file):
    """The winner is used, and a wrong candidate is dropped and named. The wrong candidate's kernel leaves the
    exponential out. Among the other candidates, SMALL is made the fastest."""

    def rewrite(name, text):
        if name != "attention_forward" or tiles._forced.get("forward") != OTHER:
            return text
        return text.replace("ex2.approx.ftz.f32", "mov.f32")

    machine.rewrite = rewrite
    monkeypatch.setattr(
        measure, "race", lambda w, choices, *_: {c: Spread(1.0, 0.5 if c == SMALL else 2.0, 3.0) for c in choices}
    )
    try:
        assert tune("--passes", "forward", "--bands", "2", "--shapes", "1x150x2x1x64") == 0
    finally:
        machine.rewrite = None
    said = capsys.readouterr().out
    assert "  dropped 64 x 64, 4 warps, 2 stages: wrong: error" in said and said.count("dropped") == 1
    shape = Workload("forward", 1, 150, 2, 1, 64, torch.bfloat16, bands=2).shape_class
    [(setup, winners)] = store.read(file).items()
    assert (setup.device, setup.capability) == ("cpu", arch)
    assert {of: winner.tile for of, winner in winners.items()} == {shape: SMALL}

    machine.launches.clear()
    support.check(BF16, support.problem(BF16, support.SCHEMES["rerope"](64), 150, seed=1))
    forward = next(launch for launch in machine.launches if launch.kernel == "attention_forward")
    assert forward.grid[0] == 3 * 2  # 3 tiles of 64 rows for each of 2 heads


@pytest.mark.parametrize(
    "words",
    [
        ("--passes", "backward", "--bands", "2", "--shapes", "1x150x2x1x64"),
        ("--passes", "atomic", "--bands", "1", "2", "--shapes", "1x150x2x1x64"),
        ("--passes", "decode", "--bands", "1", "--shapes", "2x400x2x2x64", "--dtype", "fp16"),
        pytest.param(("--passes", "prefill", "--bands", "2", "--shapes", "1x200x2x1x40"), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[1],
)
def test_all_candidates_are_right(machine, words, capsys, file):
    assert tune(*words) == 0
    said = capsys.readouterr().out
    assert "dropped" not in said and "not reached" not in said
    [winners] = store.read(file).values()
    assert len(winners) == 2 and all(winner.milliseconds > 0 for winner in winners.values())


def test_a_candidate_that_needs_too_much_shared_memory_is_dropped(machine, arch, monkeypatch, capsys):
    monkeypatch.setitem(candidates.GRIDS, "forward", ((128,), (128,), (8,), (4,)))
    assert tune("--passes", "forward", "--bands", "1", "--shapes", "1x150x1x1x256") == 0
    assert "  dropped 128 x 128, 8 warps, 4 stages: needs " in capsys.readouterr().out
