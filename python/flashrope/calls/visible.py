"""Finds the visible slots of a sequence and their positions, from the tables of explicit positions.

A raw key has no position, so a page of raw keys can be used at any position. Block-table entry n of sequence b makes
these rows of its page visible, if they lie after the left padding and before the sequence's end:

    page_first[b, n] <= row < page_first[b, n] + page_lengths[b, n]

Their positions are

    page_positions[b, n] + (slot_positions[page, row] if the cache stores positions, else row).

By default page_first is 0 and page_lengths is the page size. Without page_positions, a slot has its stored position, or
position slot - leftpad if the cache stores no positions. Visible tokens are ordered by block-table entry, then by row.
The last visible tokens are the queries, and each query sees the tokens up to its own. Distances, bands and the scale of
a query follow from positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import addresses
from .cache_tables import CachePositions, CacheTables


class VisibleTokens(NamedTuple):
    """The visible tokens of one sequence, in order."""

    page: torch.Tensor  # (tokens,) int64. In a contiguous cache, the index of the sequence.
    row: torch.Tensor
    position: torch.Tensor  # float64 (tokens,) or (tokens, axes)
    slot: torch.Tensor  # (tokens,) the index of the slot in the sequence


def visible_tokens(
    positions: CachePositions, sequence: int, first: int, end: int, block_table, k_cache
) -> VisibleTokens:
    """Returns the visible tokens of a sequence.

    first, end: the slots [first, end) of the sequence, without left padding and clamped to the capacity.
    """
    device = k_cache.device
    slot = torch.arange(first, end, device=device)
    if block_table is None:
        page, row, entry = torch.full_like(slot, sequence), slot, None
    else:
        entry, row = slot // k_cache.shape[1], slot % k_cache.shape[1]
        page = block_table[sequence, entry].to(torch.int64).clamp(0, k_cache.shape[0] - 1)
    position = (slot - first).to(torch.float64)
    if entry is not None:
        seen = torch.ones_like(slot, dtype=torch.bool)
        begin = torch.zeros_like(row)
        if positions.page_first is not None:
            begin = positions.page_first[sequence, entry].to(torch.int64)
            seen &= row >= begin
        if positions.page_lengths is not None:
            seen &= row < begin + positions.page_lengths[sequence, entry]
        if positions.page_positions is not None:
            position = positions.page_positions[sequence, entry].to(torch.float64) + row
        page, row, entry, position, slot = page[seen], row[seen], entry[seen], position[seen], slot[seen]
    if positions.slot_positions is not None:
        position = positions.slot_positions[page, row].to(torch.float64)
        if positions.page_positions is not None and entry is not None:
            base = positions.page_positions[sequence, entry].to(torch.float64)
            position = position + (base if position.ndim == 1 else base[:, None])
    return VisibleTokens(page, row, position, slot)


def of_queries(positions: CachePositions, sequence: int, seqlen_q: int, keys: torch.Tensor) -> torch.Tensor:
    """Returns the positions of a sequence's queries, float64 (seqlen_q,) or (seqlen_q, axes).

    keys: positions of the visible keys. Query rows before the first key get the first key's position, and see no key.
    """
    if positions.queries is not None:
        return positions.queries[sequence].to(torch.float64)
    if not keys.shape[0]:
        return keys.new_zeros(seqlen_q, *keys.shape[1:])
    index = torch.arange(keys.shape[0] - seqlen_q, keys.shape[0], device=keys.device).clamp(min=0)
    return keys[index]


def store_positions(k_cache, tables: CacheTables, rows: int) -> None:
    """Writes the positions of new keys to slot_positions. The host reads the tables if the positions continue from the
    last key's position, or if the keys are packed without a slot_mapping.

    tables: tables with slot_positions. seqlens does not count the new keys yet. rows: the number of rows of k per
        sequence, or of all sequences together if k is packed.
    """
    positions = tables.positions
    assert positions is not None
    if tables.slot_mapping is not None:
        page, row, fits = addresses.mapped_places(tables, k_cache)
        _put(positions.slot_positions, page, row, fits, positions.queries)
        return
    if tables.cu_seqlens_q is not None:
        for _, _, part in addresses.runs(tables, rows):
            store_positions(k_cache, part, part.seqlen_new)
        return
    new = positions.queries
    if new is None:
        new = torch.stack(
            [
                _behind(visible_tokens(positions, b, first, end, tables.block_table, k_cache).position, rows)
                for b, (first, end) in enumerate(addresses.bounds(tables._replace(new=0), k_cache))
            ]
        )
    page, row, fits = addresses.new_places(tables, k_cache)
    if positions.page_positions is not None and tables.block_table is not None:
        slot = addresses.first_new_slot(tables, k_cache)[:, None] + torch.arange(rows, device=row.device)
        entry = (slot // k_cache.shape[1]).clamp(max=tables.block_table.shape[1] - 1)
        base = positions.page_positions.gather(1, entry)
        new = new - (base if new.ndim == 2 else base[..., None])
    _put(positions.slot_positions, page, row, fits, new)


def _behind(keys: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the positions of new tokens, which follow the last key's position by 1, 2, .... If positions have axes,
    all axes continue from the largest coordinate of the last key."""
    first = keys[-1].max() + 1 if keys.shape[0] else keys.new_zeros(())
    new = first + torch.arange(rows, device=keys.device)
    return new if keys.ndim == 1 else new[:, None].expand(-1, keys.shape[1])


def _put(slot_positions, page, row, fits, values) -> None:
    """Sets slot_positions[page, row] = values where ``fits``, without a device sync. Where ``fits`` is False, the first
    entry that fits is written again."""
    if not fits.numel() or not slot_positions.numel():
        return
    first = fits.flatten().to(torch.int8).argmax()[None]
    any_fits = fits.any()

    def place(x, size: int):
        x = x.flatten()
        return torch.where(fits.flatten(), x, x.index_select(0, first)).clamp(0, size - 1)

    at = place(page, slot_positions.shape[0]), place(row, slot_positions.shape[1])
    values = values.to(slot_positions).flatten(0, fits.ndim - 1)
    axes = (1,) * (values.ndim - 1)
    values = torch.where(fits.view(-1, *axes), values, values.index_select(0, first))
    slot_positions.index_put_(at, torch.where(any_fits, values, slot_positions[at]))
