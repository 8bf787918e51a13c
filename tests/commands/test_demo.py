"""flashrope demo and its parts, with models so small that they learn almost nothing."""

import contextlib
import csv
import io
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from flashrope import Rotary, attention
from flashrope.commands.demo import TIMES
from flashrope.commands.main import main
from flashrope.rotary.fitting import dual_chunk_for
from flashrope.small_models import data
from flashrope.small_models.evaluate import loss_by_context
from flashrope.small_models.model import LanguageModel, ModelConfig, load_checkpoint, save_checkpoint
from flashrope.small_models.train import TrainConfig, learning_rate_fraction, train
from flashrope.small_models.workers import WorkerError, Workers, _interrupts_held

TINY = ["demo", "--preset", "tiny", "--device", "cpu", "--threads", "1"]
FEW = [*TINY, "--schemes", "rerope"]  # of the text; the run of the standard library compares all
OUTPUTS = {"split.json", "rope.safetensors", "hope.safetensors", "losses.csv", "losses.md", "losses.png"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 20,000 bytes."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(900))[:20_000])
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished tiny run on the standard library."""
    out = tmp_path_factory.mktemp("demo") / "out"
    assert main([*TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def of_text(tmp_path_factory, text):
    """The folder of a finished tiny run on the text, and what the run printed."""
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


def test_a_training_that_says_nothing_of_speed_names_none():
    """A first second of start-up, or other processes beside one of the models, would read as its being slower."""
    from flashrope.small_models.demo import trained_text
    from flashrope.small_models.train import Trained

    def text(*seconds, comparable=True):
        return trained_text([Trained(1.5, each, 1000.0) for each in seconds], comparable)

    assert "tokens/s" not in text(3.0, 50.0) and "RoPE 1.500 nats per byte" in text(3.0, 50.0)
    assert text(30.0, 50.0).count("1,000 tokens/s") == 2
    assert "tokens/s" not in text(30.0, 50.0, comparable=False)


def test_the_schemes_that_are_compared():
    from flashrope.small_models.demo import compared
    from flashrope.small_models.presets import PRESETS

    for name in ("cpu", "gpu"):
        length, rope = PRESETS[name].train_length, Rotary.rope(32)
        schemes, left_out = compared(32, length, length // 2, 16.0, 10_000.0)
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
    schemes, left_out = compared(32, 64, 13, 16.0, 10_000.0)
    assert set(left_out) == {"DCA"} and "Self-Extend-w13" in [scheme.name for scheme in schemes]
    assert set(compared(32, 16, 3, 16.0, 10_000.0)[1]) == {"DCA", "Self-Extend-w3"}
    found = {scheme.name: scheme.rotary for scheme in compared(32, 64, 32, 16.0, 10_000.0, ["yarn", "rerope"])[0]}
    names = "RoPE", "HoPE", "YaRN", "ReRoPE-w32", "HoPE, ReRoPE-w32"
    assert set(found) == {name + log_n for name in names for log_n in ("", " + log n")}
    assert found["YaRN"] == Rotary.rope(32).yarn(8.0, 64) and found["ReRoPE-w32"] == Rotary.rope(32).rectify(32)


def test_png_is_an_image_with_something_on_it(finished):
    from matplotlib.image import imread

    image = imread(finished / "losses.png")
    assert image.shape[:2] == (1000, 1600)
    assert len({tuple(pixel) for pixel in image[::4, ::4, :3].reshape(-1, 3).round(2).tolist()}) > 20


def test_the_figure_has_at_most_six_curves(finished):
    from flashrope.small_models.evaluate import ContextLoss
    from flashrope.small_models.plot import losses_figure
    from flashrope.small_models.table import Row

    of: dict[str, list] = {}
    for row in rows(finished):
        of.setdefault(row["scheme"], []).append(ContextLoss(int(row["context_length"]), float(row["loss"]), 0.0, 0.0))
    made = [Row(name, "rope", "log n" in name, tuple(losses)) for name, losses in of.items()]
    (axes,) = losses_figure(made, 32).axes
    drawn = [text.get_text() for text in axes.texts]
    assert len(made) > 6 and len(axes.lines) == 6 + 1  # and the training length
    assert [name for name in of if any(text.startswith(f"{name}  ") for text in drawn)] == list(of)[:6]
    assert f"all {len(made)} rows: losses.md" in " ".join(drawn)


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


@pytest.mark.slow  # test_generate.py has it for a faster command
def test_closed_stdout_gives_no_traceback(tmp_path, text):
    command = [sys.executable, "-m", "flashrope", *TINY, "--text", str(text), "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in errors and "Exception ignored" not in errors


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
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does it: to the workers too
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted after" in errors and "Traceback" not in errors
    assert "Written to" in errors and "split.json. Not written: rope.safetensors" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["split.json"]
    deadline = time.monotonic() + 10
    while True:  # no worker is left
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
        (["--impl", "triton"], "impl='triton' cannot serve this call"),
        (["--factor", "-1"], "factor: expected a positive number"),
    ],
)
def test_bad_input_is_one_line(tmp_path, text, capsys, monkeypatch, options, message):
    monkeypatch.setattr("flashrope.backends.triton.unsupported_reason", lambda q, cached=False: "no")
    assert main([*TINY, "--text", str(text), "--out", str(tmp_path / "out"), *options]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_earlier_run_is_replaced_only_when_asked(of_text, tmp_path, text, capsys):
    out = tmp_path / "out"
    shutil.copytree(of_text[0], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = [*FEW, "--text", str(text), "--steps", "2", "--out", str(out)]
    assert main([*again, "--preset", "cpu"]) == 2  # other sizes are refused, too
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
    assert main(again) == 0  # an interrupted run leaves split.json alone


def test_it_ends_with_the_next_commands(of_text):
    out, printed = of_text
    commands = [shlex.split(line) for line in printed.split("next:\n")[1].splitlines()]
    assert [(first, name) for first, name, *_ in commands] == [("flashrope", "generate")] * 2 + [("flashrope", "loss")]
    for _, *command in commands[:2]:
        assert main([*command, "--tokens", "2", "--device", "cpu"]) == 0
    assert commands[2][3] == str(out / "rope.safetensors") and "--text" in commands[2]


def test_out_that_is_a_file(tmp_path, text, capsys):
    (tmp_path / "taken").write_text("")
    assert main([*TINY, "--text", str(text), "--out", str(tmp_path / "taken")]) == 2
    assert "--out: cannot write to" in capsys.readouterr().err


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
        (["demo", "--impl", "flash"], "'triton', 'cuda', 'cpu'", "'flash'"),
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


# ---- model, data, training, evaluation


def model_of(seed=0, **sizes):
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(**{"width": 32, "layers": 2, "heads": 2, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 10  # initial weights are too small for attention to matter
    return model


def test_checkpoint_round_trip(tmp_path):
    model, rotary = model_of(), Rotary.hope(16, 64).rectify(24, 4.0).log_n(64)
    save_checkpoint(tmp_path / "model.safetensors", model, rotary)
    loaded, scheme = load_checkpoint(tmp_path / "model.safetensors")
    tokens = torch.randint(256, (2, 50))
    assert scheme == rotary and loaded.config == model.config
    assert torch.equal(loaded(tokens, scheme), model(tokens, rotary))


def test_the_scheme_is_an_argument_and_the_model_is_causal():
    model, tokens = model_of(), torch.randint(256, (1, 40))
    logits = {
        rotary: model(tokens, rotary) for rotary in (Rotary.none(16), Rotary.rope(16), Rotary.rope(16).rectify(8))
    }
    first, *others = logits.values()
    assert all((first - other).abs().max() > 1e-2 for other in others)
    inside = [logits[rotary][:, :8] for rotary in (Rotary.rope(16), Rotary.rope(16).rectify(8))]  # the window
    assert torch.allclose(*inside, atol=1e-4)
    changed = tokens.clone()
    changed[0, 20] += 1
    difference = (model(changed % 256, Rotary.rope(16)) - logits[Rotary.rope(16)]).abs().amax(-1)[0]
    assert difference[:20].max() < 1e-4 < difference[20:].min()


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary.rope(16),
        Rotary.hope(16, 32).log_n(32),
        Rotary.rope(16).rectify(16),
        Rotary.rope(16).rectify(16, 16.0).log_n(32),
    ],
    ids=repr,
)
def test_losses_do_not_depend_on_the_backend(rotary):
    model, windows = model_of(), torch.randint(256, (3, 257))
    losses = [
        loss_by_context(
            model, rotary, windows, [32, 256], 16, attend=lambda *qkv, impl=impl: attention(*qkv, impl=impl)
        )
        for impl in (None, "reference")
    ]
    for ours, reference in zip(*losses, strict=True):
        assert (ours.last, ours.mean) == pytest.approx((reference.last, reference.mean), abs=1e-4)


def test_every_context_length_predicts_the_same_bytes():
    windows = torch.randint(256, (5, 257))
    lengths = [32, 64, 128, 256]
    without_context = model_of(layers=0)
    losses = loss_by_context(without_context, Rotary.rope(16), windows, lengths, 16, batch_tokens=300)
    assert [loss.last for loss in losses] == pytest.approx([losses[0].last] * 4, abs=1e-6)
    logits = without_context(windows[:, -17:-1], Rotary.rope(16))
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, -16:].flatten())
    assert losses[0].last == pytest.approx(by_hand.item())
    assert len({round(loss.mean, 6) for loss in losses}) == 4
    assert [loss.context_length for loss in losses] == lengths
    for length in (257, 8):
        with pytest.raises(ValueError, match="context_lengths: expected 16 to 256"):
            loss_by_context(without_context, Rotary.rope(16), windows, [length], 16)


def test_split_is_by_file_and_says_so():
    files = {f"{n}.txt": bytes([n]) * 500 for n in range(1, 30)}
    corpus = data.split_by_file("text", files, window=100)
    assert corpus == data.split_by_file("text", dict(reversed(files.items())), window=100)
    assert sorted(corpus.train_files + corpus.unseen_files) == sorted(files)
    assert corpus.unseen == tuple(files[name] for name in corpus.unseen_files)
    assert set(corpus.train) - {0} == {int(name.split(".")[0]) for name in corpus.train_files}
    assert 0.1 <= len(b"".join(corpus.unseen)) / (29 * 500) < 0.14
    with pytest.raises(data.TextError, match=r"at least 8,000 bytes .* got 14,500 bytes in 29 files"):
        data.split_by_file("text", files, window=1000)


def test_folders_are_read_as_text(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.md").write_bytes(b"a" * 3000)
    (tmp_path / "b").write_bytes("ü".encode() * 2000)
    (tmp_path / "c").write_bytes(b"c" * 3000)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0" * 3000)
    (tmp_path / "latin").write_bytes(b"\xfc" * 3000)
    (tmp_path / ".hidden").write_bytes(b"h" * 3000)
    corpus = data.from_path(tmp_path, window=100)
    assert sorted(corpus.train_files + corpus.unseen_files) == ["b", "c", "inner/a.md"]
    with pytest.raises(data.TextError, match="not text"):
        data.from_path(tmp_path / "picture", window=10)
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.TextError, match="no text files"):
        data.from_path(tmp_path / "empty", window=10)


def test_unseen_windows_lie_apart_in_one_piece():
    pieces = (bytes(range(100)), bytes(range(100, 165)), b"short")
    windows = data.unseen_windows(pieces, 20, 100, seed=0)
    assert len(windows) == 5 + 3 and len({byte for window in windows for byte in window}) == 8 * 20
    assert all(window[-1] - window[0] == 19 for window in windows)
    few = data.unseen_windows(pieces, 20, 3, seed=0)
    assert len(few) == 3 and set(few) < set(windows) and few != data.unseen_windows(pieces, 20, 3, seed=1)


def test_training_learns_and_repeats():
    text = b"abcdefgh" * 200
    config = TrainConfig(steps=60, batch_size=4, train_length=16, learning_rate=1e-2)

    def run(rotary):
        torch.manual_seed(0)
        model, steps = LanguageModel(ModelConfig(32, 1, 2)), []
        batches = data.random_batches(text, 4, 16, seed=0)
        trained = train(model, rotary, batches, config, progress=lambda *step: steps.append(step))
        return trained.loss, steps

    loss, steps = run(Rotary.rope(16))
    assert loss < 0.1 and steps[0][1] == pytest.approx(math.log(256), abs=0.1)
    assert [step for step, _ in steps] == list(range(1, 61))
    assert run(Rotary.rope(16)) == (loss, steps)
    assert run(Rotary.none(16))[0] != loss


def test_learning_rate_warms_up_and_decays():
    config = TrainConfig(steps=100, batch_size=1, train_length=16)
    fractions = [learning_rate_fraction(step, config) for step in range(100)]
    assert fractions[0] == pytest.approx(0.1) and fractions[9] == 1
    assert max(fractions) == 1 and fractions[10:] == sorted(fractions[10:], reverse=True)
    assert fractions[-1] == pytest.approx(config.final_fraction, abs=0.01)


def test_divergence_is_an_error():
    model = model_of()
    model.embedding.weight.data[0, 0] = float("nan")
    batches = data.random_batches(bytes(100), 2, 16, seed=0)
    with pytest.raises(RuntimeError, match="training diverged: the loss is nan at step 1"):
        train(model, Rotary.rope(16), batches, TrainConfig(steps=3, batch_size=2, train_length=16))


def test_interrupts_are_held_back_not_lost():
    reached = False
    with pytest.raises(KeyboardInterrupt), _interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def halve(number, report):
    report("halving")
    return number / 2


def die(report):
    os._exit(1)


def test_workers():
    seen = []
    with Workers(2, 1) as workers:
        if sys.platform == "linux":  # the workers block SIGINT from the start, while they still import
            for process in workers._processes:
                status = Path(f"/proc/{process.pid}/status").read_text()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                assert blocked & 1 << signal.SIGINT - 1
        halves = workers.map(halve, [(n,) for n in range(5)], lambda *message: seen.append(message))
        assert halves == [0, 0.5, 1, 1.5, 2]
        assert sorted(seen) == [(n, "halving") for n in range(5)]
        with pytest.raises(WorkerError, match="unsupported operand"):
            workers.map(halve, [("text",)])
        with pytest.raises(WorkerError, match="a worker process died"):
            workers.map(die, [()])
        processes = workers._processes
    assert not any(process.is_alive() for process in processes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_rerope_keeps_the_loss_that_rope_loses(seed):
    """The comments give the worst of 15 runs: 5 seeds, each also twice with perturbed weights."""
    length = 32
    corpus = data.standard_library(8 * length + 1)
    windows = data.as_tokens(data.unseen_windows(corpus.unseen, 8 * length + 1, 64, seed=0))
    torch.manual_seed(seed)
    model, rope = LanguageModel(ModelConfig(64, 2, 2)), Rotary.rope(32)
    train(model, rope, data.random_batches(corpus.train, 32, length, seed), TrainConfig(400, 32, length, 5e-3))

    def losses(rotary):
        return [loss.last for loss in loss_by_context(model, rotary, windows, [length, 8 * length], length // 2)]

    at_length, rope_beyond = losses(rope)
    _, rerope_beyond = losses(rope.rectify(length // 2))
    assert at_length < 2.4  # 2.14; 5.5 before training
    assert rope_beyond > at_length + 0.4  # 0.79
    assert abs(rerope_beyond - at_length) < 0.15  # 0.05
