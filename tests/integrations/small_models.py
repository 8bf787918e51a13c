"""Makes small random models of every tested family: their configurations and weights."""

import torch
import transformers
from flashrope.integrations.transformers.versions import VERSION
from flashrope.schemes.families import families_with, family
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Text models that AutoModelForCausalLM does not know, because their checkpoints are vision-language models.
TEXT_ONLY = {"mistral4": "Mistral4ForCausalLM"}
CAUSAL_LM = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | {n: c for n, c in TEXT_ONLY.items() if hasattr(transformers, c)}

COMMON = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.1,
)  # makes attention so sharp that a wrong rotation moves logits by 0.4 to 3
# Values of fields. A configuration that has one of these fields gets the value listed here.
SMALL = dict(
    head_dim=16,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_k=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    shared_intermediate_size=32,
    kv_channels=16,
    n_layer=3,
    n_head=4,
    n_embd=64,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
HYBRID = dict(sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
SHARED = dict(
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=64,
)
CONVOLUTION = dict(layer_types=["conv", "full_attention", "full_attention"])
RECURRENT = dict(layer_types=["linear_attention", "full_attention", "full_attention"])
SCALED_QUERIES = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.5
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    head_dim=8,  # for the rotary embedding
)
DENSE_FIRST = dict(first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
# GEMMA4 gives small models what the released Gemma 4 models have: layers that share keys, and layers with one
# projection for keys and values.
GEMMA4 = dict(head_dim=16, global_head_dim=32, **SHARED)
FAMILIES = {
    "afmoe": HYBRID,
    "apertus": {},
    "arcee": {},
    "aria_text": dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "axk1": dict(LATENT, num_experts_per_tok=2),
    "bailing_hybrid": dict(LATENT, num_experts=4, num_experts_per_token=2, num_expert_group=2, **RECURRENT),
    "bitnet": {},
    "cohere": dict(logit_scale=1.0, use_qk_norm=True),
    "cohere2": dict(logit_scale=1.0, **HYBRID),
    "cohere2_moe": dict(logit_scale=1.0, **HYBRID),
    "cwm": HYBRID,
    "deepseek_v2": dict(LATENT, **DENSE_FIRST, norm_topk_prob=False),
    "deepseek_v3": dict(LATENT, **DENSE_FIRST),
    "diffllama": {},
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, **HYBRID),
    "ernie4_5": {},
    "ernie4_5_moe": dict(moe_num_shared_experts=1, moe_layer_start_index=1),
    "exaone4": HYBRID,
    "exaone_moe": HYBRID,
    "falcon_h1": dict(
        mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8
    ),
    "flex_olmo": {},
    "gemma": dict(head_dim=24),
    "gemma2": dict(head_dim=16, attn_logit_softcapping=None, **HYBRID),
    "gemma3_text": dict(head_dim=16, **HYBRID),
    "gemma3n_text": dict(laurel_rank=8, activation_sparsity_pattern=[0.0] * 4, **SHARED),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": dict(
        head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, **HYBRID
    ),
    "glm": dict(partial_rotary_factor=0.5),
    "glm4": dict(head_dim=16, partial_rotary_factor=0.5),
    "glm4_moe_lite": dict(LATENT, v_head_dim=24),
    "glm4_moe": dict(use_qk_norm=True, first_k_dense_replace=1),
    "gpt_neox": dict(rotary_pct=0.25),
    "gpt_oss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **HYBRID),
    "granite": dict(attention_multiplier=0.2),
    "granite_swa": dict(attention_multiplier=0.2, **HYBRID),
    "granitemoe": dict(attention_multiplier=0.2),
    "granitemoe_swa": dict(attention_multiplier=0.2, **HYBRID),
    "granitemoeshared": dict(attention_multiplier=0.2),
    "helium": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {},
    "laguna": HYBRID,
    "lfm2": CONVOLUTION,
    "lfm2_moe": dict(num_dense_layers=1, **CONVOLUTION),
    "llama": {},
    "longcat_flash": dict(LATENT, num_layers=2, n_routed_experts=4, zero_expert_num=2, moe_topk=2),
    "mellum": HYBRID,
    "minicpm3": dict(LATENT),
    "minimax_m2": dict(rotary_dim=8),
    "ministral": dict(head_dim=16, **HYBRID),
    "ministral3": dict(sliding_window=8, rope_parameters=SCALED_QUERIES),
    "mistral4": dict(LATENT, **DENSE_FIRST | {"head_dim": 24}),
    "mistral": dict(sliding_window=8),
    "mixtral": dict(sliding_window=None, num_local_experts=4),
    "modernbert-decoder": dict(local_attention=16, global_attn_every_n_layers=2),
    "nanochat": {},
    "nemotron": dict(partial_rotary_factor=0.5),
    "olmo": dict(clip_qkv=1.0),
    "olmo2": {},
    "olmo3": HYBRID,
    "olmo_hybrid": RECURRENT,
    "olmoe": {},
    "persimmon": dict(qk_layernorm=True),
    "phi": dict(partial_rotary_factor=0.5),
    "phi3": dict(sliding_window=8),
    "qwen2": dict(use_sliding_window=True, max_window_layers=1, **HYBRID),
    "qwen2_moe": {},
    "qwen3": dict(head_dim=16),
    "qwen3_5_moe_text": RECURRENT,
    "qwen3_5_text": RECURRENT,
    "qwen3_moe": {},
    "qwen3_next": RECURRENT,
    "seed_oss": {},
    "smollm3": dict(no_rope_layers=[1, 1, 0]),
    "solar_open": {},
    "stablelm": dict(partial_rotary_factor=0.25),
    "starcoder2": dict(sliding_window=8),
    "vaultgemma": dict(attn_logit_softcapping=None, **HYBRID),
    "youtu": dict(LATENT),
}
OWN_MASKS = "gets its masks from AttentionMaskInterface"
OWN_ATTENTION = "gets its attention from AttentionInterface"
# {family that convert refuses in older versions of transformers: (newest version in which it is refused, reason)}
OLDER = {
    "diffllama": ((5, 0), OWN_ATTENTION),
    "falcon_h1": ((5, 0), OWN_MASKS),
    "granitemoe": ((4, 57), OWN_MASKS),
    "granitemoeshared": ((4, 57), OWN_MASKS),
    "jetmoe": ((4, 57), "found 0"),
    "lfm2": ((5, 0), "layers without attention"),
    "lfm2_moe": ((5, 0), "layers without attention"),
    "nemotron": ((5, 0), OWN_MASKS),
    "olmo3": ((4, 57), "found 0"),
    "olmoe": ((4, 57), OWN_MASKS),
    "persimmon": ((5, 0), OWN_MASKS),
    "qwen2_moe": ((4, 57), OWN_MASKS),
    "qwen3_next": ((5, 0), "layers without attention"),
    "stablelm": ((5, 0), OWN_MASKS),
    **dict.fromkeys(families_with("latent"), ((4, 57), "has latent attention")),
}
REFUSED_BY_VERSION = {name: reason for name, (last, reason) in OLDER.items() if last >= VERSION and name in CAUSAL_LM}
HERE = [name for name in FAMILIES if name in CAUSAL_LM and name not in REFUSED_BY_VERSION]


def small_config(name: str, **changes):
    """Returns a configuration of three layers, 64 channels and 64 tokens."""
    given = {**COMMON, **FAMILIES.get(name, {}), **changes}
    default = CONFIG_MAPPING[name]().to_dict()
    given |= {field: value for field, value in SMALL.items() if field not in given and default.get(field) is not None}
    return AutoConfig.for_model(name, **given)


def vary(model):
    """Adds random numbers to all vectors (scales of norms, biases, sinks), the same in every call. Initially these
    vectors are ones or zeros. A norm after the rotation would then give the same result as a norm before the rotation,
    so the wrong order would go unnoticed."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):  # gemma3n, gemma4
                module.q_norm.weight *= 2 * module.head_dim**-0.5  # the usual size in trained models
    return model


def tiny(name: str, **changes):
    """Returns a small model in float32, the same in every call."""
    config = small_config(name, **changes)
    torch.manual_seed(0)
    try:
        model = causal_lm(config, attn_implementation="sdpa")
    except ValueError:  # transformers has no sdpa for this family
        torch.manual_seed(0)
        model = causal_lm(config, attn_implementation="eager")
    return vary(model.float().eval())


def causal_lm(config, **options):
    """Returns a causal language model of a configuration."""
    if config.model_type in TEXT_ONLY:
        return getattr(transformers, TEXT_ONLY[config.model_type])._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, **options)


OTHER_DEFAULTS = {"glm4_moe": {"head_dim": 128}}  # no released model has the default, 42


def released_widths(name: str) -> dict[str, int]:
    """Returns {field of a family's configuration that sets a head width: its default}. The defaults are the values of
    the family's first released model."""
    default = CONFIG_MAPPING[name]()
    if family(name).latent:
        fields = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "head_dim"
        return {field: getattr(default, field) for field in fields}
    if getattr(default, "is_heterogeneous", False):
        local, every = (default.per_layer_config[f"{kind}_attention"].head_dim for kind in ("sliding", "full"))
        return {"head_dim": local, "global_head_dim": every}
    width = getattr(default, "head_dim", None) or getattr(default, "kv_channels", None)
    if width is None:
        width = default.hidden_size // default.num_attention_heads
    small = small_config(name)
    field = next((field for field in ("kv_channels", "head_dim") if getattr(small, field, None)), "hidden_size")
    return OTHER_DEFAULTS.get(name, {field: width})


def wide(name: str):
    """Returns a small model with the head widths of released models. Its weights are scaled so that scores are as large
    as with 16 channels, because larger scores would amplify rounding."""
    changes = released_widths(name)
    width = changes.get("head_dim") or changes.get("kv_channels") or changes["hidden_size"]
    if "hidden_size" in changes or name == "helium":  # in helium, hidden_size is heads * head_dim
        changes["hidden_size"] = hidden = COMMON["num_attention_heads"] * width
        changes["initializer_range"] = COMMON["initializer_range"] * (COMMON["hidden_size"] / hidden) ** 0.5
    if "attention_multiplier" in FAMILIES[name]:
        changes["attention_multiplier"] = FAMILIES[name]["attention_multiplier"] * 16 / width
    return tiny(name, **changes)
