"""The inner attention of a torchtitan model: raw q, k and v in, with the rotation inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from ...operators.functional import attention, attention_varlen
from ...rotary.rotary import Rotary


class InnerAttention(VarlenAttention):
    """Causal attention within documents.

    It is a ``VarlenAttention`` because torchtitan chooses the masks of a model by that class: documents then come as
    ``VarlenMetadata``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """
        Attributes:
            rotary: the text of the scheme.
            options: those of ``convert`` that lead from the model's own scheme to this one.
        """

        rotary: str
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config):
        super(VarlenAttention, self).__init__()  # its own would load another attention
        self.rotary = Rotary.from_text(config.rotary)

    def extra_repr(self) -> str:
        return repr(self.rotary)

    def forward(  # the names are those of torchtitan's sharding
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unknown,
    ) -> torch.Tensor:
        """
        Args:
            q_BLNH: (batch, seqlen, heads_q, head_dim), as k_BLNH and v_BLNH are with heads_kv.
            attention_masks: of packed documents; None: every row of the batch is one document.
            scale: default head_dim ** -0.5.

        Returns:
            As q_BLNH.

        Raises:
            TypeError: another mask, or an argument that this attention does not know.
        """
        if unknown:
            raise TypeError(
                f"inner_attention: expected attention_masks, scale and enable_gqa, got {sorted(unknown)[0]!r}"
            )
        if attention_masks is not None and not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(
                f"attention_masks: expected None or VarlenMetadata, got {type(attention_masks).__name__}, which "
                "flashrope's attention cannot express"
            )
        return self._attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)

    def _attend(self, q, k, v, documents: VarlenMetadata | None, scale: float | None) -> torch.Tensor:
        if documents is None:
            return attention(q, k, v, self.rotary, softmax_scale=scale)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "training.disable_cuda_graphs: expected True, as the number of documents differs from batch to batch, "
                "got False"
            )
        out = attention_varlen(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            self.rotary,
            documents.cu_seq_q,
            documents.cu_seq_k,
            documents.max_q,
            documents.max_k,
            softmax_scale=scale,
        )
        return out.view(*q.shape[:3], v.shape[-1])
