"""Defines the modules that replace parts of a torchtitan model, and reads the scheme from the model's configuration.

``InnerAttention`` takes raw q, k and v and rotates them inside. ``NoRotation`` replaces the model's own rotation.
``SavesAttention`` makes selective activation checkpointing keep the results of this package's attention.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.config import Configurable
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

from ...operators.functional import attention, attention_varlen
from ...operators.torch_library import OPERATORS
from ...schemes.catalogue import SCHEMES, Lengths, apply_options
from ...schemes.rotary import Rotary
from ..scheme_options import read_options, to_json


class AnyAttention(Configurable.Config, metaclass=ABCMeta):
    """Matches the configuration of every class whose name ends in "Attention".

    If the override matched only ``GQAttention.Config``, the attention of other models (MLA, Flux) would stay unchanged,
    and torchtitan would only warn that nothing was replaced.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, Configurable.Config) and other.__qualname__.endswith("Attention.Config")


def head_dim_of(attention) -> int:
    """Returns the head_dim of a GQAttention's configuration: its field head_dim, or dim / n_heads if it is None."""
    return attention.dim // attention.n_heads if attention.head_dim is None else attention.head_dim


def check_attention(config) -> None:
    """Checks that an attention calls ``rope``, then ``inner_attention``, with masks for packed documents.

    Raises:
        ValueError: the attention is of another class, which the message names.
    """
    if type(config) is not GQAttention.Config:
        name = f"{type(config).__module__}.{type(config).__qualname__.removesuffix('.Config')}"
        raise ValueError(f"model: expected layers with torchtitan's GQAttention (llama3, qwen3), got {name}")
    inner = config.inner_attention
    if not isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        raise ValueError(
            "inner_attention: expected torchtitan's FlexAttention or VarlenAttention, which mask by packed documents, "
            f"got {type(inner).__qualname__.removesuffix('.Config')}"
        )
    if isinstance(inner, VarlenAttention.Config) and tuple(inner.window_size) != (-1, 0):
        raise ValueError(f"inner_attention: expected window_size (-1, 0), causal, got {tuple(inner.window_size)}")


# ---- the model's own rotation


def rotary_of(config: RoPE.Config, head_dim: int) -> Rotary:
    """Returns the scheme with which a torchtitan model rotates.

    Raises:
        ValueError: the configuration describes a rotation other than RoPE, or its table does not fit head_dim.
    """
    if type(config) not in (ComplexRoPE.Config, CosSinRoPE.Config):
        raise ValueError(
            f"rope: expected ComplexRoPE or CosSinRoPE, got {type(config).__qualname__.removesuffix('.Config')}"
        )
    if config.dim != head_dim:
        raise ValueError(f"rope: expected dim {head_dim}, the model's head_dim, got {config.dim}")
    rotary = Rotary.from_hf_config(SimpleNamespace(head_dim=head_dim, **hf_fields(config)))
    return dataclasses.replace(rotary, interleaved=isinstance(config, ComplexRoPE.Config))


def hf_fields(config: RoPE.Config) -> dict[str, Any]:
    """Returns the equivalent fields of a Hugging Face configuration, for weights in the channel order of transformers.

    Raises:
        ValueError: torchtitan itself does not support this scaling for this class.
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
            "attention_factor": 1.0,  # a GQAttention does not apply YaRN's factor on scores
        }
    return fields


class NoRotation(RoPE):
    """Returns q and k unchanged. The inner attention rotates them."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        """
        Attributes:
            original: the configuration of the rotation that this replaces.
        """

        original: RoPE.Config

    def __init__(self, config: Config):
        super(RoPE, self).__init__()  # without making a table
        self.config = config

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        pass


# ---- the scheme


LENGTHS = ("hope", "cope", "log_n")  # options whose values contain a training length


def read_scheme(given: Mapping[str, Any], attention) -> tuple[Rotary, dict[str, Any]]:
    """Returns the scheme of an attention layer, and the options of ``convert`` for this scheme, as JSON values.

    Raises:
        TypeError, ValueError: an option is invalid. The message names the option and says what was expected.
    """
    head_dim = head_dim_of(attention)
    seqlen = attention.rope.max_seq_len  # torchtitan has set max_seq_len to training.seq_len
    own = rotary_of(attention.rope, head_dim)
    options = _read(given, seqlen)
    for name in LENGTHS:
        length = options.get(name, seqlen)
        length = length.get("train_length", seqlen) if isinstance(length, dict) else length
        if length != seqlen:
            warnings.warn(
                f"{name}: expected the training's seq_len {seqlen}, got {length}; the scheme would be computed from "
                "a length with which the model is not trained",
                stacklevel=2,
            )
    rotary = options.get("rotary", own)
    for name in ("head_dim", "interleaved"):
        if getattr(rotary, name) != getattr(own, name):
            raise ValueError(
                f"rotary: expected {name} {getattr(own, name)}, as in the model, got {getattr(rotary, name)}"
            )
    if rotary.axes > 1:
        raise ValueError(f"rotary: expected positions of one coordinate, got a scheme of {rotary.axes} axes")
    return apply_options(rotary, options), to_json(options)


def _read(given: Mapping[str, Any], seqlen: int) -> dict[str, Any]:
    given = dict(given)
    name = given.pop("scheme", None)
    if name is None:
        name = "stock" if given else "hope"
    if name not in SCHEMES:
        close = difflib.get_close_matches(str(name), SCHEMES, n=1)
        raise ValueError(
            f"scheme: expected one of {', '.join(SCHEMES)}, got {name!r}"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    lengths = Lengths(seqlen, seqlen)
    return read_options({**SCHEMES[name].options(lengths), **given}, None, lambda config, name: seqlen)


# ---- the inner attention


class InnerAttention(VarlenAttention):
    """Causal attention within documents.

    It is a subclass of ``VarlenAttention``, because torchtitan chooses a model's masks by this class. So the module
    gets the documents as ``VarlenMetadata``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """
        Attributes:
            rotary: the text of the scheme.
            options: the options of ``convert`` that change the model's own scheme to this scheme.
        """

        rotary: str
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config):
        super(VarlenAttention, self).__init__()  # VarlenAttention.__init__ would load another attention
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
        """Rotates and attends within every document.

        Args:
            q_BLNH: (batch, seqlen, heads_q, head_dim). k_BLNH and v_BLNH: (batch, seqlen, heads_kv, head_dim).
            attention_masks: the packed documents. None: every row of the batch is one document.
            scale: factor on the scores. Default: head_dim ** -0.5.

        Returns:
            A tensor like q_BLNH.

        Raises:
            TypeError: the mask has another type, or an argument is unknown.
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
                "training.disable_cuda_graphs: expected True, because the number of documents differs by batch, "
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


# ---- activation checkpointing


class SavesAttention(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {OPERATORS.attention.default}
