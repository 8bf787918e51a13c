"""The CUDA backend: launches the C++ decode kernels of csrc/. The backend needs the compiled extension."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from ..calls import addresses
from ..calls.cache_tables import ONE_PER_QUERY, CacheLayer, CacheTables
from ..calls.plans import EachLayer, Queries, not_served
from ..calls.records import CacheCall, accumulation_type, aligned, multiprocessors, refuse, unseen
from ..schemes.bands import have_maps
from ..schemes.cos_sin import coarse_rows, two_level_table
from ..schemes.lowered import lower
from ..schemes.resident import kept_on_device
from ..schemes.rotary import Rotary
from .shared.splits import choose_splits

LIBRARY = Path(__file__).resolve().parents[1] / "_cuda.abi3.so"
HEAD_DIMS = (64, 96, 128, 256)
CACHE_OPTIONS: frozenset[str] = frozenset()
MAX_SEQLEN_Q = 64  # csrc/decode.h defines the same MAX_SEQLEN_Q and TILE_ROWS
TILE_ROWS = 16
OWN_VALUES = "its kernels need values in separate memory, but v_cache is a view of k_cache"


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    if not cached:
        return "the CUDA kernels support only attention_with_cache; use impl='triton'"
    if not LIBRARY.exists():
        return "the CUDA extension is not built (FLASHROPE_BUILD_CUDA=1 pip install --no-build-isolation .)"
    if not q.is_cuda:
        return f"the CUDA kernels need a CUDA device, q is on {q.device}"
    return unsupported_queries(q) or _unsupported_device(q.device)


def unsupported_queries(q: torch.Tensor) -> str:
    """Returns why no device's kernels can serve queries of this dtype and shape, or ""."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA kernels take float16 and bfloat16, q is {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"the CUDA kernels are compiled for head_dim {', '.join(map(str, HEAD_DIMS))}, q has {q.shape[-1]}"
    if q.ndim == 4 and q.shape[1] > MAX_SEQLEN_Q:  # _check_packed checks packed queries
        limit = f"the CUDA kernels take up to {MAX_SEQLEN_Q} query tokens, q has {q.shape[1]}"
        return f"{limit}; use impl='triton' for prefill"
    return ""


def _unsupported_device(device: torch.device) -> str:
    if torch.version.hip:
        return f"the CUDA kernels need an NVIDIA GPU, {device} is AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return ""
    return f"the CUDA kernels need compute capability 8.0 or newer, {device} has {capability}"


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> EachLayer:
    """Plans the layers of a step, as ``CacheBackend`` describes."""
    refuse("cuda", not_served("rotated_keys") if call.rotated_keys else "")
    return EachLayer(append_to_cache, attention_with_cache, call)


def append_to_cache(
    layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None, tables: CacheTables, rotary: Rotary | None = None
) -> None:
    """Writes k, v (batch, seqlen_new, heads_kv, head_dim) after tables.seqlens, or packed k and v, in one launch."""
    if v is None:
        raise ValueError(f"impl='cuda' cannot serve this call: {OWN_VALUES}; use impl='triton'")
    _refuse_layer(layer)
    k_cache, v_cache = layer.k, layer.v
    refuse("cuda", "" if rotary is None else not_served("rotated_keys"))
    _check_aligned(k_cache=k_cache, v_cache=v_cache)
    if tables.cu_seqlens_q is not None:
        k_cache, v_cache, tables = _token_pages(k_cache, v_cache, k.shape[0], tables)
        k, v = k[:, None], v[:, None]
    if k.numel() and k_cache.numel() and tables.capacity(k_cache):
        _operators().append(k_cache, v_cache, _to_aligned(k), _to_aligned(v), tables.seqlens, tables.block_table)


def attention_with_cache(q: torch.Tensor, layer: CacheLayer, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse), with two launches. out has q's shape and dtype and is contiguous. lse is float32 (batch,
    heads_q, seqlen_q).

    Raises:
        ValueError: the cache is quantized; or the scheme has a first_channel, maps positions or has log_steps.
    """
    if have_maps(call.bands):
        raise ValueError(
            "impl='cuda' cannot serve this call: its kernels have no position maps (self_extend, dual_chunk); use "
            "impl='triton'"
        )
    if call.rotary.query_scale.log_n_every is not None:
        raise ValueError("impl='cuda' cannot serve this call: its kernels have no log_steps; use impl='triton'")
    if call.rotary.first_channel:
        raise ValueError(
            f"impl='cuda' cannot serve this call: its kernels rotate channels from 0 on, not from first_channel = "
            f"{call.rotary.first_channel}; use impl='triton'"
        )
    _refuse_layer(layer)
    if call.tables.cu_seqlens_q is not None:
        return _attend_packed(q, layer, call)
    k_cache, v_cache = layer.k, layer.v
    _check_aligned(k_cache=k_cache, v_cache=v_cache)
    (batch, seqlen_q, heads_q, head_dim), heads_kv, tables = q.shape, k_cache.shape[2], call.tables
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads_q, seqlen_q, dtype=accumulation_type(q), device=q.device)
    capacity = tables.capacity(k_cache)
    if not (q.numel() and k_cache.numel() and capacity and call.bands):
        return out.zero_(), lse.fill_(float("-inf"))
    rotary, scale = call.rotary, call.rotary.query_scale
    bands, rotated_pairs = _bands(rotary, call.causal, q.device)
    groups, rows_per_group = batch * heads_kv, seqlen_q * (heads_q // heads_kv)
    splits = call.num_splits or _default_splits(groups, rows_per_group, capacity, head_dim, multiprocessors(q.device))
    rows = splits * batch * seqlen_q * heads_q
    partial = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=q.device)
    _operators().decode(
        _to_aligned(q),
        k_cache,
        v_cache,
        tables.seqlens,
        tables.block_table,
        tables.leftpad,
        bands,
        two_level_table(rotary, call.causal, coarse_rows(max(capacity, seqlen_q)), q.device),
        tables.seqlen_new,
        rotary.rotary_dim,
        rotated_pairs,
        rotary.interleaved,
        call.score_scale,
        scale.log_n_factor,
        scale.log_n_floor,
        scale.length_scale or 0.0,
        splits,
        out,
        lse,
        partial[: rows * head_dim],
        partial[rows * head_dim :],
    )
    return out, lse


def _refuse_layer(layer: CacheLayer) -> None:
    """Raises ValueError for a layer that the kernels do not support."""
    if layer.k_scale is not None:
        raise ValueError(
            f"impl='cuda' cannot serve this call: its kernels do not read quantized caches, got k_cache of type "
            f"{layer.k.dtype}; use impl='triton'"
        )
    if layer.v.shape != layer.k.shape:
        raise ValueError(
            f"impl='cuda' cannot serve this call: its kernels need a v_cache with the head_dim of k_cache, "
            f"{layer.k.shape[-1]}, got {layer.v.shape[-1]}; use impl='triton'"
        )


# ---- packed queries
# The index arithmetic runs on the device, so that the host reads no length. Packed queries run on the kernels for
# batches.


def _check_packed(tables: CacheTables) -> None:
    if tables.max_seqlen_q > MAX_SEQLEN_Q:
        raise ValueError(
            f"max_seqlen_q: the CUDA kernels take up to {MAX_SEQLEN_Q} query tokens of a sequence, got "
            f"{tables.max_seqlen_q}; use impl='triton' for prefill"
        )


def _token_pages(k_cache, v_cache, total_q: int, tables: CacheTables):
    """Returns (k_cache, v_cache, tables) for append. In these tables every token is a separate sequence of one page."""
    _check_packed(tables)
    if tables.block_table is None:
        rows = TILE_ROWS
        k_pages, v_pages = (_as_pages(name, x, rows) for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    else:
        rows, k_pages, v_pages = k_cache.shape[1], k_cache, v_cache
    if tables.slot_mapping is not None:
        page, row, fits = addresses.mapped_places(tables, k_cache)
    else:
        sequence, behind = addresses.token_sequences(tables.cu_seqlens_q, total_q)
        starts = tables.cu_seqlens_q.to(torch.int64)
        before = (starts[1:] - starts[:-1])[sequence] - behind
        slot = addresses.first_new_slot(tables, k_cache)[sequence] + before.clamp(min=0)
        page, row, fits = addresses.places(tables, k_cache, sequence, slot)
        fits &= (behind > 0) & (before >= 0)
    if tables.block_table is None:  # so far ``page`` is a sequence and ``row`` a slot of it
        slot = page * k_cache.shape[1] + row
        page, row = slot // rows, slot % rows
    table = torch.where(fits, page, -1).to(torch.int32)[:, None]
    return k_pages, v_pages, CacheTables(torch.where(fits, row, 0).to(torch.int32), table, None, 1)


def _as_pages(name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns x (sequences, capacity, heads_kv, head_dim) as a view of pages with ``rows`` rows each."""
    sequences, capacity = x.shape[:2]
    if capacity % rows == 0 and (sequences == 1 or x.stride(0) == capacity * x.stride(1)):
        return x.unflatten(1, (-1, rows)).flatten(0, 1)
    raise ValueError(
        f"{name}: to append packed keys the CUDA kernels need pages, or a contiguous cache whose capacity is a "
        f"multiple of {rows}, got shape {tuple(x.shape)}, stride {x.stride()}; use impl='triton'"
    )


def _attend_packed(q, layer: CacheLayer, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with packed queries as a batch with max_seqlen_q rows for every sequence. A sequence's queries are the
    last of these rows, so they keep their positions. The results of rows without a query are dropped."""
    tables, total_q = call.tables, q.shape[0]
    _check_packed(tables)
    cu_seqlens_q, longest = tables.cu_seqlens_q.to(torch.int64), tables.max_seqlen_q
    if not (total_q and longest and cu_seqlens_q.shape[0] > 1):
        return unseen(q, layer.v)
    lengths = cu_seqlens_q.diff()
    seqlens = tables.seqlens
    if tables.seqlen_new == ONE_PER_QUERY:
        seqlens = (addresses.first_new_slot(tables, layer.k) + lengths).to(torch.int32)
    row = cu_seqlens_q[1:, None] - longest + torch.arange(longest, device=q.device)
    batch_call = call._replace(tables=CacheTables(seqlens, tables.block_table, tables.leftpad))
    out, lse = attention_with_cache(q[row.clamp(0, total_q - 1)], layer, batch_call)

    sequence, behind = addresses.token_sequences(tables.cu_seqlens_q, total_q)
    exists = (behind > 0) & (lengths[sequence] <= longest)
    row = longest - behind.clamp(1, longest)
    out = torch.where(exists[:, None, None], out[sequence, row], 0)
    lse = torch.where(exists[:, None], lse[sequence, :, row], float("-inf"))
    return out, lse.T.contiguous()


# ---- the extension


def build_info() -> str:
    """Returns how the extension was built, or a message that it is not built."""
    if not LIBRARY.exists():
        return "not built"
    try:
        from .. import _build_info  # type: ignore[attr-defined]  # the build writes it
    except ImportError as error:  # _build_info was built for another Python version; the kernels work with all versions
        return f"built, details cannot be read ({error})"
    return f"{_build_info.architectures}, nvcc {_build_info.nvcc}, revision {_build_info.revision}"


@lru_cache(maxsize=1)
def _operators():
    torch.ops.load_library(LIBRARY)
    return torch.ops.flashrope_cuda


def _default_splits(groups: int, rows: int, capacity: int, head_dim: int, multiprocessors: int) -> int:
    """Returns the number of splits of the keys that fills the device.

    groups: number of (sequence, key head) pairs. rows: query rows of each pair.
    """
    tile_keys = 32 if head_dim > 128 else 64  # as in warps_for and blocks_for of csrc/decode.h
    resident = 2 if head_dim > 96 else 3
    return choose_splits(groups * -(-rows // TILE_ROWS), -(-capacity // tile_keys), resident * multiprocessors)


@kept_on_device("band table")
def _bands(rotary: Rotary, causal: bool, device: torch.device) -> tuple[torch.Tensor, int]:
    """Returns the bands on the device, int32 (bands, 4) with the columns start, stop, q_rotation and k_rotation, and
    ``Lowered.rotated_pairs``."""
    lowered = lower(rotary, causal)
    rows = [(band.start, band.stop, band.q_rotation, band.k_rotation) for band in lowered.bands]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").to(device), lowered.rotated_pairs


def _to_aligned(x: torch.Tensor) -> torch.Tensor:
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _check_aligned(**caches: torch.Tensor) -> None:
    for name, x in caches.items():
        if not aligned(x):
            raise ValueError(
                f"{name}: the CUDA kernels need an address and strides that are multiples of 16 bytes, got address "
                f"{x.data_ptr():#x}, stride {x.stride()}"
            )
