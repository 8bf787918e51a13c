"""Tables: rows and columns from the CSV, our figures next to the papers', and whether an ordering holds."""

import re

import pytest

from experiments import runs, tables
from experiments.published import LOWER, TABLES, Column, Published
from experiments.registry import EXPERIMENTS
from experiments.statistics import schemes
from experiments.tables import ordering, resolve
from experiments.zoo import scheme
from flashrope.demo.model import ModelConfig

TABLE = Published(
    "Some table",
    "nowhere, table 0",
    (Column("512", "few-shot", 1), Column("n", "copying", 30, multiple=False)),
    (("A", "rope", (10.0, 20.0, 15.0)), ("B", "rerope{w256}", (30.0, 40.0, 35.1)), ("C", "hope{L2}", (5.0, 5.0, 5.0))),
    ("Avg.", "n"),
    average=True,
)


def row(scheme_, task, at, value, seed=0, length=64):
    return {
        "scheme": scheme_,
        "trained_with": "rope",
        "train_length": str(length),
        "seed": str(seed),
        "task": task,
        "at": str(at),
        "value": str(value),
        "samples": "9",
    }


ROWS = [
    row(name, task, at, value + seed, seed, length)
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


def test_ordering():
    assert ordering("x", [1, 2, 3], [10, 20, 30]) == tables.Ordering("x", 3, 3, 0)
    assert ordering("x", [1, 2, 3], [10, 20, 30]).holds
    assert ordering("x", [3, 2, 1], [10, 20, 30]) == tables.Ordering("x", 3, 0, 0)
    assert ordering("x", [1, 2, 3], [10, 30, 20]) == tables.Ordering("x", 3, 2, 0)
    assert ordering("x", [1, 2, 2], [10, 20, 5]) == tables.Ordering(
        "x", 2, 1, 0
    )  # pairs that the paper ties are not counted
    tied = ordering("x", [1, 2, 3], [7, 7, 8])
    assert tied == tables.Ordering("x", 3, 2, 1) and not tied.holds
    assert str(tied) == "The paper's ordering by x **does not hold** here: 2 of 3 pairs agree, 1 tie."
    assert str(ordering("x", [1, 2], [1, 2])) == "The paper's ordering by x **holds** here: 1 of 1 pairs agree."


def test_resolve():
    assert resolve("rerope{w256}+logn", 64) == ("rerope-w32+logn", 64)
    assert resolve("leaky-rerope{w128}-k16", 128) == ("leaky-rerope-w32-k16", 128)
    assert resolve("hope{L4}", 64) == ("hope", 256)
    assert resolve("rope", 64) == ("rope", 64)


def test_figures_are_means_over_seeds_in_the_tables_places():
    found = tables.figures(TABLE, ROWS, 64)
    means = [[figure.mean for figure in line] for line in found]
    assert means == [[3, 5, 4], [13, 15, 14], [23, 25, 24]]  # seeds: + 0 and + 2
    assert all(figure.spread == pytest.approx(2**0.5) for line in found for figure in line)
    assert str(found[0][0]) == "3.00 ± 1.4"
    one_seed = tables.figures(TABLE, [r for r in ROWS if r["seed"] == "0"], 64)
    assert str(one_seed[0][0]) == "2.00" and one_seed[0][0].spread is None


def test_markdown_keeps_the_papers_rows_and_figures():
    text = tables.markdown(TABLE, ROWS, 64)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| method", "| A", "| B", "| C"]
    assert lines[2] == "| B | rerope-w32 | 13.00 ± 1.4 / 30.00 | 15.00 ± 1.4 / 40.00 | 14.00 ± 1.4 / 35.10 |"
    assert "hope at 128" in lines[3]
    assert "The paper's ordering by Avg. **does not hold** here: 1 of 3 pairs agree." in text
    assert "mean ± standard deviation of 2 seeds" in text and "Higher is better" in text and "nowhere, table 0" in text
    without = tables.markdown(TABLE, [r for r in ROWS if r["scheme"] != "rerope-w32"], 64)
    assert "| B | rerope-w32 | – / 30.00 | – / 40.00 | – / 35.10 |" in without and "0 of 1 pairs agree" in without


def test_an_experiment_without_a_table_in_the_papers_shows_its_declared_differences(tmp_path):
    found = [
        row(name, "passkey", 64, value + seed, seed) for seed in range(5) for name, value in (("rope", 9), ("hope", 7))
    ]
    runs.write_csv(tmp_path / "results.csv", list(found[0]), [list(each.values()) for each in found])
    text = tables.write(tmp_path, "passkey", 64, schemes("hope", "rope", "passkey", 1, 2))
    assert text == (tmp_path / "table.md").read_text()
    assert text.startswith("## Differences declared before the runs") and text.count("\n| hope | rope |") == 1
    assert "| hope | rope | 1 | 5 | -2.0 (-2.0 to -2.0) | lower |" in text
    assert tables.write(tmp_path, "passkey", 64) is None


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
