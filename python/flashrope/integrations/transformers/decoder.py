"""Reads a transformers model: which models are accepted, their decoder, attention modules and rotary tables."""

from __future__ import annotations

import math
import sys

import torch
import transformers
from transformers import PreTrainedModel

from ...rotary import Rotary
from .rotary_hook import is_rotary_embedding, rotary_embeddings

# model_type of the decoders that the tests compare with the library's own attention.
FAMILIES = frozenset(
    {
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)


def find_decoder(model) -> PreTrainedModel:
    """The module that holds the layers and the rotary embedding.

    Raises:
        TypeError, ValueError: model is not a module, has not exactly one such decoder, or is of another family.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch module, got {type(model).__name__}")
    found = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(map(is_rotary_embedding, module.children()))
    ]
    if len(found) != 1:
        raise ValueError(
            f"model: expected one transformers decoder with a rotary embedding, found {len(found)} in "
            f"{type(model).__name__}"
        )
    decoder, model_type = found[0], found[0].config.model_type
    if model_type not in FAMILIES:
        raise ValueError(
            "model: expected one of the types that are tested against the library's own attention, "
            f"{', '.join(sorted(FAMILIES))}; got {model_type!r}"
        )
    if not hasattr(sys.modules[type(decoder).__module__], "create_causal_mask"):
        raise ValueError(
            "model: expected one that asks AttentionMaskInterface for its masks, got "
            f"{type(decoder).__name__}, which makes them itself in transformers {transformers.__version__}"
        )
    return decoder


def attention_modules(decoder: PreTrainedModel) -> list[torch.nn.Module]:
    """The attention module of every layer.

    Raises:
        ValueError: their attention is not causal, or caps its scores.
    """
    config = decoder.config
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"model: expected scores without a cap, got attn_logit_softcapping = {config.attn_logit_softcapping}"
        )
    modules = [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
    if len(modules) != config.num_hidden_layers:
        raise ValueError(f"model: expected {config.num_hidden_layers} attention modules, found {len(modules)}")
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if bidirectional or not all(getattr(module, "is_causal", False) for module in modules):
        raise ValueError("model: expected causal attention in every layer, got layers that see keys ahead")
    return modules


def check_tables(decoder: PreTrainedModel, layer_types) -> None:
    """Compares the model's own tables with those of its configuration.

    Raises:
        ValueError: they differ, because this version of transformers reads a field differently.
    """
    tables = [
        (getattr(embedding, name), getattr(embedding, name.replace("original_inv_freq", "attention_scaling")))
        for embedding in rotary_embeddings(decoder)
        for name in [*vars(embedding), *dict(embedding.named_buffers())]
        if name.endswith("original_inv_freq")  # inv_freq may have grown with the length
    ]
    for layer_type in layer_types:
        rotary = Rotary.from_hf_config(decoder.config, layer_type)
        if any(rotary.frequencies) and not any(_same_table(rotary, *table) for table in tables):
            raise ValueError(
                "model: expected a rotary embedding of the frequencies that its configuration gives, "
                f"{rotary!r}; got other ones in transformers {transformers.__version__}, which reads the rope "
                "parameters differently"
            )


def _same_table(rotary: Rotary, inv_freq: torch.Tensor, attention_scaling: float) -> bool:
    rounding = 1e-5 if inv_freq.dtype == torch.float32 else 1e-2
    return (
        inv_freq.numel() == len(rotary.frequencies)
        and torch.allclose(inv_freq.detach().double().cpu(), rotary.inv_freq, rtol=rounding, atol=0)
        and math.isclose(attention_scaling**2, rotary.temperature, rel_tol=1e-5)
    )
