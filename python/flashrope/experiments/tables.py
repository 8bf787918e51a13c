"""Tables against the sources, made from results.csv alone: ``write(folder)`` for each experiment, ours beside the
source's."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import files
from .published import LOWER, TABLES, Published
from .runs import read_csv
from .tasks import SOURCE_LENGTH


@dataclasses.dataclass(frozen=True)
class Figure:
    """Mean over seeds, their standard deviation (None for one seed)."""

    mean: float
    spread: float | None

    def __str__(self) -> str:
        text = f"{self.mean:.2f}" if self.mean < 1e4 else f"{self.mean:.2e}"
        return text if self.spread is None else f"{text} ± {self.spread:.2g}"


@dataclasses.dataclass(frozen=True)
class Ordering:
    """How many pairs of rows that the source orders strictly stand in the same order here."""

    column: str
    pairs: int
    agree: int
    tie: int

    @property
    def holds(self) -> bool:
        return self.agree == self.pairs

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        rest = f", {self.tie} tie" if self.tie else ""
        return f"The source's ordering by {self.column} **{verdict}** here: {self.agree} of {self.pairs} pairs agree{rest}."


def resolve(template: str, train_length: int) -> tuple[str, int]:
    """(scheme, training length) of a published row's scheme at another training length."""
    length = train_length
    name = template
    if match := re.search(r"\{L(\d+)\}", template):
        length, name = train_length * int(match[1]), template.replace(match[0], "")
    return re.sub(r"\{w(\d+)\}", lambda m: f"-w{max(int(m[1]) * train_length // SOURCE_LENGTH, 1)}", name), length


def ordering(column: str, published: Sequence[float], ours: Sequence[float]) -> Ordering:
    """Over all pairs of rows; equal figures of ours are a tie, which does not agree."""
    pairs = agree = tie = 0
    for one in range(len(published)):
        for other in range(one):
            if published[one] != published[other]:
                pairs += 1
                tie += ours[one] == ours[other]
                agree += (ours[one] - ours[other]) * (published[one] - published[other]) > 0
    return Ordering(column, pairs, agree, tie)


def figures(table: Published, rows: list[dict[str, str]], train_length: int) -> list[list[Figure | None]]:
    """Ours, in the table's rows and columns; None where nothing was measured. few-shot is the mean over its label
    sets."""
    seeds = sorted({int(row["seed"]) for row in rows})
    found = []
    for _, template, _ in table.rows:
        name, length = resolve(template, train_length)
        own = [row for row in rows if row["scheme"] == name and int(row["train_length"]) == length]
        per_seed = [[_value(own, column, train_length, seed) for column in table.columns] for seed in seeds]
        if table.average:
            per_seed = [[*values, None if None in values else statistics.fmean(values)] for values in per_seed]
        found.append([_figure(values) for values in zip(*per_seed, strict=True)])
    return found


def markdown(table: Published, rows: list[dict[str, str]], train_length: int) -> str:
    """The table in the source's row order, each figure beside the source's, and what became of its ordering."""
    ours = figures(table, rows, train_length)
    labels = [column.label for column in table.columns] + (["Avg."] if table.average else [])
    theirs = [values for _, _, values in table.rows]
    seeds = len({row["seed"] for row in rows})
    better = "Lower" if table.better == LOWER else "Higher"
    spread = "one seed, so no spread" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
    lines = [
        f"## {table.title}",
        "",
        f"Ours / the source's ({table.place}). {better} is better. Ours: trained on {train_length} "
        f"bytes where the source has {SOURCE_LENGTH} tokens, all lengths in proportion; {spread}. {table.note}".rstrip(),
        "",
        "| method | scheme here | " + " | ".join(labels) + " |",
        "|---|---|" + "---:|" * len(labels),
    ]
    for (label, template, _), own, published in zip(table.rows, ours, theirs, strict=True):
        name, length = resolve(template, train_length)
        name += f" at {length}" if "{L" in template else ""
        cells = [
            f"{figure if figure is not None else '–'} / {value:.2f}"
            for figure, value in zip(own, published, strict=True)
        ]
        lines.append(f"| {label} | {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for column in table.orders:
        at = labels.index(column)
        pairs = [
            (published[at], own[at].mean) for own, published in zip(ours, theirs, strict=True) if own[at] is not None
        ]
        found = (
            ordering(column, *zip(*pairs, strict=True))
            if len(pairs) > 1
            else f"Too little was measured to order {column}."
        )
        lines += [str(found), ""]
    return "\n".join(lines)


def write(folder: Path, name: str, train_length: int) -> str | None:
    """table.md of one experiment's folder from its results.csv; None where the sources have no table for it."""
    if name not in TABLES:
        return None
    rows = read_csv(folder / "results.csv")
    text = "\n".join(markdown(table, rows, train_length) for table in TABLES[name])
    files.write(folder / "table.md", text)
    return text


def _value(rows: list[dict[str, str]], column, train_length: int, seed: int) -> float | None:
    at = column.at * train_length if column.multiple else column.at
    values = [
        float(row["value"])
        for row in rows
        if int(row["seed"]) == seed
        and float(row["at"]) == at
        and (row["task"] == column.task or column.task == "few-shot" and row["task"].startswith("few-shot-"))
    ]
    return statistics.fmean(values) if values else None


def _figure(values: Sequence[float | None]) -> Figure | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)
