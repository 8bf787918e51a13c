"""Computes ``attention_with_cache`` for a few queries, with the compiled kernels of csrc/cpu/decode.cpp."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ...calls.cache_tables import CacheLayer
from ...calls.records import CacheCall, out_shape
from ...schemes.cos_sin import cos_sin
from ...schemes.rotary import Rotary
from ..shared.runs import Placed
from ..shared.step_part import StepPart
from .library import (
    DTYPES,
    INFINITE,
    INT8,
    BandLimits,
    DecodeBand,
    DecodeCall,
    DecodeRun,
    Library,
    TensorStruct,
    point_to_options,
)

BLOCK = 64  # keys; csrc/cpu/decode.h defines the same BLOCK and MAX_ROWS
MAX_ROWS = 16  # queries of one key head
MIN_TABLE = 8  # rows


class Template(NamedTuple):
    """A DecodeCall with the fields that depend only on the scheme, and the tensors that these fields point to."""

    call: bytes
    tensors: list[torch.Tensor]


class DecodePart(StepPart):
    """A ``StepPart`` that keeps the C struct of the call.

    Attributes:
        described: the struct without the tensors of a layer, and the objects it points to.
        filled: the strides for which the struct is valid, and the struct with the tensors of the previous layer.
    """

    def __init__(self, call: CacheCall):
        super().__init__(call)
        self.described: tuple[bytes, tuple] | None = None
        self.filled: tuple[tuple, DecodeCall] | None = None


def serves(q: torch.Tensor, layer: CacheLayer) -> bool:
    """Whether the queries of a call are few enough."""
    (_, seqlen_q, heads_q, _), k_cache = q.shape, layer.k
    rows = seqlen_q * (heads_q // max(k_cache.shape[2], 1))
    return q.numel() > 0 and rows <= MAX_ROWS and k_cache.numel() > 0


def decode(
    library: Library,
    q: torch.Tensor,
    layer: CacheLayer,
    part: DecodePart,
    placed: list[Placed] | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out of ``out_shape``, lse in float32).

    placed: the sequences if positions are explicit, else None.
    out: a contiguous tensor of the output's shape that receives the output. None: a new tensor.
    """
    (batch, seqlen_q, heads_q, _), dtype, given = q.shape, q.dtype, out
    if layer.k_scale is not None and q.dtype != torch.float32:
        q, out = q.to(torch.float32), None
    if out is None:
        out = q.new_empty(out_shape(q, layer.v))
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)
    c = _fill(library, q, layer, out, lse, part, placed)
    if library.decode(c):
        raise MemoryError("attention_with_cache: no memory for the partial results")
    if out is not given and given is not None:
        return given.copy_(out), lse
    return out if out.dtype == dtype else out.to(dtype), lse


def _fill(
    library: Library, q, layer: CacheLayer, out, lse, part: DecodePart, placed: list[Placed] | None
) -> DecodeCall:
    """Returns the filled-in struct of the compiled call. If the tensors have the same strides as in the previous layer
    of the step, only the addresses are written again."""
    k, v, k_scale, v_scale = layer[:4]
    strides: tuple = (q.stride(), k.stride(), v.stride(), out.stride())
    if k_scale is not None and v_scale is not None:
        strides += (k_scale.stride(), v_scale.stride())
    if part.filled is not None and part.filled[0] == strides:
        c = part.filled[1]
        c.q.data, c.k.data, c.v.data, c.out.data = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if k_scale is not None and v_scale is not None:
            c.k_scale.data, c.v_scale.data = k_scale.data_ptr(), v_scale.data_ptr()
    else:
        if part.described is None:
            part.described = _describe(library, q, layer, part, placed)
        c = DecodeCall.from_buffer_copy(part.described[0])
        c.q, c.k, c.v, c.out = TensorStruct.of(q), TensorStruct.of(k), TensorStruct.of(v), TensorStruct.of(out)
        if k_scale is not None and v_scale is not None:
            c.k_scale, c.v_scale = TensorStruct.of(k_scale), TensorStruct.of(v_scale)
        part.filled = strides, c
    c.lse = lse.data_ptr()
    point_to_options(c, layer)
    return c


def _describe(
    library: Library, q: torch.Tensor, layer: CacheLayer, part: DecodePart, placed: list[Placed] | None
) -> tuple[bytes, tuple]:
    """Returns a DecodeCall without the tensors of a layer, and the objects that it points to. The objects must stay
    alive."""
    positions, call, k_cache = None, part.call, layer.k
    if placed is None:
        runs, rows = _bounds(part.bounds(k_cache))
    else:
        runs, positions, rows = _runs(placed, call.causal, q.shape[1])
    template, table = _template(call.rotary, call.causal, rows), call.tables.block_table
    c = DecodeCall.from_buffer_copy(template.call)
    if positions is None:
        c.bounds, c.num_runs = ctypes.addressof(runs), q.shape[0]
    else:
        c.runs, c.positions, c.num_runs = ctypes.addressof(runs), ctypes.addressof(positions), len(runs)
    if table is not None:
        c.block_table, c.max_pages = table.data_ptr(), table.shape[1]
        c.pages, c.page_size = k_cache.shape[:2]
    c.batch, c.seqlen_q, c.heads_q, c.head_dim = q.shape
    c.heads_kv, c.head_dim_v = k_cache.shape[2], out_shape(q, layer.v)[-1]
    c.scale, c.rotated_scale = call.score_scale, call.rotary.rotated_scale
    for name, value in call.rotary.query_scale._asdict().items():
        setattr(c, name, value or 0.0)
    c.dtype = DTYPES[q.dtype] if layer.k_scale is None else INT8
    c.threads, c.parallel_for = torch.get_num_threads(), library.parallel_for
    return bytes(c), (runs, positions, template, table)


def _bounds(pairs: list[tuple[int, int]]) -> tuple[ctypes.Array, int]:
    """Returns DecodeCall.bounds, and the number of rows of the coarse table."""
    slots = [slot for pair in pairs for slot in pair]
    longest = max((end - first for first, end in pairs), default=0)
    return (ctypes.c_int64 * len(slots))(*slots), _coarse_rows(longest)


def _runs(placed: list[Placed], causal: bool, seqlen_q: int) -> tuple[ctypes.Array, ctypes.Array, int]:
    """Returns DecodeCall.runs, DecodeCall.positions, and the number of rows of the coarse table."""
    found, longest = [], 0
    for b, (keys, _, seqlen) in enumerate(placed):
        for run in keys:
            order = seqlen - seqlen_q - run.order if causal else run.keys
            found.append(DecodeRun(b, run.slot, run.keys, order, seqlen, run.position))
            longest = max(longest, run.keys)
        if not keys:
            found.append(DecodeRun(b))
    positions = [position for each in placed for position in each.queries]
    return (DecodeRun * len(found))(*found), (ctypes.c_double * len(positions))(*positions), _coarse_rows(longest)


def _coarse_rows(keys: int) -> int:
    """Returns how many rows the coarse table needs for ``keys`` keys. The number is rounded up to a power of two, so
    that a growing sequence builds few tables."""
    return max(1 << (max(keys - 1, 0) // BLOCK**2).bit_length(), MIN_TABLE)


@lru_cache(maxsize=64)
def _template(rotary: Rotary, causal: bool, rows: int) -> Template:
    call, tensors = DecodeCall(), []

    def address(x: torch.Tensor) -> int:
        tensors.append(x.contiguous())
        return tensors[-1].data_ptr()

    @cache
    def tables(slope: float) -> tuple[int, int, int]:
        """Returns the fields fine, middle and coarse of a DecodeBand: the addresses of its tables."""
        positions = slope * torch.arange(max(BLOCK, rows), dtype=torch.float64, device="cpu")
        fine = torch.stack(cos_sin(rotary, positions[:BLOCK])).to(torch.float32)
        middle, coarse = (
            torch.stack(cos_sin(rotary, step * positions[:count]), 1)
            for step, count in ((BLOCK, BLOCK), (BLOCK**2, rows))
        )
        return address(fine), address(middle), address(coarse)

    rotates = rotary.changes_channels
    call.pairs, call.interleaved = len(rotary.frequencies) if rotates else 0, rotary.interleaved
    call.first_channel = rotary.first_channel if rotates else 0
    call.rotating_pairs = 1 + max((m for m, x in enumerate(rotary.frequencies) if x), default=-1) if rotates else 0
    call.inv_freq = address(torch.tensor(rotary.frequencies, dtype=torch.float64, device="cpu"))
    bands = rotary.bands_for(causal)
    call.num_bands = len(bands)
    for n, band in enumerate(bands):
        last = int(min(band.last, INFINITE))
        call.bands[n] = DecodeBand(BandLimits.of(band), band.group, last, band.slope, band.offset)
        if rotates and band.keys.slope:
            call.bands[n].fine, call.bands[n].middle, call.bands[n].coarse = tables(band.slope)
    return Template(bytes(call), tensors)
