"""Launches the CUDA C++ decode kernels of csrc/: allocates, passes tables and bands. There only where the extension was
built."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from ..cos_sin import band_rotations, coarse_rows, resident, two_level_table
from ..rotary import Rotary
from .base import CacheCall, aligned, distance, multiprocessors

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.abi3.so"
HEAD_DIMS = (64, 96, 128, 256)
MAX_SEQLEN_Q = 64
MAX_SPLITS = 256
TILE_ROWS = 16  # csrc/decode.h
KEYS_PER_SPLIT = 256  # at least; fewer would not pay for the partial results
BLOCKS_PER_MULTIPROCESSOR = 2  # of the split kernel, whose shared memory allows two to three


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    if not cached:
        return "the CUDA kernels serve attention_with_cache only; use impl='triton'"
    if not LIBRARY.exists():
        return "the CUDA extension is not built (FLASHROPE_BUILD_CUDA=1 pip install --no-build-isolation .)"
    if not q.is_cuda:
        return f"the CUDA kernels need a CUDA device, q is on {q.device}"
    return unsupported(q) or _old_device(q.device)


def unsupported(q: torch.Tensor) -> str:
    """Why the kernels cannot serve queries of this type and shape on any device, or ""."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA kernels take float16 and bfloat16, q is {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"the CUDA kernels are compiled for head_dim {', '.join(map(str, HEAD_DIMS))}, q has {q.shape[-1]}"
    if q.shape[1] > MAX_SEQLEN_Q:
        return f"the CUDA kernels take up to {MAX_SEQLEN_Q} query tokens, q has {q.shape[1]}; use impl='triton' for prefill"
    return ""


def _old_device(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    return (
        ""
        if capability >= (8, 0)
        else f"the CUDA kernels need compute capability 8.0 or newer, {device} has {capability}"
    )


def append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table) -> None:
    """Writes k, v (batch, seqlen_new, heads_kv, head_dim) to the slots behind cache_seqlens, in one launch."""
    _check_aligned(k_cache=k_cache, v_cache=v_cache)
    if k.numel() and k_cache.numel() and (block_table is None or block_table.numel()):
        _operators().append(k_cache, v_cache, _aligned(k), _aligned(v), cache_seqlens, block_table)


def attention_with_cache(q, k_cache, v_cache, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q and contiguous, lse float32 (batch, heads_q, seqlen_q)), in two launches."""
    _check_aligned(k_cache=k_cache, v_cache=v_cache)
    batch, seqlen_q, heads_q, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads_q, seqlen_q, dtype=torch.float32, device=q.device)
    capacity = call.capacity(k_cache)
    if not (q.numel() and k_cache.numel() and capacity and call.bands):
        return out.zero_(), lse.fill_(float("-inf"))
    rotary = call.rotary
    table = two_level_table(rotary, call.causal, coarse_rows(max(capacity, seqlen_q)), q.device)
    heads_kv = k_cache.shape[2]
    splits = call.num_splits or _splits(
        seqlen_q * (heads_q // heads_kv), batch * heads_kv, capacity, multiprocessors(q.device)
    )
    rows = splits * batch * seqlen_q * heads_q
    partial = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=q.device)
    _operators().decode(
        _aligned(q),
        k_cache,
        v_cache,
        call.cache_seqlens,
        call.block_table,
        call.cache_leftpad,
        _bands(rotary, call.causal, q.device),
        table,
        call.seqlen_new,
        rotary.rotary_dim,
        _turning_pairs(rotary),
        rotary.interleaved,
        call.score_scale,
        *call.log_n,
        splits,
        out,
        lse,
        partial[: rows * head_dim],
        partial[rows * head_dim :],
    )
    return out, lse


def build_info() -> str:
    """What the extension was built with, or why there is none."""
    if not LIBRARY.exists():
        return "not built"
    try:
        from .. import _build_info
    except ImportError as error:  # built for another version of Python; the library itself is not bound to one
        return f"built, details cannot be read ({error})"
    return f"{_build_info.architectures}, nvcc {_build_info.nvcc}, revision {_build_info.revision}"


@lru_cache(maxsize=1)
def _operators():
    torch.ops.load_library(LIBRARY)
    return torch.ops.flashrope_cuda


def _splits(rows: int, groups: int, capacity: int, multiprocessors: int) -> int:
    """Parts of the keys that fill the device: `rows` query rows in each of `groups` sequences and key heads."""
    blocks = groups * -(-rows // TILE_ROWS)
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * multiprocessors // blocks)
    return max(1, min(wanted, capacity // KEYS_PER_SPLIT, MAX_SPLITS))


@lru_cache(maxsize=1024)
def _bands(rotary: Rotary, causal: bool, device: torch.device) -> torch.Tensor:
    """int32 (bands, 4): start, stop, and the table's slots for queries and for keys."""
    turns = band_rotations(rotary, causal)
    rows = [
        (distance(band.start), distance(band.stop), query, key)
        for band, query, key in zip(rotary.bands_for(causal), turns.query, turns.key, strict=True)
    ]
    return resident(lambda: torch.tensor(rows, dtype=torch.int32), device)


def _turning_pairs(rotary: Rotary) -> int:
    """Pairs up to the last one whose frequency is not 0."""
    return max((m + 1 for m, frequency in enumerate(rotary.frequencies) if frequency), default=0)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _check_aligned(**caches: torch.Tensor) -> None:
    for name, x in caches.items():
        if not aligned(x):
            raise ValueError(
                f"{name}: the CUDA kernels need an address and strides that are multiples of 16 bytes, got address "
                f"{x.data_ptr():#x}, stride {x.stride()}"
            )
