"""Checks the positions that calls are given: those of all tokens, of tokens to rotate, and of cached tokens."""

from __future__ import annotations

import torch

from ..schemes.bands import bands_text
from ..schemes.rotary import Rotary
from . import addresses
from .cache_tables import CachePositions, CacheTables
from .checks import DTYPES, MAX_HEAD_DIM, check_int32, check_no_gradient, check_tensor
from .protocol import DIFFERENTIABLE
from .visible import visible_tokens

TABLES = ("page_positions", "page_first", "page_lengths")


def check_positions(positions, q, k, rotary) -> torch.Tensor:
    """Checks positions and returns them as (batch, seqlen) or (batch, seqlen, axes)."""
    _check_position_values(positions, q, rotary)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"positions: expected None, or seqlen_q == seqlen_k, got {q.shape[1]} and {k.shape[1]}")
    shape = tuple(q.shape[:2]) + ((rotary.axes,) if rotary.axis else ())
    if tuple(positions.shape) not in (shape, shape[1:], (1, *shape[1:])):
        raise ValueError(f"positions: expected shape {shape} or {shape[1:]}, got {tuple(positions.shape)}")
    return positions.expand(shape)


def check_packed_positions(positions, q, k, rotary, cu_seqlens_q, cu_seqlens_k) -> torch.Tensor:
    """Checks positions of packed tokens and returns them as (1, total) or (1, total, axes)."""
    _check_position_values(positions, q, rotary)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"positions: expected as many keys as queries, got {q.shape[0]} queries and {k.shape[0]} keys")
    on_host = cu_seqlens_q.device.type == "cpu" and not torch.compiler.is_compiling()
    if cu_seqlens_q is not cu_seqlens_k and on_host and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError(
            f"positions: expected equal cu_seqlens_q and cu_seqlens_k, got {cu_seqlens_q.tolist()} and "
            f"{cu_seqlens_k.tolist()}"
        )
    shape = (q.shape[0], rotary.axes) if rotary.axis else (q.shape[0],)
    if tuple(positions.shape) != shape:
        raise ValueError(f"positions: expected shape {shape}, got {tuple(positions.shape)}")
    return positions[None]


def _check_position_values(positions, q, rotary) -> None:
    check_tensor("positions", positions)
    if len(rotary.bands) != 1 or not rotary.bands[0].is_plain:
        raise ValueError(
            "positions: expected None, or a scheme that leaves every distance d as it is, got one whose distance is "
            + bands_text(rotary.bands)
        )
    _check_numbers(positions, q, "q")


def _check_numbers(positions, like, like_name: str) -> None:
    check_tensor("positions", positions)
    if positions.device != like.device:
        raise ValueError(f"positions: expected device {like.device}, the device of {like_name}, got {positions.device}")
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions: expected numbers, got {positions.dtype}")


def check_rotated(x, rotary, positions) -> torch.Tensor | None:
    """Checks the arguments of rotate. Returns positions of shape (batch, seqlen) or (batch, seqlen, axes)."""
    check_tensor("x", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.ndim not in (3, 4):
        expected = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise ValueError(f"x: expected {expected}, got shape {tuple(x.shape)}")
    if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"x: expected a contiguous last dimension, got stride {x.stride(-1)}")
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: expected a flashrope.Rotary, got {type(rotary).__name__}")
    head_dim = x.shape[-1]
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"x: expected head_dim to be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    if rotary.head_dim != head_dim:
        raise ValueError(f"rotary: expected head_dim {head_dim} as in x, got {rotary.head_dim}")
    rows = tuple(x.shape[:-2])
    shape = rows + ((rotary.axes,) if rotary.axis else ())
    if positions is None:
        if rotary.axis or x.ndim == 3:
            why = "an axial scheme" if rotary.axis else "packed x"
            raise ValueError(f"positions: expected shape {shape} for {why}, got None")
        return None
    _check_numbers(positions, x, "x")
    shapes = (shape,) if x.ndim == 3 else (shape, shape[1:], (1, *shape[1:]))
    if tuple(positions.shape) not in shapes:
        expected = " or ".join(map(str, shapes[:2]))
        raise ValueError(f"positions: expected shape {expected}, got {tuple(positions.shape)}")
    return positions[None] if x.ndim == 3 else positions.expand(shape)


def check_differentiable_positions(positions: torch.Tensor, impl: str) -> None:
    """Checks that positions do not require a gradient if the backend returns no gradient for them."""
    if impl not in DIFFERENTIABLE and torch.is_grad_enabled() and positions.requires_grad:
        raise ValueError(
            f"positions: no gradient from impl={impl!r} (its kernels read positions as constants), got a tensor that "
            "requires grad; use positions.detach(), or impl='reference', which differentiates them"
        )


def check_cached_positions(given: CachePositions, q, k_cache, rotary, tables: CacheTables, rotated_keys) -> None:
    """Checks the tables of explicit positions.

    Raises:
        TypeError, ValueError: a table is invalid. The message names the argument and says what was expected.
    """
    batch, new = tables.seqlens.shape[0], tables.new
    for name, table in zip(TABLES, given, strict=False):
        if table is None:
            continue
        if tables.block_table is None:
            raise ValueError(f"{name}: expected None without a block_table, got a table; use slot_positions")
        check_int32(name, table, q, "q", (batch, tables.block_table.shape[1]))
    if rotated_keys:
        raise ValueError("rotated_keys: not supported with explicit positions (rotated keys cannot move), got True")
    axes = (rotary.axes,) if rotary.axis else ()
    slots, queries = given.slot_positions, given.queries
    if slots is not None:
        _check_table("slot_positions", slots, (torch.float32,), q, (*k_cache.shape[:2], *axes))
    elif axes:
        raise ValueError("slot_positions: expected the coordinates of every slot for an axial scheme, got None")
    if queries is not None:
        _check_table("positions", queries, (torch.int32, torch.int64, torch.float32), q, (*q.shape[:-2], *axes))
    if slots is not None:
        if tables.slot_mapping is not None and queries is None:
            raise ValueError(
                "positions: expected the positions of the new keys, because slot_mapping is given, got None"
            )
        if queries is not None and tables.packed is None and new and q.shape[1] != new:
            raise ValueError(f"positions: expected as many queries as new keys, {new}, got {q.shape[1]}")


def _check_table(name: str, x, dtypes: tuple[torch.dtype, ...], like, shape: tuple[int, ...]) -> None:
    check_tensor(name, x)
    if x.dtype not in dtypes:
        expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {x.dtype}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, the device of q, got {x.device}")
    check_no_gradient(name, x)


def validate_positions(tables: CacheTables, k_cache, page_size: int) -> None:
    """Reads the tables on the host. Raises ValueError naming the invalid sequence and entry, or the sequence whose
    positions decrease."""
    positions = tables.positions
    assert positions is not None
    ends = [end for _, end in addresses.bounds(tables, k_cache)]
    for b, end in enumerate(ends if tables.block_table is not None else ()):
        for n in range(-(-end // page_size)):
            first = 0 if positions.page_first is None else int(positions.page_first[b, n])
            length = page_size - first if positions.page_lengths is None else int(positions.page_lengths[b, n])
            if not 0 <= first <= page_size:
                raise ValueError(f"page_first: sequence {b}, entry {n}: expected 0 to {page_size}, got {first}")
            if not 0 <= length <= page_size - first:
                raise ValueError(
                    f"page_lengths: sequence {b}, entry {n}: expected 0 to {page_size - first}, got {length}"
                )
    for b, (first, end) in enumerate(addresses.bounds(tables, k_cache)):
        position = visible_tokens(positions, b, first, end, tables.block_table, k_cache).position
        falls = (position.diff() < 0).nonzero() if position.ndim == 1 else position.new_empty(0)
        if falls.numel():
            n = int(falls[0]) + 1
            raise ValueError(
                f"positions: sequence {b}: expected positions that do not decrease, got {float(position[n]):g} after "
                f"{float(position[n - 1]):g}, at token {n}"
            )
