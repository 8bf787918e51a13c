"""flashrope passkey: measurements on readers of known reach, and the whole command on a random model over bytes."""

import csv
import json
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from families import tiny
from flashrope.commands.main import main
from flashrope.evaluation import passkey
from flashrope.evaluation.passkey import Task, measure

BYTES = Task(lambda text: list(text.encode()))
SHORTEST = (
    len(BYTES.prompt(1000, 0.0, 12345)[0])
    - 1000
    + len(passkey.INSTRUCTION + passkey.NEEDLE.format(answer=" 12345") + passkey.QUESTION + " 12345")
)


class Reader(torch.nn.Module):
    """Predicts the number if it occurs in the last ``reach`` bytes before the question, otherwise a wrong one."""

    def __init__(self, reach: int):
        super().__init__()
        self.reach, self.weight = reach, torch.nn.Parameter(torch.zeros(()))

    def forward(self, ids, use_cache, logits_to_keep):
        logits = torch.zeros(*ids.shape, 256)
        for row, text in zip(logits, ids.tolist(), strict=True):
            text = bytes(text)
            question = text.rindex(passkey.QUESTION.encode())
            found = re.search(rb"number is( \d{5})", text[max(question - self.reach, 0) : question])
            guess = found[1] if found else b" 00000"
            for at, byte in enumerate(guess):
                row[len(text) - len(guess) - 1 + at, byte] = 9.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_prompts():
    for length in (SHORTEST, SHORTEST + 1, 700):
        for depth in (0.0, 0.3, 1.0):
            ids, answer = BYTES.prompt(length, depth, 12345)
            text = bytes(ids).decode()
            assert len(ids) == length and answer == 6
            assert text.startswith(passkey.INSTRUCTION) and text.endswith(passkey.QUESTION + " 12345")
            assert text.count("12345") == 3
    places = [bytes(BYTES.prompt(900, depth, 12345)[0]).index(b"12345") for depth in (0.0, 0.5, 1.0)]
    assert places[0] < places[1] < places[2] and places[1] - places[0] == pytest.approx(places[2] - places[1], abs=1)
    with pytest.raises(ValueError, match=f"expected at least {SHORTEST} tokens, .* got {SHORTEST - 1}"):
        BYTES.prompt(SHORTEST - 1, 0.0, 12345)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_reader_finds_what_it_reaches(batch):
    depths = [0.0, 0.5, 1.0]
    whole = list(measure(Reader(10_000), BYTES, "stock", [700, 900], depths, trials=3, batch=batch))
    near = list(measure(Reader(150), BYTES, "stock", [700, 900], depths, trials=3, batch=batch))
    assert [cell.accuracy for cell in whole] == [1.0] * 6
    assert [cell.accuracy for cell in near] == [0.0, 0.0, 1.0] * 2
    assert [(cell.length, cell.depth) for cell in near] == [(n, depth) for n in (700, 900) for depth in depths]
    assert all(a.log_probability > b.log_probability for a, b in zip(whole, near, strict=True) if b.accuracy == 0)


def test_numbers_are_the_same_for_every_scheme_and_differ_by_place():
    seen = []

    class Recorder(Reader):
        def forward(self, ids, use_cache, logits_to_keep):
            seen.append(bytes(ids[0].tolist())[-5:])
            return super().forward(ids, use_cache, logits_to_keep)

    for _ in range(2):
        list(measure(Recorder(10), BYTES, "stock", [500], [0.0, 1.0], trials=2))
    assert seen[:4] == seen[4:] and len(set(seen)) == 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny("llama", vocab_size=256, max_position_embeddings=400, num_hidden_layers=2).save_pretrained(path)
    return str(path)


def test_a_quantized_cache(checkpoint, tmp_path):
    """All that the model reads goes through it, and its answers change."""
    sizes = ["--lengths", "380", "--schemes", "stock", "rerope", "--depths", "2", "--trials", "2"]
    sizes += ["--device", "cpu", "--threads", "1"]
    cells = {}
    for name in ("plain", "int8", "int4"):
        options = [] if name == "plain" else ["--cache-dtype", name]
        out = str(tmp_path / name)
        assert main(["passkey", "--model", checkpoint, *sizes, "--out", out, *options]) == 0
        saved = json.loads((tmp_path / name / "passkey.json").read_text())
        assert saved["facts"].get("cache", "plain").startswith(name)
        cells[name] = torch.tensor([cell["log_probability"] for cell in saved["cells"]], dtype=torch.float64)
    assert len(cells["plain"]) == 2 * 2
    changes = {name: (cells[name] - cells["plain"]).abs() for name in ("int8", "int4")}
    assert (changes["int8"] > 0).all() and changes["int8"].max() < changes["int4"].max() < 1


def test_the_command(checkpoint, tmp_path, capsys):
    sizes = ["--lengths", "380", "520", "--depths", "2", "--trials", "1", "--device", "cpu", "--threads", "1"]
    before = torch.get_num_threads()
    assert main(["passkey", "--model", checkpoint, *sizes, "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == before
    shown = " ".join(capsys.readouterr().out.split())
    for scheme in ("ReRoPE: window 200, log n by 400", "Leaky ReRoPE: factor 4, window 200", "YaRN: factor 1.3"):
        assert scheme in shown
    rows = list(csv.DictReader((tmp_path / "passkey.csv").open()))
    assert len(rows) == 4 * 2 * 2 and {row["scheme"] for row in rows} == {"stock", "ReRoPE", "Leaky ReRoPE", "YaRN"}
    saved = json.loads((tmp_path / "passkey.json").read_text())
    assert saved["train_length"] == 400 and len(saved["cells"]) == len(rows)
    assert saved["facts"]["command"].startswith("flashrope passkey --model")
    assert (tmp_path / "passkey.png").read_bytes()[:4] == b"\x89PNG"
    # The results of all schemes differ: each was applied, and to the stock model.
    by_scheme = {
        scheme: [row["log_probability"] for row in rows if row["scheme"] == scheme]
        for scheme in ("stock", "ReRoPE", "Leaky ReRoPE", "YaRN")
    }
    assert len({tuple(found) for found in by_scheme.values()}) == 4


def test_the_lengths_that_are_chosen_hold_the_question(tmp_path):
    model = tmp_path / "model"
    tiny("llama", vocab_size=256, max_position_embeddings=128).save_pretrained(model)
    sizes = ["--depths", "1", "--trials", "1", "--schemes", "stock", "--device", "cpu", "--threads", "1"]
    assert main(["passkey", "--model", str(model), *sizes, "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "passkey.csv").open()))
    assert SHORTEST > 128 and [int(row["length"]) for row in rows] == sorted({SHORTEST, max(256, SHORTEST), 512})


def test_bad_input(checkpoint, tmp_path, capsys):
    def refused(*options, model=checkpoint):
        fixed = ["--device", "cpu", "--threads", "1", "--out", str(tmp_path / "out")]
        assert main(["passkey", *fixed, "--model", model, *options]) == 2
        return capsys.readouterr().err

    assert "--lengths: expected at least" in refused("--lengths", "100")
    assert "--model: " in refused(model=str(tmp_path / "nothing"))
    assert not list(tmp_path.iterdir())
    tiny("llama").save_pretrained(tmp_path / "small")
    assert "has no tokenizer, and its vocabulary is too small for bytes" in refused(model=str(tmp_path / "small"))
    tiny("mistral", vocab_size=256).save_pretrained(tmp_path / "slides")
    assert "--schemes: none of rerope fits this model: window: expected a model whose layers see all keys" in refused(
        "--schemes", "rerope", "--lengths", "400", model=str(tmp_path / "slides")
    )
