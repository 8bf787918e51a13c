"""Tests the digits of numbers under every conversion, and the pairs of numbers that the network compares."""

import pytest
import torch

from experiments import digits


def test_digits_of_the_papers_example():
    found = {name: digits.digits(torch.tensor(1749), name).tolist() for name in digits.CONVERSIONS}
    assert found["extrapolation"] == [1, 7, 4, 9]
    assert found["interpolation"] == [0, 8, 7, 4.5]
    assert found["base-16"] == [0, 6, 13, 5] and found["base-13"] == [0, 10, 4, 7]


@pytest.mark.parametrize("name", digits.CONVERSIONS)
def test_digits_hold_the_number(name):
    numbers = torch.arange(digits.LIMIT if name != "trained" else digits.TRAINED)
    base = int(name[5:]) if name.startswith("base-") else 10
    found = digits.digits(numbers, name).double()
    back = sum(found[:, at] * base ** (3 - at) for at in range(4)) * (2 if name == "interpolation" else 1)
    assert torch.equal(back, numbers.double()) and found.min() == 0 and found.max() < base
    if name != "extrapolation":
        assert found[:, 0].max() == 0  # as in training


def test_pairs():
    generator = torch.Generator().manual_seed(0)
    for limit, gap in ((1000, None), (1000, 1), (1000, 100), (2000, 1), (2000, 100)):
        numbers, larger = digits.pairs(500, limit, gap, generator)
        high, low = numbers.max(1).values, numbers.min(1).values
        assert torch.equal(numbers[:, 0] > numbers[:, 1], larger) and 150 < larger.sum() < 350
        assert low.min() >= 0 and high.max() < limit and (limit == 1000 or high.min() >= 1000)
        if gap:
            assert (high - low).unique().tolist() == [gap]
        else:
            assert (high - low).min() == 1 and 200 < ((high - low) < 32).sum() < 300  # half are below sqrt(1000)


def test_a_network_that_compares_digits_is_right():
    """The accuracy is 100% for a rule that weights each digit by its place value, if the digits are decimal."""

    class Rule(torch.nn.Module):
        def forward(self, x):
            weights = torch.tensor([1000.0, 100, 10, 1])
            return (x.unflatten(1, (2, 4)) * weights).sum(-1).diff(dim=1).neg()

    for name in ("trained", "extrapolation", "interpolation"):
        assert [digits.accuracy(Rule(), name, gap, 0) for gap in digits.GAPS] == [100.0] * 5
    assert digits.accuracy(lambda x: -Rule()(x), "trained", 5, 0) == 0
