"""The experiment positions-over-length: the loss by position (by_position.py) of the main schemes, judged and drawn."""

from __future__ import annotations

from pathlib import Path

from flashrope.demo import files
from flashrope.demo.workers import Workers

from .by_position import BEFORE, TASK
from .curves import Line, Panel, draw
from .measuring import COLUMNS, Cell, measure_cells
from .runs import Run, read_csv, write_csv
from .statistics import Comparison, schemes
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
    lines = [Line(name, TASK) for name in names]
    panel = Panel("", lines, lines[0])
    words = "position / training length"
    draw(folder / "loss-by-position.png", [panel], rows, run.unit, "loss (nats per byte)", log=True, x_label=words)
