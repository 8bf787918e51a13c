"""The tiles that ``tune`` tries: found good or bad by their machine code, or by their time on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from flashrope.backends import AttentionCall, CacheCall, CacheLayout
from flashrope.backends import triton as backend
from flashrope.backends.triton import launcher
from flashrope.backends.triton.device import compute_capability
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

from ..compiling import cases, utilisation
from ..compiling.architectures import MULTIPROCESSORS
from ..compiling.offline import Launch, Measured, caught_launches, compile_all
from . import check
from .problem import Problem
from .timer import Spread, Timer, rounds

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
    """A tile, the figures to print, and its rank: the smallest is the best, None means dropped."""

    tile: Tile
    figures: dict[str, str]
    rank: float | None = None


@contextlib.contextmanager
def chosen(direction: str, tile: Tile) -> Iterator[None]:
    """In this context the backend uses this tile for this direction."""
    before = configs.tile
    configs.tile = lambda asked, *rest: tile if asked == direction else before(asked, *rest)
    try:
        yield
    finally:
        configs.tile = before


def tiles(direction: str) -> list[Tile]:
    return [Tile(*numbers) for numbers in itertools.product(*GRIDS[direction])]


# ---- compiled only


def scheme_of(direction: str, bands: int) -> cases.Scheme:
    if direction == "decode":
        return next(
            scheme for scheme in cases.DECODE if scheme.cache == "contiguous" and len(scheme.rotary(64).bands) == bands
        )
    return cases.ONE_BAND if bands == 1 else cases.TWO_BANDS


def ranked_by_machine_code(direction: str, arch: int, head_dim: int, bands: int, jobs: int) -> list[Candidate]:
    """Compiles all tiles, and judges each by its hot loop."""
    launches = []
    for tile in tiles(direction):
        with chosen(direction, tile):
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


# ---- on a GPU


def compile_ahead(direction: str, arch: int, head_dim: int, bands: int, jobs: int) -> list[Measured | str]:
    """Compiles in parallel what ``timed`` launches. Triton then finds it in its cache."""
    launches = []
    for tile in tiles(direction):
        with chosen(direction, tile), caught_launches(launcher, arch) as caught:
            passes(direction, head_dim, bands, torch.device("meta"))()
        launches.append(of_direction(direction, caught))
    return compiled(launches, jobs)


def timed(direction: str, head_dim: int, bands: int, timer: Timer, seconds: float, jobs: int) -> list[Candidate]:
    """Times all tiles that compile and whose results agree with the tile in use."""
    compile_ahead(direction, compute_capability(timer.device), head_dim, bands, jobs)
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
            except Exception as failure:  # this device cannot run the tile
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
    """A call of the backend that runs this direction and returns the tensors it fills."""
    p = Problem(TOKENS // SEQLEN, SEQLEN, HEADS, HEADS, head_dim, torch.bfloat16, device)
    if direction == "decode":
        p = p.replace(**DECODE)
    rotary = p.rope() if bands == 1 else p.rerope()
    q, k, v = p.tensors()
    if direction == "decode":
        seqlens = torch.full((p.batch,), p.seqlen, dtype=torch.int32, device=device)
        call = CacheCall(rotary, True, head_dim**-0.5, CacheLayout(seqlens))
        return lambda: backend.attention_with_cache(q, k, v, call)[:1]
    call = AttentionCall(rotary, True, head_dim**-0.5, max_seqlen_q=p.seqlen, max_seqlen_k=p.seqlen)
    if direction == "forward":
        return lambda: backend.forward(q, k, v, call)[:1]
    out, lse, rotated_k = backend.forward(q, k, v, call)
    grad_out = torch.randn_like(out)
    return lambda: backend.backward(grad_out, None, q, k, v, out, lse, rotated_k, call)
