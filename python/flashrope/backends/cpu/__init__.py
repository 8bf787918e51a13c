"""The CPU backend. It calls torch's own flash-attention kernel for the CPU on parts of every band."""

from .attention import DIFFERENTIABLE, backward, forward, rotated_k_shape, unsupported_reason
from .cached import append_to_cache, attention_with_cache

__all__ = [
    "DIFFERENTIABLE",
    "append_to_cache",
    "attention_with_cache",
    "backward",
    "forward",
    "rotated_k_shape",
    "unsupported_reason",
]
