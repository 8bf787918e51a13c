"""Which pairs of a tile are visible: bounds for every row against the distance of every pair."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the tiles are Triton code")
import triton.language as tl

from flashrope.lowering import UNBOUNDED
from flashrope.triton_kernels.tiles import Band, in_band, is_visible, visible_keys, visible_queries

ROWS, COLUMNS = 16, 32


@triton.jit
def masks(of_keys, of_queries, expected, start, stop, row, column, length, ahead, M: tl.constexpr, N: tl.constexpr):
    """Query rows `row` on against keys `column` on: bounds per query, bounds per key, and the distance itself."""
    band = Band(start, stop, None, None, None, None, None)
    position_q, position_k = row + tl.arange(0, M) + ahead, column + tl.arange(0, N)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    by_query = is_visible(visible_keys(position_q, band, length), column, N)
    by_key = tl.trans(is_visible(visible_queries(position_k, band, ahead), row, M))
    in_distance = in_band(position_q[:, None], position_k[None, :], band)
    tl.store(of_keys + at, by_query)
    tl.store(of_queries + at, by_key)
    tl.store(expected + at, in_distance)


@pytest.mark.parametrize("ahead", [-20, 0, 37])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, UNBOUNDED), (-UNBOUNDED, UNBOUNDED), (0, 9), (9, UNBOUNDED), (-5, 6), (3, 3), (-40, -2)]
)
def test_bounds_per_row_are_the_band(start, stop, ahead):
    seen = 0
    for row, column, length in ((0, 0, 32), (16, 32, 40), (48, 32, 64), (32, 64, 70)):
        by_query, by_key, expected = torch.zeros(3, ROWS, COLUMNS, dtype=torch.bool)
        masks[(1,)](by_query, by_key, expected, start, stop, row, column, length, ahead, ROWS, COLUMNS)
        assert torch.equal(by_key, expected)
        assert torch.equal(by_query, expected & (column + torch.arange(COLUMNS) < length))
        seen += int(expected.sum())
    assert (seen > 0) == (stop > start)
