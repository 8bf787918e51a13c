"""Runs the experiment positions-over-length, which measures the loss of the main schemes by position."""

from __future__ import annotations

from pathlib import Path

from flashrope.lab.small_models.workers import Workers

from . import tables
from .figures import Line, Panel, draw
from .measuring import COLUMNS, Cell, measure_cells
from .runs import Run, read_csv, write_csv
from .statistics import HIGHER, LOWER, Comparison, schemes
from .tasks import BY_POSITION as TASK
from .training import train_models
from .zoo import scheme

SCHEMES = ("rope", "hope", "rerope{w256}", "rerope{w256}+dagger")
COMPARES = (
    *schemes("hope", "rope", TASK, 1),
    *schemes("hope", "rope", TASK, 2, 4, 8, expected=LOWER),
    *schemes("rerope{w256}", "rope", TASK, 2, 4, 8, expected=LOWER),
    *schemes("rerope{w256}+dagger", "rerope{w256}", TASK, 2, 4, 8, expected=LOWER),
    # whether the loss rises or falls with the context
    *(Comparison((name, TASK), (name, TASK), 8, HIGHER, second_multiple=1) for name in SCHEMES[:2]),
    *(Comparison((name, TASK), (name, TASK), 8, LOWER, second_multiple=1) for name in SCHEMES[2:]),
)


def draw_over_length(run: Run, workers: Workers, folder: Path) -> None:
    """Measures SCHEMES on the text models, judges COMPARES and draws the losses by position."""
    names = [tables.resolve(template, run.unit)[0] for template in SCHEMES]
    train_models(
        run, workers, [(scheme(name, run.preset.config, run.unit, run.defaults).trained, run.unit) for name in names]
    )
    cells = [Cell(name, run.unit, seed, ((TASK, None),)) for name in names for seed in run.seeds]
    write_csv(folder / "results.csv", COLUMNS, measure_cells(run, workers, folder, cells))
    tables.write(folder, folder.name, run.unit, COMPARES)
    lines = [Line(name, TASK) for name in names]
    draw(
        folder / f"{TASK}.png",
        [Panel("loss of the bytes up to a position", lines, lines[0])],
        read_csv(folder / "results.csv"),
        run.unit,
        "loss (nats per byte)",
        log=True,
        x_label="position / training length",
    )
