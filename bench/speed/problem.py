"""Describes one measurement: its sizes, tensors, operations and bytes. Also fits power laws."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from flashrope import Rotary

BACKWARD_FACTOR = 2.5  # the backward has five matrix products, the forward has two
THETA_BASE = 10_000.0


class Unavailable(Exception):
    """Says why a contestant cannot run here."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describes one call with q (batch, seqlen_q, heads, head_dim) and k, v (batch, seqlen, heads_kv, head_dim)."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool = True
    window: int = 512  # ReRoPE's window
    train_length: int = 8192  # HoPE's training length
    decoding: bool = False  # whether the call has one query token and seqlen keys in a cache

    def __post_init__(self):
        if self.heads % self.heads_kv:
            raise ValueError(f"heads: expected a multiple of heads_kv = {self.heads_kv}, got {self.heads}")

    @property
    def seqlen_q(self) -> int:
        return 1 if self.decoding else self.seqlen

    @property
    def group(self) -> int:
        return self.heads // self.heads_kv

    def replace(self, **changes) -> Problem:
        return dataclasses.replace(self, **changes)

    def tensors(self, grad: bool = False, seed: int = 0) -> list[torch.Tensor]:
        """Returns q, k and v with normally distributed random numbers, because zeros would run faster. On the meta
        device the tensors have shapes only."""
        shapes = ((self.seqlen_q, self.heads), (self.seqlen, self.heads_kv), (self.seqlen, self.heads_kv))
        if self.device.type == "meta":
            return [
                torch.empty(self.batch, *shape, self.head_dim, device=self.device, dtype=self.dtype, requires_grad=grad)
                for shape in shapes
            ]
        generator = torch.Generator(self.device).manual_seed(seed)
        return [
            torch.randn(
                self.batch, *shape, self.head_dim, device=self.device, dtype=self.dtype, generator=generator
            ).requires_grad_(grad)
            for shape in shapes
        ]

    def bytes_of_q(self) -> int:
        return self.batch * self.seqlen_q * self.heads * self.head_dim * self.dtype.itemsize

    def bytes_of_cache(self) -> int:
        """Returns the bytes of all keys and values, which decoding must read once."""
        return 2 * self.batch * self.seqlen * self.heads_kv * self.head_dim * self.dtype.itemsize

    def flops(self, backward: bool) -> float:
        """Returns the floating-point operations of a forward, or of a forward and a backward, counted as in the
        literature.

        A forward counts 4 batch heads seqlen^2 head_dim, or half of that with a causal mask. A backward counts 2.5
        times as much. The count is the same for every scheme and contestant.
        """
        forward = 4 * self.batch * self.heads * self.seqlen_q * self.seqlen * self.head_dim
        if self.causal and not self.decoding:
            forward /= 2
        return forward * (1 + BACKWARD_FACTOR) if backward else forward

    def none(self) -> Rotary:
        return Rotary.none(self.head_dim)

    def rope(self) -> Rotary:
        return Rotary.rope(self.head_dim, THETA_BASE)

    def hope(self) -> Rotary:
        return Rotary.hope(self.head_dim, self.train_length, THETA_BASE)

    def rerope(self) -> Rotary:
        return self.rope().rectify(self.window)

    def sizes(self) -> dict:
        """Returns the sizes as a dict, in the form that records store."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("device", "dtype")
        }
        return fields | {"dtype": str(self.dtype).removeprefix("torch.")}


def exponent(series: Mapping[float, float]) -> float:
    """Fits y = c x^p to the points by least squares over the logarithms, and returns p. Needs at least two points."""
    if len(series) < 2:
        raise ValueError(f"series: expected at least two points, got {len(series)}")
    points = [(math.log(x), math.log(y)) for x, y in series.items()]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
