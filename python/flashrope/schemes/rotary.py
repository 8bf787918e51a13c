"""``Rotary``: the description of a rotary position scheme.

Every scheme is a frequency per channel pair, a short list of bands over the distance d = i - j (query position minus
key position), and a scale on the query:

    score(i, j) = softmax_scale * t * logn(i) * (R(slope*i + offset) q_i) . (R(slope*j) k_j)

slope and offset are those of the band that contains d. R(p) rotates pair m by the angle p * inv_freq[m]. A pair with
inv_freq[m] = 0 does not rotate. ``log_steps_scale`` replaces logn(i) by another function. ``rotated_scale`` multiplies
only the part of the score that comes from the channels that form pairs. A band may rotate by mapped positions instead
of i and j (``bands.Band``). Kernels get only these numbers, and not the name of the scheme.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch

from .axes import axial_pairs, section_axes
from .bands import (
    EVERYWHERE,
    Band,
    beyond_window,
    checked_bands,
    chunk_of,
    chunked,
    clipped,
    grouped,
    have_maps,
    merged,
    rectified,
    shifted,
    two_sided,
)
from .hugging_face import ConfigStep, config_steps
from .scales import UNSCALED, QueryScale, checked_log_n, checked_log_steps
from .scheme_checks import (
    check_first_channel,
    check_flag,
    check_positive_int,
    check_self_extend,
    check_string,
    check_window,
    checked_axis,
    checked_chunk,
    checked_frequencies,
    checked_origin,
    checked_rotary_dim,
    moderate,
    positive,
    says_instead,
)
from .tables import (
    cope_table,
    first_pairs,
    geometric_table,
    given_table,
    hope_table,
    llama3_table,
    ntk_table,
    yarn_table,
)
from .text import describe, fields_of

__all__ = ["Rotary"]


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary:
    """Describes a rotary position scheme: a frequency per channel pair, bands over the distance, a scale on queries.

    Build it with a class method, then chain changes. A Rotary only holds numbers: it is frozen, belongs to no device,
    and can be used in any number of calls. Two schemes are equal if they compute the same from the same channels,
    however they were built.

    Example:
        rotary = Rotary.hope(head_dim=128, train_length=8192).rectify(window=1024).log_n(train_length=8192)
        print(rotary)
        # -> Rotary(head_dim=128, 50 of 64 pairs rotate (...), distance: d for 0 <= d < 1024; 1024 for d >= 1024, ...

    Attributes:
        head_dim: channels per head.
        frequencies: inv_freq as a tuple, one number per channel pair, in radians per position. 0: the pair does not
            rotate.
        interleaved: True pairs channels 2m and 2m + 1; False pairs m and m + rotary_dim / 2. Channels count from
            first_channel.
        bands: the bands over d >= 0, for causal attention. ``two_sided_bands`` adds their mirror images. Keys at
            distances between two bands are not attended to.
        temperature: the factor t on all scores.
        log_n_scale: (train_length, clip) or None. logn(i) is ln(i + 1) / ln(train_length), and at least 1 if clip.
        log_steps_scale: (floor_scale, attn_scale, first), set by ``log_steps``, or None. A scheme has at most one of
            log_n_scale and log_steps_scale.
        rotated_scale: factor on what the channels of the table (rotary_dim channels from first_channel on) contribute
            to the scores.
        length_scale: a length in tokens, or None. With a length, scores of a sequence of n keys are scaled by max(1,
            0.1 ln(n / length) + 1).
        first_channel: the first channel that belongs to a pair, even.
        axis: for every pair, the number of an axis. The pair rotates by the coordinate on that axis. () for
            one-dimensional positions.
        base, exponent_dim: inv_freq[m] was base ** (-2m / exponent_dim) before any change. base is None if the table
            was not of this form.
        scaled_by: the interpolation that has changed the table, or "". base, exponent_dim and scaled_by decide which
            changes may still be chained. Comparisons of schemes ignore these three attributes.
    """

    head_dim: int
    frequencies: tuple[float, ...]
    interleaved: bool = False
    bands: tuple[Band, ...] = (EVERYWHERE,)
    temperature: float = 1.0
    log_n_scale: tuple[float, bool] | None = None
    axis: tuple[int, ...] = ()
    log_steps_scale: tuple[float, float, int] | None = None
    rotated_scale: float = 1.0
    base: float | None = dataclasses.field(default=None, compare=False)
    exponent_dim: int = dataclasses.field(default=0, compare=False)
    scaled_by: str = dataclasses.field(default="", compare=False)
    length_scale: float | None = None
    first_channel: int = 0

    def __post_init__(self):
        check_positive_int("head_dim", self.head_dim)
        for name, checked in (
            ("frequencies", checked_frequencies(self.frequencies, self.head_dim)),
            ("bands", checked_bands(self.bands)),
            ("axis", checked_axis(self.axis, len(self.frequencies))),
            ("log_n_scale", checked_log_n(self.log_n_scale)),
            ("log_steps_scale", checked_log_steps(self.log_steps_scale)),
        ):
            object.__setattr__(self, name, checked)
        check_first_channel(self.head_dim, self.rotary_dim, self.first_channel)
        check_flag("interleaved", self.interleaved)
        origin = checked_origin(self.base, self.exponent_dim, self.scaled_by)
        for name, checked in zip(("base", "exponent_dim", "scaled_by"), origin, strict=True):
            object.__setattr__(self, name, checked)
        for name in ("temperature", "rotated_scale", "length_scale"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, moderate(name, value))
        if self.log_n_scale and self.log_steps_scale:
            raise ValueError(
                "log_steps_scale: not supported together with log_n_scale (only one of the two can scale queries by "
                f"position), got {self.log_steps_scale}"
            )
        self.text, self.query_scale  # noqa: B018  cached now: torch.compile cannot trace a cached_property's first call

    @cached_property
    def _hash(self) -> int:
        table = self.head_dim, self.frequencies, self.interleaved, self.axis, self.first_channel
        scales = self.temperature, self.log_n_scale, self.log_steps_scale, self.rotated_scale, self.length_scale
        return hash((*table, self.bands, *scales))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return _unpickle, (self.text,)  # not __dict__, whose cached hash is only valid in this process

    # ---- derived values
    @property
    def rotary_dim(self) -> int:
        """Returns the number of channels, from first_channel on, that form pairs. The others carry no position."""
        return 2 * len(self.frequencies)

    @property
    def inv_freq(self) -> torch.Tensor:
        """Returns the frequency of every pair, float64 (rotary_dim / 2,), in radians per position."""
        return torch.tensor(self.frequencies, dtype=torch.float64, device="cpu")

    @property
    def changes_channels(self) -> bool:
        """Whether rotating changes any channel: a pair rotates, or ``rotated_scale`` is not 1."""
        return any(self.frequencies) or self.rotated_scale != 1

    @property
    def axes(self) -> int:
        """Returns the number of coordinates of a position: 1, or more for n-dimensional RoPE."""
        return max(self.axis) + 1 if self.axis else 1

    @cached_property
    def two_sided_bands(self) -> tuple[Band, ...]:
        """Returns the bands over all d: each causal band and its mirror image, merged at d = 0.

        A mirror image has d -> -d and offset -> -offset.

        Raises:
            ValueError: a band maps positions, or the first band starts at 0 and has an offset, so that d = 0 is in two
                bands.
        """
        return two_sided(self.bands)

    @cached_property
    def query_scale(self) -> QueryScale:
        """Returns the factor of a query, as a function of its position and of the length of its sequence."""
        scale = UNSCALED
        if self.log_n_scale is not None:
            scale = QueryScale.log_n(*self.log_n_scale)
        elif self.log_steps_scale is not None:
            scale = QueryScale.log_steps(*self.log_steps_scale)
        return scale if self.length_scale is None else scale._replace(length_scale=self.length_scale)

    def bands_for(self, causal: bool) -> tuple[Band, ...]:
        """Returns ``bands`` for causal attention, otherwise ``two_sided_bands``."""
        return self.bands if causal else self.two_sided_bands

    # ---- schemes
    @classmethod
    def rope(
        cls,
        head_dim: int,
        base: float = 10_000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        first_channel: int = 0,
    ) -> Rotary:
        """Builds RoPE (Su et al. 2021, eq. 15): inv_freq[m] = base ** (-2m / rotary_dim).

        Use it for models that were trained with RoPE, and as the start of a chain of changes.

        Example:
            Rotary.rope(head_dim=128, base=500_000.0)  # Llama 3
            Rotary.rope(head_dim=64, rotary_dim=32)  # Hugging Face's partial_rotary_factor of 0.5
            Rotary.rope(head_dim=192, rotary_dim=64, first_channel=128)  # DeepSeek V3: 64 rotary channels come last

        Args:
            head_dim: channels per head, even.
            base: above 1; Hugging Face's rope_theta.
            rotary_dim: number of channels that rotate, even. None: all channels from first_channel on. rotary_dim is
                also the denominator of the exponent, as in Hugging Face's partial rotary.
            interleaved: True pairs channels 2m and 2m + 1 (GPT-J); False pairs m and m + rotary_dim / 2 (Llama).
            first_channel: the first channel that rotates, even. It is 512 for the keys of DeepSeek's latent attention,
                whose 64 rotary channels come after 512 latent channels.
        """
        rotary_dim = checked_rotary_dim(head_dim, rotary_dim, first_channel)
        table = geometric_table(base, rotary_dim)
        return cls(head_dim, table, interleaved, base=float(base), exponent_dim=rotary_dim, first_channel=first_channel)

    @classmethod
    def hope(
        cls,
        head_dim: int,
        train_length: float,
        base: float = 10_000.0,
        interleaved: bool = False,
        compact: bool = False,
    ) -> Rotary:
        """Builds HoPE (Chen et al. 2025, section 4): only RoPE's pairs with inv_freq >= 2 pi / train_length rotate.

        Use HoPE to train from scratch, or to continue the training of a RoPE model. For a model that is not trained
        further, use ``rectify`` or ``self_extend``, which keep what the model has learned.

        The first a pairs, which make a full turn within the training length, rotate. The other pairs carry no position.
        interleaved and compact choose between three layouts. In all three the denominator of the exponent is head_dim.

        Example:
            Rotary.hope(head_dim=128, train_length=8192)  # 50 of 64 pairs rotate

        Args:
            head_dim: channels per head, even.
            train_length: in tokens.
            base: as in ``rope``.
            interleaved: True pairs channels 2m and 2m + 1 of the first 2a channels (the paper's q[:2a]). False pairs m
                with m + head_dim / 2, and the pairs from a on do not rotate (for Llama checkpoints).
            compact: True pairs channel m with m + a, within the first 2a channels.
        """
        positive("train_length", train_length)
        if interleaved and compact:
            raise ValueError(
                "compact: expected False with interleaved=True, got True (compact pairs channels m and m + a, "
                "interleaved pairs 2m and 2m + 1)"
            )
        check_flag("compact", compact)
        rope = cls.rope(head_dim, base, interleaved=interleaved)
        frequencies = hope_table(rope.frequencies, train_length)
        if not frequencies:
            warnings.warn(
                "train_length: expected at least 7 tokens, because the first pair takes that long for a full turn, "
                f"got {train_length!r}; no pair of this scheme rotates",
                stacklevel=2,
            )
        if not (interleaved or compact):
            frequencies += (0.0,) * (head_dim // 2 - len(frequencies))
        return dataclasses.replace(rope, frequencies=frequencies)

    @classmethod
    def p_rope(cls, head_dim: int, fraction: float, base: float = 10_000.0, interleaved: bool = False) -> Rotary:
        """Builds p-RoPE (Barbero et al. 2024, arXiv 2410.06205, section 6): the first fraction of RoPE's pairs rotates.

        Like HoPE, p-RoPE rotates the fast pairs and leaves the slow pairs without position. HoPE cuts the table at the
        frequency 2 pi / train_length, and p-RoPE after a fraction of the pairs. Hugging Face calls it "proportional".
        The global layers of Gemma 4 use it.

        Example:
            Rotary.p_rope(head_dim=128, fraction=0.25, base=1_000_000.0)  # 16 of 64 pairs rotate

        Args:
            head_dim: channels per head, even.
            fraction: the fraction of the pairs that rotates, 0 to 1: int(fraction * head_dim / 2) pairs.
            base: as in ``rope``; inv_freq[m] = base ** (-2m / head_dim).
            interleaved: as in ``rope``.
        """
        rope = cls.rope(head_dim, base, interleaved=interleaved)
        return dataclasses.replace(rope, frequencies=first_pairs(rope.frequencies, fraction))

    @classmethod
    def none(cls, head_dim: int) -> Rotary:
        """Builds NoPE: no pair rotates.

        Use it for layers without position encoding, and for q and k that are already rotated.

        Example:
            Rotary.none(head_dim=128)
        """
        return cls(head_dim, (), exponent_dim=head_dim)

    @classmethod
    def from_inv_freq(cls, inv_freq, head_dim: int, interleaved: bool = False, first_channel: int = 0) -> Rotary:
        """Builds a scheme with a table of your own.

        Example:
            Rotary.from_inv_freq(torch.logspace(0, -3, 32), head_dim=64)

        Args:
            inv_freq: tensor, array or list (pairs,), in radians per position. 0: the pair does not rotate. Must not
                require grad: the table is copied as constants, so no gradient would flow into it.
            head_dim: channels per head, at least 2 * pairs.
            interleaved: True pairs channels 2m and 2m + 1; False pairs m and m + pairs.
            first_channel: the first channel that belongs to a pair, even. Channels before and after the pairs carry no
                position.
        """
        frequencies = given_table("inv_freq", inv_freq)
        exponent_dim = 2 * len(frequencies)
        return cls(head_dim, frequencies, interleaved, exponent_dim=exponent_dim, first_channel=first_channel)

    @classmethod
    def from_hf_config(cls, config, layer_type: str | None = None, seqlen: int | None = None) -> Rotary:
        """Returns the scheme with which a Hugging Face model rotates its queries and keys.

        Use it if your own code runs a model with a released configuration. ``convert`` does this for a whole model of
        transformers.

        Example:
            from transformers import LlamaConfig

            Rotary.from_hf_config(LlamaConfig(hidden_size=512, num_attention_heads=8, rope_theta=500_000.0))

        Reads the fields of transformers 4.57 (``rope_theta``, ``rope_scaling``, ``partial_rotary_factor``) and of
        transformers 5 (``rope_parameters``, also one dict per layer type). If the two versions interpret a field
        differently, version 5 decides. Rope types: default, linear, dynamic, yarn, llama3, longrope (formerly "su") and
        proportional.

        Parameters that the transformers code of the model does not read (alpha, partial_rotary_factor) raise an error.
        ``dual_chunk_attention_config`` (Qwen2.5-1M), which transformers itself does not read, gives ``dual_chunk`` with
        ``original_max_position_embeddings`` as length_scale. Qwen's sparse attention is not applied.

        Hugging Face multiplies cos and sin by ``attention_factor``. Here the square of this factor scales the scores.
        If not all channels rotate, the square scales only what the rotated channels contribute to the scores.
        ``llama_4_scaling_beta`` gives ``log_steps``.

        With ``mrope_section`` the scheme needs positions of three coordinates: transformers' position_ids as
        (batch, seqlen, 3). For some model families only the transformers code gives the sections, and the configuration
        does not. The scheme of these families is for text only, where the three coordinates are equal.

        Args:
            config: the configuration of a text model, or any object with the same fields. For a multimodal model, pass
                ``config.get_text_config()``.
            layer_type: one of the ``layer_types``, for models whose layers differ. A type that does not rotate gives
                ``Rotary.none``. ``no_rope_layers`` is not read: the caller decides which layers do not rotate.
            seqlen: tokens of the longest sequence. The length matters for "dynamic", whose base grows with the length,
                and for "longrope", which has one table up to the training length and another table beyond. None: the
                longest sequence is within the training length, as for short prompts in transformers.

        Raises:
            ValueError: a field has no exact counterpart in flashrope. The message names the field and gives the reason.
        """
        if config is None or isinstance(config, (str, bytes, dict, os.PathLike)):
            raise TypeError(
                "config: expected a model configuration, as transformers.AutoConfig.from_pretrained returns it, got "
                f"{type(config).__name__}"
            )
        return build(config_steps(config, layer_type, seqlen))

    @classmethod
    def axial(
        cls,
        head_dim: int,
        axes: int | Iterable[Any] | None = None,
        base: float = 100.0,
        interleaved: bool = False,
        *,
        axis: Sequence[int] | None = None,
        rotary_dim: int | None = None,
    ) -> Rotary:
        """Builds n-dimensional RoPE for images and video: every axis has pairs that rotate by its coordinate.

        ``attention`` then needs ``positions`` of shape (batch, seqlen, axes), and ``attention_varlen`` (total, axes). A
        token whose coordinates are all 0, such as a class or register token, does not rotate. For the text decoders of
        vision-language models, whose pairs share one table, see ``mrope``.

        Example:
            Rotary.axial(64)  # rows and columns, 16 pairs each
            Rotary.axial(128, [8, 28, 28], base=10_000.0, interleaved=True)  # FLUX.1

        Args:
            head_dim: channels per head.
            axes: the number of axes, all with the same number of pairs, or a list with an entry per axis. An entry is
                the axis's number of pairs (configurations often give channels, twice as many), or its table: inv_freq
                of its pairs in radians per position. Default: the number of distinct axes in ``axis``, or 2 if ``axis``
                is None.
            base: above 1. If axes gives no table for an axis of n pairs, inv_freq of its pair m is base ** (-m / n).
            interleaved: as in ``rope``.
            axis: the axis of every pair. The pairs of an axis take the entries of its table in order. None: all pairs
                of axis 0 come first, then those of axis 1, and so on.
            rotary_dim: number of leading channels that rotate, as in ``rope``. The pairs of all axes add up to
                rotary_dim / 2.
        """
        pairs = checked_rotary_dim(head_dim, rotary_dim) // 2
        frequencies, order = axial_pairs(axes, base, axis, pairs)
        return cls(head_dim, frequencies, interleaved, axis=order)

    # ---- changes to the table
    def interpolate(self, factor: float) -> Rotary:
        """Applies position interpolation (Chen et al. 2023): every frequency is divided by factor, a positive number.

        Models need some training with interpolated positions. ``ntk`` and ``yarn`` keep the fast pairs and need less
        training.

        Example:
            Rotary.rope(128).interpolate(4.0)  # for a context four times as long
        """
        self._check_unscaled("interpolate")
        factor = positive("factor", factor)
        return self._with_table("interpolate", [f / factor for f in self.frequencies])

    def ntk(self, factor: float, variant: str = "aware", exponent: float = 0.625) -> Rotary:
        """Applies NTK-aware interpolation. The formulas below use s = factor and D, the denominator of the exponent.

        Use it on a trained model, without further training. NTK-aware interpolation raises the loss a little at every
        length (docs/long_context.md).

        Example:
            Rotary.rope(128).ntk(4.0)  # for a context four times as long

        Args:
            factor: the factor by which the context grows, a positive number.
            variant: "aware": the base is multiplied by s ** (D / (D - 2)), as in Hugging Face's dynamic NTK.
                "old": the base is multiplied by s.
                "fixed": inv_freq[m] is multiplied by s ** (-2 (m + 1) / D).
                "mixed": inv_freq[m] is multiplied by exp(-a (m + 1) ** b), a = ln(s) / (D / 2) ** b.
            exponent: b in "mixed". The author of ReRoPE uses 0.625 in the article and 0.75 in the code.
        """
        self._check_unscaled("ntk")
        return self._with_table("ntk", ntk_table(self.frequencies, self.exponent_dim, factor, variant, exponent))

    def yarn(
        self,
        factor: float,
        train_length: float,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        temperature: float | None = None,
        truncate: bool = True,
    ) -> Rotary:
        """Applies YaRN (Peng et al. 2023, section 3.2).

        Use it if your server supports no other scheme, or if you can train a little on longer sequences. YaRN raises
        the loss a little at every length (docs/long_context.md). ``ntk_by_parts`` is YaRN without the temperature.

        Example:
            Rotary.rope(128).yarn(factor=4.0, train_length=8192)

        Pairs that make more than beta_fast turns over train_length keep their frequency. The frequency of pairs that
        make fewer than beta_slow turns is divided by factor. Between these pairs, a linear ramp over the pair index
        interpolates.

        Args:
            factor: the factor by which the context grows, a positive number.
            train_length: in tokens.
            beta_fast, beta_slow: turns over train_length at which the ramp starts and ends.
            temperature: factor on the scores; None: (0.1 ln(factor) + 1) ** 2, and 1 for a factor of at most 1.
            truncate: whether the ends of the ramp are rounded to whole pairs; some checkpoints need False.
        """
        self._check_unscaled("yarn")
        betas = beta_fast, beta_slow
        frequencies = yarn_table(self.frequencies, self.exponent_dim, self.base, factor, train_length, betas, truncate)
        if temperature is None:
            temperature = (0.1 * math.log(factor) + 1) ** 2 if factor > 1 else 1.0
        temperature = positive("temperature", temperature)
        return dataclasses.replace(self._with_table("yarn", frequencies), temperature=self.temperature * temperature)

    def ntk_by_parts(
        self, factor: float, train_length: float, beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True
    ) -> Rotary:
        """Applies NTK-by-parts (bloc97 2023; Peng et al. 2023, section 3.2): YaRN's table without its temperature.

        Example:
            Rotary.rope(128).ntk_by_parts(factor=4.0, train_length=8192)

        The arguments have the same meaning as in ``yarn``.
        """
        self._check_unscaled("ntk_by_parts")
        yarn = self.yarn(factor, train_length, beta_fast, beta_slow, temperature=1.0, truncate=truncate)
        return dataclasses.replace(yarn, scaled_by="ntk_by_parts")

    def cope(self, train_length: float, pairs: int | None = None, taper: bool = True) -> Rotary:
        """Applies CoPE, clipped RoPE (arXiv 2602.05258): HoPE's cut for a model that is already trained.

        Example:
            Rotary.rope(128).cope(train_length=8192)

        CoPE changes the n pairs with inv_freq < 2 pi / train_length, which HoPE does not rotate. In order of decreasing
        inv_freq, the frequency of pair r = 0 ... n - 1 is multiplied by (1 + cos(pi r / (n - 1))) / 2. The first pair
        keeps its frequency, and the last pair does not rotate.

        Args:
            train_length: in tokens.
            pairs: n, how many pairs to taper, counted from the slowest one that rotates. Default: all pairs below the
                cut.
            taper: False: none of the n pairs rotates, which gives HoPE's table.
        """
        return dataclasses.replace(self, frequencies=cope_table(self.frequencies, train_length, pairs, taper))

    def mrope(self, sections: Sequence[int], interleaved: bool = False) -> Rotary:
        """Applies the M-RoPE of vision-language models: each pair rotates by one coordinate of a position.

        Example:
            Rotary.rope(128, base=1_000_000.0).mrope([16, 24, 24])  # Qwen2-VL

        ``attention`` then needs ``positions`` of shape (batch, seqlen, axes), in Hugging Face's order: time, height,
        width. If all coordinates of every position are equal, as for text, the results are those of the scheme without
        ``mrope``.

        Args:
            sections: the number of pairs of each axis, Hugging Face's mrope_section. The sections add up to the number
                of pairs of the table.
            interleaved: False: one axis after the other (Qwen2-VL, Qwen2.5-VL, GLM-4V). True: pair m belongs to axis m
                modulo the number of axes while that axis has pairs left, otherwise to axis 0 (Qwen3-VL).
        """
        check_flag("interleaved", interleaved)
        if self.axis:
            raise ValueError("mrope: this table is axial already")
        if len(self.bands) != 1 or not self.bands[0].is_plain or self.log_n_scale or self.log_steps_scale:
            raise ValueError(
                "mrope: expected a scheme without rectify, self_extend, dual_chunk and log_n, which need "
                "one-dimensional positions; local may be called before mrope, and its window counts token indices"
            )
        return dataclasses.replace(self, axis=section_axes(sections, len(self.frequencies), interleaved))

    # ---- changes to the bands and the scale
    def with_bands(self, bands: Sequence[Band]) -> Rotary:
        """Returns the scheme with bands of your own over the distance.

        Use it for a scheme that no method builds. The frequencies and the scales stay.

        Example:
            near, far = Band(0, 16, slope=1.0, offset=0.0), Band(16, torch.inf, slope=0.5, offset=8.0)
            Rotary.rope(64).with_bands((near, far))  # half the speed from distance 16 on

        Args:
            bands: sorted by distance, without overlap. Keys at distances in no band are not attended to. ``Band`` says
                what its fields mean.

        Raises:
            TypeError, ValueError: a band is invalid. The message names the band and the field.
        """
        return self._with(bands=bands)

    @says_instead(k="factor", w="window", group="factor, or self_extend(window, group)")
    def rectify(self, window: int, factor: float | None = None) -> Rotary:
        """Applies ReRoPE (Su 2023), or with a factor Leaky ReRoPE: beyond a window, distances stop or grow slower.

        Use it to read beyond the training length with a trained RoPE model, without training. Windows of a quarter to a
        half of the training length are best. ``self_extend`` and ``dual_chunk`` have the same purpose. With ``local``,
        queries see no keys beyond a window.

        Example:
            Rotary.rope(128).rectify(window=2048).log_n(train_length=8192)  # ReRoPE
            Rotary.rope(128).rectify(window=2048, factor=16.0)  # Leaky ReRoPE

        Below window, scores see the true distance. From window on, ReRoPE's scores see the distance window. With Leaky
        ReRoPE, the distance that scores see grows by 1 / factor per position. If attention is not causal, the same
        holds for later keys.

        Args:
            window: in positions.
            factor: None or inf: ReRoPE. A positive number, which may be below 1: Leaky ReRoPE.
        """
        check_window(window)
        self._check_unbanded("rectify")
        return self._with_bands(beyond_window(self.bands, rectified(window, factor)))

    def string(self, start: int, window: int) -> Rotary:
        """Applies STRING (An et al. 2024, arXiv 2410.18745, section 4): far keys move nearer, for trained models.

        Scores see the true distance d below start, and d - start + window from start on. So distances that were
        frequent in training replace rare ones. If attention is not causal, the same holds for later keys. Use it within
        the training length: the largest distance still grows with the text.

        Example:
            Rotary.rope(64, base=500_000.0).string(start=2731, window=128)  # a third of 8,192 tokens

        Args:
            start: S of the paper, in positions; a third to a half of the training length.
            window: W of the paper, in positions, at least 0 and less than start. A key at the distance start is seen at
                the distance window.
        """
        check_string(start, window)
        self._check_unbanded("string")
        return self._with_bands(beyond_window(self.bands, shifted(start, window)))

    def self_extend(self, window: int, group: int) -> Rotary:
        """Applies Self-Extend (Jin et al. 2024, section 3): grouped positions beyond a window, for trained models.

        Like ``rectify``, it lets a model read beyond its training length without training. Unlike ReRoPE's distances,
        the distances beyond the window keep growing, by one per group.

        Example:
            Rotary.rope(128).self_extend(window=2048, group=4)

        Below window, scores see the true distance. From window on, the query at i rotates by
        floor(i / group) + window - window / group and the key at j by floor(j / group). Attention must be causal. A
        scheme in which no pair rotates is returned unchanged.

        Args:
            window: in positions, a multiple of group.
            group: the number of positions that share one rotation beyond the window.
        """
        check_self_extend(window, group)
        self._check_unbanded("self_extend")
        if group == 1 or not any(self.frequencies):
            return self
        return self._with_bands(beyond_window(self.bands, grouped(window, group)))

    def dual_chunk(self, chunk_size: int, local_size: int, length_scale: float | None = None) -> Rotary:
        """Applies dual chunk attention (An et al. 2024, arXiv 2402.17463; Qwen2.5-1M), for trained models.

        Like ``rectify``, it lets a model read beyond its training length without training.

        Example:
            Rotary.rope(128).dual_chunk(chunk_size=8192, local_size=2048)

        With s = chunk_size - local_size, the key at j rotates by j mod s. With n = floor(i / s) - floor(j / s), the
        query at i rotates by i mod s for n = 0, by min(i mod s + s, chunk_size) for n = 1, and by
        min(2 s - 1, chunk_size) for n >= 2. So no position exceeds chunk_size. Attention must be causal. A scheme in
        which no pair rotates is returned unchanged.

        Args:
            chunk_size: in positions, usually the training length or less.
            local_size: in positions, less than chunk_size; s must be a multiple of 128, the rows of a tile.
            length_scale: a length in tokens, usually the training length: scores of a sequence of n keys, counted at
                each call, are scaled by max(1, 0.1 ln(n / length_scale) + 1), as in Qwen2.5-1M's engine. None: scores
                are not scaled.
        """
        chunk = checked_chunk(chunk_size, local_size)
        self._check_unbanded("dual_chunk")
        if self.bands != (EVERYWHERE,):
            raise ValueError("dual_chunk: expected a scheme whose queries see all keys, got one with a sliding window")
        if not any(self.frequencies):
            return self
        scaled = dataclasses.replace(self, length_scale=length_scale)
        return scaled._with_bands(chunked(chunk, min(2 * chunk - 1, chunk_size)))

    def local(self, window: int) -> Rotary:
        """Applies a sliding window: queries only attend to keys at distances below window, on both sides if not causal.

        Example:
            Rotary.rope(128).local(window=4096)  # the query's own key and 4,095 earlier ones
        """
        check_window(window)
        if chunk_of(self.bands):
            raise ValueError("local: not supported after dual_chunk (its bands count chunks instead of distances)")
        if self.axis:
            raise ValueError("local: a window over the distance needs one-dimensional positions; this table is axial")
        return self._with_bands([clipped(band, 0, window) for band in self.bands])

    def log_n(self, train_length: float, clip: bool = True) -> Rotary:
        """Applies log n scaling: the query at position i is scaled by logn(i) = ln(i + 1) / ln(train_length).

        Example:
            Rotary.rope(128).rectify(window=2048).log_n(train_length=8192)

        Args:
            train_length: in tokens, above 1.
            clip: True: logn(i) is at least 1, for models trained without log n scaling. False: for models trained with
                it.
        """
        if self.axis:
            raise ValueError("log_n: needs one-dimensional positions, which count the keys; this table is axial")
        self._check_not_scaled_by_position("log_n")
        return dataclasses.replace(self, log_n_scale=(train_length, clip))

    def log_steps(self, floor_scale: float, attn_scale: float = 0.1, first: int = 1) -> Rotary:
        """Applies Llama 4's query scale (arXiv 2501.19399 with a floor): a logarithm that grows in steps.

        Example:
            Rotary.rope(128, base=500_000.0).log_steps(floor_scale=8192)

        The query at position i, counted from 0, is scaled by 1 + attn_scale * ln(1 + floor((i + first) / floor_scale)).

        Args:
            floor_scale: the number of positions of a step: Llama 4's floor_scale (8192) or Ministral 3's training
                length.
            attn_scale: a positive number: Llama 4's attn_scale or Ministral 3's llama_4_scaling_beta.
            first: 1: positions count from 1 (Llama 4). 0: from 0 (Ministral 3).
        """
        if self.axis:
            raise ValueError("log_steps: needs one-dimensional positions, which count the keys; this table is axial")
        self._check_not_scaled_by_position("log_steps")
        return dataclasses.replace(self, log_steps_scale=(floor_scale, attn_scale, first))

    def scale_rotated(self, factor: float) -> Rotary:
        """Scales the part of the scores that comes from the channels that form pairs. Other channels are not scaled.

        Example:
            Rotary.rope(128, rotary_dim=64).scale_rotated(1.2**2)  # Hugging Face's attention_factor of 1.2

        Hugging Face multiplies cos and sin of q and k by attention_factor. The argument factor is the square of
        attention_factor. If all channels form pairs, factor acts like a temperature. Pairs that do not rotate are
        scaled, too.

        Args:
            factor: a positive number.
        """
        if not self.frequencies:
            raise ValueError("scale_rotated: this scheme has no channels that rotate")
        return dataclasses.replace(self, rotated_scale=self.rotated_scale * positive("factor", factor))

    # ---- text
    @cached_property
    def text(self) -> str:
        """Returns the scheme as JSON without rounding, for ``from_text``. Operators and checkpoints store this text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["bands"] = [band if band.maps_positions or band.keys_rotated else band[:4] for band in self.bands]
        return json.dumps(fields)

    @staticmethod
    def from_text(text: str) -> Rotary:
        """Reads the scheme from ``Rotary.text``.

        Example:
            assert Rotary.from_text(Rotary.rope(64).text) == Rotary.rope(64)

        Raises:
            TypeError, ValueError: text is not the text of a Rotary. The message says what was expected.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, the text of a Rotary, got {type(text).__name__}")
        return _from_text(text)

    def __repr__(self) -> str:
        return describe(self)

    # ---- helpers
    def _check_not_scaled_by_position(self, name: str) -> None:
        if self.log_n_scale is not None or self.log_steps_scale is not None:
            by = "log n" if self.log_n_scale else "log_steps"
            raise ValueError(f"{name}: this scheme is scaled by {by} already")

    def _check_unscaled(self, name: str) -> None:
        if not any(self.frequencies):
            raise ValueError(f"{name}: no pair of this scheme rotates, there is nothing to interpolate")
        if self.scaled_by:
            raise ValueError(f"{name}: the table was changed by {self.scaled_by} already; interpolations do not stack")
        if self.axis:
            raise ValueError(f"{name}: expected a one-dimensional table; scale the positions of an axial one instead")

    def _check_unbanded(self, name: str) -> None:
        if self.axis:
            raise ValueError(f"{name}: bands over the distance need one-dimensional positions; this table is axial")
        if not all(band.is_plain for band in self.bands):
            already, exclusive = "is rectified", "rectify, string, self_extend and dual_chunk"
            if have_maps(self.bands):
                already = "has self_extend or dual_chunk"
            elif any(band.slope == 1 and band.offset for band in self.bands):
                already = "has string"
            raise ValueError(f"{name}: this scheme {already} already; a scheme can have only one of {exclusive}")

    def _with(self, **fields: Any) -> Rotary:
        return dataclasses.replace(self, **fields)

    def _divide_table(self, divisors: Sequence[float], scaled_by: str | None = None) -> Rotary:
        """Divides the frequency of every pair by its divisor. The divisor is inf for pairs that no longer rotate."""
        frequencies = [f / divisor for f, divisor in zip(self.frequencies, divisors, strict=True)]
        return self._with_table(self.scaled_by if scaled_by is None else scaled_by, frequencies)

    def _llama3(self, factor: float, train_length: float, low: float, high: float) -> Rotary:
        return self._with_table("llama3", llama3_table(self.frequencies, factor, train_length, low, high))

    def _with_table(self, name: str, frequencies) -> Rotary:
        return dataclasses.replace(self, frequencies=tuple(frequencies), scaled_by=name)

    def _with_bands(self, bands) -> Rotary:
        """Returns the scheme with these bands. Empty bands are left out, and adjacent equal bands are merged."""
        return dataclasses.replace(self, bands=merged(bands))


def build(steps: Iterable[ConfigStep]) -> Rotary:
    """Returns the scheme that the steps of a configuration build."""
    rotary: Any = Rotary
    for name, arguments in steps:
        rotary = getattr(rotary, name)(**arguments)
    return rotary


@lru_cache(maxsize=1024)
def _from_text(text: str) -> Rotary:
    return Rotary(**fields_of(text, [field.name for field in dataclasses.fields(Rotary)]))


def _unpickle(text: str) -> Rotary:
    return Rotary.from_text(text)


torch.serialization.add_safe_globals([_unpickle])  # for torch.load(weights_only=True); safe, as it only parses text
