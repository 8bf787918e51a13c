"""Implements baseline position encodings: biases on the scores, vectors added to the embedding, and random positions
for RoPE.

Encodings with a bias use ``scaled_dot_product_attention``, not flashrope's kernels. Positions i of queries and j of
keys count from 0, and d = i - j.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Alibi(nn.Module):
    """Computes the bias of Press et al. 2021: -m_h * d, with the fixed slopes m_h of ``alibi_slopes``."""

    def __init__(self, heads: int, train_length: int):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        """Returns the bias (heads, seqlen, seqlen) for distances (seqlen, seqlen). The distance of a future key may be
        any number >= 0, because the key is masked."""
        return -self.slopes[:, None, None] * distance


class Kerple(nn.Module):
    """Computes the logarithmic bias of Chi et al. 2022: -r1 * ln(1 + r2 * d), with r1, r2 > 0 learned per head."""

    def __init__(self, heads: int, train_length: int):
        super().__init__()
        self.log_r1 = nn.Parameter(torch.empty(heads).uniform_(0.1, 2).log())
        self.log_r2 = nn.Parameter(torch.empty(heads).uniform_(0.1, 1).log())

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        r1, r2 = (r.exp()[:, None, None] for r in (self.log_r1, self.log_r2))
        return -r1 * torch.log1p(r2 * distance)


class Fire(nn.Module):
    """Computes the bias of Li et al. 2024: an MLP of ln(c d + 1) / ln(c max(i, L') + 1). The factor c > 0, the
    threshold L' and the MLP are learned."""

    def __init__(self, heads: int, train_length: int, width: int = 32):
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(math.log(0.1)))
        self.threshold = nn.Parameter(torch.tensor(1.0))  # L' as a multiple of the training length
        self.train_length = train_length
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, heads))

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        c = self.log_c.exp()
        i = torch.arange(len(distance), device=distance.device, dtype=distance.dtype)
        farthest = torch.maximum(i, (self.threshold * self.train_length).abs())
        x = torch.log1p(c * distance) / torch.log1p(c * farthest)[:, None]
        return self.mlp(x[..., None]).permute(2, 0, 1)


class T5(nn.Module):
    """Computes the bias of Raffel et al. 2020, section 2.1: one learned scalar per head and bucket of distances
    (``t5_buckets``).

    All layers share the weights, as in the paper. The paper's 32 buckets end at distance 128, a quarter of its training
    length. Here they end at a quarter of ``train_length``, but at least at 32, so that training reaches the last
    bucket.
    """

    shared = True

    def __init__(self, heads: int, train_length: int, buckets: int = 32):
        super().__init__()
        self.buckets, self.farthest = buckets, max(train_length // 4, 32)
        self.table = nn.Parameter(torch.empty(buckets, heads).normal_(std=0.02))

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return self.table[t5_buckets(distance, self.buckets, self.farthest)].permute(2, 0, 1)


def t5_buckets(distance: torch.Tensor, buckets: int, farthest: int) -> torch.Tensor:
    """Returns the bucket of every distance >= 0, as for a causal mask. Half of the buckets hold one distance each. The
    other buckets grow logarithmically up to ``farthest``, and the last bucket also holds all larger distances."""
    exact = buckets // 2
    far = torch.log(distance.double().clamp(min=exact) / exact) / math.log(farthest / exact) * (buckets - exact)
    return torch.where(distance < exact, distance.double(), exact + far).long().clamp(max=buckets - 1)


class Sandwich(nn.Module):
    """Computes the bias of Chi et al. 2023: the inner product of two sinusoidal encodings, divided by 8 h / heads for
    heads h = 1 .. heads. The inner product is the sum over m of cos(d / 10000^(2m / 128)). 128 is the paper's width.
    Nothing is learned."""

    def __init__(self, heads: int, train_length: int, width: int = 128):
        super().__init__()
        inv_freq = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        ratio = 8 * torch.arange(1, heads + 1, dtype=torch.float32) / heads
        self.register_buffer("ratio", ratio, persistent=False)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        by_distance = torch.arange(distance.shape[-1], device=distance.device)[:, None] * self.inv_freq
        return by_distance.cos().sum(-1)[distance.long()] / self.ratio[:, None, None]


def alibi_slopes(heads: int) -> list[float]:
    """Returns one slope per head. If heads is a power of two, they are 2 ** (-8 h / heads) for h = 1 .. heads.
    Otherwise they are the slopes for the next lower power of two, followed by every other slope for the next higher
    one, as in ALiBi's code."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


class Learned(nn.Module):
    """Learns one vector for each position up to the training length."""

    def __init__(self, width: int, train_length: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(train_length, width).normal_(std=0.02))

    def forward(self, seqlen: int) -> torch.Tensor:
        if seqlen > len(self.table):
            raise ValueError(f"seqlen: expected at most {len(self.table)} learned positions, got {seqlen}")
        return self.table[:seqlen]


class Formula(nn.Module):
    """Wraps one of the functions in ``ABSOLUTE``: a function that maps (seqlen, width) to fixed vectors, float32
    (seqlen, width)."""

    def __init__(self, function, width: int):
        super().__init__()
        self.function, self.width = function, width
        self.register_buffer("device_of", torch.empty(0), persistent=False)

    def forward(self, seqlen: int) -> torch.Tensor:
        return self.function(seqlen, self.width).to(self.device_of.device)


class RandomPositions(nn.Module):
    """Draws random positions as Ruoss et al. 2023 do, in training and in evaluation. Positions are drawn from
    0 .. range - 1 without repetition and sorted. All sequences of a batch and all layers share one draw.

    In training mode every call draws anew. The number of calls is stored with the weights, so a resumed run makes the
    same draws as an uninterrupted run. In evaluation mode the draw depends only on the model and the length.
    """

    def __init__(self, range_: int):
        super().__init__()
        self.range = range_
        self.register_buffer("seed", torch.randint(2**31, ()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: int, seqlen: int) -> torch.Tensor:
        """Returns the positions, int64 (batch, seqlen). Raises ValueError if the range has fewer than seqlen
        positions."""
        if seqlen > self.range:
            raise ValueError(
                f"seqlen: expected at most {self.range}, the size of the range of random positions, got {seqlen}"
            )
        if self.training:
            self.calls += 1
        draw = self.calls.item() if self.training else -seqlen
        generator = torch.Generator().manual_seed(self.seed.item() * 1_000_003 + draw)
        positions = torch.randperm(self.range, generator=generator)[:seqlen].sort().values
        return positions.to(self.seed.device).expand(batch, -1)


def sinusoidal(seqlen: int, width: int) -> torch.Tensor:
    """Returns the vectors of Vaswani et al. 2017, float32 (seqlen, width). At position p, channel 2m is
    sin(p / 10000^(2m / width)), and channel 2m + 1 is the cosine of the same angle."""
    inv_freq = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(seqlen, dtype=torch.float64)[:, None] * inv_freq
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width].float()


def integer(seqlen: int, width: int) -> torch.Tensor:
    """Returns the position itself in every channel."""
    return torch.arange(seqlen, dtype=torch.float32)[:, None].expand(-1, width)


def binary(seqlen: int, width: int, bits: int = 16) -> torch.Tensor:
    """Returns the bits of the position, least significant first: channel c is bit c * bits // width."""
    bit = torch.arange(width) * bits // width
    return (torch.arange(seqlen)[:, None] >> bit & 1).float()


BIASES = {"alibi": Alibi, "kerple": Kerple, "fire": Fire, "t5": T5, "sandwich": Sandwich}
ABSOLUTE = {"sinusoidal": sinusoidal, "integer": integer, "binary": binary}


def distances(seqlen: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the distances i - j as float32 (seqlen, seqlen), with 0 for future keys."""
    i = torch.arange(seqlen, device=device, dtype=torch.float32)
    return (i[:, None] - i).clamp(min=0)


def attend_with_bias(bias: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary) -> torch.Tensor:
    """Computes causal attention with a bias on the scores. q, k, v and the result have the shape (batch, seqlen, heads,
    head_dim). ``rotary`` is ignored."""
    seqlen = q.shape[1]
    future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu(1)
    mask = bias(distances(seqlen, q.device)).to(q.dtype).masked_fill(future, -torch.inf)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    ).transpose(1, 2)
