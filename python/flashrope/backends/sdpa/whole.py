"""Computes ``attention`` and ``attention_varlen`` on a GPU with one or two calls of PyTorch's operators.

A scheme of one band is one call over rotated queries and keys. ReRoPE, Leaky ReRoPE and every scheme whose far band is
an unbounded past are two calls: the near band is attention in a window, and the far band is causal attention of
q[window:] to k[:seqlen - window], which are views. The results are merged by lse. Each backward takes the merged out
and lse, with which it returns its band's share of the gradients.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ...calls.addresses import token_sequences
from ...calls.records import AttentionCall, Kept, KeptShapes, RotateCall, refuse, unseen
from ...schemes.bands import Band, PositionMap
from ...schemes.rotary import Rotary
from ...schemes.rotated_keys import inverted
from ...schemes.scales import UNSCALED
from .. import others
from ..shared.merging import add_partial
from . import rotated as composed
from .operators import Operator, PackedLengths, Problem, choose, is_plain
from .pieces import flash_scale, narrow, widen


class Two(NamedTuple):
    """The near and the far band of a scheme, and the window between them."""

    near: Band
    far: Band
    window: int


def unserved(call: AttentionCall) -> str:
    """Returns why no call of PyTorch's operators computes a scheme, or ""."""
    if call.deterministic:
        return "the gradients of PyTorch's kernels are not reproducible; use impl='triton'"
    if any(band.maps_positions for band in call.bands):
        return "no call of PyTorch's kernels computes bands over maps of positions; use impl='triton'"
    if one_window(call) is not False:
        if call.cu_seqlens_q is not None and call.rotary.length_scale is not None:
            return "packed sequences of a scheme with length_scale are not supported; use impl='triton'"
        return ""
    if two_bands(call) is None:
        return (
            f"PyTorch's kernels compute one band, or a window and all keys before it, got {len(call.bands)} bands; use "
            "impl='triton'"
        )
    if call.cu_seqlens_q is not None:
        return (
            "packed sequences of two bands are not supported, because each loses its own first rows; use impl='triton'"
        )
    return ""


def one_window(call: AttentionCall) -> int | None | bool:
    """Returns the window of a scheme with one band, None if it has no window, or False if one call does not compute
    the scheme."""
    if len(call.bands) != 1:
        return False
    (band,) = call.bands
    if call.causal:
        return False if band.start > 0 else None if band.stop == math.inf else int(band.stop)
    return None if (band.start, band.stop) == (-math.inf, math.inf) else False


def two_bands(call: AttentionCall) -> Two | None:
    """Returns the bands of a causal scheme that has a window and one band of all keys before it, or None."""
    if len(call.bands) != 2 or not call.causal:
        return None
    near, far = sorted(call.bands, key=lambda band: band.start)
    if near.start > 0 or near.stop != far.start or far.stop != math.inf:
        return None
    return Two(near, far, int(near.stop))


def kept_shapes(k: torch.Tensor, call: AttentionCall) -> KeptShapes:
    """Returns the shape of one copy of the keys, rotated as in the band with the smallest distances."""
    near = min(call.bands, key=lambda band: band.start)
    if not one_map(call.rotary, near.keys).changes_channels:
        return KeptShapes()
    rows = k.shape[0] * k.shape[1] if k.ndim == 4 else k.shape[0]
    return KeptShapes((1, rows, *k.shape[-2:]))


def forward(q, k, v, call: AttentionCall, operators: tuple[Operator, ...]):
    """Returns (out, lse, kept), as ``AttentionBackend`` describes. operators: those of ``operators_on``."""
    shape = kept_shapes(k, call).rotated_k
    if not (q.numel() and k.numel()):
        out, lse = unseen(q, v)
        return out, lse, Kept(k.new_zeros(shape), lse.new_empty(0))
    near, far, window = _parts(q, k, call, operators)
    if far is None:
        rotated_k = near.keys(k)
        out, lse = near.attend(q, rotated_k, v)
        out, lse = out.contiguous(), lse.contiguous()
    else:
        out, lse, rotated_k = _near_forward(q, k, v, near)
        rows, keys = _far(q, k, window)
        far_out, far_lse = far.attend(q[:, rows], far.keys(k[:, keys]), v[:, keys])
        if (triton := _triton(q)) is not None:
            triton.merge(out, lse, far_out, far_lse, rows.start, call.rotary)
        else:
            _merge(out[:, rows], lse[..., rows], far_out, far_lse)
    kept = k.new_empty(0) if shape == (0,) else rotated_k.reshape(shape)
    return out, lse, Kept(kept, lse.new_empty(0))


def backward(grad_out, grad_lse, q, k, v, out, lse, kept: Kept | None, call: AttentionCall, operators):
    """Returns the gradients of raw q, k and v, as ``AttentionBackend`` describes."""
    if not (q.numel() and k.numel()):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    near, far, window = _parts(q, k, call, operators)
    if kept is not None and kept.rotated_k.shape[-1] == k.shape[-1]:
        rotated_k = kept.rotated_k.view(k.shape)
    else:  # the Triton kernels may have kept only the channels that rotate
        rotated_k = near.keys(k)
    if far is None:
        grad_q, grad_k, grad_v = near.gradients(grad_out, grad_lse, q, rotated_k, v, out, lse)
    else:
        grad_q, grad_k, grad_v = _near_backward(grad_out, grad_lse, q, k, rotated_k, v, out, lse, near)
        rows, keys = _far(q, k, window)
        far_lse = None if grad_lse is None else grad_lse[..., rows]
        tensors = q[:, rows], far.keys(k[:, keys]), v[:, keys], out[:, rows], lse[..., rows].contiguous()
        for grad, part, share in zip(
            (grad_q, grad_k, grad_v),
            (rows, keys, keys),
            far.gradients(grad_out[:, rows], far_lse, *tensors),
            strict=True,
        ):
            grad[:, part] += share
    if not call.score_scale:
        grad_q, grad_k = torch.zeros_like(q), torch.zeros_like(k)
    return grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()


def _parts(q, k, call: AttentionCall, operators) -> tuple[OneBand, OneBand | None, int]:
    """Returns the near band, the far band, and the window between them. A single band is near, and far is None."""
    bands, seqlen, first = two_bands(call), k.shape[-3], k.shape[-3] - q.shape[-3]
    if bands is None:
        return OneBand(call, first, seqlen, operators), None, 0
    near = OneBand(_only(call, bands.near), first, seqlen, operators)
    if bands.window >= seqlen:
        return near, None, 0
    far = OneBand(
        _only(call, bands.far._replace(start=0)), first + _far(q, k, bands.window)[0].start, seqlen, operators
    )
    return near, far, bands.window


def _only(call: AttentionCall, band: Band) -> AttentionCall:
    return call._replace(rotary=dataclasses.replace(call.rotary, bands=(band,)))


def _far(q, k, window: int) -> tuple[slice, slice]:
    """Returns the query rows and the keys of the far band."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    return slice(max(window - (seqlen_k - seqlen_q), 0), seqlen_q), slice(0, seqlen_k - window)


def _merge(out, lse, far_out, far_lse) -> None:
    """Merges the far band into out (batch, rows, heads, head_dim) and lse (batch, heads, rows), in place. Rounds out
    once."""
    merged = out.transpose(1, 2).float()
    add_partial(merged, lse, far_out.transpose(1, 2).float(), far_lse)
    out.copy_(merged.transpose(1, 2))


# ---- the near band, by the Triton kernel if it is present and positions are not explicit


def _near_forward(q, k, v, near: OneBand):
    """Returns (out, lse, rotated k), contiguous."""
    if near.call.positions is None and (triton := _triton(q)) is not None:
        out, lse, kept = triton.forward(q, k, v, near.call._replace(whole_keys=True))
        return out, lse, kept.rotated_k
    rotated_k = near.keys(k)
    out, lse = near.attend(q, rotated_k, v)
    return out.contiguous(), lse.contiguous(), rotated_k


def _near_backward(grad_out, grad_lse, q, k, rotated_k, v, out, lse, near: OneBand):
    if near.call.positions is not None or (triton := _triton(q)) is None:
        return near.gradients(grad_out, grad_lse, q, rotated_k, v, out, lse)
    shape = kept_shapes(k, near.call).rotated_k
    kept = Kept(k.new_empty(0) if shape == (0,) else rotated_k.reshape(shape), lse.new_empty(0))
    return triton.backward(grad_out, grad_lse, q, k, v, out, lse, kept, near.call)


def _triton(x):
    """Returns the Triton backend if it serves tensors like x, else None."""
    triton = others.backend("triton")
    return None if triton.unsupported_reason(x) else triton


# ---- one band


class OneBand(NamedTuple):
    """Attention over the keys of one band in one call of an operator.

    call: its scheme has one band. first: the position of the first query row. seqlen: the number of keys of the whole
    sequence. Both are of no use if sequences are packed.
    """

    call: AttentionCall
    first: int
    seqlen: int
    operators: tuple[Operator, ...]

    def keys(self, k):
        """Returns rotated keys."""
        return _rotate(k, self.call.rotary, self.call.bands[0].keys, 0, self._positions(k, False))

    def attend(self, q, rotated_k, v):
        """Returns (out, lse)."""
        operator, problem, width = self._operator(q, rotated_k, v)
        tensors = (widen(x, width) for x in (self._queries(q), rotated_k, v))
        out, lse = operator.forward(*tensors, problem)
        return narrow(out, v.shape[-1]), lse

    def gradients(self, grad_out, grad_lse, q, rotated_k, v, out, lse):
        """Returns the gradients of raw q, raw k and v. out, lse: those of all bands together."""
        operator, problem, width = self._operator(q, rotated_k, v, extra=0 if grad_lse is None else 8)
        if grad_lse is not None and operator.computes_out:
            refuse("sdpa", f"no gradient of lse on {q.device}; use 'reference'")
        wide_v, wide_out, wide_grad = (widen(x, width) for x in (v, out, grad_out))
        if grad_lse is not None:
            # dS = P * (dO.V - dO.O + dlse). An extra channel holds dlse in dO, 1 in V, and 0 in O, q and k.
            wide_v[..., -1] = 1.0
            wide_grad[..., -1] = grad_lse.transpose(-1, -2)
        tensors = wide_grad, widen(self._queries(q), width), widen(rotated_k, width), wide_v, wide_out, lse
        grad_q, grad_k, grad_v = operator.backward(*tensors, problem)
        rotary, (band,) = self.call.rotary, self.call.bands
        positions_q, positions_k = self._positions(q, True), self._positions(rotated_k, False)
        grad_q = self._scaled(narrow(grad_q, q.shape[-1]), positions_q)
        grad_q = _rotate(grad_q, rotary, band.queries, self.first, positions_q, rotary.rotated_scale, inverse=True)
        grad_k = _rotate(narrow(grad_k, q.shape[-1]), rotary, band.keys, 0, positions_k, inverse=True)
        return grad_q, grad_k, narrow(grad_v, v.shape[-1])

    def _operator(self, q, k, v, extra: int = 0) -> tuple[Operator, Problem, int]:
        """Returns the operator, its problem, and the head_dim that all tensors are padded to."""
        call, lengths, width = self.call, None, max(q.shape[-1], v.shape[-1]) + extra
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            lengths = PackedLengths(call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k)
        problem = Problem(call.causal, flash_scale(call, self.seqlen), one_window(call) or None, lengths)
        operator = choose(self.operators, width, is_plain(problem, q.shape[-3], k.shape[-3]))
        if operator is None:
            raise ValueError(f"impl='sdpa' cannot serve this call: no operator of PyTorch takes head_dim {width} here")
        return operator, problem, width

    def _queries(self, q):
        """Returns rotated and scaled queries."""
        positions = self._positions(q, True)
        rotary = self.call.rotary
        rotated = _rotate(q, rotary, self.call.bands[0].queries, self.first, positions, rotary.rotated_scale)
        return self._scaled(rotated, positions)

    def _scaled(self, q, positions):
        """Returns q times the factors that depend on positions. positions: of ``_positions``."""
        scale = self.call.rotary.query_scale.by_position
        if scale == UNSCALED:
            return q
        if positions is None:
            positions = torch.arange(self.first, self.first + q.shape[1], device=q.device)
        factors = scale.of(positions, 0)[..., None, None]
        return (q * factors.to(torch.float32)).to(q.dtype).reshape(q.shape)

    def _positions(self, x, is_query: bool):
        """Returns the positions of rows, (batch, rows), or None if they count from ``first``, or from 0 for keys. The
        last query of a sequence is at the position of its last key."""
        call, rows = self.call, x.shape[-3]
        if call.positions is not None:
            return call.positions[:, call.positions.shape[1] - rows :] if is_query else call.positions[:, :rows]
        if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
            return None
        sequence, behind = token_sequences(call.cu_seqlens_q if is_query else call.cu_seqlens_k, rows)
        return (call.cu_seqlens_k.diff().long()[sequence] - behind)[None]


# ---- rotation


@lru_cache(maxsize=1024)
def one_map(rotary: Rotary, position_map: PositionMap, first: int = 0, scale: float = 1.0) -> Rotary:
    """Returns the scheme, as ``RotateCall`` expects it, that rotates row r by the map of position first + r. scale: the
    factor on rotated channels: ``rotated_scale`` for queries and 1 for keys, as in the other backends."""
    slope, offset = position_map.slope, position_map.offset + position_map.slope * first
    band = Band(0, math.inf, slope, offset, keys_rotated=True)
    frequencies = rotary.frequencies if slope or offset else (0.0,) * len(rotary.frequencies)
    return dataclasses.replace(rotary, bands=(band,), frequencies=frequencies, rotated_scale=scale)


def _rotate(x, rotary: Rotary, position_map: PositionMap, first: int, positions, scale: float = 1.0, inverse=False):
    """Rotates rows at positions first, first + 1, ..., or at explicit positions, with the Triton kernel if it is
    present. scale: as in ``one_map``."""
    scheme = one_map(rotary, position_map, first if positions is None else 0, scale)
    if not scheme.changes_channels:
        return x
    batch = x if x.ndim == 4 else x[None]
    batch = batch if batch.stride(-1) == 1 else batch.contiguous()
    call = RotateCall(inverted(scheme) if inverse else scheme, positions)
    return (_triton(x) or composed).rotate(batch, call).view(x.shape)
