"""Appends new keys and values to a KV cache, quantized if the cache is quantized."""

import triton
import triton.language as tl

from ..arguments import decode_int, decode_int64, token_offsets
from ..kv_cache import clamp, load_page, row_in_page
from ..quantized import store_codes
from ..rows import load_rows, load_values
from ..tiles import row_program, sequence_rows


@triton.jit
def find_slots(cache, batch, token, count, token_slots, VARIANT: tl.constexpr):
    """Returns (page, row, whether the slot exists) of a sequence's `count` new tokens. Pages and rows are int64.

    token_slots: the caller's slot of every token, counted over the whole cache. If None, tokens follow
    cache.seqlens."""
    capacity = decode_int(cache.capacity)
    if token_slots is None:
        slot = clamp(tl.load(cache.seqlens + batch), 0, capacity) + token
        exists = (token < count) & (slot < capacity)
        last = tl.minimum(slot, capacity - 1)
        page = load_page(cache, batch, last, VARIANT.page_size).to(tl.int64)
        row = row_in_page(cache, last, VARIANT.page_size)
    else:
        slot = tl.load(token_slots + tl.minimum(token, count - 1)).to(tl.int64)
        exists = (token < count) & (slot >= 0)
        rows = VARIANT.page_size if VARIANT.page_size > 0 else capacity
        page, row = slot // rows, slot % rows
    return page, row, exists & (page >= 0) & (page < decode_int(cache.pages))


@triton.jit(do_not_specialize=["seqlen", "max_seqlen", "heads"])
def append_rows(k_cache, v_cache, k, v, cache, cu_seqlens, seqlen, max_seqlen, heads, VARIANT: tl.constexpr):
    """Appends k, v (batch, seqlen, heads), or packed (total, heads), at cache.seqlens, or writes them to the slots in
    cache.slot_mapping. Quantizes them if the cache is quantized. Drops keys without a slot or a page. k_cache, v_cache,
    k and v are TensorViews. If values are channels of the keys, v_cache and v are None, and VARIANT.head_dim_v is 0."""
    batch, first = row_program(max_seqlen * heads, VARIANT.block_m)
    start, count = sequence_rows(cu_seqlens, batch, seqlen)
    rows = first + tl.arange(0, VARIANT.block_m)
    if first >= count * heads:
        return
    token, head = rows // heads, (rows % heads).to(tl.int64)
    page, row, exists = find_slots(cache, batch, token, count, cache.slot_mapping, VARIANT)
    token = start + tl.minimum(token, count - 1)
    channels = tl.arange(0, VARIANT.block_d)
    mask = exists[:, None] & (channels < VARIANT.head_dim)[None, :]
    new_k = load_rows(k.ptr, token_offsets(k, batch, token, head, VARIANT), channels, VARIANT)
    if VARIANT.head_dim_v > 0:
        channels_v = tl.arange(0, VARIANT.block_dv)
        mask_v = exists[:, None] & (channels_v < VARIANT.head_dim_v)[None, :]
        new_v = load_values(v.ptr, token_offsets(v, batch, token, head, VARIANT), channels_v, VARIANT)
    to_k = token_offsets(k_cache, page, row, head, VARIANT)
    if VARIANT.head_dim_v > 0:
        to_v = token_offsets(v_cache, page, row, head, VARIANT)
    if cache.k_scale is None:
        tl.store(k_cache.ptr + to_k + channels[None, :], new_k, mask=mask)
        if VARIANT.head_dim_v > 0:
            tl.store(v_cache.ptr + to_v + channels_v[None, :], new_v, mask=mask_v)
    else:
        k_scale = store_codes(k_cache.ptr, to_k, new_k, exists, VARIANT.head_dim)
        v_scale = store_codes(v_cache.ptr, to_v, new_v, exists, VARIANT.head_dim_v)
        to_k = page * decode_int64(cache.k_batch) + row * decode_int64(cache.k_row) + head * decode_int64(cache.k_head)
        to_v = page * decode_int64(cache.v_batch) + row * decode_int64(cache.v_row) + head * decode_int64(cache.v_head)
        tl.store(cache.k_scale + to_k, k_scale, mask=exists)
        tl.store(cache.v_scale + to_v, v_scale, mask=exists)
