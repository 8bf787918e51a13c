"""``python -m experiments NAME``: train byte-level models, measure them, and write CSV, JSON and PNG to a run
directory.

All experiments of a run directory share one configuration (a preset on a text) and its trained models. What is already
there is not computed again, so an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashrope.backends import BACKENDS, resolve_impl
from flashrope.cli import INTERRUPTED, guarded, reject_unknown
from flashrope.demo import data, files, options, report
from flashrope.demo.options import MAX_THREADS, BadInput, cores, need, positive
from flashrope.demo.workers import Workers

from . import export, tables
from .registry import EXPERIMENTS, Experiment
from .measuring import COLUMNS, Cell, measure_cells
from .presets import PRESETS, Preset
from .runs import LONGEST, Run, write_csv
from .training import train_models
from .show import show
from .zoo import ARCHITECTURES, scheme

PROGRAM = "python -m experiments"
TOOLS = {"export": export}  # commands with arguments of their own
DERIVED = {
    "tables": "write the tables and figures of a run directory again, from its CSV files",
}


def main(argv: list[str] | None = None) -> int:
    """Run experiments; returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    return guarded(PROGRAM, lambda: _run(argv))


def _run(argv: list[str]) -> int:
    if argv and argv[0] in TOOLS:
        return _guarded(lambda start: TOOLS[argv[0]].run(argv[1:], f"{PROGRAM} {argv[0]}"))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="The experiments of the HoPE and ReRoPE papers, on small byte-level models.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        reject_unknown(parser, unknown)
    args.command_line = shlex.join([*PROGRAM.split(), *argv])
    return _guarded(lambda start: _experiment(args, start))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = {**{name: e.summary for name, e in EXPERIMENTS.items()}, "all": "all that the preset can run", **DERIVED}
    known |= {name: tool.SUMMARY for name, tool in TOOLS.items()}
    parser.epilog = "experiments:\n" + "\n".join(f"  {name:15} {text}" for name, text in known.items())
    parser.add_argument("name", metavar="NAME", help="one of the experiments below")
    path = parser.add_argument_group("text and results")
    path.add_argument(
        "--text", metavar="PATH", help="a file or folder to train on instead of Python's standard library"
    )
    path.add_argument("--out", metavar="DIR", help="the run directory (default: runs/experiments-PRESET)")
    run_ = parser.add_argument_group("run")
    run_.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes of the run (default: tiny)")
    run_.add_argument("--schemes", metavar="A,B,...", help="schemes to use instead of the experiment's, by name")
    run_.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    run_.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    run_.add_argument(
        "--threads",
        type=positive,
        help=f"CPU threads in total, one per worker process; default: the cores available, at most {MAX_THREADS}",
    )
    run_.add_argument("--impl", choices=BACKENDS, help="attention backend; default: the one for the device")
    sizes = parser.add_argument_group("sizes (default: those of the preset)")
    for field in dataclasses.fields(Preset):
        if field.name in ("data", "vocab_size"):
            continue
        if field.name == "architecture":
            sizes.add_argument("--architecture", choices=ARCHITECTURES, default=argparse.SUPPRESS)
            continue
        kind, metavar = (positive, "N") if field.type == "int" else (float, "X")
        sizes.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=", ".join(f"{name} {getattr(preset, field.name):g}" for name, preset in PRESETS.items()),
        )


def _guarded(work: Callable[[float], None]) -> int:
    start = time.perf_counter()
    try:
        work(start)
    except (BadInput, data.TextError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\n{PROGRAM}: interrupted after {time.perf_counter() - start:.0f} s; the same command resumes it",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def _experiment(args: argparse.Namespace, start: float) -> None:
    known = [*EXPERIMENTS, "all", *DERIVED, *TOOLS]
    if args.name not in known:
        raise BadInput(f"unknown experiment {args.name!r}; known are {', '.join(known)}")
    need("matplotlib", "safetensors", "tqdm")
    out = Path(args.out or f"runs/experiments-{args.preset}")
    if args.name in DERIVED:
        return _derive(out)
    of_preset = [name for name, e in EXPERIMENTS.items() if e.data == PRESETS[args.preset].data]
    names = of_preset if args.name == "all" else [args.name]
    if args.name not in (*of_preset, "all"):
        needed = [name for name, preset in PRESETS.items() if preset.data == EXPERIMENTS[args.name].data]
        raise BadInput(f"--preset: {args.name} needs one of {', '.join(needed)}, got {args.preset}")
    run = resolve(args, out)
    chosen = [name.strip() for name in args.schemes.split(",")] if args.schemes else []
    cells = {name: cells_of(EXPERIMENTS[name], run, chosen) for name in names}
    run.open()
    print(
        report.lines(
            {
                "command": args.command_line,
                "text": f"{run.corpus.name}; {len(run.corpus.train):,} bytes to train on, "
                f"{sum(map(len, run.corpus.unseen)):,} unseen"
                if run.corpus
                else "none: the models are trained on the task alone",
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
            if EXPERIMENTS[name].function:
                EXPERIMENTS[name].function(run, workers, folder)
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
    """The run for these options. Raises BadInput and TextError."""
    device = options.device(args.device)
    asked = {field.name: getattr(args, field.name) for field in dataclasses.fields(Preset) if hasattr(args, field.name)}
    preset = dataclasses.replace(PRESETS[args.preset], **asked)
    if preset.train_length < 64 or preset.train_length % 8:
        raise BadInput(f"--train-length: expected a multiple of 8 of at least 64, got {preset.train_length}")
    for name, value, maximum in (("learning-rate", preset.learning_rate, None), ("warmup", preset.warmup, 1)):
        if not value > 0 or maximum and value > maximum:
            limit = f" of at most {maximum}" if maximum else ""
            raise BadInput(f"--{name}: expected a positive number{limit}, got {value}")
    try:
        config = preset.config
        resolve_impl(args.impl, torch.empty(1, 1, 1, config.head_dim, device=device))
    except ValueError as error:
        raise BadInput(str(error)) from None
    window = LONGEST * preset.train_length + 1
    corpus = None
    if preset.reads_text:
        corpus = data.from_path(args.text, window) if args.text else data.standard_library(window)
    elif args.text:
        raise BadInput(f"--text: expected none with the preset {args.preset}, whose models read no text")
    threads = args.threads or min(cores(), MAX_THREADS)
    processes, threads = (threads, 1) if device.type == "cpu" and threads > 1 else (0, threads)
    return Run(out, preset, args.preset, corpus, device, args.impl, processes, threads, args.seed)


def cells_of(experiment: Experiment, run: Run, chosen: Sequence[str] = ()) -> list[Cell]:
    """What the experiment measures. Raises BadInput for schemes that are unknown or invalid."""
    if chosen and not experiment.schemes:
        raise BadInput("--schemes: cannot be changed for this experiment")
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


def _derive(out: Path) -> None:
    if not (out / "settings.json").exists():
        raise BadInput(f"--out: {out} is not a run directory: it has no settings.json")
    train_length = json.loads((out / "settings.json").read_text(encoding="utf-8"))["train_length"]
    done = [name for name, e in EXPERIMENTS.items() if e.measures and (out / name / "results.csv").exists()]
    for name in done:
        for text in show(out / name, name, train_length):
            print(f"\n{text}")
    print(f"written again: {', '.join(done) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
