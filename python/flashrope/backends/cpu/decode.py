"""``attention_with_cache`` for a few queries, with the compiled kernel of csrc/cpu/decode.cpp."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ...lowering.cos_sin import cos_sin
from ...rotary.rotary import Rotary
from ..calls import CacheCall, CacheLayout
from .library import CODES, DTYPES, INFINITE, MAX_BANDS, BandLimits, DecodeBand, DecodeCall, Library, TensorView

BLOCK = 64  # keys; csrc/cpu/decode.h has the same two
MAX_ROWS = 16  # queries of one key head
MIN_TABLE = 8  # rows


class Template(NamedTuple):
    """What depends on the scheme alone, and the tensors that it points to."""

    call: bytes
    tensors: list[torch.Tensor]


def serves(q: torch.Tensor, k_cache: torch.Tensor, call: CacheCall) -> bool:
    _, seqlen_q, heads_q, _ = q.shape
    rows = seqlen_q * (heads_q // max(k_cache.shape[2], 1))
    served = q.dtype in DTYPES and len(call.bands) <= MAX_BANDS
    return served and 0 < rows <= MAX_ROWS and k_cache.numel() > 0


def decode(
    library: Library, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: CacheCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse in float32)."""
    (batch, seqlen_q, heads_q, _), dtype = q.shape, q.dtype
    if call.layout.k_scale is not None:
        q = q.to(torch.float32)
    out, lse = q.new_empty(q.shape), q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)
    c, _used = describe(library, q, k_cache, v_cache, out, lse, call)
    run(library, c)
    return (out if out.dtype == dtype else out.to(dtype)), lse


def run(library: Library, c: DecodeCall) -> None:
    if library.decode(ctypes.byref(c)):
        raise MemoryError("attention_with_cache: no memory for the partial results")


def describe(library: Library, q, k_cache, v_cache, out, lse, call: CacheCall) -> tuple[DecodeCall, tuple]:
    """The compiled call, and what it points to beside these tensors."""
    layout = call.layout
    key = (call.rotary, call.causal, call.softmax_scale, q.shape, k_cache.shape, q.dtype, k_cache.dtype)
    described, used = layout.once(key, lambda: _describe(library, q, k_cache, call))
    c = DecodeCall.from_buffer_copy(described)
    c.q, c.k, c.v, c.out = TensorView.of(q), TensorView.of(k_cache), TensorView.of(v_cache), TensorView.of(out)
    c.lse = lse.data_ptr()
    if layout.k_scale is not None and layout.v_scale is not None:
        c.k_scale, c.v_scale = TensorView.of(layout.k_scale), TensorView.of(layout.v_scale)
    return c, used


def _describe(library: Library, q: torch.Tensor, k_cache: torch.Tensor, call: CacheCall) -> tuple[bytes, tuple]:
    """A DecodeCall without the tensors of a layer, and what it points to."""
    bounds, rows = _bounds(k_cache, call.layout)
    template, table = _template(call.rotary, call.causal, rows), call.layout.block_table
    c = DecodeCall.from_buffer_copy(template.call)
    c.bounds = ctypes.addressof(bounds)
    if table is not None:
        c.block_table, c.max_pages = table.data_ptr(), table.shape[1]
        c.pages, c.page_size = k_cache.shape[:2]
    c.batch, c.seqlen_q, c.heads_q, c.head_dim = q.shape
    c.heads_kv = k_cache.shape[2]
    c.scale, c.rotated_scale = call.score_scale, call.rotary.rotated_scale
    for name, value in call.rotary.query_scale._asdict().items():
        setattr(c, name, value or 0.0)
    c.dtype = DTYPES[q.dtype] if call.layout.k_scale is None else CODES[k_cache.dtype]
    c.threads, c.parallel_for = torch.get_num_threads(), library.parallel_for
    return bytes(c), (bounds, template, table)


def _bounds(k_cache: torch.Tensor, layout: CacheLayout) -> tuple[ctypes.Array, int]:
    """DecodeCall.bounds; and the rows of the coarse table: a power of two, so that a growing sequence builds few."""
    pairs = layout.bounds(k_cache)
    slots = [slot for pair in pairs for slot in pair]
    longest = max((end - first for first, end in pairs), default=0)
    rows = max(1 << (max(longest - 1, 0) // BLOCK**2).bit_length(), MIN_TABLE)
    return (ctypes.c_int64 * len(slots))(*slots), rows


@lru_cache(maxsize=64)
def _template(rotary: Rotary, causal: bool, rows: int) -> Template:
    call, tensors = DecodeCall(), []

    def address(x: torch.Tensor) -> int:
        tensors.append(x.contiguous())
        return tensors[-1].data_ptr()

    @cache
    def tables(slope: float) -> tuple[int, int, int]:
        """fine, middle and coarse of DecodeBand."""
        positions = slope * torch.arange(max(BLOCK, rows), dtype=torch.float64)
        fine = torch.stack(cos_sin(rotary, positions[:BLOCK])).to(torch.float32)
        middle, coarse = (
            torch.stack(cos_sin(rotary, step * positions[:count]), 1)
            for step, count in ((BLOCK, BLOCK), (BLOCK**2, rows))
        )
        return address(fine), address(middle), address(coarse)

    rotates = rotary.changes_channels
    call.pairs, call.interleaved = len(rotary.frequencies) if rotates else 0, rotary.interleaved
    call.rotating_pairs = 1 + max((m for m, x in enumerate(rotary.frequencies) if x), default=-1) if rotates else 0
    call.inv_freq = address(torch.tensor(rotary.frequencies, dtype=torch.float64))
    bands = rotary.bands_for(causal)
    call.num_bands = len(bands)
    for n, band in enumerate(bands):
        last = int(min(band.last, INFINITE))
        call.bands[n] = DecodeBand(BandLimits.of(band), band.group, last, band.slope, band.offset)
        if rotates and band.keys.slope:
            call.bands[n].fine, call.bands[n].middle, call.bands[n].coarse = tables(band.slope)
    return Template(bytes(call), tensors)
