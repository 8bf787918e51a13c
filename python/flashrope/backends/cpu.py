"""Banded rotary attention on the CPU, composed of torch's own flash kernel for the CPU. Memory is linear in the lengths.

Each band is cut into pieces that kernel computes without a mask: rectangles, and triangles that are exactly its
is_causal, some of them with time reversed. The pieces of a row are merged by their lse, as ring attention does.

All types below float32 are computed in float32: it is at least as fast here as torch's half-precision kernels (its
float16 backward is some twenty times slower), and nothing but the results is rounded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..angles import cos_sin
from ..rotary import Band, Rotary
from . import Call

LEAST_CHUNK = 64  # rows; a narrower band is cut into chunks of this many rows, which then need a mask
LEAST_TABLE = 256  # positions

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def refusal(q: torch.Tensor) -> str:
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


# ---- bands cut into pieces ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows [row, row + rows) against keys [key, key + keys), and the same again ``repeat`` times, each ``stride`` later.

    causal: local row a sees local keys b <= a; width: and of them only a - b < width. Without causal it sees all.
    reversed: a and b count from the end of their range instead of from its start.
    """

    row: int
    rows: int
    key: int
    keys: int
    causal: bool = False
    reversed: bool = False
    width: int = 0
    repeat: int = 1
    stride: int = 0

    def mirrored(self, seqlen_q: int, seqlen_k: int) -> Piece:
        """This piece with time reversed."""
        last = (self.repeat - 1) * self.stride
        return self._replace(row=seqlen_q - self.row - self.rows - last, key=seqlen_k - self.key - self.keys - last,
                             reversed=self.causal and not self.reversed)


@lru_cache(maxsize=256)
def plan(bands: tuple[Band, ...], seqlen_q: int, seqlen_k: int) -> tuple[tuple[float, float, tuple[Piece, ...]], ...]:
    """(slope, offset, pieces) for each turn the bands ask for; together the pieces hold every visible pair once."""
    turns: dict[tuple[float, float], list[Piece]] = {}
    shift = seqlen_k - seqlen_q  # query row r stands at position r + shift
    for start, stop, slope, offset in bands:
        pieces = turns.setdefault((slope, offset), [])
        if start <= 1 - seqlen_q and stop >= seqlen_k:
            pieces.append(Piece(0, seqlen_q, 0, seqlen_k))
            continue
        if stop > 0:
            pieces += _behind(max(start, 0), stop, seqlen_q, seqlen_k, shift)
        if start < 0:  # keys ahead; in reversed time, where row and key 0 stand at the same position, they lie behind
            pieces += (p.mirrored(seqlen_q, seqlen_k) for p in _behind(max(1 - stop, 1), 1 - start, seqlen_q, seqlen_k, 0))
    return tuple((slope, offset, tuple(p for p in pieces if p.rows > 0 and p.keys > 0)) for (slope, offset), pieces in turns.items())


def _behind(start: float, stop: float, seqlen_q: int, seqlen_k: int, shift: int) -> list[Piece]:
    """The pieces of the band start <= d < stop, start >= 0, d = r + shift - j.

    x counts rows so that row x sees exactly the keys x - width < j <= x, j < seqlen_k.
    """
    first, end = max(shift - start, 0), seqlen_q + shift - start
    if first >= end or first >= seqlen_k + stop - start:
        return []
    start, first, end = int(start), int(first), int(end)
    width = int(min(stop - start, end))
    to_row = start - shift

    def clipped(x, rows, key, keys, **kind):
        return Piece(x + to_row, rows, key, min(keys, seqlen_k - key), **kind)

    pieces = []
    if first < width:  # rows that see all keys from 0 on
        pieces += [clipped(first, width - first, 0, first), clipped(first, width - first, first, width - first, causal=True)]
        first = width
    chunk = max(width, LEAST_CHUNK)
    whole = max(min(end, seqlen_k) - first, 0) // chunk
    starts = [(first, chunk, whole)] if whole else []
    starts += [(x, min(chunk, end - x), 1) for x in range(first + whole * chunk, min(end, seqlen_k + width), chunk)]
    for x, rows, repeat in starts:
        again = {"repeat": repeat, "stride": chunk}
        banded = width if rows > width else 0
        pieces.append(clipped(x, min(rows, seqlen_k - x + width - 1) if banded else rows, x, rows, causal=True, width=banded, **again))
        corner = min(rows, width) - 1  # keys before x that some, but not all rows see: local row a sees b >= a
        corner_keys = min(corner, seqlen_k - (x - width + 1))
        pieces.append(clipped(x, corner_keys, x - width + 1, corner_keys, causal=True, reversed=True, **again))
        pieces.append(clipped(x, rows, x - width + 1 + corner, width - 1 - corner, **again))
    return pieces


def _windows(x: torch.Tensor, first: int, count: int, piece: Piece) -> torch.Tensor:
    """View (batch, repeat, heads, count, ...) of x (batch, seqlen, heads, ...)."""
    if piece.repeat == 1:
        return x[:, first:first + count].transpose(1, 2)[:, None]
    x = x[:, first:first + (piece.repeat - 1) * piece.stride + count]
    shape = (x.shape[0], piece.repeat, x.shape[2], count, *x.shape[3:])
    stride = (x.stride(0), piece.stride * x.stride(1), x.stride(2), x.stride(1), *x.stride()[3:])
    return x.as_strided(shape, stride)


def _cut(x: torch.Tensor, first: int, count: int, piece: Piece) -> torch.Tensor:
    """(batch * repeat, heads, count, ...) as the kernel takes it."""
    x = _windows(x, first, count, piece)
    if piece.reversed:
        x = x.flip(3)
    return x.flatten(0, 1)


def _uncut(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """(batch * repeat, heads, count, ...) -> (batch, repeat, heads, count, ...) in true time."""
    x = x.unflatten(0, (-1, piece.repeat))
    return x.flip(3) if piece.reversed else x


def _mask(piece: Piece, dtype: torch.dtype) -> torch.Tensor | None:
    if not piece.width:
        return None
    distance = torch.arange(piece.rows)[:, None] - torch.arange(piece.keys)
    return torch.zeros(piece.rows, piece.keys, dtype=dtype).masked_fill_((distance < 0) | (distance >= piece.width), float("-inf"))


# ---- rotation -----------------------------------------------------------------------------------------------------------


def _accumulation_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=32)
def _rows_table(rotary: Rotary, slope: float, offset: float, factor: float, floor: float, first: int, stop: int, dtype: torch.dtype):
    positions = torch.arange(first, stop, dtype=torch.float64)
    return _table(rotary, positions, slope, offset, factor, floor, dtype)


def _table(rotary, positions, slope, offset, factor, floor, dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """own (..., 1, head_dim) that scales every channel and sin, -sin (..., 1, turning pairs), all times log n.

    So log n joins the query before any rounding.
    """
    cos, sin = cos_sin(rotary, positions if (slope, offset) == (1, 0) else slope * positions + offset)
    own = torch.stack((cos, cos), -1).flatten(-2) if rotary.interleaved else torch.cat((cos, cos), -1)
    own = torch.nn.functional.pad(own, (0, rotary.head_dim - rotary.rotary_dim), value=1.0)
    sin = sin[..., :_turning_pairs(rotary)]
    if factor:
        log_n = (factor * torch.log(positions.clamp(min=0) + 1)).clamp(min=floor)[..., None]
        own, sin = own * log_n, sin * log_n
    return tuple(x.to(dtype)[..., None, :] for x in (own, sin, -sin))


@lru_cache(maxsize=256)
def _turning_pairs(rotary: Rotary) -> int:
    """Pairs up to the last that turns."""
    return max((m + 1 for m, theta in enumerate(rotary.theta) if theta), default=0)


def _turning(x: torch.Tensor, call: Call, slope: float, offset: float, shift: int | None):
    """The table that turns x, a query whose row 0 stands at position shift or, with None, a key; None where nothing changes."""
    rotary, dtype = call.rotary, _accumulation_type(x)
    factor, floor = (0.0, 1.0) if shift is None else call.log_n
    if not factor and (not _turning_pairs(rotary) or (slope == 0 and offset == 0)):
        return None
    if call.positions is not None:
        return _table(rotary, call.positions.to(torch.float64), slope, offset, factor, floor, dtype)
    if not factor and slope == 0:
        return _rows_table(rotary, slope, offset, factor, floor, 0, 1, dtype)
    first, stop = shift or 0, (shift or 0) + x.shape[1]
    low = 0 if first >= 0 else -_bucket(-first)
    table = _rows_table(rotary, slope, offset, factor, floor, low, max(_bucket(stop), low + 1), dtype)
    return tuple(t[first - low:stop - low] for t in table)


def _bucket(positions: int) -> int:
    """Table lengths are powers of two, so that a growing sequence builds few."""
    return max(1 << (positions - 1).bit_length(), LEAST_TABLE) if positions > 0 else 0


def _halves(x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and of the second channel of every pair that turns."""
    pairs, second = _turning_pairs(rotary), len(rotary.theta)
    if rotary.interleaved:
        return x[..., 0:2 * pairs:2], x[..., 1:2 * pairs:2]
    return x[..., :pairs], x[..., second:second + pairs]


def _turn(x: torch.Tensor, table, rotary: Rotary, back: bool = False) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim) turned, in float32 or float64; back applies the transpose, for gradients."""
    if table is None:
        return x.to(_accumulation_type(x))
    own, sin, minus_sin = table
    turned = x * own
    if sin.shape[-1]:
        (first, second), (to_first, to_second) = _halves(x, rotary), _halves(turned, rotary)
        to_first.addcmul_(second, sin if back else minus_sin)
        to_second.addcmul_(first, minus_sin if back else sin)
    return turned


# ---- one batch of sequences of one length -------------------------------------------------------------------------------


def _attend(q, k, v, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, lse (batch, heads_q, seqlen_q)."""
    (batch, seqlen_q, heads, _), seqlen_k, accumulate = q.shape, k.shape[1], _accumulation_type(q)
    shift, v = seqlen_k - seqlen_q, v.to(accumulate)
    turns = plan(call.bands, seqlen_q, seqlen_k) if q.numel() and k.numel() else ()
    out = lse = None
    for slope, offset, pieces in turns:
        if not pieces:
            continue
        turned_q = _turn(q, _turning(q, call, slope, offset, shift), call.rotary)
        turned_k = _turn(k, _turning(k, call, slope, 0.0, None), call.rotary)
        for piece in pieces:
            piece_out, piece_lse = _flash(
                _cut(turned_q, piece.row, piece.rows, piece), _cut(turned_k, piece.key, piece.keys, piece),
                _cut(v, piece.key, piece.keys, piece), 0.0, piece.causal and not piece.width,
                attn_mask=_mask(piece, accumulate), scale=call.score_scale)
            if out is None and piece.rows == seqlen_q and not piece.reversed:
                out, lse = piece_out.transpose(1, 2), piece_lse.transpose(1, 2)
                continue
            if out is None:
                out, lse = torch.zeros(q.shape, dtype=accumulate), torch.full((batch, seqlen_q, heads), -torch.inf, dtype=accumulate)
            _merge(_windows(out, piece.row, piece.rows, piece), _windows(lse, piece.row, piece.rows, piece),
                   _uncut(piece_out, piece), _uncut(piece_lse, piece))
    if out is None:
        return q.new_zeros(q.shape), q.new_full(call.lse_shape(q), -torch.inf, dtype=accumulate)
    return out.to(q.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _merge(out, lse, piece_out, piece_lse) -> None:
    """Joins a piece to what its rows have seen so far, in place."""
    both = torch.logaddexp(lse, piece_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(piece_out, (piece_lse - both).exp_()[..., None])
    lse.copy_(both)


def _attend_backward(grad_out, grad_lse, q, k, v, out, lse, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    accumulate, rotary = _accumulation_type(q), call.rotary
    shift, head_dim = k.shape[1] - q.shape[1], q.shape[-1]
    turns = plan(call.bands, q.shape[1], k.shape[1]) if q.numel() and k.numel() else ()
    out, wide_v = out.to(accumulate), v.to(accumulate)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(accumulate)
    if grad_lse is not None:
        # dS = P * (dO.V - dO.O + dlse): dlse rides in dO as one more channel, against 1 in V and 0 in O.
        grad_out, wide_v = _widen(grad_out, grad_lse.transpose(1, 2)), _widen(wide_v, 1.0)
        out = _widen(out, 0.0)
    lse = lse.transpose(1, 2)
    grad_q, grad_k, grad_v = None, None, None
    for slope, offset, pieces in turns:
        if not pieces:
            continue
        table_q, table_k = _turning(q, call, slope, offset, shift), _turning(k, call, slope, 0.0, None)
        turned_q, turned_k = _turn(q, table_q, rotary), _turn(k, table_k, rotary)
        if grad_lse is not None:
            turned_q, turned_k = _widen(turned_q, 0.0), _widen(turned_k, 0.0)
        turned_grad_q = turned_grad_k = None
        for piece in pieces:
            piece_q, piece_k, piece_v = _flash_backward(
                _cut(grad_out, piece.row, piece.rows, piece), _cut(turned_q, piece.row, piece.rows, piece),
                _cut(turned_k, piece.key, piece.keys, piece), _cut(wide_v, piece.key, piece.keys, piece),
                _cut(out, piece.row, piece.rows, piece), _cut(lse, piece.row, piece.rows, piece),
                0.0, piece.causal and not piece.width, attn_mask=_mask(piece, accumulate), scale=call.score_scale)
            turned_grad_q = _add(turned_grad_q, piece_q[..., :head_dim], q.shape, piece.row, piece.rows, piece)
            turned_grad_k = _add(turned_grad_k, piece_k[..., :head_dim], k.shape, piece.key, piece.keys, piece)
            grad_v = _add(grad_v, piece_v[..., :head_dim], v.shape, piece.key, piece.keys, piece)
        turned_grad_q, turned_grad_k = _turn(turned_grad_q, table_q, rotary, back=True), _turn(turned_grad_k, table_k, rotary, back=True)
        grad_q = turned_grad_q if grad_q is None else grad_q.add_(turned_grad_q)
        grad_k = turned_grad_k if grad_k is None else grad_k.add_(turned_grad_k)
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
    _windows(total, first, count, piece).add_(_uncut(piece_grad, piece))
    return total
