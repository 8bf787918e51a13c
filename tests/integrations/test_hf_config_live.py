"""Compares Rotary.from_hf_config with the rotary embeddings of transformers."""

import math

import pytest
import torch
from flashrope import Rotary
from flashrope.backends.reference import rotate_by as rotate_reference

transformers = pytest.importorskip("transformers", reason="the comparison with transformers needs transformers")

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + m / 50 for m in range(32)],
    "long_factor": [1.0 + m for m in range(32)],
}
LIVE = {
    "default": ({}, (200,)),
    "linear": ({"rope_type": "linear", "factor": 4.0}, (200,)),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, (1, 512, 513, 2000, 9000)),
    "yarn": ({"rope_type": "yarn", "factor": 16.0}, (200, 5000)),
    "yarn original": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, (200,)),
    "yarn betas": ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}, (200,)),
    "yarn mscale": ({"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}, (200,)),
    "yarn attention factor": ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}, (200,)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        (200, 3000),
    ),
    "longrope": (LONG | {"factor": 4.0}, (200, 512, 513, 2000)),
    "longrope attention factor": (LONG | {"factor": 4.0, "attention_factor": 1.1}, (200, 2000)),
}


def modeling_of(family):
    """Returns the family's modeling module."""
    name = f"transformers.models.{family}.modeling_{family}"
    return pytest.importorskip(name, reason="this transformers lacks the family")


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", LIVE)
def test_llama_of_transformers(name, base):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling, seqlens = LIVE[name]
    fields = dict(hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_theta=base)
    for seqlen in seqlens:
        config = transformers.LlamaConfig(**fields, rope_scaling=dict(scaling) or None)
        rotary = Rotary.from_hf_config(config, seqlen=seqlen)
        embedding = LlamaRotaryEmbedding(config)
        positions = torch.linspace(0, seqlen - 1, 24).long()[None]
        cos, sin = embedding(torch.zeros(1), positions)
        # In float32, base ** x has an error of ln(base) times the rounding of x, plus one rounding for each later step.
        torch.testing.assert_close(
            embedding.inv_freq.double(), rotary.inv_freq, rtol=1.2e-7 * (2 + math.log(base)) / 2, atol=0
        )
        assert float(embedding.attention_scaling) ** 2 == pytest.approx(rotary.temperature, rel=1e-12)
        compare_scores(rotary, positions, lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), seqlen)


@pytest.mark.parametrize("family", ["cohere", "glm", "ernie4_5", "helium"])
def test_interleaved_families_of_transformers(family):
    name, modeling = FAMILY_NAMES[family], modeling_of(family)
    config = getattr(transformers, f"{name}Config")()
    rotary = Rotary.from_hf_config(config)
    positions = torch.arange(24)[None]
    cos, sin = getattr(modeling, f"{name}RotaryEmbedding")(config)(torch.zeros(1), positions)
    assert rotary.interleaved
    compare_scores(rotary, positions, lambda q, k: modeling.apply_rotary_pos_emb(q, k, cos, sin), 24)


def test_gptj_of_transformers():
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    config = transformers.GPTJConfig()
    rotary, positions = Rotary.from_hf_config(config), torch.arange(24)[None]
    sin, cos = create_sinusoidal_positions(24, config.rotary_dim)[None].chunk(2, dim=-1)

    def rotate(*tensors):
        for x in tensors:
            x = x.transpose(1, 2)
            rotated = apply_rotary_pos_emb(x[..., : config.rotary_dim], sin, cos)
            yield torch.cat([rotated, x[..., config.rotary_dim :]], dim=-1).transpose(1, 2)

    compare_scores(rotary, positions, rotate, 24)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_layer_types_of_transformers(family, layer_type):
    modeling = modeling_of(family)
    small = dict(num_hidden_layers=6, vocab_size=8, hidden_size=64, intermediate_size=8, num_attention_heads=2)
    small |= dict(num_key_value_heads=1)
    if family == "gemma3":
        config = transformers.Gemma3TextConfig(**small, head_dim=32)
        model = modeling.Gemma3TextModel(config)
    else:
        config = transformers.Olmo3Config(**small)
        model = modeling.Olmo3Model(config)
    rotary = Rotary.from_hf_config(config, layer_type)
    if hasattr(model, "rotary_embs"):  # olmo3 of 4.57
        inv_freq = model.rotary_embs[layer_type].inv_freq
    elif hasattr(model, "rotary_emb_local"):  # gemma3 of 4.57
        inv_freq = (model.rotary_emb_local if layer_type == "sliding_attention" else model.rotary_emb).inv_freq
    else:
        name = f"{layer_type}_inv_freq"  # olmo3 of 5.0 has one table
        inv_freq = getattr(model.rotary_emb, name if hasattr(model.rotary_emb, name) else "inv_freq")
    torch.testing.assert_close(inv_freq.double(), rotary.inv_freq, rtol=1e-6, atol=0)


def configured(family, **fields):
    """Returns a configuration and the rotary table that the family computes from it."""
    name, modeling = FAMILY_NAMES[family], modeling_of(family)
    sizes = dict(hidden_size=256, num_attention_heads=4, max_position_embeddings=512)
    config = getattr(transformers, f"{name}Config")(**sizes, **fields)
    return config, getattr(modeling, f"{name}RotaryEmbedding")(config).inv_freq.double()


FAMILY_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "granite": "Granite",
    "olmo2": "Olmo2",
    "cohere": "Cohere",
    "starcoder2": "Starcoder2",
    "glm": "Glm",
    "glm4": "Glm4",
    "nemotron": "Nemotron",
    "persimmon": "Persimmon",
    "phi": "Phi",
    "phi3": "Phi3",
    "stablelm": "StableLm",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "ernie4_5": "Ernie4_5",
    "helium": "Helium",
}
WHOLE = ["llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "cohere", "starcoder2"]


@pytest.mark.parametrize("family", WHOLE)
def test_families_of_transformers_that_rotate_whole_heads(family):
    """from_hf_config refuses partial_rotary_factor for families that rotate whole heads. transformers 5 ignores the
    field in these families. In older versions, the field makes their attention fail."""
    _, whole = configured(family, head_dim=64)
    config, table = configured(family, head_dim=64, partial_rotary_factor=0.5)
    if int(transformers.__version__.split(".")[0]) >= 5:
        assert torch.equal(table, whole)
    with pytest.raises(ValueError, match=f"partial_rotary_factor = 0.5 is not read by the code of '{family}'"):
        Rotary.from_hf_config(config)
    config, table = configured(family, head_dim=64, partial_rotary_factor=1.0)
    torch.testing.assert_close(table, Rotary.from_hf_config(config).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["glm", "glm4", "nemotron", "persimmon", "phi", "phi3", "stablelm"])
def test_families_of_transformers_that_rotate_a_part(family):
    config, table = configured(family, head_dim=64, partial_rotary_factor=0.25)
    assert Rotary.from_hf_config(config).rotary_dim == 16
    torch.testing.assert_close(table, Rotary.from_hf_config(config).inv_freq, rtol=1e-6, atol=0)


def test_alpha_of_transformers():
    scaling = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    config, table = configured("hunyuan_v1_dense", head_dim=64, rope_scaling=dict(scaling))
    torch.testing.assert_close(table, Rotary.from_hf_config(config).inv_freq, rtol=1e-6, atol=0)
    config, table = configured("llama", head_dim=64, rope_scaling=dict(scaling))
    assert torch.equal(table, configured("llama", head_dim=64)[1])
    with pytest.raises(ValueError, match="alpha = 1000.0 is read by .* and not by 'llama'"):
        Rotary.from_hf_config(config)


def compare_scores(rotary, positions, rotate, seqlen):
    """Compares scores of random q and k: transformers rotates them in float32, and the reference in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, positions.shape[1], rotary.head_dim, generator=generator)
    theirs = torch.einsum("bhid,bhjd->bhij", *(x.double() for x in rotate(q, k)))
    q, k = (rotate_reference(x.transpose(1, 2).double(), rotary, positions[0].double()) for x in (q, k))
    ours = rotary.temperature * torch.einsum("bihd,bjhd->bhij", q, k)
    # At position p, rounding the angle to float32 gives an error of p * 6e-8 radians, and the error of the frequency
    # gives p * 1e-6. A score is a sum of D products, so its error is the norm of their errors.
    atol = (1e-5 + 2e-6 * seqlen) * rotary.temperature * math.sqrt(rotary.head_dim)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=atol)
