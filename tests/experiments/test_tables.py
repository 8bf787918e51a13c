"""Tests the tables: their rows and columns come from results.csv, our figures are next to the papers' figures, and the
text says how much of a paper's ordering holds."""

import re

import pytest
from flashrope.lab.small_models.model import ModelConfig
from test_figures import row

from experiments import runs, tables
from experiments.published import LOWER, TABLES, Column, Published
from experiments.registry import EXPERIMENTS
from experiments.tables import resolve
from experiments.zoo import scheme

TABLE = Published(
    "Some table",
    "nowhere, table 0",
    (Column("512", "few-shot", 1), Column("n", "copying", 30, multiple=False)),
    (("A", "rope", (10.0, 20.0, 15.0)), ("B", "rerope{w256}", (30.0, 40.0, 35.1)), ("C", "hope{L2}", (5.0, 5.0, 5.0))),
    ("Avg.", "n"),
    average=True,
)


ROWS = [
    row(name, seed, value + seed, task, at, length)
    for seed in (0, 2)
    for name, length, shift in (("rope", 64, 0), ("rerope-w32", 64, 10), ("hope", 128, 20))
    for task, at, value in (
        ("few-shot", 64, 2 + shift),
        ("few-shot-pair", 64, 900),
        ("copying", 30, 4 + shift),
        ("copying", 40, 900),
        ("few-shot", 128, 900),
        ("copying-tokens", 30, 900),
    )
]


def by_seed(value, noise=0.0):
    return {seed: value + noise * seed for seed in range(5)}


def test_orderings_count_what_the_intervals_show():
    rising = [by_seed(10), by_seed(20), by_seed(30)]
    assert tables.ordering("x", [1, 2, 3], rising).counts == counts(3)
    assert tables.ordering("x", [3, 2, 1], rising).counts == counts(against=3)
    assert tables.ordering("x", [1, 2, 2], rising).counts == counts(2)  # pairs that the paper ties are not counted
    noisy = [by_seed(10), {0: 0.0, 1: 40.0, 2: 10.0, 3: 5.0, 4: 1.0}, by_seed(90)]
    found = tables.ordering("x", [1, 2, 3], noisy)
    assert found.counts == counts(2, unshown=1) and str(found) == (
        "The paper orders 3 pairs by x: 2 have that order here, 0 **have the opposite**, and 1 are not "
        "told apart (paired 95% interval)."
    )
    few = tables.ordering("x", [1, 2], [{0: 1.0, 1: 2.0}, {0: 5.0, 1: 6.5}])
    assert str(few) == "The paper's ordering by x is not judged: fewer than 5 seeds."


def counts(shown=0, against=0, unshown=0, unjudged=0):
    return {
        "as expected": shown,
        "against expectation": against,
        "no difference shown": unshown,
        "not judged": unjudged,
    }


def test_resolve():
    assert resolve("rerope{w256}+logn", 64) == ("rerope-w32+logn", 64)
    assert resolve("leaky-rerope{w128}-k16", 128) == ("leaky-rerope-w32-k16", 128)
    assert resolve("hope{L4}", 64) == ("hope", 256)
    assert resolve("rope", 64) == ("rope", 64)


def test_figures_are_by_seed_in_the_tables_places():
    found = tables.measured(TABLE, ROWS, 64)
    assert [[value[0] for value in line] for line in found] == [[2, 4, 3], [12, 14, 13], [22, 24, 23]]
    assert [[value[2] for value in line] for line in found] == [[4, 6, 5], [14, 16, 15], [24, 26, 25]]


def test_markdown_keeps_the_papers_rows_and_figures():
    text = tables.markdown(TABLE, ROWS, 64)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| method", "| A", "| B", "| C"]
    assert lines[2] == "| B | rerope-w32 | 13 ± 13 / 30.00 | 15 ± 13 / 40.00 | 14 ± 13 / 35.10 |"  # t(1) = 12.7
    assert "hope at 128" in lines[3]
    assert "The paper's ordering by Avg. is not judged: fewer than 5 seeds." in text
    assert "mean ± half of its 95% interval over 2 seeds" in text and "Higher is better" in text
    assert "nowhere, table 0" in text
    without = tables.markdown(TABLE, [r for r in ROWS if r["scheme"] != "rerope-w32"], 64)
    assert "| B | rerope-w32 | – / 30.00 | – / 40.00 | – / 35.10 |" in without
    one_seed = tables.markdown(TABLE, [r for r in ROWS if r["seed"] == "0"], 64)
    assert (
        "| A | rope | 2.00 / 10.00 | 4.00 / 20.00 | 3.00 / 15.00 |" in one_seed
        and "one seed, so no interval" in one_seed
    )


def test_what_no_paper_has_is_listed_with_its_interval(tmp_path):
    columns = list(ROWS[0])
    runs.write_csv(tmp_path / "results.csv", columns, [list(row.values()) for row in ROWS])
    text = tables.write(tmp_path, "no-such-paper", 64)
    assert text == (tmp_path / "table.md").read_text()
    assert "## few-shot\n" in text and "## Letters" not in text
    assert (
        "| RoPE, trained on 64 | rope | 3 ± 13 | 901 ± 13 |" in text
        and "| HoPE, trained on 128 | hope | 23 ± 13 |" in text
    )


def test_published_tables_are_complete():
    slips = {"copying": ("RoPE + YaRN",), "ablation": ("AB2",)}  # rows whose average in the paper is wrong
    for name, found in TABLES.items():
        for table in found:
            labels = [column.label for column in table.columns] + ["Avg."] * table.average
            assert set(table.orders) <= set(labels) and re.match(r"(hope|hope-v1|rerope), ", table.place)
            assert len({row[0] for row in table.rows}) == len(table.rows)
            for label, template, values in table.rows:
                assert len(values) == len(labels), (name, label)
                if table.average and label not in slips.get(name, ()):
                    assert values[-1] == pytest.approx(sum(values[:-1]) / len(table.columns), abs=0.0101)
                used, length = resolve(template, 512)
                scheme(used, ModelConfig(768, 12, 12), length)
                assert template in EXPERIMENTS[name].schemes, (name, template)
            if name == "lengths" and table.better == LOWER:
                assert min(table.rows[2][2]) == 7.3026
