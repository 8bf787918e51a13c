"""Finds tiles for triton_kernels/configs.py: times them on a GPU, or ranks them by their machine code without a GPU.

    python -m bench tune [--direction forward grad_kv] [--head-dim 128] [--bands 1 2] [--arch 80] [--csv PATH]

On a GPU the command does the same as ``flashrope tune``, with the same candidates, checks and timings. But it prints
one table for each workload and stores nothing. Without a GPU, or with --arch, it only compiles the candidates. It drops
tiles that need too much shared memory. Where the issue model does not apply, it also drops tiles whose hot loops touch
spilled registers more often than the gate allows for the kernel (``bench.machine_code.limits``). It ranks the remaining
tiles by the issue model (``python -m bench model``) on sm_80, sm_86 and sm_89, and by instructions per multiply-add on
other architectures. It prints the best candidate as an entry of configs.py.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from flashrope.backends.triton.device import compute_capability
from flashrope.console.files import replacing
from flashrope.console.options import positive
from flashrope.console.progress import Bar
from flashrope.lab.tuning import measure
from flashrope.lab.tuning.candidates import KERNELS, default
from flashrope.lab.tuning.workloads import PASSES, Workload, sensible_shapes
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

from ..machine_code.architectures import NVIDIA
from ..machine_code.candidates import Candidate, ranked_by_machine_code
from ..progress import steps


def show(
    heading: str, direction: str, head_dim: int, bands: int, in_use: Tile, candidates: list[Candidate]
) -> list[dict[str, str]]:
    """Prints the ranking and the entry for configs.py. Returns the rows of the CSV file."""
    order = sorted(candidates, key=lambda candidate: (candidate.rank is None, candidate.rank or 0))
    columns = list(dict.fromkeys(name for candidate in order for name in candidate.figures if name != "dropped"))
    print(f"\n{heading}")
    print(f"{'block_m, block_n, warps, stages':<34}" + "".join(f"{name:>17}" for name in columns))
    for candidate in order:
        mark = " (in use)" if candidate.tile == in_use else ""
        print(
            (
                f"{str(tuple(candidate.tile)) + mark:<34}"
                + "".join(f"{candidate.figures.get(name, ''):>17}" for name in columns)
                + f"   {candidate.figures.get('dropped', '')}"
            ).rstrip()
        )
    if order and order[0].rank is not None:
        name = f"{direction} banded" if bands > 1 else direction
        print(f'best: "{name}": {{{head_dim}: Tile{tuple(order[0].tile)}}}')
    return [{"table": heading, "tile": str(tuple(candidate.tile)), **candidate.figures} for candidate in order]


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with replacing(path) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def workloads(direction: str, head_dim: int, bands: int) -> list[Workload]:
    """Returns the workloads that are timed on a GPU: one for every class of length, and in decoding one for each kind
    of cache."""
    [name] = [name for name, (directions, caches) in PASSES.items() if direction in directions and name != "prefill"]
    return [
        Workload(direction, *shape[:-1], head_dim, torch.bfloat16, bands, cache)
        for cache in PASSES[name][1]
        for shape in sensible_shapes(name)
    ]


def timed(direction: str, head_dim: int, bands: int, seconds: float, jobs: int) -> Iterator[tuple]:
    """Times the candidates of every workload on a GPU. Yields (heading, default tile, candidates)."""
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = workloads(direction, head_dim, bands)
    bar = Bar(measure.steps(chosen, device))
    for workload, outcomes in measure.examine(chosen, device, seconds, bar, jobs):
        bar.clear()
        in_use = default(workload.shape_class, compute_capability(device))
        yield f"{workload.shape_class}, {torch.cuda.get_device_name(device)}", in_use, list(map(candidate, outcomes))


def candidate(outcome: measure.Outcome) -> Candidate:
    tile, spread = outcome.tile, outcome.milliseconds
    if not spread:
        return Candidate(tile, {"dropped": outcome.dropped})
    figures = {"ms": f"{spread.median:.3f}", "quartiles": f"{spread.low:.3f} - {spread.high:.3f}"}
    return Candidate(tile, figures, spread.median)


def compiled(direction: str, head_dim: int, bands: int, arch: int, jobs: int) -> Iterator[tuple]:
    """Compiles and ranks the candidates. Yields (heading, tile in use, candidates)."""
    candidates = ranked_by_machine_code(direction, arch, head_dim, bands, jobs)
    heading = f"{title((direction, head_dim, bands, None))}, sm_{arch}, compiled only"
    yield heading, configs.tile(direction, arch, head_dim, 2, bands), candidates


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench tune", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--direction", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: all")
    p.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128), default=[128], help="default 128")
    p.add_argument("--bands", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="default: 1 2")
    p.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=NVIDIA,
        help="rank by the code compiled for these architectures instead of timing (default without a GPU: 80)",
    )
    p.add_argument(
        "--seconds", type=float, default=90.0, help="time for a direction, including compilation (default 90)"
    )
    p.add_argument(
        "--jobs", type=positive, default=os.cpu_count(), help="compiling processes or threads (default: all cores)"
    )
    p.add_argument("--csv", type=Path, metavar="PATH", help="write all rankings to this file")
    options = p.parse_args(argv)
    on_device = torch.cuda.is_available() and not options.arch
    archs = [None] if on_device else options.arch or [80]
    rows = []
    chosen = list(itertools.product(options.direction, options.head_dim, options.bands, archs))
    for direction, head_dim, bands, arch in steps("tune", chosen, title):
        if arch is None:
            tables = timed(direction, head_dim, bands, options.seconds, options.jobs)
        else:
            tables = compiled(direction, head_dim, bands, arch, options.jobs)
        for heading, in_use, candidates in tables:
            rows += show(heading, direction, head_dim, bands, in_use, candidates)
            if options.csv:
                write_csv(options.csv, rows)
    return 0


def title(choice: tuple[str, int, int, int | None]) -> str:
    direction, head_dim, bands, arch = choice
    target = f", sm_{arch}" if arch else ""
    return f"{direction}, head_dim {head_dim}, {bands} band{'s' if bands > 1 else ''}{target}"
