"""Tests flashrope tune without a GPU: the file of winners, the choice of a tile, what is dropped, the command.

The candidates run in tests/executor/test_executed_tuning.py.
"""

import json
import multiprocessing
import subprocess
import sys
import warnings

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope.backends import tuned_tiles as store
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.backends.triton import launcher
from flashrope.backends.tuned_tiles import Setup, ShapeClass, Winner
from flashrope.cli.main import main
from flashrope.console.progress import Bar
from flashrope.lab.commands import tune as command
from flashrope.lab.tuning import candidates, measure, workloads
from flashrope.lab.tuning.timer import Spread
from flashrope.lab.tuning.workloads import Workload
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

CPU = torch.device("cpu")
SETUP = Setup("NVIDIA Test GPU", 90, "3.6.0", "0.1.0")
FORWARD = ShapeClass("forward", 128, 2, False, "", True, 8192)
WINNER = Winner((64, 128, 8, 2, True), 1.25, 1.5)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """Returns the path of this test's file, in a folder that does not exist yet."""
    path = tmp_path / "cache" / "flashrope" / "tiles.json"
    monkeypatch.setattr(store, "path", lambda: path)
    store.tuned.cache_clear(), tiles.choose.cache_clear()
    yield path
    store.tuned.cache_clear(), tiles.choose.cache_clear()


# ---- the file


def test_winners_are_kept_for_every_setup(file):
    other = SETUP._replace(device="NVIDIA Other GPU", capability=80)
    paged = FORWARD._replace(direction="decode", cache="paged", max_keys=0)
    assert store.tuned() == {}
    store.update(SETUP, {FORWARD: WINNER})
    store.update(other, {FORWARD: WINNER})
    store.update(SETUP, {paged: WINNER, FORWARD: WINNER._replace(milliseconds=1.0)})
    assert (
        store.tuned()
        == store.read(file)
        == {
            SETUP: {FORWARD: WINNER._replace(milliseconds=1.0), paged: WINNER},
            other: {FORWARD: WINNER},
        }
    )
    assert sorted(path.name for path in file.parent.iterdir()) == ["tiles.json", "tiles.lock"]  # nothing temporary


def test_the_file_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.undo()  # restores the real path, which a fixture has replaced
    program = "from flashrope.backends import tuned_tiles; print(tuned_tiles.path())"
    for base, expected in ((tmp_path, tmp_path), ("relative", tmp_path / ".cache"), ("", tmp_path / ".cache")):
        env = {"XDG_CACHE_HOME": str(base), "HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == str(expected / "flashrope" / "tiles.json")


def write(content) -> str:
    return json.dumps(content) if not isinstance(content, str) else content


ROW = [*FORWARD, *WINNER]
UNREADABLE = {
    "no JSON": "{",
    "other JSON": [1, 2],
    "another program's": {"version": 3, "tiles": {}},
    "the format before": {
        "format": "flashrope tiles 1",
        "setups": [{"setup": list(SETUP), "winners": [[*FORWARD, WINNER.tile, "", *WINNER[1:]]]}],
    },
    "bytes": "\udcff",
    "nested": "[" * 100_000,
    "setup": {"format": store.FORMAT, "setups": [{"setup": ["GPU", "90", "3.6.0", "0.1.0"], "winners": []}]},
}
BAD_ROWS = {
    "short": ROW[:-1],
    "long": [*ROW, 1],
    "tile of text": [*ROW[:7], ["64", 128, 8, 2, True], *ROW[8:]],
    "no power of two": [*ROW[:7], [48, 128, 8, 2, True], *ROW[8:]],
    "huge": [*ROW[:7], [64, 4096, 8, 2, True], *ROW[8:]],
    "no warps": [*ROW[:7], [64, 128, 0, 2, True], *ROW[8:]],
    "stages": [*ROW[:7], [64, 128, 8, 99, True], *ROW[8:]],
    "no loop": [*ROW[:7], [64, 128, 8, 2], *ROW[8:]],
    "a loop of text": [*ROW[:7], [64, 128, 8, 2, "True"], *ROW[8:]],
    "class of length": [*ROW[:6], 4096, *ROW[7:]],
    "milliseconds of text": [*ROW[:8], "1.25", *ROW[9:]],
}
UNREADABLE |= {
    name: {"format": store.FORMAT, "setups": [{"setup": list(SETUP), "winners": [ROW, row]}]}
    for name, row in BAD_ROWS.items()
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_ignored_with_one_warning(file, content):
    file.parent.mkdir(parents=True)
    file.write_bytes(write(content).encode("utf-8", "surrogateescape"))
    with pytest.warns(UserWarning, match=r"tiles\.json: ignored, the default tiles are used .*--reset") as caught:
        assert [store.tuned(), store.tuned()] == [{}, {}]
    assert len(caught) == 1
    store.update(SETUP, {FORWARD: WINNER})  # replaces the winner
    assert store.tuned() == {SETUP: {FORWARD: WINNER}}


def test_a_good_file_reads_without_a_warning(file):
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"format": store.FORMAT, "setups": [{"setup": list(SETUP), "winners": [ROW]}]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.tuned() == {SETUP: {FORWARD: WINNER}}


def _update_often(path, name):
    store.path = lambda: path
    for number in range(20):
        store.update(SETUP, {FORWARD._replace(direction=f"{name} {number}"): WINNER})


def test_processes_do_not_lose_each_others_winners(file):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_update_often, args=(file, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        store.read(file)  # a reader never sees half a file
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(store.read(file)[SETUP]) == 40


# ---- the choice


def chosen(direction="forward", keys=4096, grouped=True, cache="", capability=90, num_bands=1, itemsize=2):
    return tiles.choose(direction, CPU, capability, 128, itemsize, num_bands, keys, grouped, cache)


def test_the_winner_of_a_class_serves_its_calls_and_no_others(file):
    store.update(tiles.setup_of(CPU, 90), {FORWARD: WINNER})
    default, short = (configs.tile("forward", 90, 128, 2, 1, max_keys=keys) for keys in (0, 1024))
    assert chosen() == chosen(keys=1025) == chosen(keys=8192) == Tile(64, 128, 8, 2, True) not in (default, short)
    assert chosen(keys=8193) == chosen(cache="paged") == default
    assert chosen(keys=1024) == chosen(grouped=False) == short
    assert chosen(capability=80) == configs.tile("forward", 80, 128, 2, 1)
    assert chosen(num_bands=2) == configs.tile("forward", 90, 128, 2, 2)
    assert chosen(itemsize=4) == configs.tile("forward", 90, 128, 4, 1)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="newer versions of Triton have one tile")
def test_short_sequences_may_have_a_tile_of_their_own():
    short, default = Tile(64, 64, 4, 3), Tile(128, 128, 8, 3, lagged=True)
    assert chosen(keys=1) == chosen(keys=1024) == chosen(keys=8192) == chosen(keys=4096, grouped=False) == short
    assert chosen(keys=8193) == default
    for other in ({"num_bands": 2}, {"cache": "contiguous"}, {"capability": 100}, {"capability": 80}, {"itemsize": 4}):
        assert chosen(keys=1024, **other) == chosen(keys=8193, **other)
    for keys, expected in ((1024, short), (8192, short), (0, default)):
        assert candidates.default(FORWARD._replace(max_keys=keys), 90) == expected


def test_pages_may_have_a_tile_of_their_own():
    shape = FORWARD._replace(block_d=256, cache="paged")
    expected = configs.tile("forward", 80, 256, 2, 1, cache="paged")
    assert tiles.choose("forward", CPU, 80, 256, 2, 1, 4096, True, "paged") == expected
    assert candidates.default(shape, 80) == expected != candidates.default(shape._replace(cache=""), 80)


@pytest.mark.parametrize("field", ["device", "capability", "triton", "flashrope"])
def test_a_winner_of_another_setup_does_not_serve(field):
    setup = tiles.setup_of(CPU, 90)
    other = 80 if field == "capability" else "another"
    store.update(setup._replace(**{field: other}), {FORWARD: WINNER})
    assert chosen() == configs.tile("forward", 90, 128, 2, 1, max_keys=store.max_keys(4096))


def test_a_forced_tile_is_taken_back():
    default = chosen()
    with pytest.raises(RuntimeError), tiles.forced("forward", Tile(16, 16, 1, 1)):
        with tiles.forced("grad_q", Tile(32, 32, 1, 1)):
            assert chosen() == Tile(16, 16, 1, 1) and chosen("grad_q") == Tile(32, 32, 1, 1)
        assert chosen() == Tile(16, 16, 1, 1) != chosen("grad_q")
        raise RuntimeError
    assert chosen() == default


# ---- launches take what was chosen


@pytest.mark.parametrize(
    "workload",
    [
        Workload("forward", 2, 2000, 4, 2, 64, torch.float16),
        Workload("grad_kv", 2, 700, 2, 2, 64, torch.float16, bands=2),
        Workload("grad_q", 1, 9000, 4, 2, 40, torch.float16),
        Workload("decode", 2, 5000, 4, 2, 64, torch.float16, bands=2, cache="paged"),
        Workload("decode", 2, 9000, 4, 4, 128, torch.float16, cache="contiguous"),
        Workload("forward", 1, 5000, 4, 2, 64, torch.float16, cache="paged"),
    ],
    ids=lambda workload: str(workload.shape_class).replace(" ", "-"),
)
def test_every_workload_takes_the_winner_of_its_class(workload, monkeypatch):
    """Records the launches on meta tensors and checks the tile of each."""
    meta, launches = torch.device("meta"), []
    shape, tile = workload.shape_class, Tile(16 if workload.direction == "decode" else 32, 32, 2, 4)
    store.update(tiles.setup_of(meta, 80), {shape: WINNER._replace(tile=tuple(tile))})
    monkeypatch.setattr(
        launcher, "launch", lambda kernel, grid, *_, **options: launches.append((kernel.__name__, options))
    )
    workload.call(meta)()
    kernel = candidates.kernel_of(workload.direction, workload.cache)
    [options] = [options for name, options in launches if name == kernel][-1:]
    assert (options["VARIANT"].block_m, options["VARIANT"].block_n) == tile[:2]
    assert (options["num_warps"], options["num_stages"]) == tile[2:4]


def test_pages_and_rows_hold_the_same_keys():
    paged = Workload("decode", 2, 600, 2, 1, 16, torch.float16, bands=2, cache="paged", num_splits=1)
    rows = paged.replace(cache="contiguous")
    for got, expected in zip(paged.exact(CPU, 96), rows.exact(CPU, 96), strict=True):
        assert torch.equal(got, expected)


# ---- candidates


def outcome(milliseconds, dropped=""):
    spread = milliseconds and Spread(milliseconds, milliseconds, milliseconds)
    return measure.Outcome(Tile(64, 64, 4, round(100 * (milliseconds or 9))), dropped, spread)


@pytest.mark.parametrize(
    ("milliseconds", "winner"),
    [((1.0, 0.9, 0.95), 1), ((1.0, 0.99, 1.2), 0), ((None, 1.2, 1.1), 2), ((None, None), None)],
    ids=["faster", "hardly faster", "default dropped", "none"],
)
def test_the_winner(milliseconds, winner):
    examined = measure.Examined(Workload("forward", 1, 64, 1, 1, 64, torch.float16), list(map(outcome, milliseconds)))
    assert examined.winner is (None if winner is None else examined.outcomes[winner])
    record = examined.record()
    assert (record is None) == (winner is None)
    if record:
        assert record.milliseconds == milliseconds[winner]
        assert record.default_milliseconds == (milliseconds[0] or milliseconds[winner])


def test_a_wrong_row_is_an_error_however_many_are_right():
    exact = torch.randn(2, 300, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrong = exact.clone()
    wrong[1, 299, 3] += 0.1 * exact[1, 299, 3].roll(1)
    assert measure.error(exact, exact) == 0 and 0.04 < measure.error(wrong, exact) < 0.06
    wrong[0, 0, 0, 0] = torch.nan
    assert measure.error(wrong, exact) == torch.inf
    assert measure.error(torch.zeros(2, 4, 300), torch.full((2, 4, 300), 0.5, dtype=torch.float64)) == 0.5


WORKLOAD = Workload("forward", 1, 4096, 2, 1, 64, torch.float16)


def examined(monkeypatch, call, seconds=60.0, group=(WORKLOAD,)):
    """Returns what examine yields if ``call`` is the backend's call and the exact result is all ones."""
    monkeypatch.setattr(Workload, "call", lambda self, device, window=0: call)
    monkeypatch.setattr(Workload, "exact", lambda self, device, window=0: (torch.ones(1, 2, 1, 4).double(),))
    return list(measure.examine(list(group), CPU, seconds, Bar(1), 1))


def right(current):
    return (torch.ones(1, 2, 1, 4),)


def run_with(function):
    """Returns a call that passes the chosen tile to `function`."""
    return lambda: function(chosen_now())


def chosen_now():
    return tiles.choose("forward", CPU, 80, 64, 2, 1, 4096, True)


def test_what_is_dropped_is_named(monkeypatch, capsys):
    monkeypatch.setitem(candidates.GRIDS, "forward", ((64,), (32, 64), (4,), (2, 3)))

    def call(tile):
        if tile == Tile(64, 64, 4, 3):
            raise measure.OutOfResources(200_000, 166_912, "shared memory")
        if tile == Tile(64, 64, 4, 2):
            raise RuntimeError("PassManager::run failed\nmore")
        return (torch.full((1, 2, 1, 4), 3.0 if tile == Tile(64, 32, 4, 2) else 1.0),)

    [found] = examined(monkeypatch, run_with(call))
    assert {each.tile: each.dropped for each in found.outcomes if each.dropped} == {
        Tile(64, 32, 4, 2): "wrong: error 1 against float64",
        Tile(64, 64, 4, 2): "does not run: RuntimeError: PassManager::run failed",
        Tile(64, 64, 4, 3): "needs 200000 of shared memory, this device has 166912",
    }
    assert found.winner.tile in (Tile(64, 32, 4, 3), found.default.tile)
    text = "\n".join(command.report(found))
    assert "dropped 64 x 64, 4 warps, 3 stages: needs 200000 of shared memory" in text


def test_rows_that_a_candidate_leaves_out_do_not_pass(monkeypatch):
    """A candidate that leaves out rows does not pass, although the memory may still hold the right results of an
    earlier candidate."""

    def call(tile):
        out = torch.empty(1, 2, 1, 4)
        return ((out if tile == Tile(64, 32, 4, 2) else out.fill_(1)),)

    monkeypatch.setitem(candidates.GRIDS, "forward", ((64,), (32,), (4,), (2,)))
    [found] = examined(monkeypatch, run_with(call))
    assert [each.dropped for each in found.outcomes] == ["", "wrong: error inf against float64"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_candidate_that_is_wrong_now_and_then_is_dropped(monkeypatch):
    monkeypatch.setitem(candidates.GRIDS, "forward", ((64,), (32,), (4,), (2,)))
    seen = []

    def call(tile):
        seen.append(tile)
        return (torch.full((1, 2, 1, 4), 1.0 + (tile == Tile(64, 32, 4, 2) and seen.count(tile) == 2)),)

    [found] = examined(monkeypatch, run_with(call))
    assert found.outcomes[1].dropped.startswith("wrong")


# ---- what to tune


def test_shapes():
    assert workloads.parse_shape("8x4096x32x8x128") == (8, 4096, 32, 8, 128)
    for text in ("8x4096", "8x4096x32x8xD", "8x4096x32x8x0", "", "8,4096,32,8,128"):
        with pytest.raises(ValueError, match="expected BATCHxSEQLENxHEADSxHEADS_KVxHEAD_DIM"):
            workloads.parse_shape(text)


def test_one_workload_for_each_class():
    found = workloads.chosen(("forward", "backward", "decode", "prefill"), (), torch.bfloat16, (1, 2))
    assert len(found) == len({workload.shape_class for workload in found}) == 6 + 12 + 8 + 8
    shapes = [(1, 2000, 4, 4, 64), (2, 3000, 4, 4, 64), (1, 2000, 4, 2, 64)]
    found = workloads.chosen(("forward",), shapes, torch.float16, (1,))
    assert [(workload.batch, workload.seqlen, workload.heads_kv) for workload in found] == [(1, 2000, 4), (1, 2000, 2)]


def test_the_default_is_a_candidate(monkeypatch):
    monkeypatch.setattr(configs, "tile", lambda *_, **__: Tile(256, 16, 2, 5))
    for direction in candidates.GRIDS:
        found = candidates.candidates_of(FORWARD._replace(direction=direction), 80)
        assert found[0] == Tile(256, 16, 2, 5)
        assert len(found) == len(set(found)) == 1 + len(candidates.tiles(direction))


# ---- the command


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    error = capsys.readouterr().err
    assert error == "flashrope tune: error: no CUDA device was found; tiles are tuned on the GPU that will use them\n"


@pytest.mark.parametrize(
    "words",
    [["--seconds", "0"], ["--jobs", "-1"], ["--passes", "all"], ["--shapes"], ["--show", "--reset"]],
    ids=lambda words: words[0],
)
def test_bad_options(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *words])
    assert stopped.value.code == 2 and words[0] in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["1x2x3", "1x128x3x2x64", "1x128x2x2x512", "1x128x2x2x63"])
def test_bad_shapes(shape, capsys):
    args = command_args("--shapes", shape)
    assert command.tune(CPU, args) == 2
    assert capsys.readouterr().err.startswith("flashrope tune: error: --shapes: ")


def command_args(*words):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_winners_are_stored_shown_and_removed(monkeypatch, capsys, file):
    monkeypatch.setitem(candidates.GRIDS, "forward", ((64,), (32,), (4,), (2,)))
    fast = Tile(64, 32, 4, 2)
    monkeypatch.setattr(
        measure, "race", lambda w, choices, *_: {c: Spread(1, 0.5 if c == fast else 2.0, 3) for c in choices}
    )
    monkeypatch.setattr(Workload, "call", lambda self, device, window=0: lambda: (torch.ones(1, 2, 1, 4),))
    monkeypatch.setattr(Workload, "exact", lambda self, device, window=0: (torch.ones(1, 2, 1, 4).double(),))
    assert command.tune(CPU, command_args("--passes", "forward", "--bands", "1", "--shapes", "1x4096x2x1x64")) == 0
    said = capsys.readouterr()
    name = "forward, head_dim 64, 16 bit, one band, no cache, grouped heads, up to 8,192 keys"
    assert f"{name}: 64 x 32, 4 warps, 2 stages, 0.500 ms, default 2.000 ms" in said.out
    assert f"{name}: compiling" in said.err and str(file) in said.out
    assert chosen_now() == fast
    for words in (["tune", "--show"], ["info"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert f"    {name}: 64 x 32, 4 warps, 2 stages, 0.500 ms, default 2.000 ms" in said
        assert "  cpu, 8.0, triton " in said
    assert main(["tune", "--reset"]) == 0 and capsys.readouterr().out == f"removed {file}\n" and not file.exists()
    assert main(["tune", "--show"]) == 0 and capsys.readouterr().out == f"no tuned tiles ({file})\n"
    assert main(["tune", "--reset"]) == 0 and capsys.readouterr().out == f"there was no {file}\n"


def test_a_folder_that_cannot_be_written(monkeypatch, capsys, file):
    file.parent.parent.mkdir(parents=True)
    file.parent.write_text("a file")
    monkeypatch.setattr(measure, "examine", lambda *_: iter([measure.Examined(WORKLOAD, [outcome(1.0), outcome(0.5)])]))
    assert command.tune(CPU, command_args("--passes", "forward")) == 2
    assert "cannot be written" in capsys.readouterr().err
