"""Loads the keys and values of one sequence and head for the loops of ``forward.py`` and ``chunks.py``: raw rows,
rotated copies, or rows of a cache, which may be paged or quantized.

``CachedKeys`` holds the fields that only a cache needs.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..kv_cache import load_page, row_in_page, valid_page
from ..quantized import load_scales, scale_values, scale_view
from ..rotating.pairs import load_keys
from ..rows import clamp_rows, load_cached_values, page_offsets, prefetch_rows, skip_rows, tile_offsets
from ..tiles import edge_tile, key_tiles
from .copies import SplitView, band_rows, is_split, load_band_parts, load_paged_parts, skip_band_rows


class CachedKeys(NamedTuple):
    """Says where a sequence lies in a cache.

    layout: CacheLayout.
    scales: KeyScales of a quantized cache, else None.
    batch: the sequence's row in the block table.
    first_slot: the slot of the sequence's first key.
    """

    layout: object
    scales: object
    batch: object
    first_slot: object


class KeyScales(NamedTuple):
    """ScaleViews of a quantized cache."""

    k: object
    v: object


class Keys(NamedTuple):
    """A sequence's keys, as a band reads them. k: HeadView, or SplitView of ``copies.py``. v: HeadView. channels_k,
    channels_v: the channels to load, in parts. first: the first key that k holds. length: the number of keys. cached:
    CachedKeys. first and cached are None if the keys are not those of a cache."""

    k: object
    v: object
    channels_k: object
    channels_v: object
    first: object
    length: object
    cached: object


class CopiedKeys(NamedTuple):
    """The rotated copies of a sequence's keys. view: TensorView (copy, row, head). row: key n is in row `row` + n of
    the view, if it was copied. first: the first key that was copied, or None if all keys are."""

    view: object
    row: object
    first: object


class KeyRows(NamedTuple):
    """The keys of a tile. rows [BN]: indices relative to the tile's first key. page, row [BN]: the page and the row of
    each key in the cache, or 0 if the cache is neither paged nor quantized."""

    rows: object
    page: object
    row: object


@triton.jit
def key_scales(cache, head):
    """Returns the KeyScales of a key head of a quantized cache. cache: CacheLayout."""
    k = scale_view(cache.k_scale, cache.k_batch, cache.k_row, cache.k_head, head)
    return KeyScales(k, scale_view(cache.v_scale, cache.v_batch, cache.v_row, cache.v_head, head))


@triton.jit
def enter_band(raw, copied, band, head, first, last, maps, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns (the k of a band's Keys, TileRange) for queries at positions first to last. raw: the sequence's raw Keys.
    If the band rotates its keys, k is its rotated copy."""
    tiles = key_tiles(band, first, last, raw.length, VARIANT.block_n, maps)
    k = band_rows(raw.k, copied.view, band.k_copy, copied.row, head, ROTATED_K, VARIANT)
    return k, tiles


@triton.jit
def key_rows(keys, column, EDGE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the rows [BN] to load for the tile of keys that starts at `column`, relative to `column`. EDGE: some of
    these keys may not exist. Existing keys are then loaded instead."""
    rows = tl.arange(0, VARIANT.block_n)
    if EDGE:
        rows = clamp_rows(rows, keys.length - column)
        if keys.first is not None:
            rows = tl.maximum(rows, keys.first - column)
    return rows


@triton.jit
def load_tile_pages(keys, column, VARIANT: tl.constexpr):
    """Returns the pages of the tile of keys that starts at `column`, int32 [BN], or 0 without pages. The call is safe
    even if no tile starts at `column`, because slots are clamped."""
    if VARIANT.page_size == 0:
        return 0
    else:
        cached = keys.cached
        slot = cached.first_slot + column + key_rows(keys, column, True, VARIANT)
        return load_page(cached.layout, cached.batch, tl.maximum(slot, 0), VARIANT.page_size)


@triton.jit
def prefetch_tile(keys, tiles, VARIANT: tl.constexpr):
    """Prefetches the band's first tile of keys and values, if there is one."""
    if tiles.end > tiles.begin:
        column = edge_tile(tiles, 0) * VARIANT.block_n
        rows = key_rows(keys, column, True, VARIANT)
        if len(VARIANT.channels) > 0:
            WIDTH: tl.constexpr = VARIANT.channels[0].width
            k = skip_band_rows(keys.k, column, VARIANT)
            prefetch_rows(k.copy.ptr, tile_offsets(rows, k.copy), WIDTH, WIDTH)
            prefetch_rows(k.raw.ptr, tile_offsets(rows, k.raw), VARIANT.head_dim, VARIANT.block_d)
        else:
            prefetch_rows(skip_rows(keys.k, column).ptr, tile_offsets(rows, keys.k), VARIANT.head_dim, VARIANT.block_d)
        prefetch_rows(skip_rows(keys.v, column).ptr, tile_offsets(rows, keys.v), VARIANT.head_dim_v, VARIANT.block_dv)


@triton.jit
def find_rows(keys, column, pages, EDGE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the KeyRows of the tile of keys that starts at `column`. pages: the keys' pages, from load_tile_pages."""
    rows = key_rows(keys, column, EDGE, VARIANT)
    if VARIANT.page_size > 0:
        cached = keys.cached
        page = valid_page(cached.layout, pages)
        row = row_in_page(cached.layout, tl.maximum(cached.first_slot + column + rows, 0), VARIANT.page_size)
        return KeyRows(rows, page, row)
    elif VARIANT.code_vec > 0:
        return KeyRows(rows, keys.cached.batch, tl.maximum(keys.cached.first_slot + column + rows, 0))
    else:
        return KeyRows(rows, 0, 0)


@triton.jit
def load_tile_keys(keys, column, at, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns the tile of keys at KeyRows `at`, [BN, D] in parts. ROTATED_K: the band reads a rotated copy, which has
    no pages."""
    if is_split(ROTATED_K, len(VARIANT.channels), VARIANT.page_size) and VARIANT.page_size > 0:
        view = SplitView(keys.k.raw, skip_rows(keys.k.copy, column), keys.k.copied)
        copied, raw = tile_offsets(at.rows, view.copy), page_offsets(at.page, at.row, view.raw)
        return load_paged_parts(view, copied, raw, keys.channels_k, VARIANT)
    elif is_split(ROTATED_K, len(VARIANT.channels), VARIANT.page_size):
        return load_band_parts(skip_band_rows(keys.k, column, VARIANT), at.rows, keys.channels_k, VARIANT)
    elif VARIANT.page_size > 0 and not ROTATED_K:
        return load_keys(keys.k.ptr, page_offsets(at.page, at.row, keys.k), keys.channels_k, VARIANT, dtype)
    else:
        return load_keys(skip_rows(keys.k, column).ptr, tile_offsets(at.rows, keys.k), keys.channels_k, VARIANT, dtype)


@triton.jit
def load_tile_values(keys, column, at, VARIANT: tl.constexpr, dtype: tl.constexpr):
    """Returns the tile of values at KeyRows `at`, [BN, DV] in parts."""
    if VARIANT.page_size > 0:
        return load_cached_values(keys.v.ptr, page_offsets(at.page, at.row, keys.v), keys.channels_v, VARIANT, dtype)
    else:
        ptr = skip_rows(keys.v, column).ptr
        return load_cached_values(ptr, tile_offsets(at.rows, keys.v), keys.channels_v, VARIANT, dtype)


@triton.jit
def scale_scores(scores, keys, at, VARIANT: tl.constexpr):
    """Returns scores [BM, BN] times the scales of quantized keys."""
    if VARIANT.code_vec > 0:
        scores *= load_scales(keys.cached.scales.k, at.page, at.row)[None, :]
    return scores


@triton.jit
def scale_weights(weights, v, keys, at, VARIANT: tl.constexpr):
    """Returns (weights [BM, BN], v) after multiplying one of them by the scales of quantized values."""
    if VARIANT.code_vec > 0:
        weights, v = scale_values(weights, v, load_scales(keys.cached.scales.v, at.page, at.row))
    return weights, v
