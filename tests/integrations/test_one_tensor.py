"""Tests SharedKeysCache and LatentCache, which store one tensor per layer. They give the same tokens and logits as the
caches of transformers."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import released
from families import BOUND, CALLS, PADDING, SEQLEN, close, converted, logits, padded, tiny, tokens
from flashrope.integrations.transformers import LatentCache, SharedKeysCache, convert, one_tensor, revert
from flashrope.integrations.transformers import attending as attention
from small_models import LATENT as SMALL_WIDTHS
from transformers import DynamicCache

pytestmark = pytest.mark.skipif(not released.GEMMAS, reason="this transformers caches no latents and has no Gemma 4")
KINDS = {"Gemma 4 12B": SharedKeysCache, "Gemma 4 26B-A4B": SharedKeysCache} | dict.fromkeys(
    released.LATENT, LatentCache
)
ONE_OF_EACH = ["Gemma 4 12B", "DeepSeek V3, R1, Kimi K2"]


@pytest.fixture
def cached(monkeypatch):
    """Records for every call over a cache: (channels of k, channels of v, whether v lies in k, whether keys have
    weights)."""
    found, attend = [], attention.plan_and_attend

    def watched(q, layer, *arguments):
        k, v = layer[:2]
        shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        found.append((k.shape[-1], v.shape[-1], shared, layer.key_weight is not None))
        return attend(q, layer, *arguments)

    monkeypatch.setattr(attention, "plan_and_attend", watched)
    return found


def bytes_of(cache) -> int:
    return sum(
        x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values) if x is not None
    )


@pytest.mark.parametrize("name", KINDS)
def test_logits(name, cached):
    """The logits are the stock model's, also with padding. The calls read the cache's rows in place."""
    model = released.released(name)
    stock = logits(model, tokens(), calls=CALLS), logits(model, tokens(), padded(), calls=CALLS)
    convert(model)
    bound = BOUND * max(1.0, float(stock[0].abs().max()) / 3)
    assert close(logits(model, tokens(), calls=CALLS, cache=KINDS[name](model.config)), stock[0], bound)
    cached.clear()
    assert close(logits(model, tokens(), padded(), calls=CALLS, cache=KINDS[name](model.config)), stock[1], bound)
    wide = [call for call in cached if call[0] > 256]
    steps = len(CALLS) - (0 if name.startswith("Gemma") else 1)  # a prefill expands latents and reads no cache
    layers = sum(module._flashrope.window is None for module in converted(model))
    assert wide == [(512, 512, True, True) if name.startswith("Gemma") else (576, 512, True, False)] * steps * layers


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_tokens(name, how):
    """Greedy decoding, beam search and prompt lookup give the same tokens. Beam search reorders the cache, and prompt
    lookup crops it."""
    model = convert(released.released(name))
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    ids, found = tokens(batch, 14), []
    for cache in (DynamicCache(config=model.config), KINDS[name](model.config)):
        found.append(model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False, **how))
    assert torch.equal(*found) and len(set(found[0][:, 14:].flatten().tolist())) > 1


@pytest.mark.parametrize("changes", [dict(rerope=6, log_n=12), dict(hope=24), dict(ntk=4.0)], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_other_schemes_over_latents(name, changes):
    model = convert(tiny(name), **changes)
    full = logits(model, tokens())
    assert close(logits(model, tokens(), calls=CALLS, cache=LatentCache(model.config)), full)
    row = logits(model, tokens(), padded(), calls=CALLS, cache=LatentCache(model.config))[:1, PADDING:]
    assert close(row, logits(model, tokens()[:1, PADDING:]))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_crop_copy_select_and_repeat(name):
    model = convert(released.released(name))
    cache, full = KINDS[name](model.config), logits(model, tokens())
    ids = tokens()
    bound = BOUND * max(1.0, float(full.abs().max()) / 3)

    def goes_on(cache, ids, expected):
        with torch.no_grad():
            return close(model(ids[:, 20:], past_key_values=cache).logits, expected[:, 20:], bound)

    logits(model, ids[:, :20], calls=[12, 20], cache=cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert goes_on(other, ids, full)
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 0]))
    assert goes_on(other, ids.flip(0), full.flip(0))
    other = copy.deepcopy(cache)
    other.batch_select_indices(torch.tensor([1]))
    other.batch_repeat_interleave(2)
    assert goes_on(other, ids[[1, 1]], full[[1, 1]])
    if name != "Gemma 4 12B":  # a sliding layer that has forgotten a token cannot go back
        logits(model, ids[:, 20:24], calls=[4], cache=(other := copy.deepcopy(cache)))
        other.crop(-4)
        assert other.get_seq_length() == 20 and goes_on(other, ids, full)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_bytes(name):
    """Layers with one projection for keys and values take half as many bytes as in transformers' cache. Latents take as
    many bytes as in transformers' cache of latents."""
    model, sizes = convert(released.released(name)), []
    for cache in (DynamicCache(config=model.config), KINDS[name](model.config)):
        logits(model, tokens(), calls=[SEQLEN], cache=cache)
        sizes.append(bytes_of(cache))
    every = 2 * 1 * SEQLEN * 512 * 4  # bytes for two sequences, one key head, 512 channels in float32
    assert sizes[0] - sizes[1] == (every if name.startswith("Gemma") else 0)


def test_what_is_absorbed(cached):
    """The projections are absorbed only in short calls without gradients, and only if they are plain linear layers."""
    model = convert(tiny("deepseek_v3"))
    ids = tokens(1, 140)
    full, cache = logits(model, ids), LatentCache(model.config)
    assert close(logits(model, ids, calls=[4, 5, 5 + one_tensor.ABSORBED_ROWS, 140], cache=cache), full)
    rank = SMALL_WIDTHS["kv_lora_rank"]
    assert [width for width, *_ in cached] == [rank + 8] * 9 and one_tensor.ABSORBED_ROWS == 128
    cached.clear()
    assert close(
        logits(model, ids, calls=[2, 2 + one_tensor.ABSORBED_ROWS + 1, 140], cache=LatentCache(model.config)), full
    )
    assert [width for width, *_ in cached] == [24] * 3 + [rank + 8] * 3
    cached.clear()
    cache = LatentCache(model.config)
    logits(model, ids[:, :20], calls=[20], cache=cache)
    found = model(ids[:, 20:24], past_key_values=cache).logits  # this call has gradients
    assert not cached and close(found.detach(), full[:, 20:24])
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    assert close(logits(model, ids[:, :100], calls=[4, 5, 100], cache=LatentCache(model.config)), full[:, :100])
    assert [width for width, *_ in cached if width == 24] == [24, 24]


def test_revert_gives_back_the_method():
    model = tiny("deepseek_v3")
    stock = logits(model, tokens(), calls=CALLS)
    other = copy.deepcopy(convert(model))
    assert close(logits(other, tokens(), calls=CALLS, cache=LatentCache(other.config)), stock)
    assert other.model.layers[0].self_attn.expand_kv.args[0] is other.model.layers[0].self_attn
    revert(model)
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)
    assert torch.equal(logits(model, tokens(), calls=CALLS), stock)


def test_refusals():
    for kind, name in ((SharedKeysCache, "Gemma 4 12B"), (LatentCache, "DeepSeek V3, R1, Kimi K2")):
        model = released.released(name)
        message = f"past_key_values: a {kind.__name__} is not supported by a stock model"
        with pytest.raises(ValueError, match=message.replace("past_key_values", ".*")):
            model(tokens(), past_key_values=kind(model.config))
    with pytest.raises(
        ValueError, match=r"config: expected a model with one projection .* got 'gemma4_text' without one"
    ):
        SharedKeysCache(released.released("Gemma 4 E2B, E4B").config)
    with pytest.raises(
        ValueError, match="config: num_kv_shared_layers is not supported with attention_k_eq_v .* got 2"
    ):
        SharedKeysCache(released.released("Gemma 4 E2B, E4B", attention_k_eq_v=True).config)
    with pytest.raises(ValueError, match="config: expected a model with latent attention, one of axk1, .* got 'llama'"):
        LatentCache(tiny("llama").config)
