"""Lists the properties of each Hugging Face model family that are in its code but not in its configuration.

The facts were read from the code of transformers 4.57.6 to 5.24.0: rotate_half, apply_rotary_pos_emb, complex products
and the attention classes. This file imports only the standard library.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """The facts about a model_type.

    Attributes:
        tested: whether the tests compare converted models with the library's own attention.
        refused: why ``convert`` does not support the family, even if a comparison passes. The text follows the
            model_type in errors.
        interleaved: whether its code pairs channels 2m and 2m + 1.
        reversed: whether its code rotates by the negative angle.
        sliding_only: whether only its sliding-window layers rotate.
        partial: whether its code reads partial_rotary_factor, or rotary_dim. Other families ignore these fields and
            rotate whole heads in transformers 5, and fail in 4.57.
        base: the base of a family whose configuration does not contain it.
        alpha: whether its code reads alpha under the rope type "dynamic".
        latent: whether the family has multi-head latent attention. The first qk_nope_head_dim channels of a head do not
            rotate, and the other qk_rope_head_dim channels do. Values have v_head_dim channels.
        reorders: whether its attention pairs channels 2m and 2m + 1 if rope_interleave is set or missing, and moves
            them qk_rope_head_dim / 2 channels apart. A converted model gets q and k in the new order.
        mrope: "sections" or "interleaved": how pairs are assigned to the coordinates of the position. Other families
            with mrope_section assign pairs in other ways. The order of cohere_compass_text differs between
            transformers 5.17 and 5.23.
        packs: False if its forward makes masks without position_ids, so the stock model mixes up packed sequences.
        not_batched: why continuous batching does not support the family. The text follows the model_type in errors.
        vllm: the family's vLLM architecture, if it rotates only through get_rope and tests compare it with a converted
            model. Other architectures may rotate in a fused kernel, whose rotation cannot be turned off.
    """

    tested: bool = False
    refused: str = ""
    interleaved: bool = False
    reversed: bool = False
    sliding_only: bool = False
    partial: bool = False
    base: float | None = None
    alpha: bool = False
    latent: bool = False
    reorders: bool = False
    mrope: str = ""
    packs: bool = True
    not_batched: str = ""
    vllm: str = ""


TESTED = Family(tested=True)
SCALES_AFTER = "scales every channel of queries and keys after their rotation"
PASSES_NOTHING = "does not pass the arguments of continuous batching to its attention"
SELECTS_KEYS = "attends only to the keys that its indexer selects (sparse attention), which the kernels cannot express"
KEEPS_LATENTS = "keeps latents, which transformers' pages have no room for"
LATENT = Family(tested=True, latent=True, reorders=True, not_batched=KEEPS_LATENTS)
FAMILIES: dict[str, Family] = {
    "afmoe": Family(tested=True, sliding_only=True, packs=False),
    "apertus": TESTED,
    "arcee": TESTED,
    "aria_text": TESTED,
    "axk1": LATENT,
    "axk2": Family(refused=SELECTS_KEYS),
    "bailing_hybrid": LATENT,
    "bamba": Family(partial=True),
    "bitnet": TESTED,
    "blt": Family(interleaved=True),
    "blt_global_transformer": Family(interleaved=True),
    "blt_local_decoder": Family(interleaved=True),
    "blt_local_encoder": Family(interleaved=True),
    "blt_patcher": Family(interleaved=True),
    "codegen": Family(interleaved=True, partial=True, base=10_000.0),
    "cohere": Family(tested=True, interleaved=True),
    "cohere2": Family(tested=True, interleaved=True, sliding_only=True),
    "cohere2_moe": Family(tested=True, interleaved=True),
    "cosmos3_edge_text": Family(mrope="interleaved"),
    "cwm": TESTED,
    "deepseek_v2": LATENT._replace(interleaved=True, reorders=False),
    "deepseek_v3": LATENT,
    "deepseek_v32": Family(refused=SELECTS_KEYS),
    "diffllama": Family(tested=True, not_batched="attends twice in a layer"),
    "dots1": TESTED,
    "dots3_note_audio_encoder": Family(partial=True),
    "dots3_note_text": Family(refused=SELECTS_KEYS),
    "efficientloftr": Family(partial=True),
    "ernie4_5": Family(tested=True, interleaved=True),
    "ernie4_5_moe": Family(tested=True, interleaved=True),
    "ernie4_5_vl_moe_text": Family(interleaved=True),
    "exaone4": Family(tested=True, sliding_only=True),
    "exaone_moe": Family(tested=True, sliding_only=True),
    "falcon_h1": TESTED,
    "flex_olmo": TESTED,
    "flint": Family(sliding_only=True),
    "gemma": Family(tested=True, vllm="GemmaForCausalLM"),
    "gemma2": Family(tested=True, vllm="Gemma2ForCausalLM"),
    "gemma3_text": Family(tested=True, vllm="Gemma3ForCausalLM"),
    "gemma3n_text": TESTED,
    "gemma4_text": Family(tested=True, vllm="Gemma4ForCausalLM"),
    "gemma4_unified_text": Family(tested=True),
    "glm": Family(tested=True, interleaved=True, partial=True),
    "glm4": Family(tested=True, interleaved=True, partial=True, vllm="Glm4ForCausalLM"),
    "glm4_moe": Family(tested=True, partial=True, vllm="Glm4MoeForCausalLM"),
    "glm4_moe_lite": LATENT,
    "glm4v_moe_text": Family(tested=True, partial=True, mrope="sections"),
    "glm4v_text": Family(tested=True, interleaved=True, partial=True, mrope="sections"),
    "glm5_next_text": Family(refused=SELECTS_KEYS),
    "glm_image_text": Family(partial=True, mrope="sections"),
    "glm_moe_dsa": Family(refused=SELECTS_KEYS),
    "glm_ocr_text": Family(tested=True, interleaved=True, partial=True, mrope="sections"),
    "glmasr_encoder": Family(partial=True),
    "gpt_neox": Family(tested=True, partial=True),
    "gpt_neox_japanese": Family(partial=True),
    "gpt_oss": Family(tested=True, packs=False, vllm="GptOssForCausalLM"),
    "gptj": Family(interleaved=True, partial=True, base=10_000.0),
    "granite": Family(tested=True, vllm="GraniteForCausalLM"),
    "granite_swa": TESTED,
    "granitemoe": TESTED,
    "granitemoe_swa": TESTED,
    "granitemoeshared": TESTED,
    "helium": Family(tested=True, interleaved=True),
    "hunyuan_v1_dense": Family(refused=SCALES_AFTER, alpha=True),
    "hunyuan_v1_moe": Family(refused=SCALES_AFTER, alpha=True),
    "hunyuan_vl_text": Family(alpha=True),
    "hy_v3": TESTED,
    "hy_v4": Family(refused=SELECTS_KEYS),
    "hyperclovax": TESTED,
    "jais2": TESTED,
    "jetmoe": TESTED,
    "kimi_linear": Family(refused="rotates nothing: its layers have no rotary embedding"),
    "kolibri1": Family(sliding_only=True),
    "laguna": Family(tested=True, partial=True),
    "lfm2": TESTED,
    "lfm2_moe": TESTED,
    "llama": Family(tested=True, vllm="LlamaForCausalLM"),
    "llama4_text": Family(interleaved=True),
    "longcat_flash": LATENT,
    "mellum": TESTED,
    "mimo_v2_flash": Family(partial=True),
    "minicpm3": LATENT._replace(reorders=False),
    "minimax_m2": Family(tested=True, partial=True),
    "minimax_m3_vl_text": Family(partial=True),
    "ministral": TESTED,
    "ministral3": TESTED,
    "mistral": Family(tested=True, vllm="MistralForCausalLM"),
    "mistral4": LATENT._replace(partial=True),
    "mistral_large4_text": Family(refused=SELECTS_KEYS),
    "mixtral": Family(tested=True, vllm="MixtralForCausalLM"),
    "modernbert-decoder": Family(tested=True, not_batched=PASSES_NOTHING),
    "moonshine": Family(interleaved=True, partial=True),
    "moonshine_streaming": Family(interleaved=True, partial=True),
    "nanochat": Family(tested=True, reversed=True),
    "nemotron": Family(tested=True, partial=True),
    "nemotron3_5_transcribe_asr_audio": Family(partial=True),
    "nemotron3_diarization_audio": Family(partial=True),
    "neomme": Family(partial=True),
    "olmo": TESTED,
    "olmo2": TESTED,
    "olmo3": TESTED,
    "olmo_hybrid": TESTED,
    "olmoe": TESTED,
    "openai_privacy_filter": Family(interleaved=True),
    "paddleocr_vl_text": Family(tested=True, mrope="sections"),
    "pe_audio_encoder": Family(interleaved=True),
    "pe_audio_video_encoder": Family(interleaved=True),
    "pe_video_encoder": Family(interleaved=True),
    "persimmon": Family(tested=True, partial=True),
    "phi": Family(tested=True, partial=True),
    "phi3": Family(tested=True, partial=True, vllm="Phi3ForCausalLM"),
    "phi4_multimodal": Family(partial=True),
    "phimoe": Family(refused="keeps longrope's table for short texts at every length"),
    "qwen2": Family(tested=True, vllm="Qwen2ForCausalLM"),
    "qwen2_5_omni_talker": Family(mrope="sections"),
    "qwen2_5_omni_text": Family(tested=True, mrope="sections"),
    "qwen2_5_vl_text": Family(tested=True, mrope="sections"),
    "qwen2_moe": TESTED,
    "qwen2_vl_text": Family(tested=True, mrope="sections"),
    "qwen3": Family(tested=True, vllm="Qwen3ForCausalLM"),
    "qwen3_5_moe_text": Family(tested=True, partial=True, mrope="interleaved"),
    "qwen3_5_text": Family(tested=True, partial=True, mrope="interleaved"),
    "qwen3_moe": Family(tested=True, vllm="Qwen3MoeForCausalLM"),
    "qwen3_next": Family(tested=True, partial=True, vllm="Qwen3NextForCausalLM"),
    "qwen3_omni_moe_talker_text": Family(mrope="interleaved"),
    "qwen3_omni_moe_text": Family(tested=True, mrope="interleaved"),
    "qwen3_vl_moe_text": Family(tested=True, mrope="interleaved"),
    "qwen3_vl_text": Family(tested=True, mrope="interleaved"),
    "qwen4_exp_text": Family(partial=True, mrope="interleaved"),
    "recurrent_gemma": Family(partial=True),
    "seed_oss": TESTED,
    "smollm3": TESTED,
    "solar_open": TESTED,
    "stablelm": Family(tested=True, partial=True, not_batched=PASSES_NOTHING, vllm="StableLmForCausalLM"),
    "starcoder2": TESTED,
    "step3p5": Family(partial=True),
    "vaultgemma": TESTED,
    "youtu": LATENT,
    "zaya": Family(partial=True),
}


def family(model_type: str) -> Family:
    """Returns the facts about a model type. A type that is not in the table gets the default values."""
    return FAMILIES.get(model_type, Family())


def families_with(field: str) -> list[str]:
    """Returns the model types for which this field is set, in alphabetical order."""
    return sorted(name for name, family in FAMILIES.items() if getattr(family, field))
