"""Measures n-dimensional RoPE on small pictures. A model predicts for every pixel the colour of one of its neighbours.

The pixel's own colour says which neighbour it is: 0 for above, 1 for right, 2 for below, 3 for left. If the pixel is at
an edge and has no such neighbour, its own colour is to be predicted. Models are trained on square pictures and measured
on other shapes too. With two-dimensional positions a neighbour has the same relative position in every picture. With
positions in row order, the relative position of the pixel above depends on the width of the picture.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from flashrope import Rotary, attention
from flashrope.console import files
from flashrope.console.progress import Bar
from flashrope.lab.small_models.model import Attend, LanguageModel, ModelConfig
from flashrope.lab.small_models.train import TrainConfig, train
from flashrope.lab.small_models.workers import Workers, steps_of_jobs

from .figures import points
from .measuring import COLUMNS
from .runs import Run, write_csv
from .statistics import interval
from .tasks import Result

COLOURS = 4
NEIGHBOURS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # (rows, columns) to the neighbour, for each colour
SIDE = 8
SHAPES = ((8, 8), (8, 12), (12, 8), (12, 12))  # rows, columns
ENCODINGS = ("axial", "raster", "nope")
MAX_STEPS, BATCH, SAMPLES = 2000, 16, 64  # a preset with fewer steps keeps its number of steps


def pictures(count: int, rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (colours, target colours) of random pictures, each int64 (count, rows * columns) in row order."""
    colours = torch.randint(COLOURS, (count, rows, columns), generator=generator)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    targets = colours.clone()
    for colour, (down, right) in enumerate(NEIGHBOURS):
        there_row, there_column = row + down, column + right
        inside = (there_row >= 0) & (there_row < rows) & (there_column >= 0) & (there_column < columns)
        neighbour = colours[:, there_row.clamp(0, rows - 1), there_column.clamp(0, columns - 1)]
        targets = torch.where((colours == colour) & inside, neighbour, targets)
    return colours.flatten(1), targets.flatten(1)


def encoding(name: str, head_dim: int) -> Rotary:
    if name == "axial":
        return Rotary.axial(head_dim, axes=2)
    return Rotary.rope(head_dim, 100.0) if name == "raster" else Rotary.none(head_dim)


def attend_on(rows: int, columns: int, impl: str | None = None) -> Attend:
    """Returns an attention function without a causal mask. Positions are (row, column) for axial schemes. For other
    schemes they count the pixels in row order."""

    def attend(q, k, v, rotary):
        positions = None
        if rotary.axis:
            place = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(q.device)
            positions = place.expand(q.shape[0], -1, -1)
        return attention(q, k, v, rotary, causal=False, positions=positions, impl=impl)

    return attend


def train_on_pictures(
    name: str,
    config: ModelConfig,
    training: TrainConfig,
    device: torch.device | str = "cpu",
    impl: str | None = None,
    progress=lambda step, loss: None,
) -> LanguageModel:
    """Returns a model trained on SIDE x SIDE pictures."""
    torch.manual_seed(training.seed)
    model = LanguageModel(config).to(device)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(training.seed)
        while True:
            colours, targets = pictures(training.batch_size, SIDE, SIDE, generator)
            yield colours.to(device), targets.to(device)

    train(model, encoding(name, config.head_dim), batches(), training, attend_on(SIDE, SIDE, impl), progress)
    return model


@torch.no_grad()
def measure(model: LanguageModel, name: str, samples: int, seed: int, impl: str | None = None) -> list[Result]:
    """Returns the percentage of pixels predicted correctly, by shape (task "picture-8x12"), on pictures not used in
    training."""
    device, results = model.embedding.weight.device, []
    for rows, columns in SHAPES:
        colours, targets = pictures(samples, rows, columns, torch.Generator().manual_seed(1_000_000_007 + seed))
        predicted = model(
            colours.to(device), encoding(name, model.config.head_dim), attend_on(rows, columns, impl)
        ).argmax(-1)
        right = (predicted.cpu() == targets).double().mean().item()
        results.append(Result(f"picture-{rows}x{columns}", rows * columns, 100 * right, samples))
    return results


def train_and_measure(
    name: str, config: ModelConfig, training: TrainConfig, samples: int, device: str, impl: str | None, progress
) -> list[Result]:
    """Trains and measures one model, in a worker."""
    model = train_on_pictures(name, config, training, torch.device(device), impl, lambda *message: progress(message))
    return measure(model, name, samples, training.seed, impl)


def draw_pictures(run: Run, workers: Workers, folder: Path) -> None:
    preset = run.preset
    steps = min(MAX_STEPS, preset.steps)
    trainings = [
        TrainConfig(steps, BATCH, SIDE**2, preset.learning_rate, warmup=preset.warmup, seed=seed) for seed in run.seeds
    ]
    jobs = [
        (name, preset.config, training, SAMPLES, str(run.device), run.impl)
        for name in ENCODINGS
        for training in trainings
    ]
    stored = folder / "cells.json"
    asked = [[job[0], job[2].seed, steps] for job in jobs]
    kept = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    if kept.get("asked") != asked:
        with Bar(len(jobs) * steps).start(f"training {len(jobs)} picture models") as bar:
            found = workers.map(train_and_measure, jobs, steps_of_jobs(bar))
        rows = [
            [job[0], job[0], SIDE**2, job[2].seed, *dataclasses.astuple(result)]
            for job, results in zip(jobs, found, strict=True)
            for result in results
        ]
        kept = {"asked": asked, "rows": rows}
        files.write(stored, json.dumps(kept))
    write_csv(folder / "results.csv", COLUMNS, kept["rows"])
    groups = {}
    for rows_, columns in SHAPES:
        task = f"picture-{rows_}x{columns}"
        groups[f"{rows_} x {columns}" + (", trained" if rows_ == columns == SIDE else "")] = {
            name: interval([row[6] for row in kept["rows"] if row[0] == name and row[4] == task]) for name in ENCODINGS
        }
    points(folder / "picture.png", groups, "pixels right (%)")
