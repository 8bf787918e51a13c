"""Scales queries by their positions (log n, or log n in steps) and by the lengths of their sequences."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .scheme_checks import check_flag, positive


class QueryScale(NamedTuple):
    """The factor on the query at position i of a sequence of n keys.

    Without log_n_every it is max(log_n_floor, log_n_factor * ln(i + 1)). With log_n_every it is
    1 + log_n_factor * ln(1 + floor((i + log_n_first) / log_n_every)). With length_scale it is also multiplied by
    max(1, 0.1 * ln(n / length_scale) + 1).
    """

    log_n_factor: float = 0.0
    log_n_floor: float = 1.0
    log_n_every: float | None = None
    log_n_first: float | None = None  # given if log_n_every is given
    length_scale: float | None = None

    @classmethod
    def log_n(cls, train_length: float, clip: bool) -> QueryScale:
        """Returns the scale of ``Rotary.log_n``."""
        return cls(1 / math.log(train_length), 1.0 if clip else 0.0)

    @classmethod
    def log_steps(cls, floor_scale: float, attn_scale: float, first: int) -> QueryScale:
        """Returns the scale of ``Rotary.log_steps``."""
        return cls(attn_scale, 1.0, floor_scale, float(first))

    @property
    def by_position(self) -> QueryScale:
        """Returns the scale without the factor that depends on the length."""
        return self._replace(length_scale=None)

    def of(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Returns the factors of queries at these positions, float64, in a sequence of ``length`` keys."""
        positions = positions.to(torch.float64).clamp(min=0)
        if self.log_n_every is None or self.log_n_first is None:
            scale = (self.log_n_factor * torch.log(positions + 1)).clamp(min=self.log_n_floor)
        else:
            steps = torch.floor((positions + self.log_n_first) / self.log_n_every)
            scale = 1 + self.log_n_factor * torch.log(1 + steps)
        return scale * self.of_length(length)

    def of_length(self, length: int) -> float:
        """Returns the part of the factor that depends only on the length."""
        if self.length_scale is None:
            return 1.0
        return max(1.0, 0.1 * math.log(max(length, 1) / self.length_scale) + 1)


UNSCALED = QueryScale()


def checked_log_n(scale) -> tuple[float, bool] | None:
    if scale is None:
        return None
    if not isinstance(scale, (tuple, list)) or len(scale) != 2:
        raise TypeError(f"log_n_scale: expected None or (train_length, clip), got {scale!r}; use log_n")
    train_length, clip = positive("train_length", scale[0]), scale[1]
    if not train_length > 1:
        raise ValueError(f"train_length: expected more than 1, got {train_length!r}")
    check_flag("clip", clip)
    return train_length, clip


def checked_log_steps(scale) -> tuple[float, float, int] | None:
    if scale is None:
        return None
    if not isinstance(scale, (tuple, list)) or len(scale) != 3:
        raise TypeError(f"log_steps_scale: expected None or (floor_scale, attn_scale, first), got {scale!r}")
    floor_scale, attn_scale, first = positive("floor_scale", scale[0]), positive("attn_scale", scale[1]), scale[2]
    if first not in (0, 1) or isinstance(first, bool):
        raise ValueError(f"first: expected 0 or 1, the number of the first position, got {first!r}")
    return floor_scale, attn_scale, int(first)
