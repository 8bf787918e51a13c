"""Loads the keys of a band, raw or from a rotated copy. A copy may hold only the channels that rotate.

If ``VARIANT.channels`` has parts, a copy holds only the first part, which is the part that rotates. Its columns are the
first members of all pairs and then the second members, or interleaved pairs. A tile takes these channels from the copy
and the other channels from the raw keys. One load does both, because every column has its own address and row stride.
So the tile is the same as with a copy of all channels.

The raw keys of a cache may have pages. A copy has no pages. Every column then takes the offsets of its rows either from
the copy or from the pages.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..rows import band_keys, head_view, load_rows, skip_rows, tile_offsets


class SplitView(NamedTuple):
    """Rows of one head of the keys. raw: HeadView. copy: HeadView of the channels that rotate. copied: whether the band
    reads the copy at all."""

    raw: object
    copy: object
    copied: object


@triton.constexpr_function
def is_split(rotated_k, parts, page_size):
    """Whether a band's keys are loaded through a SplitView. If VARIANT.channels has parts, this is so for bands that
    read a copy, and without pages also for bands that read only raw keys. parts: the number of VARIANT.channels."""
    return parts > 0 and (rotated_k or page_size == 0)


@triton.jit
def band_rows(raw, rotated_k, k_copy, packed, head, ROTATED_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the keys that a band reads: a SplitView for load_band_rows if is_split, else a HeadView. ROTATED_K:
    whether the band reads a copy. ROTATED_K is read only with pages or quantized keys, because raw keys are then loaded
    differently from a copy."""
    if is_split(ROTATED_K, len(VARIANT.channels), VARIANT.page_size):
        return SplitView(raw, head_view(rotated_k, tl.maximum(k_copy, 0), packed, head, VARIANT), k_copy >= 0)
    else:
        return band_keys(raw, rotated_k, k_copy, packed, head, ROTATED_K, VARIANT)


@triton.jit
def skip_band_rows(view, rows, VARIANT: tl.constexpr):
    """Returns the view of band_rows, moved on by `rows` rows."""
    if len(VARIANT.channels) > 0:
        return SplitView(skip_rows(view.raw, rows), skip_rows(view.copy, rows), view.copied)
    else:
        return skip_rows(view, rows)


@triton.jit
def load_band_rows(view, rows, channels, VARIANT: tl.constexpr):
    """Loads the channels [N] of rows [M] of the result of band_rows: [M, N]."""
    if len(VARIANT.channels) > 0:
        ptr, stride_row, _ = columns_of(view, channels, VARIANT)
        offsets = rows[:, None] * stride_row.to(tl.int32)[None, :]
        return load_rows(ptr[None, :], offsets, channels, VARIANT)
    else:
        return load_rows(view.ptr, tile_offsets(rows, view), channels, VARIANT)


@triton.jit
def load_paged_rows(view, copied, raw, channels, VARIANT: tl.constexpr):
    """Loads the channels [N] of rows of a SplitView over pages: [M, N]. copied, raw: the offsets [M, 1] of these rows
    in the copy and in the raw keys."""
    ptr, _, from_copy = columns_of(view, channels, VARIANT)
    offsets = tl.where(from_copy[None, :], copied.to(tl.int64), raw)
    return load_rows(ptr[None, :], offsets, channels, VARIANT)


@triton.jit
def load_paged_parts(view, copied, raw, channels, VARIANT: tl.constexpr):
    """Returns load_paged_rows in parts. channels: a tuple with the channels of each part."""
    tiles = ()
    for part in tl.static_range(len(channels)):
        tiles += (load_paged_rows(view, copied, raw, channels[part], VARIANT),)
    return tiles


@triton.jit
def load_band_parts(view, rows, channels, VARIANT: tl.constexpr):
    """Returns load_band_rows in parts. channels: a tuple with the channels of each part."""
    tiles = ()
    for part in tl.static_range(len(channels)):
        tiles += (load_band_rows(view, rows, channels[part], VARIANT),)
    return tiles


@triton.jit
def columns_of(view, channels, VARIANT: tl.constexpr):
    """Returns (pointers, row strides, whether each column lies in the copy) of a tile's columns, each [N]. A column's
    pointer plus its channel is the address of its element in the first row. All channels of an aligned vector of
    VARIANT.vec channels come from the same view, so the compiler can load whole vectors."""
    VEC: tl.constexpr = VARIANT.vec
    HALF: tl.constexpr = VARIANT.channels[0].width // 2
    FIRST: tl.constexpr = VARIANT.channels[0].first
    SECOND: tl.constexpr = VARIANT.channels[0].second
    BYTES: tl.constexpr = 16 if VARIANT.vec > 1 else 1
    # Compares channels, not channels // VEC. After a division, Triton would not know that the channels of a vector come
    # from the same view.
    in_first = (channels >= FIRST) & (channels < FIRST + HALF)
    in_second = (channels >= SECOND) & (channels < SECOND + HALF)
    from_copy = (in_first | in_second) & view.copied
    shift = tl.where(in_first, 0 - FIRST, HALF - SECOND)
    ptr = tl.where(from_copy, view.copy.ptr + shift, view.raw.ptr)
    stride_row = tl.where(from_copy, view.copy.stride_row, view.raw.stride_row)
    return tl.multiple_of(ptr, BYTES), tl.multiple_of(stride_row, VEC), from_copy
