"""Tests flashrope passkey: what it measures on replacement models that see a known distance, and the whole command on a
random model that reads bytes."""

import csv
import json
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from families import tiny
from flashrope import Rotary
from flashrope.cli.main import main
from flashrope.console.options import BadInput
from flashrope.integrations.transformers import convert
from flashrope.integrations.transformers.versions import CACHE
from flashrope.lab.evaluation import prompts
from flashrope.lab.evaluation import retrieval as passkey
from flashrope.lab.evaluation.checkpoint import Tokens
from flashrope.lab.evaluation.prompts import Haystack
from flashrope.lab.evaluation.readings import same_length
from flashrope.lab.evaluation.retrieval import Sizes, measure, scores

BYTES = Haystack(Tokens(lambda text: list(text.encode()), unit="byte"))
SHORTEST = BYTES.shortest()


class Reader(torch.nn.Module):
    """Predicts the number if it occurs in the last ``reach`` bytes before the question, otherwise a wrong number."""

    def __init__(self, reach: int):
        super().__init__()
        self.reach, self.config, self.passes = reach, SimpleNamespace(), []
        self.config.get_text_config = lambda: self.config
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, ids, use_cache, logits_to_keep=0, **given):
        self.passes.append(ids.shape[1])
        whole = torch.cat((given[CACHE], ids), 1) if CACHE in given else ids
        logits = torch.zeros(*whole.shape, 256)
        for row, text in zip(logits, whole.tolist(), strict=True):
            text = bytes(text)
            question = text.rindex(prompts.QUESTION.encode())
            found = re.search(rb"number is( \d{5})", text[max(question - self.reach, 0) : question])
            guess = found[1] if found else b" 00000"
            begin = text.index(b"number is", question) + len(b"number is")
            for at, byte in enumerate(guess):
                if begin + at - 1 < len(text):
                    row[begin + at - 1, byte] = 9.0
        kept = logits[:, whole.shape[1] - ids.shape[1] :]
        return SimpleNamespace(logits=kept[:, -logits_to_keep:], **{CACHE: whole})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny("llama", vocab_size=256, max_position_embeddings=400, num_hidden_layers=2).save_pretrained(path)
    return str(path)


def text_of(prompt):
    return bytes([*prompt.ids, *prompt.candidates[0]]).decode()


def test_prompts():
    for length in (SHORTEST, SHORTEST + 1, 700):
        for depth in (0.0, 0.3, 1.0):
            prompt = BYTES.prompt(length, depth, random.Random(3))
            text, answer = text_of(prompt), bytes(prompt.candidates[0]).decode()
            assert len(text) == length and len(answer) == 6 and text.count(answer) == 3
            assert text.startswith(prompts.INSTRUCTION)
            assert text.endswith(prompts.QUESTION + prompts.ANSWER + answer)
            assert len(set(map(bytes, prompt.candidates))) == 10
    texts = [text_of(BYTES.prompt(900, depth, random.Random(3))) for depth in (0.0, 0.5, 1.0)]
    places = [text.index("The hidden number is") for text in texts]
    assert places[0] < places[1] < places[2] and places[1] - places[0] == pytest.approx(places[2] - places[1], abs=1)
    with pytest.raises(ValueError, match=f"expected at least {SHORTEST} tokens, .* got {SHORTEST - 1}"):
        BYTES.prompt(SHORTEST - 1, 0.0, random.Random(3))


def test_several_numbers_in_a_text_of_ones_own():
    words = " ".join(f"word{n}" for n in range(2000))
    task = Haystack(BYTES.tokens, (list(b"short"), list(words.encode())), 4, ("<user>", "<assistant>"))
    assert task.shortest() > SHORTEST
    seen = set()
    for seed in range(8):
        prompt = task.prompt(3000, 0.25, random.Random(seed))
        text, answer = text_of(prompt), bytes(prompt.candidates[0]).decode()
        name = re.search(r"What is the number of (\w+)\?<assistant>The number of \1 is \d{5}$", text)[1]
        assert len(text) == 3000 and text.startswith("<user>" + prompts.INSTRUCTION_OF_KEYS)
        hidden = dict(re.findall(r"\nThe number of (\w+) is( \d{5})\. Keep", text))
        assert len(hidden) == 4 and hidden[name] == answer
        assert set(hidden.values()) <= {bytes(each).decode() for each in prompt.candidates}
        assert 0.2 < text.index(f"\nThe number of {name} is{answer}") / 3000 < 0.5
        body = text.removeprefix("<user>" + prompts.INSTRUCTION_OF_KEYS).partition("\nWhat is")[0]
        hay = re.sub(r"\nThe number of .*\n", "", body)
        assert hay in words
        seen.add(hay)
    assert len(seen) == 8, "every trial has a passage of its own"
    with pytest.raises(BadInput, match="--text: expected a file of at least 90,000 bytes for the longest prompt"):
        task.check_texts(90_000)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_reader_finds_what_it_reaches(batch):
    places = [(length, depth) for length in (700, 900) for depth in (0.0, 0.5, 1.0)]
    sizes = Sizes((700, 900), (0.0, 0.5, 1.0), 3, batch)
    whole, near = (
        [measure(Reader(reach), BYTES, "stock", *place, sizes) for place in places] for reach in (10_000, 150)
    )
    assert [(cell.found, cell.chosen, cell.trials) for cell in whole] == [(3, 3, 3)] * 6
    assert [cell.found for cell in near] == [0, 0, 3] * 2
    assert [(cell.length, cell.depth) for cell in near] == places
    assert all(a.log_probability > b.log_probability for a, b in zip(whole, near, strict=True) if b.found == 0)


def test_the_prompt_is_read_once():
    reader = Reader(10_000)
    measure(reader, BYTES, "stock", 500, 0.5, Sizes((500,), (0.5,), 2, 2))
    assert reader.passes == [494] + [5] * 10


@pytest.mark.parametrize("changes", [None, {"rerope": 200}], ids=["stock", "rerope"])
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_candidates_after_a_cache_are_those_of_whole_passes(changes, cache_dtype):
    torch.manual_seed(0)
    model = tiny("llama", vocab_size=256).eval()
    if changes or cache_dtype:
        convert(model, **(changes or {}))
    some = [BYTES.prompt(420, depth, random.Random(1)) for depth in (0.1, 0.9)]
    for at, trial in enumerate(scores(model, some, cache_dtype)):
        for n in (0, 7):
            alone = some[at]._replace(candidates=[some[at].candidates[n]])
            (whole,) = scores(model, [alone], cache_dtype, candidates=1)
            assert trial.log_probabilities[n] == pytest.approx(whole.log_probabilities[0], abs=1e-3)
        assert len(set(trial.log_probabilities)) == 10


def test_lengths_up_to_which_schemes_are_the_same():
    rope = Rotary.rope(16)
    for other, expected in (
        (rope, math.inf),
        (rope.rectify(20), 20),
        (rope.rectify(20, 4.0).log_n(30), 20),
        (rope.log_n(30), 30),
        (rope.log_n(30, clip=False), 0),
        (rope.self_extend(24, 4), 24),
        (rope.string(20, 3), 20),
        (rope.local(9), 9),
        (rope.yarn(2.0, 64), 0),
        (rope.dual_chunk(160, 32), 0),
    ):
        assert same_length(rope, other) == same_length(other, rope) == expected, other
    assert same_length(rope.local(9), rope.local(9).rectify(4)) == 4


def test_a_scheme_is_skipped_where_it_is_the_models_own(checkpoint, tmp_path, monkeypatch, capsys):
    applied = []
    monkeypatch.setattr(passkey, "measure", lambda *a: applied.append(a[2:5]) or measure(*a))
    sizes = ["--lengths", "380", "520", "--depths", "1", "--trials", "1", "--device", "cpu", "--threads", "1"]
    run = ["passkey", "--model", checkpoint, *sizes, "--schemes", "stock", "rerope", "--window", "390"]
    assert main([*run, "--out", str(tmp_path)]) == 0
    assert applied == [("stock", 380, 0.0), ("stock", 520, 0.0), ("ReRoPE", 520, 0.0)]
    cells = json.loads((tmp_path / "passkey.json").read_text())["cells"]
    assert [(cell["scheme"], cell["length"]) for cell in cells] == [
        (s, n) for s in ("stock", "ReRoPE") for n in (380, 520)
    ]
    assert cells[0]["log_probability"] == cells[2]["log_probability"] and cells[1] != cells[3]
    applied.clear()
    assert main([*run, "--out", str(tmp_path)]) == 0 and not applied
    assert main([*run, "--out", str(tmp_path), "--trials", "2"]) == 2
    assert "another number of trials, 1 instead of 2" in capsys.readouterr().err


def test_a_quantized_cache(checkpoint, tmp_path):
    """With --cache-dtype, the model reads everything through the quantized cache, and its answers change."""
    sizes = ["--lengths", "380", "--schemes", "stock", "rerope", "--depths", "2", "--trials", "2"]
    sizes += ["--device", "cpu", "--threads", "1"]
    cells = {}
    for name in ("plain", "int8"):
        options = [] if name == "plain" else ["--cache-dtype", name]
        out = str(tmp_path / name)
        assert main(["passkey", "--model", checkpoint, *sizes, "--out", out, *options]) == 0
        saved = json.loads((tmp_path / name / "passkey.json").read_text())
        assert saved["facts"].get("cache", "plain").startswith(name)
        cells[name] = torch.tensor([cell["log_probability"] for cell in saved["cells"]], dtype=torch.float64)
    assert len(cells["plain"]) == 2 * 2
    changes = (cells["int8"] - cells["plain"]).abs()
    assert (changes > 0).all() and changes.max() < 0.1


def test_the_type_of_the_computation(checkpoint, tmp_path):
    """A 16-bit type changes every answer a little, and the results name the type."""
    sizes = ["--lengths", "380", "--schemes", "stock", "--depths", "2", "--trials", "2", "--threads", "1"]
    found = {}
    for name in (None, "float32", "bfloat16", "float16"):
        out, options = tmp_path / str(name), ["--dtype", name] if name else []
        command = ["passkey", "--model", checkpoint, *sizes, "--device", "cpu", "--out", str(out), *options]
        assert main(command) == 0
        saved = json.loads((out / "passkey.json").read_text())
        assert (f", {name}, training" in saved["facts"]["model"]) == (name in ("bfloat16", "float16"))
        found[name] = torch.tensor([cell["log_probability"] for cell in saved["cells"]], dtype=torch.float64)
    assert torch.equal(found[None], found["float32"])
    changes = {name: (found[name] - found["float32"]).abs() for name in ("bfloat16", "float16")}
    assert changes["float16"].min() > 0 and changes["float16"].max() < changes["bfloat16"].max() < 0.2


def test_the_command(checkpoint, tmp_path, capsys):
    sizes = ["--lengths", "380", "520", "--depths", "2", "--trials", "1", "--device", "cpu", "--threads", "1"]
    before = torch.get_num_threads()
    assert main(["passkey", "--model", checkpoint, *sizes, "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == before
    shown = " ".join(capsys.readouterr().out.split())
    for scheme in ("ReRoPE: window 200, log n by 400", "Leaky ReRoPE: factor 4, window 200", "YaRN: factor 1.3"):
        assert scheme in shown
    rows = list(csv.DictReader((tmp_path / "passkey.csv").open()))
    assert len(rows) == 4 * 2 * 2 and all(row["trials"] == "1" for row in rows)
    assert {row["scheme"] for row in rows} == {"stock", "ReRoPE", "Leaky ReRoPE", "YaRN"}
    saved = json.loads((tmp_path / "passkey.json").read_text())
    assert saved["train_length"] == 400 and len(saved["cells"]) == len(rows)
    assert saved["facts"]["command"].startswith("flashrope passkey --model")
    assert (tmp_path / "passkey.png").read_bytes()[:4] == b"\x89PNG"
    # No two schemes have the same results, so every scheme took effect.
    by_scheme = {
        scheme: [row["log_probability"] for row in rows if row["scheme"] == scheme]
        for scheme in ("stock", "ReRoPE", "Leaky ReRoPE", "YaRN")
    }
    assert len({tuple(found) for found in by_scheme.values()}) == 4


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
    assert "--schemes: none of rerope fits this model: rerope: expected a layer that sees all keys" in refused(
        "--schemes", "rerope", "--lengths", "400", model=str(tmp_path / "slides")
    )
