"""Compares intervals with figures worked out by hand, and tests which conclusions a table may state."""

import pytest
from test_figures import row

from experiments import tables
from experiments.registry import EXPERIMENTS
from experiments.statistics import HIGHER, LOWER, Comparison, difference, interval, outcome, schemes, verdict


def test_interval_by_hand():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # t(4) = 2.77645, standard error sqrt(2.5 / 5)
    assert found.mean == 3 and found.half == pytest.approx(2.77645 * 0.5**0.5, rel=1e-5) and found.seeds == 5
    assert str(found) == "+3.0 (+1.0 to +5.0)" and found.excludes_zero
    assert interval([0.0, 2.0]).half == pytest.approx(12.7062, rel=1e-5)
    assert interval([7.0]).half is None and not interval([7.0]).excludes_zero


def test_differences_are_paired_by_seed():
    rows = [row("hope", seed, 10 * seed + 5) for seed in range(6)] + [row("rope", seed, 10 * seed) for seed in range(5)]
    found = difference(rows, ("hope", "copying-by-length"), ("rope", "copying-by-length"), 256)
    assert (found.mean, found.half, found.seeds) == (5, 0, 5) and verdict(found) == "higher"
    assert difference(rows, ("hope", "copying-by-length"), ("rope", "copying-by-length"), 512) is None


def test_intervals_are_shown_with_the_digits_they_are_worth():
    assert str(interval([5.0, 6.0, 5.5, 4.0, 5.0])) == "+5.10 (+4.18 to +6.02)"
    assert interval([50.0, 60.0, 55.0, 40.0, 50.0]).level == "51.0 ± 9.2"
    assert interval([500.0, 600.0, 550.0, 400.0, 500.0]).level == "510 ± 92"
    assert interval([0.5, 0.6, 0.55, 0.4, 0.5]).level == "0.510 ± 0.092"
    assert interval([12345.0]).level == "1.23e+04" and interval([1.2345]).level == "1.23"


def test_verdicts():
    assert verdict(interval([1.0, 1.1, 0.9, 1.0])) == "not judged: fewer than 5 seeds"
    assert verdict(interval([1.0, -1.0, 2.0, -2.0, 0.5]), HIGHER) == "no difference shown"
    lower = interval([-5.0, -6.0, -5.5, -4.0, -5.0])
    assert verdict(lower) == "lower"
    assert verdict(lower, LOWER) == "lower, as expected" and outcome(lower, LOWER) == "as expected"
    assert verdict(lower, HIGHER) == "lower, against expectation"


def test_table_of_declared_differences():
    rows = [row(name, seed, value + seed) for name, value in (("hope", 50), ("rerope-w64", 20)) for seed in range(5)]
    compares = (
        *schemes("hope", "rerope{w256}", "copying-by-length", 2, 4),
        *schemes("rerope{w256}", "hope", "copying-by-length", 2, expected=HIGHER),
        Comparison(("hope", "copying-by-length"), ("hope", "absent"), 2),
    )
    text = tables.judged(compares, rows, 128)
    assert "| HoPE | ReRoPE w64 | copying-by-length | 2 | 5 | +30.0 (+30.0 to +30.0) | higher |" in text
    assert "| -30.0 (-30.0 to -30.0) | **lower, against expectation** |" in text
    assert text.count("\n|") == 4  # unmeasured comparisons have no row


def test_a_difference_may_be_between_two_lengths():
    rows = [row("hope", seed, 50 + seed, at=1024) for seed in range(5)]
    rows += [row("rope", seed, 20 + seed, at=128) for seed in range(5)]
    across = Comparison(("hope", "copying-by-length"), ("rope", "copying-by-length"), 8, second_multiple=1)
    text = tables.judged((across,), rows, 128)
    assert "| HoPE | RoPE | copying-by-length | 8, 1 | 5 | +30.0 (+30.0 to +30.0) | higher |" in text


def test_expectations_come_from_the_papers_tables():
    def expected(first, second, task, multiple):
        return tables.in_the_papers("rerope-schemes", Comparison((first, task), (second, task), multiple))

    assert expected("rerope{w256}", "rope", "accuracy-repeat", 8) == HIGHER
    assert expected("rerope{w256}", "hfwa", "accuracy-repeat", 8) == LOWER  # 77.90 and 80.84
    assert expected("rerope{w256}", "rope", "accuracy", 1) == 0  # 49.41 both
    assert expected("rerope{w256}", "kerple", "accuracy", 1) == 0
    inside = Comparison(("rope", "accuracy-repeat"), ("rope", "accuracy-non-repeat"), 8)
    assert tables.in_the_papers("rerope-schemes", inside) == HIGHER  # 24.17 and 23.16


def test_every_declared_scheme_is_measured():
    for experiment in EXPERIMENTS.values():
        if experiment.function:
            continue
        measured = {task for task, _ in experiment.measures}
        for each in experiment.compares:
            for scheme, task in (each.first, each.second):
                assert scheme in experiment.schemes and task.startswith(tuple(measured)), (scheme, task)
