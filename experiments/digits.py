"""RoPE as a base-beta encoding (Su 2023, kexue.fm/archives/9675): what becomes of a model that reads numbers by their
digits when the numbers grow beyond those it was trained on.

A small network reads two numbers by their decimal digits and says which is larger. It is trained on numbers below 1000;
the digit for thousands is there but always 0. Numbers below 2000 are then written in four ways:

    trained             in decimal, below 1000, as in training
    extrapolation       in decimal: the digit for thousands is 1 for the first time (RoPE as it is)
    interpolation       half the number, in decimal: the last digit has halves (PI)
    base 16, base 13    in a larger base, three digits still: each may be larger than 9 (NTK). 13 is the smallest base
                        that suffices.

Trains networks of its own in seconds, no language models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flashrope.demo import files
from flashrope.demo.figure import COLOURS, new_figure, save
from flashrope.demo.workers import Workers

from .measuring import COLUMNS
from .runs import Run, read_csv, write_csv
from .statistics import interval, schemes, values_at
from .tables import judged

TRAINED, LIMIT, DIGITS = 1000, 2000, 4
CONVERSIONS = ("trained", "extrapolation", "interpolation", "base-16", "base-13")
GAPS = (1, 2, 5, 10, 100)  # differences between the two numbers
STEPS, BATCH, WIDTH, SAMPLES, SEEDS = 2000, 512, 64, 4000, 5
EXAMPLE = 1749  # the paper's
COMPARES = tuple(
    comparison
    for first, second in (
        ("base-16", "extrapolation"),
        ("base-16", "interpolation"),
        ("base-13", "base-16"),
        ("trained", "base-16"),
    )
    for comparison in schemes(first, second, "digits", *GAPS)
)


def digits(numbers: torch.Tensor, conversion: str) -> torch.Tensor:
    """float32 (.., DIGITS): the digits of numbers (..), the highest first, under one of CONVERSIONS."""
    base = int(conversion.removeprefix("base-")) if conversion.startswith("base-") else 10
    values = numbers.double() * (TRAINED / LIMIT if conversion == "interpolation" else 1)
    powers = base ** torch.arange(DIGITS - 1, -1, -1, dtype=torch.float64)
    found = torch.floor(values[..., None] / powers) % base
    found[..., -1] = values % base  # the last digit keeps its fraction
    return found.float()


def pairs(count: int, limit: int, gap: int | None, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers int64 (count, 2) below ``limit`` that differ by ``gap`` (None: by anything but 0), and whether the first
    is larger, bool (count,). For limits above TRAINED the larger number is at least TRAINED."""
    larger_at = torch.randint(2, (count,), generator=generator)
    low = TRAINED if limit > TRAINED else 1
    if gap is None:
        large = torch.randint(max(low, 1), limit, (count,), generator=generator)
        gaps = 1 + (torch.rand(count, generator=generator) * large).long()
    else:
        large = torch.randint(max(low, gap), limit, (count,), generator=generator)
        gaps = torch.full((count,), gap)
    small = (large - gaps).clamp(min=0)
    both = torch.stack((large, small), -1)
    return torch.where((larger_at == 0)[:, None], both, both.flip(-1)), larger_at == 0


def train_network(seed: int) -> nn.Module:
    """A network from digits (.., 2 * DIGITS) to a logit (.., 1) that the first number is larger."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(2 * DIGITS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        numbers, larger = _both(BATCH, generator)
        loss = F.binary_cross_entropy_with_logits(logit(network, numbers, "trained"), larger.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return network


def logit(network: nn.Module, numbers: torch.Tensor, conversion: str) -> torch.Tensor:
    """numbers int64 (count, 2) to logits (count,)."""
    return network(digits(numbers, conversion).flatten(1) / 10)[:, 0]


def _both(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of the training pairs differ by anything, half by one of GAPS."""
    parts = [pairs(count // 2, TRAINED, None, generator)]
    parts += [pairs(count // (2 * len(GAPS)), TRAINED, gap, generator) for gap in GAPS]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


@torch.no_grad()
def accuracy(network: nn.Module, conversion: str, gap: int, seed: int) -> float:
    """Percent of pairs put in the right order. For "trained" the numbers are below TRAINED; for the others the larger
    one is at least TRAINED."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + gap)
    numbers, larger = pairs(SAMPLES, TRAINED if conversion == "trained" else LIMIT, gap, generator)
    return 100 * ((logit(network, numbers, conversion) > 0) == larger).double().mean().item()


def draw_digits(run: Run, workers: Workers, folder: Path) -> None:
    """Train SEEDS networks, measure every conversion, write results.csv, table.md and digits.png."""
    rows = []
    for seed in range(run.first_seed, run.first_seed + SEEDS):
        network = train_network(seed)
        rows += [
            [name, "digits", TRAINED, seed, "digits", gap, accuracy(network, name, gap, seed), SAMPLES]
            for name in CONVERSIONS
            for gap in GAPS
        ]
    write_csv(folder / "results.csv", COLUMNS, rows)
    found = read_csv(folder / "results.csv")
    example = {name: digits(torch.tensor(EXAMPLE), name).tolist() for name in CONVERSIONS[1:]}
    written = "\n".join(f"| {name} | {' '.join(f'{d:g}' for d in values)} |" for name, values in example.items())
    table = f"{EXAMPLE} in digits:\n\n| conversion | digits |\n|---|---|\n{written}\n"
    files.write(folder / "table.md", judged(COMPARES, found, 1) + "\n" + table)
    _draw(folder / "digits.png", found, example)


def _draw(path: Path, rows: Sequence[dict[str, str]], example: dict[str, list[float]]) -> None:
    figure = new_figure((8.3, 4.4))
    axes = figure.subplots()
    for at, name in enumerate(CONVERSIONS):
        found = [interval(list(values_at(rows, name, "digits", gap).values())) for gap in GAPS]
        words = " ".join(f"{digit:g}" for digit in example[name]) if name in example else "numbers below 1000"
        axes.errorbar(
            [place + 0.06 * (at - 2) for place in range(len(GAPS))],
            [each.mean for each in found],
            [each.half or 0.0 for each in found],
            color=COLOURS[at],
            marker="osD^v"[at],
            markersize=6,
            linewidth=1.8,
            capsize=3,
            label=f"{name.replace('-', ' ')} ({words})",
        )
    axes.axhline(50, color="0.6", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(GAPS)), [str(gap) for gap in GAPS])
    axes.set_xlabel("difference between the two numbers", fontsize=12)
    axes.set_ylabel("put in the right order (%)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title=f"{EXAMPLE} in digits", fontsize=10, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path)
