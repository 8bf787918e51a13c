"""Measures trained models, with one job per scheme, training length and seed."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from flashrope import attention
from flashrope.console import files
from flashrope.console.progress import Bar
from flashrope.lab.small_models.workers import Workers

from . import copying, few_shot, passkey, tasks
from .runs import Run
from .tasks import Result, Subject
from .training import load_model
from .zoo import scheme

COLUMNS = ("scheme", "trained_with", "train_length", "seed", "task", "at", "value", "samples")
MEASURES: dict[str, Callable[..., list[Result]]] = {
    **tasks.MEASURES,
    "copying": copying.measure,
    "few-shot": few_shot.measure,
    "passkey": passkey.measure,
    tasks.BY_POSITION: tasks.measure_by_position,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """Describes one measuring job: a scheme on the model of one training length and seed. ``measures``: pairs of a task
    and the multiples of the preset's training length at which to measure it. None instead of multiples: the task's own
    multiples."""

    scheme: str
    length: int
    seed: int
    measures: tuple[tuple[str, tuple[float, ...] | None], ...]

    @property
    def name(self) -> str:
        return f"{self.scheme}-L{self.length}-s{self.seed}.json"


def measure_cells(run: Run, workers: Workers, folder: Path, cells: Sequence[Cell]) -> list[list]:
    """Measures the cells that have no results yet. Returns the rows (COLUMNS) of all cells, in the order of the
    cells."""
    store = folder / "cells"
    store.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not (store / cell.name).exists()]
    if missing:
        with Bar(len(missing)).start("measuring schemes") as bar:
            jobs = [(run, cell, str(store / cell.name)) for cell in missing]
            workers.map(measure_job, jobs, lambda job, message: bar.step())
    return [row for cell in cells for row in json.loads((store / cell.name).read_text(encoding="utf-8"))]


def measure_job(run: Run, cell: Cell, path: str, progress: Callable) -> None:
    used = scheme(cell.scheme, run.preset.config, cell.length, run.defaults)
    model = load_model(run.model_path(used.trained, cell.length, cell.seed), run.device).eval()
    subject = Subject(
        model,
        used,
        run.corpus.unseen if run.corpus else (),
        run.unit,
        run.preset.samples,
        cell.seed,
        run.device,
        functools.partial(attention, impl=run.impl),
        1 << (18 if run.device.type == "cuda" else 14),
        run.corpus.train if run.corpus else b"",
    )
    rows = []
    for task, multiples in cell.measures:
        results: list[Result] = MEASURES[task](subject, *([multiples] if multiples else []))
        rows += [
            [cell.scheme, used.trained, cell.length, cell.seed, *dataclasses.astuple(result)] for result in results
        ]
    files.write(Path(path), json.dumps(rows))
    progress("done")
