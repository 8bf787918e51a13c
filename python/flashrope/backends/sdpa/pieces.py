"""Divides a band into pieces for torch's flash kernel on the CPU, and merges their results.

The kernel computes a piece without a mask, except in a narrow band. A piece is a rectangle of rows and keys,
or a triangle that the kernel's is_causal describes. Some triangles have their rows and keys in reverse order.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ...calls.records import AttentionCall, CacheCall, accumulation_type
from ...schemes.bands import Band, PositionMap
from ...schemes.rotary import Rotary
from ..shared.host_rotation import KEY_FACTORS, QueryFactors, Rotation, rotation_of_rows

flash = torch._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MIN_SCALE = 1e-30  # lower bound of the scale: 0 would turn a masked -inf into NaN
MIN_CHUNK = 64  # a band narrower than this is divided into chunks of this many rows, which then need a mask


class Piece(NamedTuple):
    """Attention of rows [row, row + rows) to keys [key, key + keys). The piece is repeated ``repeat`` times. Each
    repetition starts ``stride`` rows and keys after the previous repetition.

    causal: if True, local row a sees the local keys b <= a, and if width is not 0, only keys with a - b < width. If
        False, every row sees every key.
    reversed: a and b count from the end of their range.
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
        """Returns this piece after the order of all rows and all keys is reversed."""
        last = (self.repeat - 1) * self.stride
        return self._replace(
            row=seqlen_q - self.row - self.rows - last,
            key=seqlen_k - self.key - self.keys - last,
            reversed=self.causal and not self.reversed,
        )


class RotationPieces(NamedTuple):
    """The pieces that share one map for the positions of their queries, and one map for the positions of their keys."""

    queries: PositionMap
    keys: PositionMap
    pieces: tuple[Piece, ...]


# ---- bands to pieces


@lru_cache(maxsize=256)
def plan(
    bands: tuple[Band, ...], seqlen_q: int, seqlen_k: int, shift: int, first: int = 0
) -> tuple[RotationPieces, ...]:
    """Returns the pieces of all bands, grouped by rotation. Together they hold every visible (row, key) exactly once.

    shift: query row r is at position shift + r, and key j is at position j. Both positions are counted from position
    `first`.
    """
    rotations: dict[tuple[PositionMap, PositionMap], list[Piece]] = {}
    for band in bands:
        start, stop = band.start, band.stop
        pieces = rotations.setdefault((band.queries, band.keys), [])
        if band.chunk:
            pieces += _chunk_pieces(band, seqlen_q, seqlen_k, shift, first)
            continue
        if start <= shift + 1 - seqlen_k and stop >= shift + seqlen_q:
            pieces.append(Piece(0, seqlen_q, 0, seqlen_k))
            continue
        if stop > 0:
            pieces += _past_pieces(max(start, 0), stop, seqlen_q, seqlen_k, shift)
        if start < 0:  # keys after the query: they become earlier keys if the order of rows and keys is reversed
            ahead = seqlen_k - seqlen_q - shift
            pieces += (
                piece.mirrored(seqlen_q, seqlen_k)
                for piece in _past_pieces(max(1 - stop, 1), 1 - start, seqlen_q, seqlen_k, ahead)
            )
    plans = (
        RotationPieces(*maps, tuple(piece for piece in pieces if piece.rows > 0 and piece.keys > 0))
        for maps, pieces in rotations.items()
    )
    return tuple(rotation for rotation in plans if rotation.pieces)


def _past_pieces(start: float, stop: float, seqlen_q: int, seqlen_k: int, shift: int) -> list[Piece]:
    """Returns the pieces of the band start <= d < stop, where start >= 0 and d = r + shift - j.

    In the code x is a row's number, shifted so that row x sees exactly the keys x - width < j <= x with j < seqlen_k.
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
    if first < width:  # rows that see all earlier keys
        pieces += [
            clipped(first, width - first, 0, first),
            clipped(first, width - first, first, width - first, causal=True),
        ]
        first = width
    chunk = max(width, MIN_CHUNK)
    full_chunks = max(min(end, seqlen_k) - first, 0) // chunk
    starts = [(first, chunk, full_chunks)] if full_chunks else []
    starts += [
        (x, min(chunk, end - x), 1) for x in range(first + full_chunks * chunk, min(end, seqlen_k + width), chunk)
    ]
    for x, rows, repeat in starts:
        again = {"repeat": repeat, "stride": chunk}
        banded = width if rows > width else 0
        seeing = min(rows, seqlen_k - x + width - 1) if banded else rows
        pieces.append(clipped(x, seeing, x, rows, causal=True, width=banded, **again))
        corner = min(rows, width) - 1  # keys before x form a triangle of this size: local row a sees keys b >= a
        corner_keys = min(corner, seqlen_k - (x - width + 1))
        pieces.append(clipped(x, corner_keys, x - width + 1, corner_keys, causal=True, reversed=True, **again))
        pieces.append(clipped(x, rows, x - width + 1 + corner, width - 1 - corner, **again))
    return pieces


def _chunk_pieces(band: Band, seqlen_q: int, seqlen_k: int, shift: int, first: int) -> list[Piece]:
    """Returns the pieces of a band over differences of chunks: for every chunk of rows, its own chunk of keys and the
    earlier chunks that it sees. Chunks are counted from position 0, not from `first`."""
    chunk, row_0, key_end = band.chunk, first + shift, first + seqlen_k
    pieces = []
    for n in range(max(row_0, 0) // chunk, -(-(row_0 + seqlen_q) // chunk)):
        low, high = max(n * chunk, row_0, 0), min((n + 1) * chunk, row_0 + seqlen_q)
        begin = 0 if band.stop > n else (n + 1 - int(band.stop)) * chunk
        begin, end = max(begin, first), min((n + 1 - int(band.start)) * chunk, n * chunk, key_end)
        pieces.append(Piece(low - row_0, high - low, begin - first, end - begin))
        own, own_end = max(n * chunk, first), min((n + 1) * chunk, key_end)
        if band.start == 0 and own < own_end:
            pieces += (
                piece._replace(row=piece.row + low - row_0, key=piece.key + own - first)
                for piece in _past_pieces(0, math.inf, high - low, own_end - own, low - own)
            )
    return pieces


class SinglePiece(NamedTuple):
    """A single kernel call without a mask that computes the whole attention, and the rotations of its queries and
    keys."""

    piece: Piece
    q_rotation: Rotation | None
    k_rotation: Rotation | None


@lru_cache(maxsize=64)
def single_piece(rotary: Rotary, causal: bool, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> SinglePiece | None:
    """Returns the single piece that covers all rows and keys, with rotations in dtype, or None if there is no such
    piece."""
    call = AttentionCall(rotary, causal, 1.0)
    rotations = plan(call.bands, seqlen_q, seqlen_k, seqlen_k - seqlen_q)
    if len(rotations) != 1 or len(rotations[0].pieces) != 1 or rotary.axis:
        return None
    ((queries, keys, (piece,)),) = rotations
    if piece.rows != seqlen_q or piece.keys != seqlen_k or piece.reversed or piece.width:
        return None
    return SinglePiece(
        piece,
        rotation_of_rows(rotary, queries, QueryFactors.of(call), seqlen_k - seqlen_q, seqlen_q, dtype),
        rotation_of_rows(rotary, keys, KEY_FACTORS, 0, seqlen_k, dtype),
    )


# ---- inputs and results of the kernel


def windows(x: torch.Tensor, first: int, count: int, piece: Piece) -> torch.Tensor:
    """Returns a view (batch, repeat, heads, count, ...) of x (batch, seqlen, heads, ...): count rows per repeat."""
    if piece.repeat == 1:
        return x[:, first : first + count].transpose(1, 2)[:, None]
    x = x[:, first : first + (piece.repeat - 1) * piece.stride + count]
    shape = (x.shape[0], piece.repeat, x.shape[2], count, *x.shape[3:])
    stride = (x.stride(0), piece.stride * x.stride(1), x.stride(2), x.stride(1), *x.stride()[3:])
    return x.as_strided(shape, stride)


def flash_scale(call: AttentionCall | CacheCall, seqlen_k: int) -> float:
    """Returns the factor on the scores of a sequence of seqlen_k keys."""
    return max(call.score_scale * call.rotary.query_scale.of_length(seqlen_k), MIN_SCALE)


def gather_tile(x: torch.Tensor, first: int, count: int, piece: Piece) -> torch.Tensor:
    """Returns the kernel's input for a piece, (batch * repeat, heads, count, ...), with rows in the piece's order.

    x: (batch, seqlen, heads, ...).
    """
    if piece.repeat == 1 and not piece.reversed:
        return (x if count == x.shape[1] else x[:, first : first + count]).transpose(1, 2)
    x = windows(x, first, count, piece)
    return (x.flip(3) if piece.reversed else x).flatten(0, 1)


def gather_rows(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return gather_tile(x, piece.row, piece.rows, piece)


def gather_keys(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    return gather_tile(x, piece.key, piece.keys, piece)


def widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns x, padded with zero channels to this width. The kernel needs values with the head_dim of keys."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def narrow(x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the first ``width`` channels of x."""
    return x if x.shape[-1] == width else x.narrow(-1, 0, width)


def scatter_tile(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the kernel's result in the shape and order of ``windows``. It undoes ``gather_tile``."""
    x = x.unflatten(0, (-1, piece.repeat))
    return x.flip(3) if piece.reversed else x


def attn_mask(piece: Piece, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the mask (rows, keys), 0 or -inf, of a piece that has a width. Returns None for other pieces."""
    if not piece.width:
        return None
    distance = torch.arange(piece.rows, device="cpu")[:, None] - torch.arange(piece.keys, device="cpu")
    unseen = (distance < 0) | (distance >= piece.width)
    return torch.zeros(piece.rows, piece.keys, dtype=dtype, device="cpu").masked_fill_(unseen, float("-inf"))


def flash_piece(q, k, v, piece: Piece, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out (batch * repeat, heads_q, rows, head_dim) and lse of one piece. q, k, v: from ``gather_tile``."""
    if piece.causal:
        return flash(q, k, v, 0.0, not piece.width, attn_mask=attn_mask(piece, q.dtype), scale=scale)
    return flash_folded(q, k, v, scale)


def flash_folded(q, k, v, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends for a piece in which every row sees every key. The query heads of a key head become rows, so that its
    keys are read once."""
    # torch's half-precision kernels are three times slower with a single row, so a single row is repeated.
    batch, heads_q, rows, head_dim = q.shape
    heads_kv, half = k.shape[1], q.dtype in (torch.float16, torch.bfloat16)
    if heads_q == heads_kv and not (half and rows == 1):
        return flash(q, k, v, 0.0, False, scale=scale)
    folded = q.reshape(batch, heads_kv, heads_q // heads_kv * rows, head_dim)
    one_row = half and folded.shape[2] == 1
    out, lse = flash(folded.expand(-1, -1, 2, -1) if one_row else folded, k, v, 0.0, False, scale=scale)
    if one_row:
        out, lse = out[:, :, :1], lse[:, :, :1]
    return out.reshape(q.shape), lse.reshape(batch, heads_q, rows)


# ---- merging

Partial = tuple[Piece, torch.Tensor, torch.Tensor]  # a piece, its out and its lse, as the kernel returns them


def merge_partials(
    partials: list[Partial], q: torch.Tensor, head_dim_v: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of all pieces together, contiguous. out is like q but with head_dim_v. Each piece's output has
    the weight exp(lse of the piece - lse)."""
    if not partials or any(piece.rows != q.shape[1] or piece.reversed for piece, _, _ in partials):
        return cast_results(*_merge_rows(partials, q, head_dim_v or q.shape[-1]), q.dtype)
    if len(partials) == 1:
        out, lse = partials[0][1:]
    else:  # every piece holds all rows, as in decoding
        piece_lse = torch.stack([lse for _, _, lse in partials])
        lse = piece_lse.logsumexp(0)
        weights = (piece_lse - lse).exp_().to(accumulation_type(q))[..., None]
        out = (torch.stack([out for _, out, _ in partials]) * weights).sum(0)
    return cast_results(out.transpose(1, 2), lse, q.dtype)


def cast_results(out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out in dtype, and lse, both contiguous."""
    return (out if out.dtype is dtype else out.to(dtype)).contiguous(), lse.contiguous()


def _merge_rows(partials: list[Partial], q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of all pieces together. A row may be in any number of pieces, or in no piece."""
    out = q.new_zeros((*q.shape[:-1], head_dim_v), dtype=accumulation_type(q))
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    lse_windows = [windows(lse.transpose(1, 2), piece.row, piece.rows, piece) for piece, _, _ in partials]
    for (piece, _, piece_lse), total in zip(partials, lse_windows, strict=True):
        torch.logaddexp(total, scatter_tile(piece_lse, piece), out=total)
    for (piece, piece_out, piece_lse), total in zip(partials, lse_windows, strict=True):
        weight = (scatter_tile(piece_lse, piece) - total).exp_()[..., None]
        windows(out, piece.row, piece.rows, piece).addcmul_(scatter_tile(piece_out, piece), weight)
    return out, lse
