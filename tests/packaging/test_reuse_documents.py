"""Tests examples/reuse_documents.py, which makes prompts from documents that a Hugging Face model read once. The tests
compare them with one prefill."""

import random
import runpy
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from flashrope.lab.evaluation.checkpoint import load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reuse_documents.py"
documents = runpy.run_path(str(EXAMPLE))
TEXT = "The wind blows over the field. A dog barks at the gate, and the baker opens the shop. " * 3
SIZE = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns the folder of a random model without a tokenizer, which reads bytes."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(vocab_size=256, initializer_range=0.2, max_position_embeddings=1024, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def server_of(folder: Path):
    server = documents["Server"](*load(str(folder), torch.device("cpu")))
    written = documents["write_documents"](TEXT, SIZE, random.Random(0))
    for name, (text, _) in written.items():
        server.prefetch(name, text)
    return server, written


def test_documents_that_are_computed_again_in_full_are_one_prefill(folder):
    server, written = server_of(folder)
    answers = {name: number for name, (_, number) in written.items()}
    for request in documents["draw_requests"](answers, 3, 3, random.Random(0)):
        full, again, reused = (server.reply(request, way) for way in (None, 1000, 0))
        assert abs(again.log_probability - full.log_probability) < 1e-4 and again.answer == full.answer
        assert abs(reused.log_probability - full.log_probability) > 1e-3
        question = reused.computed
        sizes = [server.documents[name].input_ids.shape[1] for name in request.documents]
        assert again.computed - question == sum(sizes)
        assert full.computed - again.computed == len(documents["HEAD"])
        assert server.reply(request, 5).computed == question + 15 and full.seconds > 0


def test_a_document_holds_its_number(folder):
    _, written = server_of(folder)
    assert len(written) == 10
    for name, (text, number) in written.items():
        assert f"The number of {name} is {number}.\n" in text


def test_the_whole_example(folder, capsys):
    options = ["--text", str(folder / "text.txt"), "--size", str(SIZE), "--retrieved", "2", "--questions", "2"]
    replies = documents["main"]([str(folder), *options, "--again", "0", "4"])
    assert list(replies) == [None, 0, 4] and all(len(found) == 2 for found in replies.values())
    shown = capsys.readouterr().out
    assert "reuse, the first 4 computed again" in shown and "10 documents" in shown


@pytest.mark.parametrize("wrong", ["model", "text", "retrieved", "size"])
def test_what_is_wrong_is_said_in_one_line(folder, tmp_path, capsys, wrong):
    text, size = (tmp_path / "no.txt" if wrong == "text" else folder / "text.txt"), "9999" if wrong == "size" else "40"
    options = ["--text", str(text), "--size", size, "--retrieved", "11" if wrong == "retrieved" else "2"]
    with pytest.raises(SystemExit) as stop:
        documents["main"]([str(tmp_path if wrong == "model" else folder), *options])
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]
