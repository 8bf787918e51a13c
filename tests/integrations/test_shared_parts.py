"""Tests models that share parts with a converted model, and converted models whose parts are replaced."""

import copy
import threading

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import HERE, close, logits, schemes, tiny, tokens
from flashrope.integrations.transformers import convert, revert
from flashrope.integrations.transformers.embeddings import rotary_embeddings
from flashrope.integrations.transformers.plan import find_decoder

# ---- the rotary embedding


@pytest.mark.parametrize(
    "name", [name for name in ("llama", "gemma3_text", "deepseek_v2", "granite_swa") if name in HERE]
)
def test_a_rotary_embedding_that_is_replaced_after_convert(name):
    """A new embedding rotates, so queries and keys would rotate twice. A second convert makes the model usable."""
    model = tiny(name)
    stock = logits(model, tokens())
    decoder = find_decoder(convert(model))
    for place, embedding in list(rotary_embeddings(decoder).items()):
        decoder.set_submodule(place, type(embedding)(embedding.config))
        with pytest.raises(
            ValueError, match="model: expected the rotary embedding .* got another .* would rotate twice"
        ):
            model(tokens())
        assert close(logits(convert(model), tokens()), stock)
    assert torch.equal(logits(revert(model), tokens()), stock)


def test_a_rotary_embedding_that_is_replaced_before_compiling():
    model = convert(tiny("llama", num_hidden_layers=1))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected the rotary embedding"):
        model(tokens(), use_cache=False)


class Wrapper(torch.nn.Sequential):
    def forward(self, *args, **kwargs):
        return self[0](*args, **kwargs)


@pytest.mark.parametrize("wrap", ["compile", "module"])
def test_a_rotary_embedding_that_is_wrapped_after_convert(wrap):
    model = convert(tiny("llama"), window=6)
    expected = logits(model, tokens())
    embedding = model.model.rotary_emb
    model.model.rotary_emb = torch.compile(embedding, backend="eager") if wrap == "compile" else Wrapper(embedding)
    assert close(logits(model, tokens()), expected)


@pytest.mark.parametrize("shared", ["before", "after"])
@pytest.mark.parametrize("name", [name for name in ("llama", "deepseek_v2") if name in HERE])
def test_a_stock_model_that_shares_the_rotary_embedding(name, shared):
    """A stock model keeps its rotation, also if both models run at the same time."""
    model, other = tiny(name), tiny(name)
    stock = logits(other, tokens())
    if shared == "after":
        convert(model, log_n=12)
    other.model.rotary_emb = model.model.rotary_emb
    if shared == "before":
        convert(model, log_n=12)
    changed = logits(copy.deepcopy(model), tokens())
    assert not close(changed, stock, 0.01)
    found: dict[str, list] = {"model": [], "other": []}

    def run(which):
        for _ in range(5):
            found[which].append(logits({"model": model, "other": other}[which], tokens()))

    threads = [threading.Thread(target=run, args=(which,)) for which in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, changed) for each in found["model"]) and len(found["model"]) == 5
    assert all(torch.equal(each, stock) for each in found["other"]) and len(found["other"]) == 5
    assert close(logits(convert(other, log_n=12), tokens()), changed)  # both are converted
    assert torch.equal(logits(revert(other), tokens()), stock)
    assert torch.equal(logits(model, tokens()), changed)
    assert schemes(model) and not schemes(other)


def test_a_stock_model_inside_which_a_converted_model_runs():
    """A stock assistant that shares the embedding of the converted model gives the stock tokens."""
    model, assistant = tiny("llama"), tiny("llama", num_hidden_layers=1)
    expected = model.generate(tokens(1, 12), max_new_tokens=6, do_sample=False)
    alone = assistant.generate(tokens(1, 12), max_new_tokens=6, do_sample=False)
    assistant.model.rotary_emb = convert(model).model.rotary_emb
    found = model.generate(tokens(1, 12), max_new_tokens=6, do_sample=False, assistant_model=assistant)
    assert torch.equal(found, expected)
    assert torch.equal(assistant.generate(tokens(1, 12), max_new_tokens=6, do_sample=False), alone)
