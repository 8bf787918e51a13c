"""Computes ``attention_with_cache`` over keys at any positions, with torch's flash kernel and masks.

Masks are used if runs.py finds no long runs: for stored positions that are not consecutive, axial
positions, and schemes that map positions. Each block of visible keys is gathered and rotated by the positions of its
keys. For each band, the block is cut to the range of keys that at least one query attends to. A ``StepPart`` keeps the
cos and sin of the keys for the layers of a step.
"""

from __future__ import annotations

import torch

from ...calls.cache_tables import CacheLayer
from ...calls.int8 import loaded
from ...calls.records import accumulation_type, out_shape
from ..shared.host_rotation import KEY_FACTORS, QueryFactors, rotate, rotation_at, upcast
from ..shared.merging import add_partial
from ..shared.step_part import StepPart
from .pieces import cast_results, flash, flash_folded, flash_scale, widen


def attend(
    q: torch.Tensor, layer: CacheLayer, sequence: int, part: StepPart, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``out_shape``, lse) for the queries q (1, seqlen_q, heads_q, head_dim) of one sequence.

    size: keys per block."""
    call = part.call
    seqlen_q, rotary, dtype = q.shape[1], call.rotary, accumulation_type(q)
    head_dim_v = out_shape(q, layer.v)[-1]
    keys, queries = part.places(layer.k, sequence, seqlen_q)
    seqlen = keys.slot.numel()
    order_q, order_k = (torch.arange(first, seqlen, device="cpu") for first in (seqlen - seqlen_q, 0))
    # An axial scheme has one band, which compares ranks instead of positions.
    by_q, by_k = (order_q, order_k) if rotary.axis else (queries, keys.position)
    rotated_q = {
        band.queries: rotate(q, rotation_at(rotary, queries, band.queries, QueryFactors.of(call), dtype), rotary)
        for band in call.bands
    }
    scale, partials = flash_scale(call, seqlen), []
    for first in range(0, seqlen, size):
        block = slice(first, first + size)
        stored = (x if x is None else x[keys.page[block], keys.row[block]][None] for x in layer.rows)
        k, v = loaded(layer, stored, dtype)
        for band in call.bands:
            seen = band.holds(by_q[:, None], by_k[block])
            if call.causal:
                seen = seen & (order_k[block] <= order_q[:, None])
            columns, rows = (seen.any(axis).nonzero().flatten().tolist() for axis in (0, 1))
            if not columns:
                continue
            of_k, of_q = slice(columns[0], columns[-1] + 1), slice(rows[0], rows[-1] + 1)
            positions = keys.position[block][of_k]
            of_band = sequence, first, of_k.start, of_k.stop, band.keys, dtype
            if (rotation := part.key_rotations.get(of_band)) is None:
                rotation = rotation_at(rotary, positions, band.keys, KEY_FACTORS, dtype)
                part.key_rotations[of_band] = rotation
            rows_q, rows_k = rotated_q[band.queries][:, of_q], rotate(k[:, of_k], rotation, rotary)
            rows_v = widen(upcast(v[:, of_k]), q.shape[3])
            piece_out, piece_lse = _flash(rows_q, rows_k, rows_v, seen[of_q, of_k], scale)
            partials.append((of_q, piece_out[..., :head_dim_v], piece_lse))
    out = q.new_zeros((1, q.shape[2], seqlen_q, head_dim_v), dtype=dtype)
    lse = out.new_full((1, q.shape[2], seqlen_q), -torch.inf)
    for rows, piece_out, piece_lse in partials:
        add_partial(out[:, :, rows], lse[..., rows], piece_out, piece_lse)
    return cast_results(out.transpose(1, 2), lse, q.dtype)


def _flash(q, k, v, seen: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse), with the heads first, of q over k and v (1, rows, heads, head_dim). seen: the mask. Rows that
    see no key have out 0 and lse -inf."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if seen.all():
        return flash_folded(q, k, v, scale)
    mask = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    out, lse = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    unseen = ~seen.any(1)
    return out.masked_fill(unseen[:, None], 0), lse.masked_fill(unseen, -torch.inf)
