"""Baseline position encodings that are not rotary: biases on the scores, and vectors added to the embedding.

They use ``scaled_dot_product_attention``, not flashrope's kernels. Positions i and j count from 0; d = i - j.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Alibi(nn.Module):
    """Press et al. 2021: the bias is -m_h * d, with the fixed slopes m_h of ``alibi_slopes``."""

    def __init__(self, heads: int, train_length: int):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """distance (seqlen, seqlen) to a bias (heads, seqlen, seqlen). Future keys may have any distance >= 0."""
        return -self.slopes[:, None, None] * distance


class Kerple(nn.Module):
    """Chi et al. 2022, the logarithmic kernel: -r1 * ln(1 + r2 * d) with r1, r2 > 0 learned per head."""

    def __init__(self, heads: int, train_length: int):
        super().__init__()
        self.log_r1 = nn.Parameter(torch.empty(heads).uniform_(0.1, 2).log())
        self.log_r2 = nn.Parameter(torch.empty(heads).uniform_(0.1, 1).log())

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        r1, r2 = (r.exp()[:, None, None] for r in (self.log_r1, self.log_r2))
        return -r1 * torch.log1p(r2 * distance)


class Fire(nn.Module):
    """Li et al. 2024: an MLP of ln(c d + 1) / ln(c max(i, L') + 1); c > 0, the threshold L' and the MLP are learned."""

    def __init__(self, heads: int, train_length: int, width: int = 32):
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(math.log(0.1)))
        self.threshold = nn.Parameter(torch.tensor(1.0))  # L' in training lengths
        self.train_length = train_length
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, heads))

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        c = self.log_c.exp()
        i = torch.arange(len(distance), device=distance.device, dtype=distance.dtype)
        farthest = torch.maximum(i, (self.threshold * self.train_length).abs())
        x = torch.log1p(c * distance) / torch.log1p(c * farthest)[:, None]
        return self.mlp(x[..., None]).permute(2, 0, 1)


def alibi_slopes(heads: int) -> list[float]:
    """2 ** (-8 h / heads) for h = 1 .. heads if heads is a power of two. Otherwise the slopes of the next lower power,
    then every other slope of the next higher power, as in ALiBi's code."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


class Learned(nn.Module):
    """One trained vector per position, up to the training length."""

    def __init__(self, width: int, train_length: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(train_length, width).normal_(std=0.02))

    def forward(self, seqlen: int) -> torch.Tensor:
        if seqlen > len(self.table):
            raise ValueError(f"seqlen: learned positions end at the training length {len(self.table)}, got {seqlen}")
        return self.table[:seqlen]


class Formula(nn.Module):
    """A fixed function (seqlen, width) -> float32 (seqlen, width) from ``ABSOLUTE``."""

    def __init__(self, function, width: int):
        super().__init__()
        self.function, self.width = function, width
        self.register_buffer("device_of", torch.empty(0), persistent=False)

    def forward(self, seqlen: int) -> torch.Tensor:
        return self.function(seqlen, self.width).to(self.device_of.device)


def sinusoidal(seqlen: int, width: int) -> torch.Tensor:
    """Vaswani et al. 2017: channel 2m is sin(p / 10000^(2m / width)), channel 2m + 1 the cosine."""
    inv_freq = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(seqlen, dtype=torch.float64)[:, None] * inv_freq
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width].float()


def integer(seqlen: int, width: int) -> torch.Tensor:
    """The position itself in every channel."""
    return torch.arange(seqlen, dtype=torch.float32)[:, None].expand(-1, width)


def binary(seqlen: int, width: int, bits: int = 16) -> torch.Tensor:
    """The bits of the position, least significant first: channel c is bit c * bits // width."""
    bit = torch.arange(width) * bits // width
    return (torch.arange(seqlen)[:, None] >> bit & 1).float()


BIASES = {"alibi": Alibi, "kerple": Kerple, "fire": Fire}
ABSOLUTE = {"sinusoidal": sinusoidal, "integer": integer, "binary": binary}


def distances(seqlen: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 (seqlen, seqlen): i - j, and 0 for future keys."""
    i = torch.arange(seqlen, device=device, dtype=torch.float32)
    return (i[:, None] - i).clamp(min=0)


def attend_with_bias(bias: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary) -> torch.Tensor:
    """Causal attention with a bias on the scores. q, k, v and the result are (batch, seqlen, heads, head_dim);
    ``rotary`` is ignored."""
    seqlen = q.shape[1]
    future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu(1)
    mask = bias(distances(seqlen, q.device)).to(q.dtype).masked_fill(future, -torch.inf)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    ).transpose(1, 2)
