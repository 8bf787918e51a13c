"""Supports Megatron core: makes a layer specification whose self-attention calls flashrope.

    spec = with_scheme(get_gpt_layer_local_spec(), Rotary.hope(head_dim, train_length=8192))
    model = GPTModel(config, spec, ..., position_embedding_type="none")

Megatron then passes raw q and k to the attention. Tested with megatron-core 0.16.1.
"""

from __future__ import annotations

import copy
import functools

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from .. import Rotary, attention, attention_varlen

CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


def with_scheme(spec: ModuleSpec, rotary: Rotary) -> ModuleSpec:
    """Returns a copy of a transformer layer's specification, with attention under this scheme.

    Args:
        spec: the specification of a TransformerLayer, as returned by ``get_gpt_layer_local_spec`` or
            ``get_gpt_layer_with_transformer_engine_spec``.
        rotary: the scheme. Its head_dim must be the configuration's kv_channels. Stock models rotate as
            ``Rotary.rope(head_dim)`` does, or, with rotary_interleaved, as ``Rotary.rope(head_dim, interleaved=True)``.

    Raises:
        ValueError: the specification's attention is not Megatron's SelfAttention, for example because it is
            multi-latent attention. Building the model raises ValueError if the configuration needs a feature that
            flashrope does not support. The model's first step raises ValueError if the model itself rotates q and k.
    """
    spec = copy.deepcopy(spec)
    layer = getattr(spec.submodules, "self_attention", None)
    module = None if layer is None else layer.module
    if layer is None or module is not SelfAttention:
        raise ValueError(f"spec: expected a layer with Megatron's SelfAttention, got {module or type(spec).__name__}")
    layer.module = RawSelfAttention
    layer.submodules.core_attention = functools.partial(FusedAttention, rotary=rotary)
    return spec


class RawSelfAttention(SelfAttention):
    """Megatron's SelfAttention, with an error if it is about to rotate. The scheme is applied inside the attention."""

    def forward(self, *args, rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_cos_sin=None, **others):
        if any(x is not None for x in (rotary_pos_emb, rotary_pos_cos, rotary_pos_cos_sin)):
            raise ValueError(
                "position_embedding_type: expected 'none', because the attention applies the scheme itself"
            )
        return super().forward(*args, **others)


class FusedAttention(DotProductAttention):
    """Replaces Megatron's scores, softmax and product by ``flashrope.attention``. Megatron's learnable softmax offset
    is passed as ``sinks``."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *args, rotary: Rotary, **others):
        dropout = others.get("attention_dropout")
        dropout = config.attention_dropout if dropout is None else dropout
        # features that flashrope.attention does not support, or would silently leave out
        for name, came, expected in (
            ("attention_dropout", dropout, 0),
            ("window_size", config.window_size, None),
            ("context_parallel_size", config.context_parallel_size, 1),
        ):
            if came != expected:
                hint = "; for a window use Rotary.local(window)" if name == "window_size" else ""
                raise ValueError(f"{name}: expected {expected}, got {came}{hint}")
        if attn_mask_type not in CAUSAL:
            raise ValueError(f"attn_mask_type: expected causal or no_mask, got {attn_mask_type.name}")
        if rotary.head_dim != config.kv_channels:
            raise ValueError(
                f"rotary: expected head_dim {config.kv_channels}, the config's kv_channels, got {rotary.head_dim}"
            )
        super().__init__(config, layer_number, attn_mask_type, attention_type, *args, **others)
        self.rotary = rotary
        # Megatron divides the scale by the layer's number and multiplies the scores by it again.
        self.softmax_scale *= self.layer_number if config.apply_query_key_layer_scaling else 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Computes the attention of the layer.

        Args:
            query, key, value: (seqlen, batch, heads, head_dim), or packed (total, heads, head_dim), not rotated.
            attention_mask: not read. The attn_mask_type of the call, or else of the layer, says which keys a query
                sees.
            packed_seq_params: must have the format "thd", without padded offsets.

        Returns:
            (seqlen, batch, heads * head_dim), or packed (total, heads, head_dim).
        """
        if attention_bias is not None:
            raise ValueError("attention_bias: expected None, got a tensor")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        packed_causal = packed_seq_params is not None and mask_type is AttnMaskType.padding_causal
        if mask_type not in CAUSAL and not packed_causal:
            raise ValueError(f"attn_mask_type: expected causal or no_mask, got {mask_type.name}")
        options = {
            "causal": packed_causal or CAUSAL[mask_type],
            "softmax_scale": self.softmax_scale,
            "sinks": self.softmax_offset,
        }
        if packed_seq_params is None:
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            return attention(q, k, v, self.rotary, **options).transpose(0, 1).flatten(2)
        packed = packed_seq_params
        if packed.qkv_format != "thd":
            raise ValueError(f"packed_seq_params: expected the format thd, got {packed.qkv_format}")
        if packed.cu_seqlens_q_padded is not None or packed.cu_seqlens_kv_padded is not None:
            raise ValueError("packed_seq_params: offsets of padded sequences (cu_seqlens_q_padded) are not supported")
        lengths = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv)
        return attention_varlen(query, key, value, self.rotary, *lengths, **options).flatten(1)
