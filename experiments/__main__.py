"""``python -m experiments NAME``: trains byte-level models, measures them, and writes CSV, JSON and PNG to a run
directory.

All experiments of a run directory share one configuration (a preset on a text) and the models that were trained with
it. Existing results are not computed again, so an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flashrope.console import files, report
from flashrope.console.options import BadInput, need
from flashrope.console.program import INTERRUPTED, guarded, reject_unknown
from flashrope.lab.small_models.workers import Workers

from . import distributed, training_curves
from .arguments import DERIVED, TOOLS, add_arguments, cells_of, check_effects, experiments_of, resolve
from .measuring import COLUMNS, Cell, measure_cells
from .registry import EXPERIMENTS
from .runs import Run, write_csv
from .show import show
from .training import train_models
from .zoo import scheme

PROGRAM = "python -m experiments"


def main(argv: list[str] | None = None) -> int:
    """Runs experiments and returns the exit code: 0 for done, 2 for bad input, 130 for interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    return guarded(PROGRAM, lambda: _run(argv))


def _run(argv: list[str]) -> int:
    if argv and argv[0] in TOOLS:
        return _guarded(lambda: TOOLS[argv[0]].run(argv[1:], f"{PROGRAM} {argv[0]}"))
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
    return _guarded(lambda: _experiment(args))


def _guarded(work: Callable[[], None]) -> int:
    start = time.perf_counter()
    try:
        work()
    except BadInput as error:
        if distributed.ranks().rank == 0:
            print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\n{PROGRAM}: interrupted after {time.perf_counter() - start:.0f} s; the same command resumes it",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def _experiment(args: argparse.Namespace) -> None:
    need("matplotlib", "safetensors")
    out = Path(args.out or f"runs/experiments-{args.preset}")
    if args.name in DERIVED:
        return _derive(out)
    names = experiments_of(args)
    run = resolve(args, out)
    chosen = [name.strip() for name in args.schemes.split(",")] if args.schemes else []
    cells = {name: cells_of(name, run, chosen) for name in names}
    check_effects(args, run, cells)
    if run.ranks.world > 1:
        return _with_ranks(args, run, cells)
    _open(args, run)
    with run.workers() as workers:
        _run_all(args, run, workers, cells)


def _open(args: argparse.Namespace, run: Run) -> None:
    run.open()
    print(
        report.lines(
            {
                "command": args.command_line,
                "text": run.text,
                "preset": f"{run.preset_name}: {run.preset}",
                "results": str(run.out),
            }
        ),
        flush=True,
    )


def _with_ranks(args: argparse.Namespace, run: Run, cells: dict[str, list[Cell]]) -> None:
    """Trains the models one after another, each on all ranks together. Then the first rank measures them."""
    first = run.ranks.rank == 0
    if first:
        _open(args, run)
    with run.workers() as workers:
        with distributed.group(run.device):
            for name in cells:
                train_models(run, workers, _models(run, cells[name]))
        if first:
            _run_all(args, run, workers, cells)


def _run_all(args: argparse.Namespace, run: Run, workers: Workers, cells: dict[str, list[Cell]]) -> None:
    for name in cells:
        began = time.perf_counter()
        folder = run.out / name
        folder.mkdir(exist_ok=True)
        if EXPERIMENTS[name].function:
            EXPERIMENTS[name].function(run, workers, folder)
        else:
            _measure(run, workers, folder, cells[name])
        if EXPERIMENTS[name].measures:
            print(f"\n{show(folder, name, run.unit)}")
        record = {
            "experiment": name,
            "command": args.command_line,
            **run.provenance(),
            "seconds": round(time.perf_counter() - began, 1),
        }
        files.write(folder / "results.json", json.dumps(record, indent=1))
        print(f"{name}: written to {folder}, {record['seconds']:.0f} s", flush=True)


def _models(run: Run, cells: Sequence[Cell]) -> list[tuple[str, int]]:
    """Returns (encoding, training length) of the models that the cells need."""
    return [(scheme(cell.scheme, run.preset.config, cell.length, run.defaults).trained, cell.length) for cell in cells]


def _measure(run: Run, workers: Workers, folder: Path, cells: Sequence[Cell]) -> None:
    train_models(run, workers, _models(run, cells))
    training_curves.collect(run, folder, _models(run, cells))
    write_csv(folder / "results.csv", COLUMNS, measure_cells(run, workers, folder, cells))


def _derive(out: Path) -> None:
    if not (out / "settings.json").exists():
        raise BadInput(f"--out: {out} is not a run directory: it has no settings.json")
    train_length = json.loads((out / "settings.json").read_text(encoding="utf-8"))["train_length"]
    done = [name for name, e in EXPERIMENTS.items() if e.measures and (out / name / "results.csv").exists()]
    for name in done:
        print(f"\n{show(out / name, name, train_length)}")
    print(f"written again: {', '.join(done) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
