"""Compares the schemes read from configurations with mrope_section with the rotary embeddings of transformers'
vision-language models."""

import inspect

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="the comparison with transformers needs transformers")

from flashrope import Rotary, attention
from flashrope.schemes.cos_sin import cos_sin
from flashrope.schemes.families import families_with, family

SECTIONS = {"sections": [4, 6, 6], "interleaved": [6, 5, 5]}
SMALL = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2)


def family_of(model_type: str):
    """Returns (configuration class, modeling module) of a model type. Skips the test if the installed transformers
    lacks the type."""
    family = model_type
    for suffix in ("_talker_text", "_talker", "_text"):
        family = family.removesuffix(suffix)
    modules = []
    for kind in ("configuration", "modeling"):
        name = f"transformers.models.{family}.{kind}_{family}"
        modules.append(pytest.importorskip(name, reason="this transformers lacks the family"))
    for _, cls in inspect.getmembers(modules[0], inspect.isclass):
        if getattr(cls, "model_type", "") == model_type:
            return cls, modules[1]
    pytest.skip(f"this transformers lacks {model_type}")


def config_of(cls, sections):
    """Returns a configuration with head_dim 32."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": sections}
    sizes = SMALL | ({"head_dim": 32} if hasattr(cls, "head_dim") else {})
    config = cls(**sizes, rope_parameters=parameters)
    config.head_dim = 32
    return config


def embedding_of(modeling, config):
    """Returns the rotary embedding of the module that joins the sections of the coordinates."""
    for name, cls in inspect.getmembers(modeling, inspect.isclass):
        if name.endswith("RotaryEmbedding") and "Vision" not in name and cls.__module__ == modeling.__name__:
            if hasattr(cls, "recomposition_frequencies") and hasattr(embedding := cls(config), "mrope_section"):
                return embedding
    pytest.skip("this transformers joins the sections elsewhere")


def position_ids(seqlen: int = 40) -> torch.Tensor:
    """Returns position ids (3, 1, seqlen) whose three coordinates all differ."""
    return torch.randint(0, 50, (3, 1, seqlen), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", families_with("mrope"))
def test_tables_are_those_of_the_family(model_type):
    cls, modeling = family_of(model_type)
    config = config_of(cls, SECTIONS[family(model_type).mrope])
    layer_types = sorted({*(getattr(config, "layer_types", None) or ())} & {*(config.rope_parameters or ())}) or [None]
    embedding, ids = embedding_of(modeling, config), position_ids()
    for layer_type in layer_types:
        rotary = Rotary.from_hf_config(config, layer_type)
        assert len(rotary.axis) == 16
        options = {} if layer_type is None else {"layer_type": layer_type}
        theirs = embedding(torch.zeros(1), ids, **options)
        ours = (x.float() for x in cos_sin(rotary, ids.permute(1, 2, 0)))
        for stock, mine in zip(theirs, ours, strict=True):
            stock = stock[..., ::2] if rotary.interleaved else stock[..., :16]
            torch.testing.assert_close(stock, mine, rtol=0, atol=2e-5)


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "glm4v_text"])
def test_attention_is_that_of_the_family(model_type):
    """Attention over raw q and k equals attention over q and k that the family's own function has rotated."""
    cls, modeling = family_of(model_type)
    config = config_of(cls, SECTIONS[family(model_type).mrope])
    ids = position_ids()
    cos, sin = embedding_of(modeling, config)(torch.zeros(1), ids)
    q, k, v = (torch.randn(1, heads, 40, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 1))
    v = v.expand(-1, 2, -1, -1)
    rotated = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    stock = F.scaled_dot_product_attention(*rotated, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rotary = Rotary.from_hf_config(config)
    torch.testing.assert_close(attention(q, k, v, rotary, positions=ids.permute(1, 2, 0)), stock, rtol=1e-4, atol=2e-5)
    other = attention(q, k, v, rotary, positions=ids.flip(0).permute(1, 2, 0))
    assert (other - stock).abs().max() > 0.01


def test_what_counts_distances_is_refused():
    from flashrope.integrations.transformers.layer_schemes import LayerScheme

    config = config_of(family_of("qwen3_vl_text")[0], SECTIONS["interleaved"])
    assert LayerScheme(config, None, None, True, {}).rotary.axes == 3
    with pytest.raises(ValueError, match="^rerope: not supported in a model with mrope_section .its tokens have 3"):
        LayerScheme(config, None, None, True, {"rerope": 8})
