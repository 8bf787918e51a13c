"""Tests the records of a benchmark, and the files, figures, goals and the page that are made from records."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

from bench import __main__ as command_line
from bench import machine
from bench import results_page as page
from bench.report import goals, output, records
from bench.report.records import Record, Run
from bench.speed import decode
from bench.speed.contestants import prefill_hope, prefill_rerope
from bench.speed.problem import Problem

CPU = torch.device("cpu")


def run_of(records=(), **changes) -> Run:
    device = {"name": "NVIDIA H200", "hardware": "NVIDIA H200, 139 GiB", "cache_bytes": 0}
    versions = {"revision": "abc", "torch": "2.13.0", "triton": "3.6.0", "cuda": "13.0", "python": "3.11"}
    return dataclasses.replace(
        Run(
            "hope",
            "python -m bench hope",
            device,
            versions,
            {"product_tflops": 700.0, "copy_gbs": 4000.0, "read_gbs": 4200.0},
            list(records),
        ),
        **changes,
    )


def record_of(contestant="SDPA flash", seqlen=2048, backward=False, **changes) -> Record:
    sizes = Problem(1, seqlen, 16, 16, 128, torch.bfloat16, CPU).sizes()
    fields = {
        "ours": contestant.startswith("flashrope"),
        "milliseconds": 2.0,
        "low": 1.9,
        "high": 2.2,
        "rounds": 10,
        "tflops": 500.0,
        "ceiling": "product_tflops",
        "share": 0.7,
    } | changes
    return Record(f"seqlen {seqlen}", contestant, sizes=sizes | fields.pop("sizes", {}), backward=backward, **fields)


# ---- files
def test_files_round_trip(tmp_path):
    run = run_of(
        [record_of(ratios={"flashrope HoPE": 1.25}), record_of("flashrope HoPE", peak_bytes=1 << 20)],
        absent={"x": "y"},
        note="a note",
    )
    run.write(tmp_path, "hope-a")
    assert records.read(tmp_path / "hope-a.json") == run
    head, first, second = (tmp_path / "hope-a.csv").read_text().splitlines()
    columns = dict(zip(head.split(","), first.split(","), strict=True))
    assert (columns["contestant"], columns["milliseconds"], columns["time / flashrope HoPE"]) == (
        "SDPA flash",
        "2",
        "1.25",
    )
    assert dict(zip(head.split(","), second.split(","), strict=True))["peak_bytes"] == "1048576"
    assert not list(tmp_path.glob("*.partial"))
    for text in ("{", "[]", json.dumps({"records": [{"a": 1}]})):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match="broken.json: not the results of a run"):
            records.read(tmp_path / "broken.json")


@pytest.mark.parametrize("name", ["revision", "torch", "triton", "cuda", "device"])
def test_versions_are_not_mixed(tmp_path, name):
    one = run_of([record_of()])
    changed = (
        {"device": one.device | {"name": "NVIDIA A100"}}
        if name == "device"
        else {"versions": one.versions | {name: "other"}}
    )
    other = dataclasses.replace(one, **changed)
    records.check_comparable([one, run_of()])
    with pytest.raises(ValueError, match=f"runs of different {name} cannot be combined"):
        records.check_comparable([one, other])
    one.write(tmp_path / "device", "hope-a")
    other.write(tmp_path / "device", "hope-b")
    with pytest.raises(ValueError, match=f"different {name}"):
        page.devices(tmp_path)


def h200_folder(tmp_path) -> Path:
    """Returns a folder of results: one run on an H200, and a table of the gate."""
    measured = [
        record_of("fused RoPE + SDPA flash", ratios={"flashrope HoPE": 1.234}),
        record_of("fused RoPE + SDPA flash", 8192, ratios={"flashrope HoPE": 1.5}),
        record_of("flashrope HoPE", milliseconds=1.62),
    ]
    run = run_of(measured, absent={"flash-attn 2": "not installed"}, skipped=["seqlen 9: a peer: needs 5 GiB"])
    run.device["multiprocessors"] = 132
    run.goals = goals.evaluate(run)
    run.write(tmp_path / "nvidia-h200", "hope-d128-h16x16-bf16")
    (tmp_path / page.COMPILED).mkdir()
    row = {"revision": "abc", "triton": "3.6.0"} | dict.fromkeys(page.COLUMNS, "7")
    row |= {"kernel": "attention_forward", "scheme": "rope +1"}
    with open(tmp_path / page.COMPILED / "gate.csv", "w") as file:
        for words in (row, row.values(), (row | {"scheme": "rope paged chunk"}).values()):
            file.write(",".join(words) + "\n")
    return tmp_path


def test_page_holds_what_the_files_hold(tmp_path, capsys):
    folder = h200_folder(tmp_path)
    words = ["--results", str(folder)]
    assert page.main([*words, "--check"]) == 1 and not (folder / "README.md").exists()
    assert page.main([*words, "--figures"]) == 0 and page.main([*words, "--check"]) == 0
    text = (folder / "README.md").read_text()
    assert "| forward, ms (ratio to flashrope HoPE) | 2,048 x batch 1 | 8,192 x batch 1 |" in text
    assert "| fused RoPE + SDPA flash | 2 (1.23) | 2 (1.50) |" in text and "| flashrope HoPE | 1.62 | – |" in text
    goal = "| H200: flashrope HoPE against fused RoPE + SDPA flash, forward | 1.15 | 1.6 | "
    source = "(NVIDIA H200, [run](nvidia-h200/hope-d128-h16x16-bf16.json), revision abc)"
    assert f"{goal}1.23 at 2,048, 1.50 at 8,192 {source}: floor met |" in text
    assert text.count("| not run |") == len(goals.GOALS) - 1
    assert "Not run: flash-attn 2 (not installed)." in text and "Skipped: seqlen 9: a peer: needs 5 GiB." in text
    assert "![HoPE and RoPE](nvidia-h200/hope-d128-h16x16-bf16.png)" in text
    assert (folder / "nvidia-h200" / "hope-d128-h16x16-bf16.png").exists()
    assert text.count("| attention_forward | 7 |") == 1 and "(compiled/gate.csv)" in text
    (folder / "README.md").write_text("old")
    assert page.main([*words, "--check"]) == 1 and (folder / "README.md").read_text() == "old"
    (folder / page.COMPILED / "gate.csv").write_text("no,such\n1,2\n")
    assert page.main(words) == 1 and "was not regenerated" in capsys.readouterr().out


def on_cpu(command="hope", revision="abc", name="A CPU", **device) -> Run:
    found = record_of("flashrope HoPE", ratios={"flashrope RoPE": 1.5}), record_of("flashrope RoPE"), record_of()
    run = run_of(found, command=command, device={"name": name, "threads": 2, "vector": "AVX2"} | device)
    return dataclasses.replace(run, versions=run.versions | {"revision": revision})


def test_results_of_a_changed_tree_are_not_published_by_the_command(monkeypatch, capsys):
    monkeypatch.setattr(machine, "revision", lambda: "abc-dirty")
    monkeypatch.setattr(command_line, "import_module", lambda *names: pytest.fail("it ran"))
    assert command_line.main(["hope", "--publish"]) == 2
    assert "--publish: expected a tree without changes, got abc-dirty" in capsys.readouterr().err


def test_the_published_page_holds_the_results():
    """bench/results/README.md equals the output of python -m bench report for the files in that folder."""
    assert page.main(["--check"]) == 0


def test_publishing_writes_the_page(monkeypatch):
    ran, codes = [], {"speed.all": 0, "speed.cpu": 1, "results_page": 0}

    def module(name, package):
        return SimpleNamespace(main=lambda words: ran.append((name[1:], words)) or codes[name[1:]])

    monkeypatch.setattr(command_line, "import_module", module)
    monkeypatch.setattr(machine, "revision", lambda: "abc")
    for publish, folder in ((True, output.RESULTS), (False, None)):
        assert output.output_folder(SimpleNamespace(publish=publish, out=None)) == folder
    assert command_line.main(["all", "--publish"]) == 0 and command_line.main(["all"]) == 0
    assert command_line.main(["cpu", "--publish"]) == 1  # nothing is published after a failure
    assert ran == [
        ("speed.all", ["--publish"]),
        ("results_page", []),
        ("speed.all", []),
        ("speed.cpu", ["--publish"]),
    ]


# ---- goals
RATIO = goals.Goal("H200", "hope", "flashrope HoPE", "SDPA flash", 1.0, {2048: 1.5, 8192: 1.2})


@pytest.mark.parametrize(
    ("ratios", "verdict", "worst"),
    [
        ({2048: 1.5, 8192: 1.2}, "met", 1.2),
        ({2048: 1.4, 8192: 1.2}, "floor met", 1.2),
        ({2048: 1.5, 8192: 0.99}, "MISSED", 0.99),
        ({2048: 1.6, 4096: 1.4}, "floor met", 1.4),  # between two lengths, the aim of the shorter length holds
        ({1024: 9.0}, "not run", None),
        ({}, "not run", None),
    ],
)
def test_goals(ratios, verdict, worst):
    run = run_of(record_of(seqlen=seqlen, ratios={"flashrope HoPE": ratio}) for seqlen, ratio in ratios.items())
    [judged] = goals.evaluate(run, [RATIO])
    assert (judged["verdict"], judged["worst"]) == (verdict, worst)
    assert goals.text([judged]).count(verdict) == (0 if verdict == "not run" else 1)


def test_every_goal_names_contestants_that_there_are():
    gpu = torch.device("cuda")
    there = {"hope": prefill_hope(gpu), "rerope": prefill_rerope(gpu), "decode": decode.contestants(gpu)}
    for goal in goals.GOALS:
        names = {contestant.name for contestant in there[goal.command]}
        assert goal.ours in names and (not goal.peer or goal.peer in names), goal.name


# ---- without a GPU
