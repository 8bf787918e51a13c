"""Tests what ``convert`` serves and refuses in models with multi-head latent attention: DeepSeek, GLM Flash, MiniCPM3
and others."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import families
import released
from families import CALLS, RUNS, SEQLEN, close, logits, padded, schemes, static, tiny, tokens
from flashrope import Rotary
from flashrope.backends import reference
from flashrope.calls.records import AttentionCall
from flashrope.integrations.transformers import CodesCache, convert, join_passages, prefill_passage, revert
from flashrope.schemes.catalogue import SCHEMES, Lengths
from flashrope.schemes.families import families_with
from released import LATENT
from test_transformers import gradients
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache

pytestmark = pytest.mark.skipif(not LATENT, reason="this transformers has no latent attention")
V2, V3 = "DeepSeek V2 Lite", "DeepSeek V3, R1, Kimi K2"
ONE_OF_EACH = [V2, V3]
SMALL = "deepseek_v3"  # 16 channels that do not rotate, then 8 that do


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("case", ["plain", "left", "packed"])
def test_gradients(name, case):
    model = released.released(name).train()
    mask = padded() if case == "left" else None
    kwargs = {"position_ids": families.PACKED} if case == "packed" else {}
    stock = gradients(model, mask, **kwargs)
    mine = gradients(convert(model), mask, **kwargs)
    assert stock.keys() == mine.keys()
    for parameter, grad in stock.items():
        assert close(mine[parameter], grad, 1e-5 * max(1.0, float(grad.abs().max()))), parameter


# ---- schemes


def test_the_scheme_of_the_layers_and_of_the_projections():
    """The layers of DeepSeek V3 reorder interleaved channels into halves before attention. The layers of V2 keep them
    interleaved."""
    half = Rotary.rope(192, rotary_dim=64, first_channel=128)
    pairs = Rotary.rope(192, rotary_dim=64, first_channel=128, interleaved=True)
    for name, expected, projected in (("deepseek_v2", pairs, pairs), ("deepseek_v3", half, pairs)):
        config = CONFIG_MAPPING[name]()
        assert Rotary.from_hf_config(config) == projected
        widths = {field: getattr(config, field) for field in released.WIDTHS}
        assert set(schemes(convert(tiny(name, **widths)))) == {expected}
    config = AutoConfig.for_model("deepseek_v3", rope_interleave=False)
    assert Rotary.from_hf_config(config) == half
    if "minicpm3" in CONFIG_MAPPING:
        assert Rotary.from_hf_config(CONFIG_MAPPING["minicpm3"]()).rotary_dim == 32


def test_the_scale_of_yarn():
    """If mscale equals mscale_all_dim, their factors cancel in the rotary table. The module's softmax scale contains
    the square of the factor that belongs to mscale_all_dim."""
    layer = convert(released.released(V3)).model.layers[0].self_attn
    assert layer._flashrope.rotary.rotated_scale == 1 and layer._flashrope.rotary.temperature == 1
    assert layer.scaling == pytest.approx(192**-0.5 * (0.1 * math.log(4.0) + 1) ** 2)
    changes = released.yarn(4.0, 1.0)["rope_parameters"] | {"mscale": 2.0}
    model = tiny(SMALL, rope_parameters=changes)
    stock = {run: call(model) for run, call in RUNS.items()}
    layer = convert(model).model.layers[0].self_attn
    factor = (0.2 * math.log(4.0) + 1) / (0.1 * math.log(4.0) + 1)
    assert layer._flashrope.rotary.rotated_scale == pytest.approx(factor**2)
    assert all(close(call(model), stock[run]) for run, call in RUNS.items())


def options_of(scheme: str, train: int) -> dict:
    """Returns the options of ``convert`` that ask for a scheme with a training length."""
    if scheme == "p-rope":  # the slowest of four pairs hardly turns in so short a text
        return {"p_rope": 0.25}
    return SCHEMES[scheme].options(Lengths(train, 2 * train))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "stock"])
@pytest.mark.parametrize("name", ["deepseek_v2", SMALL])
def test_a_layer_is_the_formula(name, scheme):
    """Under every scheme of the catalogue, a layer equals the formula in float64 on texts that exceed the training
    length, with and without a cache."""
    train = 136 if scheme.startswith("dual-chunk") else 16  # chunks of dual-chunk are whole tiles of 128
    ids = tokens(seqlen=300 if train > SEQLEN else SEQLEN)
    model = tiny(name, max_position_embeddings=train, num_hidden_layers=1)
    stock = logits(model, ids)
    convert(model, **options_of(scheme, train))
    layer = model.model.layers[0].self_attn
    seen = {}
    for module, key in ((layer.q_b_proj, "q"), (layer.kv_a_proj_with_mqa, "kv")):
        module.register_forward_hook(lambda module, args, out, key=key: seen.__setitem__(key, out.double()))
    layer.o_proj.register_forward_pre_hook(lambda module, args: seen.__setitem__("out", args[0].detach()))
    full = logits(model, ids)
    q = seen["q"].unflatten(-1, (4, 24))
    latents, shared = seen["kv"].split([32, 8], -1)
    norm = layer.kv_a_layernorm
    latents = norm.weight.double() * latents * (latents.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    k, v = (latents @ layer.kv_b_proj.weight.double().T).unflatten(-1, (4, 32)).split(16, -1)
    k = torch.cat([k, shared[:, :, None].expand(-1, -1, 4, -1)], -1)
    rotary = schemes(model)[0]
    if not rotary.interleaved:  # the module reorders the channels that it rotates
        order = [*range(16), *range(16, 24, 2), *range(17, 24, 2)]
        q, k = q[..., order], k[..., order]
    expected, _ = reference.dense_attention(q, k, v, AttentionCall(rotary, True, layer.scaling))
    assert close(seen["out"], expected.detach().flatten(-2))
    assert not close(full, stock, 0.01)
    calls = [*CALLS[:-1], ids.shape[1]]
    assert close(logits(model, ids, calls=calls), full)
    assert close(logits(model, ids, calls=calls, cache=static(model, ids.shape[1] - SEQLEN)), full)


@pytest.mark.parametrize("changes", [{}, dict(rerope=6)], ids=str)
def test_passages_move(changes):
    """Passages can be joined, because nothing in a cache depends on positions: it holds latents, and rotary channels
    before their rotation."""
    model = convert(tiny(SMALL), **changes)
    ids = tokens(1)
    head = prefill_passage(model, ids[:, :9])
    joined = join_passages(model, [head, prefill_passage(model, ids[:, 9:20])], recompute=11)
    expected = logits(model, ids)[:, 20:]
    with torch.no_grad():
        assert close(model(ids[:, 20:], past_key_values=joined.cache).logits, expected)


def test_a_cache_is_cropped_and_reordered():
    model = convert(tiny(SMALL), rerope=6)
    full, cache = logits(model, tokens()), DynamicCache(config=model.config)
    logits(model, tokens(), calls=CALLS, cache=cache)
    cache.crop(-8)
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        found = model(tokens().flip(0)[:, -8:], past_key_values=cache).logits
    assert close(found, full.flip(0)[:, -8:]) and cache.get_seq_length() == SEQLEN


# ---- refusals

INDEXED = ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"]


@pytest.mark.parametrize("name", [name for name in INDEXED if name in families.CAUSAL_LM])
def test_sparse_indexers_are_refused(name):
    """convert raises an error that names the model type, before any forward and even with untested=True."""
    with torch.device("meta"):
        model = families.causal_lm(AutoConfig.for_model(name, num_hidden_layers=2))
    for untested in (False, True):
        message = f"model: not supported, {name} attends only to the keys that its indexer selects"
        with pytest.raises(ValueError, match=message):
            convert(model, untested=untested)
    with pytest.raises(ValueError, match="config: qk_rope_head_dim means multi-head latent attention"):
        Rotary.from_hf_config(model.config)


@pytest.mark.skipif("kimi_linear" not in families.CAUSAL_LM, reason="this transformers has no kimi_linear")
def test_layers_without_a_rotary_embedding_are_refused():
    with torch.device("meta"):
        model = families.causal_lm(AutoConfig.for_model("kimi_linear", num_hidden_layers=2))
    with pytest.raises(ValueError, match="model: not supported, kimi_linear rotates nothing"):
        convert(model)


def test_what_else_is_refused():
    model = convert(tiny(SMALL))
    with pytest.raises(ValueError, match="cache_dtype: latent attention is not supported .* got 'deepseek_v3'"):
        CodesCache(model.config, "int8")
    with pytest.raises(ValueError, match="deepseek_v3 keeps latents.*got .deepseek_v3.|expected transformers 5.19"):
        model.generate_batch(inputs=[[3, 4, 5]], generation_config=transformers.GenerationConfig(max_new_tokens=2))
    with pytest.raises(ValueError, match="rotary: expected head_dim 24 of layer 0, got 16"):
        convert(revert(model), rotary=Rotary.rope(16))
    assert set(families_with("latent")) <= set(families.FAMILIES)
