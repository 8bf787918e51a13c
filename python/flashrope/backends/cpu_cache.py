"""Attention over a cache on the CPU, of torch's own flash kernel for the CPU. The cache is read where it lies.

A sequence is read in blocks of BLOCK slots, counted from its first: of a contiguous cache, and of pages that follow each
other, a block is a view; pages strewn about are gathered one block at a time. Paged and contiguous results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import CacheCall, Call
from .cpu_pieces import Piece, flash, keys_of, mask, merged, plan, rows_of
from .cpu_turns import accumulation_type, turn, turns_for, upcast

BLOCK = 8192  # slots


def append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table) -> None:
    """Writes k, v (batch, seqlen_new, heads_kv, head_dim) to the slots behind cache_seqlens. What has no place is dropped."""
    batch, seqlen_new = k.shape[:2]
    rows = k_cache.shape[1]
    lengths = cache_seqlens.tolist()
    if block_table is None:
        length = max(lengths[0], 0) if batch else 0
        if lengths.count(lengths[0] if batch else 0) == batch and length + seqlen_new <= rows:
            k_cache[:, length:length + seqlen_new] = k
            v_cache[:, length:length + seqlen_new] = v
            return
    capacity = rows if block_table is None else rows * block_table.shape[1]
    slot = cache_seqlens.to(torch.int64).clamp(0, capacity)[:, None] + torch.arange(seqlen_new)
    fits = slot < capacity
    if not fits.any():
        return
    if block_table is None:
        page, row = torch.arange(batch)[:, None].expand_as(slot), slot
    else:
        page, row = block_table.to(torch.int64).gather(1, (slot // rows).clamp(max=block_table.shape[1] - 1)), slot % rows
        fits &= (page >= 0) & (page < k_cache.shape[0])
    at = page[fits], row[fits]
    k_cache.index_put_(at, k[fits])
    v_cache.index_put_(at, v[fits])


def attention_with_cache(q, k_cache, v_cache, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse float32 or float64)."""
    batch, seqlen_q, heads_q, _ = q.shape
    together = list(_sequences(k_cache, call, batch))
    if len(together) == 1 and call.block_table is None:
        return _attend(q, _views(k_cache, v_cache, *together[0]), together[0][3] - together[0][2], call)
    out = q.new_zeros(q.shape)
    lse = q.new_full((batch, heads_q, seqlen_q), float("-inf"), dtype=accumulation_type(q))
    for b0, b1, first, end in together:
        blocks = _pages(k_cache, v_cache, call.block_table[b0], first, end) if call.block_table is not None else \
            _views(k_cache, v_cache, b0, b1, first, end)
        out[b0:b1], lse[b0:b1] = _attend(q[b0:b1], blocks, end - first, call)
    return out, lse


def _sequences(k_cache, call: CacheCall, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """(b0, b1, first, end): sequences [b0, b1) hold the slots [first, end). Lengths are kept inside the capacity."""
    capacity, lengths = call.capacity(k_cache) if k_cache.shape[0] else 0, call.cache_seqlens.tolist()
    ends = [min(min(max(length, 0), capacity) + call.seqlen_new, capacity) for length in lengths]
    pads = [0] * batch if call.cache_leftpad is None else [min(max(p, 0), end) for p, end in zip(call.cache_leftpad.tolist(), ends, strict=True)]
    b0 = 0
    for b in range(1, batch + 1):
        if b == batch or call.block_table is not None or (pads[b], ends[b]) != (pads[b0], ends[b0]):
            yield b0, b, pads[b0], ends[b0]
            b0 = b


Block = tuple[int, torch.Tensor, torch.Tensor]  # position of its first key, k and v (batch, slots, heads_kv, head_dim)


def _views(k_cache, v_cache, b0: int, b1: int, first: int, end: int) -> Iterator[Block]:
    for slot in range(first, end, BLOCK):
        stop = min(slot + BLOCK, end)
        yield slot - first, k_cache[b0:b1, slot:stop], v_cache[b0:b1, slot:stop]


def _pages(k_cache, v_cache, table: torch.Tensor, first: int, end: int) -> Iterator[Block]:
    size = k_cache.shape[1]
    for slot in range(first, end, BLOCK):
        stop = min(slot + BLOCK, end)
        low, high = slot // size, -(-stop // size)
        pages = table[low:high].to(torch.int64).clamp_(0, k_cache.shape[0] - 1)
        skip, count = slot - low * size, stop - slot
        page = int(pages[0])
        if torch.equal(pages, torch.arange(page, page + high - low)):
            of_block = (cache[page:page + high - low] for cache in (k_cache, v_cache))
        else:
            of_block = (cache.index_select(0, pages) for cache in (k_cache, v_cache))
        yield slot - first, *(x.flatten(0, 1)[skip:skip + count][None] for x in of_block)


def _attend(q, blocks: Iterator[Block], seqlen: int, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, lse (batch, heads_q, seqlen_q) of sequences of one length."""
    scheme = Call(call.rotary, call.causal, call.softmax_scale)
    seqlen_q = q.shape[1]
    turned: dict[tuple[float, float], torch.Tensor] = {}
    parts = []
    for position, k, v in blocks if q.numel() else ():
        for slope, offset, pieces in plan(call.bands, seqlen_q, k.shape[1], seqlen - seqlen_q - position):
            if (slope, offset) not in turned:
                turned[slope, offset] = turn(q, turns_for(q, scheme, slope, offset, seqlen - seqlen_q, True), call.rotary)
            first = min(piece.key for piece in pieces)
            stop = max(piece.key + (piece.repeat - 1) * piece.stride + piece.keys for piece in pieces)
            near_k, near_v = k[:, first:stop], v[:, first:stop]
            turns_k = turns_for(near_k, scheme, slope, 0.0, position + first, False)
            if turns_k is not None:  # in float32 anyway
                near_k, near_v = turn(near_k, turns_k, call.rotary), upcast(near_v)
            of_q = turned[slope, offset].to(near_k.dtype)
            for piece in pieces:
                parts.append((piece, *_flash(of_q, near_k, near_v, piece._replace(key=piece.key - first), call.score_scale)))
    if len(parts) == 1 and parts[0][0].rows == seqlen_q and not parts[0][0].reversed:
        out, lse = parts[0][1].transpose(1, 2), parts[0][2]
    else:
        out, lse = merged(parts, q)
    return (out if out.dtype == q.dtype else out.to(q.dtype)).contiguous(), lse.contiguous()


def _flash(q, k, v, piece: Piece, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch * repeat, heads_q, rows, head_dim) and lse of one piece."""
    q, k, v = rows_of(q, piece), keys_of(k, piece), keys_of(v, piece)
    if piece.causal:
        return flash(q, k, v, 0.0, not piece.width, attn_mask=mask(piece, q.dtype), scale=scale)
    # All see all: the query heads of one key head become rows, so that the keys are read once. torch's half-precision
    # kernels are three times slower with a single row.
    heads_q, heads_kv, rows = q.shape[1], k.shape[1], q.shape[2]
    folded = q.reshape(q.shape[0], heads_kv, heads_q // heads_kv * rows, q.shape[3])
    single = folded.shape[2] == 1 and q.dtype in (torch.float16, torch.bfloat16)
    out, lse = flash(folded.expand(-1, -1, 2, -1) if single else folded, k, v, 0.0, False, scale=scale)
    if single:
        out, lse = out[:, :, :1], lse[:, :, :1]
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
