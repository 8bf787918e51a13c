"""Tests examples/reuse_chunks.py, which makes prompts from documents that were read one by one. The tests compare them
with prefills and with passes without a cache."""

import random
import runpy
from pathlib import Path

import pytest
import torch
from flashrope import Rotary
from flashrope.lab.small_models.model import LanguageModel, ModelConfig, save_checkpoint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reuse_chunks.py"
chunks = runpy.run_path(str(EXAMPLE))
LENGTHS = (21, 32, 16, 45)  # tokens of the documents
ROTARY = Rotary.rope(16, base=100.0).rectify(12).log_n(40)


def server_of(layers: int):
    """Returns a server of a random model, with documents of several lengths, and requests about three of them."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(width=32, layers=layers, heads=2, vocab_size=64))
    for parameter in model.parameters():
        parameter.data *= 5
    server = chunks["Server"](model.double().eval(), ROTARY, pages=60)
    for n, length in enumerate(LENGTHS):
        server.prefetch(f"document {n}", torch.randint(64, (length,)))
    return server, list(chunks["requests"](server.documents, 3, 4, random.Random(0)))


@torch.no_grad()
def loss_without_a_cache(server, request) -> float:
    parts = [*(server.documents[name].tokens for name in request.documents), request.question, request.answer]
    logits = server.model(torch.cat(parts)[None, :-1], ROTARY)[0, -len(request.answer) :]
    return torch.nn.functional.cross_entropy(logits, request.answer).item()


@pytest.mark.parametrize("again", [None, 100, 0, 3])
def test_losses_of_one_layer_and_of_whole_documents_are_those_of_a_prefill(again):
    """Losses equal those of a prefill in two cases: if the model has one layer, so that keys do not depend on preceding
    text, and if whole documents are computed again."""
    for layers in (1, 2):
        server, asked = server_of(layers)
        for request in asked:
            change = server.reply(request, again).loss - loss_without_a_cache(server, request)
            exact = layers == 1 or again in (None, 100)
            assert abs(change) < 1e-9 if exact else 1e-4 < abs(change) < 5


def test_what_is_computed_and_given_back():
    server, asked = server_of(2)
    free = server.cache.free_pages
    for request in asked:
        whole = sum(len(server.documents[name].tokens) for name in request.documents)
        counts = {None: whole + 8, 0: 8, 5: 8 + 2 * 5}  # nothing comes before the first document
        for again, computed in counts.items():
            reply = server.reply(request, again)
            assert reply.computed == computed and len(reply.answer) == 4 and reply.seconds > 0
            assert server.cache.free_pages == free and len(server.cache.sequences) == len(LENGTHS)


def test_questions_and_answers_are_in_a_document():
    server, asked = server_of(1)
    for request in asked:
        assert len(set(request.documents)) == 3
        text = torch.cat([request.question, request.answer]).tolist()
        documents = [server.documents[name].tokens.tolist() for name in request.documents]
        assert any(text == each[n : n + len(text)] for each in documents for n in range(len(each)))


def test_the_whole_example(tmp_path, capsys):
    model = LanguageModel(ModelConfig(width=32, layers=2, heads=2, vocab_size=64))
    paths = [str(tmp_path / name) for name in ("first", "second")]
    for path in paths:
        save_checkpoint(path, model, Rotary.rope(16), 64)
    options = ["--documents", "3", "--retrieved", "2", "--length", "20", "--questions", "3", "--again", "2"]
    of_models = chunks["main"]([*paths, *options])
    assert len(of_models) == 2 and all(list(replies) == [None, 0, 2] for replies in of_models)
    shown = capsys.readouterr().out
    assert "reuse, the first 2 computed again" in shown and "83.3%" in shown  # 8 of 48 tokens are computed
    with pytest.raises(SystemExit):
        chunks["main"]([*paths, "--retrieved", "1"])


@pytest.mark.parametrize("kind", ["transformers", "bytes", "no length", "nowhere"])
def test_another_model_is_refused_in_one_line(tmp_path, capsys, kind):
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    if kind == "transformers":
        save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    elif kind != "nowhere":
        model = LanguageModel(ModelConfig(width=32, layers=1, heads=2, vocab_size=256 if kind == "bytes" else 64))
        save_checkpoint(path, model, Rotary.rope(16), 64 if kind == "bytes" else None)
    with pytest.raises(SystemExit) as stop:
        chunks["main"]([str(path)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and str(path) in error
    assert "error: models: expected models of the experiment copying (see the top of this file), got" in error
