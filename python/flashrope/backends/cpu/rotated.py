"""Rotates queries or keys, and appends keys and values to a cache, with the compiled kernel of csrc/cpu/rotate.cpp."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from ...calls import addresses
from ...calls.addresses import NewRows
from ...calls.cache_tables import CacheLayer, CacheTables
from ...calls.records import RotateCall, refuse
from ...schemes.rotary import Rotary
from ..shared.host_rotation import Rotation, table_and_rows
from . import loader
from .library import DTYPES, INT8, Library, RotateStruct, RunStruct, TensorStruct
from .sequences import table_of
from .served import unserved_rotation

SMALL = 2**15  # elements; for fewer elements, waking up the threads takes longer than the work


def rotate(x: torch.Tensor, call: RotateCall) -> torch.Tensor:
    """Rotates x by the positions of the call, as ``RotateBackend`` describes."""
    refuse("cpu", unserved_rotation(x, call))
    batch = x if x.ndim == 4 else x[None]
    table, runs = table_and_rows(batch, call)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library = loader.required()
    c, _used = _describe(library, batch, out if x.ndim == 4 else out[None], call.rotary, table, runs)
    library.rotate(ctypes.byref(c))
    return out


class KeptRotations(NamedTuple):
    """The objects that a compiled call points to. The objects must live until the call has run."""

    table: Rotation | None
    runs: ctypes.Array


def _describe(
    compiled: Library, x: torch.Tensor, out: torch.Tensor, rotary: Rotary | None, table: Rotation | None, runs
) -> tuple[RotateStruct, KeptRotations]:
    """Returns the call, and the objects that must live until the call has run. x, out: (batch, seqlen, heads,
    head_dim)."""
    array = (RunStruct * len(runs))(*runs)
    c = RotateStruct(
        x=TensorStruct.of(x), out=TensorStruct.of(out), table=table_of(table), runs=ctypes.addressof(array), page_size=1
    )
    c.num_runs, c.heads, c.head_dim = len(runs), x.shape[2], x.shape[3]
    if rotary is not None:
        c.pairs, c.interleaved, c.first_channel = len(rotary.frequencies), rotary.interleaved, rotary.first_channel
    c.dtype, c.threads = DTYPES[x.dtype], torch.get_num_threads() if x.numel() > SMALL else 1
    c.parallel_for = compiled.parallel_for
    return c, KeptRotations(table, array)


class Append:
    """Writes the new keys and values of a step's layers. The tables are read once. Between layers only addresses
    change.

    rotary: the scheme from ``over_rotated_keys`` that rotates k. None: keys are written unchanged.
    """

    def __init__(self, compiled: Library, tables: CacheTables, rotary: Rotary | None):
        self._compiled, self._tables, self._rotary = compiled, tables, rotary
        self._filled: tuple[tuple, RotateStruct, tuple] | None = None  # strides, the call, the objects it points to

    def run(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Writes k and v to the layer, and quantizes them if the layer has scales. Their dtype must be one of DTYPES.
        v: None if values are channels of the keys."""
        if not (k.numel() and layer.k.numel()):
            return
        k_cache, v_cache, k_scale, v_scale = layer.rows
        strides: tuple = (k.stride(), k_cache.stride())
        if v is not None:
            strides += (v.stride(), v_cache.stride())
        if k_scale is not None and v_scale is not None:
            strides += (k_scale.stride(), v_scale.stride())
        if self._filled is None or self._filled[0] != strides:
            self._filled = strides, *self._fill(layer, k, v)
        c = self._filled[1]
        c.x.data, c.out.data = k.data_ptr(), k_cache.data_ptr()
        if v is not None:
            c.v.data, c.v_cache.data = v.data_ptr(), v_cache.data_ptr()
        if k_scale is not None and v_scale is not None:
            c.k_scale.data, c.v_scale.data = k_scale.data_ptr(), v_scale.data_ptr()
        self._compiled.rotate(ctypes.byref(c))

    def _fill(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> tuple[RotateStruct, tuple]:
        """Returns the compiled call, and the objects that it points to besides the tensors of the layer."""
        tables, rotary, k_cache = self._tables, self._rotary, layer.k
        capacity, block_table, slots = tables.capacity(k_cache), tables.block_table, tables.slot_mapping
        x = k if k.ndim == 4 else k[None]
        if rotary is not None and rotary.changes_channels:
            table, runs = table_and_rows(x, RotateCall(rotary, None, tables, capacity))
        elif slots is None:
            table, runs = None, addresses.new_rows(tables, capacity, x.shape[1])
        else:
            table, runs = None, [NewRows(0, 0, x.shape[1], 0, 0, 0)]
        c, kept = _describe(self._compiled, x, k_cache, rotary, table, runs)
        view = TensorStruct.of if k.ndim == 4 else TensorStruct.of_packed
        c.x, c.out = view(k), TensorStruct.of(k_cache)
        if v is not None:
            c.v, c.v_cache, c.head_dim_v = view(v), TensorStruct.of(layer.v), v.shape[-1]
        if layer.k_scale is not None and layer.v_scale is not None:
            c.codes = INT8
            c.k_scale, c.v_scale = TensorStruct.of(layer.k_scale), TensorStruct.of(layer.v_scale)
        c.to_cache, c.pages, c.page_size, c.max_pages = 1, k_cache.shape[0], k_cache.shape[1], 1
        if slots is not None:
            slots = slots if slots.dtype == torch.int64 else slots.to(torch.int64)
            c.slots = slots.data_ptr()
        if block_table is not None:
            c.block_table, c.max_pages = block_table.data_ptr(), block_table.shape[1]
        return c, (kept, slots, block_table)
