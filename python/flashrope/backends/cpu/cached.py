"""Computes ``attention_with_cache`` on the CPU with torch's own flash kernel. The cache is read in place.

A sequence is read in blocks of slots, counted from its first slot. A block of a contiguous cache is a view. Pages are
gathered one block at a time, in a layout with the heads before the rows. Pages are not gathered if they are consecutive
in memory and have the rows before the heads. If a sequence is computed on its own, its results are bitwise identical
for a contiguous and for a paged cache.

If the compiled kernels are loaded, they compute calls with a few queries per sequence (decode.py) and long chunks
(tiles.py).

With explicit positions, runs.py divides a sequence into runs, and each run is read like a sequence. Sequences whose
positions have no long runs, or have several axes, are computed with masks (masked.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...rotary.bands import PositionMap, chunk_of, have_maps
from ..cache_tables import CacheLayer
from ..calls import AttentionCall, CacheCall, accumulation_type, cached_out_shape
from ..quantized import dequantize
from . import decode, loader, masked, runs, tiles
from .library import Library
from .part import Part
from .pieces import (
    add_partial,
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
from .rotation import rotate, rotation_for, upcast

MIN_BLOCK, MAX_BLOCK = 256, 16384  # slots of a block
# Number of elements of a block of k. A gathered or rotated copy of a block of this size stays in the processor's
# caches. For larger copies, the system would allocate new pages of memory in every call.
BLOCK_ELEMENTS = 2**20
COMPILED_ROWS = 64  # with at least this many queries, packing the keys for the compiled kernel is worthwhile


def _block_size(row: int) -> int:
    """Returns the number of slots of a block. row: number of elements of k in one slot, in all sequences that are read
    together."""
    return min(max(BLOCK_ELEMENTS // max(row, 1), MIN_BLOCK), MAX_BLOCK)


def attend(
    q: torch.Tensor, layer: CacheLayer, part: Part, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``cached_out_shape``, lse in float32 or float64) of a batch of sequences. out: a contiguous
    tensor of this shape, to which the compiled kernels may write the result."""
    call, tables, k_cache = part.call, part.call.tables, layer.k
    if layer.key_weight is not None:
        layer = layer._replace(key_weight=layer.key_weight.contiguous())  # required by the kernels
    if tables.positions is not None:
        return _attend_placed(q, layer, part)
    if (compiled := loader.load()) and decode.serves(q, layer, call):
        return decode.decode(compiled, q, layer, part, out=out)
    (batch, seqlen_q, heads_q, _), block_table = q.shape, tables.block_table
    bounds = part.bounds(k_cache)
    row = k_cache.shape[-2] * q.shape[-1]
    caches = _caches(layer)
    if compiled and (seqlen_q < COMPILED_ROWS or not tiles.serves(q, k_cache, layer.v.shape[-1], call)):
        compiled = None
    same_bounds = block_table is None and bounds and bounds == bounds[:1] * batch
    if same_bounds:
        first, end = bounds[0]
        size = max(end - first, 1) if compiled else _block_size(batch * row)
        single = 0 < end - first <= size and not compiled and len(caches) == 2
        if single and (result := _attend_single(q, layer, first, end, call)):
            return result
        blocks = _contiguous_blocks(caches, 0, batch, first, end, size)
        return _attend(q, blocks, end - first, call, compiled, layer)
    out = q.new_zeros(cached_out_shape(q, layer))
    lse = q.new_full((batch, heads_q, seqlen_q), float("-inf"), dtype=accumulation_type(q))
    for b0, b1, first, end in _groups(bounds, together=block_table is None):
        size = max(end - first, 1) if compiled else _block_size((b1 - b0) * row)
        blocks = (
            _paged_blocks(caches, block_table[b0], first, end, size)
            if block_table is not None
            else _contiguous_blocks(caches, b0, b1, first, end, size)
        )
        out[b0:b1], lse[b0:b1] = _attend(q[b0:b1], blocks, end - first, call, compiled, layer)
    return out, lse


def _attend_single(
    q: torch.Tensor, layer: CacheLayer, first: int, end: int, call: CacheCall
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Computes the result of ``_attend`` in one kernel call, without the bookkeeping of ``_attend``. A single piece
    must cover all rows and keys, and a single block must hold all keys.

    Returns None if there is no such piece or block. Also returns None if keys do not rotate: ``_attend`` then leaves k
    and v in their dtype, while this function would upcast v.
    """
    seqlen, rotary = end - first, call.rotary
    single = single_piece(rotary, call.causal, q.shape[1], seqlen, accumulation_type(q)) if q.numel() else None
    if single is None or single.k_rotation is None:
        return None
    k = layer.k.narrow(1, first, seqlen)
    if layer.key_weight is not None:
        k = upcast(k) * layer.key_weight
    k = rotate(k, single.k_rotation, rotary).transpose(1, 2)
    v = widen(upcast(layer.v.narrow(1, first, seqlen)), rotary.head_dim).transpose(1, 2)
    rotated_q = rotate(q, single.q_rotation, rotary).transpose(1, 2)
    out, lse = flash_piece(rotated_q, k, v, single.piece, flash_scale(call, seqlen))
    return cast_results(out[..., : layer.v.shape[-1]].transpose(1, 2), lse, q.dtype)


def _attend_placed(q: torch.Tensor, layer: CacheLayer, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the same as ``attend``, for tables with explicit positions."""
    (batch, seqlen_q, heads_q, _), call, k_cache = q.shape, part.call, layer.k
    placed: list[runs.Placed] = []
    # position maps need absolute positions, but positions in a run are relative to its first key
    if not call.rotary.axis and not have_maps(call.bands):
        placed = part.placed(k_cache, seqlen_q)
    in_runs = [each.long_runs for each in placed] if placed else [False] * batch
    if (compiled := loader.load()) and any(in_runs) and decode.serves(q, layer, call):
        served = [x if x.long_runs else x._replace(keys=[]) for x in placed]
        out, lse = decode.decode(compiled, q, layer, part, served)
        left = [b for b in range(batch) if not in_runs[b]]
    else:
        out = q.new_zeros(cached_out_shape(q, layer))
        lse = q.new_full((batch, heads_q, seqlen_q), float("-inf"), dtype=accumulation_type(q))
        left = list(range(batch if k_cache.numel() else 0))
    if compiled and (seqlen_q < COMPILED_ROWS or not tiles.serves(q, k_cache, layer.v.shape[-1], call)):
        compiled = None
    caches, block_table = _caches(layer), call.tables.block_table
    for b in left:
        if in_runs[b]:
            blocks, seqlen = _blocks_of_runs(caches, block_table, b, placed[b].keys, q, compiled), placed[b].seqlen
            results = _attend(q[b : b + 1], blocks, seqlen, call, compiled, layer, placed[b].rows())
        else:
            results = masked.attend(q[b : b + 1], layer, b, part, _block_size(k_cache.shape[-2] * q.shape[-1]))
        out[b : b + 1], lse[b : b + 1] = results
    return out, lse


def _blocks_of_runs(caches, block_table, b: int, keys: list[runs.Run], q, compiled) -> Iterator[Block]:
    size = _block_size(caches[0].shape[-2] * q.shape[-1])
    for run in keys:
        most, end = run.keys if compiled else size, run.slot + run.keys
        if block_table is not None:
            blocks = _paged_blocks(caches, block_table[b], run.slot, end, most)
        else:
            blocks = _contiguous_blocks(caches, b, b + 1, run.slot, end, most)
        for block in blocks:
            order = run.order + int(block.position)
            yield block._replace(position=run.position + block.position, order=order)


def _groups(bounds: list[tuple[int, int]], together: bool) -> list[tuple[int, int, int, int]]:
    """Returns (b0, b1, first, end): sequences [b0, b1) hold the slots [first, end).

    together: whether neighbors with the same bounds form one group. If False, every sequence is its own group.
    """
    starts = [b for b in range(len(bounds)) if b == 0 or not together or bounds[b] != bounds[b - 1]]
    return [(b0, b1, *bounds[b0]) for b0, b1 in zip(starts, [*starts, len(bounds)][1:], strict=True)]


class Block(NamedTuple):
    position: float  # position of the first key
    order: int  # rank of the first key among the visible keys of the sequence
    k: torch.Tensor  # (batch, slots, heads_kv, head_dim)
    v: torch.Tensor  # like k, but its head_dim may be smaller
    k_scale: torch.Tensor | None = None  # (batch, slots, heads_kv, 1)
    v_scale: torch.Tensor | None = None

    def keys_and_values(self, dtype: torch.dtype, key_weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v, both with the head_dim of k. If they are quantized, or if keys are weighted, both are
        converted to dtype."""
        k, v = self.k, self.v
        if self.k_scale is not None and self.v_scale is not None:
            k, v = (dequantize(x, s[..., 0], dtype) for x, s in ((k, self.k_scale), (v, self.v_scale)))
        if key_weight is not None:
            k, v = k.to(dtype) * key_weight, v.to(dtype)
        return k, widen(v, k.shape[-1])


def _caches(layer: CacheLayer) -> tuple[torch.Tensor, ...]:
    """Returns the layer's tensors for a Block, each with four dimensions."""
    if layer.k_scale is None or layer.v_scale is None:
        return layer.k, layer.v
    return layer.k, layer.v, layer.k_scale[..., None], layer.v_scale[..., None]


def _contiguous_blocks(caches, b0: int, b1: int, first: int, end: int, size: int) -> Iterator[Block]:
    for slot in range(first, end, size):
        stop = min(slot + size, end)
        yield Block(slot - first, slot - first, *(x[b0:b1, slot:stop] for x in caches))


def _paged_blocks(caches, table: torch.Tensor, first: int, end: int, size: int) -> Iterator[Block]:
    """Yields the slots [first, end) of one sequence in blocks of at most ``size``.

    table: (max_pages,), the sequence's pages. Page numbers outside the cache are clamped.
    """
    pages_in_cache, page_size = caches[0].shape[:2]
    for slot in range(first, end, size):
        stop = min(slot + size, end)
        low, high = slot // page_size, -(-stop // page_size)
        pages = table[low:high].clamp(0, pages_in_cache - 1).tolist()
        skip, count = slot - low * page_size, stop - slot
        follow = pages == list(range(pages[0], pages[0] + len(pages)))
        rows = (
            cache[pages[0] : pages[-1] + 1].flatten(0, 1)
            if follow and cache.stride(0) == page_size * cache.stride(1)
            # Indexing with a list of pages would copy element by element, or would first copy the whole cache.
            else torch.cat([cache[page].transpose(0, 1) for page in pages], 1).transpose(0, 1)
            for cache in caches
        )
        yield Block(slot - first, slot - first, *(x[skip : skip + count][None] for x in rows))


def _attend(
    q: torch.Tensor,
    blocks: Iterator[Block],
    seqlen: int,
    call: CacheCall,
    compiled: Library | None,
    layer: CacheLayer,
    queries: list[runs.Rows] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out, like q but with the head_dim of the values, and lse (batch, heads_q, seqlen_q). All sequences have
    seqlen keys. layer: the layer from which the blocks come. The layer gives the head_dim of values and the key
    weights.

    queries: the positions of the query rows. None: the last positions. If they are given, the compiled path takes one
    block per contiguous run of keys, and the fallback takes a single block with all keys.
    """
    seqlen_q, rotary, head_dim_v, key_weight = q.shape[1], call.rotary, cached_out_shape(q, layer)[-1], layer.key_weight
    queries = queries or [runs.Rows(0, seqlen_q, seqlen - seqlen_q, seqlen - seqlen_q)]
    if compiled is not None and seqlen:
        return _attend_tiles(compiled, q, blocks, seqlen, call, layer, queries)
    rotated_q: dict[tuple[PositionMap, int], torch.Tensor] = {}
    partials, scale = [], flash_scale(call, seqlen)
    for block in blocks if q.numel() else ():
        position, (k, v) = block.position, block.keys_and_values(accumulation_type(q), key_weight)
        start = int(position) if chunk_of(call.bands) else 0
        for rows in queries:
            own_q = q if rows.rows == seqlen_q else q[:, rows.row : rows.row + rows.rows]
            bands, shift = runs.bands_between(call.bands, call.causal, rows, position, block.order)
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


def _attend_tiles(
    compiled: Library,
    q: torch.Tensor,
    blocks: Iterator[Block],
    seqlen: int,
    call: CacheCall,
    layer: CacheLayer,
    queries: list[runs.Rows],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with the kernel of tiles.py: each contiguous run of queries to each run of keys that it can see."""
    attention, whole = AttentionCall(call.rotary, call.causal, call.softmax_scale), (q.shape[1], seqlen)
    out = q.new_zeros(cached_out_shape(q, layer), dtype=torch.float32)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for block in blocks:
        k, v = block.k, block.v
        scales = None if block.k_scale is None or block.v_scale is None else (block.k_scale, block.v_scale)
        for rows in queries:
            bands, shift = runs.bands_between(call.bands, call.causal, rows, block.position, block.order)
            place = tiles.Place(bands, shift, rows.position, block.position, seqlen)
            if (rows.rows, k.shape[1]) == whole:
                return tiles.forward(compiled, q, k, v, attention, scales, place, key_weight=layer.key_weight)
            if not any(band.start < shift + rows.rows and band.stop > shift - k.shape[1] + 1 for band in bands):
                continue
            own = slice(rows.row, rows.row + rows.rows)
            if scales is None and not compiled.multiplies(q.dtype, q.shape[1]):
                k, v = k.to(torch.float32), v.to(torch.float32)  # converted once for all runs of queries
            run_out, run_lse = tiles.forward(
                compiled, q[:, own], k, v, attention, scales, place, torch.float32, layer.key_weight
            )
            add_partial(out[:, own].transpose(1, 2), lse[..., own], run_out.transpose(1, 2), run_lse)
    return out.to(q.dtype), lse
