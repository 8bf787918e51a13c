"""The candidates of ``flashrope tune``, ranked by their machine code: no GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass

from flashrope.backends.triton import tiles as backend_tiles
from flashrope.triton_kernels.configs import Tile
from flashrope.tuning.candidates import KERNELS, tiles
from tqdm import tqdm

from ..compiling import cases, utilisation
from ..compiling.architectures import MULTIPROCESSORS
from ..compiling.offline import Launch, Measured, compile_all


@dataclass
class Candidate:
    """A tile, the figures to print, and its rank: the smallest is the best, None means dropped."""

    tile: Tile
    figures: dict[str, str]
    rank: float | None = None


def scheme_of(direction: str, bands: int) -> cases.Scheme:
    if direction == "decode":
        return next(
            scheme for scheme in cases.DECODE if scheme.cache == "contiguous" and len(scheme.rotary(64).bands) == bands
        )
    one, several = cases.ATOMIC if direction == "grad_qkv" else (cases.ONE_BAND, cases.TWO_BANDS)
    return one if bands == 1 else several


def ranked_by_machine_code(direction: str, arch: int, head_dim: int, bands: int, jobs: int) -> list[Candidate]:
    """Compiles all tiles, and judges each by its hot loop."""
    launches = []
    for tile in tiles(direction):
        with backend_tiles.forced(direction, tile):
            caught = cases.Case(arch, head_dim, "bf16", scheme_of(direction, bands)).launches()
        launches.append(of_direction(direction, caught))
    return [
        judged(tile, result, arch, head_dim)
        for tile, result in zip(tiles(direction), compiled(launches, jobs), strict=True)
    ]


def of_direction(direction: str, launches: list[Launch]) -> Launch:
    return next(launch for launch in launches if launch.kernel.__name__ == KERNELS[direction])


def compiled(launches: list[Launch], jobs: int) -> list[Measured | str]:
    found = [None] * len(launches)
    running = compile_all(launches, jobs)
    for index, result, _ in tqdm(running, total=len(launches), disable=None, leave=False, desc="compiling"):
        found[index] = result
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
    if result.loop and result.loop.get("local"):
        return Candidate(tile, figures | {"dropped": "spills in the hot loop"})
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
    if arch == utilisation.ARCH:
        figures["model"] = f"{utilisation.utilisation(result.loop):.0%}"
        return Candidate(tile, figures, -utilisation.utilisation(result.loop))
    return Candidate(tile, figures, instructions)
