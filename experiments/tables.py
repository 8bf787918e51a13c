"""Tables that compare our figures with the papers', made from an experiment's results.csv alone."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from flashrope.demo import files

from .published import LOWER, TABLES, Published
from .runs import read_csv
from .statistics import MIN_SEEDS, Comparison, difference, verdict
from .tasks import PAPER_LENGTH


@dataclasses.dataclass(frozen=True)
class Figure:
    """Mean and standard deviation over seeds; ``spread`` is None for one seed."""

    mean: float
    spread: float | None

    def __str__(self) -> str:
        text = f"{self.mean:.2f}" if self.mean < 1e4 else f"{self.mean:.2e}"
        return text if self.spread is None else f"{text} ± {self.spread:.2g}"


@dataclasses.dataclass(frozen=True)
class Ordering:
    """How many pairs of rows that the paper orders strictly have the same order here."""

    column: str
    pairs: int
    agree: int
    tie: int

    @property
    def holds(self) -> bool:
        return self.agree == self.pairs

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        ties = f", {self.tie} tie" if self.tie else ""
        return (
            f"The paper's ordering by {self.column} **{verdict}** here: {self.agree} of {self.pairs} pairs agree{ties}."
        )


def resolve(template: str, train_length: int) -> tuple[str, int]:
    """(scheme, training length) here for the scheme of a published row."""
    length = train_length
    name = template
    if match := re.search(r"\{L(\d+)\}", template):
        length, name = train_length * int(match[1]), template.replace(match[0], "")
    return re.sub(r"\{w(\d+)\}", lambda m: f"-w{max(int(m[1]) * train_length // PAPER_LENGTH, 1)}", name), length


def ordering(column: str, published: Sequence[float], ours: Sequence[float]) -> Ordering:
    """Compares all pairs of rows. Equal figures of ours are a tie and do not agree."""
    pairs = agree = tie = 0
    for one in range(len(published)):
        for other in range(one):
            if published[one] != published[other]:
                pairs += 1
                tie += ours[one] == ours[other]
                agree += (ours[one] - ours[other]) * (published[one] - published[other]) > 0
    return Ordering(column, pairs, agree, tie)


def figures(table: Published, rows: list[dict[str, str]], train_length: int) -> list[list[Figure | None]]:
    """Our figures in the rows and columns of the table; None if not measured."""
    seeds = sorted({int(row["seed"]) for row in rows})
    found = []
    for _, template, _ in table.rows:
        name, length = resolve(template, train_length)
        chosen = [row for row in rows if row["scheme"] == name and int(row["train_length"]) == length]
        per_seed = [[_value(chosen, column, train_length, seed) for column in table.columns] for seed in seeds]
        if table.average:
            per_seed = [[*values, None if None in values else statistics.fmean(values)] for values in per_seed]
        found.append([_figure(values) for values in zip(*per_seed, strict=True)])
    return found


def markdown(table: Published, rows: list[dict[str, str]], train_length: int) -> str:
    """The table in the paper's row order, each figure next to the paper's, and whether the paper's ordering holds."""
    ours = figures(table, rows, train_length)
    labels = [column.label for column in table.columns] + (["Avg."] if table.average else [])
    theirs = [values for _, _, values in table.rows]
    seeds = len({row["seed"] for row in rows})
    better = "Lower" if table.better == LOWER else "Higher"
    spread = "one seed, so no spread" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
    conditions = (
        f"trained on {train_length} bytes instead of the paper's {PAPER_LENGTH} tokens, all lengths in proportion"
    )
    lines = [
        f"## {table.title}",
        "",
        f"Ours / the paper's ({table.place}). {better} is better. Ours: {conditions}; {spread}. {table.note}".rstrip(),
        "",
        "| method | scheme here | " + " | ".join(labels) + " |",
        "|---|---|" + "---:|" * len(labels),
    ]
    for (label, template, _), measured, published in zip(table.rows, ours, theirs, strict=True):
        name, length = resolve(template, train_length)
        name += f" at {length}" if "{L" in template else ""
        cells = [
            f"{figure if figure is not None else '–'} / {value:.2f}"
            for figure, value in zip(measured, published, strict=True)
        ]
        lines.append(f"| {label} | {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for column in table.orders:
        at = labels.index(column)
        pairs = [
            (published[at], measured[at].mean)
            for measured, published in zip(ours, theirs, strict=True)
            if measured[at] is not None
        ]
        found = (
            ordering(column, *zip(*pairs, strict=True))
            if len(pairs) > 1
            else f"Not enough was measured to order by {column}."
        )
        lines += [str(found), ""]
    return "\n".join(lines)


def judged(compares: Sequence[Comparison], rows: list[dict[str, str]], train_length: int) -> str:
    """The declared differences with their paired intervals, and what they show."""
    lines = [
        "## Differences declared before the runs",
        "",
        "First minus second, seed by seed, in percentage points or, of perplexities, in their unit, with the 95% "
        "interval of the mean (Student's t). A difference "
        f"counts where the interval of at least {MIN_SEEDS} seeds excludes zero. Each interval stands for itself.",
        "",
        "| first | second | length / training length | seeds | difference | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for each in compares:
        pair = [(resolve(name, train_length)[0], task) for name, task in (each.first, each.second)]
        found = difference(rows, *pair, each.multiple * train_length)
        if found is None:
            continue
        labels = [f"{name}, {task}" if pair[0][1] != pair[1][1] else name for name, task in pair]
        lines.append(f"| {labels[0]} | {labels[1]} | {each.multiple:g} | {found.seeds} | {found} | {verdict(found)} |")
    return "\n".join([*lines, ""])


def write(folder: Path, name: str, train_length: int, compares: Sequence[Comparison] = ()) -> str | None:
    """Write table.md of an experiment's folder from its results.csv: the declared differences, then the papers' tables.
    Returns its text; None if there are neither."""
    if name not in TABLES and not compares:
        return None
    rows = read_csv(folder / "results.csv")
    parts = [judged(compares, rows, train_length)] if compares else []
    text = "\n".join(parts + [markdown(table, rows, train_length) for table in TABLES.get(name, ())])
    files.write(folder / "table.md", text)
    return text


def _value(rows: list[dict[str, str]], column, train_length: int, seed: int) -> float | None:
    at = column.at * train_length if column.multiple else column.at
    values = [
        float(row["value"])
        for row in rows
        if int(row["seed"]) == seed and float(row["at"]) == at and row["task"] == column.task
    ]
    return statistics.fmean(values) if values else None


def _figure(values: Sequence[float | None]) -> Figure | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)
