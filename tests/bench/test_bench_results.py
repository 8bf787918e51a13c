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
from bench.report import goals, output, plots, records
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


def test_shapes_of_one_length_have_columns_of_their_own():
    found = [record_of(milliseconds=float(batch), sizes={"batch": batch}) for batch in (8, 32)]
    heading, _, row = page._by_length("one token", found, lambda record: f"{record.milliseconds:.0f} ms")
    assert heading == "| one token | 2,048 x batch 8 | 2,048 x batch 32 |" and row == "| SDPA flash | 8 ms | 32 ms |"


def on_cpu(command="hope", revision="abc", name="A CPU", **device) -> Run:
    found = record_of("flashrope HoPE", ratios={"flashrope RoPE": 1.5}), record_of("flashrope RoPE"), record_of()
    run = run_of(found, command=command, device={"name": name, "threads": 2, "vector": "AVX2"} | device)
    return dataclasses.replace(run, versions=run.versions | {"revision": revision})


@pytest.mark.parametrize("command", ["hope", "cpu"])
def test_rows_of_a_cpu_say_which_kernels(tmp_path, command):
    for folder, device in (("old", {}), ("new", {"kernels": "compiled"})):
        on_cpu(command, **device).write(tmp_path / folder / "cpu", f"{command}-a")
        text = page.page(tmp_path / folder, page.devices(tmp_path / folder))
        kind = device.get("kernels", "composed")
        assert f"| flashrope HoPE, {kind} |" in text and f"| flashrope RoPE, {kind} |" in text
        assert "| SDPA flash |" in text and "batch 1" in text and "| flashrope HoPE |" not in text


def test_the_chart_of_the_cpu(tmp_path, monkeypatch):
    """The chart has one point per length and series. If a length has several windows, the chart shows the one nearest
    to the usual window. It shows only float32, measured without a busy process."""

    def of(table, contestant, seqlen, window, milliseconds, **sizes):
        record = record_of(
            contestant, seqlen, milliseconds=milliseconds, sizes={"window": window, "dtype": "float32"} | sizes
        )
        return dataclasses.replace(record, table=table)

    run = on_cpu("cpu")
    run.records = [
        of("forward, seqlen 2048, window 128", "ReRoPE, compiled", 2048, 128, 3.0),
        of("forward, seqlen 2048, window 512", "ReRoPE, compiled", 2048, 512, 4.0),
        of("forward, seqlen 2048, window 512, bfloat16", "ReRoPE, compiled", 2048, 512, 9.0, dtype="bfloat16"),
        of("forward, seqlen 8192, window 1024", "ReRoPE, compiled", 8192, 1024, 50.0),
        of("forward, seqlen 8192, window 1024", "ReRoPE, two dense matrices", 8192, 1024, 900.0),
        of("forward + backward, seqlen 4096, window 1024", "HoPE, compiled", 4096, 1024, 80.0),
        of("decoding, 2048 keys", "SDPA", 2048, 512, 0.5),
        of("decoding, 2048 keys, beside a busy process", "SDPA", 2048, 512, 7.0),
    ]
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    assert plots.draw_cpu(run, tmp_path / "cpu.png")
    lines = {
        axes.get_title(loc="left"): {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines}
        for axes in drawn[0].axes
    }
    assert lines == {
        "forward: ms": {
            "flashrope ReRoPE": {2048: 4.0, 8192: 50.0},
            "ReRoPE, two score matrices": {8192: 900.0},
        },
        "forward + backward: ms": {"flashrope HoPE": {4096: 80.0}},
        "decoding one token: ms": {"SDPA, no rotation": {2048: 0.5}},
    }
    run.records = []
    assert not plots.draw_cpu(run, tmp_path / "cpu.png")


def test_every_series_of_the_cpu_chart_has_a_colour_and_a_marker_of_its_own():
    looks = [look for _, look in plots.CPU_SERIES.values()]
    for key in ("color", "marker"):
        assert len({look[key] for look in looks}) == len(looks), key


@pytest.mark.parametrize(("contestant", "lengths", "explained"), [
    (page.ROTATED_CACHE, (512, 4096, 8192), True), (page.ROTATED_CACHE, (512, 4096), False), ("SDPA", (1, 2, 3), False),
])  # fmt: skip
def test_the_page_explains_the_line_of_the_rotated_cache_where_the_chart_has_it(contestant, lengths, explained):
    run = on_cpu("cpu")
    run.records = [
        dataclasses.replace(record_of(contestant, length, sizes={"dtype": "float32"}), table=f"decoding, {length} keys")
        for length in lengths
    ]
    assert (page.WHY_IT_JUMPS in page._section(run)) == explained


def test_machine_code_stands_before_cpus_and_after_gpus(tmp_path):
    folder = h200_folder(tmp_path)
    on_cpu().write(folder / "a-cpu", "hope-a")
    text = page.page(folder, page.devices(folder))
    places = [text.index(f"## {title}") for title in ("NVIDIA H200", "Kernels of prefill", "A CPU")]
    assert places == sorted(places)


@pytest.mark.parametrize("kept", ["a log", "run"])
def test_the_page_says_of_what_code_and_file_a_figure_is(tmp_path, kept):
    """Results of a changed tree are on the page, and both the goals and the device's section say so. A goal whose
    figures were read from a log says that."""
    changes = {"low": None, "high": None, "rounds": 0} if kept == "a log" else {}
    run = run_of([record_of("fused RoPE + SDPA flash", 8192, ratios={"flashrope HoPE": 1.4}, **changes)])
    run.versions["revision"] = "abc-dirty"
    run.goals = goals.evaluate(run)
    run.write(tmp_path / "h200", "hope-a")
    text = page.page(tmp_path, page.devices(tmp_path))
    assert f"1.40 at 8,192 (NVIDIA H200, [{kept}](h200/hope-a.json), revision abc with uncommitted changes)" in text
    assert "triton 3.6.0, revision abc with uncommitted changes." in text and "dirty" not in text


def test_results_of_a_changed_tree_are_not_published_by_the_command(monkeypatch, capsys):
    monkeypatch.setattr(machine, "revision", lambda: "abc-dirty")
    monkeypatch.setattr(command_line, "import_module", lambda *names: pytest.fail("it ran"))
    assert command_line.main(["hope", "--publish"]) == 2
    assert "--publish: expected a tree without changes, got abc-dirty" in capsys.readouterr().err


def test_the_published_page_holds_the_results():
    """bench/results/README.md equals the output of python -m bench report for the files in that folder."""
    assert page.main(["--check"]) == 0


def test_recorded_command_does_not_name_the_output_folder():
    words = ["--device", "cpu", "--out", "/home/a", "--seqlens", "8", "--out=/b", "--publish"]
    assert records.command_line("hope", words) == "python -m bench hope --device cpu --seqlens 8"
    run = run_of(argv="python -m bench hope --out bench/results --note 'a note' --seqlens 8")
    assert run.shown_command == "python -m bench hope --seqlens 8"


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


def test_slug():
    assert machine.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
    assert machine.slug("Intel(R) Xeon(R) Processor @ 2.50GHz") == "intel-xeon-processor-2-50ghz"


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


@pytest.mark.parametrize(
    "changes",
    [{"backward": True}, {"sizes": {"causal": False}}, {"sizes": {"head_dim": 64}}, {"sizes": {"dtype": "float16"}}],
    ids=str,
)
def test_goals_count_only_what_they_name(changes):
    run = run_of([record_of(ratios={"flashrope HoPE": 2.0}, **changes)])
    assert goals.evaluate(run, [RATIO])[0]["verdict"] == "not run"
    other = run_of([record_of(ratios={"flashrope HoPE": 2.0})])
    other.device["name"] = "NVIDIA A100"
    assert goals.evaluate(other, [RATIO])[0]["verdict"] == "not run"


def test_goal_of_a_share():
    share = goals.Goal("H200", "decode", "flashrope ReRoPE", "", 0.85, 0.92, min_bytes=256 << 20)
    sizes = {"heads_kv": 8, "decoding": True}
    large, small = (
        record_of("flashrope ReRoPE", seqlen=n, share=at, sizes=sizes) for n, at in ((131072, 0.9), (4096, 0.1))
    )
    [judged] = goals.evaluate(run_of([large, small], command="decode"), [share])
    assert judged["measured"] == {"131072": 0.9} and judged["verdict"] == "floor met"


def test_every_goal_names_contestants_that_there_are():
    gpu = torch.device("cuda")
    there = {"hope": prefill_hope(gpu), "rerope": prefill_rerope(gpu), "decode": decode.contestants(gpu)}
    for goal in goals.GOALS:
        names = {contestant.name for contestant in there[goal.command]}
        assert goal.ours in names and (not goal.peer or goal.peer in names), goal.name


# ---- without a GPU
def test_figure_of_nothing_is_not_drawn(tmp_path):
    assert not plots.draw(run_of(), tmp_path / "a.png") and not plots.draw_scaling(
        run_of(), tmp_path / "a.png", [("t", "x", "y", {})]
    )
