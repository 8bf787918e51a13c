"""Tests rows that are all padding: an empty prompt in a batch, and chunks of a prompt that hold only padding."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
import released
import vision_models
from families import close, logits, padded, tiny, tokens
from flashrope.integrations.transformers import CodesCache, LatentCache, SharedKeysCache, convert

SHORT = tokens(seqlen=10)
MIXED = {
    "llama": {},
    "gemma3_text": {},  # sliding windows in some layers
    "mistral": {},  # in all layers
    "gpt_oss": {},
    "phi3": dict(original_max_position_embeddings=64),
    "qwen3_next": {},  # recurrent layers
    "gemma4_text": {},  # layers that share keys
    "deepseek_v3": {},  # latents
}
MIXED = {name: changes for name, changes in MIXED.items() if name in families.HERE}
STATIC = dict(cache_implementation="static", disable_compile=True)
HOW = {
    "dynamic": {},
    "dynamic, chunks": dict(prefill_chunk_size=4),
    "static": STATIC,
    "static, chunks": STATIC | dict(prefill_chunk_size=4),
    "beams": dict(num_beams=2),
}
SIX, EMPTY = padded(10, left=6), padded(10, left=10)  # six tokens of padding, and a prompt without a token


def text(model, mask, **how) -> torch.Tensor:
    how = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False) | how
    return model.generate(SHORT, attention_mask=mask, **how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MIXED)
def test_rows_of_padding(name, how):
    """A chunk of a prompt, or a whole prompt, may be all padding. The other rows give the stock model's text."""
    if (name, how) == ("gemma4_text", "static, chunks") and families.VERSION < (5, 24):
        pytest.skip("the stock model does not support it in this transformers")
    model, options = tiny(name, **MIXED[name]), HOW[how]
    if families.VERSION < (5, 0):  # stock 4.57 counts the padding in the positions of chunks, but not in later steps
        options = {key: value for key, value in options.items() if key != "prefill_chunk_size"}
    stock = text(model, SIX, **options), text(model, EMPTY, **options)
    convert(model)
    assert torch.equal(text(model, SIX, **HOW[how]), stock[0])
    assert torch.equal(text(model, EMPTY, **HOW[how])[1], stock[1][1])


@pytest.mark.parametrize("changes", [dict(rerope=6, log_n=8), dict(self_extend=(6, 2))], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_rows_of_padding_under_other_schemes(how, changes):
    if "prefill_chunk_size" in HOW[how] and families.VERSION < (5, 0):
        pytest.skip("the positions of chunks in 4.57 count the padding, which these schemes refuse")
    model = convert(tiny("llama"), **changes)
    for mask in (SIX, EMPTY):
        assert torch.equal(text(model, mask, **HOW[how])[1], text(model, torch.ones_like(mask), **HOW[how])[1])


CACHES = {
    "CodesCache": ("llama", lambda config: CodesCache(config, "int8")),
    "LatentCache": ("deepseek_v3", LatentCache),
    "SharedKeysCache": ("Gemma 4 12B", SharedKeysCache),
}


@pytest.mark.parametrize("chunk", [{}, dict(prefill_chunk_size=4)], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_rows_of_padding_in_other_caches(kind, chunk):
    name, make = CACHES[kind]
    if name not in families.HERE and name not in released.HERE:
        pytest.skip("this transformers does not have the family")
    model = convert(released.released(name) if name in released.HERE else tiny(name))
    for mask in (SIX, EMPTY):
        expected = text(model, torch.ones_like(mask), past_key_values=make(model.config))
        assert torch.equal(text(model, mask, past_key_values=make(model.config), **chunk)[1], expected[1])


def test_rows_of_padding_with_coordinates():
    model = vision_models.tiny_vision("qwen2_vl")
    ids, runs = SHORT.clamp(max=50), [None, [4, 9, 10]]
    if families.VERSION < (5, 0):  # the padded steps of 4.57 need position_ids
        runs = [None]
    stock = [logits(model, ids, EMPTY, calls=calls) for calls in runs]
    convert(model)
    for expected, calls in zip(stock, runs, strict=True):
        assert close(logits(model, ids, EMPTY, calls=calls)[1], expected[1])


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_padding_are_finite_and_have_no_gradients(cached):
    model = convert(tiny("llama")).train()
    x = model.get_input_embeddings()(SHORT).detach().requires_grad_()
    out = model(inputs_embeds=x, attention_mask=EMPTY, use_cache=cached).logits
    assert bool(out.isfinite().all())
    out[1].square().sum().backward()
    assert bool(x.grad.isfinite().all()) and not x.grad[0].any() and x.grad[1].any()
    alone = model(inputs_embeds=x[1:], use_cache=False).logits
    assert close(out[1:].detach(), alone.detach())


def test_rows_of_padding_in_a_graph():
    model = convert(tiny("llama", num_hidden_layers=1), rerope=6, log_n=8)
    torch.compiler.reset()
    graph = torch.compile(model, fullgraph=True, backend="eager")
    for mask in (SIX, EMPTY):
        assert close(logits(graph, SHORT, mask), logits(model, SHORT, mask))
