"""Kernels load the right cos and sin of a tile's rows at any position, whether they read one table row for each row of
the tile or only a few table rows."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels are Triton code")
import triton.language as tl
from flashrope import Rotary
from flashrope.schemes.cos_sin import FINE_ROWS, MAX_POSITION, coarse_rows, cos_sin, turn_table, two_level_table
from flashrope.schemes.lowered import lower
from flashrope.triton_kernels.arguments import Variant
from flashrope.triton_kernels.cached.stored_positions import cos_sin_of, load_turns, of_pairs, split_position, turned
from flashrope.triton_kernels.rotating.rotation import (
    CosSinTable,
    load_cos_sin,
    load_cos_sin_by_blocks,
    mapped_rows,
)
from flashrope.triton_kernels.rows import TileRows

ROTARY = Rotary.rope(32)
LIMIT = 1 << 24
HALF_ULP = 2.0**-25
# Bounds on the errors of cos and sin, in units of HALF_ULP. A level adds sqrt 2 for the rounding of its two entries,
# taken as a vector, and 2 for the rounding of two products and their sum. It multiplies the error of earlier levels by
# at most sqrt 2. The bound is 4.8 for 2 levels, 10.2 for 3 levels and 18 for 4 levels.
BOUND = {"rows": 10.3 * HALF_ULP, "blocks": 18 * HALF_ULP}


@triton.jit
def cos_and_sin(out, table, table_rows, start, M: tl.constexpr, BY_BLOCKS: tl.constexpr, VARIANT: tl.constexpr):
    rows = TileRows(tl.arange(0, M), start, None, None)
    COUNT: tl.constexpr = VARIANT.block_d // 2
    rotation = tl.full((), 1, tl.int32)
    levels = CosSinTable(table, table_rows, None, None)
    if BY_BLOCKS:
        cos, sin = load_cos_sin_by_blocks(levels, rotation, rows, 0, COUNT, VARIANT)
    else:
        cos, sin = load_cos_sin(levels, rotation, rows, 0, COUNT, VARIANT)
    at = rows.index[:, None] * (2 * COUNT) + tl.arange(0, COUNT)[None, :]
    tl.store(out + at, cos)
    tl.store(out + at + COUNT, sin)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("how", BOUND)
def test_any_position(how, rows):
    table = two_level_table(ROTARY, True, coarse_rows(LIMIT), torch.device("cpu"))
    for start in (0, 1, FINE_ROWS - 5, 70_003, LIMIT - rows):
        out = torch.full((rows, 2, 16), torch.nan)
        cos_and_sin[(1,)](out, table, table.shape[1], start, rows, how == "blocks", VARIANT=Variant(32, 32))
        expected = torch.stack(cos_sin(ROTARY, start + torch.arange(rows)), dim=1)
        assert (out.double() - expected).abs().max() <= BOUND[how]


@triton.jit
def stored_cos_and_sin(out, table, positions, base, M: tl.constexpr, VARIANT: tl.constexpr):
    index, COUNT = tl.arange(0, M), VARIANT.block_d // 2
    turns = load_turns(CosSinTable(table, 0, None, None), tl.full((), 1, tl.int32), VARIANT)
    position = split_position(tl.load(positions + index), base)
    cos, sin = cos_sin_of(turned(of_pairs(None, position, turns, 0), turns))
    at = index[:, None] * (2 * COUNT) + tl.arange(0, COUNT)[None, :]
    tl.store(out + at, cos)
    tl.store(out + at + COUNT, sin)


@pytest.mark.parametrize("frequency", [1.0, 7.5])
def test_any_stored_position(frequency):
    """cos and sin of stored positions are exact: for whole and fractional positions, on both sides of 0, below and
    above the resolution of float32, and with a page's position added."""
    rotary = Rotary.from_inv_freq(frequency * ROTARY.inv_freq, 32)
    table, shape = turn_table(rotary, True, torch.device("cpu")), Variant(32, 32)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 300.0, 1e5, LIMIT, 2**28):
        positions = (torch.rand(128, generator=generator) * 2 - 1) * size
        for base in (0, -77, 12_345_678):
            float64 = 2.0**-52 * frequency * (size + abs(base))  # rounding of the angles, here and in the kernel
            out = torch.full((128, 2, 16), torch.nan)
            stored_cos_and_sin[(1,)](out, table, positions, base, 128, VARIANT=shape)
            expected = torch.stack(cos_sin(rotary, positions.double() + base), dim=1)
            assert (out.double() - expected).abs().max() <= 6 * HALF_ULP + float64
    numbers = torch.tensor([torch.nan, -torch.inf, torch.inf, 3e38]).repeat(4)
    ends = torch.tensor([-1, -1, 1, 1]).repeat(4) * MAX_POSITION
    out = torch.full((16, 2, 16), torch.nan)
    stored_cos_and_sin[(1,)](out, table, numbers, 0, 16, VARIANT=shape)
    bound = 6 * HALF_ULP + 2.0**-52 * frequency * MAX_POSITION
    assert (out.double() - torch.stack(cos_sin(rotary, ends), dim=1)).abs().max() <= bound


@triton.jit
def store_cos_and_sin(out, angles, M: tl.constexpr):
    index = tl.arange(0, M)
    cos, sin = cos_sin_of(tl.load(angles + index))
    tl.store(out + index, cos)
    tl.store(out + M + index, sin)


def test_the_polynomials_serve_an_eighth_of_a_turn_on_both_sides():
    """Within an eighth of a turn on both sides, the polynomials' error stays far below 4e-6. Outside that range it
    reaches 4e-6."""
    ends = (torch.arange(-4, 4).repeat_interleave(3) << 61) + torch.tensor([-1, 0, 1]).repeat(8) * 2**32
    within = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    angles = torch.cat([ends, within])
    out = torch.full((2, 1024), torch.nan)
    store_cos_and_sin[(1,)](out, angles, 1024)
    turns = angles.double() * (2 * torch.pi / 2**64)
    error = (out.double() - torch.stack([turns.cos(), turns.sin()])).abs().max()
    assert error <= 6 * HALF_ULP


@triton.jit
def store_mapped_rows(out, maps, rotation, start, first, length, M: tl.constexpr):
    rows = TileRows(tl.arange(0, M), start, first, length)
    tl.store(out + tl.arange(0, M), mapped_rows(maps, rotation, rows))


@pytest.mark.parametrize("rotary", [ROTARY.self_extend(20, 4), ROTARY.dual_chunk(160, 32)], ids=["groups", "chunks"])
def test_rows_that_a_map_gives(rotary):
    """Each rotation reads the row that the formula gives, and row 0 for negative positions. A tile of queries
    begins at position `start`, and a tile of keys at position `first`."""
    maps = lower(rotary, True).maps
    table = torch.tensor(maps, dtype=torch.int32)
    for rotation, (chunk, group, last, is_query) in enumerate(maps):
        for start, first, length in ((-20, 48, 70), (0, 32, 64), (250, 300, 1000)):
            out = torch.full((32,), -1, dtype=torch.int32)
            store_mapped_rows[(1,)](out, table, rotation, start, first, length, 32)
            rows = torch.arange(32).clamp(max=length - first - 1)
            position = (rows + (start if is_query else first)).clamp(min=0)
            expected = (position % chunk if chunk else position) // group
            assert torch.equal(out, expected.clamp(max=last).to(torch.int32)), (rotation, start)
