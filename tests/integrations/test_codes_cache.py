"""Tests CodesCache, in which converted models attend to quantized keys and values. When transformers reorders or crops
the cache, scales stay with their quantized values."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import CALLS, SEQLEN, tiny
from flashrope.calls.int8 import dequantize, quantize
from flashrope.integrations.transformers import CodesCache, convert, revert
from flashrope.integrations.transformers.versions import CACHE
from transformers import Cache
from transformers.cache_utils import DynamicLayer, QuantizedLayer


class RoundedLayer(DynamicLayer):
    """Rounds keys and values as quantization does, but stores them in float32."""

    def update(self, *states, **kwargs):
        return super().update(*(dequantize(*quantize(x), torch.float32) for x in states[:2]))


def codes_cache(config):
    return CodesCache(config, "int8")


def rounded_cache(config):
    return Cache(layers=[RoundedLayer() for _ in range(config.num_hidden_layers)])


def converted(family, **options):
    torch.manual_seed(0)
    model = tiny(family).eval()
    return convert(model, **options)


@pytest.mark.parametrize(
    "family, options",
    [("llama", {}), ("llama", {"rerope": 8, "log_n": 16}), ("mistral", {}), ("qwen3", {"yarn": (4.0, 16)})],
    ids=["rope", "rerope", "sliding window", "yarn"],
)
@torch.no_grad()
def test_calls_over_codes_are_those_over_what_they_stand_for(family, options):
    model, ids = converted(family, **options), torch.randint(64, (2, SEQLEN))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for padding in (None, mask):
        caches = codes_cache(model.config), rounded_cache(model.config)
        begin, pieces = 0, []
        for end in CALLS:
            seen = None if padding is None else padding[:, :end]
            pieces.append([model(ids[:, begin:end], attention_mask=seen, past_key_values=x).logits for x in caches])
            begin = end
        real = mask.bool() if padding is not None else torch.ones_like(mask).bool()
        codes, rounded = (torch.cat(x, 1)[real] for x in zip(*pieces, strict=True))
        cost = (rounded - model(ids, attention_mask=padding).logits[real]).square().mean().sqrt()
        # A number halfway between two quantized values may be rounded either way.
        assert cost > 1e-3 and (codes - rounded).square().mean().sqrt() < cost / 20
    assert caches[0].get_seq_length() == SEQLEN and caches[0].layers[0].keys.dtype == torch.int8


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@torch.no_grad()
def test_generate(search):
    """Greedy and beam search give the text that a cache of dequantized keys and values gives. Beam search selects rows
    of the cache together with their scales."""
    model, ids = converted("llama"), torch.randint(64, (2, 7))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **search}
    texts = [
        model.generate(ids, past_key_values=make(model.config), **options) for make in (codes_cache, rounded_cache)
    ]
    assert torch.equal(*texts) and texts[0].shape[1] > 8


class LosslessLayer(QuantizedLayer):
    """Implements a layer of transformers' QuantizedCache whose quantization changes nothing."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


@torch.no_grad()
def test_quantized_cache_of_transformers():
    """With transformers' QuantizedCache, whose quantization is lossless here, a converted model gives the same text as
    with a plain cache. The QuantizedCache dequantizes all keys and values for attention. The keys are raw."""
    model, ids = converted("llama", rerope=8), torch.randint(64, (2, 7))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    layers = [LosslessLayer(residual_length=4) for _ in range(model.config.num_hidden_layers)]
    done = model.generate(ids, past_key_values=Cache(layers=layers), **options)
    assert torch.equal(done.sequences, model.generate(ids, **options).sequences)
    assert layers[0]._quantized_keys.shape[2] > ids.shape[1]


@pytest.mark.parametrize("state", ["stock", "reverted"])
@torch.no_grad()
def test_a_model_that_is_not_converted(state):
    model, ids = tiny("llama").eval(), torch.randint(64, (2, 7))
    used = CodesCache(model.config, "int8")
    if state == "reverted":
        convert(model)(ids, past_key_values=used)
        revert(model)
    used.reset()
    caches = [CodesCache(model.config, "int8")]
    if used.get_seq_length():  # in transformers 4, reset keeps the length, so the cache is refused
        with pytest.raises(ValueError, match=f"^{CACHE}: expected a cache that the stock model filled, got 7"):
            model(ids, past_key_values=used)
    else:
        caches.append(used)
    for cache in caches:
        with pytest.raises(ValueError, match=rf"{CACHE}: a CodesCache is not .*; call convert\(model\) first"):
            model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"call convert\(model\) first"):
            model.generate(ids, past_key_values=cache, max_new_tokens=2)
    convert(model)(ids, past_key_values=CodesCache(model.config, "int8"))


def test_what_is_refused():
    model = converted("llama")
    for cache_dtype in (None, "fp8", "int4"):
        with pytest.raises(ValueError, match="cache_dtype: expected .*'int8', got "):
            CodesCache(model.config, cache_dtype)
    odd = tiny("llama", hidden_size=48, num_attention_heads=4, head_dim=12)
    with pytest.raises(ValueError, match="cache_dtype: expected .* head_dim is a multiple of 8 for int8, got 12"):
        CodesCache(odd.config, "int8")
    model.config.layer_types = ["full_attention", "linear_attention", *["full_attention"] * 9]
    with pytest.raises(ValueError, match="cache_dtype: expected a model with attention in every layer"):
        CodesCache(model.config, "int8")
