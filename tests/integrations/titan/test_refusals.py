"""Tests that bad input raises an error when torchtitan applies the override, before it builds a model."""

import warnings
from importlib import import_module

import pytest
import trainings


def apply(config) -> list:
    """Applies the override and returns the configurations of the attention layers."""
    from torchtitan.config.override import apply_overrides

    model = config.model_spec.model
    if hasattr(model, "layers"):
        model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return [layer.attention for layer in getattr(model, "layers", [])]


def scheme_of(given: dict, family: str = "llama3", seqlen: int = trainings.SEQLEN):
    from flashrope import Rotary

    return Rotary.from_text(apply(trainings.settings(family, given, 1, seqlen=seqlen))[0].inner_attention.rotary)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"scheme": "hoppe"}, ValueError, "scheme: expected one of stock, .*got 'hoppe'; did you mean hope"),
        ({"rerop": 8}, TypeError, "options: expected names among .*got 'rerop'; did you mean rerope"),
        ({"rerope": 8, "self_extend": [8, 2]}, ValueError, "self_extend: expected at most one of .*got also rerope"),
        ({"hope": -1}, ValueError, "hope: expected"),
        ({"rotary": "no text"}, ValueError, "rotary: expected the text of a Rotary, got 'no text'"),
    ],
)
def test_unknown_options(given, error, message):
    with pytest.raises(error, match=message):
        trainings.trainer(trainings.settings("llama3", given, 1))


def test_a_rotary_of_another_model():
    from flashrope import Rotary

    with pytest.raises(ValueError, match="rotary: expected head_dim 16, as in the model, got 32"):
        scheme_of({"rotary": Rotary.rope(32, interleaved=True).text})
    with pytest.raises(ValueError, match="rotary: expected interleaved True, as in the model, got False"):
        scheme_of({"rotary": Rotary.rope(16).text})


@pytest.mark.parametrize(
    "family, flavor, name",
    [
        ("deepseek_v3", "debugmodel", "deepseek_v3.model.Attention"),
        ("kimi_k2_7", "debugmodel", "Attention"),
        ("gpt_oss", "debugmodel", "gpt_oss.model.Attention"),
        ("muse_glimmer", "debugmodel", "muse_glimmer.model.Attention"),
        ("flux", "flux-debug", "flux.model.layers.SelfAttention"),
    ],
)
def test_models_with_another_attention(family, flavor, name):
    config = trainings.settings("llama3", {})
    config.model_spec = import_module(f"torchtitan.models.{family}").model_registry(flavor)
    with pytest.raises(ValueError, match=f"model: expected layers with torchtitan's GQAttention .*got .*{name}"):
        from torchtitan.config.override import apply_overrides

        apply_overrides(config.override, config)


def test_another_inner_attention():
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

    for inner, message in [
        (ScaledDotProductAttention.Config(), "expected torchtitan's FlexAttention or VarlenAttention"),
        (VarlenAttention.Config(window_size=(7, 0)), r"expected window_size \(-1, 0\), causal, got \(7, 0\)"),
    ]:
        config = trainings.settings("llama3", {}, 1)
        config.model_spec.model.layers[0].attention.inner_attention = inner
        with pytest.raises(ValueError, match=message):
            apply(config)


def test_a_mask_that_the_call_cannot_express():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    inner = apply(trainings.settings("llama3", {}, 1))[0].inner_attention.build()
    q = torch.randn(1, 8, 2, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")
    with pytest.raises(TypeError, match="attention_masks: expected None or VarlenMetadata, got BlockMask"):
        inner(q, q, q, attention_masks=mask)


def test_context_parallelism():
    from torchtitan.distributed.context_parallel import apply_cp_to_forward

    inner = apply(trainings.settings("llama3", {}, 1))[0].inner_attention.build()
    with pytest.raises(NotImplementedError, match="Variable-length attention CP"):
        apply_cp_to_forward([inner], None)


@pytest.mark.parametrize("given", [{"hope": 512}, {"cope": 512}, {"log_n": 512}])
def test_another_training_length_warns(given):
    name = next(iter(given))
    with pytest.warns(UserWarning, match=f"{name}: expected the training's seq_len {trainings.SEQLEN}, got 512"):
        scheme_of(given)


def test_every_scheme_of_the_catalogue():
    from flashrope import Rotary
    from flashrope.schemes.catalogue import SCHEMES, Lengths, apply_options

    own = scheme_of({"scheme": "stock"}, "qwen3")
    assert own == Rotary.rope(128, 1_000_000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, scheme in SCHEMES.items():
            want = apply_options(own, scheme.options(Lengths(512, 512)))
            assert scheme_of({"scheme": name}, "qwen3", 512) == want, name
    assert scheme_of({}) == scheme_of({"scheme": "hope"}) == scheme_of({"hope": trainings.SEQLEN})
    assert scheme_of({"log_n": True}) == scheme_of({"scheme": "stock"}).log_n(trainings.SEQLEN)
    assert scheme_of({}).interleaved and not scheme_of({}, "qwen3").interleaved
