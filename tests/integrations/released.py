"""Makes small models in the shapes of released Gemma 4 and latent-attention models. They have few layers, channels and
experts, but the released head widths, key heads, shared layers and rope types."""

from small_models import CAUSAL_LM, REFUSED_BY_VERSION, tiny

LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA4 = dict(
    head_dim=256, global_head_dim=512, sliding_window=8, tie_word_embeddings=False
)  # models with tied embeddings would repeat one token
PER_LAYER = dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=64)
ONE_PROJECTION = dict(attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=[LOCAL, LOCAL, GLOBAL])
EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
WIDTHS = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64)
SPARSE = dict(first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
HEADS = dict(num_key_value_heads=4, q_lora_rank=24)


def yarn(factor: float, mscale: float) -> dict:
    """Returns the rope parameters of a DeepSeek model. The model multiplies its softmax scale by the square of a factor
    that follows from mscale_all_dim."""
    lengths = dict(original_max_position_embeddings=16, beta_fast=32, beta_slow=1)
    parameters = dict(rope_theta=1e4, rope_type="yarn", factor=factor, mscale=mscale, mscale_all_dim=mscale)
    return {"rope_parameters": parameters | lengths}


# {name of a released model: (model type, changes to its configuration)}
SHAPES = {
    "Gemma 4 E2B, E4B": (
        "gemma4_text",
        dict(
            GEMMA4,
            **PER_LAYER,
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            num_key_value_heads=1,
            layer_types=[LOCAL, GLOBAL] * 2,
            use_double_wide_mlp=True,
        ),
    ),
    "Gemma 4 12B": ("gemma4_unified_text", dict(GEMMA4, **ONE_PROJECTION)),
    "Gemma 4 26B-A4B": (
        "gemma4_text",
        dict(
            GEMMA4,
            **ONE_PROJECTION,
            **EXPERTS,
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision",
            num_kv_shared_layers=0,
            num_hidden_layers=3,
        ),
    ),
    "Gemma 4 31B": (
        "gemma4_text",
        dict(
            GEMMA4,
            **ONE_PROJECTION,
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision",
            num_kv_shared_layers=0,
            num_hidden_layers=3,
        ),
    ),
    "DeepSeek V2 Lite": ("deepseek_v2", WIDTHS | SPARSE | HEADS | {"q_lora_rank": None} | yarn(4.0, 0.707)),
    "DeepSeek V3, R1, Kimi K2": ("deepseek_v3", WIDTHS | SPARSE | HEADS | yarn(4.0, 1.0)),
    "GLM-4.7 Flash": ("glm4_moe_lite", WIDTHS | HEADS | dict(qk_nope_head_dim=192, v_head_dim=256)),
}
WHAT = {
    "Gemma 4 E2B, E4B": "layers that share keys, per-layer embeddings",
    "Gemma 4 12B": "one projection for keys and values",
    "Gemma 4 26B-A4B": "one projection for keys and values, experts",
    "Gemma 4 31B": "one projection for keys and values",
    "DeepSeek V2 Lite": "latent attention, interleaved pairs, YaRN with mscale 0.707",
    "DeepSeek V3, R1, Kimi K2": "latent attention, YaRN with mscale 1",
    "GLM-4.7 Flash": "latent attention, values of 256",
}
HERE = [name for name, (model_type, _) in SHAPES.items() if model_type in CAUSAL_LM]
GEMMAS = [name for name in HERE if name.startswith("Gemma")]
LATENT = [name for name in HERE if not name.startswith("Gemma") and SHAPES[name][0] not in REFUSED_BY_VERSION]


def released(name: str, **changes):
    """Returns the small model of this name in float32. It is the same in every call."""
    model_type, shape = SHAPES[name]
    return tiny(model_type, **shape | changes)
