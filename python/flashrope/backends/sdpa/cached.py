"""Computes ``attention_with_cache`` on the CPU with torch's own flash kernel. The cache is read in place.

A sequence is read in blocks of slots (blocks.py), counted from its first slot. If a sequence is computed on its own,
its results are bitwise identical for a contiguous and for a paged cache.

With explicit positions, runs.py divides a sequence into runs, and each run is read like a sequence. Sequences whose
positions have no long runs, or have several axes, are computed with masks (masked.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ...calls.cache_tables import CacheLayer
from ...calls.int8 import loaded
from ...calls.records import CacheCall, accumulation_type, out_shape, unseen
from ...schemes.bands import PositionMap, chunk_of, have_maps
from ..shared.blocks import Block, block_size, blocks_of_runs, groups
from ..shared.host_rotation import rotate, rotation_for, upcast
from ..shared.runs import Rows, bands_between
from ..shared.step_part import StepPart, joined
from . import masked
from .pieces import (
    cast_results,
    flash_piece,
    flash_scale,
    gather_keys,
    gather_rows,
    merge_partials,
    plan,
    single_piece,
    widen,
)


def attend(
    q: torch.Tensor, layer: CacheLayer, part: StepPart, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``out_shape``, lse in float32 or float64) of a batch of sequences. out: not written."""
    if not (q.numel() and layer.k.numel()):
        return unseen(q, layer.v)
    return joined(q, layer, _shares(q, layer, part))


def _shares(
    q: torch.Tensor, layer: CacheLayer, part: StepPart
) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
    """Yields (sequences, their out and lse)."""
    if part.call.tables.positions is not None:
        for b in range(q.shape[0]):
            yield slice(b, b + 1), _attend_placed(q, layer, part, b)
        return
    for sequences, seqlen, blocks in groups(layer, part, whole=False):
        own_q, found = q[sequences], None
        if sequences == slice(0, q.shape[0]):
            found = _attend_single(own_q, layer, part, seqlen)
        yield sequences, found or _attend(own_q, blocks, seqlen, part.call, layer, [Rows.last(q.shape[1], seqlen)])


def _attend_single(
    q: torch.Tensor, layer: CacheLayer, part: StepPart, seqlen: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Computes the result of ``_attend`` for a contiguous cache in one kernel call, without the bookkeeping of
    ``_attend``. A single piece must cover all rows and keys, and a single block must hold all keys.

    Returns None if there is no such piece or block. Also returns None if keys do not rotate: ``_attend`` then leaves k
    and v in their dtype, while this function would upcast v.
    """
    call, rotary, row = part.call, part.call.rotary, q.shape[0] * layer.k.shape[2] * q.shape[3]
    if call.tables.block_table is not None or layer.k_scale is not None or not 0 < seqlen <= block_size(row):
        return None
    first = part.bounds(layer.k)[0][0]
    single = single_piece(rotary, call.causal, q.shape[1], seqlen, accumulation_type(q))
    if single is None or single.k_rotation is None:
        return None
    rows = layer.k.narrow(1, first, seqlen), layer.v.narrow(1, first, seqlen)
    k, v = loaded(layer, (*rows, None, None), accumulation_type(q))
    k = rotate(k, single.k_rotation, rotary).transpose(1, 2)
    v = widen(upcast(v), rotary.head_dim).transpose(1, 2)
    rotated_q = rotate(q, single.q_rotation, rotary).transpose(1, 2)
    out, lse = flash_piece(rotated_q, k, v, single.piece, flash_scale(call, seqlen))
    return cast_results(out[..., : layer.v.shape[-1]].transpose(1, 2), lse, q.dtype)


def _attend_placed(q: torch.Tensor, layer: CacheLayer, part: StepPart, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with the queries of sequence b, for tables with explicit positions."""
    call, own_q, block_table = part.call, q[b : b + 1], part.call.tables.block_table
    # position maps need absolute positions, but positions in a run are relative to its first key
    if not call.rotary.axis and not have_maps(call.bands):
        placed = part.placed(layer.k, q.shape[1])[b]
        if placed.long_runs:
            blocks = blocks_of_runs(layer, block_table, b, placed.keys, whole=False)
            return _attend(own_q, blocks, placed.seqlen, call, layer, placed.rows())
    return masked.attend(own_q, layer, b, part, block_size(layer.k.shape[-2] * q.shape[-1]))


def _attend(
    q: torch.Tensor, blocks: Iterable[Block], seqlen: int, call: CacheCall, layer: CacheLayer, queries: list[Rows]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out, like q but with the head_dim of the values, and lse (batch, heads_q, seqlen_q). All sequences have
    seqlen keys. layer: the layer from which the blocks come. queries: the positions of the query rows."""
    seqlen_q, rotary, head_dim_v = q.shape[1], call.rotary, out_shape(q, layer.v)[-1]
    rotated_q: dict[tuple[PositionMap, int], torch.Tensor] = {}
    partials, scale = [], flash_scale(call, seqlen)
    for block in blocks:
        position = block.position
        k, v = loaded(layer, block[2:], accumulation_type(q))
        v = widen(v, k.shape[-1])
        start = int(position) if chunk_of(call.bands) else 0
        for rows in queries:
            own_q = q if rows.rows == seqlen_q else q[:, rows.row : rows.row + rows.rows]
            bands, shift = bands_between(call.bands, call.causal, rows, position, block.order)
            for q_map, k_map, pieces in plan(bands, rows.rows, k.shape[1], shift, start):
                if (q_map, rows.row) not in rotated_q:
                    q_rotation = rotation_for(own_q, call, q_map, rows.position, True)
                    rotated_q[q_map, rows.row] = rotate(own_q, q_rotation, rotary)
                first = min(piece.key for piece in pieces)
                stop = max(piece.key + (piece.repeat - 1) * piece.stride + piece.keys for piece in pieces)
                covers_block = stop - first == k.shape[1]
                band_k, band_v = (k, v) if covers_block else (k[:, first:stop], v[:, first:stop])
                k_rotation = rotation_for(band_k, call, k_map, position + first, False)
                if k_rotation is not None:  # the rotated keys are float32 or float64
                    band_k, band_v = rotate(band_k, k_rotation, rotary), upcast(band_v)
                band_q = rotated_q[q_map, rows.row]
                band_q = band_q if band_q.dtype == band_k.dtype else band_q.to(band_k.dtype)
                for piece in pieces:
                    local = piece._replace(key=piece.key - first) if first else piece
                    k_tile, v_tile = gather_keys(band_k, local), gather_keys(band_v, local)
                    piece_out, lse = flash_piece(gather_rows(band_q, local), k_tile, v_tile, local, scale)
                    own = piece._replace(row=piece.row + rows.row) if rows.row else piece
                    partials.append((own, piece_out[..., :head_dim_v], lse))
    return merge_partials(partials, q, head_dim_v)
