"""Tests passages that are prefilled once and then joined into prompts: in which cases the result equals one prefill,
and what is refused."""

import copy
import re

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import ROPE_TYPES, VERSION, close, static, tiny
from flashrope import Rotary
from flashrope.integrations.transformers import (
    CodesCache,
    Passage,
    accept_cache,
    convert,
    join_passages,
    prefill_passage,
    revert,
)
from flashrope.integrations.transformers.versions import CACHE, cache_of
from transformers import DynamicCache

SCHEMES = {"rope": {}, "rerope": {"rerope": 6, "log_n": 16}, "hope": {"rotary": Rotary.hope(16, 64)}}
LENGTHS = (4, 9, 7)  # tokens of the head and of two passages
QUESTION = 3
schemes = pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)


def texts(batch: int = 1, lengths=LENGTHS) -> list[torch.Tensor]:
    return list(
        torch.randint(3, 64, (batch, sum(lengths)), generator=torch.Generator().manual_seed(1)).split(lengths, 1)
    )


def llama(**options):
    return convert(tiny("llama"), **options)


def question(batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (batch, QUESTION), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model, prompt: Passage) -> torch.Tensor:
    """Returns the logits of the question that follows a prompt."""
    return model(question(prompt.input_ids.shape[0]), **{CACHE: copy.deepcopy(prompt.cache)}).logits


@torch.no_grad()
def of_one_prefill(model, *parts: torch.Tensor) -> torch.Tensor:
    return model(torch.cat([*parts, question(parts[0].shape[0])], 1)).logits[:, -QUESTION:]


def head_and_passages(model, batch: int = 1) -> list[Passage]:
    head_ids, *others = texts(batch)
    head = prefill_passage(model, head_ids)
    return [head, *(prefill_passage(model, ids, behind=head) for ids in others)]


# ---- what is exact


@schemes
@pytest.mark.parametrize("batch", [1, 2])
def test_a_head_and_one_passage_behind_it_are_one_prefill(options, batch):
    model = llama(**options)
    head, first, second = head_and_passages(model, batch)
    for passage in (first, second):
        expected = of_one_prefill(model, head.input_ids, passage.input_ids)
        assert close(logits(model, join_passages(model, [head, passage])), expected)


@schemes
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)], ids=["in order", "swapped"])
def test_passages_that_are_computed_again_in_full_are_one_prefill(options, batch, order):
    model = llama(**options)
    passages = [head_and_passages(model, batch)[n] for n in order]
    expected = of_one_prefill(model, *(passage.input_ids for passage in passages))
    change = logits(model, join_passages(model, passages)) - expected
    assert change.abs().max() > 0.01  # the error that recomputing removes
    for recompute in (max(LENGTHS), 10**6):
        assert close(logits(model, join_passages(model, passages, recompute=recompute)), expected)


def test_what_a_passage_sees_is_nothing_or_the_head():
    model = llama()
    head_ids, ids, _ = texts()
    alone, behind = prefill_passage(model, ids), prefill_passage(model, ids, behind=prefill_passage(model, head_ids))
    with torch.no_grad():
        whole, own = (cache_of(model(x, use_cache=True)) for x in (torch.cat([head_ids, ids], 1), ids))
    for found, expected, first in ((behind, whole, LENGTHS[0]), (alone, own, 0)):
        for layer, other in zip(found.cache.layers, expected.layers, strict=True):
            assert close(layer.keys, other.keys[:, :, first:]) and close(layer.values, other.values[:, :, first:])
            assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * layer.keys.element_size()


@pytest.mark.parametrize("recompute", [1, 4, 8])
def test_the_first_tokens_of_every_passage_but_the_first_are_computed_again(recompute):
    """The first tokens are computed again with all keys that precede them in the cache. The other tokens do not
    change."""
    model = llama(rerope=6)
    passages = head_and_passages(model)
    found = join_passages(model, passages, recompute=recompute)
    by_hand = copy.deepcopy(passages[0].cache)
    for passage in passages[1:]:
        again = min(recompute, passage.input_ids.shape[1])
        with torch.no_grad():
            model(passage.input_ids[:, :again], **{CACHE: by_hand})
        for index, layer in enumerate(passage.cache.layers):
            by_hand.update(layer.keys[:, :, again:], layer.values[:, :, again:], index)
    for layer, other in zip(found.cache.layers, by_hand.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


def test_the_first_passage_is_left_as_it_is():
    """The first passage of a call is not recomputed. It may have been prefilled after a head, and recomputing it
    without the head would remove the head's effect."""
    model = llama()
    _, first, second = head_and_passages(model)
    joined = join_passages(model, [first, second], recompute=4)
    for layer, own in zip(joined.cache.layers, first.cache.layers, strict=True):
        assert torch.equal(layer.keys[:, :, : LENGTHS[1]], own.keys)


def test_joining_joined_passages():
    model = llama()
    head, first, second = head_and_passages(model)
    nested = join_passages(model, [join_passages(model, [head, first]), second], recompute=2)
    # A call does not compute its first passage again. In the second call this is the joined head and first passage.
    plain = join_passages(model, [head, first, second])
    assert torch.equal(nested.input_ids, plain.input_ids)
    start = sum(LENGTHS[:2])
    assert torch.equal(nested.cache.layers[2].keys[:, :, :start], plain.cache.layers[2].keys[:, :, :start])
    assert not torch.equal(nested.cache.layers[2].keys[:, :, start:], plain.cache.layers[2].keys[:, :, start:])


def test_generate_continues_a_prompt_and_passages_stay_as_they_are():
    model = llama(rerope=6)
    passages = head_and_passages(model)
    before = copy.deepcopy(passages)
    prompt = join_passages(model, passages, recompute=max(LENGTHS))
    ids = torch.cat([prompt.input_ids, question()], 1)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, past_key_values=prompt.cache, **options), model.generate(ids, **options))
    for passage, other in zip(passages, before, strict=True):
        for layer, copied in zip(passage.cache.layers, other.cache.layers, strict=True):
            assert torch.equal(layer.keys, copied.keys) and torch.equal(layer.values, copied.values)


@pytest.mark.skipif(VERSION < (5,), reason="transformers 4 fails itself, because no token is left to read")
def test_a_joined_cache_after_generate_says_how_to_use_it_again():
    model = llama()
    joined = join_passages(model, [prefill_passage(model, ids) for ids in texts()[1:]])
    ids = torch.cat([joined.input_ids, texts()[0]], 1)
    model.generate(ids, past_key_values=joined.cache, max_new_tokens=4, do_sample=False)
    held = joined.cache.get_seq_length()
    with pytest.raises(ValueError, match=rf"the cache holds {held} tokens, .* call join_passages again, or pass copy"):
        model.generate(ids, past_key_values=joined.cache, max_new_tokens=4, do_sample=False)


def test_a_passage_from_a_file():
    model = llama()
    passage = prefill_passage(model, texts()[1])
    read = DynamicCache(config=model.config)
    for index, layer in enumerate(passage.cache.layers):
        read.update(layer.keys, layer.values, index)
    with pytest.raises(ValueError, match=r"passages\[0\].cache: expected a cache that this conversion filled"):
        join_passages(model, [Passage(passage.input_ids, read)])
    again = join_passages(model, [Passage(passage.input_ids, accept_cache(model, read))])
    assert torch.equal(logits(model, again), logits(model, passage))


# ---- what is refused


def refused(model, message: str, error=ValueError) -> None:
    """Checks that both calls raise the error before anything is computed."""
    passage = Passage(texts()[0], DynamicCache())
    for call in (lambda: prefill_passage(model, texts()[0]), lambda: join_passages(model, [passage])):
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_models_that_cannot_move_passages():
    refused(tiny("llama"), "model: expected a converted model, got a stock one")
    refused(revert(llama()), "model: expected a converted model, got a stock one")
    refused(convert(tiny("mistral")), "model: sliding-window layers are not supported")
    refused(torch.nn.Linear(2, 2), "model: expected one transformers decoder")
    refused("model", "model: expected a torch module, got str", TypeError)
    growing = tiny("llama", rope_scaling=ROPE_TYPES["dynamic"])
    refused(convert(growing), "model: a scheme that depends on the length is not supported")


@pytest.mark.skipif(VERSION < (5, 1), reason="convert refuses it: transformers has no static cache for these layers")
def test_layers_without_attention():
    refused(convert(tiny("lfm2")), "model: layers without attention are not supported")


def test_positions_of_several_coordinates(monkeypatch):
    from flashrope.integrations.transformers import reuse

    monkeypatch.setattr(reuse, "axes_of", lambda decoder: 3)
    refused(llama(), "model: positions of several coordinates are not supported")


def test_tokens():
    model = llama()
    for call in (
        lambda ids: prefill_passage(model, ids),
        lambda ids: join_passages(model, [Passage(ids, DynamicCache())]),
    ):
        with pytest.raises(TypeError, match="input_ids: expected a tensor of token numbers, got list"):
            call([[1, 2]])
        for shape in ((3,), (1, 0)):
            with pytest.raises(ValueError, match=re.escape(f"at least one token, got shape {shape}")):
                call(torch.ones(shape, dtype=torch.int64))


def test_passages():
    model = llama()
    ids, two = texts()[1], texts(2)[1]
    passage, other = prefill_passage(model, ids), prefill_passage(model, two)
    for wrong in ([], passage, None):
        with pytest.raises(TypeError, match="passages: expected a list of at least one Passage"):
            join_passages(model, wrong)
    for call, name in (
        (lambda x: join_passages(model, [passage, x]), r"passages\[1\]"),
        (lambda x: prefill_passage(model, ids, behind=x), "behind"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected a Passage, which prefill_passage returns, got Tensor"):
            call(ids)
        with pytest.raises(ValueError, match=f"^{name}: expected a batch of 1, as in the other passages, got 2"):
            call(other)
        longer = Passage(ids, copy.deepcopy(passage.cache))
        model(ids[:, :1], **{CACHE: longer.cache})
        with pytest.raises(
            ValueError, match=rf"^{name}.cache: expected the keys of its input_ids, \(1, 9\), got \(1, 10\)"
        ):
            call(longer)
    for wrong in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match="recompute: expected an integer of at least 0"):
            join_passages(model, [passage], recompute=wrong)


def test_passages_of_another_scheme_or_model():
    passage = prefill_passage(llama(rerope=6), texts()[1])
    for model in (llama(rerope=6), llama(rerope=7)):
        with pytest.raises(ValueError, match=r"passages\[0\].cache: expected a cache that this conversion filled"):
            join_passages(model, [passage])


@pytest.mark.parametrize("kind", ["static", "codes", "offloaded", "nothing"])
def test_other_caches(kind):
    model, ids = llama(), texts()[1]
    cache = {
        "static": lambda: static(model),
        "codes": lambda: CodesCache(model.config, "int8"),
        "offloaded": lambda: DynamicCache(config=model.config),
        "nothing": lambda: None,
    }[kind]()
    if kind == "offloaded":
        cache.offloading = True
    elif cache is not None:
        with torch.no_grad():
            model(ids, past_key_values=cache)
    with pytest.raises(TypeError, match=r"passages\[0\].cache: expected a DynamicCache that keeps all tokens"):
        join_passages(model, [Passage(ids, cache)])


def test_a_cache_with_layers_too_few():
    model = llama()
    passage = prefill_passage(model, texts()[1])
    cut = copy.deepcopy(passage.cache)
    cut.layers = cut.layers[:2]
    with pytest.raises(ValueError, match=r"passages\[0\].cache: expected keys in each of 3 layers, got 2"):
        join_passages(model, [Passage(passage.input_ids, cut)])
