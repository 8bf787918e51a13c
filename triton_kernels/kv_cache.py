"""Finds the keys of a sequence in a cache. Lengths and page numbers are user data, so they are clamped here."""

import triton
import triton.language as tl

from .arguments import decode_int


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def cache_bounds(cache, batch, length_q):
    """Returns (first slot, number of keys) of a sequence. Both are clamped, so that wrong lengths cannot exceed the
    capacity. length_q: the sequence's number of packed queries, or None if queries are not packed."""
    capacity, new = decode_int(cache.capacity), decode_int(cache.seqlen_new)
    if length_q is not None:
        new = tl.where(new < 0, length_q, new)
    end = tl.minimum(clamp(tl.load(cache.seqlens + batch), 0, capacity) + new, capacity)
    if cache.leftpad is None:
        return tl.full((), 0, tl.int32), end
    else:
        first = clamp(tl.load(cache.leftpad + batch), 0, end)
        return first, end - first


@triton.jit
def load_page(cache, batch, slot, PAGE_SIZE: tl.constexpr):
    """Returns the pages of a sequence's slots, int32, from the block table. In a contiguous cache the page is the
    sequence."""
    if cache.block_table is None:
        return batch + slot * 0
    else:
        max_pages = decode_int(cache.capacity) // PAGE_SIZE
        return tl.load(cache.block_table + batch.to(tl.int64) * max_pages + slot // PAGE_SIZE)


@triton.jit
def row_in_page(cache, slot, PAGE_SIZE: tl.constexpr):
    """Returns the row of a slot in its page, int64. In a contiguous cache the row is the slot."""
    return slot.to(tl.int64) if cache.block_table is None else (slot % PAGE_SIZE).to(tl.int64)


@triton.jit
def valid_page(cache, page):
    """Returns a page number from the block table, clamped to the pages of the cache, int64."""
    return clamp(page, 0, decode_int(cache.pages) - 1).to(tl.int64)
