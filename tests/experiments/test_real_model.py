"""Tests the tools that measure a pretrained model: reuse, quantized values, speed and continued training. The tests use
a small random model."""

import json
import random
from argparse import Namespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from flashrope.integrations.transformers import convert
from flashrope.lab.evaluation.checkpoint import load

from experiments import real_reuse, real_speed, real_training
from experiments.__main__ import main

TEXT = "The wind blows over the field. A dog barks at the gate, and the baker opens his shop at 7. " * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a text and a model without a tokenizer, which reads bytes."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=64)
    config = transformers.LlamaConfig(vocab_size=256, initializer_range=0.2, max_position_embeddings=1024, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def run(name: str, folder, out, *options: str) -> int:
    return main([name, "--model", str(folder), "--text", str(folder / "text.txt"), "--out", str(out), *options])


# ---- reuse


@pytest.mark.parametrize("kind", real_reuse.KINDS)
def test_answers_are_those_of_a_model_without_a_cache(folder, kind):
    """A full prefill gives the answers of a model without a cache, and so do prompts whose passages are computed again
    in full."""
    model, tokens = load(str(folder), torch.device("cpu"))
    question = real_reuse.ask(kind, tokens, [tokens.encode(TEXT)], random.Random(0))
    assert {len(text) for text in question.documents} == {real_reuse.SIZE}
    answer = torch.tensor(question.answer)
    expected = {}
    for order, step in zip(real_reuse.ORDERS, (1, -1), strict=True):
        documents = [token for text in question.documents[::step] for token in text]
        ids = torch.tensor([[*question.head, *documents, *question.question, *question.answer]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, -len(answer) :]
        expected[order] = logits.log_softmax(-1).gather(1, answer[:, None]).sum().item()
    convert(model)
    found = real_reuse.answers(model, question)
    assert len(found) == 2 * (1 + 2 * len(real_reuse.RECOMPUTED))
    for each in found:
        change = abs(each["log_probability"] - expected[each["order"]])
        assert change < 1e-4 if each["way"] == real_reuse.FULL else 1e-5 < change < 5
    whole = real_reuse.SIZE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_reuse, "RECOMPUTED", (whole,))
        again = real_reuse.answers(model, question)
    assert all(abs(each["log_probability"] - expected[each["order"]]) < 1e-4 for each in again)


def test_what_is_asked_is_in_the_first_document(folder):
    _, tokens = load(str(folder), torch.device("cpu"))
    draw = random.Random(1)
    for _ in range(4):
        number, quote = (real_reuse.ask(kind, tokens, [tokens.encode(TEXT)], draw) for kind in real_reuse.KINDS)
        assert bytes(number.answer) in bytes(number.documents[0])
        assert bytes(number.answer) not in bytes(number.documents[1])
        begun = bytes(quote.question[-real_reuse.QUOTED :] + quote.answer)
        assert begun in bytes(quote.documents[0])


def test_means_of_ways():
    """Means and intervals are over questions, so the two orders of a question do not count as two samples."""
    orders = real_reuse.ORDERS

    def row(number, kind, full, alone):
        ways = [{"way": "full prefill", "order": o, "log_probability": full, "found": True} for o in orders]
        ways += [
            {"way": "alone", "recomputed": 0, "order": o, "log_probability": alone + n, "found": not n}
            for n, o in enumerate(orders)
        ]
        return {"question": number, "kind": kind, "ways": ways}

    found = real_reuse.summary([row(0, "number", -1.0, -2.0), row(1, "quote", -3.0, -2.0)])
    each = {(row["kind"], row["order"], row["way"]): row for row in found}
    both = each["all", "both", "alone"]
    assert both["log_probability"] == -1.5 and both["change"] == 0.5 and both["questions"] == 2
    assert abs(both["interval_95"] - 12.7062 * 2**0.5 / 2**0.5) < 1e-3  # changes -0.5 and 1.5
    assert (both["found"], both["asked"]) == (2, 4)
    assert each["number", orders[1], "alone"]["change"] == 0.0
    assert each["quote", orders[0], "full prefill"]["change"] == 0.0


# ---- speed


def test_speed_measures_every_way(folder, tmp_path, capsys):
    options = ["--length", "64", "--train-tokens", "32", "--schemes", "rerope", "--window", "16", "--rounds", "2"]
    assert run("speed", folder, tmp_path, *options) == 0
    facts = json.loads((tmp_path / "speed.json").read_text())
    ways = ["the model as it is", "converted", "ReRoPE"]
    expected = [
        (dtype, way, task) for dtype in real_speed.DTYPES for way in ways for task in ("read", "decode", "train")
    ]
    assert sorted((row["dtype"], row["way"], row["task"]) for row in facts["rows"]) == sorted(expected)
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in facts["rows"])
    bytes_of = {(each["dtype"], each["way"]): each["bytes"] for each in facts["cache_bytes_per_token"]}
    assert bytes_of == {(d, way): 2 * 2 * 2 * 64 * t.itemsize for d, t in real_speed.DTYPES.items() for way in ways}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6].startswith("| float32 | the model as it is | ") and "(" not in lines[-6]
    assert lines[-1].startswith("| bfloat16 | ReRoPE | ") and lines[-1].count("(") == 3
    assert run("speed", folder, tmp_path, "--length", "64", "--dtype", "bfloat16", "--rounds", "1") == 0
    assert "training step" not in capsys.readouterr().out


def test_a_training_step_to_time_leaves_the_weights(folder):
    model, tokens = load(str(folder), torch.device("cpu"))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert real_speed.training_step(model, torch.tensor([tokens.encode(TEXT)[:33]])) > 0
    assert all(torch.equal(weight, before[name]) and weight.grad is None for name, weight in model.named_parameters())


# ---- continued training

CONTINUE = ["--tokens", "256", "--length", "32", "--batch", "2", "--longest", "64", "--windows", "2"]
CONTINUE += ["--measurements", "2", "--dtype", "float32"]


@pytest.fixture
def bins(monkeypatch):
    monkeypatch.setattr(real_training, "BIN", 16)


def test_continued_training_measures_every_way(folder, tmp_path, bins, capsys):
    assert run("continue", folder, tmp_path, *CONTINUE) == 0
    found = json.loads((tmp_path / "continued.json").read_text())
    ways = ["RoPE", "HoPE", "CoPE, then HoPE"]
    assert [(row["way"], row["tokens"]) for row in found["rows"]] == [(w, t) for w in ways for t in (0, 128, 256)]
    assert [row["scheme"] for row in found["rows"][-3:]] == ["CoPE", "CoPE", "HoPE"]
    model, tokens = load(str(folder), torch.device("cpu"))
    ids = tokens.encode(TEXT)
    unseen = real_training.unseen_windows([ids[int(0.8 * len(ids)) :]], 65, 2, 0)
    for window, expected in zip(unseen, found["rows"][0]["bins"], strict=True):
        row = torch.tensor([window])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="none")
        assert expected == pytest.approx(losses.view(4, 16).mean(1).tolist(), abs=1e-4)
    assert len({str(row["bins"]) for row in found["rows"]}) == 9
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6].startswith("| RoPE | 1-2k | ") and lines[-1].startswith("| CoPE, then HoPE | 3-4k | ")


def test_batches_are_the_same_in_every_way_and_stay_in_one_text():
    texts = [torch.arange(100), torch.arange(1000, 1040)]
    args = Namespace(seed=3, length=16, batch=8)
    first, again, later = (real_training.batch(texts, step, args) for step in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, later)
    rows = torch.cat([real_training.batch(texts, step, args) for step in range(200)])
    assert ((rows[:, 1:] - rows[:, :-1]) == 1).all()
    starts = set(rows[:, 0].tolist())
    assert starts == {*range(84), *range(1000, 1024)}
