"""Parses the arguments of ``python -m experiments`` and makes the run that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from flashrope.backends.names import BACKENDS
from flashrope.backends.registry import resolve_impl
from flashrope.console import options
from flashrope.console.options import MAX_THREADS, BadInput, cores, need, positive
from flashrope.lab.small_models import data
from flashrope.lab.small_models.train import Ranks

from . import (
    distributed,
    estimate,
    export,
    fetch,
    long_context,
    real_reuse,
    real_speed,
    real_training,
    tables,
    tasks,
    tokenizing,
    tokens,
)
from .measuring import Cell
from .presets import PRESETS, TEXT, Preset
from .registry import EXPERIMENTS, Experiment
from .runs import LONGEST, Run
from .zoo import ARCHITECTURES, Defaults, Scheme, scheme

TOOLS = {  # {command with its own arguments: its module}
    "tokenize": tokenizing,
    "export": export,
    "estimate": estimate,
    "fetch": fetch,
    "long-context": long_context,
    "reuse": real_reuse,
    "speed": real_speed,
    "continue": real_training,
}
DERIVED = {"tables": "write the tables and figures of a run directory again, from its CSV files"}
UNTRAINED = ("positions", "frequencies")  # experiments that neither train nor read anything
SIZES = [field.name for field in dataclasses.fields(Preset) if field.name not in ("data", "vocab_size", "schemes")]
OWN_TRAINING = (*UNTRAINED, "picture", "digits")  # experiments without language models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = {**{name: e.summary for name, e in EXPERIMENTS.items()}, "all": "all that the preset can run", **DERIVED}
    known |= {name: tool.SUMMARY for name, tool in TOOLS.items()}
    parser.epilog = "experiments:\n" + "\n".join(f"  {name:15} {text}" for name, text in known.items())
    parser.add_argument("name", metavar="NAME", help="one of the experiments below")
    path = parser.add_argument_group("text and results")
    text = path.add_mutually_exclusive_group()
    text.add_argument(
        "--text",
        metavar="PATH",
        nargs="+",
        help="files and folders to train on, byte by byte, instead of Python's standard library",
    )
    text.add_argument(
        "--tokens",
        metavar="FILE.bin",
        nargs="+",
        help="one token file, whose last tenth is held out, or two: the first to train on, the second held out",
    )
    path.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="number of tokens in the vocabulary, for token files without FILE.json beside them",
    )
    path.add_argument("--out", metavar="DIR", help="the run directory (default: runs/experiments-PRESET)")
    run_ = parser.add_argument_group("run")
    run_.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes of the run (default: tiny)")
    run_.add_argument("--schemes", metavar="A,B,...", help="names of the schemes to use (default: the experiment's)")
    run_.add_argument(
        "--window",
        type=positive,
        metavar="W",
        help="window, in tokens, of schemes whose name specifies none (default: half the training length)",
    )
    run_.add_argument("--seed", type=int, help="the first seed (default: 0)")
    run_.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda or cuda:N (default: auto). auto and cuda use every GPU, each with its own process",
    )
    run_.add_argument(
        "--threads",
        type=positive,
        help=f"CPU threads, one per worker process (default: the available cores, at most {MAX_THREADS})",
    )
    run_.add_argument("--impl", choices=BACKENDS, help="attention backend; default: the one for the device")
    run_.add_argument("--compile", action="store_true", help="train under torch.compile")
    run_.add_argument("--tensorboard", action="store_true", help="log the training for tensorboard, in DIR/tensorboard")
    sizes = parser.add_argument_group("sizes (default: those of the preset)")
    for field in dataclasses.fields(Preset):
        if field.name not in SIZES:
            continue
        if field.name == "architecture":
            sizes.add_argument("--architecture", choices=ARCHITECTURES, default=argparse.SUPPRESS)
            continue
        kind, metavar = (positive, "N") if field.type == "int" else (float, "X")
        if field.name == "seeds":
            kind, metavar = seeds, "N or A,B,..."
        sizes.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=("a number, or the seeds: " if field.name == "seeds" else "")
            + ", ".join(f"{name} {getattr(preset, field.name):g}" for name, preset in PRESETS.items()),
        )


def seeds(text: str) -> int | tuple[int, ...]:
    """Parses a number of seeds or a comma-separated list of seeds, for use as an argparse type."""
    if "," not in text:
        return positive(text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"expected a number or different seeds A,B,..., got {text}")
    return tuple(map(int, parts))


def experiments_of(args: argparse.Namespace) -> list[str]:
    """Returns the experiments to run. Raises BadInput."""
    known = [*EXPERIMENTS, "all", *DERIVED, *TOOLS]
    if args.name not in known:
        raise BadInput(f"unknown experiment {args.name!r}; known are {', '.join(known)}")
    of_preset = [name for name, e in EXPERIMENTS.items() if e.fits(PRESETS[args.preset])]
    if args.name not in (*of_preset, "all"):
        needed = [name for name, preset in PRESETS.items() if EXPERIMENTS[args.name].fits(preset)]
        raise BadInput(f"--preset: {args.name} needs one of {', '.join(needed)}, got {args.preset}")
    names = of_preset if args.name == "all" else [args.name]
    if not args.tokens:
        return names
    if PRESETS[args.preset].data != TEXT:
        raise BadInput(f"--tokens: the task of the preset {args.preset} is written in bytes, and takes no tokens")
    takes = [name for name in names if name in UNTRAINED or _reads_tokens(EXPERIMENTS[name])]
    if not takes:
        raise BadInput(f"--tokens: {args.name} is written in bytes; perplexity and accuracy take tokens")
    return takes


def _reads_tokens(experiment: Experiment) -> bool:
    return not experiment.function and {task for task, _ in experiment.measures} <= set(tasks.MEASURES)


def resolve(args: argparse.Namespace, out: Path) -> Run:
    """Returns the run that these options describe. Raises BadInput."""
    device, ranks = options.device(args.device), distributed.ranks()
    if ranks.world > 1:
        device = distributed.own_device(device)
    asked = {name: getattr(args, name) for name in SIZES if hasattr(args, name)}
    chosen = asked.get("seeds") if isinstance(asked.get("seeds"), tuple) else ()
    if chosen and args.seed is not None:
        raise BadInput("--seed: --seeds already lists the seeds; give only one of them")
    asked |= {"seeds": len(chosen)} if chosen else {}
    preset = dataclasses.replace(PRESETS[args.preset], **asked)
    _check(preset, args)
    corpus = _corpus(args, preset)
    if args.tokens:
        preset = dataclasses.replace(preset, vocab_size=corpus.vocab_size)
    try:
        resolve_impl(args.impl, torch.empty(1, 1, 1, preset.config.head_dim, device=device))
    except ValueError as error:
        raise BadInput(str(error)) from None
    if preset.batch < ranks.world:
        raise BadInput(f"--batch: expected at least {ranks.world}, a row for each process, got {preset.batch}")
    if args.tensorboard:
        need("tensorboard", extra=tokenizing.EXTRA)
    threads, devices = args.threads or min(cores(), MAX_THREADS), _devices(device, ranks)
    processes, threads = (threads, 1) if device.type == "cpu" and threads > 1 else (0, threads)
    if devices:
        processes, threads = len(devices), max(threads // len(devices), 1)
    if ranks.world > 1:
        processes, threads = 0, max(threads // ranks.world, 1)
    return Run(
        out,
        preset,
        args.preset,
        corpus,
        device,
        args.impl,
        processes,
        threads,
        chosen[0] if chosen else args.seed or 0,
        chosen,
        args.window,
        args.compile,
        args.tensorboard,
        devices,
        ranks,
    )


def _devices(device: torch.device, ranks: Ranks) -> tuple[torch.device, ...]:
    """Returns one GPU for each worker process, or nothing if all processes use the device of the run."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.index is not None or count < 2 or ranks.world > 1:
        return ()
    return tuple(torch.device("cuda", n) for n in range(count))


def _check(preset: Preset, args: argparse.Namespace) -> None:
    """Raises BadInput for sizes with which nothing can be trained."""
    if args.vocab_size and not args.tokens:
        raise BadInput("--vocab-size: supported only with --tokens; without --tokens, a token is a byte")
    if preset.train_length < 64 or preset.train_length % 8:
        raise BadInput(f"--train-length: expected a multiple of 8 of at least 64, got {preset.train_length}")
    for name, value, maximum in (("learning-rate", preset.learning_rate, None), ("warmup", preset.warmup, 1)):
        if not value > 0 or maximum and value > maximum:
            limit = f" of at most {maximum}" if maximum else ""
            raise BadInput(f"--{name}: expected a positive number{limit}, got {value}")
    if not 1 < preset.base < math.inf:
        raise BadInput(f"--base: expected a number of more than 1, got {preset.base}")
    if args.window and args.window > preset.train_length:
        raise BadInput(
            f"--window: expected at most the training length of {preset.train_length}, because larger distances are "
            f"not trained, got {args.window}"
        )
    try:
        preset.config  # noqa: B018  checks
    except ValueError as error:
        raise BadInput(str(error)) from None


def _corpus(args: argparse.Namespace, preset: Preset) -> data.Corpus | tokens.TokenCorpus | None:
    window = LONGEST * preset.train_length + 1
    if args.tokens:
        return tokens.from_files(args.tokens, args.vocab_size, window)
    if preset.reads_text:
        return data.from_paths(args.text, window) if args.text else data.standard_library(window)
    if args.text:
        raise BadInput(f"--text: not used by the preset {args.preset}, whose models read no text")
    return None


def cells_of(name: str, run: Run, chosen: Sequence[str] = ()) -> list[Cell]:
    """Returns what the experiment measures. Raises BadInput for schemes that are unknown or invalid."""
    experiment = EXPERIMENTS[name]
    if chosen and not experiment.schemes:
        raise BadInput("--schemes: cannot be changed for this experiment")
    usual = run.preset.schemes if name == "perplexity" and run.preset.schemes else experiment.schemes
    named = [tables.resolve(template, run.unit) for template in chosen or usual]
    for each, length in named:
        scheme(each, run.preset.config, length, run.defaults)
    return [
        Cell(each, length, seed, experiment.measures) for each, length in dict.fromkeys(named) for seed in run.seeds
    ]


def check_effects(args: argparse.Namespace, run: Run, cells: dict[str, list[Cell]]) -> None:
    """Raises BadInput for an option that changes nothing in these experiments. The error names the option."""
    names = ", ".join(cells)
    if set(cells) <= set(OWN_TRAINING):
        for option in ("compile", "tensorboard"):
            if getattr(args, option):
                raise BadInput(f"--{option}: supported only by experiments that train language models, got {names}")
    if run.ranks.world > 1 and any(EXPERIMENTS[name].function for name in cells):
        raise BadInput(f"torchrun: expected an experiment that measures schemes, got {names}; run it without torchrun")
    measured = {(cell.scheme, cell.length) for some in cells.values() for cell in some}
    if run.window and not _differ(run, measured, Defaults(window=8), Defaults(window=16)):
        raise BadInput(
            f"--window: expected a scheme whose window is not in its name, such as rerope, in {names}; give --schemes"
        )
    if hasattr(args, "base") and measured and not _differ(run, measured, Defaults(base=100.0), Defaults(base=200.0)):
        raise BadInput(f"--base: expected a scheme that rotates, got {', '.join(sorted(name for name, _ in measured))}")


def _differ(run: Run, measured: set[tuple[str, int]], one: Defaults, other: Defaults) -> bool:
    def under(name: str, length: int, defaults: Defaults) -> Scheme:
        return scheme(name, run.preset.config, length, defaults)

    return any(under(name, length, one) != under(name, length, other) for name, length in measured)
