"""``flashrope passkey``: how often a Hugging Face model finds a hidden number, by length and depth, under its own
scheme and others.

A prompt is filler text with a five-digit number in it, followed by a question for the number. A trial succeeds if
greedy decoding would write the number, that is, if each of its tokens is the most likely one. One forward pass is
enough to tell.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..cli import files, options, report
from ..cli.figure import new_figure, save
from ..cli.hardware import hardware
from ..cli.options import BadInput
from ..cli.progress import Bar
from ..small_models.generate import cache_facts
from .model import (
    Tokens,
    describe,
    last_logits,
    load,
    measured_lengths,
    new_cache,
    run_command,
    training_length,
)
from .schemes import applicable, settings

RESULTS = ("passkey.png", "passkey.svg", "passkey.pdf", "passkey.csv", "passkey.json")
INSTRUCTION = (
    "Somewhere in this text a number is hidden. Find it and keep it in mind; you will be asked for it at the end.\n"
)
FILLER = (
    "The river runs past the mill. A cat sleeps on the wall. Two carts stand in the yard. Rain falls on the roof, and "
    "then it stops. Someone sweeps the stairs.\n"
)
NEEDLE = "The hidden number is{answer}. Keep it in mind:{answer} is the hidden number.\n"
QUESTION = "What is the hidden number? The hidden number is"


class Cell(NamedTuple):
    """One cell of the heat map."""

    scheme: str
    length: int  # tokens
    depth: float  # 0: right after the instruction; 1: right before the question
    accuracy: float  # share of trials that succeed
    log_probability: float  # of the whole answer, mean over trials, in nats


class Task(Tokens):
    """Builds prompts. The parts of a prompt are tokenized separately, so the depth changes only where the number is."""

    def shortest(self) -> int:
        """The number of tokens of a prompt without filler."""
        parts = (INSTRUCTION, NEEDLE.format(answer=" 10000"), QUESTION, " 10000")
        return len(self.start) + sum(len(self.encode(part)) for part in parts)

    def prompt(self, length: int, depth: float, number: int) -> tuple[list[int], int]:
        """(exactly ``length`` tokens that end with the answer, number of tokens of the answer). Raises ValueError if
        ``length`` is too short."""
        answer = self.encode(f" {number}")
        head = [*self.start, *self.encode(INSTRUCTION)]
        needle, question = self.encode(NEEDLE.format(answer=f" {number}")), self.encode(QUESTION)
        room = length - len(head) - len(needle) - len(question) - len(answer)
        if room < 0:
            raise ValueError(f"expected at least {length - room} tokens, for the question alone, got {length}")
        filler = self.encode(FILLER)
        before = round(depth * room)
        piece = (filler * (room // len(filler) + 1))[:room]
        return [*head, *piece[:before], *needle, *piece[before:], *question, *answer], len(answer)


def run(args: argparse.Namespace) -> int:
    return run_command("passkey", _measure, args)


def _measure(args: argparse.Namespace) -> int:
    files.check_folder(args.out, RESULTS, args.overwrite)
    device = options.device(args.device)
    model, tokens = load(args.model, device)
    task = Task(tokens.encode, tokens.start)
    train_length = training_length(model, args.model, args.train_length)
    needed = task.shortest()
    lengths = measured_lengths(args.lengths, train_length)
    if args.lengths is None:
        lengths = sorted({max(length, needed) for length in lengths})
    depths = [at / max(args.depths - 1, 1) for at in range(args.depths)]
    if lengths[0] < needed:
        raise BadInput(f"--lengths: expected at least {needed} tokens, for the question alone, got {lengths[0]}")
    windows = [args.window] if args.window else []
    new_cache(model, args.cache_dtype)
    schemes, skipped = applicable(
        model, args.schemes, train_length, max(lengths), windows, args.rotary, bool(args.cache_dtype)
    )
    out = files.folder(args.out)
    facts = {
        "model": describe(model, args.model, train_length),
        **settings(schemes, skipped),
        "prompts": f"{args.trials} numbers at each of {len(depths)} depths and {len(lengths)} lengths, "
        f"seed {args.seed}",
        **cache_facts(args.cache_dtype),
        "machine": f"{hardware(device)}, torch {torch.__version__}",
        "command": args.command_line,
    }
    print(report.lines(facts, *(name for name in facts if name != "command")) + "\n", flush=True)

    cells: list[Cell] = []
    bar = Bar(len(schemes) * len(depths) * args.trials * sum(lengths))
    for scheme in schemes:
        scheme.apply()
        bar.start(scheme.label)
        sizes = lengths, depths, args.trials, args.batch, args.seed, args.cache_dtype
        for cell in measure(model, task, scheme.label, *sizes):
            cells.append(cell)
            bar.step(args.trials * cell.length)
    bar.clear()
    files.write(out / "passkey.csv", csv_text(cells))
    record = {"facts": facts, "train_length": train_length, "cells": [cell._asdict() for cell in cells]}
    files.write(out / "passkey.json", json.dumps(record, indent=1))
    figure = passkey_figure(cells, train_length, Path(args.model).name)
    for name in RESULTS[:3]:
        save(figure, out / name)
    print(f"\n{table(cells)}\n\nwritten to {out}/: {', '.join(RESULTS)}")
    return 0


@torch.no_grad()
def measure(
    model,
    task: Task,
    scheme: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    batch: int = 1,
    seed: int = 0,
    cache_dtype: str | None = None,
) -> Iterator[Cell]:
    """Yields one cell after the other. The hidden numbers are the same for every scheme."""
    device = next(model.parameters()).device
    for length in lengths:
        for depth in depths:
            draw = random.Random(f"{seed} {length} {depth}")
            prompts = [task.prompt(length, depth, draw.randrange(10_000, 100_000)) for _ in range(trials)]
            right, log_probability = 0, 0.0
            for first in range(0, trials, batch):
                some = prompts[first : first + batch]
                kept = max(answer for _, answer in some)
                ids = torch.tensor([ids for ids, _ in some], device=device)
                logits = last_logits(model, ids, kept + 1, cache_dtype=cache_dtype)[:, :-1]
                for row, (tokens, answer) in enumerate(some):
                    expected = torch.tensor(tokens[-answer:], device=device)
                    right += bool((logits[row, -answer:].argmax(-1) == expected).all())
                    log_probability += float(logits[row, -answer:].log_softmax(-1).gather(-1, expected[:, None]).sum())
            yield Cell(scheme, length, depth, right / trials, log_probability / trials)


# ---- output
def table(cells: Sequence[Cell]) -> str:
    """Text columns: accuracy by scheme and length, over all depths."""
    lengths = sorted({cell.length for cell in cells})
    rows = [["length, tokens", *(f"{length:,}" for length in lengths)]]
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        found = [
            [cell.accuracy for cell in cells if (cell.scheme, cell.length) == (scheme, length)] for length in lengths
        ]
        rows.append([scheme, *(f"{100 * sum(some) / len(some):.0f}%" for some in found)])
    return report.aligned("numbers found, all depths", rows, 10)


def csv_text(cells: Sequence[Cell]) -> str:
    return files.csv_text(
        Cell._fields,
        [
            [cell.scheme, cell.length, f"{cell.depth:.4f}", f"{cell.accuracy:.4f}", f"{cell.log_probability:.6f}"]
            for cell in cells
        ],
    )


def passkey_figure(cells: Sequence[Cell], train_length: int, model: str):
    """One heat map per scheme, depth by length, with the training length marked."""
    schemes = list(dict.fromkeys(cell.scheme for cell in cells))
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    across = min(len(schemes), 2)
    down = -(-len(schemes) // across)
    size = 1.2 + across * max(2.6, 0.75 * len(lengths)), 1.1 + down * max(2.2, 0.5 * len(depths))
    figure = new_figure(size)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for place in grid.flat[len(schemes) :]:
        place.set_visible(False)
    for axes, scheme in zip(grid.flat, schemes, strict=False):
        values = {(cell.depth, cell.length): cell.accuracy for cell in cells if cell.scheme == scheme}
        image = axes.imshow(
            [[values[depth, length] for length in lengths] for depth in depths],
            vmin=0,
            vmax=1,
            cmap="cividis",
            aspect="auto",
        )
        for (depth, length), value in values.items():
            axes.text(
                lengths.index(length),
                depths.index(depth),
                f"{100 * value:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color="black" if value > 0.6 else "white",
            )
        beyond = sum(length <= train_length for length in lengths)
        if 0 < beyond < len(lengths):
            axes.axvline(beyond - 0.5, color="black", linewidth=1.2, linestyle=":")
        axes.set_title(scheme, fontsize=10, loc="left")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    figure.colorbar(image, ax=grid, label="numbers found", format=lambda value, _: f"{100 * value:.0f}%")
    marked = "; dotted: the training length" if min(lengths) <= train_length < max(lengths) else ""
    figure.supxlabel(f"length (tokens){marked}", fontsize=9)
    figure.supylabel("depth of the number", fontsize=9)
    figure.suptitle(f"Finding a hidden number: {model}", fontsize=11, x=0.01, ha="left")
    return figure
