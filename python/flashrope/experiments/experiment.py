"""``flashrope experiment NAME``: the sources' experiments on byte-level models, each with CSV, JSON and PNG in a run
directory.

A run directory holds one configuration (a preset on a text); its experiments share their models. What is there already
is not done again, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..backends import BACKENDS, resolve_impl
from ..cli import INTERRUPTED
from . import data, files, options, report, tables
from .drawn import draw_frequencies, draw_patterns, draw_pictures, draw_positions
from .figures import Series, bars, lines
from .options import MOST_THREADS, BadInput, need, positive
from .published import TABLES
from .runs import COLUMNS, LONGEST, PRESETS, Cell, Preset, Run, measure_cells, read_csv, train_models, write_csv
from .workers import Workers
from .zoo import scheme

Measures = tuple[tuple[str, tuple[float, ...] | None], ...]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Either schemes and what is measured on them, or a function that does all by itself.

    Schemes may hold {w256} and {L2} as in ``published``.
    """

    summary: str
    schemes: tuple[str, ...] = ()
    measures: Measures = ()
    own: Callable[[Run, Workers, Path], None] | None = None


def _published(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(template for table in TABLES[name] for _, template, _ in table.rows))


EXPERIMENTS = {
    "perplexity": Experiment(
        "perplexity by context length (HoPE, figure 4)",
        (
            "alibi",
            "kerple",
            "fire",
            "rope",
            "pi-s8",
            "yarn-s8",
            "hope",
            "hope+pi-s8",
            "hope+yarn-s8",
            "rerope{w256}",
            "rerope{w256}+dagger",
            "nope",
        ),
        (("perplexity", None),),
    ),
    "zoo": Experiment(
        "perplexity by context length of every encoding",
        (
            "rope",
            "hope",
            "hope-ab1",
            "hope-ab2",
            "hope-ab3",
            "inv-leaky",
            "rerope",
            "leaky-rerope",
            "hfwa",
            "alibi",
            "kerple",
            "fire",
            "learned",
            "sinusoidal",
            "integer",
            "binary",
            "nope",
        ),
        (("perplexity", None),),
    ),
    "copying": Experiment("in-context copying (HoPE, table 2)", _published("copying"), (("copying", None),)),
    "few-shot": Experiment("few-shot following (HoPE, table 3)", _published("few-shot"), (("few-shot", None),)),
    "ablation": Experiment("HoPE's ablations (HoPE, table 4)", _published("ablation"), (("copying", None),)),
    "lengths": Experiment(
        "HoPE by training length (HoPE's first version, tables 5 and 6)",
        _published("lengths"),
        (("perplexity", (1, 2, 4, 8, 16, 32)), ("few-shot", (1, 2, 3, 4, 6, 8))),
    ),
    "rerope-schemes": Experiment(
        "accuracy of the schemes at 8 times the training length (ReRoPE, first table)",
        _published("rerope-schemes"),
        (("accuracy", None),),
    ),
    "rerope-windows": Experiment(
        "ReRoPE's windows (ReRoPE, second table)", _published("rerope-windows"), (("accuracy", None),)
    ),
    "rerope-leaky": Experiment(
        "Leaky ReRoPE's factors (ReRoPE, third table)", _published("rerope-leaky"), (("accuracy", None),)
    ),
    "passkey": Experiment(
        "passkey retrieval by length",
        (
            "rope",
            "pi-s8",
            "yarn-s8",
            "rerope{w256}",
            "rerope{w256}+dagger",
            "rerope{w256}+logn",
            "hope",
            "hope+yarn-s8",
            "nope",
            "alibi",
        ),
        (("passkey", None),),
    ),
    "patterns": Experiment(
        "attention patterns, contributions and variance accounted for (HoPE, figures 1, 2, 5, 6, 7)", own=draw_patterns
    ),
    "positions": Experiment("the distances that the schemes see; trains nothing", own=draw_positions),
    "frequencies": Experiment("the frequency tables of all schemes; trains nothing", own=draw_frequencies),
    "picture": Experiment("n-dimensional RoPE on small pictures", own=draw_pictures),
}
AXES = {
    "perplexity": ("context length (bytes, log scale)", "perplexity per byte"),
    "copying": ("sequences, at the source's training length", "suffixes right (%)"),
    "copying-tokens": ("sequences, at the source's training length", "letters of the suffixes right (%)"),
    "few-shot": ("prompt length (bytes, log scale)", "answers that are a label (%)"),
    "passkey": ("prompt length (bytes, log scale)", "keys right (%)"),
    "passkey-digits": ("prompt length (bytes, log scale)", "digits of the keys right (%)"),
}
FINER = {
    "copying": "copying-tokens",
    "passkey": "passkey-digits",
}  # what a task's measure says of answers right in part
DERIVED = {"tables": "makes the tables and pictures of a run directory anew from its CSVs"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = {**{name: e.summary for name, e in EXPERIMENTS.items()}, "all": "all of these", **DERIVED}
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "experiments:\n" + "\n".join(f"  {name:15} {text}" for name, text in known.items())
    parser.add_argument("name", metavar="NAME", help="one of the experiments below")
    path = parser.add_argument_group("text and results")
    path.add_argument(
        "--text", metavar="PATH", help="a file or folder to train on instead of Python's standard library"
    )
    path.add_argument("--out", metavar="DIR", help="the run directory (default: runs/experiments-PRESET)")
    run_ = parser.add_argument_group("run")
    run_.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes of the run (default: tiny)")
    run_.add_argument("--schemes", metavar="A,B,...", help="other schemes than the experiment's, by name")
    run_.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    run_.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    run_.add_argument("--threads", type=positive, help="CPU threads in all; by default those there are, at most 8")
    run_.add_argument(
        "--impl", choices=BACKENDS, help="the attention implementation; by default the one for the device"
    )
    sizes = parser.add_argument_group("sizes (by default the preset's)")
    for field in dataclasses.fields(Preset):
        kind, metavar = (positive, "N") if field.type == "int" else (float, "X")
        sizes.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=", ".join(f"{name} {getattr(preset, field.name):g}" for name, preset in PRESETS.items()),
        )


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    try:
        _experiment(args, start)
    except (BadInput, data.TextError) as error:
        print(f"flashrope experiment: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\nflashrope experiment: interrupted after {time.perf_counter() - start:.0f} s; the same command goes on from "
            "here",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def _experiment(args: argparse.Namespace, start: float) -> None:
    known = [*EXPERIMENTS, "all", *DERIVED]
    if args.name not in known:
        raise BadInput(f"unknown experiment {args.name!r}; known are {', '.join(known)}")
    need("matplotlib", "safetensors", "tqdm")
    out = Path(args.out or f"runs/experiments-{args.preset}")
    if args.name in DERIVED:
        return _derive(out)
    run = resolve(args, out)
    names = list(EXPERIMENTS) if args.name == "all" else [args.name]
    chosen = [name.strip() for name in args.schemes.split(",")] if args.schemes else []
    cells = {name: cells_of(EXPERIMENTS[name], run, chosen) for name in names}
    run.open()
    print(
        report.lines(
            {
                "command": args.command_line,
                "text": f"{run.corpus.name}; {len(run.corpus.train):,} bytes to train on, "
                f"{sum(map(len, run.corpus.unseen)):,} unseen",
                "preset": f"{run.preset_name}: {run.preset}",
                "results": str(out),
            }
        ),
        flush=True,
    )
    with run.workers() as workers:
        for name in names:
            began = time.perf_counter()
            folder = out / name
            folder.mkdir(exist_ok=True)
            if EXPERIMENTS[name].own:
                EXPERIMENTS[name].own(run, workers, folder)
            else:
                _measure(run, workers, name, folder, cells[name])
            record = {
                "experiment": name,
                "command": args.command_line,
                **run.provenance(),
                "seconds": round(time.perf_counter() - began, 1),
                "cpu_seconds": round(sum(os.times()[:4]), 1),
            }
            files.write(folder / "results.json", json.dumps(record, indent=1))
            print(f"{name}: written to {folder}, {record['seconds']:.0f} s", flush=True)


def resolve(args: argparse.Namespace, out: Path) -> Run:
    """The run that the options ask for. Raises BadInput, TextError."""
    device = options.device(args.device)
    asked = {field.name: getattr(args, field.name) for field in dataclasses.fields(Preset) if hasattr(args, field.name)}
    preset = dataclasses.replace(PRESETS[args.preset], **asked)
    if preset.train_length < 64 or preset.train_length % 8:
        raise BadInput(f"--train-length: expected a multiple of 8 of at least 64, got {preset.train_length}")
    for name, value, most in (("learning-rate", preset.learning_rate, None), ("warmup", preset.warmup, 1)):
        if not value > 0 or most and value > most:
            raise BadInput(f"--{name}: expected a positive number{f' of at most {most}' if most else ''}, got {value}")
    if not 0 <= preset.practice < 1:
        raise BadInput(f"--practice: expected a share from 0 to below 1, got {preset.practice}")
    try:
        config = preset.config
        resolve_impl(args.impl, torch.empty(1, 1, 1, config.head_dim, device=device))
    except ValueError as error:
        raise BadInput(str(error)) from None
    window = LONGEST * preset.train_length + 1
    corpus = data.from_path(args.text, window) if args.text else data.standard_library(window)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = args.threads or min(cores, MOST_THREADS)
    processes = min(threads, 4) if device.type == "cpu" and threads > 1 else 0
    return Run(
        out, preset, args.preset, corpus, device, args.impl, processes, max(threads // max(processes, 1), 1), args.seed
    )


def cells_of(experiment: Experiment, run: Run, chosen: Sequence[str] = ()) -> list[Cell]:
    """What the experiment measures. Raises BadInput for schemes that are unknown or make no sense."""
    if chosen and not experiment.schemes:
        raise BadInput("--schemes: this experiment chooses its own")
    named = [tables.resolve(template, run.unit) for template in chosen or experiment.schemes]
    for name, length in named:
        scheme(name, run.preset.config, length, run.defaults)
    return [
        Cell(name, length, seed, experiment.measures) for name, length in dict.fromkeys(named) for seed in run.seeds
    ]


def _measure(run: Run, workers: Workers, name: str, folder: Path, cells: Sequence[Cell]) -> None:
    wanted = [
        (scheme(cell.scheme, run.preset.config, cell.length, run.defaults).trained, cell.length) for cell in cells
    ]
    train_models(run, workers, wanted)
    rows = measure_cells(run, workers, folder, cells)
    write_csv(folder / "results.csv", COLUMNS, rows)
    for text in show(folder, name, run.unit):
        print(f"\n{text}")


def show(folder: Path, name: str, train_length: int) -> list[str]:
    """The pictures and the table of one experiment, from its results.csv; returns the tables' text."""
    rows, title = read_csv(folder / "results.csv"), EXPERIMENTS[name].summary
    title = title[0].upper() + title[1:]
    seeds = len({row["seed"] for row in rows})
    lengths = sorted({int(row["train_length"]) for row in rows})
    note = f"byte-level models trained on {', '.join(map(str, lengths))} bytes, " + (
        "one seed" if seeds == 1 else f"mean and range of {seeds} seeds"
    )
    for task, _ in EXPERIMENTS[name].measures:
        if task == "accuracy":
            labels = list(dict.fromkeys(row["scheme"] for row in rows))
            panels = {
                "accuracy-repeat": f"{8 * train_length} bytes, repeating",
                "accuracy-non-repeat": f"{8 * train_length} bytes, not repeating",
            }
            groups = {panel: [_series(rows, label, (key,)) for label in labels] for key, panel in panels.items()}
            bars(folder / "accuracy.png", title, f"next-byte accuracy (%); {note}", labels, groups)
        else:
            for drawn in (task, FINER[task]) if task in FINER else (task,):
                _draw_lines(folder / f"{drawn}.png", title, note, drawn, rows, train_length)
    text = tables.write(folder, name, train_length)
    return [text] if text else []


def _draw_lines(path: Path, title: str, note: str, task: str, rows: list[dict[str, str]], train_length: int) -> None:
    keys = tuple(
        {row["task"] for row in rows if row["task"] == task or task == "few-shot" and row["task"].startswith(task)}
    )
    labels = list(dict.fromkeys((row["scheme"], row["train_length"]) for row in rows))
    several = len({length for _, length in labels}) > 1
    drawn = []
    for label, length in labels:
        series = _series([row for row in rows if row["train_length"] == length], label, keys)
        drawn.append(dataclasses.replace(series, name=f"{label}, trained on {length}") if several else series)
    copying = task.startswith("copying")
    lines(
        path,
        title,
        note,
        *AXES[task],
        drawn,
        None if copying or several else train_length,
        percent=task != "perplexity",
        log_x=not copying,
    )


def _series(rows: Sequence[dict[str, str]], name: str, keys: tuple[str, ...]) -> Series:
    """Mean, least and greatest over seeds; several tasks are averaged first."""
    own = [row for row in rows if row["scheme"] == name and row["task"] in keys]
    by_place: dict[float, dict[str, list[float]]] = {}
    for row in own:
        by_place.setdefault(float(row["at"]), {}).setdefault(row["seed"], []).append(float(row["value"]))
    x = sorted(by_place)
    means = [[sum(values) / len(values) for values in by_place[at].values()] for at in x]
    return Series(name, x, [sum(m) / len(m) for m in means], [min(m) for m in means], [max(m) for m in means])


def _derive(out: Path) -> None:
    if not (out / "settings.json").exists():
        raise BadInput(f"--out: {out} is not a run directory, it has no settings.json")
    train_length = json.loads((out / "settings.json").read_text(encoding="utf-8"))["train_length"]
    done = [name for name, e in EXPERIMENTS.items() if e.measures and (out / name / "results.csv").exists()]
    for name in done:
        for text in show(out / name, name, train_length):
            print(f"\n{text}")
    print(f"made anew: {', '.join(done) or 'nothing'}")
