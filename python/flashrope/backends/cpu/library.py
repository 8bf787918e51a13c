"""Defines the C structs that describe a call to the compiled kernels of csrc/cpu, and the library that runs it."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch

from ...calls.cache_tables import LAYER_OPTIONS, CacheLayer
from ...schemes.bands import Band

MAX_HEAD_DIM = 576  # csrc/cpu/common.h defines the same number
MAX_BANDS = 4
INFINITE = 2**40  # the value that means an infinite distance
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INT8 = 3  # the number of a quantized cache; queries are then float32
FEW_ROWS = 4  # for up to 4 query heads per key head, decoding waits for memory, and float32 is as fast
FEW_QUERIES = 8  # for up to 8 queries float32 is faster: it works on 8 rows at once, and bfloat16 on 32 rows
NOT_FINITE = 2  # the return value of the backward in bfloat16 if a row is not finite


class TensorStruct(ctypes.Structure):
    """The address of a tensor, and its strides in elements. The channels are contiguous."""

    _fields_ = [("data", ctypes.c_void_p)] + [(f"stride_{name}", ctypes.c_int64) for name in ("batch", "row", "head")]

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorStruct:
        """Returns the view of a tensor (batch, rows, heads, head_dim), or of scales (batch, rows, heads)."""
        return cls(x.data_ptr(), *x.stride()[:3])

    @classmethod
    def of_packed(cls, x: torch.Tensor) -> TensorStruct:
        """Returns the view of packed rows (rows, heads, head_dim)."""
        return cls(x.data_ptr(), 0, *x.stride()[:2])


class BandLimits(ctypes.Structure):
    """Mirrors the struct Band in csrc/cpu/common.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("start", "stop", "chunk")]

    @classmethod
    def of(cls, band: Band) -> BandLimits:
        infinite = INFINITE // max(band.chunk, 1)
        start, stop = (math.ceil(min(max(x, -infinite), infinite)) for x in (band.start, band.stop))
        return cls(start, stop, band.chunk)


class DecodeBand(ctypes.Structure):
    _fields_ = [
        ("band", BandLimits),
        ("group", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("slope", ctypes.c_double),
        ("offset", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("fine", "middle", "coarse")),
    ]


class DecodeRun(ctypes.Structure):
    """Mirrors the struct RunStruct in csrc/cpu/decode.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("sequence", "first_slot", "keys", "order", "seqlen")),
        ("position", ctypes.c_double),
    ]


class DecodeCall(ctypes.Structure):
    """Mirrors the struct DecodeCall in csrc/cpu/decode.h."""

    _fields_ = [
        *((name, TensorStruct) for name in ("q", "k", "v", "out", "k_scale", "v_scale")),
        ("lse", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("max_pages", "pages", "page_size")),
        *((name, ctypes.c_int64) for name in ("batch", "seqlen_q", "heads_q", "heads_kv", "head_dim", "head_dim_v")),
        *((name, ctypes.c_void_p) for name in LAYER_OPTIONS),
        ("inv_freq", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("pairs", "rotating_pairs", "interleaved", "first_channel")),
        ("bands", DecodeBand * MAX_BANDS),
        ("num_bands", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("runs", "positions")),
        ("num_runs", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("scale", "log_n_factor", "log_n_floor")),
        *((name, ctypes.c_double) for name in ("log_n_every", "log_n_first", "length_scale", "rotated_scale")),
        ("dtype", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


class Table(ctypes.Structure):
    """The addresses of cos and sin of all rows, with strides in elements."""

    _fields_ = [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p)] + [
        (f"{name}_{stride}", ctypes.c_int64) for name in ("cos", "sin") for stride in ("batch", "row")
    ]


class ForwardBand(ctypes.Structure):
    _fields_ = [("band", BandLimits), ("q", Table), ("k_copy", ctypes.c_int64)]


class ForwardCall(ctypes.Structure):
    """Mirrors the struct ForwardCall in csrc/cpu/tiles.h."""

    _fields_ = [
        *((name, TensorStruct) for name in ("q", "k", "v", "out", "k_scale", "v_scale")),
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv")),
        *((name, ctypes.c_int64) for name in ("head_dim", "head_dim_v", "pairs", "interleaved", "first_channel")),
        *((name, ctypes.c_void_p) for name in LAYER_OPTIONS),
        ("bands", ForwardBand * MAX_BANDS),
        ("k_copies", Table * MAX_BANDS),
        ("num_bands", ctypes.c_int64),
        ("num_copies", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("dtype", ctypes.c_int64),
        ("float32_out", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


def point_to_options(c: DecodeCall | ForwardCall, layer: CacheLayer) -> None:
    """Writes the addresses of a layer's options to a call."""
    for name in LAYER_OPTIONS:
        x = getattr(layer, name)
        setattr(c, name, None if x is None else x.data_ptr())


class BackwardCall(ctypes.Structure):
    """Mirrors the struct BackwardCall in csrc/cpu/backward.h."""

    _fields_ = [
        ("forward", ForwardCall),
        *((name, TensorStruct) for name in ("grad_out", "grad_q", "grad_k", "grad_v")),
        ("grad_lse", ctypes.c_void_p),
    ]


class RunStruct(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "rows", "position", "sequence", "slot")]


class RotateStruct(ctypes.Structure):
    """Mirrors the struct RotateStruct in csrc/cpu/rotate.cpp."""

    _fields_ = [
        *((name, TensorStruct) for name in ("x", "out", "v", "v_cache", "k_scale", "v_scale")),
        ("table", Table),
        ("runs", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_runs", "heads", "head_dim", "head_dim_v", "pairs", "interleaved")),
        *((name, ctypes.c_int64) for name in ("first_channel", "to_cache")),
        ("slots", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("max_pages", "pages", "page_size", "dtype", "codes", "threads")),
        ("parallel_for", ctypes.c_void_p),
    ]


class Library:
    """The functions of a compiled library and, for bfloat16, of a second library that extends it. Raises OSError or
    AttributeError if a file is not such a library."""

    def __init__(self, path: Path, bfloat16: Path | None = None):
        self.path = bfloat16 or path
        functions = ctypes.CDLL(str(path))
        self._decode, self._forward = functions.flashrope_decode, functions.flashrope_forward
        self._backward, self.rotate = functions.flashrope_backward, functions.flashrope_rotate
        self._bfloat16 = ctypes.CDLL(str(bfloat16)) if bfloat16 else None
        if self._bfloat16:
            self._bfloat16_forward = self._bfloat16.flashrope_forward_bf16
            self._bfloat16_backward = self._bfloat16.flashrope_backward_bf16
            self._bfloat16_decode = self._bfloat16.flashrope_decode_bf16
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self.parallel_for = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p)

    def multiplies(self, dtype: torch.dtype, seqlen_q: int) -> bool:
        """Whether the kernels compute products in the dtype of the queries. Otherwise queries are first converted to
        float32."""
        return self._bfloat16 is not None and dtype == torch.bfloat16 and seqlen_q > FEW_QUERIES

    def decode(self, call: DecodeCall) -> int:
        """Decodes a few queries per sequence. Returns 0, or 1 if memory runs out."""
        rows = call.heads_q // call.heads_kv
        multiplied = self._bfloat16 and call.dtype == DTYPES[torch.bfloat16] and call.seqlen_q == 1 and rows > FEW_ROWS
        return (self._bfloat16_decode if multiplied else self._decode)(ctypes.byref(call))

    def forward(self, call: ForwardCall, dtype: torch.dtype) -> int:
        """Runs the forward pass. dtype: the dtype of the queries. Returns 0, or 1 if memory runs out."""
        multiplied = self.multiplies(dtype, call.seqlen_q)
        return (self._bfloat16_forward if multiplied else self._forward)(ctypes.byref(call))

    def backward(self, call: BackwardCall, dtype: torch.dtype) -> int:
        """Writes the gradients. dtype: the dtype of the queries. Returns 0, or 1 if memory runs out."""
        if self.multiplies(dtype, call.forward.seqlen_q):
            status = self._bfloat16_backward(ctypes.byref(call))
            if status != NOT_FINITE:
                return status
        return self._backward(ctypes.byref(call))
