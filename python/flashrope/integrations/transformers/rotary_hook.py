"""Turns off a model's own rotary embedding, so that raw queries and keys reach the attention function and the cache."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle


def disable_model_rotary(decoder: torch.nn.Module) -> list[RemovableHandle]:
    """Makes every rotary embedding of the decoder return cos = 1 and sin = 0. Removing the handles undoes it."""
    return [embedding.register_forward_hook(_no_rotation) for embedding in rotary_embeddings(decoder)]


def rotary_embeddings(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in decoder.modules() if is_rotary_embedding(module)]


def is_rotary_embedding(module: torch.nn.Module) -> bool:
    """Of text; those of a vision tower, which keeps its own attention, have names of their own."""
    name = type(module).__name__
    return name.endswith("RotaryEmbedding") and "Vision" not in name


def _no_rotation(module, args, output):
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)
