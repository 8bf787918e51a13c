"""The tables of cos and sin against many-digit arithmetic, at positions up to 2 ** 24."""

import functools
import math

import pytest
import torch

from flashrope import Rotary
from flashrope.angles import FINE_ROWS, coarse_rows, cos_sin, padded_pairs, position_table, turns, two_level_table

mpmath = pytest.importorskip("mpmath", reason="the oracle of the angle tables needs mpmath, which torch brings through sympy")

LIMIT = 1 << 24
HALF_ULP = 2.0 ** -25  # the rounding of a number just below 1 to float32
PRODUCT = 4 * LIMIT * 2.0 ** -53  # the slope, slope * position, the offset's sum and the angle, each rounded to float64
POSITIONS = sorted({0, 1, FINE_ROWS - 1, FINE_ROWS, FINE_ROWS + 1, LIMIT - FINE_ROWS, LIMIT - 1,
                    *torch.randint(LIMIT, (40,), generator=torch.Generator().manual_seed(0)).tolist(),
                    *torch.randint(4096, (20,), generator=torch.Generator().manual_seed(1)).tolist()})
LEAKS = {"leaky by 3": (1001, 3.0), "leaky by 16": (2048, 16.0), "inverse leaky": (33, 1 / 1.7), "leaky yarn": (77, 7.0)}
SCHEMES = {
    "rope": Rotary.rope(32), "hope": Rotary.hope(32, 512), "rerope": Rotary.rope(32).rectify(1000),
    "negative": Rotary.from_inv_freq([-1.0, 0.0, 1 / 3], 32),
    **{name: Rotary.rope(32).yarn(2.0 if "yarn" in name else 1.0, 4096).rectify(*leak) for name, leak in LEAKS.items()},
}


def exact(theta, position):
    """cos and sin of position * theta with 60 digits, as float64; position is an mpmath number."""
    with mpmath.workdps(60):
        angle = position * mpmath.mpf(theta)
        return float(mpmath.cos(angle)), float(mpmath.sin(angle))


@functools.cache
def oracle(name, slope, offset):
    """float64 (positions, 2, pairs) at slope * position + offset, where 1 / k and w - w / k of a leak are the exact ones."""
    with mpmath.workdps(60):
        if slope not in (0, 1):
            w, k = map(mpmath.mpf, LEAKS[name])
            slope, offset = 1 / k, (w - w / k) * round(offset / (w - w / k))  # once, mirrored or not at all
        rows = [[exact(f, slope * mpmath.mpf(p) + offset) for f in SCHEMES[name].theta] for p in POSITIONS]
    return torch.tensor(rows, dtype=torch.float64).transpose(1, 2)


def joined(table, pairs):
    """cos and sin of every position from the two levels by angle addition in float32, (positions, 2, pairs), as in a kernel."""
    positions = torch.tensor(POSITIONS)
    fine, coarse = table[positions % FINE_ROWS, :, :pairs], table[FINE_ROWS + positions // FINE_ROWS, :, :pairs]
    (ca, sa), (cb, sb) = coarse.unbind(1), fine.unbind(1)
    return torch.stack([ca * cb - sa * sb, sa * cb + ca * sb], dim=1)


def test_turns():
    rope = Rotary.rope(32)
    assert turns(rope, True) == turns(rope, False) == ((0, 0), (1, 0))
    assert turns(rope.rectify(8), True) == ((0, 0), (1, 0), (0, 8))
    assert turns(rope.rectify(8), False) == ((0, 0), (1, 0), (0, 8), (0, -8))
    assert turns(rope.rectify(8, 4.0), True) == ((0, 0), (1, 0), (0.25, 6), (0.25, 0))
    assert turns(rope.rectify(8, 4.0), False) == ((0, 0), (1, 0), (0.25, 6), (0.25, 0), (0.25, -6))


def test_coarse_rows():
    assert [coarse_rows(n) for n in (0, 1, 1024, 1025, 4096, 4097, 131072, LIMIT)] == [1, 1, 1, 2, 4, 8, 128, 16384]


def test_padded_pairs():
    assert [padded_pairs(Rotary.from_inv_freq([1.0] * n, 256)) for n in (0, 1, 16, 17, 50, 64)] == [16, 16, 16, 32, 64, 64]


@pytest.mark.parametrize(("dim", "base"), [(64, 1e4), (128, 1e4), (128, 5e5), (256, 1e6)])
def test_inv_freq_is_right_to_float64(dim, base):
    with mpmath.workdps(60):
        expected = [float(mpmath.mpf(base) ** (-mpmath.mpf(2 * m) / dim)) for m in range(dim // 2)]
    # the exponent's rounding counts ln(base) times
    torch.testing.assert_close(Rotary.rope(dim, base).inv_freq, torch.tensor(expected, dtype=torch.float64),
                               rtol=2.0 ** -53 * (2 + math.log(base)), atol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_one_level(name):
    rotary, positions = SCHEMES[name], torch.tensor(POSITIONS)
    pairs = len(rotary.theta)
    expected = oracle(name, 1.0, 0.0)
    for given in (positions, positions.to(torch.int32), positions.double()):
        in_float64 = torch.stack(cos_sin(rotary, given), dim=1)
        assert in_float64.dtype == torch.float64
        assert (in_float64 - expected).abs().max() <= PRODUCT
        table = position_table(rotary, given[None])
        assert table.shape == (2, 1, len(POSITIONS), 2, padded_pairs(rotary)) and table.dtype == torch.float32
        assert (table[1, 0, :, :, :pairs].double() - expected).abs().max() <= HALF_ULP + PRODUCT
    assert (table[0, ..., 0, :] == 1).all() and (table[0, ..., 1, :] == 0).all() and (table[1, ..., pairs:] == 0).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_two_levels(name, causal):
    rotary = SCHEMES[name]
    pairs, coarse = len(rotary.theta), coarse_rows(LIMIT)
    table = two_level_table(rotary, causal, coarse, torch.device("cpu"))
    slots = turns(rotary, causal)
    assert table.shape == (len(slots), FINE_ROWS + coarse, 2, padded_pairs(rotary)) and table.dtype == torch.float32
    assert (table[..., pairs:] == 0).all() and (table[0, :, 0, :pairs] == 1).all() and (table[0, :, 1] == 0).all()
    for slot, (slope, offset) in enumerate(slots):
        error = (joined(table[slot], pairs).double() - oracle(name, slope, offset)).abs()
        # four rounded entries, weighed by a cos and a sin: 2 sqrt(2) roundings; two products and their sum: two more
        assert error.max() <= (2 * math.sqrt(2) + 2) * HALF_ULP + PRODUCT * max(slope, 1)
        near, far = (error[[at(p) for p in POSITIONS]].square().mean().sqrt() for at in (lambda p: p < 4096, lambda p: p >= 4096))
        assert far <= 2 * near + PRODUCT  # no growth with the position


def test_a_product_in_float32_would_be_seen():
    product = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * Rotary.rope(32).inv_freq.float()
    error = (torch.stack([product.cos(), product.sin()], dim=1).double() - oracle("rope", 1.0, 0.0)).abs()
    assert error.max() > 0.1


def test_axial():
    rotary = Rotary.axial(16, axes=2, base=100.0)
    positions = torch.tensor([[[3.0, 1000.5], [0.0, -7.0]]])
    table = position_table(rotary, positions)
    for token in range(2):
        for pair, (theta, axis) in enumerate(zip(rotary.theta, rotary.axis, strict=True)):
            expected = exact(theta, mpmath.mpf(positions[0, token, axis].item()))
            assert table[1, 0, token, :, pair].tolist() == pytest.approx(expected, abs=HALF_ULP + PRODUCT)


def test_no_pairs():
    rotary = Rotary.none(32)
    assert cos_sin(rotary, torch.arange(3))[0].shape == (3, 0)
    assert two_level_table(rotary, True, 2, torch.device("cpu")).shape == (2, FINE_ROWS + 2, 2, 16)


def test_tables_are_kept():
    device = torch.device("cpu")
    assert two_level_table(Rotary.rope(32), True, 4, device) is two_level_table(Rotary.rope(32), True, 4, device)
    twin = Rotary.from_inv_freq(Rotary.rope(32).theta, 32)
    assert two_level_table(Rotary.rope(32), True, 4, device) is two_level_table(twin, True, 4, device)
