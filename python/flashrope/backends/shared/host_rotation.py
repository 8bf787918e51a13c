"""Rotates tensors with PyTorch's operations on the CPU, by tables of cos and sin that are cached between calls."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...calls import addresses
from ...calls.addresses import NewRows
from ...calls.records import AttentionCall, CacheCall, RotateCall, accumulation_type
from ...schemes.bands import PositionMap
from ...schemes.cos_sin import cos_sin
from ...schemes.rotary import Rotary
from ...schemes.scales import UNSCALED, QueryScale

MIN_TABLE = 256  # positions
LARGEST_TABLE = 2**20  # positions, 1 GiB at head_dim 128; farther positions get a table of positions near them
MIN_SURROUNDINGS = 4096


class QueryFactors(NamedTuple):
    """The factors that queries are multiplied by.

    by_position: the factor that depends on the query's position. rotated: the factor on the channels that form pairs. A
    further factor, which depends on the sequence length, is applied to the scores instead (``flash_scale``).
    """

    by_position: QueryScale = UNSCALED
    rotated: float = 1.0

    @classmethod
    def of(cls, call: AttentionCall | CacheCall) -> QueryFactors:
        return cls(call.rotary.query_scale.by_position, call.rotary.rotated_scale)


KEY_FACTORS = QueryFactors()


class Rotation(NamedTuple):
    """The tables for ``rotate``, which returns cos * x + sin * (x with the two channels of each pair swapped).

    For queries, cos and sin already contain ``QueryFactors``, so that these factors are applied before any rounding.
    """

    cos: torch.Tensor  # (..., 1, head_dim)
    sin: torch.Tensor | None  # (..., 1, rotary_dim), negative for the first channel of a pair; None: nothing rotates


def rotation_at(rotary: Rotary, positions, position_map: PositionMap, factors: QueryFactors, dtype) -> Rotation:
    cos, sin = (factors.rotated * table for table in cos_sin(rotary, position_map.of(positions)))
    if rotary.interleaved:
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    behind = rotary.head_dim - rotary.first_channel - rotary.rotary_dim
    cos = torch.nn.functional.pad(cos, (rotary.first_channel, behind), value=1.0)
    if factors.by_position.log_n_factor:
        scale = factors.by_position.of(positions, 0)[..., None]
        cos, sin = cos * scale, sin * scale
    rotates = any(rotary.frequencies)
    return Rotation(cos.to(dtype)[..., None, :], sin.to(dtype)[..., None, :] if rotates else None)


@lru_cache(maxsize=16)
def rotations_between(
    rotary: Rotary, position_map: PositionMap, factors: QueryFactors, first: int, stop: int, dtype: torch.dtype
) -> Rotation:
    """Returns the rotation of the positions first to stop - 1."""
    positions = torch.arange(first, stop, dtype=torch.float64, device="cpu")
    return rotation_at(rotary, positions, position_map, factors, dtype)


@lru_cache(maxsize=64)
def rotation_of_rows(
    rotary: Rotary, position_map: PositionMap, factors: QueryFactors, first: int, rows: int, dtype: torch.dtype
) -> Rotation | None:
    """Returns the rotation of rows at positions first, first + 1, ..., or None if it changes nothing.

    The rotation is a slice of a table whose length is a power of two, so a growing sequence builds few tables. The
    table starts at position 0 or, beyond LARGEST_TABLE, at a multiple of its length.
    """
    by_position = factors.by_position.log_n_factor
    stays = (position_map.slope, position_map.offset) == (0, 0) or not any(rotary.frequencies)
    if not by_position and factors.rotated == 1 and stays:
        return None
    if (position_map.slope == 0 or position_map.last == 0) and not by_position:
        return rotations_between(rotary, position_map, factors, 0, 1, dtype)
    low, high = min(-_table_length(-first), 0), max(_table_length(first + rows), 1)
    around = max(_table_length(rows), MIN_SURROUNDINGS)
    if high > max(LARGEST_TABLE, 2 * around) and first > 0:
        low = first // around * around
        high = low + around * (1 if first + rows <= low + around else 2)
    table = rotations_between(rotary, position_map, factors, low, high, dtype)
    return Rotation._make(x if x is None else x[first - low : first - low + rows] for x in table)


def rotation_of_first(
    rotary: Rotary, position_map: PositionMap, factors: QueryFactors, rows: int, dtype: torch.dtype
) -> Rotation:
    """Returns the rotation of positions 0 to rows - 1. The table is extended to a power of two."""
    return rotations_between(rotary, position_map, factors, 0, max(_table_length(rows), MIN_TABLE), dtype)


def _table_length(positions: int) -> int:
    return max(1 << (positions - 1).bit_length(), MIN_TABLE) if positions > 0 else 0


def rotation_for(
    x: torch.Tensor, call: AttentionCall | CacheCall, position_map: PositionMap, first: float, is_query: bool
) -> Rotation | None:
    """Returns the rotation of x, whose row 0 is at position first, or None if it changes nothing. For queries it
    includes ``QueryFactors``."""
    factors = QueryFactors.of(call) if is_query else KEY_FACTORS
    dtype, rotates = accumulation_type(x), (position_map.slope or position_map.offset) and any(call.rotary.frequencies)
    if call.positions is not None and (factors.by_position.log_n_factor or factors.rotated != 1 or rotates):
        return rotation_at(call.rotary, call.positions, position_map, factors, dtype)
    if first != int(first) or first < -LARGEST_TABLE:  # no table holds these rows
        positions = first + torch.arange(x.shape[1], dtype=torch.float64, device="cpu")
        return rotation_at(call.rotary, positions, position_map, factors, dtype)
    return rotation_of_rows(call.rotary, position_map, factors, int(first), x.shape[1], dtype)


def rotate(x: torch.Tensor, rotation: Rotation | None, rotary: Rotary, inverse: bool = False) -> torch.Tensor:
    """Rotates x (batch, seqlen, heads, head_dim), in float32 or float64.

    inverse: rotate by the negative angle, which turns gradients of rotated rows into gradients of raw rows.
    """
    if rotation is None:
        return upcast(x)
    cos, sin = rotation
    rotated = x * cos
    if sin is not None:
        pairs, target, half, first = x, rotated, len(rotary.frequencies), rotary.first_channel
        if 2 * half < rotary.head_dim:
            pairs, target = x[..., first : first + 2 * half], rotated[..., first : first + 2 * half]
        swapped = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rotary.interleaved else pairs.roll(half, -1)
        if inverse:
            target.addcmul_(swapped, sin, value=-1)
        else:
            target.addcmul_(swapped, sin)
    return rotated


def upcast(x: torch.Tensor) -> torch.Tensor:
    return x.to(accumulation_type(x))


def table_and_rows(x: torch.Tensor, call: RotateCall) -> tuple[Rotation | None, list[NewRows]]:
    """Returns a table of rotations, and for each run of x (batch, seqlen, heads, head_dim) the table rows that it
    uses."""
    factors, dtype = QueryFactors(rotated=call.rotary.rotated_scale), accumulation_type(x)
    if call.tables is None:
        runs = [NewRows(b, 0, x.shape[1], 0, b, 0) for b in range(x.shape[0])]
        if call.positions is None:
            return rotation_of_rows(call.rotary, call.position_map, factors, 0, x.shape[1], dtype), runs
        return rotation_at(call.rotary, call.positions.double(), call.position_map, factors, dtype), runs
    runs = addresses.new_rows(call.tables, call.capacity, x.shape[1])
    last = max((run.position + run.rows for run in runs), default=0)
    if last <= LARGEST_TABLE:
        return rotation_of_first(call.rotary, call.position_map, factors, last, dtype), runs
    positions = addresses.new_positions(call.tables, call.capacity, *x.shape[:2]).double()
    table = rotation_at(call.rotary, positions, call.position_map, factors, dtype)
    return table, [run._replace(position=run.row) for run in runs]
