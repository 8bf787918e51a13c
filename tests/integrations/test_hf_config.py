"""Compares Rotary.from_hf_config with the published formulas. test_hf_config_live.py compares it with transformers."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from flashrope import Rotary

read = Rotary.from_hf_config


def llama(**fields):
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "max_position_embeddings": 4096}
    return SimpleNamespace(**{"model_type": "llama", "rope_theta": 10_000.0} | sizes | fields)


def scaling(rope_type, **fields):
    return {"rope_scaling": {"rope_type": rope_type, **fields}}


def table(dim, base=10_000.0):
    return torch.tensor([base ** (-2 * m / dim) for m in range(dim // 2)], dtype=torch.float64)


def same(rotary, expected, rtol=1e-12):
    torch.testing.assert_close(rotary.inv_freq, torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=0)


# ---- fields
def test_plain():
    assert read(llama()) == Rotary.rope(128)
    assert read(llama(rope_scaling=None)) == Rotary.rope(128)
    assert read(llama(head_dim=None)) == Rotary.rope(128)
    assert read(llama(head_dim=64, rope_theta=5e5)) == Rotary.rope(64, 5e5)
    config = llama(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert read(config) == Rotary.rope(128, 7.0)


@pytest.mark.parametrize(
    "config",
    [
        llama(model_type="phi", partial_rotary_factor=0.25),
        llama(model_type="phi", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        llama(model_type=None, partial_rotary_factor=0.25),
    ],
)
def test_partial_rotary_has_its_own_denominator(config):
    rotary = read(config)
    assert (rotary.head_dim, rotary.rotary_dim) == (128, 32)
    same(rotary, table(32))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_neox", "gemma3_text", "glm4_moe", "unheard_of", None])
def test_half_pairing(model_type):
    assert not read(llama(model_type=model_type)).interleaved


@pytest.mark.parametrize(
    "model_type", ["glm", "glm4", "cohere", "cohere2", "helium", "ernie4_5", "ernie4_5_moe", "llama4_text"]
)
def test_interleaved_pairing(model_type):
    assert read(llama(model_type=model_type)).interleaved


def test_gptj_has_rotary_dim_and_a_base_of_its_own():
    config = llama(model_type="gptj", rope_theta=None, rotary_dim=64, hidden_size=4096, num_attention_heads=16)
    assert read(config) == Rotary.rope(256, 10_000.0, 64, interleaved=True)


def test_nanochat_rotates_backwards():
    same(read(llama(model_type="nanochat")), -table(128))


# ---- rope types
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        scaling("linear", factor=4.0),
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}},
    ],
)
def test_linear(fields):
    rotary = read(llama(**fields))
    same(rotary, table(128) / 4)
    assert rotary.temperature == 1


def test_dynamic_grows_with_seqlen():
    config = llama(rope_scaling={"type": "dynamic", "factor": 2.0})
    for seqlen in (None, 1, 4096):
        assert read(config, seqlen=seqlen) == Rotary.rope(128)
    # bloc97: base * (factor * L / L0 - (factor - 1)) ** (D / (D - 2)); 2 * 3 - 1 = 5
    same(read(config, seqlen=3 * 4096), table(128, 1e4 * 5 ** (128 / 126)))


def test_dynamic_with_alpha_is_fixed():
    config = llama(
        model_type="hunyuan_v1_dense",
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    )
    for seqlen in (None, 100_000):
        same(read(config, seqlen=seqlen), table(128, 1e4 * 1000 ** (128 / 126)))


def test_yarn_ramp_and_temperature_by_hand():
    # L 4096: 128 ln(4096 / 64 pi) / (2 ln 10000) = 20.9 and 128 ln(4096 / 2 pi) / (2 ln 10000) = 45.02
    rotary = read(llama(rope_scaling={"rope_type": "yarn", "factor": 16.0}))
    ramp = [min(max((m - 20) / 26, 0), 1) for m in range(64)]
    same(rotary, [f * (1 - at) + f / 16 * at for f, at in zip(table(128).tolist(), ramp, strict=True)])
    assert rotary.temperature == pytest.approx((0.1 * math.log(16) + 1) ** 2, rel=1e-14)


def test_yarn_fields():
    def yarn(**fields):
        return read(llama(rope_scaling={"rope_type": "yarn", "factor": 8.0} | fields))

    plain = Rotary.rope(128)
    t = 0.1 * math.log(8)
    assert yarn(original_max_position_embeddings=1024) == plain.yarn(8.0, 1024) != yarn()
    assert yarn(truncate=False) == plain.yarn(8.0, 4096, truncate=False) != yarn()
    assert yarn(beta_fast=16, beta_slow=2) == plain.yarn(8.0, 4096, beta_fast=16, beta_slow=2) != yarn()
    assert yarn(beta_fast=None, beta_slow=None, attention_factor=None, truncate=None) == yarn() == plain.yarn(8.0, 4096)
    assert yarn(attention_factor=1.5).temperature == 2.25
    assert yarn(mscale=0.707, mscale_all_dim=0.707).temperature == 1
    assert yarn(mscale=1.0, mscale_all_dim=0.5).temperature == pytest.approx(((1 + t) / (1 + 0.5 * t)) ** 2, rel=1e-14)
    assert yarn(mscale=2.0).temperature == pytest.approx((1 + t) ** 2, rel=1e-14)  # mscale needs mscale_all_dim
    assert yarn(factor=None, original_max_position_embeddings=1024) == plain.yarn(4.0, 1024)


def test_llama3_by_wavelength():
    config = llama(
        rope_theta=5e5,
        max_position_embeddings=131072,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, kinds = [], set()
    for f in table(128, 5e5).tolist():
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            expected.append(f)
        elif wavelength > 8192 / 1:
            expected.append(f / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * f / 8 + smooth * f)
        kinds.add((wavelength < 2048, wavelength > 8192))
    assert len(kinds) == 3
    rotary = read(config)
    same(rotary, expected)
    assert rotary.temperature == 1


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope(name):
    short, long = [1.0 + m / 100 for m in range(64)], [1.0 + m for m in range(64)]
    config = llama(
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": name, "short_factor": short, "long_factor": long},
    )
    for seqlen in (None, 4096):
        same(read(config, seqlen=seqlen), table(128) / torch.tensor(short, dtype=torch.float64))
    rotary = read(config, seqlen=4097)
    same(rotary, table(128) / torch.tensor(long, dtype=torch.float64))
    assert rotary.temperature == pytest.approx(17 / 12, rel=1e-14)  # 1 + ln 32 / ln 4096

    config.rope_scaling |= {"factor": 64.0}
    assert read(config).temperature == pytest.approx(1.5, rel=1e-14)
    config.rope_scaling |= {"attention_factor": 1.5}
    assert read(config).temperature == 2.25
    config.rope_scaling |= {"short_mscale": 1.25, "long_mscale": 2.0}
    assert [read(config, seqlen=n).temperature for n in (10, 5000)] == [1.25**2, 4.0]


def test_proportional_keeps_the_denominator():
    config = llama(rope_parameters={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25})
    rotary = read(config)
    assert rotary.rotary_dim == 128
    same(rotary, table(128, 1e6)[:16].tolist() + [0.0] * 48)
    assert rotary == Rotary.p_rope(128, 0.25, base=1e6)
    config.rope_parameters["factor"] = 2.0
    same(read(config), (table(128, 1e6)[:16] / 2).tolist() + [0.0] * 48)


# ---- layer types
LAYERED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "linear_attention": None,
}


@pytest.mark.parametrize(
    "config",
    [
        llama(
            rope_theta=None,
            rope_parameters=LAYERED,
            layer_types=["full_attention", "sliding_attention", "linear_attention"],
        ),
        llama(
            model_type="gemma3_text",
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
    ],
)
def test_a_table_per_layer_type(config):
    assert read(config, "full_attention") == Rotary.rope(128, 1e6).interpolate(8.0)
    assert read(config, layer_type="sliding_attention") == Rotary.rope(128, 1e4)
    with pytest.raises(
        ValueError, match="^layer_type: rope parameters differ by layer type; give one of full_.*, sliding_"
    ):
        read(config)
    with pytest.raises(ValueError, match="^layer_type: 'slidng_attention' is not known; give one of full_attention"):
        read(config, "slidng_attention")


def test_a_layer_type_without_parameters_does_not_rotate():
    config = llama(rope_parameters=LAYERED, layer_types=list(LAYERED))
    assert read(config, "linear_attention") == Rotary.none(128)


def test_older_fields_of_modernbert_and_olmo3():
    config = llama(model_type="modernbert", global_rope_theta=160_000.0, local_rope_theta=None)
    assert read(config, "sliding_attention") == Rotary.rope(128, 160_000.0)
    config.local_rope_theta = 1e4
    assert read(config, "sliding_attention") == Rotary.rope(128)
    assert read(config, "full_attention") == Rotary.rope(128, 160_000.0)
    config = llama(model_type="olmo3", rope_scaling={"rope_type": "yarn", "factor": 8.0})
    assert read(config, "sliding_attention") == Rotary.rope(128)
    assert read(config, "full_attention") == Rotary.rope(128).yarn(8.0, 4096)
    config = llama(
        model_type="olmo3", rope_theta=None, rope_parameters={"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5}
    )
    assert read(config, "sliding_attention") == Rotary.rope(128, 5e5)  # the form of transformers 5.0
    assert read(config, "full_attention") == Rotary.rope(128, 5e5).yarn(8.0, 4096)


def test_layer_type_of_a_model_with_one_table():
    config = llama(layer_types=["full_attention", "sliding_attention"], sliding_window=64)
    assert read(config, "full_attention") == Rotary.rope(128)
    with pytest.raises(
        ValueError, match="^layer_type: 'global' is not known; give one of full_attention, sliding_attention$"
    ):
        read(config, "global")
    with pytest.raises(
        ValueError, match="^layer_type: 'full_attention' is not known; this configuration has no layer types$"
    ):
        read(llama(), "full_attention")


def test_families_that_rotate_only_where_they_slide():
    config = llama(model_type="cohere2", layer_types=["full_attention", "sliding_attention"], sliding_window=64)
    assert read(config, "full_attention") == Rotary.none(128)
    assert read(config, "sliding_attention") == Rotary.rope(128, interleaved=True)
    assert read(config) == Rotary.rope(128, interleaved=True)
    config.sliding_window = None
    assert read(config, "full_attention") == Rotary.rope(128, interleaved=True)


def test_head_dim_of_the_full_layers():
    config = llama(head_dim=128, global_head_dim=256, rope_parameters=LAYERED)
    assert read(config, "full_attention").head_dim == 256
    assert read(config, "sliding_attention").head_dim == 128


# ---- errors
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            scaling("yarnn", factor=2.0),
            "rope type 'yarnn' is not known; known types are default, linear, dynamic, yarn, llama3, longrope, "
            "proportional, mrope$",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope parameters factor come without a rope_type"),
        (scaling("linear"), "rope type 'linear' needs factor$"),
        (scaling("dynamic"), "rope type 'dynamic' needs factor$"),
        (scaling("longrope"), "rope type 'longrope' needs short_factor$"),
        (scaling("longrope", short_factor=[1.0]), "short_factor has 1 numbers for 64 pairs$"),
        (scaling("llama3", factor=8.0, low_freq_factor=1.0), "rope type 'llama3' needs high_freq_factor$"),
        (
            scaling("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0),
            "expected 0 < low_freq_factor < high_freq_factor, got 4.0 and 1.0$",
        ),
        (scaling("yarn", factor=8.0, beta_fsat=32), "rope parameter 'beta_fsat' is not known"),
        (scaling("default", mrope_section=[16, 24, 24]), "mrope_section assigns a coordinate"),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
                "original_max_position_embeddings": 2048,
            },
            "original_max_position_embeddings is 2048 on the configuration and 1024 among",
        ),
        (
            scaling("dynamic", factor=2.0, alpha=1000.0),
            "alpha = 1000.0 is read by hunyuan_v1_dense, hunyuan_v1_moe, hunyuan_vl_text and not by 'llama'",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5 is not read by the code of 'llama' .*head_dim=128, base, rotary_dim=64",
        ),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim means multi-head latent attention"),
        ({"rope_theta": None}, "expected rope_theta, on the configuration or in rope_parameters"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default"}},
            "expected rope_theta, on the configuration or in rope_parameters",
        ),
        ({"alibi": True}, "alibi is set"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({"image_size": 224, "patch_size": 16}, "image_size and patch_size mean an image encoder"),
        ({"num_attention_heads": None, "text_config": llama()}, "holds a text_config"),
        ({"num_attention_heads": None}, "expected head_dim, or hidden_size and num_attention_heads, got neither$"),
        (
            {"max_position_embeddings": None, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            "max_position_embeddings is missing$",
        ),
    ],
)
def test_errors_name_their_reason(fields, reason):
    with pytest.raises(ValueError, match=f"^config: .*{reason}"):
        read(llama(**fields))


def test_sections_of_positions():
    parameters = {"type": "mrope", "mrope_section": [16, 24, 24]}  # from the first Qwen2-VL checkpoints
    config = llama(model_type="qwen2_vl_text", rope_theta=1e6, rope_scaling=parameters)
    assert read(config) == Rotary.rope(128, 1e6).mrope([16, 24, 24])
    interleaved = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    expected = Rotary.rope(128).mrope([24, 20, 20], interleaved=True)
    for model_type in ("", "qwen3_vl_text"):
        assert read(llama(model_type=model_type, rope_scaling=interleaved)) == expected
    assert read(llama(model_type="qwen2_vl_text")) == Rotary.rope(128)  # text


def test_partial_rotary_with_yarn_scales_the_rotated_channels():
    config = llama(model_type="phi", partial_rotary_factor=0.5, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    yarn = Rotary.rope(128, rotary_dim=64).yarn(8.0, 4096, temperature=1.0)
    found = read(config)
    assert found == yarn.scale_rotated((0.1 * math.log(8.0) + 1) ** 2) and found.temperature == 1


def test_llama_4_scaling():
    """With llama_4_scaling_beta, as in Ministral 3, the query at position i is scaled by 1 + beta ln(1 + floor(i /
    training length))."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "llama_4_scaling_beta": 0.1}
    found = read(llama(rope_scaling=scaling))
    scaling = {name: value for name, value in scaling.items() if name != "llama_4_scaling_beta"}
    assert found == read(llama(rope_scaling=scaling)).log_steps(512, 0.1, first=0)


def test_partial_rotary_with_yarn_is_accepted_when_nothing_is_scaled():
    config = llama(
        model_type="phi",
        partial_rotary_factor=0.5,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0},
    )
    assert read(config) == Rotary.rope(128, rotary_dim=64).yarn(8.0, 4096, temperature=1.0)


@pytest.mark.parametrize("seqlen", [0, -1, 1.5, True, "8"])
def test_seqlen_is_checked(seqlen):
    with pytest.raises(ValueError, match="^seqlen: expected None or a positive integer"):
        read(llama(), seqlen=seqlen)


def test_the_configuration_is_left_alone():
    config = llama(rope_scaling={"type": "su", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64})
    before = copy.deepcopy(vars(config))
    read(config)
    assert vars(config) == before
