"""Tests the commands' option for a window with sinks: which tokens attention sees, which tokens the cache drops, and
what is refused."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from families import tiny
from flashrope.cli.main import main
from flashrope.integrations.transformers import convert
from flashrope.lab.evaluation import by_position
from flashrope.lab.evaluation import checkpoint as model
from flashrope.lab.evaluation.by_position import position_losses
from flashrope.lab.evaluation.readings import applicable
from flashrope.lab.evaluation.streaming import KeptTokens

FIRST, LAST, PIECE, LENGTH = 2, 9, 5, 48


@pytest.fixture
def small_pieces(monkeypatch):
    for module in (by_position, model):
        monkeypatch.setattr(module, "PIECE", PIECE)


@pytest.fixture
def one_layer():
    """Returns a model of one layer. Its keys and values depend only on their own tokens, so the same text without the
    dropped tokens gives the same logits."""
    torch.manual_seed(0)
    return convert(tiny("llama", num_hidden_layers=1).eval())


def schemes_of(model):
    layers = [module._flashrope for module in model.modules() if hasattr(module, "_flashrope")]
    return [layer.rotary for layer in layers if hasattr(layer, "rotary")]


def without_the_dropped(row: torch.Tensor, begin: int) -> torch.Tensor:
    kept = [row[:begin]] if begin <= FIRST + LAST else [row[:FIRST], row[begin - LAST : begin]]
    return torch.cat([*kept, row[begin : begin + PIECE + 1]])


def test_losses_are_those_of_a_text_without_the_dropped_tokens(small_pieces, one_layer):
    row = torch.randint(60, (LENGTH + 1,))
    found = position_losses(one_layer, row, kept=KeptTokens(FIRST, LAST))
    expected = []
    for begin in range(0, LENGTH, PIECE):
        read = min(PIECE, LENGTH - begin)
        expected.append(position_losses(one_layer, without_the_dropped(row, begin))[-read:])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-6)
    whole = position_losses(one_layer, row)
    same = FIRST + LAST + PIECE - (FIRST + LAST) % PIECE  # the cache is cut after the piece that overfills it
    torch.testing.assert_close(found[:same], whole[:same], rtol=1e-5, atol=1e-6)
    assert (found[same:] - whole[same:]).abs().min() > 1e-6


def test_the_last_logits_and_a_prompt(small_pieces, one_layer):
    ids = torch.randint(60, (2, LENGTH))
    kept = KeptTokens(FIRST, LAST)
    logits = model.last_logits(one_layer, ids, 1, PIECE, kept=kept)
    torch.testing.assert_close(model.read_prompt(one_layer, ids, None, kept).logits.float(), logits)
    begin = (LENGTH - 1) // PIECE * PIECE
    rows = torch.stack([without_the_dropped(row, begin) for row in ids])
    expected = model.last_logits(one_layer, rows, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, model.last_logits(one_layer, ids, 1), atol=1e-4)


def test_the_scheme_and_what_it_refuses():
    found, skipped = applicable(tiny("llama"), ["stock", "rerope"], 64, 128, sinks=20)
    assert [scheme.label for scheme in found] == ["stock", "ReRoPE", "window 20 with 4 sinks"] and not skipped
    assert found[-1].kept == KeptTokens(4, 20) and found[-1].same_until == 24 and found[0].kept is None
    llama = tiny("llama")
    own = schemes_of(convert(llama))
    found, _ = applicable(llama, ["stock", "rerope"], 64, 128, sinks=20)
    found[1].apply()
    assert schemes_of(llama) != own
    found[2].apply()
    assert schemes_of(llama) == own
    found, skipped = applicable(tiny("mistral"), ["stock"], 64, 128, sinks=20)
    assert len(found) == 1
    assert skipped == {
        "window 20 with 4 sinks": "a cache with layers of the type DynamicSlidingWindowLayer is not supported"
    }
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    grows = tiny("llama", max_position_embeddings=16, rope_parameters=rope, rope_scaling=rope)
    _, skipped = applicable(grows, ["stock"], 16, 128, sinks=20)
    assert "rope type dynamic is not supported" in skipped["window 20 with 4 sinks"]


def test_the_commands(tmp_path, capsys):
    torch.manual_seed(0)
    tiny("llama", vocab_size=256, max_position_embeddings=256).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(200)))
    fixed = ["--model", str(tmp_path / "model"), "--schemes", "stock", "--sinks", "200", "--device", "cpu"]
    text, windows = ["--text", str(tmp_path / "text")], ["--windows", "2", "--lengths", "128", "512"]
    commands = {
        "loss": [*text, *windows],
        "positions": [*text, *windows, "--by-position", "128"],
        "passkey": ["--lengths", "400", "600", "--depths", "1", "--trials", "1"],
    }
    for name, options in commands.items():
        out = tmp_path / name
        assert main([name.replace("positions", "loss"), *fixed, *options, "--out", str(out)]) == 0
        assert "window 200 with 4 sinks" in capsys.readouterr().out
        saved = json.loads((out / f"{name}.json").read_text())
        assert "read in pieces of 256 tokens" in saved["facts"]["schemes"]
        values = {}
        for row in saved.get("rows") or saved["cells"]:
            values.setdefault(row["scheme"], []).append(row.get("windows") or row.get("bins") or row["log_probability"])
        stock, sinks = values.values()
        assert stock != sinks
