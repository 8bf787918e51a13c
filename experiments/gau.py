"""Implements a language model of gated attention units (Hua et al. 2022), the architecture in ReRoPE's first tables.

A layer does the work of attention and MLP. With e = 2 * width and s = head_dim, it computes

    z = silu(x W_z)                     (.., s), shared by q and k
    q, k = g_q z + b_q, g_k z + b_k     one head, raw; the rotary scheme rotates them
    u, v = silu(x W_u), silu(x W_v)     (.., e)
    x' = norm(x + W_o (u * attention(q, k, v)))

The attention is a causal softmax of q k / sqrt(s), computed by flashrope, as in Su's GAU-alpha
(kexue.fm/archives/9052). With the +logn schemes it is GAU-alpha's scaled softmax. An RMS norm without weights follows
every residual sum, and no layer has a bias, as in GAU-alpha.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from flashrope import Rotary, attention
from flashrope.lab.small_models.model import Attend, ModelConfig
from torch import nn

GAU = "gau"
EXPANSION = 2  # width of u and v / width of the model
MAX_WIDTH = 256  # the largest head_dim of v in one attention call


class Unit(nn.Module):
    """Implements one gated attention unit with its residual connection and norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        wide = EXPANSION * config.width
        self.sizes = (wide, wide, config.head_dim)
        self.parts = -(-wide // MAX_WIDTH)  # v is cut into this many heads, which share q and k
        if wide % (8 * self.parts):
            raise ValueError(f"width: expected a multiple of {4 * self.parts} for GAU, got {config.width}")
        self.uvz = nn.Linear(config.width, sum(self.sizes), bias=False)
        self.scale = nn.Parameter(torch.empty(2, config.head_dim))
        self.offset = nn.Parameter(torch.empty(2, config.head_dim))
        self.out = nn.Linear(wide, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        u, v, z = F.silu(self.uvz(x)).split(self.sizes, dim=-1)
        q, k = (z[..., None, :] * self.scale + self.offset).unbind(-2)  # (batch, seqlen, s)
        q, k = (each[..., None, :].repeat(1, 1, self.parts, 1) for each in (q, k))
        attended = attend(q, k, v.unflatten(-1, (self.parts, -1)), rotary).flatten(-2)
        return _norm(x + self.out(u * attended))


class GauModel(nn.Module):
    """Implements a decoder like ``LanguageModel``, but with ``config.layers`` gated attention units. q and k always
    have one head of ``config.head_dim`` channels. ``config.heads`` and ``config.mlp_width`` are not used. Two units
    have about as many weights as one layer of a ``LanguageModel``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Unit(config) for _ in range(config.layers))
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            nn.init.normal_(block.scale, mean=1.0, std=0.02)
            nn.init.normal_(block.offset, std=0.02)
            for layer in (block.uvz, block.out):  # 0.02 would be too small: an output is a product of three factors
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(
        self, tokens: torch.Tensor, rotary: Rotary, attend: Attend | Sequence[Attend] = attention
    ) -> torch.Tensor:
        """Returns the logits (batch, seqlen, vocab_size) of tokens, int64 (batch, seqlen)."""
        return self.decode(self.embedding(tokens), rotary, attend)

    def decode(self, x: torch.Tensor, rotary: Rotary, attend: Attend | Sequence[Attend] = attention) -> torch.Tensor:
        """Returns the logits for embeddings (batch, seqlen, width) instead of tokens."""
        attends = [attend] * len(self.blocks) if callable(attend) else attend
        x = _norm(x)
        for block, attend_in_block in zip(self.blocks, attends, strict=True):
            x = block(x, rotary, attend_in_block)
        return F.linear(x, self.embedding.weight)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])
