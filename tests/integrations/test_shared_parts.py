"""Tests models that share parts with a converted model, and converted models whose parts are replaced."""

import copy
import json
import threading

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import HERE, close, logits, schemes, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import convert, from_pretrained, revert
from flashrope.integrations.transformers.conversion_plan import find_decoder
from flashrope.integrations.transformers.embeddings import rotary_embeddings
from small_models import vary
from vision_models import tiny_vision

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


def test_a_rotary_embedding_that_is_replaced_before_continuous_batching():
    """The decoder looks at its embedding before it looks at the pages of a batch."""
    decoder = convert(tiny("llama")).model
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
    with pytest.raises(ValueError, match="model: expected the rotary embedding"):
        decoder(input_ids=tokens(), cu_seq_lens_k={})


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
    model = convert(tiny("llama"), rerope=6)
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


# ---- the configuration


def pair(name: str = "llama", **changes):
    """Returns two models that share one configuration object."""
    model = tiny(name, **changes)
    return model, vary(type(model)(model.config).float().eval())


def saved_field(model, folder):
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()).get("flashrope")


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its decoder"])
def test_options_belong_to_the_model(whole, tmp_path):
    """Two models that share a configuration have different options, in memory and in their folders. A decoder that is
    passed to convert without its model still has the configuration of this model."""
    a, b = pair()
    stock = logits(b, tokens())
    convert(a if whole else a.model, rerope=6)
    assert torch.equal(logits(b, tokens()), stock) and b.config._attn_implementation == "sdpa"
    assert saved_field(a, tmp_path / "a") == {"rerope": 6} and saved_field(b, tmp_path / "b") is None
    assert a.config is a.model.config is a.model.layers[0].self_attn.config and a.config is not b.config
    assert schemes(convert(b if whole else b.model)) == [Rotary.rope(16)] * 3
    convert(b, log_n=12)
    assert saved_field(a, tmp_path / "a") == {"rerope": 6} and saved_field(b, tmp_path / "b") == {"log_n": 12}
    assert torch.equal(logits(revert(b), tokens()), stock)
    assert saved_field(a, tmp_path / "a") == {"rerope": 6} and saved_field(b, tmp_path / "b") is None
    assert torch.equal(logits(from_pretrained(tmp_path / "a"), tokens()), logits(a, tokens()))


def test_a_model_from_the_configuration_of_a_converted_model():
    """A model that is made from a converted model's configuration has its options. revert of one of the models does not
    change the other."""
    a = convert(tiny("llama"), rerope=6)
    changed = logits(a, tokens())
    b = type(a)(a.config)
    assert schemes(convert(b)) == schemes(a) and a.config.flashrope == {"rerope": 6}
    revert(b)
    assert a.config.flashrope == {"rerope": 6} and not hasattr(b.config, "flashrope")
    assert torch.equal(logits(a, tokens()), changed)
    c = revert(type(a)(a.config))
    assert c.config._attn_implementation == "sdpa" and a.config.flashrope == {"rerope": 6}
    assert torch.equal(logits(a, tokens()), changed)


def test_a_configuration_of_one_model_stays_its_object():
    model = tiny("llama")
    config = model.config
    convert(model.model, rerope=6)
    assert model.config is config and config.flashrope == {"rerope": 6}


def test_models_around_a_decoder_that_share_a_configuration():
    """The configurations of images and of text stay parts of the model's own configuration."""
    a = tiny_vision("qwen2_vl")
    b = type(a)(a.config)
    decoder = find_decoder(a)
    convert(a, rotary=Rotary.from_hf_config(decoder.config))
    assert a.config.get_text_config() is decoder.config and "flashrope" in vars(decoder.config)
    assert a.config is not b.config and find_decoder(b).config is b.config.get_text_config()
    assert "flashrope" not in vars(b.config.get_text_config())
