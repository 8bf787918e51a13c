"""Tests models whose modules do more than their weights say: hooks, replaced forwards, offloaded and quantized weights.
LatentCache and SharedKeysCache read weights instead of calling the modules only if this gives the same results."""

import contextlib
import types

import pytest
import torch
from torch.nn.utils import parametrize

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from families import CALLS, HERE, close, converted, logits, padded, tiny, tokens
from flashrope.integrations.transformers import LatentCache, SharedKeysCache, convert, revert
from flashrope.integrations.transformers import attending as attention
from flashrope.integrations.transformers import conversion_plan as plan
from transformers import DynamicCache

LATENT, SHARED = "deepseek_v3", "gemma4_unified_text"
CACHES = {name: kind for name, kind in {LATENT: LatentCache, SHARED: SharedKeysCache}.items() if name in HERE}
needs_latent = pytest.mark.skipif(LATENT not in HERE, reason="this transformers caches no latents")
needs_shared = pytest.mark.skipif(SHARED not in HERE, reason="this transformers has no Gemma 4")


@pytest.fixture
def absorbed(monkeypatch):
    """Records the layers that absorb projections."""
    found, absorb = [], attention.absorb

    def watched(module, query):
        found.append(module.layer_idx)
        return absorb(module, query)

    monkeypatch.setattr(attention, "absorb", watched)
    return found


# ---- ways to change what a module computes while a context is open: each scales its output or its input by 1.5


def forward_hook(module):
    return module.register_forward_hook(lambda module, args, out: 1.5 * out)


def pre_hook(module):
    return module.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


def global_hook(module):
    def hook(each, args, out):
        return 1.5 * out if each is module else None

    return torch.nn.modules.module.register_module_forward_hook(hook)


@contextlib.contextmanager
def own_forward(module):
    stock = type(module).forward
    module.forward = types.MethodType(lambda self, x: 1.5 * stock(self, x), module)
    yield
    del module.forward


@contextlib.contextmanager
def accelerate_hook(module):
    hooks = pytest.importorskip("accelerate", reason="accelerate is not installed").hooks

    class Scale(hooks.ModelHook):
        def post_forward(self, module, output):
            return 1.5 * output

    hooks.add_hook_to_module(module, Scale())
    yield
    hooks.remove_hook_from_module(module)


CHANGES = [forward_hook, pre_hook, own_forward, global_hook, accelerate_hook]


@needs_latent
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_projection_is_called(change, absorbed):
    model = tiny(LATENT)
    plain = logits(model, tokens(), calls=CALLS)
    with change(model.model.layers[1].self_attn.kv_b_proj):
        stock = logits(model, tokens(), calls=CALLS)
        assert not close(stock, plain, 0.05)
        convert(model)
        assert close(logits(model, tokens(), calls=CALLS, cache=LatentCache(model.config)), stock)
        assert 1 not in absorbed and (change is global_hook or {0, 2} <= set(absorbed))
    assert close(logits(model, tokens(), calls=CALLS, cache=LatentCache(model.config)), plain)
    assert 1 in absorbed


@needs_shared
@pytest.mark.parametrize("norm", ["k_norm", "v_norm"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_norm_is_refused(change, norm):
    model = convert(tiny(SHARED))
    layer = next(module for module in converted(model) if module._flashrope.window is None)
    got = "k_norm" if change is global_hook else norm  # a global hook may change any module
    message = rf"a SharedKeysCache is not supported by layer {layer.layer_idx} .* got a {got} that has .*DynamicCache"
    with change(getattr(layer, norm)):
        for ids in (tokens(), tokens()[:, :1]):
            with pytest.raises(ValueError, match=message):
                logits(model, ids, calls=[ids.shape[1]], cache=SharedKeysCache(model.config))
        logits(model, tokens(), calls=CALLS, cache=DynamicCache(config=model.config))
    logits(model, tokens(), calls=CALLS, cache=SharedKeysCache(model.config))


@needs_shared
def test_a_norm_of_another_class_is_refused():
    model = convert(tiny(SHARED))
    layer = next(module for module in converted(model) if module._flashrope.window is None)

    class Louder(type(layer.k_norm)):
        def forward(self, x):
            return 1.5 * super().forward(x)

    layer.k_norm.__class__ = Louder
    with pytest.raises(ValueError, match="got a k_norm that is a Louder, and v_norm a "):
        logits(model, tokens(), calls=CALLS, cache=SharedKeysCache(model.config))


class Larger(torch.nn.Module):
    def forward(self, weight):
        return 1.5 * weight


@pytest.mark.parametrize("name", CACHES)
def test_parametrized_weights(name):
    model = tiny(name)
    for module in model.modules():
        for each in ("kv_b_proj", "k_norm"):
            if isinstance(getattr(module, each, None), torch.nn.Module):
                parametrize.register_parametrization(getattr(module, each), "weight", Larger())
    stock = logits(model, tokens(), calls=CALLS)
    convert(model)
    assert close(logits(model, tokens(), calls=CALLS, cache=CACHES[name](model.config)), stock)


# ---- weights on the meta device


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("name", ["llama", *CACHES])
def test_offloaded_weights(name, buffers):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny(name)
    stock = logits(model, tokens(), padded(), calls=CALLS)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=buffers)
    assert all(parameter.is_meta for parameter in model.parameters())
    convert(model)
    assert close(logits(model, tokens(), padded(), calls=CALLS), stock)
    if name == LATENT:
        assert close(logits(model, tokens(), padded(), calls=CALLS, cache=LatentCache(model.config)), stock)
    elif name == SHARED:
        with pytest.raises(ValueError, match="got a k_norm that has a hook of accelerate; use a DynamicCache"):
            logits(model, tokens(), calls=CALLS, cache=SharedKeysCache(model.config))


def test_an_untested_type_with_offloaded_weights(monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setattr(plan, "FAMILIES", frozenset())
    model = accelerate.cpu_offload(tiny("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match="untested: expected weights in memory, .* model.embed_tokens.weight on the meta"
    ):
        convert(model, untested=True)


# ---- weights that torchao quantized

QUANTIZED = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"]
ROUNDS = "Int8DynamicActivationInt8WeightConfig"


def quantized(name: str, config: str):
    """Returns a model whose linear layers torchao quantized."""
    quantization = pytest.importorskip("torchao", reason="torchao is not installed").quantization
    model = tiny(name)
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model.model.layers[0].self_attn.o_proj.weight) is not torch.nn.Parameter
    return model


@pytest.mark.parametrize("config", QUANTIZED)
@pytest.mark.parametrize("name", ["llama", *CACHES])
def test_weights_of_torchao(name, config):
    if (name, config) == (SHARED, "Float8WeightOnlyConfig"):
        pytest.skip("the stock model's logits are nan")
    model = quantized(name, config)
    stock = logits(model, tokens(), padded(), calls=CALLS)
    convert(model)
    assert close(logits(model, tokens(), padded(), calls=CALLS), stock)
    if name in CACHES:
        assert close(logits(model, tokens(), padded(), calls=CALLS, cache=CACHES[name](model.config)), stock)
    assert torch.equal(logits(revert(model), tokens(), padded(), calls=CALLS), stock)


def test_activations_that_torchao_quantizes():
    model = quantized("llama", ROUNDS)
    stock = logits(model, tokens())
    # The bound is large because a change of 1e-7 can round to the next int8 value.
    assert close(logits(convert(model), tokens()), stock, 0.3)
    assert torch.equal(logits(revert(model), tokens()), stock)


# ---- gradients of the weights


TRAINED = [
    (LATENT, "kv_b_proj"),
    (LATENT, "q_b_proj"),
    (SHARED, "k_norm"),
    (SHARED, "q_norm"),
    *((n, ".") for n in CACHES),
]


@pytest.mark.parametrize("name, trained", [case for case in TRAINED if case[0] in CACHES])
def test_gradients_over_a_cache(name, trained):
    """Weights get the gradients that they get over transformers' cache, whichever weights are trained."""
    model = convert(tiny(name))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in parameter_name)
    found = []
    for prefill in (torch.no_grad, torch.enable_grad):
        for cache in (DynamicCache(config=model.config), CACHES[name](model.config)):
            model.zero_grad()
            with prefill():
                model(tokens()[:, :20], past_key_values=cache)
            model(tokens()[:, 20:], past_key_values=cache).logits.square().sum().backward()
            found.append({key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None})
    for stock, mine in (found[:2], found[2:]):
        assert stock.keys() == mine.keys()
        assert all(close(mine[key], stock[key], 1e-5 * float(stock[key].abs().max())) for key in stock)
