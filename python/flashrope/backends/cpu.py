"""Banded rotary attention on the CPU, composed of torch's own flash kernel for the CPU. Memory is linear in the lengths.

Each band is cut into pieces that kernel computes without a mask: rectangles, and triangles that are exactly its
is_causal, some of them with time reversed. The pieces of a row are merged by their lse, as ring attention does.

All types below float32 are computed in float32: it is at least as fast here as torch's half-precision kernels (its
float16 backward is some twenty times slower), and nothing but the results is rounded.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..angles import cos_sin
from ..rotary import Rotary
from . import CacheCall, Call
from .cpu_pieces import keys_of, mask, plan, rows_of, uncut, windows

LEAST_TABLE = 256  # positions

_flash = torch._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def refusal(q: torch.Tensor, cached: bool = False) -> str:
    return "" if q.device.type == "cpu" else f"its tensors must lie on the CPU, q is on {q.device}"


def turned_keys_shape(k: torch.Tensor, call: Call) -> tuple[int, ...]:
    """Keys are turned again in the backward: that costs one pass over k, keeping them costs its size."""
    return (0,)


def forward(q, k, v, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out like q, lse float32 or float64, empty); shapes are those of ``Call``."""
    nothing = k.new_empty(0)
    if call.cu_seqlens_q is None:
        return *_attend(q, k, v, call), nothing
    out = q.new_zeros(q.shape)
    lse = q.new_full(call.lse_shape(q), float("-inf"), dtype=_accumulation_type(q))
    for rows, keys in _sequences(call):
        out[rows], lse[:, rows] = (x[0] for x in _attend(q[None, rows], k[None, keys], v[None, keys], call))
    return out, lse, nothing


def backward(grad_out, grad_lse, q, k, v, out, lse, turned_keys, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of raw q, k and v, like q, k and v; one of grad_out and grad_lse may be None."""
    if call.cu_seqlens_q is None:
        return _attend_backward(grad_out, grad_lse, q, k, v, out, lse, call)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for rows, keys in _sequences(call):
        grad_q[rows], grad_k[keys], grad_v[keys] = (x[0] for x in _attend_backward(
            None if grad_out is None else grad_out[None, rows], None if grad_lse is None else grad_lse[None, :, rows],
            q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows], call))
    return grad_q, grad_k, grad_v


def _sequences(call: Call):
    """(rows, keys) of every packed sequence, as slices."""
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        yield slice(q0, q1), slice(k0, k1)


# ---- rotation -----------------------------------------------------------------------------------------------------------


def _accumulation_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=16)
def _table(rotary: Rotary, slope: float, offset: float, factor: float, floor: float, first: int, stop: int, dtype: torch.dtype):
    positions = torch.arange(first, stop, dtype=torch.float64)
    return _turns(rotary, positions, slope, offset, factor, floor, dtype)


def _turns(rotary, positions, slope, offset, factor, floor, dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """own (..., 1, head_dim) and other (..., 1, rotary_dim): x turned is own * x + other * (x with each pair's channels swapped).

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
    return own.to(dtype)[..., None, :], other.to(dtype)[..., None, :] if any(rotary.theta) else None


@lru_cache(maxsize=64)
def _turns_of_rows(rotary: Rotary, slope: float, offset: float, factor: float, floor: float, first: int, rows: int, dtype: torch.dtype):
    """The rows at positions first, first + 1, ... of a table whose length is a power of two: a growing sequence builds few."""
    if slope == 0 and not factor:
        return _table(rotary, slope, offset, factor, floor, 0, 1, dtype)
    low, high = min(-_bucket(-first), 0), max(_bucket(first + rows), 1)
    return tuple(t if t is None else t[first - low:first - low + rows] for t in _table(rotary, slope, offset, factor, floor, low, high, dtype))


def _bucket(positions: int) -> int:
    return max(1 << (positions - 1).bit_length(), LEAST_TABLE) if positions > 0 else 0


def _turns_for(x: torch.Tensor, call: Call, slope: float, offset: float, first: int, is_query: bool):
    """What turns x, whose row 0 stands at position first; None where that changes nothing."""
    factor, floor = call.log_n if is_query else (0.0, 1.0)
    if not factor and (slope == 0 and offset == 0 or not any(call.rotary.theta)):
        return None
    if call.positions is not None:
        return _turns(call.rotary, call.positions.to(torch.float64), slope, offset, factor, floor, _accumulation_type(x))
    return _turns_of_rows(call.rotary, slope, offset, factor, floor, first, x.shape[1], _accumulation_type(x))


def _turn(x: torch.Tensor, turns, rotary: Rotary, back: bool = False) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) turned, in float32 or float64; back applies the transpose, for gradients."""
    if turns is None:
        return _upcast(x)
    own, other = turns
    turned = x * own
    if other is not None:
        pairs, target, half = x, turned, len(rotary.theta)
        if 2 * half < rotary.head_dim:
            pairs, target = x[..., :2 * half], turned[..., :2 * half]
        swapped = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rotary.interleaved else pairs.roll(half, -1)
        target.addcmul_(swapped, other, value=-1 if back else 1)
    return turned


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


# ---- one batch of sequences of one length -------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _whole(rotary: Rotary, causal: bool, seqlen_q: int, seqlen_k: int, dtype: torch.dtype):
    """(is_causal, what turns q, what turns k) where one kernel call without a mask does all; else None."""
    call = Call(rotary, causal, 1.0)
    turns = plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q)
    if len(turns) != 1 or len(turns[0][2]) != 1 or rotary.axis:
        return None
    (slope, offset, (piece,)), = turns
    if piece.rows != seqlen_q or piece.keys != seqlen_k or piece.reversed or piece.width:
        return None
    return (piece.causal, _turns_of_rows(rotary, slope, offset, *call.log_n, seqlen_k - seqlen_q, seqlen_q, dtype),
            _turns_of_rows(rotary, slope, 0.0, 0.0, 1.0, 0, seqlen_k, dtype))


def _attend(q, k, v, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, lse (batch, heads_q, seqlen_q)."""
    seqlen_q, seqlen_k, v = q.size(1), k.size(1), _upcast(v)
    whole = _whole(call.rotary, call.causal, seqlen_q, seqlen_k, v.dtype) if call.positions is None and q.numel() else None
    if whole:  # nothing to merge: short calls are spared the bookkeeping
        is_causal, turns_q, turns_k = whole
        out, lse = _flash(_turn(q, turns_q, call.rotary).transpose(1, 2), _turn(k, turns_k, call.rotary).transpose(1, 2),
                          v.transpose(1, 2), 0.0, is_causal, scale=call.score_scale)
        out = out.transpose(1, 2)
        return (out if out.dtype == q.dtype else out.to(q.dtype)).contiguous(), lse.contiguous()
    parts = []
    for slope, offset, pieces in plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q) if q.numel() and k.numel() else ():
        turned_q = _turn(q, _turns_for(q, call, slope, offset, seqlen_k - seqlen_q, True), call.rotary)
        turned_k = _turn(k, _turns_for(k, call, slope, 0.0, 0, False), call.rotary)
        for piece in pieces:
            parts.append((piece, *_flash(
                rows_of(turned_q, piece), keys_of(turned_k, piece), keys_of(v, piece), 0.0, piece.causal and not piece.width,
                attn_mask=mask(piece, turned_q.dtype), scale=call.score_scale)))
    if len(parts) == 1 and parts[0][0].rows == seqlen_q and not parts[0][0].reversed:
        out, lse = parts[0][1].transpose(1, 2), parts[0][2]
    else:
        out, lse = _merged(parts, q)
    return (out if out.dtype == q.dtype else out.to(q.dtype)).contiguous(), lse.contiguous()


def _merged(parts, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of rows that several pieces hold, or none."""
    out = q.new_zeros(q.shape, dtype=_accumulation_type(q))
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    rows = [windows(lse.transpose(1, 2), piece.row, piece.rows, piece) for piece, _, _ in parts]
    for (piece, _, piece_lse), of_rows in zip(parts, rows, strict=True):
        torch.logaddexp(of_rows, uncut(piece_lse, piece), out=of_rows)
    for (piece, piece_out, piece_lse), of_rows in zip(parts, rows, strict=True):
        weight = (uncut(piece_lse, piece) - of_rows).exp_()[..., None]
        windows(out, piece.row, piece.rows, piece).addcmul_(uncut(piece_out, piece), weight)
    return out, lse


def _attend_backward(grad_out, grad_lse, q, k, v, out, lse, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotary, seqlen_q, seqlen_k = call.rotary, q.shape[1], k.shape[1]
    out, wide_v, lse = _upcast(out), _upcast(v), lse.transpose(1, 2)
    grad_out = torch.zeros_like(out) if grad_out is None else _upcast(grad_out)
    if grad_lse is not None:
        # dS = P * (dO.V - dO.O + dlse): dlse rides in dO as one more channel, against 1 in V and 0 in O.
        grad_out, wide_v, out = _widen(grad_out, grad_lse.transpose(1, 2)), _widen(wide_v, 1.0), _widen(out, 0.0)
    grad_q = grad_k = grad_v = None
    for slope, offset, pieces in plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q) if q.numel() and k.numel() else ():
        turns_q = _turns_for(q, call, slope, offset, seqlen_k - seqlen_q, True)
        turns_k = _turns_for(k, call, slope, 0.0, 0, False)
        turned_q, turned_k = _turn(q, turns_q, rotary), _turn(k, turns_k, rotary)
        if grad_lse is not None:
            turned_q, turned_k = _widen(turned_q, 0.0), _widen(turned_k, 0.0)
        of_q = of_k = None
        for piece in pieces:
            piece_q, piece_k, piece_v = (x[..., :q.shape[-1]] for x in _flash_backward(
                rows_of(grad_out, piece), rows_of(turned_q, piece), keys_of(turned_k, piece), keys_of(wide_v, piece),
                rows_of(out, piece), rows_of(lse, piece), 0.0, piece.causal and not piece.width,
                attn_mask=mask(piece, turned_q.dtype), scale=call.score_scale))
            of_q = _add(of_q, piece_q, q.shape, piece.row, piece.rows, piece)
            of_k = _add(of_k, piece_k, k.shape, piece.key, piece.keys, piece)
            grad_v = _add(grad_v, piece_v, v.shape, piece.key, piece.keys, piece)
        of_q, of_k = _turn(of_q, turns_q, rotary, back=True), _turn(of_k, turns_k, rotary, back=True)
        grad_q = of_q if grad_q is None else grad_q.add_(of_q)
        grad_k = of_k if grad_k is None else grad_k.add_(of_k)
    return tuple(x.new_zeros(x.shape) if grad is None else grad.to(x.dtype).contiguous()
                 for x, grad in ((q, grad_q), (k, grad_k), (v, grad_v)))


def _widen(x: torch.Tensor, last) -> torch.Tensor:
    """x with eight more channels: last, then zeros."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
    wide[..., :-8] = x
    wide[..., -8] = last
    return wide


def _add(total, piece_grad, shape, first: int, count: int, piece: Piece) -> torch.Tensor:
    """total (batch, seqlen, heads, head_dim), or None, plus the gradient of one piece."""
    if total is None:
        if count == shape[1] and not piece.reversed:
            return piece_grad.transpose(1, 2)
        total = piece_grad.new_zeros(shape)
    windows(total, first, count, piece).add_(uncut(piece_grad, piece))
    return total
