"""Tests that every architecture that the plugin accepts gives the results of convert() with the same weights."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/run tests it in an environment of its own")

from engine import BOUND, check_rounded, compared, differences, engine, generate
from flashrope import Rotary
from flashrope.integrations.vllm.engine_plan import ARCHITECTURES
from models import VOCABULARY, Rounded, prompt, save_model
from transformers import AutoConfig

REROPE = {"rerope": 24, "log_n": 64}
SLIDING, FULL = "sliding_attention", "full_attention"
HYBRID = dict(sliding_window=48, layer_types=[SLIDING, SLIDING, FULL])
GEMMA4 = dict(  # the head widths are those of the released models
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=256,
    global_head_dim=512,
    sliding_window=48,
    layer_types=[SLIDING, FULL] * 2,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=VOCABULARY,
    tie_word_embeddings=True,
)
SCALED = {
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=64),
    "llama3": dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
}
FAMILIES = {  # architecture: (model_type, changes, options)
    "Gemma2ForCausalLM": (
        "gemma2",
        dict(attn_logit_softcapping=None, query_pre_attn_scalar=20, tie_word_embeddings=True, **HYBRID),
        REROPE,
    ),
    "Gemma3ForCausalLM": ("gemma3_text", dict(query_pre_attn_scalar=20, tie_word_embeddings=True, **HYBRID), REROPE),
    "Gemma4ForCausalLM": ("gemma4_text", GEMMA4, REROPE),
    "GemmaForCausalLM": ("gemma", dict(tie_word_embeddings=True), REROPE),
    "Glm4ForCausalLM": ("glm4", dict(partial_rotary_factor=0.5), REROPE),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        dict(
            use_qk_norm=True,
            first_k_dense_replace=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            partial_rotary_factor=0.5,
        ),
        REROPE,
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        dict(
            num_hidden_layers=4,
            layer_types=[SLIDING, FULL] * 2,
            sliding_window=48,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
        ),
        REROPE,
    ),
    "GraniteForCausalLM": ("granite", dict(attention_multiplier=0.2), REROPE),
    "LlamaForCausalLM": ("llama", {}, REROPE),
    "MistralForCausalLM": ("mistral", dict(sliding_window=None), REROPE),
    "MixtralForCausalLM": ("mixtral", dict(sliding_window=None, num_local_experts=4), REROPE),
    "Phi3ForCausalLM": ("phi3", dict(sliding_window=None), REROPE),
    "Qwen2ForCausalLM": ("qwen2", {}, REROPE),
    "Qwen3ForCausalLM": ("qwen3", {}, REROPE),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        REROPE,
    ),
    "StableLmForCausalLM": ("stablelm", dict(partial_rotary_factor=0.25), REROPE),
}
QWEN3_NEXT = dict(  # vLLM's recurrent layers on the CPU need the widths of the released models
    num_hidden_layers=4,
    head_dim=256,
    partial_rotary_factor=0.25,
    layer_types=["linear_attention"] * 3 + [FULL],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=4,  # with fewer, rounding changes which experts a token gets
)
HYBRIDS = ["Gemma3ForCausalLM", "Gemma4ForCausalLM", "GptOssForCausalLM"]
QUICK = {
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3ForCausalLM",
}  # vLLM takes 8 s to inspect an architecture for the first time


def compare(folder, *all_options):
    for options in all_options:
        with engine(folder, options, max_model_len=512) as llm:
            outputs = generate(llm, [prompt(n) for n in (5, 33, 200)])
        del llm  # its destructor would shut down state that the next engine uses
        assert max(differences(folder, options, outputs)) <= BOUND


def test_all_architectures_are_here():
    assert sorted([*FAMILIES, "Qwen3NextForCausalLM"]) == sorted(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("options, other", [({}, REROPE), (REROPE, {})], ids=["rope", "rerope"])
def test_qwen3_next(options, other, tmp_path):
    """On the CPU, vLLM's recurrent layers run only in bfloat16. So the test asks only that the outputs are closer to
    convert() in float32 under the served scheme than under another scheme."""
    folder = save_model(tmp_path, "qwen3_next", **QWEN3_NEXT)
    with engine(folder, options, max_model_len=512, dtype="bfloat16") as llm:
        outputs = generate(llm, [prompt(200)])
    del llm
    own, wrong = (compared(folder, each, outputs)[0].square().mean().sqrt() for each in (options, other))
    assert own < 0.8 * wrong, (own, wrong)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FAMILIES])
def test_family(name, tmp_path):
    model_type, changes, options = FAMILIES[name]
    compare(save_model(tmp_path, model_type, **changes), {}, options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in HYBRIDS])
def test_rerope_changes_the_layers_that_see_all_keys(name, tmp_path):
    """In a model with sliding windows, rerope and log_n give the results of a scheme by layer type that has them only
    in the layers that see all keys."""
    model_type, changes, _ = FAMILIES[name]
    folder = save_model(tmp_path, model_type, **changes)
    local, whole = (Rotary.from_hf_config(AutoConfig.from_pretrained(folder), kind) for kind in (SLIDING, FULL))
    by_type = {"rotary": {SLIDING: local.text, FULL: whole.rectify(24).log_n(64).text}}
    for served, expected in ((REROPE, by_type), (by_type, REROPE)):
        with engine(folder, served, max_model_len=512) as llm:
            outputs = generate(llm, [prompt(n) for n in (5, 200)])
        del llm
        assert max(differences(folder, expected, outputs)) <= BOUND < 0.01 < max(differences(folder, {}, outputs))


@pytest.mark.parametrize("rope_type", SCALED)
def test_rope_scaling(rope_type, tmp_path):
    scaled = dict(rope_type=rope_type, rope_theta=10000.0, **SCALED[rope_type])
    compare(save_model(tmp_path, "llama", rope_parameters=scaled), REROPE)


def test_sliding_window(tmp_path):
    compare(save_model(tmp_path, "mistral", sliding_window=48), {})


def test_gemma4_with_one_projection_for_keys_and_values(tmp_path):
    """A model with one projection for keys and values gives the results of convert(). vLLM loads the projection twice,
    so its pages hold keys and values separately."""
    compare(save_model(tmp_path, "gemma4_text", **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1), {})


def test_gemma4_over_pages_that_are_reused(tmp_path):
    """After a prefix hit, neither the layers that store keys nor the layers that read these keys compute the shared
    tokens again."""
    folder = save_model(tmp_path, "gemma4_text", **GEMMA4)
    with engine(folder, {}, max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        outputs = generate(llm, [prompt(150)])
        hits = generate(llm, [prompt(150), prompt(150, seed=1)], all_prompt=False)
    assert hits[0].num_cached_tokens >= 96
    assert max(differences(folder, {}, outputs + hits)) <= BOUND


def test_sliding_windows_over_a_quantized_cache(tmp_path):
    """A model with sliding windows in some layers gives the right results over a quantized cache. The layers with and
    without a window have separate groups of pages."""
    model_type, changes, options = FAMILIES["Gemma3ForCausalLM"]
    folder = save_model(tmp_path, model_type, **changes)
    with engine(folder, {**options, "raw_keys": True}, kv_cache_dtype="int8_per_token_head", max_model_len=512) as llm:
        outputs = generate(llm, [prompt(n) for n in (5, 6, 7, 200)])
    check_rounded(folder, options, outputs, Rounded())
