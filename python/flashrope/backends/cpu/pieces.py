"""The CPU implementation's geometry: a band cut into pieces that torch's flash kernel computes without a mask, and
their results merged."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...rotary import Band, Rotary
from ..base import AttentionCall
from .rotation import accumulation_type, turns_of_rows

flash = torch._scaled_dot_product_flash_attention_for_cpu
LEAST_CHUNK = 64  # rows; a narrower band is cut into chunks of this many rows, which then need a mask


class Piece(NamedTuple):
    """Rows [row, row + rows) against keys [key, key + keys), and the same again ``repeat`` times, each ``stride``
    later.

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
        return self._replace(
            row=seqlen_q - self.row - self.rows - last,
            key=seqlen_k - self.key - self.keys - last,
            reversed=self.causal and not self.reversed,
        )


@lru_cache(maxsize=256)
def plan(
    bands: tuple[Band, ...], seqlen_q: int, seqlen_k: int, shift: int
) -> tuple[tuple[float, float, tuple[Piece, ...]], ...]:
    """(slope, offset, pieces) for each turn the bands ask for, where query row r stands shift + r behind key 0;
    together the pieces hold every visible pair once."""
    turns: dict[tuple[float, float], list[Piece]] = {}
    for start, stop, slope, offset in bands:
        pieces = turns.setdefault((slope, offset), [])
        if start <= shift + 1 - seqlen_k and stop >= shift + seqlen_q:
            pieces.append(Piece(0, seqlen_q, 0, seqlen_k))
            continue
        if stop > 0:
            pieces += _behind(max(start, 0), stop, seqlen_q, seqlen_k, shift)
        if start < 0:  # keys ahead; in reversed time they lie behind
            ahead = seqlen_k - seqlen_q - shift
            pieces += (
                p.mirrored(seqlen_q, seqlen_k) for p in _behind(max(1 - stop, 1), 1 - start, seqlen_q, seqlen_k, ahead)
            )
    kept = ((*turn, tuple(p for p in pieces if p.rows > 0 and p.keys > 0)) for turn, pieces in turns.items())
    return tuple(of_turn for of_turn in kept if of_turn[2])


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
        pieces += [
            clipped(first, width - first, 0, first),
            clipped(first, width - first, first, width - first, causal=True),
        ]
        first = width
    chunk = max(width, LEAST_CHUNK)
    whole = max(min(end, seqlen_k) - first, 0) // chunk
    starts = [(first, chunk, whole)] if whole else []
    starts += [(x, min(chunk, end - x), 1) for x in range(first + whole * chunk, min(end, seqlen_k + width), chunk)]
    for x, rows, repeat in starts:
        again = {"repeat": repeat, "stride": chunk}
        banded = width if rows > width else 0
        seeing = min(rows, seqlen_k - x + width - 1) if banded else rows
        pieces.append(clipped(x, seeing, x, rows, causal=True, width=banded, **again))
        corner = min(rows, width) - 1  # keys before x that some, but not all rows see: local row a sees b >= a
        corner_keys = min(corner, seqlen_k - (x - width + 1))
        pieces.append(clipped(x, corner_keys, x - width + 1, corner_keys, causal=True, reversed=True, **again))
        pieces.append(clipped(x, rows, x - width + 1 + corner, width - 1 - corner, **again))
    return pieces


@lru_cache(maxsize=64)
def one_piece(rotary: Rotary, causal: bool, seqlen_q: int, seqlen_k: int, dtype: torch.dtype):
    """(piece, what turns q, what turns k) where one call of the kernel without a mask does all, else None. The turns
    are those
    of rotation, of numbers of this type: None where they change nothing."""
    call = AttentionCall(rotary, causal, 1.0)
    turns = plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q)
    if len(turns) != 1 or len(turns[0][2]) != 1 or rotary.axis:
        return None
    ((slope, offset, (piece,)),) = turns
    if piece.rows != seqlen_q or piece.keys != seqlen_k or piece.reversed or piece.width:
        return None
    return (
        piece,
        turns_of_rows(rotary, slope, offset, *call.log_n, seqlen_k - seqlen_q, seqlen_q, dtype),
        turns_of_rows(rotary, slope, 0.0, 0.0, 1.0, 0, seqlen_k, dtype),
    )


def windows(x: torch.Tensor, first: int, count: int, piece: Piece) -> torch.Tensor:
    """View (batch, repeat, heads, count, ...) of x (batch, seqlen, heads, ...)."""
    if piece.repeat == 1:
        return x[:, first : first + count].transpose(1, 2)[:, None]
    x = x[:, first : first + (piece.repeat - 1) * piece.stride + count]
    shape = (x.shape[0], piece.repeat, x.shape[2], count, *x.shape[3:])
    stride = (x.stride(0), piece.stride * x.stride(1), x.stride(2), x.stride(1), *x.stride()[3:])
    return x.as_strided(shape, stride)


def cut(x: torch.Tensor, first: int, count: int, piece: Piece) -> torch.Tensor:
    """(batch * repeat, heads, count, ...) of x (batch, seqlen, heads, ...), in the piece's time, as the kernel takes
    it."""
    if piece.repeat == 1 and not piece.reversed:
        return (x if count == x.shape[1] else x[:, first : first + count]).transpose(1, 2)
    x = windows(x, first, count, piece)
    return (x.flip(3) if piece.reversed else x).flatten(0, 1)


def rows_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return cut(x, piece.row, piece.rows, piece)


def keys_of(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return cut(x, piece.key, piece.keys, piece)


def uncut(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What the kernel gave, (batch * repeat, heads, count, ...), in the shape and the time of ``windows``."""
    x = x.unflatten(0, (-1, piece.repeat))
    return x.flip(3) if piece.reversed else x


def mask(piece: Piece, dtype: torch.dtype) -> torch.Tensor | None:
    if not piece.width:
        return None
    distance = torch.arange(piece.rows)[:, None] - torch.arange(piece.keys)
    unseen = (distance < 0) | (distance >= piece.width)
    return torch.zeros(piece.rows, piece.keys, dtype=dtype).masked_fill_(unseen, float("-inf"))


def joined(parts, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse), contiguous, of (piece, its out, its lse)."""
    if not parts or any(piece.rows != q.shape[1] or piece.reversed for piece, _, _ in parts):
        return like_queries(*merged(parts, q), q)
    if len(parts) == 1:
        out, lse = parts[0][1:]
    else:  # every part holds all rows, as in decoding
        of_parts = torch.stack([piece_lse for _, _, piece_lse in parts])
        lse = of_parts.logsumexp(0)
        weights = (of_parts - lse).exp_().to(accumulation_type(q))[..., None]
        out = (torch.stack([piece_out for _, piece_out, _ in parts]) * weights).sum(0)
    return like_queries(out.transpose(1, 2), lse, q)


def like_queries(out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (out if out.dtype is q.dtype else out.to(q.dtype)).contiguous(), lse.contiguous()


def merged(parts, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of rows that several pieces hold, or none."""
    out = q.new_zeros(q.shape, dtype=accumulation_type(q))
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    rows = [windows(lse.transpose(1, 2), piece.row, piece.rows, piece) for piece, _, _ in parts]
    for (piece, _, piece_lse), of_rows in zip(parts, rows, strict=True):
        torch.logaddexp(of_rows, uncut(piece_lse, piece), out=of_rows)
    for (piece, piece_out, piece_lse), of_rows in zip(parts, rows, strict=True):
        weight = (uncut(piece_lse, piece) - of_rows).exp_()[..., None]
        windows(out, piece.row, piece.rows, piece).addcmul_(uncut(piece_out, piece), weight)
    return out, lse
