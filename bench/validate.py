"""Compares predictions of the issue model with published times of other people's forward kernels.

    python -m bench validate [--publish]                       # reuses the stored rows of the tutorial's kernel
    python -m bench validate --tutorial 06-fused-attention.py --publish

The kernels are the forward of FlashAttention-2 and the forward of Triton's tutorial on attention. The model predicts
their times at the shapes of a published table: batch 4, 32 heads, causal, fp16 (flash-attention, issue 307, comment of
2024-09-28). The table does not name its GPU, but its speeds fit an A100 and no other GPU. The loops of FlashAttention-2
come from ``bench model --peers``. The tutorial is the file python/tutorials/06-fused-attention.py of Triton's
repository, in a version whose ``_attn_fwd`` takes block pointers (3.0 to 3.3). The installed Triton compiles it with
every tile that the tutorial would try, and the fastest tile counts. The published times were measured with the Triton
of that month.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from . import model
from .compiling import offline, predict, sass, waves
from .compiling.table import print_table
from .report.output import RESULTS
from .report.predicted import FOLDER, TUTORIAL, VALIDATION

ARCH, BATCH, HEADS = 80, 4, 32
KERNELS = ("_attn_fwd_inner", "_attn_fwd")
TILES = tuple(itertools.product((64, 128), (32, 64), (3, 4)))  # block_m, block_n, stages; 4 warps
CAUSAL = 3  # the tutorial's argument STAGE for a causal mask
SEQLENS = (1024, 2048, 4096, 8192, 16384)
FLASH, TRITON = "FlashAttention-2", "Triton's tutorial"
PUBLISHED = {  # milliseconds by seqlen, in the order of SEQLENS
    (FLASH, 64): (0.146833, 0.457882, 1.628497, 6.196142, 24.149960),
    (FLASH, 128): (0.241351, 0.778228, 2.779694, 10.662884, 41.799503),
    (TRITON, 64): (0.148868, 0.450962, 1.598519, 6.023782, 23.513256),
    (TRITON, 128): (0.285561, 0.894371, 3.183826, 12.040288, 46.750145),
}
TILE_COLUMNS = ("step", "D", "block_m", "block_n", "stages", "regs", "blocks/SM", "fixed", "inner", "edge")
TILE_COLUMNS += model.LOOP_COLUMNS[10:]
COLUMNS = ("kernel", "D", "row", *map(str, SEQLENS))


# ---- the tutorial


def tutorial(path: Path, folder: Path):
    """Returns the forward kernel of the tutorial. Only the functions of the file are run, because the rest needs a
    GPU."""
    text = path.read_text(encoding="utf-8")
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if missing := [name for name in KERNELS if name not in found]:
        raise SystemExit(f"--tutorial: {path} has no {' and no '.join(missing)}")
    sources = [f"@triton.jit\n{ast.get_source_segment(text, found[name])}\n" for name in KERNELS]
    copy = folder / "tutorial_forward.py"
    copy.write_text("\n\n".join(["import triton\nimport triton.language as tl", *sources]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, KERNELS[-1])


def launches(kernel, head_dim: int) -> list[offline.Launch]:
    seqlen = SEQLENS[-1]
    q, k, v, out = (torch.empty(BATCH, HEADS, seqlen, head_dim, dtype=torch.float16, device="meta") for _ in range(4))
    lse = torch.empty(BATCH, HEADS, seqlen, dtype=torch.float32, device="meta")
    strides = [stride for x in (q, k, v, out) for stride in x.stride()]
    return [
        offline.catch(
            ARCH,
            kernel,
            *(q, k, v, 0.5, lse, out, *strides, BATCH, HEADS),
            N_CTX=seqlen,
            HEAD_DIM=head_dim,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGE=CAUSAL,
            num_warps=4,
            num_stages=stages,
        )
        for block_m, block_n, stages in TILES
    ]


def inspected(compiled) -> tuple[int, predict.Loop, predict.Block] | None:
    measured = offline.measure(compiled)
    if not measured.model:
        return None
    listing = sass.disassemble(compiled.asm["cubin"], offline.tool("nvdisasm"))
    return measured.registers, measured.model, predict.block(listing, measured.model)


def tutorial_rows(path: Path, jobs: int) -> Iterator[dict[str, str]]:
    """Yields the figures of the fastest tile for each head_dim."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = tutorial(path, Path(folder))
        for head_dim in (64, 128):
            rows = []
            for at, found, _ in offline.compile_all(launches(kernel, head_dim), jobs, inspected):
                if isinstance(found, str):
                    raise SystemExit(f"{KERNELS[-1]}, tile {TILES[at]}: {found}")
                if found:
                    rows.append(tile_row(head_dim, *TILES[at], *found))
            yield min(rows, key=lambda row: seconds(row, problem(head_dim, SEQLENS[-1])))


def tile_row(
    head_dim: int, block_m: int, block_n: int, stages: int, registers: int, loop: predict.Loop, block: predict.Block
) -> dict[str, str]:
    products = 2 * block_m * block_n * head_dim / predict.MULTIPLY_ADDS
    sizes = {"D": head_dim, "block_m": block_m, "block_n": block_n, "stages": stages, "regs": registers}
    clocks = {name: f"{getattr(block, name):.0f}" for name in ("fixed", "inner", "edge")}
    return {
        "step": "forward",
        **{name: str(value) for name, value in sizes.items()},
        "blocks/SM": str(block.resident),
        **clocks,
        **model.loop_figures(loop, products),
    }


# ---- times


def problem(head_dim: int, seqlen: int) -> waves.Problem:
    return waves.Problem(BATCH, HEADS, seqlen, head_dim)


def seconds(row: dict[str, str], problem: waves.Problem) -> float:
    """Returns the time of a forward pass in seconds. In both kernels the programs with the fewest keys start first."""
    block_m, block_n, resident = (int(row[name]) for name in ("block_m", "block_n", "blocks/SM"))
    # FlashAttention-2's rows have no column "edge": its masked tiles are unrolled, so "fixed" includes their clocks.
    block = predict.Block(float(row["fixed"]), float(row["inner"]), float(row.get("edge") or 0), resident)
    lengths = waves.query_tile_lengths(block, problem, block_m, block_n)
    return waves.seconds(waves.A100, lengths, resident, problem.batch * problem.heads)


def rows(of: dict[str, list[dict[str, str]]]) -> Iterator[dict[str, str]]:
    """Yields table rows with predicted TFLOP/s, published TFLOP/s, and the relative error of the model. of: {kernel:
    rows with the clocks of its tiles}."""
    for (name, head_dim), milliseconds in PUBLISHED.items():
        tile = next((row for row in of[name] if row["step"] == "forward" and int(row["D"]) == head_dim), None)
        if not tile:
            continue
        label = {"kernel": name, "D": str(head_dim)}
        sizes = {seqlen: problem(head_dim, seqlen) for seqlen in SEQLENS}
        predicted = {n: waves.tflops(each, 1, [seconds(tile, each)]) for n, each in sizes.items()}
        measured = {n: waves.tflops(sizes[n], 1, [t / 1e3]) for n, t in zip(SEQLENS, milliseconds, strict=True)}
        yield label | {"row": "predicted"} | {str(n): f"{speed:.0f}" for n, speed in predicted.items()}
        yield label | {"row": "published"} | {str(n): f"{speed:.0f}" for n, speed in measured.items()}
        yield (
            label | {"row": "error of the model"} | {str(n): f"{predicted[n] / measured[n] - 1:+.0%}" for n in SEQLENS}
        )


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench validate", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument(
        "--tutorial", type=Path, metavar="PATH", help="file to compile the kernel from (default: use stored rows)"
    )
    p.add_argument("--publish", action="store_true", help=f"write the tables to bench/results/{FOLDER}")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes (default: all cores)")
    options = p.parse_args(argv)
    if options.tutorial and offline.missing_tools():
        p.error(f"missing: {' '.join(offline.missing_tools())}, which are part of Triton's package")
    folder = RESULTS / FOLDER
    theirs = model.read_csv(folder / model.THEIRS)
    if options.tutorial:
        tiles = list(tutorial_rows(options.tutorial, options.jobs))
    else:
        tiles = model.read_csv(folder / TUTORIAL)
    print_table(TILE_COLUMNS, tiles, 1)
    found = list(rows({FLASH: theirs, TRITON: tiles}))
    print()
    print_table(COLUMNS, found, 3)
    if options.publish:
        if options.tutorial:
            model.write_csv(folder / TUTORIAL, TILE_COLUMNS, tiles)
        model.write_csv(folder / VALIDATION, COLUMNS, found)
    return 0
