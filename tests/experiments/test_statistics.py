"""Intervals against figures worked out by hand, and what a table may say."""

import pytest

from experiments import tables
from experiments.curves import LOOKS, MAX_LINES, NAMES, Panel, draw, family
from experiments.registry import EXPERIMENTS
from experiments.statistics import Comparison, difference, interval, schemes, verdict


def row(scheme, seed, value, task="copying-by-length", at=256):
    return {"scheme": scheme, "task": task, "at": str(at), "seed": str(seed), "value": str(value)}


def test_interval_by_hand():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # t(4) = 2.776, standard error sqrt(2.5 / 5)
    assert found.mean == 3 and found.half == pytest.approx(2.776 * 0.5**0.5) and found.seeds == 5
    assert str(found) == "+3.0 (+1.0 to +5.0)" and found.excludes_zero
    assert interval([0.0, 2.0]).half == pytest.approx(12.706)
    assert interval([7.0]).half is None and not interval([7.0]).excludes_zero
    with pytest.raises(ValueError, match="at most 31 seeds, got 32"):
        interval([0.0] * 32)


def test_differences_are_paired_by_seed():
    rows = [row("hope", seed, 10 * seed + 5) for seed in range(6)] + [row("rope", seed, 10 * seed) for seed in range(5)]
    found = difference(rows, ("hope", "copying-by-length"), ("rope", "copying-by-length"), 256)
    assert (found.mean, found.half, found.seeds) == (5, 0, 5) and verdict(found) == "higher"
    assert difference(rows, ("hope", "copying-by-length"), ("rope", "copying-by-length"), 512) is None


def test_verdicts():
    assert verdict(interval([1.0, 1.1, 0.9, 1.0])) == "not judged: fewer than 5 seeds"
    assert verdict(interval([1.0, -1.0, 2.0, -2.0, 0.5])) == "no difference shown"
    assert verdict(interval([-5.0, -6.0, -5.5, -4.0, -5.0])) == "lower"


def test_table_of_declared_differences():
    rows = [row(name, seed, value + seed) for name, value in (("hope", 50), ("rerope-w64", 20)) for seed in range(5)]
    compares = (
        *schemes("hope", "rerope{w256}", "copying-by-length", 2, 4),
        Comparison(("hope", "copying-by-length"), ("hope", "absent"), 2),
    )
    text = tables.judged(compares, rows, 128)
    assert "| hope | rerope-w64 | 2 | 5 | +30.0 (+30.0 to +30.0) | higher |" in text
    assert text.count("\n|") == 3  # what was not measured has no row


def test_every_declared_scheme_is_measured():
    for experiment in EXPERIMENTS.values():
        measured = {task for task, _ in experiment.measures}
        for each in experiment.compares:
            for scheme, task in (each.first, each.second):
                assert scheme in experiment.schemes and task.startswith(tuple(measured)), (scheme, task)


def test_figures_have_few_lines_with_looks_of_their_own(tmp_path):
    assert LOOKS.keys() == NAMES.keys() and len(set(LOOKS.values())) >= len(LOOKS) - 3  # the ablations stand alone
    assert family("hope+yarn-s2") == "hope+yarn" and family("rerope-w64+dagger") == "rerope+dagger"
    rows = [row("rope", seed, 50 + seed, at=at) for seed in range(3) for at in (64, 128)]
    draw(tmp_path / "a.png", [Panel("one", [("rope", "copying-by-length")])], rows, 128, "right (%)")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="at most 8 lines, got 9"):
        draw(tmp_path / "b.png", [Panel("two", [("rope", "x")] * (MAX_LINES + 1))], rows, 128, "right (%)")
