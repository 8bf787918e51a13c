"""torchtitan's RoPE: the scheme that its configuration stands for, and a module that leaves q and k as they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

from ...rotary.rotary import Rotary
from ..hf_config import rotary_from_config


def rotary_of(config: RoPE.Config, head_dim: int) -> Rotary:
    """The scheme that a torchtitan model rotates with.

    Raises:
        ValueError: a class of another rotation, or a table of another width.
    """
    if type(config) not in (ComplexRoPE.Config, CosSinRoPE.Config):
        raise ValueError(
            f"rope: expected ComplexRoPE or CosSinRoPE, got {type(config).__qualname__.removesuffix('.Config')}"
        )
    if config.dim != head_dim:
        raise ValueError(f"rope: expected dim {head_dim}, the model's head_dim, got {config.dim}")
    rotary = rotary_from_config(SimpleNamespace(head_dim=head_dim, **hf_fields(config)))
    return dataclasses.replace(rotary, interleaved=isinstance(config, ComplexRoPE.Config))


def hf_fields(config: RoPE.Config) -> dict[str, Any]:
    """The fields of a Hugging Face configuration that say the same, for weights in that library's order.

    Raises:
        ValueError: a scaling that torchtitan itself does not have for this class.
    """
    fields = {"rope_theta": config.theta, "max_position_embeddings": config.max_seq_len, "rope_scaling": None}
    if config.scaling == "llama":
        if isinstance(config, CosSinRoPE.Config):
            raise ValueError("rope: expected scaling none or yarn with CosSinRoPE, got llama")
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.scaling_factor,
            "low_freq_factor": config.low_freq_factor,
            "high_freq_factor": config.high_freq_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
        }
    elif config.scaling == "yarn" and config.rope_factor > 1:
        fields["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "original_max_position_embeddings": config.original_seq_len,
            "truncate": config.truncate,
            "attention_factor": 1.0,  # a GQAttention scales its scores by no factor of YaRN
        }
    return fields


class NoRotation(RoPE):
    """Returns q and k as they came. The inner attention rotates them."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        """
        Attributes:
            original: of the rotation in whose place it stands.
        """

        original: RoPE.Config

    def __init__(self, config: Config):
        super(RoPE, self).__init__()  # no table
        self.config = config

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        pass
