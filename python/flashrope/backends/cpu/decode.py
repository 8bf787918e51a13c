"""``attention_with_cache`` for a few queries, with the compiled kernel of csrc/cpu/decode.cpp."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from ...lowering.cos_sin import cos_sin
from ...rotary.bands import have_maps
from ...rotary.rotary import Rotary
from ..calls import CacheCall
from .library import DTYPES, MAX_BANDS, DecodeBand, DecodeCall, Library, TensorView, band_limits

BLOCK = 64  # keys; csrc/cpu/decode.cpp has the same two
MAX_ROWS = 16  # queries of one key head


class Template(NamedTuple):
    """What depends on the scheme alone, and the tensors that it points to."""

    call: bytes
    tensors: list[torch.Tensor]


def serves(q: torch.Tensor, k_cache: torch.Tensor, call: CacheCall) -> bool:
    _, seqlen_q, heads_q, _ = q.shape
    rows = seqlen_q * (heads_q // max(k_cache.shape[2], 1))
    served = q.dtype in DTYPES and len(call.bands) <= MAX_BANDS and not have_maps(call.bands)
    return served and 0 < rows <= MAX_ROWS and k_cache.numel() > 0


def decode(
    library: Library, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: CacheCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse in float32)."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)
    template, table = _template(call.rotary, call.causal), call.layout.block_table
    slots = [slot for pair in call.layout.bounds(k_cache) for slot in pair]
    bounds = (ctypes.c_int64 * len(slots))(*slots)
    c = DecodeCall.from_buffer_copy(template.call)
    c.q, c.k, c.v, c.out = (TensorView.of(x) for x in (q, k_cache, v_cache, out))
    c.lse, c.bounds = lse.data_ptr(), ctypes.addressof(bounds)
    if table is not None:
        c.block_table, c.max_pages = table.data_ptr(), table.shape[1]
        c.pages, c.page_size = k_cache.shape[:2]
    c.batch, c.seqlen_q, c.heads_q, c.heads_kv, c.head_dim = batch, seqlen_q, heads_q, k_cache.shape[2], head_dim
    c.scale, c.rotated_scale = call.score_scale, call.rotary.rotated_scale
    for name, value in call.rotary.query_scale._asdict().items():
        setattr(c, name, value or 0.0)
    c.dtype, c.threads, c.parallel_for = DTYPES[q.dtype], torch.get_num_threads(), library.parallel_for
    if library.decode(ctypes.byref(c)):
        raise MemoryError("attention_with_cache: no memory for the partial results")
    return out, lse


@lru_cache(maxsize=64)
def _template(rotary: Rotary, causal: bool) -> Template:
    call, tensors = DecodeCall(), []

    def address(x: torch.Tensor) -> int:
        tensors.append(x.contiguous())
        return tensors[-1].data_ptr()

    rotates = rotary.changes_channels
    call.pairs, call.interleaved = len(rotary.frequencies) if rotates else 0, rotary.interleaved
    call.inv_freq = address(torch.tensor(rotary.frequencies, dtype=torch.float64))
    bands = rotary.bands_for(causal)
    call.num_bands = len(bands)
    for n, band in enumerate(bands):
        call.bands[n] = DecodeBand(*band_limits(band.start, band.stop), band.slope, band.offset)
        if rotates and band.slope:
            positions = band.slope * torch.arange(BLOCK + 1, dtype=torch.float64)
            tables = torch.stack(cos_sin(rotary, positions))
            call.bands[n].fine = address(tables[:, :BLOCK].to(torch.float32))
            call.bands[n].block = address(tables[:, BLOCK])
    return Template(bytes(call), tensors)
