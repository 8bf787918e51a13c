"""Turns the models of ``flashrope demo``, and rotary models of the experiments, into ``LlamaForCausalLM``."""

from __future__ import annotations

from pathlib import Path

import torch

from ... import Rotary
from ..small_models.model import LanguageModel, load_checkpoint, trained_length


def read(path: Path):
    """Returns the model of a checkpoint of ``flashrope demo`` or of the experiments, in float32 on the CPU. Raises
    ValueError if the checkpoint cannot be read."""
    model, rotary = load_checkpoint(path)
    return to_llama(model, rotary, trained_length(path))


def to_llama(model: LanguageModel, rotary: Rotary, train_length: int | None):
    """Returns a ``LlamaForCausalLM`` with the same logits, in float32 on the CPU.

    A model with plain RoPE becomes a stock model. Any other scheme is applied by ``convert``, which records it in the
    configuration as "flashrope". max_position_embeddings is the training length.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from ...integrations.transformers import convert

    sizes, base = model.config, rotary.base or 10_000.0
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_dim,
        hidden_act="silu",
        rms_norm_eps=torch.finfo(torch.float32).eps,  # the eps of nn.RMSNorm
        tie_word_embeddings=True,
        rope_theta=base,  # read by transformers 4.57
        rope_parameters={"rope_type": "default", "rope_theta": base},  # read by transformers 5
        bos_token_id=None,
        eos_token_id=None,
        **({"max_position_embeddings": train_length} if train_length else {}),
    )
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict(_weights(model))
    llama.generation_config.bos_token_id = llama.generation_config.eos_token_id = None
    return llama if rotary == Rotary.rope(sizes.head_dim, base) else convert(llama, rotary)


def _weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    own = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    weights = {
        "model.embed_tokens.weight": own["embedding.weight"],
        "lm_head.weight": own["embedding.weight"],
        "model.norm.weight": own["norm.weight"],
    }
    for layer in range(model.config.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        q, k, v = own[ours + "qkv.weight"].chunk(3)
        weights |= {
            theirs + "input_layernorm.weight": own[ours + "attention_norm.weight"],
            theirs + "self_attn.q_proj.weight": q,
            theirs + "self_attn.k_proj.weight": k,
            theirs + "self_attn.v_proj.weight": v,
            theirs + "self_attn.o_proj.weight": own[ours + "out.weight"],
            theirs + "post_attention_layernorm.weight": own[ours + "mlp_norm.weight"],
            **{theirs + f"mlp.{name}_proj.weight": own[ours + name + ".weight"] for name in ("gate", "up", "down")},
        }
    return weights
