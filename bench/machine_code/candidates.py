"""Ranks the candidates of ``flashrope tune`` by their machine code. No GPU is needed.

``bench model --candidates`` writes the ranking into flashrope/lab/tuning/candidates.py, and the figures into
bench/results/model/candidates.csv.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashrope.backends.triton import chosen_tiles as backend_tiles
from flashrope.console.files import replacing
from flashrope.console.progress import Bar
from flashrope.lab.tuning.candidates import KERNELS, tiles
from flashrope.triton_kernels.configs import Tile

from . import cases, predict
from .architectures import MULTIPROCESSORS
from .limits import hot_loop_spills
from .offline import Launch, Measured, compile_all


@dataclass
class Candidate:
    """Holds a tile, the figures to print, and its rank. The smallest rank is the best; None means that the tile was
    dropped."""

    tile: Tile
    figures: dict[str, str]
    rank: float | None = None


def ranked_by_machine_code(direction: str, arch: int, head_dim: int, bands: int, jobs: int) -> list[Candidate]:
    """Compiles all tiles and ranks them by their hot loops."""
    [found] = ranked([(direction, arch, head_dim, bands)], jobs)
    return found


def ranked(choices: list[tuple[str, int, int, int]], jobs: int) -> list[list[Candidate]]:
    """Returns the ranked candidates for every given (direction, architecture, head_dim, bands). All launches are caught
    before the first kernel is compiled."""
    caught = [(at, direction, tile) for at, (direction, *_) in enumerate(choices) for tile in tiles(direction)]
    launches: list[Launch] = []
    spills: list[float] = []
    for at, direction, tile in caught:
        _, arch, head_dim, bands = choices[at]
        case = cases.Case(arch, head_dim, "bf16", cases.scheme_of(direction, bands > 1))
        with backend_tiles.forced(direction, tile):
            launches.append(of_direction(direction, case.launches()))
        spills.append(hot_loop_spills(KERNELS[direction], case))
    found: list[list[Candidate]] = [[] for _ in choices]
    for (at, direction, tile), launch, result, allowed in zip(
        caught, launches, compiled(launches, jobs), spills, strict=True
    ):
        found[at].append(judged(direction, tile, launch, result, allowed))
    return found


def of_direction(direction: str, launches: list[Launch]) -> Launch:
    return next(launch for launch in launches if launch.kernel.__name__ == KERNELS[direction])


def compiled(launches: list[Launch], jobs: int) -> list[Measured | str]:
    found = [None] * len(launches)
    with Bar(len(launches)).start("compiling") as bar:
        for index, result, _ in compile_all(launches, jobs):
            found[index] = result
            bar.step()
    return found


def judged(direction: str, tile: Tile, launch: Launch, result: Measured | str, spills: float) -> Candidate:
    """Returns the figures and the rank of a compiled tile. spills: how often its hot loop may touch spilled registers,
    unless the issue model, which knows what they cost, ranks it."""
    if isinstance(result, str):
        return Candidate(tile, {"dropped": f"does not compile: {result.splitlines()[0][:60]}"})
    limits, variant = MULTIPROCESSORS[launch.arch], launch.kwargs["VARIANT"]
    figures = {
        "regs": str(result.registers),
        "spill B": str(result.spill_stores),
        "shared KB": f"{result.shared / 1024:g}",
    }
    times = (result.loop or {}).get("local", 0)
    if times > spills and not result.model:
        dropped = f"touches spilled registers {times} times in the hot loop, the limit is {spills}"
        return Candidate(tile, figures | {"dropped": dropped})
    if result.shared > limits.shared_per_block:
        return Candidate(tile, figures | {"dropped": "shared memory"})
    if not result.loop:
        return Candidate(tile, figures | {"dropped": "no tile loop was found"})
    blocks = limits.resident_blocks(result.registers, result.shared, result.warps)
    work = tile.block_m * tile.block_n * variant.head_dim
    instructions = 1e3 * result.loop["total"] * result.warps * 32 / work
    figures |= {
        "blocks/SM": str(blocks),
        "warps/scheduler": f"{blocks * result.warps / 4:g}",
        "instr/MMA": f"{result.loop['total'] / result.loop['mma']:.2f}",
        "instr/1000 MAC": f"{instructions:.1f}",
    }
    if not result.model:
        return Candidate(tile, figures, instructions)
    if direction == "decode":
        speed = result.model.bytes_per_clock(predict.cache_bytes(variant))
        return Candidate(tile, figures | {"bytes/clock": f"{speed:.1f}"}, -speed)
    products = predict.useful_products(KERNELS[direction], variant, direction == "grad_qkv", launch.stores_scores)
    share = result.model.tensor_share(products)
    return Candidate(tile, figures | {"model": f"{share:.1%}"}, -share)


# ---- the order in flashrope/lab/tuning/candidates.py

FAMILIES = {"sm80": 80, "sm86": 86}  # families in configs.py, each with the architecture to compile for
HEAD_DIMS, BANDS = (64, 128), (1, 2)
KEPT = 6  # how many ranked candidates ORDER lists; the remaining tiles follow in the order of the grid
COLUMNS = ("family", "direction", "D", "bands", "tile", "figure", "value", "dropped")
_ORDER = re.compile(r"^(ORDER\b.*?= )\{\n.*?^\}\n", re.MULTILINE | re.DOTALL)


def ranking_rows(choices: list[tuple[str, str, int, int]], jobs: int) -> list[dict[str, str]]:
    """Returns table rows with the candidates for every given (family, direction, head_dim, bands). The best candidate
    comes first, and dropped candidates come last."""
    every = ranked([(direction, FAMILIES[family], *sizes) for family, direction, *sizes in choices], jobs)
    return [
        {
            "family": family,
            "direction": direction,
            "D": str(head_dim),
            "bands": str(bands),
            "tile": " ".join(map(str, each.tile)),
            "figure": figure_of(direction),
            "value": each.figures.get(figure_of(direction), ""),
            "dropped": each.figures.get("dropped", ""),
        }
        for (family, direction, head_dim, bands), found in zip(choices, every, strict=True)
        for each in sorted(found, key=lambda each: (each.rank is None, each.rank or 0))
    ]


def merged(before: list[dict[str, str]], after: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the rows of an older table after newer rows have replaced the rows with the same key. The rows are in the
    order of a complete table."""

    def key(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in COLUMNS[:4])

    def place(row: dict[str, str]) -> tuple[int, ...]:
        families, directions = tuple(FAMILIES), tuple(KERNELS)
        return families.index(row["family"]), directions.index(row["direction"]), int(row["D"]), int(row["bands"])

    newer = {key(row) for row in after}
    return sorted([row for row in before if key(row) not in newer] + after, key=place)


def figure_of(direction: str) -> str:
    return "bytes/clock" if direction == "decode" else "model"


def order_text(rows: Iterable[Mapping[str, str]]) -> str:
    """Returns the source text of ``ORDER`` for flashrope/lab/tuning/candidates.py."""
    lines = ["{"]
    for key, group in itertools.groupby(rows, lambda row: tuple(row[name] for name in COLUMNS[:4])):
        family, direction, head_dim, bands = key
        best = [row["tile"] for row in group if not row["dropped"]][:KEPT]
        if best:
            lines.append(f'    ("{family}", "{direction}", {head_dim}, {bands != "1"}): "{", ".join(best)}",')
    return "\n".join([*lines, "}"]) + "\n"


def with_order(source: str, rows: Iterable[Mapping[str, str]]) -> str:
    """Returns the source of flashrope/lab/tuning/candidates.py with its table ``ORDER`` replaced by the given rows."""
    text, count = _ORDER.subn(lambda found: found[1] + order_text(rows), source)
    if count != 1:
        raise ValueError(f"expected one table ORDER in candidates.py, got {count}")
    return text


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with replacing(path) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as lines:
        return list(csv.DictReader(lines))
