"""Tests that a model refuses a cache if another model or another conversion has filled it, and accepts it otherwise."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import VERSION, close, logits, static, tiny, tokens
from flashrope.integrations.transformers import accept_cache, convert, revert
from flashrope.integrations.transformers.caches import check_cache
from flashrope.integrations.transformers.versions import CACHE, OLD_NAME
from transformers import DynamicCache

REFUSED = f"{CACHE}: expected a cache that {{}} filled, got 9 tokens that were written {{}}"
BY_ANOTHER = REFUSED.format("this conversion", "by another model, or before convert")
BY_CONVERTED = REFUSED.format("the stock model", "by a converted model, before revert")
MAKE = {"dynamic": lambda model: DynamicCache(config=model.config), "static": static, "none": lambda model: None}


def filled(model, kind: str):
    with torch.no_grad():
        return model(tokens()[:, :9], past_key_values=MAKE[kind](model), use_cache=True).past_key_values


def step(model, cache, start: int = 9):
    with torch.no_grad():
        return model(tokens()[:, start : start + 1], past_key_values=cache).logits


def is_refused(model, cache, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(model, cache)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_from_before_convert_or_revert(name, kind):
    model = tiny(name)
    changes = dict(log_n=12)
    cache = filled(model, kind)
    convert(model, **changes)
    is_refused(model, cache, BY_ANOTHER)
    cache = filled(model, kind)
    step(model, cache)
    other = copy.deepcopy(cache)
    revert(model)
    for each in (cache, other):
        with pytest.raises(ValueError, match="expected a cache that the stock model filled, got 10 tokens"):
            step(model, each, 10)
    cache = filled(model, kind)
    step(model, cache)  # the stock model filled this cache itself
    convert(model)
    with pytest.raises(ValueError, match="got 10 tokens that were written by another model, or before convert"):
        step(model, cache, 10)


@pytest.mark.parametrize("kind", MAKE)
def test_from_another_scheme_or_model(kind):
    model = convert(tiny("llama"), rerope=6)
    cache = filled(model, kind)
    is_refused(convert(tiny("llama"), rerope=6), cache, BY_ANOTHER)
    is_refused(convert(model, rerope=7), cache, BY_ANOTHER)
    cache = filled(model, kind)
    step(convert(model, rerope=7), cache)  # the second conversion has the same scheme


def test_a_cache_that_was_reset_is_anyones():
    model = tiny("llama")
    cache = filled(model, "static")
    for change in (convert, revert, convert):
        cache.reset()
        step(change(model), cache, 0)


def test_generate_with_a_static_cache_before_and_after():
    """generate with a static cache works before and after a conversion. generate keeps the cache on the model and
    resets it."""
    model, options = tiny("llama"), dict(max_new_tokens=4, cache_implementation="static", disable_compile=True)
    stock = model.generate(tokens(), do_sample=False, **options)
    for change in (convert, revert, convert):
        assert torch.equal(change(model).generate(tokens(), do_sample=False, **options), stock)


def test_copies_and_crops_are_accepted():
    model = convert(tiny("llama"), rerope=6)
    prompt = filled(model, "dynamic")
    expected = step(model, copy.deepcopy(prompt))
    assert torch.equal(step(model, copy.deepcopy(prompt)), expected)
    step(model, prompt)
    prompt.crop(-1)
    assert close(step(model, prompt), expected)


def test_a_copied_model_accepts_the_cache():
    model = convert(tiny("llama"), rerope=6)
    cache = filled(model, "dynamic")
    step(copy.deepcopy(model), cache)


def test_a_cache_of_unknown_origin():
    model = convert(tiny("llama"), rerope=6)
    cache = filled(model, "dynamic")
    expected = step(model, copy.deepcopy(cache))
    rebuilt = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        rebuilt.update(layer.keys, layer.values, index)
    is_refused(model, rebuilt, BY_ANOTHER)
    assert torch.equal(step(model, accept_cache(model, rebuilt)), expected)
    revert(model)
    with pytest.raises(ValueError, match="by a converted model, before revert"):
        step(model, rebuilt, 10)
    step(model, accept_cache(model, rebuilt), 10)


@pytest.mark.parametrize("name", [OLD_NAME, CACHE, "by position"])
def test_every_way_to_pass_a_cache_to_the_decoder(name):
    """The check finds the cache however it is passed to the decoder. From transformers 5.24 on the argument has a new
    name, and the decoder accepts both names."""
    model = tiny("llama")
    stale = filled(model, "dynamic")
    decoder, ids = convert(model, rerope=6).model, tokens()

    @torch.no_grad()
    def step(cache, start: int):
        by_name, by_position = ({}, (None, None, cache)) if name == "by position" else ({name: cache}, ())
        return decoder(ids[:, start : start + 1], *by_position, **by_name).last_hidden_state

    with pytest.raises(ValueError, match=BY_ANOTHER):
        step(stale, 9)
    cache = DynamicCache(config=model.config)
    found = torch.cat([step(cache, start) for start in range(12)], 1)
    assert close(found, decoder(ids[:, :12], use_cache=False).last_hidden_state)


def test_tuples_are_not_caches():
    with pytest.raises(TypeError, match=f"{CACHE}: expected a Cache of transformers, got tuple"):
        convert(tiny("llama"))(tokens(), past_key_values=((torch.zeros(1), torch.zeros(1)),))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_compiled(kind):
    torch._dynamo.reset()
    model = convert(tiny("llama", num_hidden_layers=1), rerope=6)
    expected = logits(model, tokens(), calls=[9, 10, 11], cache=MAKE[kind](model))
    stale = filled(revert(model), kind)
    convert(model, rerope=6)
    model.forward = torch.compile(model.forward, backend="eager")
    assert close(logits(model, tokens(), calls=[9, 10, 11], cache=MAKE[kind](model)), expected)
    with pytest.raises((ValueError, RuntimeError), match=f"{CACHE}.* by another model, or before convert"):
        step(model, stale)  # an assertion in the graph raises it if only the device knows the length


def test_a_step_asks_nothing_of_the_device():
    """A step does not wait for the device, although the length of a static cache is known only on the device."""
    model = convert(tiny("llama"))
    cache = filled(model, "static")
    cache.get_seq_length = None  # a call would raise TypeError
    check_cache(model.model, {CACHE: cache})


@pytest.mark.skipif(VERSION < (5, 1), reason="layers without attention are refused before transformers 5.1")
def test_layers_without_attention():
    """The check also covers the cache of a layer without attention, although such a cache does not say whether it is
    empty."""
    model = convert(tiny("lfm2"))
    cache = filled(model, "dynamic")
    is_refused(revert(model), cache, BY_CONVERTED)
