"""n-dimensional RoPE on small pictures: every pixel asks for the colour of one of its four neighbours.

A pixel's colour says which: 0 the one above, 1 the one to the right, 2 the one below, 3 the one to the left; at an edge
the pixel itself. Models are trained on square pictures and read others too. Two-dimensional positions say the same of a
neighbour in every picture; positions along the rows of a picture say "above" by its width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import Rotary, attention
from .model import Attend, LanguageModel, ModelConfig
from .tasks import Result
from .train import TrainConfig, train

COLOURS = 4
NEIGHBOURS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # row, column, by colour
SIDE = 8
SHAPES = ((8, 8), (8, 12), (12, 8), (12, 12))  # rows, columns
ENCODINGS = ("axial", "raster", "nope")
STEPS, BATCH, SAMPLES = 2000, 16, 64  # STEPS at most; a preset of fewer does its own


def pictures(count: int, rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Colours and wanted colours, int64 (count, rows * columns), row by row."""
    colours = torch.randint(COLOURS, (count, rows, columns), generator=generator)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    wanted = colours.clone()
    for colour, (down, right) in enumerate(NEIGHBOURS):
        there_row, there_column = row + down, column + right
        inside = (there_row >= 0) & (there_row < rows) & (there_column >= 0) & (there_column < columns)
        neighbour = colours[:, there_row.clamp(0, rows - 1), there_column.clamp(0, columns - 1)]
        wanted = torch.where((colours == colour) & inside, neighbour, wanted)
    return colours.flatten(1), wanted.flatten(1)


def encoding(name: str, head_dim: int) -> Rotary:
    if name == "axial":
        return Rotary.axial(head_dim, axes=2)
    return Rotary.rope(head_dim, 100.0) if name == "raster" else Rotary.none(head_dim)


def attend_on(rows: int, columns: int, impl: str | None = None) -> Attend:
    """Attention in both directions, over (row, column) for axial schemes and row by row for others."""

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
    """A model of SIDE x SIDE pictures."""
    torch.manual_seed(training.seed)
    model = LanguageModel(config).to(device)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(training.seed)
        while True:
            colours, wanted = pictures(training.batch_size, SIDE, SIDE, generator)
            yield colours.to(device), wanted.to(device)

    train(model, encoding(name, config.head_dim), batches(), training, attend_on(SIDE, SIDE, impl), progress)
    return model


@torch.no_grad()
def measure(model: LanguageModel, name: str, samples: int, seed: int, impl: str | None = None) -> list[Result]:
    """Share of pixels that are told right, by shape (task "picture-8x12"); the pictures are others than those trained
    on."""
    device, results = model.embedding.weight.device, []
    for rows, columns in SHAPES:
        colours, wanted = pictures(samples, rows, columns, torch.Generator().manual_seed(1_000_000_007 + seed))
        said = model(colours.to(device), encoding(name, model.config.head_dim), attend_on(rows, columns, impl)).argmax(
            -1
        )
        right = (said.cpu() == wanted).double().mean().item()
        results.append(Result(f"picture-{rows}x{columns}", rows * columns, 100 * right, samples))
    return results


def job(
    name: str, config: ModelConfig, training: TrainConfig, samples: int, device: str, impl: str | None, progress
) -> list[Result]:
    """Trains and measures one model, in a worker."""
    model = train_on_pictures(name, config, training, torch.device(device), impl, lambda *message: progress(message))
    return measure(model, name, samples, training.seed, impl)
