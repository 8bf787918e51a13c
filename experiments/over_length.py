"""The experiment positions-over-length: the loss by position (by_position.py) of the main schemes, judged and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashrope.demo import files
from flashrope.demo.figure import new_figure, save
from flashrope.demo.workers import Workers

from .by_position import BEFORE, TASK
from .curves import LOOKS, NAMES, family
from .measuring import COLUMNS, Cell, measure_cells
from .runs import Run, read_csv, write_csv
from .statistics import Comparison, interval, schemes, values_at
from .tables import judged, resolve
from .training import train_models
from .zoo import scheme

SCHEMES = ("rope", "hope", "rerope{w256}", "rerope{w256}+dagger")
COMPARES = (
    *schemes("hope", "rope", TASK, 1, 2, 4, 8),
    *schemes("rerope{w256}", "rope", TASK, 1, 2, 4, 8),
    *schemes("rerope{w256}+dagger", "rerope{w256}", TASK, 2, 4, 8),
    *(Comparison((name, TASK), (name, BEFORE), 8) for name in SCHEMES),
)


def draw_over_length(run: Run, workers: Workers, folder: Path) -> None:
    """Measure SCHEMES on the text models, judge COMPARES and draw the losses by position."""
    names = [resolve(template, run.unit)[0] for template in SCHEMES]
    train_models(
        run, workers, [(scheme(name, run.preset.config, run.unit, run.defaults).trained, run.unit) for name in names]
    )
    cells = [Cell(name, run.unit, seed, ((TASK, None),)) for name in names for seed in run.seeds]
    write_csv(folder / "results.csv", COLUMNS, measure_cells(run, workers, folder, cells))
    rows = read_csv(folder / "results.csv")
    files.write(folder / "table.md", judged(COMPARES, rows, run.unit))
    _draw(folder / "loss-by-position.png", names, rows, run.unit)


def _draw(path: Path, names: Sequence[str], rows: Sequence[dict[str, str]], unit: int) -> None:
    figure = new_figure((8.3, 4.4))
    axes = figure.subplots()
    at = sorted({float(row["at"]) for row in rows if row["task"] == TASK})
    for name in names:
        found = [interval(list(values_at(rows, name, TASK, x).values())) for x in at]
        colour, marker = LOOKS[family(name)]
        axes.errorbar(
            [x / unit for x in at],
            [each.mean for each in found],
            [each.half or 0.0 for each in found],
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=1.8,
            capsize=3,
        )
        axes.annotate(
            NAMES[family(name)],
            (at[-1] / unit, found[-1].mean),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            fontsize=11,
            va="center",
        )
    axes.axvline(1, color="0.6", linewidth=1, linestyle=":")
    axes.set_xlim(0, 9.8 * at[-1] / unit / 8)
    axes.set_xlabel("position / training length", fontsize=12)
    axes.set_ylabel("loss (nats per byte)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
