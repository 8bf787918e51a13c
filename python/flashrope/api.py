"""The public calls: argument checks, then one operator (two where a cache is written)."""

from __future__ import annotations

import math
import sys
from types import BuiltinFunctionType

import torch
import torch.nn.functional as F

from . import ops
from .backends import AttentionCall, load_backend, resolve_impl
from .rotary import Rotary

__all__ = ["attention", "attention_varlen", "attention_with_cache"]

MOST_SPLITS = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary,
    causal: bool = True,
    softmax_scale: float | None = None,
    positions: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
):
    """Attention over raw q, k, v with the rotary scheme applied inside; gradients are those of raw q, k, v.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32 (or float64 where the implementation has
            it).
        k, v: (batch, seqlen_k, heads_kv, head_dim), like q; heads_q is a multiple of heads_kv.
        rotary: the scheme; its head_dim is q's.
        causal: query row r sees keys 0 to r + seqlen_k - seqlen_q (bottom-right alignment); False sees all.
        softmax_scale: default head_dim ** -0.5.
        positions: (batch, seqlen) or (batch, seqlen, axes) numbers to use as positions instead of 0, 1, 2, ...;
            for schemes of one band and seqlen_q == seqlen_k. Causality and windows still go by index.
        return_lse: also return the log-sum-exp of the scores.
        impl: None picks by device; "triton", "cpu" or "reference" ask for one by name.

    Returns:
        out, like q and contiguous; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) float32 in natural-log
        units. A row without keys gives out 0 and lse -inf.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came. No check waits for the device.
    """
    q, k, v = _autocast(q, k, v)
    shape_q, shape_k = _check_tensors(q, k, v, rotary, rank=4)
    if shape_k[0] != shape_q[0]:
        raise ValueError(f"k: expected batch {shape_q[0]} as in q, got {shape_k[0]}")
    if positions is not None:
        positions = _check_positions(positions, q, k, rotary)
    elif rotary.axis:
        raise ValueError(f"positions: an axial scheme needs them, shape (batch, seqlen, {rotary.axes})")
    return _run(q, k, v, rotary, causal, softmax_scale, return_lse, impl, positions, None, None, shape_q[1], shape_k[1])


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
):
    """``attention`` over packed sequences of different lengths.

    Args:
        q: (total_q, heads_q, head_dim); sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k, v: (total_k, heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on q's device, non-decreasing from 0. Values that lie on a
            GPU are not read by the host; the kernels clamp them to the buffers.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; rows beyond them are not computed.
        The other arguments are those of ``attention``.

    Returns:
        out like q; with return_lse (out, lse), lse (heads_q, total_q) float32. Rows that no sequence holds are 0 and
        -inf.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v, rotary, rank=3)
    if rotary.axis:
        raise ValueError("rotary: an axial scheme needs positions, which packed sequences do not carry")
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, "q", max_seqlen_q)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k, "k", max_seqlen_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k: expected shape {tuple(cu_seqlens_q.shape)} as cu_seqlens_q, got {tuple(cu_seqlens_k.shape)}"
        )
    return _run(
        q,
        k,
        v,
        rotary,
        causal,
        softmax_scale,
        return_lse,
        impl,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
    )


def attention_with_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rotary: Rotary,
    cache_seqlens: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    num_splits: int | None = None,
    validate: bool = False,
):
    """Writes the new raw k, v behind the cached ones, then attends: decoding, speculative verification, chunked
    prefill.

    The cache holds raw keys, each once, whatever the scheme; they are rotated on their way to the product, and only
    where the scheme asks for it (ReRoPE: the last ``window``). No gradients: in training use ``attention``.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). Row r of a sequence of n cached and new keys stands at n - seqlen_q +
            r.
        k_cache, v_cache: (batch, capacity, heads_kv, head_dim), or with block_table (pages, page_size, heads_kv,
            head_dim); written in place.
        cache_seqlens: (batch,) int32, the slots in use before this call (those before cache_leftpad counted in). Not
            changed.
        k, v: (batch, seqlen_new, heads_kv, head_dim), or both None where the cache is complete.
        block_table: (batch, max_pages) int32, the page of every page_size slots of a sequence. Entries beyond a
            sequence's length may hold anything. page_size is a power of two of at least 16.
        cache_leftpad: (batch,) int32, the first valid slot of each sequence; positions count from it.
        num_splits: the number of parts the keys are shared out to. A number fixes the tiles as well: results are then
            equal to the bit whatever else the batch holds and however a sequence's tokens are cut into calls (Triton
            and CUDA). None picks by shape.
        validate: look at the tables first, which waits for the device. Without it, lengths are kept inside the
            capacity, page numbers inside the cache, and new keys without a place are dropped: nothing outside the
                buffers is touched, and no
            other sequence's result changes, but the result of a sequence with a wrong entry means nothing.
        impl: as in ``attention``, and "cuda" where the extension was built (float16, bfloat16, seqlen_q up to 64).
        rotary, causal, softmax_scale, return_lse: as in ``attention``.

    Returns:
        out, like q and contiguous; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) float32.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came; with validate also the sequence and
            the entry.
    """
    capacity, seqlen_new = _check_cache(q, k_cache, v_cache, k, v, rotary, block_table is not None)
    batch = q.shape[0]
    _check_int32("cache_seqlens", cache_seqlens, q, "q", (batch,))
    if cache_leftpad is not None:
        _check_int32("cache_leftpad", cache_leftpad, q, "q", (batch,))
    if block_table is not None:
        _check_int32("block_table", block_table, q, "q", (batch, "max_pages"))
        capacity *= block_table.shape[1]
    softmax_scale = _check_options(causal, softmax_scale, q)
    whole = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    if num_splits is not None and not (whole and 1 <= num_splits <= MOST_SPLITS):
        raise ValueError(f"num_splits: expected None or a number from 1 to {MOST_SPLITS}, got {num_splits!r}")
    impl = resolve_impl(impl, q, cached=True)
    if validate:
        _validate_tables(cache_seqlens, seqlen_new, capacity, cache_leftpad, block_table, k_cache)
    out, lse = ops.attention_with_cache(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        k,
        v,
        block_table,
        cache_leftpad,
        num_splits or 0,
        rotary.text,
        causal,
        softmax_scale,
        impl,
    )
    return (out, lse) if return_lse else out


def _run(
    q,
    k,
    v,
    rotary,
    causal,
    softmax_scale,
    return_lse,
    impl,
    positions,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
):
    softmax_scale = _check_options(causal, softmax_scale, q)
    impl = resolve_impl(impl, q)
    if type(F.scaled_dot_product_attention) is not BuiltinFunctionType:
        check_outside_context_parallel()
    if impl == "reference":
        call = AttentionCall(
            rotary, causal, softmax_scale, positions, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        out, lse = load_backend(impl).attention(q, k, v, call)
    else:
        out, lse = ops.attention(
            q,
            k,
            v,
            positions,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            rotary.text,
            causal,
            softmax_scale,
            impl,
        )
    return (out, lse) if return_lse else out


def _autocast(*tensors):
    """Under torch.autocast, float32 goes in and the autocast type comes out, as in scaled_dot_product_attention."""
    if (
        not torch.compiler.is_compiling()
        and not torch._C._is_any_autocast_enabled()
        or not isinstance(tensors[0], torch.Tensor)
    ):
        return tensors
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors)


def check_outside_context_parallel() -> None:
    """torch's context_parallel shards the sequence and replaces scaled_dot_product_attention alone: all else would
    silently attend to this rank's keys only."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if module is not None and F.scaled_dot_product_attention in module._replaced_functions:
        raise RuntimeError(
            "flashrope: expected to be called outside torch's context_parallel, which shards the sequence and "
            "replaces scaled_dot_product_attention alone; use shard_sequence and context_parallel_attention of "
            "flashrope.integrations.distributed"
        )


def _check_tensors(q, k, v, rotary, rank: int, names=("k", "v"), also=()) -> tuple[torch.Size, torch.Size]:
    """The shapes of q and k, each read once: short calls feel it. also: further (name, tensor) like q but for their
    shape."""
    dtype = device = None
    for name, x in (("q", q), (names[0], k), (names[1], v), *also):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.ndim != rank:
            layout = "(batch, seqlen, heads, head_dim)" if rank == 4 else "(total, heads, head_dim)"
            raise ValueError(f"{name}: expected {layout}, got shape {tuple(x.shape)}")
        if x.dtype is not dtype:
            if x.dtype not in DTYPES:
                raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}")
            if dtype is not None:
                raise TypeError(f"{name}: expected {dtype} as in q, got {x.dtype}")
            dtype, device = x.dtype, x.device
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} as in q, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
    shape_q, shape_k = q.shape, k.shape
    head_dim, heads_q, heads_kv = shape_q[-1], shape_q[-2], shape_k[-2]
    if shape_k[-1] != head_dim:
        raise ValueError(f"{names[0]}: expected head_dim {head_dim} as in q, got {shape_k[-1]}")
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"q: expected head_dim to be a multiple of 8 up to 256, got {head_dim}")
    if v.shape != shape_k:
        raise ValueError(f"{names[1]}: expected shape {tuple(shape_k)} as {names[0]}, got {tuple(v.shape)}")
    if not heads_kv or heads_q % heads_kv:
        raise ValueError(f"q: expected heads_q to be a multiple of heads_kv = {heads_kv}, got {heads_q}")
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: expected a flashrope.Rotary, got {type(rotary).__name__}")
    if rotary.head_dim != head_dim:
        raise ValueError(f"rotary: its head_dim is {rotary.head_dim}, q's is {head_dim}")
    return shape_q, shape_k


def _check_cache(q, k_cache, v_cache, k, v, rotary, paged: bool) -> tuple[int, int]:
    """(rows of a sequence or page, new keys)"""
    if (k is None) != (v is None):
        raise ValueError(
            f"{'k' if k is None else 'v'}: expected both or none of k and v, got only {'v' if k is None else 'k'}"
        )
    new = (("k", k), ("v", v)) if k is not None else ()
    shape_q, shape_cache = _check_tensors(q, k_cache, v_cache, rotary, 4, ("k_cache", "v_cache"), new)
    batch, (rows, capacity, heads_kv, head_dim) = shape_q[0], shape_cache
    if paged:
        if capacity < 16 or capacity & (capacity - 1):
            raise ValueError(f"k_cache: expected pages of 16, 32, 64, ... slots, got page_size {capacity}")
    elif rows != batch:
        raise ValueError(f"k_cache: expected batch {batch} as in q, got {rows}")
    if rotary.axis:
        raise ValueError("rotary: an axial scheme needs positions, which a cache does not carry")
    _, seqlen_new, _, _ = shape_new = k.shape if new else (batch, 0, heads_kv, head_dim)
    for name, shape in (("k", shape_new), ("v", v.shape)) if new else ():
        if shape != (batch, seqlen_new, heads_kv, head_dim):
            raise ValueError(f"{name}: expected shape {(batch, seqlen_new, heads_kv, head_dim)}, got {tuple(shape)}")
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k_cache.requires_grad
        or v_cache.requires_grad
        or k is not None
        and (k.requires_grad or v.requires_grad)
    ):
        raise ValueError("q, k, v: expected no gradient to be asked for; use torch.no_grad(), or attention in training")
    return capacity, seqlen_new


def _check_int32(name, x, like, like_name, shape: tuple) -> None:
    """shape: an entry that is a string, which says what it counts, may be any number."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected an int32 tensor, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {x.dtype}")
    if x.shape != shape and (
        x.ndim != len(shape)
        or any(n != size and not isinstance(n, str) for n, size in zip(shape, x.shape, strict=True))
    ):
        raise ValueError(
            f"{name}: expected shape ({', '.join(map(str, shape))}{',' * (len(shape) == 1)}), got {tuple(x.shape)}"
        )
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} as {like_name}, got {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {x.stride()}")


def _validate_tables(cache_seqlens, seqlen_new, capacity, cache_leftpad, block_table, k_cache) -> None:
    pads = cache_leftpad.tolist() if cache_leftpad is not None else None
    tables = block_table.tolist() if block_table is not None else None
    writable: dict[int, tuple[int, int]] = {}
    for b, length in enumerate(cache_seqlens.tolist()):
        if length < 0:
            raise ValueError(f"cache_seqlens: sequence {b} has length {length}")
        if length + seqlen_new > capacity:
            new = f" and {seqlen_new} new keys" if seqlen_new else ""
            raise ValueError(f"cache_seqlens: sequence {b} has length {length}{new}, its capacity is {capacity}")
        if pads is not None and not 0 <= pads[b] <= length:
            raise ValueError(f"cache_leftpad: sequence {b} starts at slot {pads[b]}, its length is {length}")
        if tables is None:
            continue
        page_size = k_cache.shape[1]
        for n in range((pads[b] if pads else 0) // page_size, -(-(length + seqlen_new) // page_size)):
            page = tables[b][n]
            if not 0 <= page < k_cache.shape[0]:
                raise ValueError(
                    f"block_table: sequence {b}, entry {n} is page {page}, the cache has pages 0 to "
                    f"{k_cache.shape[0] - 1}"
                )
            if seqlen_new and n >= length // page_size and writable.setdefault(page, (b, n)) != (b, n):
                raise ValueError(
                    f"block_table: sequence {b}, entry {n} would write to page {page}, as sequence "
                    f"{writable[page][0]}, entry {writable[page][1]} does"
                )


def _check_options(causal, softmax_scale, q) -> float:
    """The softmax_scale to use."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if not isinstance(softmax_scale, (int, float, torch.SymFloat)) or isinstance(softmax_scale, bool):
        raise TypeError(f"softmax_scale: expected a number, got {softmax_scale!r}")
    if not isinstance(softmax_scale, torch.SymFloat) and not 0 <= softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected a finite number of at least 0, got {softmax_scale!r}")
    return float(softmax_scale)


def _check_positions(positions, q, k, rotary) -> torch.Tensor:
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"positions: expected a tensor, got {type(positions).__name__}")
    if len(rotary.bands) != 1 or (rotary.bands[0].slope, rotary.bands[0].offset) != (1, 0):
        raise ValueError(
            f"positions: only schemes whose distance is d everywhere take them, this one has bands {rotary.bands}"
        )
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"positions: need seqlen_q == seqlen_k, got {q.shape[1]} and {k.shape[1]}")
    if positions.device != q.device:
        raise ValueError(f"positions: expected device {q.device} as q, got {positions.device}")
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions: expected numbers, got {positions.dtype}")
    shape = tuple(q.shape[:2]) + ((rotary.axes,) if rotary.axis else ())
    if tuple(positions.shape) not in (shape, shape[1:], (1, *shape[1:])):
        raise ValueError(f"positions: expected shape {shape} or {shape[1:]}, got {tuple(positions.shape)}")
    return positions.expand(shape)


def _check_cu_seqlens(name, cu_seqlens, x, x_name, max_seqlen) -> None:
    _check_int32(name, cu_seqlens, x, x_name, ("sequences + 1",))
    if not cu_seqlens.shape[0]:
        raise ValueError(f"{name}: expected shape (sequences + 1,), got (0,)")
    maximum = name.replace("cu_seqlens", "max_seqlen")
    if not isinstance(max_seqlen, (int, torch.SymInt)) or isinstance(max_seqlen, bool) or max_seqlen < 0:
        raise ValueError(f"{maximum}: expected a non-negative integer, got {max_seqlen!r}")
    # Host memory: reading it waits for nothing. A tensor subclass (DTensor) has no list of its own.
    if cu_seqlens.device.type == "cpu" and type(cu_seqlens) is torch.Tensor and not torch.compiler.is_compiling():
        values = cu_seqlens.tolist()
        if values[0] != 0:
            raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
        lengths = [b - a for a, b in zip(values, values[1:], strict=False)]
        if any(length < 0 for length in lengths):
            raise ValueError(f"{name}: expected non-decreasing values, got {values}")
        if values[-1] > x.shape[0]:
            raise ValueError(f"{name}: ends at {values[-1]}, {x_name} has {x.shape[0]} rows")
        if lengths and max(lengths) > max_seqlen:
            raise ValueError(f"{maximum}: expected at least the longest sequence, {max(lengths)}, got {max_seqlen}")
