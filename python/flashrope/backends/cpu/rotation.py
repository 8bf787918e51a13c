"""The CPU implementation's rotation: tables by position, kept between calls, and turning a tensor by them."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...cos_sin import cos_sin
from ...rotary import Rotary
from ..base import AttentionCall

LEAST_TABLE = 256  # positions


def accumulation_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=16)
def _table(
    rotary: Rotary, slope: float, offset: float, factor: float, floor: float, first: int, stop: int, dtype: torch.dtype
):
    positions = torch.arange(first, stop, dtype=torch.float64)
    return _turns(rotary, positions, slope, offset, factor, floor, dtype)


def _turns(rotary, positions, slope, offset, factor, floor, dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """own (..., 1, head_dim) and other (..., 1, rotary_dim): x turned is own * x + other * (x with each pair's channels
    swapped).

    Both carry log n, so that it joins the query before any rounding. other is None where nothing rotates.
    """
    cos, sin = cos_sin(rotary, slope * positions + offset)
    if rotary.interleaved:
        own, other = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        own, other = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    own = torch.nn.functional.pad(own, (0, rotary.head_dim - rotary.rotary_dim), value=1.0)
    if factor:
        log_n = (factor * torch.log(positions.clamp(min=0) + 1)).clamp(min=floor)[..., None]
        own, other = own * log_n, other * log_n
    return own.to(dtype)[..., None, :], other.to(dtype)[..., None, :] if any(rotary.frequencies) else None


@lru_cache(maxsize=64)
def turns_of_rows(
    rotary: Rotary, slope: float, offset: float, factor: float, floor: float, first: int, rows: int, dtype: torch.dtype
):
    """The rows at positions first, first + 1, ... of a table whose length is a power of two: a growing sequence builds
    few. None where they change nothing."""
    if not factor and (slope == 0 and offset == 0 or not any(rotary.frequencies)):
        return None
    if slope == 0 and not factor:
        return _table(rotary, slope, offset, factor, floor, 0, 1, dtype)
    low, high = min(-_bucket(-first), 0), max(_bucket(first + rows), 1)
    table = _table(rotary, slope, offset, factor, floor, low, high, dtype)
    return tuple(t if t is None else t[first - low : first - low + rows] for t in table)


def _bucket(positions: int) -> int:
    return max(1 << (positions - 1).bit_length(), LEAST_TABLE) if positions > 0 else 0


def turns_for(x: torch.Tensor, call: AttentionCall, slope: float, offset: float, first: int, is_query: bool):
    """What turns x, whose row 0 stands at position first; None where that changes nothing."""
    factor, floor = call.log_n if is_query else (0.0, 1.0)
    if call.positions is not None and (factor or (slope or offset) and any(call.rotary.frequencies)):
        return _turns(call.rotary, call.positions.to(torch.float64), slope, offset, factor, floor, accumulation_type(x))
    return turns_of_rows(call.rotary, slope, offset, factor, floor, first, x.shape[1], accumulation_type(x))


def turn(x: torch.Tensor, turns, rotary: Rotary, back: bool = False) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) turned, in float32 or float64; back applies the transpose, for gradients."""
    if turns is None:
        return upcast(x)
    own, other = turns
    turned = x * own
    if other is not None:
        pairs, target, half = x, turned, len(rotary.frequencies)
        if 2 * half < rotary.head_dim:
            pairs, target = x[..., : 2 * half], turned[..., : 2 * half]
        swapped = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rotary.interleaved else pairs.roll(half, -1)
        if back:
            target.addcmul_(swapped, other, value=-1)
        else:
            target.addcmul_(swapped, other)
    return turned


def upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
