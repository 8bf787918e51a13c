"""Reads a transformers model: which models are accepted, their decoder, attention modules and rotary tables."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ...operators.checks import MAX_HEAD_DIM
from ...rotary.rotary import Rotary
from ..families import families_with, family
from ..hf_config import rotary_of_model
from .layer_schemes import attending_layers
from .rotary_hook import is_rotary_embedding, rotary_embeddings

# model_type of the decoders that the tests compare with the library's own attention.
FAMILIES = frozenset(families_with("tested"))
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def find_decoder(model) -> PreTrainedModel:
    """The module that holds the layers and the rotary embedding.

    Raises:
        TypeError, ValueError: model is not a module, or has not exactly one such decoder.
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
    return found[0]


def check_decoder(decoder: PreTrainedModel) -> None:
    """Refuses decoders that do not go through transformers' registered attention and mask functions, or that rotate in
    another way.

    Raises:
        ValueError: names the class or the model type.
    """
    model_type, version = decoder.config.model_type, transformers.__version__
    if reason := family(model_type).refused:
        raise ValueError(f"model: expected one that rotates as its configuration says, {model_type} {reason}")
    if hasattr(decoder, "_maybe_slice_kv_shared_inputs") and decoder.config.num_kv_shared_layers:
        raise ValueError(
            f"model: expected num_kv_shared_layers = 0, got {decoder.config.num_kv_shared_layers}; such layers get "
            "some rows of q and all keys, without a mask that says which"
        )
    names = vars(sys.modules[type(decoder).__module__])
    if "create_causal_mask" not in names:
        raise ValueError(
            f"model: expected one that asks AttentionMaskInterface for its masks, got {type(decoder).__name__}, which "
            f"makes them itself in transformers {version}"
        )
    if "ALL_ATTENTION_FUNCTIONS" not in names:
        raise ValueError(
            f"model: expected one that asks AttentionInterface for its attention, got {type(decoder).__name__}, which "
            f"computes it itself in transformers {version}"
        )


def attention_modules(decoder: PreTrainedModel) -> list[Any]:
    """The attention module of every layer that attends.

    Raises:
        ValueError: their attention is not causal, or caps its scores.
    """
    config = decoder.config
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"model: expected scores without a cap, got attn_logit_softcapping = {config.attn_logit_softcapping}"
        )
    attending = attending_layers(config)
    if len(attending) < config.num_hidden_layers and VERSION < (5, 1):
        raise ValueError(
            "model: expected transformers 5.1 or newer for a model with layers without attention, got "
            f"{transformers.__version__}, which has no static cache for them"
        )
    modules = [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith("Attention") and getattr(module, "layer_idx", None) in attending
    ]
    if sorted(module.layer_idx for module in modules) != attending:
        raise ValueError(f"model: expected {len(attending)} attention modules, found {len(modules)}")
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if bidirectional or not all(getattr(module, "is_causal", False) for module in modules):
        raise ValueError("model: expected causal attention in every layer, got layers that see keys ahead")
    return modules


def head_dim_of(module: Any) -> int:
    """Returns the head_dim of an attention module."""
    return int(getattr(module, "head_size", None) or module.head_dim)  # gpt_neox has head_size


def check_widths(model_type: str, modules: list[Any]) -> None:
    """Refuses models with a layer whose head_dim is more than the kernels take.

    Raises:
        ValueError: names the layer, its head_dim and the model type.
    """
    for module in modules:
        if (head_dim := head_dim_of(module)) > MAX_HEAD_DIM:
            raise ValueError(
                f"model: head_dim = {head_dim} of layer {module.layer_idx} is not supported (the kernels take a "
                f"head_dim up to {MAX_HEAD_DIM}), got {model_type!r}"
            )


def rotates(module: torch.nn.Module) -> bool:
    """Whether an attention module applies the rotary embedding, as far as its attributes say."""
    if hasattr(module, "force_rope"):  # cohere2_moe
        return bool(module.force_rope or module.sliding_window is not None)
    return bool(getattr(module, "use_rope", True))


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
        rotary = rotary_of_model(decoder.config, layer_type)
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
        and torch.allclose(inv_freq.detach().double().cpu(), rotary.inv_freq.abs(), rtol=rounding, atol=0)
        and math.isclose(attention_scaling**2, rotary.temperature * rotary.rotated_scale, rel_tol=1e-5)
    )
