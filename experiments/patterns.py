"""Measures attention patterns: how the scores depend on positions when the content is fixed (HoPE paper, section 3).

The scores are those of the last query, before the softmax. They are split into the contributions of the channel pairs

    C_m = (q0 k0 + q1 k1) cos(d theta_m) + (q0 k1 - q1 k0) sin(d theta_m)

The patterns are measured on two kinds of inputs:

    REPEATED    a first byte 0 followed by one byte at all other positions, as in the paper, so that keys differ only
                by position. There is one sample for every byte that makes up at least ``FREQUENT`` of the training
                text. The paper draws from all tokens, but most of the 256 bytes hardly occur in the training text.
    TEXT        windows of unseen text. q and k are averaged over the windows before they are multiplied. The product is
                the mean score of a query with the keys of other windows. So the content averages out, but the position
                does not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from flashrope import Rotary, attention
from flashrope.lab.small_models.model import Attend

from .encodings import distances
from .zoo import Rotaries, ZooModel

FIRST_BYTE = 0
FREQUENT = 1e-3  # a byte is frequent if it makes up at least this share of the training text
REPEATED, TEXT = "repeated", "text"


def frequent(text: bytes, share: float = FREQUENT) -> dict[int, float]:
    """Returns {byte: its share of the text} for all bytes except FIRST_BYTE whose share is at least ``share``."""
    counts = torch.bincount(torch.frombuffer(bytearray(text), dtype=torch.uint8), minlength=256)
    shares = (counts.double() / len(text)).tolist()
    return {byte: found for byte, found in enumerate(shares) if found >= share and byte != FIRST_BYTE}


def repeated(known: Sequence[int], length: int) -> torch.Tensor:
    """Returns the REPEATED inputs, int64 (len(known), length). A row has FIRST_BYTE and then one of the known bytes at
    all other positions."""
    tokens = torch.tensor(list(known))[:, None].repeat(1, length)
    tokens[:, 0] = FIRST_BYTE
    return tokens


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Holds the scores of the last query by distance, averaged over heads and samples.

    The first byte is excluded, so a context of n bytes has the distances 0 to n - 2.
    """

    # (layers, pairs, distance). If some channels do not rotate, the last component along the second axis is theirs.
    components: torch.Tensor
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
    tokens: torch.Tensor,
    attend: Attend = attention,
    batch_tokens: int = 16384,
    average_first: bool = False,
) -> Pattern:
    """Returns the model's pattern on tokens, int64 (samples, length). The scheme must have one band. ``average_first``:
    whether q and k are averaged over the samples before they are multiplied, as for TEXT."""
    device = model.language.embedding.weight.device
    samples, length = tokens.shape
    attends = model.attends(rotary, attend)
    schemes = [inner.args[-1] if model.biases is None else Rotary.none(model.config.head_dim) for inner in attends]
    sums: list[tuple[torch.Tensor, ...] | None] = [None] * model.config.layers

    def record(layer: int, inner: Attend, q, k, v, rotary):
        if average_first:
            found = (q[:, -1:].double().sum(0, keepdim=True), k.double().sum(0, keepdim=True))
        else:
            found = (components(q, k, schemes[layer]).sum(0),)
        before = sums[layer]
        sums[layer] = found if before is None else tuple(map(torch.add, before, found))
        return inner(q, k, v, rotary)

    recording = [functools.partial(record, layer, inner) for layer, inner in enumerate(attends)]
    for part in tokens.to(device).split(max(batch_tokens // length, 1)):
        x = model.language.embedding(part)
        if model.absolute is not None:
            x = x + model.absolute(length)
        model.language.decode(x, rotary if isinstance(rotary, Rotary) else rotary[0], recording)
    if average_first:
        sums = [
            (components(q / samples, k / samples, scheme)[0] * samples,)
            for (q, k), scheme in zip(sums, schemes, strict=True)
        ]
    found = torch.stack([total for (total,) in sums]) / (samples * model.config.heads)
    overall = found.sum(1)
    if model.biases is not None:
        overall += torch.stack([bias(distances(length, device))[:, -1].mean(0) for bias in model.layer_biases])
    return Pattern(found[..., 1:].flip(-1).cpu(), overall[..., 1:].flip(-1).cpu())


def components(q: torch.Tensor, k: torch.Tensor, rotary: Rotary, softmax_scale: float | None = None) -> torch.Tensor:
    """Returns what every channel pair contributes to the score of the last query with every key, summed over heads:
    (batch, components, seqlen_k).

    q, k: (batch, seqlen, heads, head_dim), not rotated. Raises ValueError unless ``rotary`` has one band of slope 1.
    The query scale (log n) of ``rotary`` is not applied.
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
    """Returns how much of the variance of ``whole`` each part accounts for, in percent. With y = whole it is
    100 * (1 - sum((y - part)^2) / sum(y^2)) over the last axis (HoPE, eq. 5)."""
    return 100 * (1 - (whole - parts).square().sum(-1) / whole.square().sum(-1))


def kinds(frequencies: Sequence[float], train_length: int) -> list[str]:
    """Returns the kind of every pair by its frequency: "high" from 2 pi / L on, "activated" between pi / L and 2 pi /
    L, "low" up to pi / L. L is the training length."""
    return [
        "high" if f >= 2 * math.pi / train_length else "activated" if f > math.pi / train_length else "low"
        for f in frequencies
    ]


def swing(curve: torch.Tensor) -> float:
    """Returns the largest score of a curve minus its smallest score."""
    return (curve.max() - curve.min()).item()


def ripple(curve: torch.Tensor, span: int = 25) -> tuple[float, float]:
    """Returns (size, period) of a curve's movement around its running mean over ``span`` distances, an odd number.

    The size is the root mean square of the difference between curve and mean. The period, in bytes, is the strongest
    period of this difference. It is NaN if it is longer than the span, because the mean contains such periods.
    Distances within half a span of the ends are left out.
    """
    inside = slice(span // 2, len(curve) - span // 2)
    rest = curve[inside] - curve.unfold(0, span, 1).mean(-1)
    rest = rest - rest.mean()
    padded = 16 * len(rest)  # padding with zeros makes the steps of the period finer
    strength = torch.fft.rfft(rest * torch.hann_window(len(rest), periodic=False, dtype=rest.dtype), padded).abs()
    period = padded / (strength[1:].argmax().item() + 1)
    return rest.square().mean().sqrt().item(), period if period <= span else math.nan
