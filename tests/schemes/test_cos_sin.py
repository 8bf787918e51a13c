"""Compares the tables of cos and sin with arithmetic of 60 digits, at positions up to 2 ** 24."""

import functools
import itertools
import math

import pytest
import torch
from flashrope import Rotary
from flashrope.schemes.cos_sin import FINE_ROWS, coarse_rows, cos_sin, padded_pairs, position_table, two_level_table
from flashrope.schemes.lowered import lower

mpmath = pytest.importorskip("mpmath", reason="the oracle of the tables needs mpmath, which torch brings through sympy")

CPU = torch.device("cpu")
LIMIT = 1 << 24
HALF_ULP = 2.0**-25  # largest error from rounding a number just below 1 to float32
# Largest error from four roundings to float64: of the slope, slope * position, the sum with the offset, and the angle.
PRODUCT = 4 * LIMIT * 2.0**-53
POSITIONS = sorted(
    {
        0,
        1,
        FINE_ROWS - 1,
        FINE_ROWS,
        FINE_ROWS + 1,
        LIMIT - FINE_ROWS,
        LIMIT - 1,
        *torch.randint(LIMIT, (40,), generator=torch.Generator().manual_seed(0)).tolist(),
        *torch.randint(4096, (20,), generator=torch.Generator().manual_seed(1)).tolist(),
    }
)
LEAKS = {
    "leaky by 3": (1001, 3.0),
    "leaky by 16": (2048, 16.0),
    "inverse leaky": (33, 1 / 1.7),
    "leaky yarn": (77, 7.0),
}
SCHEMES = {
    "rope": Rotary.rope(32),
    "hope": Rotary.hope(32, 512),
    "rerope": Rotary.rope(32).rectify(1000),
    "negative": Rotary.from_inv_freq([-1.0, 0.0, 1 / 3], 32),
    **{name: Rotary.rope(32).yarn(2.0 if "yarn" in name else 1.0, 4096).rectify(*leak) for name, leak in LEAKS.items()},
}


def exact(inv_freq, position):
    """Returns cos and sin of position * inv_freq, computed with 60 digits, as float64. position: an mpmath number."""
    with mpmath.workdps(60):
        angle = position * mpmath.mpf(inv_freq)
        return float(mpmath.cos(angle)), float(mpmath.sin(angle))


@functools.cache
def oracle(name, slope, offset):
    """Returns cos and sin at slope * position + offset, float64 (positions, 2, pairs). For Leaky ReRoPE, slope and
    offset are computed again, exactly: the slope of every rotation, and of every difference of two rotations, is
    a + b / k with a and b in (-1, 0, 1), and the offset is a multiple of w - w / k."""
    with mpmath.workdps(60):
        if name in LEAKS:
            w, k = map(mpmath.mpf, LEAKS[name])
            slope = min(
                (a + b / k for a, b in itertools.product((-1, 0, 1), repeat=2)), key=lambda exact: abs(exact - slope)
            )
            offset = (w - w / k) * round(offset / (w - w / k))
        rows = [[exact(f, slope * mpmath.mpf(p) + offset) for f in SCHEMES[name].frequencies] for p in POSITIONS]
    return torch.tensor(rows, dtype=torch.float64).transpose(1, 2)


def unrotated(table):
    """Whether the whole table (..., 2, pairs) is cos 1 and sin 0."""
    cos, sin = table.unbind(-2)
    return bool((cos == 1).all() and (sin == 0).all())


def joined(table, pairs):
    """Returns cos and sin of every position, (positions, 2, pairs). Like a kernel, it computes them from the two
    levels of the table by angle addition in float32."""
    positions = torch.tensor(POSITIONS)
    fine, coarse = table[positions % FINE_ROWS, :, :pairs], table[FINE_ROWS + positions // FINE_ROWS, :, :pairs]
    (ca, sa), (cb, sb) = coarse.unbind(1), fine.unbind(1)
    return torch.stack([ca * cb - sa * sb, sa * cb + ca * sb], dim=1)


def test_coarse_rows():
    assert [coarse_rows(n) for n in (0, 1, 1024, 1025, 4096, 4097, 131072, LIMIT)] == [1, 1, 1, 2, 4, 8, 128, 16384]


def test_padded_pairs():
    assert [padded_pairs(head_dim) for head_dim in (8, 16, 40, 64, 72, 128, 256)] == [
        8,
        8,
        32,
        32,
        64,
        64,
        128,
    ]


@pytest.mark.parametrize(("dim", "base"), [(64, 1e4), (128, 1e4), (128, 5e5), (256, 1e6)])
def test_inv_freq_is_right_to_float64(dim, base):
    with mpmath.workdps(60):
        expected = [float(mpmath.mpf(base) ** (-mpmath.mpf(2 * m) / dim)) for m in range(dim // 2)]
    # the error from rounding the exponent is multiplied by ln(base)
    torch.testing.assert_close(
        Rotary.rope(dim, base).inv_freq,
        torch.tensor(expected, dtype=torch.float64),
        rtol=2.0**-53 * (2 + math.log(base)),
        atol=0,
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_one_level(name):
    rotary, positions = SCHEMES[name], torch.tensor(POSITIONS)
    pairs = len(rotary.frequencies)
    expected = oracle(name, 1.0, 0.0)
    for given in (positions, positions.to(torch.int32), positions.double()):
        in_float64 = torch.stack(cos_sin(rotary, given), dim=1)
        assert in_float64.dtype == torch.float64
        assert (in_float64 - expected).abs().max() <= PRODUCT
        table = position_table(rotary, given[None])
        assert table.shape == (2, 1, len(POSITIONS), 2, padded_pairs(rotary.head_dim)) and table.dtype == torch.float32
        assert (table[1, 0, :, :, :pairs].double() - expected).abs().max() <= HALF_ULP + PRODUCT
    assert unrotated(table[0]) and unrotated(table[1, ..., pairs:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_two_levels(name, causal):
    rotary = SCHEMES[name]
    pairs, coarse = len(rotary.frequencies), coarse_rows(LIMIT)
    table = two_level_table(rotary, causal, coarse, CPU)
    rotations = lower(rotary, causal).rotations
    assert (
        table.shape == (len(rotations), FINE_ROWS + coarse, 2, padded_pairs(rotary.head_dim))
        and table.dtype == torch.float32
    )
    assert unrotated(table[0]) and unrotated(table[..., pairs:])
    for rotation, (slope, offset) in enumerate(rotations):
        error = (joined(table[rotation], pairs).double() - oracle(name, slope, offset)).abs()
        # Four rounded entries, each times a cos or a sin, give 2 sqrt(2) roundings. Two products and their sum add two.
        assert error.max() <= (2 * math.sqrt(2) + 2) * HALF_ULP + PRODUCT * max(slope, 1)
        near, far = (
            error[[at(p) for p in POSITIONS]].square().mean().sqrt() for at in (lambda p: p < 4096, lambda p: p >= 4096)
        )
        assert far <= 2 * near + PRODUCT  # the error does not grow with the position


def test_a_product_in_float32_would_be_seen():
    product = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * Rotary.rope(32).inv_freq.float()
    error = (torch.stack([product.cos(), product.sin()], dim=1).double() - oracle("rope", 1.0, 0.0)).abs()
    assert error.max() > 0.1


def test_axial():
    rotary = Rotary.axial(16, axes=2, base=100.0)
    positions = torch.tensor([[[3.0, 1000.5], [0.0, -7.0]]])
    table = position_table(rotary, positions)
    for token in range(2):
        for pair, (theta, axis) in enumerate(zip(rotary.frequencies, rotary.axis, strict=True)):
            expected = exact(theta, mpmath.mpf(positions[0, token, axis].item()))
            assert table[1, 0, token, :, pair].tolist() == pytest.approx(expected, abs=HALF_ULP + PRODUCT)
    one_axis = Rotary.from_inv_freq(rotary.frequencies, 16)  # without explicit positions, every axis counts tokens
    assert two_level_table(rotary, True, 2, CPU).equal(two_level_table(one_axis, True, 2, CPU))


def test_no_pairs():
    rotary = Rotary.none(32)
    assert cos_sin(rotary, torch.arange(3))[0].shape == (3, 0)
    table = two_level_table(rotary, True, 2, CPU)
    assert table.shape == (1, FINE_ROWS + 2, 2, 16) and unrotated(table)


def test_tables_are_kept():
    assert two_level_table(Rotary.rope(32), True, 4, CPU) is two_level_table(Rotary.rope(32), True, 4, CPU)
    twin = Rotary.from_inv_freq(Rotary.rope(32).frequencies, 32)
    assert two_level_table(Rotary.rope(32), True, 4, CPU) is two_level_table(twin, True, 4, CPU)
