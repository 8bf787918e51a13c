"""Builds tables of cos and sin in float64 and stores them in float32.

The product position * inv_freq in float32 is off by 6e-2 rad at position one million. The errors of the tables do not
grow with the position. With one table row per position, cos and sin are off by 3e-8. Two rows combined by angle
addition are off by two to three float32 roundings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .lowered import lower
from .resident import kept_on_device
from .rotary import Rotary

# Positions per coarse row. Both levels of a table for 128k positions fit in L2. csrc/decode.h defines the same number.
FINE_ROWS = 1024
# The next two constants are for three_level_table, which covers positions that the host does not know.
TOP_ROWS = 2048  # rows of the highest digit; half of them are for negative positions
MAX_POSITION = (1 << 29) - 1  # so that the difference of two positions is below lowered.UNBOUNDED


def cos_sin(rotary: Rotary, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin, each float64 (..., pairs), of positions (...,) or, for an axial table, (..., axes)."""
    return _cos_sin(positions, *_frequencies(rotary, positions.device))


def _cos_sin(positions, inv_freq, axis):
    positions = positions.to(torch.float64)
    angle = (positions[..., None] if axis is None else positions.index_select(-1, axis)) * inv_freq
    return angle.cos(), angle.sin()


def _frequencies(rotary: Rotary, device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns inv_freq, float64 (pairs,), and for an axial table the axis of every pair, int64 (pairs,), else None."""
    return (
        torch.tensor(rotary.frequencies, dtype=torch.float64, device=device),
        torch.tensor(rotary.axis, device=device) if rotary.axis else None,
    )


def padded_pairs(head_dim: int) -> int:
    """Returns the number of pairs of the power-of-two tile that holds head_dim. Pairs beyond the table do not rotate
    (cos 1, sin 0)."""
    return max(8, 1 << (head_dim - 1).bit_length() >> 1)


def coarse_rows(positions: int) -> int:
    """Returns the number of coarse rows that this many positions need. The number is rounded up to a power of two, so
    that few tables are built."""
    return 1 << max(-(-positions // FINE_ROWS) - 1, 0).bit_length()


@kept_on_device("cos/sin tables")
def two_level_table(rotary: Rotary, causal: bool, coarse: int, device: torch.device) -> torch.Tensor:
    """Returns float32 (rotations, FINE_ROWS + coarse, 2, padded pairs), one entry per rotation of ``lower(rotary,
    causal)``.

    Fine row r < FINE_ROWS holds cos and sin of slope * r. Coarse row c holds cos and sin of
    slope * FINE_ROWS * c + offset. Kernels combine a fine and a coarse row by angle addition. The coarse rows of a
    rotation are multiplied by its factor in ``Lowered.scales``.
    """
    return _two_levels(rotary, causal, coarse).to(device)


@kept_on_device("cos/sin tables of any position")
def three_level_table(rotary: Rotary, causal: bool, device: torch.device) -> torch.Tensor:
    """Returns float32 (rotations, 2 * FINE_ROWS + TOP_ROWS, 2, padded pairs), for positions from -MAX_POSITION to
    MAX_POSITION.

    A position is written with three digits in base FINE_ROWS. The highest digit has a sign. Kernels combine one row for
    each digit by angle addition. The rows of the highest digit also contain the scheme's offsets and factors.
    """
    middle = torch.arange(FINE_ROWS, dtype=torch.float64, device="cpu") * FINE_ROWS
    top = torch.arange(-TOP_ROWS // 2, TOP_ROWS // 2, dtype=torch.float64, device="cpu") * FINE_ROWS**2
    return _levels(rotary, causal, middle, top).to(device)


class TurnRow(NamedTuple):
    """The rows of ``turn_table``, int64, from which a kernel computes the phase of every pair.

    step: phase per unit position, modulo one turn, in units of 2^-64 turn.
    part: phase per unit position, in units of 2^-33 turn. The product of ``part`` and the fractional position, in units
    of 2^-31, is a phase in units of 2^-64 turn, as for ``step``.
    start: phase of the rotation's offset, in units of 2^-64 turn.
    factor: the bits of the float32 number by which cos and sin are multiplied.
    axis: the axis by whose coordinate the pair rotates.
    """

    step: torch.Tensor
    part: torch.Tensor
    start: torch.Tensor
    factor: torch.Tensor
    axis: torch.Tensor


@kept_on_device("turns of any position")
def turn_table(rotary: Rotary, causal: bool, device: torch.device) -> torch.Tensor:
    """Returns int64 (rotations, rows of TurnRow, padded pairs), one entry per rotation of ``lower(rotary, causal)``."""
    lowered, (frequencies, axis) = lower(rotary, causal), _frequencies(rotary, "cpu")
    slopes, offsets = torch.tensor(lowered.rotations, dtype=torch.float64, device="cpu").T[..., None]
    step, start = (x * frequencies / math.tau for x in (slopes, offsets))
    factor = torch.tensor(lowered.scales, dtype=torch.float32, device="cpu")[:, None].expand(step.shape).contiguous()
    axis = torch.zeros(step.shape[-1], dtype=torch.int64, device="cpu") if axis is None else axis
    row = TurnRow(
        step=_fractions(step),
        part=(step * 2.0**33).round().to(torch.int64),
        start=_fractions(start),
        factor=factor.view(torch.int32).to(torch.int64),
        axis=axis.expand(step.shape),
    )
    missing = _missing_pairs(rotary)
    one = int(torch.ones(1, dtype=torch.float32, device="cpu").view(torch.int32))
    padded = [torch.nn.functional.pad(x, missing, value=one if x is row.factor else 0) for x in row]
    return torch.stack(padded, dim=1).to(device)


def _fractions(turns: torch.Tensor) -> torch.Tensor:
    """Returns turns modulo one as int64, in units of 2^-64 turn."""
    return ((turns - (turns + 0.5).floor()) * 2.0**64).to(torch.int64)


def _two_levels(rotary: Rotary, causal: bool, coarse: int) -> torch.Tensor:
    return _levels(rotary, causal, torch.arange(coarse, dtype=torch.float64, device="cpu") * FINE_ROWS)


def _levels(rotary: Rotary, causal: bool, *coarser: torch.Tensor) -> torch.Tensor:
    """Returns the rows of the fine positions, then the rows of each coarser level. Only the last level contains offsets
    and factors: every result takes exactly one row of the last level, but may take several fine rows
    (``load_cos_sin_by_blocks``)."""
    *levels, last = torch.arange(FINE_ROWS, dtype=torch.float64, device="cpu"), *coarser
    lowered = lower(rotary, causal)
    rows = torch.stack(
        [torch.cat([*(slope * x for x in levels), slope * last + offset]) for slope, offset in lowered.rotations]
    )
    cos, sin = cos_sin(rotary, rows[..., None].expand(*rows.shape, rotary.axes) if rotary.axis else rows)
    factors = torch.tensor(lowered.scales, dtype=torch.float64, device="cpu")[:, None, None]
    for each in (cos, sin):
        each[:, -len(last) :] *= factors
    return _padded(rotary, cos, sin)


@kept_on_device("frequencies")
def _resident_frequencies(rotary: Rotary, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """Returns the results of ``_frequencies`` on a device. The tensors stay on the device, so that later calls wait for
    no copy."""
    return tuple(x if x is None else x.to(device) for x in _frequencies(rotary, "cpu"))


def position_table(rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """Returns float32 (rotations, batch, seqlen, 2, padded pairs). Rotation 0 is the identity. Rotation 1 rotates by
    the given positions.

    If rotated_scale is not 1, rotation 1 is for queries and includes the factor, and rotation 2 is for keys.
    """
    cos, sin = _cos_sin(positions, *_resident_frequencies(rotary, positions.device))
    scale = rotary.rotated_scale
    cos, sin = ([scale * x, x] if scale != 1 else [x] for x in (cos, sin))
    return _padded(rotary, torch.stack([torch.ones_like(cos[0]), *cos]), torch.stack([torch.zeros_like(sin[0]), *sin]))


def _padded(rotary: Rotary, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns cos and sin as float32 (..., 2, padded pairs)."""
    missing = _missing_pairs(rotary)
    pad = torch.nn.functional.pad
    return torch.stack([pad(cos, missing, value=1.0), pad(sin, missing)], dim=-2).to(torch.float32)


def _missing_pairs(rotary: Rotary) -> tuple[int, int]:
    """Returns (before, after): how many pairs of the padded table come before and after the scheme's pairs. With
    interleaved pairs, column m of the table always belongs to channels 2m and 2m + 1, so first_channel // 2 columns
    come before the scheme's pairs."""
    before = rotary.first_channel // 2 if rotary.interleaved else 0
    return before, padded_pairs(rotary.head_dim) - before - len(rotary.frequencies)
