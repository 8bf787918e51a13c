"""Shows how a model that reads the digits of numbers behaves when the numbers grow beyond the training range. Su 2023
(kexue.fm/archives/9675) explains extensions of RoPE in this way: RoPE writes a position in a base beta.

A small network reads the decimal digits of two numbers and says which number is larger. It is trained on numbers below
1000, so the digit for thousands is always 0. It is then measured on numbers below 2000 that are written in these ways:

    trained             in decimal and below 1000, as in training
    extrapolation       in decimal, where the digit for thousands is 1 for the first time (RoPE as it is)
    interpolation       half the number in decimal, where the last digit can be a half (PI)
    base 16, base 13    in a larger base with only three digits, which may be larger than 9 (NTK). 13 is the smallest
                        base that suffices.

The experiment trains its own networks in seconds. It needs no language models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from flashrope.console import files
from flashrope.console.figure import COLOURS
from flashrope.lab.small_models.workers import Workers
from torch import nn

from .figures import NORMAL, SMALL, canvas, finish
from .measuring import COLUMNS
from .runs import Run, read_csv, write_csv
from .statistics import HIGHER, LOWER, difference, interval, values_at, verdict
from .templating import render

TASK = "digits"
TRAINED, LIMIT, DIGITS = 1000, 2000, 4
CONVERSIONS = ("trained", "extrapolation", "interpolation", "base-16", "base-13")
GAPS = (1, 2, 5, 10, 100)  # differences between the two numbers
STEPS, BATCH, WIDTH, SAMPLES, SEEDS = 2000, 512, 64, 4000, 5
EXAMPLE = 1749  # the example of the blog post
COMPARED = (  # the differences that the blog post leads one to expect
    ("extrapolation", "trained", LOWER),
    ("base-13", "extrapolation", HIGHER),
    ("base-16", "extrapolation", HIGHER),
    ("interpolation", "extrapolation", HIGHER),
    ("base-13", "base-16", HIGHER),
    ("interpolation", "base-13", 0),
)


def digits(numbers: torch.Tensor, conversion: str) -> torch.Tensor:
    """Returns the digits of numbers (..) as float32 (.., DIGITS), the highest first. conversion: a way to write them,
    one of CONVERSIONS."""
    base = int(conversion.removeprefix("base-")) if conversion.startswith("base-") else 10
    values = numbers.double() * (TRAINED / LIMIT if conversion == "interpolation" else 1)
    powers = base ** torch.arange(DIGITS - 1, -1, -1, dtype=torch.float64)
    found = torch.floor(values[..., None] / powers) % base
    found[..., -1] = values % base  # the last digit keeps its fraction
    return found.float()


def pairs(count: int, limit: int, gap: int | None, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pairs of numbers below ``limit``, int64 (count, 2), and whether the first number is larger, bool
    (count,).

    gap: the difference of the two numbers. None: the logarithm of the difference is uniformly distributed. For limits
    above TRAINED the larger number is at least TRAINED.
    """
    larger_at = torch.randint(2, (count,), generator=generator)
    if gap is None:
        gaps = torch.floor((limit - 1) ** torch.rand(count, generator=generator, dtype=torch.float64)).long()
    else:
        gaps = torch.full((count,), gap)
    low = gaps.clamp(min=TRAINED) if limit > TRAINED else gaps
    large = low + (torch.rand(count, generator=generator, dtype=torch.float64) * (limit - low)).long()
    both = torch.stack((large, large - gaps), -1)
    return torch.where((larger_at == 0)[:, None], both, both.flip(-1)), larger_at == 0


def train_network(seed: int) -> nn.Module:
    """Trains a network that maps the digits of two numbers (.., 2 * DIGITS) to a logit (.., 1): positive if the first
    number is larger."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(2 * DIGITS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        numbers, larger = pairs(BATCH, TRAINED, None, generator)
        loss = F.binary_cross_entropy_with_logits(logit(network, numbers, "trained"), larger.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return network


def logit(network: nn.Module, numbers: torch.Tensor, conversion: str) -> torch.Tensor:
    """Returns the logits (count,) of numbers, int64 (count, 2)."""
    return network(digits(numbers, conversion).flatten(1) / 10)[:, 0]


@torch.no_grad()
def accuracy(network: nn.Module, conversion: str, gap: int, seed: int) -> float:
    """Returns the percentage of pairs that the network puts in the right order. Under the conversion "trained" both
    numbers are below TRAINED. Under all others the larger number is at least TRAINED."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + gap)
    numbers, larger = pairs(SAMPLES, TRAINED if conversion == "trained" else LIMIT, gap, generator)
    return 100 * ((logit(network, numbers, conversion) > 0) == larger).double().mean().item()


def draw_digits(run: Run, workers: Workers, folder: Path) -> None:
    """Trains SEEDS networks, measures every conversion, and writes results.csv, table.md and digits.png."""
    rows = []
    for seed in range(run.first_seed, run.first_seed + SEEDS):
        network = train_network(seed)
        rows += [
            [name, TASK, TRAINED, seed, TASK, gap, accuracy(network, name, gap, seed), SAMPLES]
            for name in CONVERSIONS
            for gap in GAPS
        ]
    write_csv(folder / "results.csv", COLUMNS, rows)
    found = read_csv(folder / "results.csv")
    example = {name: digits(torch.tensor(EXAMPLE), name).tolist() for name in CONVERSIONS[1:]}
    files.write(folder / "table.md", table(found, example))
    _draw(folder / "digits.png", found, example)


def table(rows: Sequence[dict[str, str]], example: dict[str, list[float]]) -> str:
    """Returns the text of table.md: percentages by conversion and gap, and the comparisons that are judged."""
    levels, differences = [], []
    for name in CONVERSIONS:
        written = " ".join(f"{digit:g}" for digit in example[name]) if name in example else ""
        cells = [interval(list(values_at(rows, name, TASK, gap).values())).level for gap in GAPS]
        levels.append((name, written, *cells))
    for first, second, expected in COMPARED:
        cells = []
        for gap in GAPS:
            found = difference(rows, (first, TASK), (second, TASK), gap)
            cells.append(f"{found} {verdict(found, expected)}")
        differences.append((first, second, *cells))
    return render("digits.md", seeds=SEEDS, example=EXAMPLE, gaps=GAPS, levels=levels, differences=differences)


def _draw(path: Path, rows: Sequence[dict[str, str]], example: dict[str, list[float]]) -> None:
    figure, (axes,) = canvas(5.2)
    for at, name in enumerate(CONVERSIONS):
        found = [interval(list(values_at(rows, name, TASK, gap).values())) for gap in GAPS]
        words = " ".join(f"{digit:g}" for digit in example[name]) if name in example else f"numbers below {TRAINED}"
        axes.errorbar(
            [place + 0.06 * (at - 2) for place in range(len(GAPS))],
            [each.mean for each in found],
            [each.half or 0.0 for each in found],
            color=COLOURS[at],
            marker="osD^v"[at],
            markersize=6,
            linewidth=1.8,
            capsize=3,
            label=f"{name.replace('-', ' ')}: {words}",
        )
    axes.axhline(50, color="0.6", linewidth=1, linestyle=":")
    axes.set_ylim(top=min(axes.get_ylim()[1], 104))
    axes.set_xticks(range(len(GAPS)), [str(gap) for gap in GAPS])
    axes.set_xlabel("difference between the two numbers", fontsize=NORMAL)
    axes.set_ylabel("put in the right order (%)", fontsize=NORMAL)
    title = f"How {EXAMPLE} is written"
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL, title=title, title_fontsize=SMALL)
    finish(figure, path)
