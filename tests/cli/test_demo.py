"""Tests flashrope demo with models so small that they learn almost nothing."""

import contextlib
import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from flashrope import Rotary
from flashrope.cli.main import main
from flashrope.lab.commands.demo import TIMES
from flashrope.lab.small_models import data
from flashrope.lab.small_models.evaluate import loss_by_context
from flashrope.lab.small_models.model import load_checkpoint
from flashrope.schemes.fitting import dual_chunk_for

TINY = ["demo", "--preset", "tiny", "--device", "cpu", "--threads", "1"]
FEW = [*TINY, "--schemes", "rerope"]  # for runs on the text; the run on the standard library compares all schemes
OUTPUTS = {"split.json", "rope.safetensors", "hope.safetensors", "losses.csv", "losses.md", "losses.png"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns a file of 20,000 bytes."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(900))[:20_000])
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a finished tiny run on the standard library."""
    out = tmp_path_factory.mktemp("demo") / "out"
    assert main([*TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def of_text(tmp_path_factory, text):
    """Returns the folder of a finished tiny run on the text, and what the run printed."""
    out, printed = tmp_path_factory.mktemp("demo") / "two words", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*FEW, "--text", str(text), "--out", str(out)]) == 0
    return out, printed.getvalue()


def rows(out):
    with open(out / "losses.csv", newline="") as file:
        return list(csv.DictReader(file))


# ---- the command, end to end


def test_writes_every_result(finished):
    assert {path.name for path in finished.iterdir()} == OUTPUTS
    table = rows(finished)
    names = ["RoPE", "HoPE", "ReRoPE-w16", "HoPE, ReRoPE-w16", "Leaky ReRoPE-w16", "CoPE", "Self-Extend-w16"]
    expected = {
        (name + log_n, str(length)) for name in names for log_n in ("", " + log n") for length in (32, 64, 128, 256)
    }
    assert len(table) == len(expected) and {(row["scheme"], row["context_length"]) for row in table} == expected
    for row in table:
        for column in ("loss", "loss_stderr", "loss_all_bytes"):
            assert math.isfinite(float(row[column])) and float(row[column]) > 0
        assert row["trained_with"] == ("hope" if row["scheme"].startswith("HoPE") else "rope")
    markdown = (finished / "losses.md").read_text()
    assert all(f"{float(row['loss']):.3f}" in markdown for row in table)
    assert "\n- left out: DCA: dual_chunk: expected a training length above 128" in markdown
    assert "rotate less; Self-Extend-w16: window 16, groups of 16; log n" in markdown
    assert "trained: RoPE" in markdown and "tokens/s" not in markdown


def test_the_schemes_that_are_compared():
    from flashrope.lab.small_models.comparison import compared
    from flashrope.lab.small_models.presets import PRESETS

    for name in ("cpu", "gpu"):
        length, rope = PRESETS[name].train_length, Rotary.rope(32)
        schemes, left_out = compared(32, length, length // 2)
        found = {scheme.name: scheme for scheme in schemes}
        assert not left_out and len(found) == 16
        rerope = f"ReRoPE-w{length // 2} + log n"
        assert found[rerope].rotary == rope.rectify(length // 2).log_n(length) and found[rerope].trained_with == "rope"
        hope = found[f"HoPE, {rerope}"]
        assert hope.rotary == Rotary.hope(32, length).rectify(length // 2).log_n(length)
        assert hope.trained_with == "hope"
        assert found["CoPE"].rotary == rope.cope(length) and found["CoPE"].trained_with == "rope"
        assert found[f"Self-Extend-w{length // 2}"].rotary == rope.self_extend(length // 2, 16)
        assert found["DCA + log n"].rotary == rope.dual_chunk(*dual_chunk_for(length)).log_n(length)
    schemes, left_out = compared(32, 64, 13)
    assert set(left_out) == {"DCA"} and "Self-Extend-w13" in [scheme.name for scheme in schemes]
    assert set(compared(32, 16, 3)[1]) == {"DCA", "Self-Extend-w3"}
    found = {scheme.name: scheme.rotary for scheme in compared(32, 64, 32, ["yarn", "rerope"])[0]}
    names = "RoPE", "HoPE", "YaRN", "ReRoPE-w32", "HoPE, ReRoPE-w32"
    assert set(found) == {name + log_n for name in names for log_n in ("", " + log n")}
    assert found["YaRN"] == Rotary.rope(32).yarn(8.0, 64) and found["ReRoPE-w32"] == Rotary.rope(32).rectify(32)


def test_checkpoints_give_the_losses_of_the_table(finished):
    record = json.loads((finished / "split.json").read_text())
    corpus = data.standard_library(257)
    assert record == json.loads(json.dumps(corpus.record()))
    windows = data.as_tokens(data.unseen_windows(corpus.unseen, 257, 8, seed=0))
    rectified = lambda rotary: rotary.rectify(16).log_n(32)  # noqa: E731
    for name, trained_with, change in (
        ("HoPE", "hope", lambda rotary: rotary),
        ("ReRoPE-w16 + log n", "rope", rectified),
        ("HoPE, ReRoPE-w16 + log n", "hope", rectified),
        ("CoPE", "rope", lambda rotary: rotary.cope(32)),
        ("Self-Extend-w16", "rope", lambda rotary: rotary.self_extend(16, 16)),
    ):
        model, rotary = load_checkpoint(finished / f"{trained_with}.safetensors")
        shown = [float(row["loss"]) for row in rows(finished) if row["scheme"] == name]
        losses = loss_by_context(model, change(rotary), windows, [32, 64, 128, 256], 16)
        assert [loss.last for loss in losses] == pytest.approx(shown, abs=2e-6)


@pytest.mark.slow
def test_losses_depend_on_the_seed_and_not_on_the_processes(of_text, tmp_path, text):
    def run(name, *options):
        assert main([*FEW, "--text", str(text), "--out", str(tmp_path / name), *options]) == 0
        return (tmp_path / name / "losses.csv").read_text()

    first, before = (of_text[0] / "losses.csv").read_text(), torch.get_num_threads()
    assert run("processes", "--threads", "2") == first
    assert torch.get_num_threads() == before
    assert run("second seed", "--seed", "1") != first


def test_trains_on_the_text_given(of_text):
    out, printed = of_text
    assert "numbers.txt; 17,944 bytes to train on" in printed and f"time:      preset tiny: {TIMES['tiny']}" in printed
    assert json.loads((out / "split.json").read_text())["unseen"]["files"] == ["numbers.txt, bytes 17944 to 20000"]


@pytest.mark.parametrize(
    "moment, stream, wait",
    [
        pytest.param("software:", "stdout", 1, id="starting"),
        pytest.param("training with", "stderr", 5, id="training", marks=pytest.mark.slow),
    ],
)
def test_interrupt_ends_cleanly(tmp_path, text, moment, stream, wait):
    command = [sys.executable, "-m", "flashrope", *TINY[:-1], "2", "--steps", "100000"]
    command += ["--text", str(text), "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not getattr(process, stream).readline().startswith(moment):
            assert process.poll() is None, process.stderr.read()
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGINT)  # like a terminal, which sends the signal to the workers too
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "flashrope: interrupted" in errors and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["split.json"]
    deadline = time.monotonic() + 10
    while True:  # waits until no worker is left
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--text", "nowhere/at/all"], "nowhere/at/all: no such file or folder"),
        (["--train-length", "4096"], "expected at least 524,304 bytes for windows of"),
        (["--train-length", "4"], "--train-length: expected at least 16, got 4"),
        (["--width", "33"], "width: expected heads = 2 times a multiple of 8, got 33"),
        (["--device", "cuda:99"], "--device: got cuda:99, but torch"),
        (["--device", "abacus"], "--device: expected auto, cpu, cuda or cuda:N, got abacus"),
    ],
)
def test_bad_input_is_one_line(tmp_path, text, capsys, options, message):
    assert main([*TINY, "--text", str(text), "--out", str(tmp_path / "out"), *options]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_earlier_run_is_replaced_only_when_asked(of_text, tmp_path, text, capsys):
    out = tmp_path / "out"
    shutil.copytree(of_text[0], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = [*FEW, "--text", str(text), "--steps", "2", "--out", str(out)]
    assert main([*again, "--preset", "cpu"]) == 2  # other sizes are refused as well
    assert main(again) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 2 and "--out: expected a folder without results, got" in errors
    assert "rope.safetensors, hope.safetensors" in errors and "add --overwrite" in errors
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert main([*again, "--overwrite"]) == 0
    assert "time:      preset tiny with other sizes; the time left is shown" in capsys.readouterr().out
    assert (out / "rope.safetensors").read_bytes() != before["rope.safetensors"]
    for name in OUTPUTS - {"split.json"}:
        (out / name).unlink()
    assert main(again) == 0  # an interrupted run leaves only split.json


# ---- the command line


@pytest.mark.parametrize(
    "arguments, instead",
    [(["bench", "decode"], "python -m bench"), (["experiment", "zoo", "--seeds", "3"], "python -m experiments")],
)
def test_commands_of_the_checkout_are_named(capsys, arguments, instead):
    assert main([]) == 2 and capsys.readouterr()
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors == (
        f"flashrope: error: {arguments[0]!r} is not part of the installed package; "
        f"in a checkout of the repository, run {instead}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected", "given"),
    [
        (["dema"], "'demo', 'generate'", "'dema'"),
        (["demo", "--preset", "big"], "'tiny', 'cpu', 'gpu'", "'big'"),
        (["demo", "--steps", "-3"], "a positive integer", "got -3"),
        (["demo", "--step", "3"], "(did you mean --steps?); the options are", "unknown option --step"),
        (["demo", "--step", "3"], "--train-length", "unknown option --step"),
    ],
)
def test_wrong_words_name_the_right_ones(capsys, arguments, expected, given):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (arguments[1] if arguments[1:] else "command") in said and expected in said and given in said


def test_info_says_why_a_backend_cannot_serve(capsys, monkeypatch):
    monkeypatch.setattr("flashrope.backends.triton.unsupported_reason", lambda q, cached=False: "no such luck")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert "triton    no such luck" in shown and "cpu       default" in shown and "reference available" in shown
