"""Checks the tables of explicit positions of cached tokens."""

from __future__ import annotations

import torch

from ..calls import addresses
from ..calls.cache_tables import CachePositions, CacheTables
from ..calls.checks import check_int32, check_no_gradient, check_tensor
from ..calls.visible import visible_tokens

TABLES = ("page_positions", "page_first", "page_lengths")


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
        _check_numbers("slot_positions", slots, (torch.float32,), q, (*k_cache.shape[:2], *axes))
    elif axes:
        raise ValueError("slot_positions: expected the coordinates of every slot for an axial scheme, got None")
    if queries is not None:
        _check_numbers("positions", queries, (torch.int32, torch.int64, torch.float32), q, (*q.shape[:-2], *axes))
    if slots is not None:
        if tables.slot_mapping is not None and queries is None:
            raise ValueError(
                "positions: expected the positions of the new keys, because slot_mapping is given, got None"
            )
        if queries is not None and tables.packed is None and new and q.shape[1] != new:
            raise ValueError(f"positions: expected as many queries as new keys, {new}, got {q.shape[1]}")


def _check_numbers(name: str, x, dtypes: tuple[torch.dtype, ...], like, shape: tuple[int, ...]) -> None:
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
