"""Attention over a cache on the CPU, of torch's own flash kernel for the CPU. The cache is read where it lies.

A sequence is read in blocks of slots, counted from its first: of a contiguous cache, and of pages that follow each
other, a block is a view; pages strewn about are gathered one block at a time. A sequence by itself has the same bits in
both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from ...rotary import Rotary
from ..base import CacheCall, places_behind
from .pieces import Piece, flash, joined, keys_of, like_queries, mask, one_piece, plan, rows_of
from .rotation import accumulation_type, turn, turns_for, upcast

LEAST_BLOCK, BLOCK = 256, 16384  # slots
TURNED_BLOCK = (
    2**20
)  # numbers; where all keys are turned, larger copies of them would be fresh pages of memory in every call


@lru_cache(maxsize=64)
def _block_size(rotary: Rotary, causal: bool, row: int) -> int:
    """Slots of one block; row: numbers in a slot of the sequences that are read together."""
    reach = max((max(band.stop, -band.start) for band in rotary.bands_for(causal) if band.slope), default=0)
    turned = max(TURNED_BLOCK // max(row, 1), LEAST_BLOCK)
    return min(turned, BLOCK) if reach > turned and any(rotary.frequencies) else BLOCK


def append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table) -> None:
    """Writes k, v (batch, seqlen_new, heads_kv, head_dim) to the slots behind cache_seqlens. What has no place is
    dropped."""
    batch, seqlen_new, _, _ = k.shape
    if block_table is None:
        lengths = cache_seqlens.tolist()
        length = max(lengths[0], 0) if batch else 0
        if lengths == lengths[:1] * batch and length + seqlen_new <= k_cache.shape[1]:
            k_cache.narrow(1, length, seqlen_new).copy_(k)  # half the time of a slice
            v_cache.narrow(1, length, seqlen_new).copy_(v)
            return
    page, row, fits = places_behind(k_cache, cache_seqlens, block_table, seqlen_new)
    at = page[fits], row[fits]
    k_cache.index_put_(at, k[fits])
    v_cache.index_put_(at, v[fits])


def attention_with_cache(q, k_cache, v_cache, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse float32 or float64)."""
    batch, seqlen_q, heads_q, _ = q.shape
    bounds = call.bounds(k_cache)
    alike = call.block_table is None and bounds and bounds == bounds[:1] * batch
    if (
        alike
        and 0 < bounds[0][1] - bounds[0][0] <= LEAST_BLOCK
        and (done := _one_piece(q, k_cache, v_cache, *bounds[0], call))
    ):
        return done
    row = k_cache.shape[-2] * k_cache.shape[-1]
    if alike:
        first, end = bounds[0]
        size = _block_size(call.rotary, call.causal, batch * row)
        return (
            0 < end - first <= size
            and _one_piece(q, k_cache, v_cache, first, end, call)
            or _attend(q, _views(k_cache, v_cache, 0, batch, first, end, size), end - first, call)
        )
    out = q.new_zeros(q.shape)
    lse = q.new_full((batch, heads_q, seqlen_q), float("-inf"), dtype=accumulation_type(q))
    for b0, b1, first, end in _sequences(bounds, together=call.block_table is None):
        size = _block_size(call.rotary, call.causal, (b1 - b0) * row)
        blocks = (
            _pages(k_cache, v_cache, call.block_table[b0], first, end, size)
            if call.block_table is not None
            else _views(k_cache, v_cache, b0, b1, first, end, size)
        )
        out[b0:b1], lse[b0:b1] = _attend(q[b0:b1], blocks, end - first, call)
    return out, lse


def _one_piece(q, k_cache, v_cache, first: int, end: int, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What ``_attend`` returns of one block, without its bookkeeping, where one band holds all its keys; else None."""
    seqlen, rotary = end - first, call.rotary
    whole = one_piece(rotary, call.causal, q.shape[1], seqlen, accumulation_type(q)) if q.numel() else None
    if whole is None or whole[2] is None:
        return None
    piece, turns_q, turns_k = whole
    k, v = turn(k_cache.narrow(1, first, seqlen), turns_k, rotary), upcast(v_cache.narrow(1, first, seqlen))
    out, lse = _flash(
        turn(q, turns_q, rotary).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), piece, call.score_scale
    )
    return like_queries(out.transpose(1, 2), lse, q)


def _sequences(bounds: list[tuple[int, int]], together: bool) -> list[tuple[int, int, int, int]]:
    """(b0, b1, first, end): sequences [b0, b1) hold the slots [first, end); one at a time unless those alike go
    together."""
    starts = [b for b in range(len(bounds)) if b == 0 or not together or bounds[b] != bounds[b - 1]]
    return [(b0, b1, *bounds[b0]) for b0, b1 in zip(starts, [*starts[1:], len(bounds)], strict=True)]


Block = tuple[int, torch.Tensor, torch.Tensor]  # position of its first key, k and v (batch, slots, heads_kv, head_dim)


def _views(k_cache, v_cache, b0: int, b1: int, first: int, end: int, size: int) -> Iterator[Block]:
    for slot in range(first, end, size):
        stop = min(slot + size, end)
        yield slot - first, k_cache[b0:b1, slot:stop], v_cache[b0:b1, slot:stop]


def _pages(k_cache, v_cache, table: torch.Tensor, first: int, end: int, size: int) -> Iterator[Block]:
    page_size = k_cache.shape[1]
    for slot in range(first, end, size):
        stop = min(slot + size, end)
        low, high = slot // page_size, -(-stop // page_size)
        pages = table[low:high].to(torch.int64).clamp_(0, k_cache.shape[0] - 1)
        skip, count = slot - low * page_size, stop - slot
        page = int(pages[0])
        if torch.equal(pages, torch.arange(page, page + high - low)):
            of_block = (cache[page : page + high - low] for cache in (k_cache, v_cache))
        else:
            of_block = (cache.index_select(0, pages) for cache in (k_cache, v_cache))
        yield slot - first, *(x.flatten(0, 1)[skip : skip + count][None] for x in of_block)


def _attend(q, blocks: Iterator[Block], seqlen: int, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, lse (batch, heads_q, seqlen_q) of sequences of one length."""
    seqlen_q = q.shape[1]
    turned: dict[tuple[float, float], torch.Tensor] = {}
    parts = []
    for position, k, v in blocks if q.numel() else ():
        for slope, offset, pieces in plan(call.bands, seqlen_q, k.shape[1], seqlen - seqlen_q - position):
            if (slope, offset) not in turned:
                turned[slope, offset] = turn(q, turns_for(q, call, slope, offset, seqlen - seqlen_q, True), call.rotary)
            first = min(piece.key for piece in pieces)
            stop = max(piece.key + (piece.repeat - 1) * piece.stride + piece.keys for piece in pieces)
            whole = stop - first == k.shape[1]
            near_k, near_v = (k, v) if whole else (k[:, first:stop], v[:, first:stop])
            turns_k = turns_for(near_k, call, slope, 0.0, position + first, False)
            if turns_k is not None:  # in float32 anyway
                near_k, near_v = turn(near_k, turns_k, call.rotary), upcast(near_v)
            of_q = turned[slope, offset]
            of_q = of_q if of_q.dtype == near_k.dtype else of_q.to(near_k.dtype)
            for piece in pieces:
                local = piece._replace(key=piece.key - first) if first else piece
                parts.append(
                    (
                        piece,
                        *_flash(
                            rows_of(of_q, local),
                            keys_of(near_k, local),
                            keys_of(near_v, local),
                            local,
                            call.score_scale,
                        ),
                    )
                )
    return joined(parts, q)


def _flash(q, k, v, piece: Piece, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch * repeat, heads_q, rows, head_dim) and lse of one piece; q, k, v as ``rows_of`` and ``keys_of`` cut
    them."""
    if piece.causal:
        return flash(q, k, v, 0.0, not piece.width, attn_mask=mask(piece, q.dtype), scale=scale)
    # All see all: the query heads of one key head become rows, so that the keys are read once. torch's half-precision
    # kernels are three times slower with a single row.
    batch, heads_q, rows, head_dim = q.shape
    heads_kv, half = k.shape[1], q.dtype in (torch.float16, torch.bfloat16)
    if heads_q == heads_kv and not (half and rows == 1):
        return flash(q, k, v, 0.0, False, scale=scale)
    folded = q.reshape(batch, heads_kv, heads_q // heads_kv * rows, head_dim)
    single = half and folded.shape[2] == 1
    out, lse = flash(folded.expand(-1, -1, 2, -1) if single else folded, k, v, 0.0, False, scale=scale)
    if single:
        out, lse = out[:, :, :1], lse[:, :, :1]
    return out.reshape(q.shape), lse.reshape(batch, heads_q, rows)
