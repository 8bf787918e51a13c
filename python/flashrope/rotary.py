"""Rotary: one frozen description of a rotary position scheme.

Every scheme is a frequency per channel pair, a short list of bands over the distance d = i - j (query position minus
key position), and a scale on the query:

    score(i, j) = softmax_scale * t * logn(i) * (R(slope*i + offset) q_i) . (R(slope*j) k_j)   for the band that holds d

R(p) turns pair m by the angle p * inv_freq[m]; inv_freq[m] = 0 leaves the pair alone. Nothing outside this file knows
the schemes' names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

__all__ = ["Band", "Rotary"]


class Band(NamedTuple):
    """Distances start <= d < stop. The query turns by slope * i + offset, the key by slope * j."""

    start: float
    stop: float
    slope: float
    offset: float


EVERYWHERE = Band(0, math.inf, 1.0, 0.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary:
    """A rotary position scheme. Build it with a class method, then chain: ``Rotary.hope(128, 8192).rectify(1024)``.

    Two are equal when they compute the same from the same channels, however they were built.

    Attributes:
        head_dim: channels per head.
        frequencies: inv_freq as a tuple, radians per position, one per pair of ``rotary_dim``; 0 leaves the pair unrotated.
        interleaved: True pairs channels 2m and 2m + 1; False pairs m and m + rotary_dim / 2.
        bands: the causal bands over d >= 0; ``two_sided_bands`` adds their mirror images.
        temperature: t of the formula above.
        log_n_scale: (train_length, clip) or None. The query scale is ln(i + 1) / ln(train_length), at least 1 with
        clip.
        axis: for every pair the axis of the position it turns with; () for positions of one number.
        base, exponent_dim: theta_m was base ** (-2m / exponent_dim) before any change; base is None for a given table.
        scaled_by: the interpolation that has changed the table, or "". Like base and exponent_dim it only tells what
            may still be chained, and takes no part in equality.
    """

    head_dim: int
    frequencies: tuple[float, ...]
    interleaved: bool = False
    bands: tuple[Band, ...] = (EVERYWHERE,)
    temperature: float = 1.0
    log_n_scale: tuple[float, bool] | None = None
    axis: tuple[int, ...] = ()
    base: float | None = dataclasses.field(default=None, compare=False)
    exponent_dim: int = dataclasses.field(default=0, compare=False)
    scaled_by: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        _positive_int("head_dim", self.head_dim)
        if 2 * len(self.frequencies) > self.head_dim:
            raise ValueError(
                f"inv_freq: {len(self.frequencies)} pairs need {2 * len(self.frequencies)} channels, head_dim has {self.head_dim}"
            )
        if not all(math.isfinite(f) for f in self.frequencies):
            raise ValueError("inv_freq: every frequency must be finite")
        if self.axis and len(self.axis) != len(self.frequencies):
            raise ValueError(f"axis: expected one for each of the {len(self.frequencies)} pairs, got {len(self.axis)}")
        _flag("interleaved", self.interleaved)
        _positive("temperature", self.temperature)
        self.text  # noqa: B018  kept from now on: torch.compile traces a look-up, not a cached_property's lock

    @cached_property
    def _hash(self) -> int:
        return hash(
            (
                self.head_dim,
                self.frequencies,
                self.interleaved,
                self.bands,
                self.temperature,
                self.log_n_scale,
                self.axis,
            )
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return Rotary.from_text, (self.text,)  # not __dict__: a hash kept there is another process's

    # ---- what kernels and users read
    @property
    def rotary_dim(self) -> int:
        """Leading channels that are paired; the rest carry no position."""
        return 2 * len(self.frequencies)

    @property
    def inv_freq(self) -> torch.Tensor:
        """Frequencies, float64, (rotary_dim / 2,), radians per position."""
        return torch.tensor(self.frequencies, dtype=torch.float64)

    @property
    def axes(self) -> int:
        """Numbers per position: 1, or more for n-dimensional RoPE."""
        return max(self.axis) + 1 if self.axis else 1

    @cached_property
    def two_sided_bands(self) -> tuple[Band, ...]:
        """The bands over all d: each causal band and its mirror image (d -> -d, offset -> -offset), joined at 0."""
        mirrored = []
        for start, stop, slope, offset in self.bands:
            if offset == 0 and start == 0:
                mirrored.append(Band(1 - stop, stop, slope, offset))
            else:
                mirrored.append(Band(start, stop, slope, offset))
                mirrored.append(Band(1 - stop, 1 - start, slope, -offset))
        return tuple(mirrored)

    def bands_for(self, causal: bool) -> tuple[Band, ...]:
        return self.bands if causal else self.two_sided_bands

    # ---- schemes
    @classmethod
    def rope(
        cls, head_dim: int, base: float = 10_000.0, rotary_dim: int | None = None, interleaved: bool = False
    ) -> Rotary:
        """RoPE (Su et al. 2021, eq. 15): theta_m = base ** (-2m / rotary_dim).

        rotary_dim < head_dim is partial rotary in Hugging Face's sense: the exponent's denominator is rotary_dim.
        """
        _even("head_dim", head_dim)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        _even("rotary_dim", rotary_dim, least=0)
        if rotary_dim > head_dim:
            raise ValueError(f"rotary_dim: expected at most head_dim = {head_dim}, got {rotary_dim}")
        return cls(head_dim, _geometric(base, rotary_dim), interleaved, base=float(base), exponent_dim=rotary_dim)

    @classmethod
    def hope(
        cls,
        head_dim: int,
        train_length: float,
        base: float = 10_000.0,
        interleaved: bool = False,
        compact: bool = False,
    ) -> Rotary:
        """HoPE (Chen et al. 2025, section 4): RoPE's pairs with theta >= 2 pi / train_length; the rest carry no
        position.

        interleaved=True rotates the first 2a channels as 2m, 2m + 1 (the paper's q[:2a]). interleaved=False pairs m
        with m + head_dim / 2 and leaves the pairs from a on unrotated (what a Llama checkpoint needs). compact=True
        pairs m with m + a inside the first 2a channels. The exponent's denominator is head_dim in all three.
        """
        _positive("train_length", train_length)
        if interleaved and compact:
            raise ValueError("compact: pairs m with m + a, which interleaved=True contradicts; choose one of the two")
        _flag("compact", compact)
        rope = cls.rope(head_dim, base, interleaved=interleaved)
        kept = sum(f >= 2 * math.pi / train_length for f in rope.frequencies)
        if interleaved or compact:
            theta = rope.frequencies[:kept]
        else:
            theta = rope.frequencies[:kept] + (0.0,) * (head_dim // 2 - kept)
        return dataclasses.replace(rope, frequencies=theta)

    @classmethod
    def hope_ablation(
        cls, head_dim: int, train_length: float, which: str, base: float = 10_000.0, interleaved: bool = False
    ) -> Rotary:
        """The ablations of the HoPE paper (section 5). "ab1" drops only pi/L < theta < 2 pi/L, "ab2" only theta <=
        pi/L, "ab3" drops none and spreads all pairs over [2 pi/L, 1] geometrically."""
        _positive("train_length", train_length)
        rope = cls.rope(head_dim, base, interleaved=interleaved)
        edge = math.pi / train_length
        if which == "ab1":
            theta = tuple(0.0 if edge < f < 2 * edge else f for f in rope.frequencies)
        elif which == "ab2":
            theta = tuple(0.0 if f <= edge else f for f in rope.frequencies)
        elif which == "ab3":
            last = max(len(rope.frequencies) - 1, 1)
            theta = tuple((2 * edge) ** (m / last) for m in range(len(rope.frequencies)))
            return dataclasses.replace(rope, frequencies=theta, base=None)
        else:
            raise ValueError(f'which: expected "ab1", "ab2" or "ab3", got {which!r}')
        return dataclasses.replace(rope, frequencies=theta)

    @classmethod
    def none(cls, head_dim: int) -> Rotary:
        """NoPE: no pair rotates."""
        return cls(head_dim, (), exponent_dim=head_dim)

    @classmethod
    def from_inv_freq(cls, inv_freq, head_dim: int, interleaved: bool = False) -> Rotary:
        """Any table: inv_freq is one-dimensional, radians per position, one number per pair; zeros are allowed."""
        table = torch.as_tensor(inv_freq, dtype=torch.float64).detach().cpu()
        if table.ndim != 1:
            raise ValueError(f"inv_freq: expected one dimension, got shape {tuple(table.shape)}")
        return cls(head_dim, tuple(table.tolist()), interleaved, exponent_dim=2 * table.numel())

    @classmethod
    def from_hf_config(cls, config, layer_type: str | None = None, seqlen: int | None = None) -> Rotary:
        """The scheme of a Hugging Face model configuration, read by attribute; see ``flashrope.integrations.transformers.hf_config``."""
        from .integrations.transformers.hf_config import rotary_from_config

        return rotary_from_config(config, layer_type, seqlen)

    @classmethod
    def axial(cls, head_dim: int, axes: int = 2, base: float = 100.0, interleaved: bool = False) -> Rotary:
        """n-dimensional RoPE: head_dim / 2 pairs shared out evenly, each block of pairs turning with its own axis.

        ``attention`` then needs ``positions`` of shape (batch, seqlen, axes).
        """
        _positive_int("head_dim", head_dim)
        _positive_int("axes", axes)
        if head_dim % (2 * axes):
            raise ValueError(f"head_dim: expected a multiple of 2 * axes = {2 * axes}, got {head_dim}")
        theta = _geometric(base, head_dim // axes)
        axis = tuple(a for a in range(axes) for _ in theta)
        return cls(head_dim, theta * axes, interleaved, axis=axis, exponent_dim=head_dim // axes)

    # ---- changes to the table
    def interpolate(self, factor: float) -> Rotary:
        """Position interpolation (Chen et al. 2023): every frequency divided by factor."""
        self._check_unscaled("interpolate")
        factor = _positive("factor", factor)
        return self._with_table("interpolate", [f / factor for f in self.frequencies])

    def ntk(self, factor: float, variant: str = "aware") -> Rotary:
        """NTK-aware interpolation, s = factor, D = the exponent's denominator, m from 0.

        "aware" multiplies the base by s ** (D / (D - 2)); "old" by s; "fixed" multiplies theta_m by s ** (-2 (m + 1) /
        D); "mixed" by exp(-a (m + 1) ** 0.625) with a = ln(s) / (D / 2) ** 0.625.
        """
        self._check_unscaled("ntk")
        factor = _positive("factor", factor)
        dim, log_s = self.exponent_dim, math.log(factor)
        if variant == "aware":
            if dim <= 2:
                raise ValueError(f'variant: "aware" needs more than one pair, this table has {dim // 2}')
            decay = [2 * m / (dim - 2) for m in range(len(self.frequencies))]
        elif variant == "old":
            decay = [2 * m / dim for m in range(len(self.frequencies))]
        elif variant == "fixed":
            decay = [2 * (m + 1) / dim for m in range(len(self.frequencies))]
        elif variant == "mixed":
            decay = [((m + 1) / (dim / 2)) ** 0.625 for m in range(len(self.frequencies))]
        else:
            raise ValueError(f'variant: expected "old", "aware", "fixed" or "mixed", got {variant!r}')
        return self._with_table("ntk", [f * math.exp(-log_s * c) for f, c in zip(self.frequencies, decay, strict=True)])

    def yarn(
        self,
        factor: float,
        train_length: float,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        temperature: float | None = None,
        truncate: bool = True,
    ) -> Rotary:
        """YaRN (Peng et al. 2023, section 3.2): pairs that turn more than beta_fast times over train_length keep their
        frequency, those that turn less than beta_slow times are divided by factor, a linear ramp over the pair index
        joins them. The score's temperature is (0.1 ln(factor) + 1) ** 2 unless given (1 for a factor of at most 1).

        truncate=False leaves the ramp's ends unrounded, as some checkpoints ask.
        """
        self._check_unscaled("yarn")
        factor, train_length = _positive("factor", factor), _positive("train_length", train_length)
        beta_fast, beta_slow = _positive("beta_fast", beta_fast), _positive("beta_slow", beta_slow)
        _flag("truncate", truncate)
        if beta_fast < beta_slow:
            raise ValueError(f"beta_fast: expected at least beta_slow = {beta_slow!r}, got {beta_fast!r}")
        if train_length < beta_slow * 2 * math.pi:
            raise ValueError(
                f"train_length: no pair turns beta_slow = {beta_slow!r} times over {train_length!r} positions, "
                "which leaves no ramp; use interpolate"
            )
        if self.base is None:
            raise ValueError("yarn: finds its ramp from the table's base, which a table of from_inv_freq or ab3 lacks")
        low, high = (
            self.exponent_dim * math.log(train_length / (beta * 2 * math.pi)) / (2 * math.log(self.base))
            for beta in (beta_fast, beta_slow)
        )
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.exponent_dim - 1)
        width = max(high - low, 0.001)
        theta = []
        for m, f in enumerate(self.frequencies):
            interpolated = min(max((m - low) / width, 0.0), 1.0)
            theta.append(f / factor * interpolated + f * (1 - interpolated))
        if temperature is None:
            temperature = (0.1 * math.log(factor) + 1) ** 2 if factor > 1 else 1.0
        temperature = _positive("temperature", temperature)
        return dataclasses.replace(self._with_table("yarn", theta), temperature=self.temperature * temperature)

    # ---- changes to the bands and the scale
    def rectify(self, window: int, factor: float | None = None) -> Rotary:
        """ReRoPE (factor None or inf): the true distance below window, the distance window from there on.
        Leaky ReRoPE: beyond the window the distance grows by 1 / factor; factor may be below 1.

        Not causal: the mirror image holds for keys ahead.
        """
        _window(window)
        if self.axis:
            raise ValueError("rectify: bands over the distance need one-dimensional positions; this table is axial")
        if any(band.slope != 1 or band.offset != 0 for band in self.bands):
            raise ValueError("rectify: this scheme is rectified already; one window is all the formula has")
        slope = 0.0
        if factor is not None:
            slope = 1.0 / _positive("factor", factor, finite=False)
            if slope == math.inf:
                raise ValueError(f"factor: too small to divide by, {factor!r}")
        far = Band(window, math.inf, slope, window - window * slope)
        return self._with_bands(
            [b for reach in self.bands for b in (_clip(reach, 0, window), _clip(far, 0, reach.stop))]
        )

    def local(self, window: int) -> Rotary:
        """Sliding window: keys at distance window or more are not attended to."""
        _window(window)
        if self.axis:
            raise ValueError("local: a window over the distance needs one-dimensional positions; this table is axial")
        return self._with_bands([_clip(band, 0, window) for band in self.bands])

    def log_n(self, train_length: float, clip: bool = True) -> Rotary:
        """The query at position i is scaled by ln(i + 1) / ln(train_length).

        clip=True takes at least 1, for a model trained without it; clip=False is for one trained with it.
        """
        train_length = _positive("train_length", train_length)
        if not train_length > 1:
            raise ValueError(f"train_length: expected more than 1, got {train_length!r}")
        _flag("clip", clip)
        if self.axis:
            raise ValueError("log_n: scales by the number of keys seen, which axial positions do not tell")
        if self.log_n_scale is not None:
            raise ValueError("log_n: this scheme is scaled by log n already")
        return dataclasses.replace(self, log_n_scale=(train_length, clip))

    # ---- text
    @cached_property
    def text(self) -> str:
        """This scheme as JSON, exact; ``Rotary.from_text`` reads it back. Operators and checkpoints carry it."""
        return json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> Rotary:
        fields = json.loads(text)
        fields["frequencies"] = tuple(fields["frequencies"])
        fields["bands"] = tuple(Band(*band) for band in fields["bands"])
        fields["axis"] = tuple(fields["axis"])
        if fields["log_n_scale"] is not None:
            fields["log_n_scale"] = tuple(fields["log_n_scale"])
        return Rotary(**fields)

    def __repr__(self) -> str:
        turning = [f for f in self.frequencies if f]
        pairs = f"{len(turning)} of {self.head_dim // 2} pairs rotate"
        if turning:
            pairs += f" (inv_freq {max(turning, key=abs):.4g} to {min(turning, key=abs):.4g}"
            pairs += f", {'interleaved' if self.interleaved else 'half'} pairing"
            pairs += f" in {self.rotary_dim} channels" if self.rotary_dim != self.head_dim else ""
            pairs += f", {self.axes} axes" if self.axis else ""
            pairs += f", {self.scaled_by}" if self.scaled_by else ""
            pairs += ")"
        parts = [
            f"head_dim={self.head_dim}",
            pairs,
            "distance: " + ("; ".join(map(_band_text, self.bands)) or "no keys"),
        ]
        scale = [f"{self.temperature:.6g}"] if self.temperature != 1 else []
        if self.log_n_scale is not None:
            length, clip = self.log_n_scale
            log_n = f"ln(i + 1) / ln({length:g})"
            scale.append(f"max(1, {log_n})" if clip else log_n)
        return f"Rotary({', '.join(parts)}, score scale: {' * '.join(scale) or '1'})"

    # ---- inner
    def _check_unscaled(self, name: str) -> None:
        if not any(self.frequencies):
            raise ValueError(f"{name}: no pair of this scheme rotates, there is nothing to interpolate")
        if self.scaled_by:
            raise ValueError(f"{name}: the table was changed by {self.scaled_by} already; interpolations do not stack")
        if self.axis:
            raise ValueError(
                f"{name}: interpolates one-dimensional tables; scale the positions of an axial one instead"
            )

    def _with_table(self, name: str, theta) -> Rotary:
        return dataclasses.replace(self, frequencies=tuple(theta), scaled_by=name)

    def _with_bands(self, bands) -> Rotary:
        joined: list[Band] = []
        for band in bands:
            if band.start >= band.stop:
                continue
            last = joined[-1] if joined else None
            if last and (last.stop, last.slope, last.offset) == (band.start, band.slope, band.offset):
                joined[-1] = last._replace(stop=band.stop)
            else:
                joined.append(band)
        return dataclasses.replace(self, bands=tuple(joined))


def _geometric(base: float, dim: int) -> tuple[float, ...]:
    base = _positive("base", base)
    if not base > 1:
        raise ValueError(f"base: expected more than 1, got {base!r}")
    return tuple(base ** (-2 * m / dim) for m in range(dim // 2))


def _clip(band: Band, start: float, stop: float) -> Band:
    return band._replace(start=max(band.start, start), stop=min(band.stop, stop))


def _band_text(band: Band) -> str:
    if band.slope == 0:
        seen = f"{band.offset:g}"
    else:
        seen = "d" if band.slope == 1 else f"d * {band.slope:.6g}"
        seen += f" + {band.offset:.6g}" if band.offset else ""
    return (
        f"{seen} for d >= {band.start:g}"
        if band.stop == math.inf
        else f"{seen} for {band.start:g} <= d < {band.stop:g}"
    )


def _positive(name: str, value, finite: bool = True) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    number = float(value)
    if not number > 0 or finite and number == math.inf:
        raise ValueError(f"{name}: expected a positive {'finite ' if finite else ''}number, got {value!r}")
    return number


def _flag(name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def _integer(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive_int(name: str, value) -> None:
    if not _integer(value, 1):
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")


def _even(name: str, value, least: int = 2) -> None:
    if not _integer(value, least) or value % 2:
        raise ValueError(f"{name}: expected an even integer of at least {least}, got {value!r}")


def _window(window) -> None:
    if not _integer(window, 0):
        raise ValueError(f"window: expected a non-negative integer, got {window!r}")
