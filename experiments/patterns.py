"""Attention patterns: how the scores depend on positions alone (HoPE paper, section 3).

Every sample is a first byte 0 followed by one random byte at all other positions, so scores differ only by the position
of the key. Scores are those of the last query before the softmax, split into the contributions of the channel pairs

    C_m = (q0 k0 + q1 k1) cos(d theta_m) + (q0 k1 - q1 k0) sin(d theta_m)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from flashrope import Rotary, attention
from flashrope.demo.model import Attend

from .encodings import distances
from .zoo import Rotaries, ZooModel

FIRST_BYTE = 0


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Scores of the last query by distance, averaged over heads and samples.

    The first byte is excluded, so a context of n bytes has the distances 0 to n - 2.
    """

    components: (
        torch.Tensor
    )  # (layers, pairs, distance); the last component holds the channels without rotation, if any
    overall: torch.Tensor  # (layers, distance), including biases

    @property
    def mean_components(self) -> torch.Tensor:
        return self.components.mean(0)

    @property
    def mean_overall(self) -> torch.Tensor:
        return self.overall.mean(0)


@torch.no_grad()
def pattern(
    model: ZooModel,
    rotary: Rotaries,
    length: int,
    samples: int,
    seed: int = 0,
    attend: Attend = attention,
    batch_tokens: int = 16384,
) -> Pattern:
    """The model's pattern at a context of ``length`` bytes, for schemes with one band."""
    device = model.language.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, model.config.vocab_size, (samples, 1), generator=generator).repeat(1, length)
    tokens[:, 0] = FIRST_BYTE
    sums: list[torch.Tensor | None] = [None] * model.config.layers

    def record(layer: int, inner: Attend, q, k, v, rotary):
        found = components(q, k, inner.args[-1] if model.biases is None else rotary).sum(0)
        sums[layer] = found if sums[layer] is None else sums[layer] + found
        return inner(q, k, v, rotary)

    attends = model.attends(rotary, attend)
    recording = [functools.partial(record, layer, inner) for layer, inner in enumerate(attends)]
    for part in tokens.to(device).split(max(batch_tokens // length, 1)):
        x = model.language.embedding(part)
        if model.absolute is not None:
            x = x + model.absolute(length)
        model.language.decode(x, rotary if isinstance(rotary, Rotary) else rotary[0], recording)
    found = torch.stack(sums) / (samples * model.config.heads)
    overall = found.sum(1)
    if model.biases is not None:
        overall += torch.stack([bias(distances(length, device))[:, -1].mean(0) for bias in model.biases])
    return Pattern(found[..., 1:].flip(-1).cpu(), overall[..., 1:].flip(-1).cpu())


def components(q: torch.Tensor, k: torch.Tensor, rotary: Rotary, softmax_scale: float | None = None) -> torch.Tensor:
    """Contributions (batch, components, seqlen_k) to the scores of the last query, by key, summed over heads.

    q and k are (batch, seqlen, heads, head_dim), not rotated. Raises ValueError unless ``rotary`` has one band of slope
    1. Its query scale (log n) is not applied.
    """
    if any((band.slope, band.offset) != (1, 0) for band in rotary.bands):
        raise ValueError(f"rotary: expected one band of slope 1, got {rotary}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    last, half = q[:, -1:].double(), rotary.rotary_dim // 2
    k = k.double()
    if rotary.interleaved:
        (q0, q1), (k0, k1) = ((x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) for x in (last, k))
    else:
        (q0, q1), (k0, k1) = ((x[..., :half], x[..., half : 2 * half]) for x in (last, k))
    angle = torch.arange(k.shape[1] - 1, -1, -1, device=k.device).double()[:, None, None] * rotary.inv_freq.to(k.device)
    pairs = (q0 * k0 + q1 * k1) * angle.cos() + (q0 * k1 - q1 * k0) * angle.sin()
    rest = (last[..., 2 * half :] * k[..., 2 * half :]).sum(-1, keepdim=True)
    found = torch.cat((pairs, rest), -1) if rest.numel() and 2 * half < q.shape[-1] else pairs
    return scale * found.sum(2).transpose(1, 2)


def vaf(parts: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Variance accounted for in percent: 100 * (1 - sum((y - part)^2) / sum(y^2)) over the last axis (HoPE, eq. 5)."""
    return 100 * (1 - (whole - parts).square().sum(-1) / whole.square().sum(-1))


def kinds(frequencies: Sequence[float], train_length: int) -> list[str]:
    """The kind of every pair: "high" from 2 pi / L up, "activated" between pi / L and 2 pi / L, "low" up to pi / L."""
    return [
        "high" if f >= 2 * math.pi / train_length else "activated" if f > math.pi / train_length else "low"
        for f in frequencies
    ]
