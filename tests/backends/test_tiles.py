"""Tests which pairs of a tile are visible: compares the bounds of every row with the distance of every pair."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the tiles are Triton code")
import triton.language as tl
from flashrope.schemes.lowered import UNBOUNDED
from flashrope.triton_kernels.arguments import NO_CACHE, encode_int
from flashrope.triton_kernels.tiles import (
    BandRow,
    TileSequence,
    copied_keys,
    is_visible,
    key_tiles,
    query_tiles,
    visible_keys,
    visible_queries,
)

ROWS, COLUMNS = 16, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def masks(of_keys, of_queries, expected, start, stop, row, column, length, ahead, M: tl.constexpr, N: tl.constexpr):
    """Stores the visible pairs of query rows from `row` and keys from `column`, by the bounds per query, by the bounds
    per key, and by the distance."""
    band = BandRow(start, stop, None, None, None, None, None)
    position_q, position_k = row + tl.arange(0, M) + ahead, column + tl.arange(0, N)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    by_query = is_visible(visible_keys(position_q, band, length), column, N)
    by_key = tl.trans(is_visible(visible_queries(position_k, band, ahead), row, M))
    distance = position_q[:, None] - position_k[None, :]
    tl.store(of_keys + at, by_query)
    tl.store(of_queries + at, by_key)
    tl.store(expected + at, (distance >= start) & (distance < stop))


@pytest.mark.parametrize("ahead", [-20, 0, 37])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, UNBOUNDED), (-UNBOUNDED, UNBOUNDED), (0, 9), (9, UNBOUNDED), (-5, 6), (3, 3), (-40, -2)]
)
def test_bounds_per_row_are_the_band(start, stop, ahead):
    seen = 0
    for row, column, length in ((0, 0, 32), (16, 32, 40), (48, 32, 64), (32, 64, 70)):
        by_query, by_key, expected = torch.zeros(3, ROWS, COLUMNS, dtype=torch.bool, device=DEVICE)
        masks[(1,)](by_query, by_key, expected, start, stop, row, column, length, ahead, ROWS, COLUMNS)
        assert torch.equal(by_key, expected)
        exists = column + torch.arange(COLUMNS, device=DEVICE) < length
        assert torch.equal(by_query, expected & exists)
        seen += int(expected.sum())
    assert (seen > 0) == (stop > start)


@triton.jit
def tile_ranges(ranges, cases, BLOCK: tl.constexpr):
    """Stores the TileRanges of keys for rows first to last, and of queries for keys first to last. One program computes
    one case."""
    case = cases + 6 * tl.program_id(0)
    first, last, length, ahead = tl.load(case), tl.load(case + 1), tl.load(case + 2), tl.load(case + 3)
    band = BandRow(tl.load(case + 4), tl.load(case + 5), None, None, None, None, None)
    of_keys = key_tiles(band, first + ahead, last + ahead, length, BLOCK)
    of_queries = query_tiles(band, first, last, ahead, length, BLOCK)
    to = ranges + 8 * tl.program_id(0)
    for n in tl.static_range(4):
        tl.store(to + n, of_keys[n])
        tl.store(to + 4 + n, of_queries[n])


@pytest.mark.parametrize("ahead", [-20, 0, 37])
def test_tiles_of_a_band(ahead):
    """Tiles outside [begin, end) hold no visible pair. The tiles in [inner_begin, inner_end) are exactly those with
    only visible pairs. Windows end before, at and after the edges of tiles."""
    bands = [(0, UNBOUNDED), (-UNBOUNDED, UNBOUNDED), (9, UNBOUNDED), (-5, 6), *((0, x) for x in (15, 16, 17, 31, 47))]
    rows = [(0, 15), (16, 31), (48, 63), (32, 36)]
    cases = [(*pair, length, ahead, *band) for band in bands for pair in rows for length in (33, 64, 70)]
    ranges = torch.zeros(len(cases), 2, 4, dtype=torch.int32, device=DEVICE)
    tile_ranges[(len(cases),)](ranges, torch.tensor(cases, dtype=torch.int32, device=DEVICE), 16)
    column = torch.arange(80)
    for case, got in zip(cases, ranges.tolist(), strict=True):
        first, last, length, _, start, stop = case
        row = torch.arange(first, last + 1)[:, None]
        for distance, (begin, inner_begin, inner_end, end) in zip(
            (row + ahead - column, column + ahead - row), got, strict=True
        ):
            seen = ((distance >= start) & (distance < stop) & (column < length)).unflatten(1, (-1, 16)).transpose(0, 1)
            tiles = range(5)
            assert [n for n in tiles if seen[n].any() and not begin <= n < end] == [], case
            assert [n for n in tiles if seen[n].all()] == [n for n in tiles if inner_begin <= n < inner_end], case


@triton.jit
def store_first_copies(out, cache, cu_seqlens, rows):
    batch = tl.program_id(0)
    start, stop = tl.load(cu_seqlens + batch), tl.load(cu_seqlens + batch + 1)
    first, _ = copied_keys(cache, cu_seqlens, TileSequence(batch, start, stop - start, 0, stop - start, 0), rows)
    tl.store(out + batch, first)


@pytest.mark.parametrize("rows", [0, 10])
def test_copied_keys_of_packed_queries_have_room(rows, decode_seqlen=64):
    """The rotated keys of the shortest sequences that ``attention_chunks`` serves fit into the buffer that the host
    allocates for all sequences."""
    lengths = torch.full((decode_seqlen + 1,), decode_seqlen + 1)
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).to(DEVICE, torch.int32)
    cache, first = NO_CACHE._replace(decode_seqlen=encode_int(decode_seqlen)), torch.zeros_like(cu_seqlens)
    store_first_copies[(len(lengths),)](first, cache, cu_seqlens, rows)
    total = int(lengths.sum())
    first[-1] = total + total // (decode_seqlen + 1) * rows
    assert (first.cpu().diff() >= lengths + rows).all()
