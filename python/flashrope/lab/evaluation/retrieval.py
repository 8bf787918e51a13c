"""``flashrope passkey``: measures how often a Hugging Face model finds a number that is hidden in a text, by length and
depth, under its own scheme and other schemes.

A number counts as found if greedy decoding would write it, that is, if each of its tokens is the most likely token. A
number counts as chosen if it is the most likely of ten numbers. Both measurements take one pass over the prompt and a
few tokens for every candidate.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import random
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...console import files, options, report
from ...console.figure import new_figure, save
from ...console.options import BadInput
from ...console.progress import Bar, duration
from ..small_models import data
from .by_position import fingerprint
from .checkpoint import (
    Tokens,
    last_logits,
    load,
    measured_lengths,
    new_cache,
    read_prompt,
    rope_type_by_length,
    run_command,
    training_length,
)
from .cost import seconds_by_length
from .journal import Journal
from .prompts import CANDIDATES, Haystack, Prompt
from .readings import Measured, applicable, settings
from .statistics import wilson
from .streaming import KeptTokens

RESULTS = ("passkey.png", "passkey.svg", "passkey.pdf", "passkey.csv", "passkey.json")
JOURNAL = "passkey.jsonl"


TITLE_WIDTH = 40  # characters in a line above a panel


class Cell(NamedTuple):
    """One scheme at one length and depth.

    depth: where the number is hidden. 0: right after the instruction. 1: right before the question.
    found: number of trials in which greedy decoding writes the number.
    chosen: number of trials in which the number is the most likely of ten. None: not measured.
    log_probability: the log probability of the whole answer in nats, the mean over trials.
    """

    scheme: str
    length: int
    depth: float
    trials: int
    found: int
    chosen: int | None
    log_probability: float


def run(args: argparse.Namespace) -> int:
    return run_command("passkey", _measure, args)


def _measure(args: argparse.Namespace) -> int:
    device = options.device(args.device)
    model, tokens = load(args.model, device, args.dtype)
    own = fingerprint(model)
    task = _task(args, tokens)
    train_length = training_length(model, args.model, args.train_length)
    needed = task.shortest()
    lengths = measured_lengths(args.lengths, train_length)
    if args.lengths is None:
        lengths = sorted({max(length, needed) for length in lengths})
    depths = [at / max(args.depths - 1, 1) for at in range(args.depths)]
    if lengths[0] < needed:
        raise BadInput(
            f"--lengths: expected at least {needed} tokens, the length of a prompt without text, got {lengths[0]}"
        )
    task.check_texts(lengths[-1])
    windows = [args.window] if args.window else []
    new_cache(model, args.cache_dtype)
    schemes, skipped = applicable(
        model, args.schemes, train_length, max(lengths), windows, args.rotary, bool(args.cache_dtype), args.sinks
    )
    out = files.folder(args.out)
    text = f"{', '.join(args.text)}" if args.text else "filler text, repeated"
    facts = settings(
        args,
        model,
        train_length,
        schemes,
        skipped,
        prompts=f"{args.trials} trials at each of {len(depths)} depths and {len(lengths)} lengths, hidden numbers: "
        f"{args.keys}, seed {args.seed}; {text}" + ("; in the model's chat template" if task.chat else ""),
    )
    record = {"facts": facts, "train_length": train_length}
    journal = Journal(
        out / JOURNAL,
        {
            "model": own,
            "text": hashlib.sha256(repr(task.texts).encode()).hexdigest()[:16],
            "chat template": task.chat,
            "number of keys": args.keys,
            "number of trials": args.trials,
            "seed": args.seed,
            "cache type": args.cache_dtype,
        },
        args.overwrite,
    )
    journal.check_schemes(schemes)
    sizes = Sizes(lengths, depths, args.trials, args.batch, args.seed, args.cache_dtype)
    cells = list(_measured(model, task, schemes, sizes, journal))
    files.write(out / "passkey.csv", csv_text(cells))
    files.write(out / "passkey.json", json.dumps(record | {"cells": [cell._asdict() for cell in cells]}, indent=1))
    labels = {scheme.label: f"{scheme.label}, {scheme.words}" if scheme.name != "stock" else "" for scheme in schemes}
    figure = passkey_figure(cells, train_length, Path(args.model).name, labels)
    for name in RESULTS[:3]:
        save(figure, out / name)
    print(f"\n{table(cells)}\n\nwritten to {out}/: {', '.join((*RESULTS, JOURNAL))}")
    return 0


def _task(args: argparse.Namespace, tokens: Tokens) -> Haystack:
    texts = tuple(tokens.encode(text) for text in data.read_texts(args.text).values()) if args.text else ()
    chat = tokens.chat if args.chat is not False else None
    if args.chat and chat is None:
        raise BadInput("--chat: expected a model with a chat template, got one without")
    return Haystack(tokens, texts, args.keys, chat)


class Sizes(NamedTuple):
    lengths: Sequence[int]
    depths: Sequence[float]
    trials: int
    batch: int = 1
    seed: int = 0
    cache_dtype: str | None = None


def _measured(model, task: Haystack, schemes: Sequence[Measured], sizes: Sizes, journal: Journal) -> Iterator[Cell]:
    """Yields all cells, including the cells of an earlier run. At lengths at which a scheme equals the model's own
    scheme, the cells of the own scheme are also yielded for this scheme."""
    done = {(row["scheme"], row["length"], row["depth"]): _cell(row) for row in journal.rows}
    base = next((scheme for scheme in schemes if scheme.name == "stock"), None)

    def same(scheme: Measured, length: int) -> bool:
        return base is not None and scheme is not base and length <= scheme.same_until

    places = [(length, depth) for length in sizes.lengths for depth in sizes.depths]
    left = {
        scheme: [place for place in places if not same(scheme, place[0]) and (scheme.label, *place) not in done]
        for scheme in schemes
    }
    cells = sum(map(len, left.values()))
    if cells:
        draw = random.Random(0)
        seconds = seconds_by_length(
            lambda n: scores(model, [task.prompt(max(n, task.shortest()), 0.5, draw)], sizes.cache_dtype),
            sizes.lengths[-1],
        )
        whole = sizes.trials * sum(seconds(length) for some in left.values() for length, _ in some)
        print(f"cost: about {duration(whole)}, {cells * sizes.trials} prompts\n", flush=True)
    bar = Bar(sum(length for some in left.values() for length, _ in some))
    for scheme, some in left.items():
        if some:
            scheme.apply()
        for length, depth in some:
            bar.start(f"{scheme.label}, {length:,} tokens, depth {100 * depth:.0f}%")
            cell = measure(model, task, scheme.label, length, depth, sizes, scheme.kept)
            journal.add(cell._asdict() | {"words": scheme.words})
            done[scheme.label, length, depth] = cell
            bar.step(length)
    bar.clear()
    for scheme in schemes:
        for length, depth in places:
            label = base.label if base is not None and same(scheme, length) else scheme.label
            yield done[label, length, depth]._replace(scheme=scheme.label)


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))


def measure(
    model, task: Haystack, scheme: str, length: int, depth: float, sizes: Sizes, kept: KeptTokens | None = None
) -> Cell:
    """Measures one cell. The texts and the hidden numbers are the same for every scheme."""
    draw = random.Random(f"{sizes.seed} {length} {depth}")
    prompts = [task.prompt(length, depth, draw) for _ in range(sizes.trials)]
    found, chosen, total = 0, 0, 0.0
    by_length = rope_type_by_length(model) is not None
    for alike in _of_equal_length(prompts, sizes.batch):
        for trial in scores(model, alike, sizes.cache_dtype, 1 if by_length else CANDIDATES, kept):
            found += trial.found
            chosen += max(trial.log_probabilities) == trial.log_probabilities[0]
            total += trial.log_probabilities[0]
    return Cell(scheme, length, depth, sizes.trials, found, None if by_length else chosen, total / sizes.trials)


def _of_equal_length(prompts: Sequence[Prompt], batch: int) -> Iterator[list[Prompt]]:
    some: list[Prompt] = []
    for prompt in prompts:
        if some and (len(some) == batch or len(some[0].ids) != len(prompt.ids)):
            yield some
            some = []
        some.append(prompt)
    yield some


class Trial(NamedTuple):
    """The result of one prompt. found: whether each token of the right answer is the most likely token.
    log_probabilities: the log probability of every candidate, in nats."""

    found: bool
    log_probabilities: list[float]


@torch.no_grad()
def scores(
    model,
    prompts: Sequence[Prompt],
    cache_dtype: str | None = None,
    candidates: int = CANDIDATES,
    kept: KeptTokens | None = None,
) -> list[Trial]:
    """Reads prompts of equal length once, and then reads every candidate after the prompts.

    candidates: the number of candidates. With 1, the prompt and the right answer are read in one pass, without the
    model's own cache. A model whose frequencies depend on the length needs 1, because its cache would hold keys that
    were rotated for a shorter text.
    kept: the tokens that stay in the cache while the prompt is read.
    """
    from ...integrations.transformers.versions import CACHE, cache_of

    device = next(model.parameters()).device
    ids = torch.tensor([prompt.ids for prompt in prompts], device=device)
    found, totals = [True] * len(prompts), [list[float]() for _ in prompts]
    out = cache = None
    if candidates > 1:
        out = read_prompt(model, ids, new_cache(model, cache_dtype), kept)
    for n in range(candidates):
        answers = [prompt.candidates[n] for prompt in prompts]
        width = max(map(len, answers))
        padded = torch.tensor([answer + [0] * (width - len(answer)) for answer in answers], device=device)
        if out is None:
            logits = last_logits(model, torch.cat((ids, padded), 1), width + 1, cache_dtype=cache_dtype)[:, :-1]
        else:
            logits = out.logits[:, -1:].float()
            if width > 1:
                cache = copy.deepcopy(cache_of(out))
                more = model(padded[:, :-1], use_cache=True, **{CACHE: cache}).logits
                logits = torch.cat((logits, more.float()), 1)
        for row, answer in enumerate(answers):
            own = logits[row, : len(answer)]
            expected = torch.tensor(answer, device=device)
            if n == 0:
                found[row] = bool((own.argmax(-1) == expected).all())
            totals[row].append(float(own.log_softmax(-1).gather(-1, expected[:, None]).sum()))
    return [Trial(*pair) for pair in zip(found, totals, strict=True)]


# ---- output
def table(cells: Sequence[Cell]) -> str:
    """Returns text columns: the share of numbers found, by scheme and length, over all depths, with its 95% interval.
    The line below each scheme has the share of numbers that are the most likely of ten."""
    lengths = sorted({cell.length for cell in cells})
    rows = [["length, tokens", *(f"{length:,}" for length in lengths)]]
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        some = [[cell for cell in cells if (cell.scheme, cell.length) == (scheme, length)] for length in lengths]
        rows.append([scheme, *(_share(sum(c.found for c in each), sum(c.trials for c in each)) for each in some)])
        if all(cell.chosen is not None for each in some for cell in each):
            chosen = ((sum(c.chosen or 0 for c in each), sum(c.trials for c in each)) for each in some)
            rows.append([f"  likeliest of {CANDIDATES}", *(_share(*each) for each in chosen)])
    trials = sum(cell.trials for cell in cells if (cell.scheme, cell.length) == (cells[0].scheme, lengths[0]))
    title = f"numbers found, all depths, {trials} trials, with the 95% interval"
    return report.aligned(title, rows, 10)


def _share(successes: int, trials: int) -> str:
    low, high = wilson(successes, trials)
    return f"{100 * successes / trials:.0f}% ({100 * low:.0f}-{100 * high:.0f})"


def csv_text(cells: Sequence[Cell]) -> str:
    columns = [*Cell._fields, "found_low_95", "found_high_95"]
    rows = []
    for cell in cells:
        chosen = "" if cell.chosen is None else cell.chosen
        interval = (f"{end:.4f}" for end in wilson(cell.found, cell.trials))
        start = (cell.scheme, cell.length, f"{cell.depth:.4f}", cell.trials, cell.found, chosen)
        rows.append([*start, f"{cell.log_probability:.6f}", *interval])
    return files.csv_text(columns, rows)


def passkey_figure(cells: Sequence[Cell], train_length: int, model: str, labels: dict[str, str] | None = None):
    """Draws a heat map of depth and length for every scheme, with the training length marked.

    A scheme that was not measured at a length has no color there.
    labels: {scheme name: title}. A title may state the scheme's window and scale.
    """
    schemes = list(dict.fromkeys(cell.scheme for cell in cells))
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    across = min(len(schemes), 2)
    down = -(-len(schemes) // across)
    size = 1.2 + across * max(3.0, 0.75 * len(lengths)), 1.1 + down * max(2.2, 0.5 * len(depths))
    figure = new_figure(size)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for place in grid.flat[len(schemes) :]:
        place.set_visible(False)
    for axes, scheme in zip(grid.flat, schemes, strict=False):
        values = {(cell.depth, cell.length): cell for cell in cells if cell.scheme == scheme}
        shares = [
            [cell.found / cell.trials if (cell := values.get((depth, length))) else math.nan for length in lengths]
            for depth in depths
        ]
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for (depth, length), cell in values.items():
            axes.text(
                lengths.index(length),
                depths.index(depth),
                f"{cell.found}/{cell.trials}",
                ha="center",
                va="center",
                fontsize=7,
                color="black" if cell.found > 0.6 * cell.trials else "white",
            )
        _mark_training_length(axes, lengths, train_length)
        title = textwrap.fill((labels or {}).get(scheme) or scheme, TITLE_WIDTH)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    figure.colorbar(image, ax=grid, label="numbers found", format=lambda value, _: f"{100 * value:.0f}%")
    figure.supxlabel(f"length (tokens); training length {train_length:,}", fontsize=9)
    figure.supylabel("depth of the number", fontsize=9)
    figure.suptitle(f"Finding a hidden number: {model}", fontsize=11, x=0.01, ha="left")
    return figure


def _mark_training_length(axes, lengths: Sequence[int], train_length: int) -> None:
    """Draws a dotted line after the last length that is within the training length. If all lengths are on one side of
    the training length, the line is at an edge."""
    within = sum(length <= train_length for length in lengths)
    axes.axvline(within - 0.5, color="black", linewidth=1.2, linestyle=":", clip_on=False)
