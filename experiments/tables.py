"""Makes the tables of an experiment from its results.csv: the declared differences, our figures next to the papers'
figures, and all measurements. Every figure is a mean over seeds with its 95% interval."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from flashrope.console import files

from .looks import label
from .published import LOWER, TABLES, Published
from .runs import in_units, read_csv
from .statistics import (
    AGAINST,
    MIN_SEEDS,
    SHOWN,
    UNJUDGED,
    UNSHOWN,
    Comparison,
    Interval,
    difference,
    interval,
    outcome,
    paired,
    values_at,
    verdict,
)
from .tasks import PAPER_LENGTH
from .templating import render

Rows = Sequence[dict[str, str]]
UNITS = {  # the quantity that a task measures, for table headings
    "perplexity": "Perplexity per byte",
    "loss": "Loss, nats per byte",
    "loss-repeat": "Loss of repeated text, nats per byte",
    "loss-by-position": "Loss of the bytes up to a position, nats per byte",
    "swing-repeated": "Largest minus smallest score, one byte repeated",
    "swing-text": "Largest minus smallest score, unseen text",
    "ripple-repeated": "Ripple (root mean square around the running mean), one byte repeated",
    "ripple-text": "Ripple (root mean square around the running mean), unseen text",
    "ripple-period-repeated": "Strongest period of the ripple in bytes, one byte repeated",
    "ripple-period-text": "Strongest period of the ripple in bytes, unseen text",
    "copying-by-length": "Letters right, %",
    "copying-control": "Letters right, %, with random letters before the query",
    "copying-letters": "Letters right, %, by the paper's number of sequences",
    "passkey": "Keys right, %",
    "passkey-digits": "Digits right, %",
}
BY_COUNT = ("copying", "copying-letters")  # tasks whose ``at`` is not a length


@dataclasses.dataclass(frozen=True)
class Ordering:
    """Counts the pairs of rows that the paper orders strictly, by the outcome of their paired difference in our
    runs."""

    column: str
    counts: dict[str, int]  # keys: SHOWN, AGAINST, UNSHOWN, UNJUDGED

    @property
    def pairs(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        if self.counts[UNJUDGED] == self.pairs:
            return f"The paper's ordering by {self.column} is not judged: fewer than {MIN_SEEDS} seeds."
        return (
            f"The paper orders {self.pairs} pairs by {self.column}: {self.counts[SHOWN]} have that order here, "
            f"{self.counts[AGAINST]} **have the opposite**, and {self.counts[UNSHOWN]} are not told apart (paired 95% "
            "interval)."
        )


def resolve(template: str, train_length: int) -> tuple[str, int]:
    """Returns (scheme, training length) in our runs for the scheme of a published row."""
    length = train_length
    name = template
    if match := re.search(r"\{L(\d+)\}", template):
        length, name = train_length * int(match[1]), template.replace(match[0], "")
    return re.sub(r"\{w(\d+)\}", lambda m: f"-w{max(int(m[1]) * train_length // PAPER_LENGTH, 1)}", name), length


def ordering(column: str, published: Sequence[float], ours: Sequence[dict[int, float]]) -> Ordering:
    """Compares all pairs of rows. published: the paper's figure of every row. ours: {seed: our value} of every row."""
    counts = dict.fromkeys((SHOWN, AGAINST, UNSHOWN, UNJUDGED), 0)
    for one in range(len(published)):
        for other in range(one):
            found = paired(ours[one], ours[other])
            if published[one] != published[other] and found is not None:
                counts[outcome(found, 1 if published[one] > published[other] else -1)] += 1
    return Ordering(column, counts)


def measured(table: Published, rows: Rows, train_length: int) -> list[list[dict[int, float]]]:
    """Returns [row of the table][column of the table] -> {seed: our value}."""
    seeds = sorted({int(row["seed"]) for row in rows})
    found = []
    for _, template, _ in table.rows:
        name, length = resolve(template, train_length)
        chosen = [row for row in rows if row["scheme"] == name and int(row["train_length"]) == length]
        per_seed = {seed: [_value(chosen, column, train_length, seed) for column in table.columns] for seed in seeds}
        if table.average:
            per_seed = {
                seed: [*values, None if None in values else statistics.fmean(values)]
                for seed, values in per_seed.items()
            }
        columns = len(table.columns) + table.average
        found.append(
            [{seed: values[at] for seed, values in per_seed.items() if values[at] is not None} for at in range(columns)]
        )
    return found


def markdown(table: Published, rows: Rows, train_length: int) -> str:
    """Returns the table in the paper's row order. Each of our figures is next to the paper's figure. Text below the
    table says how much of the paper's ordering our runs confirm."""
    ours = measured(table, rows, train_length)
    labels = [column.label for column in table.columns] + (["Avg."] if table.average else [])
    theirs = [values for _, _, values in table.rows]
    better = "Lower" if table.better == LOWER else "Higher"
    unit = "letters" if table.columns[0].task == "copying" else "bytes"
    lines, orderings = [], []
    for (name_there, template, _), values, published in zip(table.rows, ours, theirs, strict=True):
        name, length = resolve(template, train_length)
        name += f" at {length}" if "{L" in template else ""
        cells = [f"{_cell(by_seed)} / {value:.2f}" for by_seed, value in zip(values, published, strict=True)]
        lines.append((name_there, name, *cells))
    for column in table.orders:
        at = labels.index(column)
        pairs = [(published[at], values[at]) for values, published in zip(ours, theirs, strict=True) if values[at]]
        found = (
            ordering(column, *zip(*pairs, strict=True))
            if len(pairs) > 1
            else f"Not enough was measured to order by {column}."
        )
        orderings.append(found)
    return render(
        "published.md",
        table=table,
        better=better,
        length=train_length,
        unit=unit,
        paper_length=PAPER_LENGTH,
        spread=_spread(rows),
        heads=labels,
        rows=lines,
        orderings=orderings,
    )


def judge(
    compares: Sequence[Comparison], rows: Rows, train_length: int, name: str = ""
) -> list[tuple[Comparison, Interval]]:
    """Returns (comparison, difference) for those declared differences of an experiment that were measured. The
    comparison has the sign that the papers expect."""
    found = []
    for each in compares:
        first, second = ((resolve(scheme, train_length)[0], task) for scheme, task in (each.first, each.second))
        second_multiple = each.multiple if each.second_multiple is None else each.second_multiple
        interval_ = difference(rows, first, second, each.multiple * train_length, second_multiple * train_length)
        if interval_ is not None:
            expected = each.expected or in_the_papers(name, each)
            found.append((dataclasses.replace(each, expected=expected), interval_))
    return found


def in_the_papers(name: str, asked: Comparison) -> int:
    """Returns the sign of the difference in the papers' tables for the experiment, or 0 if the tables lack one of the
    figures."""
    for table in TABLES.get(name, ()):
        found = [
            values[at]
            for (scheme, task) in (asked.first, asked.second)
            for _, template, values in table.rows
            for at, column in enumerate(table.columns)
            if template == scheme and (column.task, column.at, column.multiple) == (task, asked.multiple, True)
        ]
        if len(found) == 2 and asked.second_multiple is None:
            return (found[0] > found[1]) - (found[0] < found[1])
    return 0


def judged(compares: Sequence[Comparison], rows: Rows, train_length: int, name: str = "") -> str:
    """Returns a table of the declared differences with their paired intervals, and what they show. Differences against
    expectation are bold. name: the name of the experiment. If a comparison states no sign, the sign is taken from the
    papers' tables for this experiment."""
    found_rows = []
    for each, found in judge(compares, rows, train_length, name):
        (first, task), (second, other) = (
            (label(resolve(scheme, train_length)[0], numbers=True), task) for scheme, task in (each.first, each.second)
        )
        tasks = task if task == other else f"{task}, {other}"
        at = f"{each.multiple:g}" + ("" if each.second_multiple is None else f", {each.second_multiple:g}")
        said = verdict(found, each.expected)
        said = f"**{said}**" if AGAINST in said else said
        found_rows.append((first, second, tasks, at, found.seeds, found, said))
    return render("differences.md", min_seeds=MIN_SEEDS, rows=found_rows)


def listed(rows: Rows, task: str, train_length: int) -> str:
    """Returns a table of every measurement of a task, with one column per length. It has one row per scheme, or one row
    per scheme and training length if there are several training lengths."""
    chosen = [row for row in rows if row["task"] == task]
    lengths = {int(row["train_length"]) for row in chosen}
    places = sorted({float(row["at"]) for row in chosen})
    by_count = task in BY_COUNT
    heads = [f"{at:g}" if by_count else f"{at:g} ({at / train_length:g})" for at in places]
    unit = "letters" if task.startswith("copying") else "bytes"
    what = "number of sequences" if by_count else f"length in {unit} (in training lengths)"
    lines = []
    for name, length in dict.fromkeys((row["scheme"], int(row["train_length"])) for row in chosen):
        own = [row for row in chosen if int(row["train_length"]) == length]
        cells = [_cell(values_at(own, name, task, at)) for at in places]
        trained = f", trained on {length}" if len(lengths) > 1 else ""
        lines.append((f"{label(name)}{trained}", name, *cells))
    title = UNITS.get(task, task)
    return render("measurements.md", title=title, what=what, spread=_spread(chosen), heads=heads, rows=lines)


def write(folder: Path, name: str, train_length: int, compares: Sequence[Comparison] = ()) -> str:
    """Writes table.md in an experiment's folder, from the results.csv there. Returns the text of the table."""
    rows = read_csv(folder / "results.csv")
    published = TABLES.get(name, ())
    shown = {column.task for table in published for column in table.columns}
    parts = [judged(compares, rows, train_length, name)] if judge(compares, rows, train_length) else []
    parts += [markdown(table, rows, train_length) for table in published]
    parts += [
        listed(rows, task, train_length) for task in dict.fromkeys(row["task"] for row in rows) if task not in shown
    ]
    text = in_units("\n".join(parts), folder)
    files.write(folder / "table.md", text)
    return text


def _spread(rows: Rows) -> str:
    seeds = len({row["seed"] for row in rows})
    return "one seed, so no interval" if seeds == 1 else f"mean ± half of its 95% interval over {seeds} seeds"


def _cell(by_seed: dict[int, float]) -> str:
    return interval(list(by_seed.values())).level if by_seed else "–"


def _value(rows: Rows, column, train_length: int, seed: int) -> float | None:
    at = column.at * train_length if column.multiple else column.at
    values = [
        float(row["value"])
        for row in rows
        if int(row["seed"]) == seed and float(row["at"]) == at and row["task"] == column.task
    ]
    return statistics.fmean(values) if values else None
