"""Tiles for triton_kernels/configs.py: timed where there is a GPU; without one ranked by their machine code.

    python -m bench tune [--direction forward grad_kv] [--head-dim 128] [--bands 1 2] [--arch 80] [--csv PATH]

On a GPU every tile runs the whole pass (with its rotation) in turns with the others, after its result was held against
that of the tile in use. Offline (no GPU, or --arch given) tiles are compiled, those that spill or need too much shared
memory are dropped, and the rest is ordered by the model of bench.model on sm_80, elsewhere by the instructions of all
warps per multiply-add. Either way the best is printed as a row to paste.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from flashrope.backends import CacheCall, AttentionCall
from flashrope.backends import triton as backend
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

from . import check, gate, model
from .offline import MULTIPROCESSORS, Launch, Measured, caught_launches, compile_all
from .problem import Problem
from .timing import Spread, Timer, rounds

KERNELS = {
    "forward": "attention_forward",
    "grad_kv": "attention_grad_kv",
    "grad_q": "attention_grad_q",
    "decode": "attention_decode",
}
# block_m (rows of queries), block_n (keys), warps, stages
GRIDS = {
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3)),
    "grad_kv": ((32, 64), (64, 128), (4, 8), (2, 3)),
    "grad_q": ((64, 128), (32, 64), (4, 8), (2, 3)),
    "decode": ((16,), (32, 64, 128), (4, 8), (2, 3, 4)),
}
SEQLEN, TOKENS, HEADS = 4096, 16384, 16
DECODE = {"seqlen": 65536, "batch": 2, "heads": 32, "heads_kv": 8, "decoding": True}


@dataclass
class Candidate:
    """A tile and what was found: figures to print, and the number to order by, the best first; None where it is
    dropped."""

    tile: Tile
    figures: dict[str, str]
    rank: float | None = None


@contextlib.contextmanager
def chosen(direction: str, tile: Tile) -> Iterator[None]:
    """Within, the backend takes this tile for this direction."""
    before = configs.tile
    configs.tile = lambda asked, *rest: tile if asked == direction else before(asked, *rest)
    try:
        yield
    finally:
        configs.tile = before


def tiles(direction: str) -> list[Tile]:
    return [Tile(*numbers) for numbers in itertools.product(*GRIDS[direction])]


# ---- offline
def scheme_of(direction: str, bands: int) -> gate.Scheme:
    if direction == "decode":
        return next(
            scheme for scheme in gate.DECODE if scheme.cache == "contiguous" and len(scheme.rotary(64).bands) == bands
        )
    return gate.ONE_BAND if bands == 1 else gate.TWO_BANDS


def offline(direction: str, arch: int, head_dim: int, bands: int, jobs: int) -> list[Candidate]:
    """All tiles compiled, with what their hot loop says."""
    launches = []
    for tile in tiles(direction):
        with chosen(direction, tile):
            caught = gate.Case(arch, head_dim, "bf16", scheme_of(direction, bands)).launches()
        launches.append(of_direction(direction, caught))
    return [
        judged(tile, result, arch, head_dim)
        for tile, result in zip(tiles(direction), compiled(launches, jobs), strict=True)
    ]


def of_direction(direction: str, launches: list[Launch]) -> Launch:
    return next(launch for launch in launches if launch.kernel.__name__ == KERNELS[direction])


def compiled(launches: list[Launch], jobs: int) -> list[Measured | str]:
    found = [None] * len(launches)
    for index, found[index], _ in tqdm(
        compile_all(launches, jobs), total=len(launches), disable=None, leave=False, desc="compiling"
    ):
        pass
    return found


def judged(tile: Tile, result: Measured | str, arch: int, head_dim: int) -> Candidate:
    if isinstance(result, str):
        return Candidate(tile, {"dropped": f"does not compile: {result.splitlines()[0][:60]}"})
    limits = MULTIPROCESSORS[arch]
    figures = {
        "regs": str(result.registers),
        "spill B": str(result.spill_stores),
        "shared KB": f"{result.shared / 1024:g}",
    }
    if result.spill_stores:
        return Candidate(tile, figures | {"dropped": "spills"})
    if result.shared > limits.shared_per_block:
        return Candidate(tile, figures | {"dropped": "shared memory"})
    if not result.loop:
        return Candidate(tile, figures | {"dropped": "no tile loop was found"})
    blocks = limits.resident_blocks(result.registers, result.shared, result.warps)
    work = tile.block_m * tile.block_n * head_dim
    instructions = 1e3 * result.loop["total"] * result.warps * 32 / work
    figures |= {
        "blocks/SM": str(blocks),
        "warps/scheduler": f"{blocks * result.warps / 4:g}",
        "instr/MMA": f"{result.loop['total'] / result.loop['mma']:.2f}",
        "instr/1000 MAC": f"{instructions:.1f}",
    }
    if arch == model.ARCH:
        figures["model"] = f"{model.utilisation(result.loop):.0%}"
        return Candidate(tile, figures, -model.utilisation(result.loop))
    return Candidate(tile, figures, instructions)


# ---- on a GPU
def compile_ahead(direction: str, arch: int, head_dim: int, bands: int, jobs: int) -> list[Measured | str]:
    """Compiles what `timed` will launch, many at once; Triton then finds it in its cache."""
    launches = []
    for tile in tiles(direction):
        with chosen(direction, tile), caught_launches(backend, arch) as caught:
            passes(direction, head_dim, bands, torch.device("meta"))()
        launches.append(of_direction(direction, caught))
    return compiled(launches, jobs)


def timed(direction: str, head_dim: int, bands: int, timer: Timer, seconds: float, jobs: int) -> list[Candidate]:
    """All tiles that compile and agree with the one in use, in turns."""
    compile_ahead(direction, backend._capability(timer.device), head_dim, bands, jobs)
    call = passes(direction, head_dim, bands, timer.device)
    before = call()
    tolerance = check.TOLERANCE[torch.bfloat16]
    candidates, calls = [], {}
    for tile in tqdm(tiles(direction), disable=None, leave=False, desc="checking"):
        candidate = Candidate(tile, {})
        candidates.append(candidate)
        with chosen(direction, tile):
            try:
                errors = [
                    ((a.double() - b.double()).norm() / b.double().norm()).item()
                    for a, b in zip(call(), before, strict=True)
                ]
            except Exception as failure:  # a tile that this device cannot run is one less
                candidate.figures["dropped"] = f"{type(failure).__name__}: {str(failure).splitlines()[0][:60]}"
                continue
        if not all(error <= tolerance for error in errors):
            candidate.figures["dropped"] = f"differs from the tile in use by {max(errors):.2g}"
            continue
        calls[tile] = with_tile(direction, tile, call)
    for tile, times in rounds(calls, timer, seconds).items() if calls else ():
        spread = Spread.of(times)
        candidate = next(candidate for candidate in candidates if candidate.tile == tile)
        candidate.rank = spread.median
        candidate.figures |= {"ms": f"{spread.median:.3f}", "quartiles": f"{spread.low:.3f} - {spread.high:.3f}"}
    return candidates


def with_tile(direction: str, tile: Tile, call: Callable) -> Callable:
    def run():
        with chosen(direction, tile):
            call()

    return run


def passes(direction: str, head_dim: int, bands: int, device: torch.device) -> Callable:
    """A call of the backend that runs this direction, and returns the tensors it fills."""
    p = Problem(TOKENS // SEQLEN, SEQLEN, HEADS, HEADS, head_dim, torch.bfloat16, device)
    if direction == "decode":
        p = p.replace(**DECODE)
    rotary = p.rope() if bands == 1 else p.rerope()
    q, k, v = p.tensors()
    if direction == "decode":
        seqlens = torch.full((p.batch,), p.seqlen, dtype=torch.int32, device=device)
        call = CacheCall(rotary, True, head_dim**-0.5, seqlens)
        return lambda: backend.attention_with_cache(q, k, v, call)[:1]
    call = AttentionCall(rotary, True, head_dim**-0.5, max_seqlen_q=p.seqlen, max_seqlen_k=p.seqlen)
    if direction == "forward":
        return lambda: backend.forward(q, k, v, call)[:1]
    out, lse, turned = backend.forward(q, k, v, call)
    grad_out = torch.randn_like(out)
    return lambda: backend.backward(grad_out, None, q, k, v, out, lse, turned, call)


# ---- both
def show(
    title: str, direction: str, head_dim: int, bands: int, in_use: Tile, candidates: list[Candidate]
) -> list[dict[str, str]]:
    """Prints the ranking and the row to paste; returns the rows."""
    order = sorted(candidates, key=lambda candidate: (candidate.rank is None, candidate.rank or 0))
    columns = list(dict.fromkeys(name for candidate in order for name in candidate.figures if name != "dropped"))
    print(f"\n{title}")
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
    return [{"table": title, "tile": str(tuple(candidate.tile)), **candidate.figures} for candidate in order]


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench tune", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--direction", nargs="+", choices=KERNELS, default=list(KERNELS))
    p.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128), default=[128], help="default 128")
    p.add_argument("--bands", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    p.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=sorted(MULTIPROCESSORS),
        help="compile for these instead of timing (default without a GPU: 80)",
    )
    p.add_argument("--seconds", type=float, default=2.0, help="for the rounds of a table on a GPU")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes")
    p.add_argument("--csv", type=Path, help="write all rankings there")
    options = p.parse_args(argv)
    on_device = torch.cuda.is_available() and not options.arch
    rows = []
    for direction, head_dim, bands in itertools.product(options.direction, options.head_dim, options.bands):
        what = f"{direction}, head_dim {head_dim}, {bands} band{'s' if bands > 1 else ''}"
        for arch in [None] if on_device else options.arch or [80]:
            if arch is None:
                device = torch.device("cuda", torch.cuda.current_device())
                capability = backend._capability(device)
                candidates, where = (
                    timed(direction, head_dim, bands, Timer(device), options.seconds, options.jobs),
                    torch.cuda.get_device_name(device),
                )
            else:
                capability, where = arch, f"sm_{arch}, compiled only"
                candidates = offline(direction, arch, head_dim, bands, options.jobs)
            rows += show(
                f"{what}, {where}",
                direction,
                head_dim,
                bands,
                configs.tile(direction, capability, head_dim, 2, bands),
                candidates,
            )
    if options.csv:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0
