"""The figures and tables of an experiment, made from its results.csv alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from . import tables
from .curves import Panel, draw
from .figures import Series, bars, lines
from .registry import EXPERIMENTS
from .runs import read_csv

AXES = {
    "perplexity": ("context length (bytes, log scale)", "perplexity per byte"),
    "few-shot": ("prompt length (bytes, log scale)", "answers that are a label (%)"),
    "passkey": ("prompt length (bytes, log scale)", "keys right (%)"),
    "passkey-digits": ("prompt length (bytes, log scale)", "digits of the keys right (%)"),
}
FINER = {
    "passkey": "passkey-digits",
}  # the second measure of a task, which gives credit for partly correct answers


def show(folder: Path, name: str, train_length: int) -> list[str]:
    """Write the figures and the table of one experiment; returns the text of the table, if there is one."""
    rows, title = read_csv(folder / "results.csv"), EXPERIMENTS[name].summary
    title = title[0].upper() + title[1:]
    seeds = len({row["seed"] for row in rows})
    lengths = sorted({int(row["train_length"]) for row in rows})
    note = f"byte-level models trained on {', '.join(map(str, lengths))} bytes, " + (
        "one seed" if seeds == 1 else f"mean and range of {seeds} seeds"
    )
    for task, _ in EXPERIMENTS[name].measures:
        if task == "copying":
            _draw_copying(folder, name, rows, train_length)
        elif task == "accuracy":
            labels = list(dict.fromkeys(row["scheme"] for row in rows))
            panels = {
                "accuracy-repeat": f"{8 * train_length} bytes, repeating",
                "accuracy-non-repeat": f"{8 * train_length} bytes, not repeating",
            }
            groups = {panel: [_series(rows, label, (key,)) for label in labels] for key, panel in panels.items()}
            bars(folder / "accuracy.png", title, f"next-byte accuracy (%); {note}", labels, groups)
        else:
            for drawn in (task, FINER[task]) if task in FINER else (task,):
                _draw_lines(folder / f"{drawn}.png", title, note, drawn, rows, train_length)
    text = tables.write(folder, name, train_length, EXPERIMENTS[name].compares)
    return [text] if text else []


def _draw_lines(path: Path, title: str, note: str, task: str, rows: list[dict[str, str]], train_length: int) -> None:
    labels = list(dict.fromkeys((row["scheme"], row["train_length"]) for row in rows))
    several = len({length for _, length in labels}) > 1
    drawn = []
    for label, length in labels:
        series = _series([row for row in rows if row["train_length"] == length], label, (task,))
        drawn.append(dataclasses.replace(series, name=f"{label}, trained on {length}") if several else series)
    lines(
        path,
        title,
        note,
        *AXES[task],
        drawn,
        None if several else train_length,
        percent=task != "perplexity",
    )


def _draw_copying(folder: Path, name: str, rows: list[dict[str, str]], train_length: int) -> None:
    def panel(title: str, names: Sequence[str], task: str = "copying-by-length") -> Panel:
        return Panel(title, [(tables.resolve(name, train_length)[0], task) for name in names])

    if name == "ablation":
        panels = [panel("HoPE and its ablations", ("rope", "hope", "hope-ab1", "hope-ab2", "hope-ab3"))]
    else:
        panels = [
            panel("copying", ("rope", "hope", "rerope{w256}", "rerope{w256}+dagger", "yarn-s2", "kerple", "alibi")),
            panel("letters between", ("rope", "hope", "rerope{w256}", "rerope{w256}+dagger"), "copying-control"),
        ]
    draw(folder / "copying.png", panels, rows, train_length, "letters right (%)")


def _series(rows: Sequence[dict[str, str]], name: str, keys: tuple[str, ...]) -> Series:
    """Mean and range over seeds. Several tasks are averaged first."""
    chosen = [row for row in rows if row["scheme"] == name and row["task"] in keys]
    by_place: dict[float, dict[str, list[float]]] = {}
    for row in chosen:
        by_place.setdefault(float(row["at"]), {}).setdefault(row["seed"], []).append(float(row["value"]))
    x = sorted(by_place)
    means = [[sum(values) / len(values) for values in by_place[at].values()] for at in x]
    return Series(name, x, [sum(m) / len(m) for m in means], [min(m) for m in means], [max(m) for m in means])
