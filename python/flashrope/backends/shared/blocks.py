"""Reads a cache on the CPU in blocks of slots, which lie in memory as keys of one sequence do.

A block of a contiguous cache is a view. Pages are gathered one block at a time, in a layout with the heads before the
rows. Pages are not gathered if they are consecutive in memory and have the rows before the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...calls.addresses import neighbors
from ...calls.cache_tables import CacheLayer
from .runs import Run
from .step_part import StepPart

MIN_BLOCK, MAX_BLOCK = 256, 16384  # slots of a block
# Number of elements of a block of k. A gathered or rotated copy of a block of this size stays in the processor's
# caches. For larger copies, the system would allocate new pages of memory in every call.
BLOCK_ELEMENTS = 2**20


class Block(NamedTuple):
    position: float  # position of the first key
    order: int  # rank of the first key among the visible keys of the sequence
    k: torch.Tensor  # (batch, slots, heads_kv, head_dim)
    v: torch.Tensor  # like k, but its head_dim may be smaller
    k_scale: torch.Tensor | None = None  # (batch, slots, heads_kv)
    v_scale: torch.Tensor | None = None


class Group(NamedTuple):
    """Sequences with the same visible slots, and the blocks that hold these slots."""

    sequences: slice
    seqlen: int
    blocks: Iterator[Block]


def block_size(row: int) -> int:
    """Returns the number of slots of a block. row: number of elements of k in one slot, in all sequences that are read
    together."""
    return min(max(BLOCK_ELEMENTS // max(row, 1), MIN_BLOCK), MAX_BLOCK)


def groups(layer: CacheLayer, part: StepPart, whole: bool) -> Iterator[Group]:
    """Yields all sequences of a part. Neighbors in a contiguous cache that hold the same slots form one group.

    whole: whether a group's slots form one block. If False, they are divided into blocks of ``block_size``.
    """
    table, bounds, row = part.call.tables.block_table, part.bounds(layer.k), layer.k.shape[-2] * layer.k.shape[-1]
    alone = (slice(b, b + 1) for b in range(len(bounds)))
    for sequences in neighbors(bounds) if table is None else alone:
        (first, end), b0, b1 = bounds[sequences.start], sequences.start, sequences.stop
        size = max(end - first, 1) if whole else block_size((b1 - b0) * row)
        yield Group(sequences, end - first, _blocks(layer, table, b0, b1, first, end, size))


def blocks_of_runs(layer: CacheLayer, table: torch.Tensor | None, b: int, keys: list[Run], whole: bool):
    """Yields the blocks of the runs of one sequence. table: the block table. whole: as in ``groups``."""
    size = block_size(layer.k.shape[-2] * layer.k.shape[-1])
    for run in keys:
        for block in _blocks(layer, table, b, b + 1, run.slot, run.slot + run.keys, run.keys if whole else size):
            order = run.order + int(block.position)
            yield block._replace(position=run.position + block.position, order=order)


def _blocks(layer: CacheLayer, table, b0: int, b1: int, first: int, end: int, size: int) -> Iterator[Block]:
    """Yields the slots [first, end) of the sequences b0 to b1 - 1 in blocks of at most ``size``. If a block table is
    given, there is one sequence."""
    caches: tuple[torch.Tensor, ...] = layer.k, layer.v
    if layer.k_scale is not None and layer.v_scale is not None:
        caches += layer.k_scale, layer.v_scale
    for slot in range(first, end, size):
        stop = min(slot + size, end)
        views = (x[b0:b1, slot:stop] for x in caches)
        yield Block(slot - first, slot - first, *(views if table is None else _of_pages(caches, table[b0], slot, stop)))


def _of_pages(caches, table: torch.Tensor, slot: int, stop: int) -> Iterator[torch.Tensor]:
    """Yields the slots [slot, stop) of one sequence from each tensor of a cache.

    table: (max_pages,), the sequence's pages. Page numbers outside the cache are clamped.
    """
    pages_in_cache, page_size = caches[0].shape[:2]
    low, high = slot // page_size, -(-stop // page_size)
    pages = table[low:high].clamp(0, pages_in_cache - 1).tolist()
    skip, count = slot - low * page_size, stop - slot
    follow = pages == list(range(pages[0], pages[0] + len(pages)))
    for cache in caches:
        if follow and cache.stride(0) == page_size * cache.stride(1):
            rows = cache[pages[0] : pages[-1] + 1].flatten(0, 1)
        else:  # indexing with a list of pages would copy element by element, or would first copy the whole cache
            rows = torch.cat([cache[page].transpose(0, 1) for page in pages], 1).transpose(0, 1)
        yield rows[skip : skip + count][None]
