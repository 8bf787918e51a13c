"""Tests flashrope loss --by-position. Its losses equal those computed from all logits at once, and interrupted runs
resume."""

import csv
import json

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from families import tiny
from flashrope.cli.main import main
from flashrope.integrations.transformers import convert
from flashrope.lab.evaluation import by_position
from flashrope.lab.evaluation.by_position import (
    depends_on_length,
    losses_by_length,
    position_losses,
)

LENGTH = 45


def whole(model, row, **options):
    """Returns the losses from all logits at once."""
    with torch.no_grad():
        logits = model(row[None, :-1], use_cache=False).logits[0]
    return F.cross_entropy(logits.double(), row[1:], reduction="none")


@pytest.mark.parametrize("changes", [None, {"cope": 48}], ids=["stock", "converted"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gpt_neox"])
def test_logits_in_pieces_are_the_models_own(family, changes, monkeypatch):
    """Logits that are computed in pieces equal the model's own logits, even if the model caps them (Gemma 2) or scales
    them (Cohere, Granite)."""
    torch.manual_seed(0)
    model = tiny(family).eval()
    if changes:
        convert(model, **changes)
    row, hooks = torch.randint(60, (LENGTH + 1,)), dict(model.base_model._forward_hooks)
    expected = whole(model, row)
    for piece in (by_position.PIECE_OF_LOGITS, 7 * model.config.vocab_size):  # at once, and seven positions at a time
        monkeypatch.setattr(by_position, "PIECE_OF_LOGITS", piece)
        torch.testing.assert_close(position_losses(model, row), expected, rtol=1e-5, atol=1e-6)
    assert "forward" not in model.base_model.__dict__ and model.base_model._forward_hooks == hooks
    torch.testing.assert_close(whole(model, row), expected)


def test_a_quantized_cache_changes_the_loss():
    torch.manual_seed(0)
    model, row = convert(tiny("llama").eval(), rerope=8), torch.randint(60, (LENGTH + 1,))
    plain, int8 = (position_losses(model, row, kind) for kind in (None, "int8"))
    assert 0 < float((int8 - plain).abs().max()) < 0.1


def test_a_table_that_depends_on_the_length_is_measured_by_length():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    torch.manual_seed(0)
    model = tiny("llama", max_position_embeddings=16, rope_parameters=rope, rope_scaling=rope).eval()
    row = torch.randint(60, (LENGTH + 1,))
    assert depends_on_length(model) and not depends_on_length(tiny("llama"))
    losses = losses_by_length(model, row, None, 10)
    for begin in range(0, LENGTH, 10):
        end = min(begin + 10, LENGTH)
        expected = whole(model, row[: end + 1])[begin:end]
        torch.testing.assert_close(losses[begin:end], expected, rtol=1e-5, atol=1e-6)
    assert len(losses) == LENGTH and not torch.allclose(losses, whole(model, row), atol=1e-4)
    convert(model, rerope=8)
    assert depends_on_length(model)


# ---- the command


def command(checkpoint, text, out, *more):
    fixed = ["--device", "cpu", "--threads", "1", "--by-position", "16", "--windows", "3", "--out", str(out)]
    return ["loss", "--model", str(checkpoint), "--text", str(text), *fixed, *more]


def test_the_command(checkpoint, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(command(checkpoint, text, out, "--schemes", "stock", "rerope", "--axis", "log")) == 0
    shown = capsys.readouterr()
    assert "cost: about" in shown.out and "6 passes" in shown.out and "window 3 of 3, ReRoPE" in shown.err
    saved = json.loads((out / "positions.json").read_text())
    assert saved["train_length"] == 32 and saved["axis"] == "log" and len(saved["rows"]) == 6
    assert all(len(row["bins"]) == 4 for row in saved["rows"])  # 64 tokens: twice the training length
    rows = list(csv.DictReader((out / "positions.csv").open()))
    assert [row["from"] for row in rows] == ["0", "16", "32", "48"] * 2
    assert float(rows[4]["change"]) == 0 != float(rows[7]["change"])  # in the first bin, no distance reaches 16
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    from flashrope.lab.evaluation.checkpoint import Tokens
    from flashrope.lab.evaluation.losses import of_length, text_windows

    windows = of_length(text_windows({"": text.read_text()}, Tokens(lambda t: list(t.encode())), 64, 3, 0), (), 64)
    expected = torch.stack([whole(model, row) for row in windows]).view(3, 4, 16).mean(2)
    own = torch.tensor([row["bins"] for row in saved["rows"] if row["scheme"] == "stock"])
    torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-5)
    assert all((out / name).stat().st_size for name in by_position.RESULTS)


def test_a_run_that_was_interrupted_goes_on(checkpoint, text, tmp_path, monkeypatch, capsys):
    out, calls, measure = tmp_path / "out", [], by_position.position_losses

    def interrupted(model, row, *rest):
        calls.append(len(row))
        if len(row) == 65 and calls.count(65) == 4:
            raise KeyboardInterrupt
        return measure(model, row, *rest)

    run = command(checkpoint, text, out, "--schemes", "stock", "rerope")
    monkeypatch.setattr(by_position, "position_losses", interrupted)
    assert main(run) == 130
    assert len(json.loads((out / "positions.json").read_text())["rows"]) == 2, "one window is finished"
    with (out / by_position.JOURNAL).open("a") as file:
        file.write('{"scheme": "ReRo')  # a crash has cut this line off
    calls.clear()
    assert main(run) == 0
    assert calls.count(65) == 3 and "3 passes" in capsys.readouterr().out
    monkeypatch.setattr(by_position, "position_losses", measure)
    again = tmp_path / "again"
    assert main(command(checkpoint, text, again, "--schemes", "stock", "rerope")) == 0
    rows = [[row["bins"] for row in json.loads((each / "positions.json").read_text())["rows"]] for each in (out, again)]
    assert rows[0] == rows[1]
    assert main(run) == 0 and main([*run, "leaky"]) == 0  # nothing to do; a further scheme
    assert "3 passes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--targets", "4"], "--targets: not supported with --by-position"),
        (["--repeat"], "--repeat: not supported with --by-position"),
        (["--chunk", "8"], "--chunk: not supported with --by-position"),
        (["--batch", "2"], "--batch: expected 1 with --by-position"),
        (["--lengths", "2000"], "--text: expected a file of at least 2,001 bytes"),
    ],
)
def test_bad_input(checkpoint, text, tmp_path, capsys, options, message):
    assert main(command(checkpoint, text, tmp_path, *options)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
