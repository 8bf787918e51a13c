"""Which parts of a torchtitan model the override claims, and which of them it takes."""

from __future__ import annotations

from abc import ABCMeta

from torchtitan.config import Configurable
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention


class AnyAttention(Configurable.Config, metaclass=ABCMeta):
    """Stands for the configuration of every class with a name that ends in "Attention".

    ``GQAttention.Config`` alone would leave the attention of other models (MLA, Flux) as it is, with no more than a
    warning of torchtitan that nothing was replaced.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, Configurable.Config) and other.__qualname__.endswith("Attention.Config")


def head_dim_of(attention) -> int:
    """Of a GQAttention's configuration, which may leave it to the width and the heads."""
    return attention.dim // attention.n_heads if attention.head_dim is None else attention.head_dim


def check_attention(config) -> None:
    """
    Raises:
        ValueError: not an attention that calls ``rope`` and then ``inner_attention``, or not with masks of documents.
    """
    if type(config) is not GQAttention.Config:
        name = f"{type(config).__module__}.{type(config).__qualname__.removesuffix('.Config')}"
        raise ValueError(f"model: expected layers with torchtitan's GQAttention (llama3, qwen3), got {name}")
    inner = config.inner_attention
    if not isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        raise ValueError(
            "inner_attention: expected torchtitan's FlexAttention or VarlenAttention, whose masks are those of packed "
            f"documents, got {type(inner).__qualname__.removesuffix('.Config')}"
        )
    if isinstance(inner, VarlenAttention.Config) and tuple(inner.window_size) != (-1, 0):
        raise ValueError(f"inner_attention: expected window_size (-1, 0), causal, got {tuple(inner.window_size)}")
