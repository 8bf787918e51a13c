"""Argument checks of the public calls. Most messages read "name: expected X, got Y". Only ``validate_tables`` waits for
the device."""

from __future__ import annotations

import math
import sys
import warnings
from typing import NoReturn

import torch
import torch.nn.functional as F

from ..schemes.rotary import Rotary
from ..schemes.rotated_keys import one_rotation
from .autocast import autocast_hint
from .cache_tables import ONE_PER_QUERY, CacheTables, first_value
from .records import MAX_SPLITS

CACHES = ("k_cache", "v_cache")
MAX_HEAD_DIM = 512
MAX_NARROW_HEAD_DIM = 256  # beyond: no quantized caches, no rotated keys, no explicit positions of cached tokens
# head_dim of keys whose channels are also the values: latent attention has 512 such channels, and 64 that rotate.
MAX_SHARED_HEAD_DIM = 576
# No known model with heads_kv == heads_q has more heads. With fewer key heads, some models have 256 query heads.
MANY_HEADS = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_outside_context_parallel() -> None:
    """Raises inside torch's context_parallel. context_parallel shards the sequence and replaces only
    scaled_dot_product_attention, so any other attention would silently see only this rank's keys."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if module is not None and F.scaled_dot_product_attention in module._replaced_functions:
        raise RuntimeError(
            "flashrope: expected to be called outside torch's context_parallel, which shards the sequence and "
            "replaces only scaled_dot_product_attention; use shard_sequence and context_parallel_attention of "
            "flashrope.integrations.distributed"
        )


def check_tensor(name: str, x) -> None:
    """Checks that x is a dense tensor.

    Raises:
        TypeError: x is not a tensor.
        ValueError: x is nested, sparse or of another layout that has no strides. The message names the layout.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        hint = "; pass x.values() and x.offsets() of a jagged one to attention_varlen" if x.is_nested else ""
        kind = "a nested tensor" if x.is_nested else "a tensor"
        raise ValueError(f"{name}: expected a dense tensor, got {kind} of layout {x.layout}{hint}")


def check_tensors(
    q, k, v, rotary, rank: int, names=("k", "v"), new=(), scales=None
) -> tuple[torch.Size | tuple[int, ...], torch.Size | tuple[int, ...]]:
    """Checks the tensors and returns the shapes of q and k.

    rank: the number of dimensions of q and of the tensors in ``new``. names: the names of k and v in errors. With
    CACHES, k and v are caches, which have four dimensions. new: (name, tensor) of the keys and values that go to a
    cache. scales: (k_scale, v_scale) if the cache is quantized, else None.
    """
    dtype = device = None
    tensors, like = (("q", q), (names[0], k), (names[1], v)), "q"
    if names is CACHES:
        tensors += tuple(new)
        if scales is not None:
            tensors = (tensors[0], *new)
        # If the types of the caches differ from each other, the error names the cache that differs from q.
        elif getattr(k, "dtype", None) == getattr(v, "dtype", None):
            tensors, like = (*tensors[1:3], tensors[0], *new), "the cache"
    for name, x in tensors:
        check_tensor(name, x)
        expected = 4 if name in CACHES else rank
        if x.ndim != expected:
            layout = "(batch, seqlen, heads, head_dim)" if expected == 4 else "(total, heads, head_dim)"
            raise ValueError(f"{name}: expected {layout}, got shape {tuple(x.shape)}")
        if x.dtype is not dtype:
            if x.dtype not in DTYPES:
                _refuse_dtype(name, x.dtype)
            if dtype is not None:
                raise TypeError(f"{name}: expected {dtype}, the dtype of {like}, got {x.dtype}{autocast_hint(x)}")
            dtype, device = x.dtype, x.device
        if x.device != device:
            raise ValueError(f"{name}: expected device {device}, the device of {like}, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
    shape_q, shape_k = q.shape, (k.shape if scales is None else _check_codes(q, k, v, *scales))
    head_dim, heads_q, heads_kv = shape_q[-1], shape_q[-2], shape_k[-2]
    if shape_k[-1] != head_dim:
        raise ValueError(f"{names[0]}: expected head_dim {head_dim} as in q, got {shape_k[-1]}")
    shared = names is CACHES and head_dim == MAX_SHARED_HEAD_DIM  # check_cache checks the values
    if not shared and (head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM):
        raise ValueError(f"q: expected head_dim to be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    if v.shape != shape_k and scales is None:
        _check_values(names, v.shape, shape_k)
    if not heads_kv or heads_q % heads_kv:
        raise ValueError(f"q: expected heads_q to be a multiple of heads_kv = {heads_kv}, got {heads_q}{_layout(rank)}")
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: expected a flashrope.Rotary, got {type(rotary).__name__}")
    if rotary.head_dim != head_dim:
        raise ValueError(f"rotary: expected head_dim {head_dim} as in q, got {rotary.head_dim}")
    return shape_q, shape_k


def _refuse_dtype(name: str, dtype: torch.dtype) -> NoReturn:
    message = f"{name}: expected float16, bfloat16, float32 or float64, got {dtype}"
    if dtype == torch.int8:
        raise ValueError(f"{message}; quantized keys and values are read from a cache, with k_scale and v_scale")
    raise TypeError(message)


def _check_codes(q, k_cache, v_cache, k_scale, v_scale) -> tuple[int, ...]:
    """Checks a quantized cache. Returns (batch or pages, slots, heads_kv, head_dim)."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
        if x.dtype != torch.int8:
            raise ValueError(f"{name}: expected int8, because k_scale or v_scale is given, got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"{name}: expected (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name}: expected head_dim {q.shape[-1]} as in q, got {x.shape[-1]}")
        if x.shape != k_cache.shape:
            raise ValueError(
                f"{name}: expected shape {tuple(k_cache.shape)}, the shape of k_cache (quantized values need the "
                f"head_dim of the keys), got {tuple(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device}, the device of q, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")
    shape = tuple(k_cache.shape[:-1])
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        expected = f"{name}: expected a float32 tensor of shape {shape} for a cache of {k_cache.dtype}"
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{expected}, got {x if x is None else type(x).__name__}")
        if x.dtype != torch.float32:
            raise ValueError(f"{expected}, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{expected}, got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device}, the device of q, got {x.device}")
        check_no_gradient(name, x)
    return *shape, q.shape[-1]


def _check_values(names, shape_v, shape_k) -> None:
    """Checks a v whose shape differs from k's. A different head_dim is allowed, but in a cache only a smaller one."""
    expected = (*shape_k[:-1], shape_v[-1])
    if shape_v != expected:
        hint = " except for head_dim" if expected != shape_k else ""
        raise ValueError(f"{names[1]}: expected shape {expected}, the shape of {names[0]}{hint}, got {tuple(shape_v)}")
    largest, why = (shape_k[-1], f", the head_dim of {names[0]}") if names is CACHES else (MAX_HEAD_DIM, "")
    if shape_v[-1] % 8 or not 8 <= shape_v[-1] <= largest:
        raise ValueError(f"{names[1]}: expected head_dim to be a multiple of 8 up to {largest}{why}, got {shape_v[-1]}")


def _layout(rank: int) -> str:
    return "; shapes are (batch, seqlen, heads, head_dim)" if rank == 4 else ""


_warned_calls: set[str] = set()  # names of the calls that have warned of rows without keys in this process


def warn_of_rows_without_keys(call: str, rows: int, queries: int, keys: int, stacklevel: int = 3) -> None:
    """Warns that queries of a causal call see no key. Each call warns once per process.

    Args:
        call: the name of the public call.
        rows: the number of rows of q that see no key, summed over the sequences if the call has a length per sequence.
        queries, keys: lengths of the sequence with the fewest keys.
        stacklevel: the argument of ``warnings.warn``, chosen so that the warning shows the caller's line.
    """
    if call in _warned_calls:
        return
    _warned_calls.add(call)
    warnings.warn(
        f"{call}: {rows} {'row sees' if rows == 1 else 'rows see'} no key, because causal queries align bottom-right "
        f"(the last query sees all keys), got {queries} queries and {keys} keys. Such rows get out 0, and lse -inf or "
        "the sink. Expected at least as many keys as queries, or causal=False. Later calls do not warn.",
        stacklevel=stacklevel,
    )


def warn_of_short_caches(call: str, tables: CacheTables, seqlen_q: int, stacklevel: int) -> None:
    """Warns of sequences with fewer keys than queries, if the host can read the lengths without waiting.

    Sequences without any key are padding of the batch and are left out.
    """
    seqlens = tables.seqlens
    if type(seqlens) is not torch.Tensor or seqlens.device.type != "cpu":
        return
    keys = [length + tables.seqlen_new for length in seqlens.tolist()]
    short = [length for length in keys if 0 < length < seqlen_q]
    if short:
        rows = sum(seqlen_q - length for length in short)
        warn_of_rows_without_keys(call, rows, seqlen_q, min(short), stacklevel + 1)


def warn_of_layout(shape_q, shape_k) -> bool:
    """Warns of shapes that are allowed but look like (batch, heads, seqlen, head_dim). Returns whether it has warned.

    The function warns for calls with more queries than keys, and for calls with more than ``MANY_HEADS`` heads. A
    tensor (batch, heads, seqlen, head_dim) cannot be recognized if it has at most ``MANY_HEADS`` tokens and as many key
    heads as query heads.
    """
    (_, seqlen_q, heads_q, _), (_, seqlen_k, heads_kv, _) = shape_q, shape_k
    if heads_q > MANY_HEADS:
        if heads_q <= seqlen_q or heads_q != heads_kv and heads_q <= 2 * MANY_HEADS:
            return False
        why = f"{heads_q} heads and only {seqlen_q} queries"
    # if the axes are swapped, seqlen_q and seqlen_k are the numbers of heads, so seqlen_q is a multiple of seqlen_k
    elif seqlen_k and heads_q == heads_kv and not seqlen_q % seqlen_k:
        why = f"{seqlen_q} queries and only {seqlen_k} keys, so that the first {seqlen_q - seqlen_k} rows have no key"
    else:
        return False
    warnings.warn(
        f"q: expected (batch, seqlen, heads, head_dim), got shape {tuple(shape_q)} with k {tuple(shape_k)}, which is "
        f"{why}. If q is (batch, heads, seqlen, head_dim), as for scaled_dot_product_attention, use transpose(1, 2).",
        stacklevel=3,
    )
    return True


def check_cache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary,
    paged: bool,
    packed: tuple = (),
    scales: tuple = (None, None),
    positions: bool = False,
) -> tuple[int, int]:
    """Checks the tensors of a cached call. Returns the number of slots of a sequence or page, and the number of new
    keys of a sequence.

    packed: (cu_seqlens_q, max_seqlen_q) of packed q, k and v. scales: (k_scale, v_scale). positions: whether the cache
    stores the positions of its slots.
    """
    shared = _shared_values(k_cache, v_cache, k is not None and v is None)
    if k is None and v is not None:
        raise ValueError("k: expected both or none of k and v, got only v")
    if k is not None and v is None and shared is None:
        raise ValueError(
            "v: expected both or none of k and v, got only k; v is None where v_cache is a view of channels of k_cache"
        )
    if isinstance(v, torch.Tensor) and v.numel() and shared is not None:
        raise ValueError(
            f"v: expected None, because v_cache is a view of k_cache from channel {shared} on, and the values are part "
            "of the keys, got a tensor"
        )
    new = [(name, x) for name, x in (("k", k), ("v", v)) if x is not None]
    rank = 3 if packed else 4
    quantized = (
        scales[0] is not None
        or scales[1] is not None
        or (type(k_cache) is torch.Tensor and k_cache.dtype == torch.int8)
    )
    if quantized and shared is not None:
        raise ValueError(
            "v_cache: a view of k_cache is not supported in quantized caches, got a view from channel "
            f"{shared} on; give quantized values separate memory"
        )
    shape_q, shape_cache = check_tensors(q, k_cache, v_cache, rotary, rank, CACHES, new, scales if quantized else None)
    if shape_q[-1] == MAX_SHARED_HEAD_DIM:
        if shared is None and not torch.compiler.is_compiling():
            raise ValueError(
                f"q: expected head_dim to be a multiple of 8 up to {MAX_HEAD_DIM}, or {MAX_SHARED_HEAD_DIM} "
                f"where v_cache is a view of channels of k_cache, got {MAX_SHARED_HEAD_DIM}"
            )
        if v_cache.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"v_cache: expected at most {MAX_HEAD_DIM} channels of k_cache, got {v_cache.shape[-1]}")
    rows, capacity, heads_kv, head_dim = shape_cache
    batch = shape_q[0]
    if packed:
        cu_seqlens_q, max_seqlen_q = packed
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, "q", max_seqlen_q)
        batch = cu_seqlens_q.shape[0] - 1
    if paged:
        if capacity < 16 or capacity & (capacity - 1):
            raise ValueError(f"k_cache: expected pages of 16, 32, 64, ... slots, got page_size {capacity}")
    elif rows != batch:
        like = "q" if rank == 4 else "cu_seqlens_q"
        raise ValueError(f"k_cache: expected batch {batch} as in {like}, got {rows}; pages need a block_table")
    if rotary.axis and not positions:
        raise ValueError("rotary: an axial scheme needs slot_positions, got none")
    seqlen_new = 0
    if new:
        seqlen_new = k.shape[1] if rank == 4 else ONE_PER_QUERY
        expected = (batch, seqlen_new, heads_kv) if rank == 4 else (shape_q[0], heads_kv)
        for (name, x), width in zip(new, (head_dim, head_dim if quantized else v_cache.shape[-1]), strict=False):
            if x.shape != (*expected, width):
                raise ValueError(f"{name}: expected shape {(*expected, width)}, got {tuple(x.shape)}")
    new_requires_grad = any(x.requires_grad for _, x in new)
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or new_requires_grad
    ):
        raise ValueError(
            "q, k, v: expected tensors that do not require grad; use torch.no_grad(), or attention in training"
        )
    return capacity, seqlen_new


def _shared_values(k_cache, v_cache, only_keys: bool) -> int | None:
    """Returns ``first_value`` of the caches, or None if they are not two tensors of four dimensions.

    only_keys: whether the call has k without v. While compiling, v_cache then counts as a view of k_cache if both are
        views of one tensor with equal strides.
    """
    tensors = isinstance(k_cache, torch.Tensor) and isinstance(v_cache, torch.Tensor)
    if not tensors or any(x.is_nested or x.ndim != 4 for x in (k_cache, v_cache)):
        return None
    if torch.compiler.is_compiling() and only_keys and v_cache._base is not None:
        related = v_cache._base is k_cache or v_cache._base is k_cache._base
        return 0 if related and v_cache.stride() == k_cache.stride() else None
    return first_value(k_cache, v_cache)


def refuse_beside_wide_heads(head_dim: int, quantized: bool, rotated_keys: bool, positions: bool) -> None:
    """Raises ValueError for features that no kernel supports beyond MAX_NARROW_HEAD_DIM channels yet."""
    for name, given in (
        ("quantized caches", quantized),
        ("rotated_keys", rotated_keys),
        ("explicit positions of cached tokens", positions),
    ):
        if given:
            raise ValueError(f"q: {name} are not supported beyond head_dim {MAX_NARROW_HEAD_DIM} yet, got {head_dim}")


def check_sinks(sinks, q) -> None:
    check_tensor("sinks", sinks)
    if not sinks.is_floating_point():
        raise TypeError(f"sinks: expected a float type, got {sinks.dtype}")
    if sinks.shape != q.shape[-2:-1]:
        raise ValueError(f"sinks: expected shape ({q.shape[-2]},), one number per head of q, got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: expected device {q.device}, the device of q, got {sinks.device}")


def check_no_gradient(name: str, x: torch.Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{name}: expected a tensor that does not require grad; use torch.no_grad(), or attention in training"
        )


def check_slot_mapping(slot_mapping, q) -> None:
    check_tensor("slot_mapping", slot_mapping)
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slot_mapping: expected int32 or int64, got {slot_mapping.dtype}")
    if slot_mapping.shape != q.shape[:1]:
        raise ValueError(f"slot_mapping: expected shape ({q.shape[0]},), got {tuple(slot_mapping.shape)}")
    if slot_mapping.device != q.device:
        raise ValueError(f"slot_mapping: expected device {q.device}, the device of q, got {slot_mapping.device}")
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping: expected a contiguous tensor, got stride {slot_mapping.stride()}")


def check_int32(name, x, like, like_name, shape: tuple) -> None:
    """Checks that x is an int32 tensor of this shape on like's device.

    shape: sizes, or names for dimensions whose size is not checked.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected an int32 tensor, got {type(x).__name__}")
    if x.dtype != torch.int32:
        hint = f"; pass {name}.int()" if x.dtype == torch.int64 else ""
        raise TypeError(f"{name}: expected int32, got {x.dtype}{hint}")
    if x.shape != shape and (
        x.ndim != len(shape)
        or any(n != size and not isinstance(n, str) for n, size in zip(shape, x.shape, strict=True))
    ):
        raise ValueError(
            f"{name}: expected shape ({', '.join(map(str, shape))}{',' * (len(shape) == 1)}), got {tuple(x.shape)}"
        )
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, the device of {like_name}, got {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {x.stride()}")


def validate_tables(tables: CacheTables, capacity: int, k_cache) -> None:
    """Reads the tables on the host. Raises a ValueError that names the wrong entry and its sequence."""
    if tables.slot_mapping is not None:
        _validate_slots(tables.slot_mapping.tolist(), k_cache.shape[0] * k_cache.shape[1])
    cu_seqlens_q = tables.cu_seqlens_q if tables.seqlen_new == ONE_PER_QUERY else None
    starts = cu_seqlens_q.tolist() if cu_seqlens_q is not None else None
    pads = tables.leftpad.tolist() if tables.leftpad is not None else None
    pages = tables.block_table.tolist() if tables.block_table is not None else None
    writable: dict[int, tuple[int, int]] = {}
    for b, length in enumerate(tables.seqlens.tolist()):
        seqlen_new = starts[b + 1] - starts[b] if starts else tables.seqlen_new
        if length < 0:
            raise ValueError(f"cache_seqlens: sequence {b}: expected at least 0, got {length}")
        if length + seqlen_new > capacity:
            new = f", with room for {seqlen_new} new keys in {capacity} slots" if seqlen_new else ""
            raise ValueError(
                f"cache_seqlens: sequence {b}: expected at most {capacity - seqlen_new}{new}, got {length}"
            )
        if pads is not None and not 0 <= pads[b] <= length + seqlen_new:
            raise ValueError(
                f"cache_leftpad: sequence {b}: expected 0 to {length + seqlen_new}, its length, got {pads[b]}"
            )
        if pages is None:
            continue
        page_size = k_cache.shape[1]
        for n in range((pads[b] if pads else 0) // page_size, -(-(length + seqlen_new) // page_size)):
            page = pages[b][n]
            if not 0 <= page < k_cache.shape[0]:
                raise ValueError(
                    f"block_table: sequence {b}, entry {n}: expected a page of the cache, 0 to {k_cache.shape[0] - 1}, "
                    f"got {page}"
                )
            if seqlen_new and n >= length // page_size and writable.setdefault(page, (b, n)) != (b, n):
                raise ValueError(
                    f"block_table: sequence {b}, entry {n}: expected a page that no other entry writes to, got {page}, "
                    f"which sequence {writable[page][0]}, entry {writable[page][1]} writes to"
                )


def _validate_slots(slots: list[int], count: int) -> None:
    seen: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if slot >= count:
            raise ValueError(f"slot_mapping: token {token}: expected a slot below {count}, got {slot}")
        if slot >= 0 and seen.setdefault(slot, token) != token:
            raise ValueError(
                f"slot_mapping: token {token}: expected a slot of its own, got {slot}, the slot of token {seen[slot]}"
            )


def check_num_splits(num_splits) -> int:
    """Checks num_splits and returns it, 0 for None."""
    is_int = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    if num_splits is not None and not (is_int and 1 <= num_splits <= MAX_SPLITS):
        raise ValueError(f"num_splits: expected None or a number from 1 to {MAX_SPLITS}, got {num_splits!r}")
    return num_splits or 0


def check_options(causal, softmax_scale, q, deterministic=None) -> float:
    """Checks the options and returns the softmax_scale to use."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected True, False or None, got {deterministic!r}")
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if not isinstance(softmax_scale, (int, float, torch.SymFloat)) or isinstance(softmax_scale, bool):
        raise TypeError(f"softmax_scale: expected a number, got {softmax_scale!r}")
    if not isinstance(softmax_scale, torch.SymFloat) and not 0 <= softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected a finite number of at least 0, got {softmax_scale!r}")
    return float(softmax_scale)


def check_rotated_keys(rotated_keys, rotary: Rotary) -> None:
    if not isinstance(rotated_keys, bool):
        raise TypeError(f"rotated_keys: expected True or False, got {rotated_keys!r}")
    one_rotation(rotary, "so that its keys can be stored rotated")


def check_cu_seqlens(name, cu_seqlens, x, x_name, max_seqlen) -> None:
    check_int32(name, cu_seqlens, x, x_name, ("sequences + 1",))
    if not cu_seqlens.shape[0]:
        raise ValueError(f"{name}: expected shape (sequences + 1,), got (0,)")
    maximum = name.replace("cu_seqlens", "max_seqlen")
    if not isinstance(max_seqlen, (int, torch.SymInt)) or isinstance(max_seqlen, bool) or max_seqlen < 0:
        hint = f"; pass {maximum}.item()" if isinstance(max_seqlen, torch.Tensor) else ""
        raise ValueError(f"{maximum}: expected a non-negative integer, got {max_seqlen!r}{hint}")
    # Reading host memory does not wait for a device. Tensor subclasses such as DTensor may not support tolist.
    if cu_seqlens.device.type == "cpu" and type(cu_seqlens) is torch.Tensor and not torch.compiler.is_compiling():
        values = cu_seqlens.tolist()
        if values[0] != 0:
            raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
        lengths = [b - a for a, b in zip(values, values[1:], strict=False)]
        if any(length < 0 for length in lengths):
            raise ValueError(f"{name}: expected non-decreasing values, got {values}")
        if values[-1] > x.shape[0]:
            raise ValueError(f"{name}: expected to end at {x.shape[0]} at most, the rows of {x_name}, got {values[-1]}")
        if lengths and max(lengths) > max_seqlen:
            raise ValueError(f"{maximum}: expected at least the longest sequence, {max(lengths)}, got {max_seqlen}")
