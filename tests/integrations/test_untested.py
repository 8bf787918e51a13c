"""Tests convert(model, untested=True). For model types that are not in FAMILIES, it first compares converted outputs
with stock outputs. Also tests fields of tested types that the small configurations do not cover.
"""

import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

import all_types
import families
from families import CALLS, ROPE_TYPES, RUNS, SEQLEN, close, logits, padded, schemes, state, static, tiny, tokens
from flashrope import Rotary
from flashrope.integrations.transformers import conversion_plan as plan
from flashrope.integrations.transformers import convert, from_pretrained, revert
from flashrope.integrations.transformers.attending import attention_forward
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated")


@pytest.fixture
def unknown(monkeypatch):
    """Removes Llama from the tested model types within a test."""
    monkeypatch.setattr(plan, "FAMILIES", plan.FAMILIES - {"llama"})


def test_a_model_that_agrees(unknown):
    model = tiny("llama").train()
    before, stock = state(model), logits(model, tokens())
    with pytest.raises(ValueError, match=r"got 'llama'; convert\(model, untested=True\) compares the"):
        convert(model)
    convert(model, untested=True, rerope=6)
    assert schemes(model) == [Rotary.rope(16).rectify(6)] * 3 and not close(logits(model, tokens()), stock, 0.1)
    convert(model, log_n=32)  # needs no untested=True, because the first convert compared the model
    revert(model)
    hooks = {"hooks": before["hooks"]}  # one hook stays, which refuses caches of raw keys
    assert state(model) | hooks == before and torch.equal(logits(model, tokens()), stock)


@pytest.mark.parametrize("constant", [False, True], ids=["trained", "initialized"])
def test_a_model_that_differs(unknown, monkeypatch, constant):
    """convert raises an error if the converted model gives other outputs. The model here scales the channels of rotated
    queries, as hunyuan_v1_dense does. The error is also raised if the scale still has its initial value."""
    model = tiny("llama")
    layer = model.model.layers[1].self_attn
    layer.scale = torch.nn.Parameter(torch.ones(16) if constant else torch.linspace(0.5, 2, 16))
    names = sys.modules[type(layer).__module__]
    rotate = names.apply_rotary_pos_emb

    def rotate_and_scale(q, k, cos, sin, *args, **kwargs):
        q, k = rotate(q, k, cos, sin, *args, **kwargs)
        return q * layer.scale, k

    monkeypatch.setattr(names, "apply_rotary_pos_emb", rotate_and_scale)
    before = state(model)
    with pytest.raises(
        ValueError, match=r"expected 'llama' to give the same outputs .* a difference of .* \(uncached\)"
    ):
        convert(model, untested=True)
    assert state(model) == before
    assert not any("_flashrope_reverted" in vars(module) for module in model.modules())


def test_a_model_that_fails_in_between(unknown):
    model = tiny("llama")
    model.config.rope_theta = 500_000.0
    if getattr(model.config, "rope_parameters", None):
        model.config.rope_parameters["rope_theta"] = 500_000.0
    before = state(model)
    with pytest.raises(ValueError, match="expected a rotary embedding of the frequencies that its configuration gives"):
        convert(model, untested=True)
    assert state(model) == before


def test_a_model_that_shows_nothing(unknown):
    config = AutoConfig.for_model("llama", **families.COMMON | {"initializer_range": 1e-4})
    with pytest.raises(ValueError, match="expected outputs of 'llama' that depend on its rotary embedding"):
        convert(AutoModelForCausalLM.from_config(config), untested=True)


def test_a_decoder_without_a_head(unknown):
    model = convert(tiny("llama").model, untested=True)
    assert len(families.converted(model)) == 3


def test_half_types(unknown):
    convert(tiny("llama").to(torch.bfloat16), untested=True)


def test_reasons_of_refusals():
    """The list of all types gives the right reasons for a few types."""
    found = {name: all_types.outcome(name) for name in ("gpt2", "deepseek_v32", "hunyuan_v1_dense", "falcon", "qwen3")}
    if "deepseek_v32" not in CONFIG_MAPPING:
        del found["deepseek_v32"]
    expected = {
        "gpt2": "no rotary embedding, or one per layer",
        "deepseek_v32": "attends to the keys that an indexer selects (sparse attention)",
        "hunyuan_v1_dense": "scales channels after the rotation",
        "falcon": "makes its masks itself" if families.VERSION < (5, 1) else "computes its attention itself",
        "qwen3": all_types.TESTED,
    }
    assert found == {name: reason for name, reason in expected.items() if name in found}


# ---- fields of tested types


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [20, 12])
def test_head_dims_that_are_not_multiples_of_8(head_dim, interleaved):
    """Heads whose width is not a multiple of 8 are padded with channels of zeros for the kernels."""
    name = "cohere" if interleaved else "llama"
    changes = {"hidden_size": 4 * head_dim} if interleaved else {"head_dim": head_dim}
    model = tiny(name, **changes)
    runs = {name: call(model) for name, call in RUNS.items()}
    convert(model)
    assert schemes(model)[0].head_dim == head_dim
    assert all(close(call(model), runs[name]) for name, call in RUNS.items())
    model.train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    found = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    revert(model).zero_grad()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert close(found, model.model.layers[0].self_attn.q_proj.weight.grad)


def test_the_scale_of_padded_channels():
    """If the model passes no softmax scale, the scale follows from the number of channels without padding."""
    layer = convert(tiny("llama", head_dim=20)).model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 2, 9, 20, generator=torch.Generator().manual_seed(0)).unbind()
    found = attention_forward(layer, q, k, v, None)[0]
    assert torch.equal(found, attention_forward(layer, q, k, v, None, scaling=20**-0.5)[0])
    assert not close(found, attention_forward(layer, q, k, v, None, scaling=24**-0.5)[0], 1e-3)


def test_a_factor_on_rotated_channels():
    """A factor that scales only rotated channels gives the stock model's results. Phi-4-mini has such a factor:
    longrope rotates a part of the channels, and its attention_factor does not scale the other channels."""
    scaling = {"type": "longrope"} | {
        name: ROPE_TYPES["longrope"][name][:6] for name in ("short_factor", "long_factor")
    }
    changes = dict(rope_scaling=scaling, partial_rotary_factor=0.75, original_max_position_embeddings=16)
    model = tiny("phi3", sliding_window=None, **changes)
    within, beyond = tokens(seqlen=14), tokens()
    stock = logits(model, within), logits(model, within, calls=[9, 10, 14]), logits(model, beyond)
    convert(model)
    assert schemes(model)[0].rotated_scale == pytest.approx(
        1 + torch.tensor(4.0).log().item() / torch.tensor(16.0).log().item()
    )
    assert schemes(model)[0].temperature == 1 and schemes(model)[0].rotary_dim == 12
    assert close(logits(model, within), stock[0]) and close(logits(model, within, calls=[9, 10, 14]), stock[1])
    assert close(logits(model, beyond), stock[2])
    convert(model, rerope=SEQLEN)
    assert close(logits(model, beyond), stock[2])
    convert(model, rotary=Rotary.rope(16, rotary_dim=12))
    assert schemes(model)[0].rotated_scale == 1


@pytest.mark.skipif("ministral3" not in families.HERE, reason="this version has no ministral3")
def test_queries_scaled_by_position():
    """Queries are scaled by position only once. The attention of Ministral 3 scales them itself, so a converted model's
    scheme does not. A scheme that is read from the configuration without a model includes the scale."""
    model = tiny("ministral3")
    assert Rotary.from_hf_config(model.config).log_steps_scale == (8, 0.5, 0)
    assert schemes(convert(model))[0].log_steps_scale is None
    revert(model)
    stock = logits(model, tokens(), padded(), calls=CALLS, cache=static(model))
    assert close(logits(convert(model), tokens(), padded(), calls=CALLS, cache=static(model)), stock)
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert not close(logits(model, tokens(), padded(), calls=CALLS), stock, 0.05)


def test_a_saved_untested_model_is_compared_again(unknown, tmp_path):
    model = convert(tiny("llama"), rerope=6, untested=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected one of the types that are tested"):
        from_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, untested=True)
    assert close(logits(loaded, tokens()), logits(model, tokens()))
