"""Writes the section of the issue model for the page of results, from the tables of ``python -m bench model``."""

from __future__ import annotations

import csv
from pathlib import Path

FOLDER, DEVICE, DECODING, LOOPS = "model", "a100.csv", "a100-decoding.csv", "loops.csv"
TUTORIAL, VALIDATION = "triton-tutorial.csv", "validation.csv"
RAGGED, BOUNDS = "a100-ragged.csv", "decoding.csv"
MARK = "predicted, nothing was run on a GPU"
TEXT = """\
No A100 was measured. The kernels for sm_80 ran on an H200, with their PTX assembled for sm_90. There they reached 1.00
of FlashAttention-2 after a fused rotation in the forward, and 0.925 in forward and backward together ([all
figures](../../docs/measured.md#h200)).

The figures of this section are predicted from machine code, and serve to rank tiles ([how far to trust
them](../../docs/tuning.md#what-the-issue-model-is-good-for)). The model decodes the control bits of the machine code
and simulates how one multiprocessor issues it (`bench/compiling/issue.py`): stall counts, scoreboards, pipes, shared
memory, copies in the background and barriers. No constant was fitted to measured times. The model leaves out launch
times, contention in L2, bank conflicts and instruction fetch. So its predictions are too fast. HGMMA is not simulated,
so there is no prediction for sm_90."""
VALIDATED = """\
The model also predicts two kernels at the shapes of a table in flash-attention's issue 307 (batch 4, 32 heads, causal,
fp16, September 2024): the forward of FlashAttention-2 and the forward of Triton's tutorial. The table does not name
its GPU, but its speeds fit an A100. The installed Triton compiles the tutorial's kernel, and the fastest of the
tutorial's tiles counts. The published speeds were measured with the Triton of that month. So part of the difference
comes from two different compilers. Other simulators report mean errors of 5.7% (Sim-FA, arXiv 2605.00555:
FlashAttention-3 on an H800, at most 12.7%) and of 14.0% (arXiv 2503.20481, a model of control bits: general programs
on an RTX A6000)."""

LIMITED = """\
Decoding reads every key and value once. The column sm_80 says how many bytes of the cache the inner loop takes per
clock on one multiprocessor of an A100. The DRAM of an A100 delivers 13.4 bytes per clock to each multiprocessor (2.04
TB/s, 108 multiprocessors, 1.41 GHz). Memory limits the rows whose loop takes at least as many bytes. In all other rows
the loop is too slow, so the cache is read at a lower rate. Scales of quantized caches count as bytes. If a key head
has more query heads than the tile has rows, several blocks read the same keys, and these keys count once. "Keys in
1,000 clocks" counts keys of one key head at the lower of the two rates, so that rows with different bytes per key can
be compared. The column sm_90 has the warp instructions of the inner loop per byte. A multiprocessor issues at most 4
instructions per clock, and an H200 delivers 18.4 bytes per clock to each multiprocessor (4.8 TB/s, 132
multiprocessors, 1.98 GHz). To keep up with this memory, a loop with 0.22 instructions per byte would have to issue in
every clock, which no kernel achieves. In the rows "partial", at most half of the channels rotate: HoPE with a training
length of 512 at head_dim 64, the last 64 channels at 128 and 256, and p-RoPE with a quarter of the pairs at 512. Under
ReRoPE the loop goes over the keys beyond the window, which do not rotate. In the rows "latent attention", 512 channels
of the keys are also the values. Quantized caches are not supported beyond head_dim 256."""


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as lines:
        return list(csv.DictReader(lines))


def _seqlens(row: dict[str, str]) -> list[str]:
    return [name for name in row if name.isdigit()]


def _validated(folder: Path, table) -> list[str]:
    """Returns the paragraph and the table of ``bench validate``, if there are results."""
    path = folder / FOLDER / VALIDATION
    if not path.exists():
        return []
    rows = read(path)
    seqlens = _seqlens(rows[0])
    cells = [[row["kernel"], row["row"], row["D"], *(row[name] for name in seqlens)] for row in rows]
    heading = ["TFLOP/s, forward, causal, fp16", "row", "head_dim", *(f"{int(name):,}" for name in seqlens)]
    return [f"`python -m bench validate --publish`. {VALIDATED}", "", *table(heading, cells, 2), ""]


def section(folder: Path, table) -> list[str]:
    """Returns the section's lines of Markdown. table: a function of (heading, rows, number of left-aligned columns)
    that returns the lines of a table."""
    loops = read(folder / FOLDER / LOOPS)
    versions = f"revision {loops[0]['revision']}, Triton {loops[0]['triton']}"
    lines = [f"## Inner loops: {MARK}", "", f"`python -m bench model --publish`, {versions}.", "", TEXT, ""]
    lines += _validated(folder, table)
    lines += bounds(folder, table)
    lines += [*ragged(folder, table), ""]
    shares = [name for name in loops[0] if name.startswith("% ")]
    heading = ["inner loop", "scheme", "architecture", "head_dim", "tile, warps, stages", "blocks per SM", "clocks"]
    heading += ["tensor cores on needed products", "bytes per clock", *(name[2:] + " %" for name in shares)]
    cells = [
        [
            *(row[name] for name in ("kernel", "scheme", "arch", "D")),
            f"{row['tile']}, {row['warps']}, {row['stages']}",
            row["blocks/SM"],
            row["clocks"],
            row["tensor"] or "–",
            row["B/clk"] or "–",
            *(row[name] for name in shares),
        ]
        for row in loops
    ]
    what = (
        "The last columns say how schedulers spend clocks: they issue an instruction, or the next instruction waits "
        "for the resource that the column names."
    )
    return [
        *lines,
        f"The table has inner loops over tiles on one multiprocessor. {what}",
        "",
        *table(heading, cells, 3),
    ]


def bounds(folder: Path, table) -> list[str]:
    """Returns lines of Markdown on what limits decoding, if there are results."""
    path = folder / FOLDER / BOUNDS
    if not path.exists():
        return []
    rows = read(path)
    cells = [
        [
            *(row[name] for name in ("scheme", "cache", "type", "D", "rotates", "heads", "tile", "blocks/SM", "B/clk")),
            *(row[name] for name in ("limited by", "keys", "sm_90 instr/B")),
        ]
        for row in rows
    ]
    heading = ["decoding: what limits it", "cache", "type", "head_dim", "channels that rotate", "query / key heads"]
    heading += ["tile", "blocks per SM", "sm_80: bytes per clock", "limited by", "keys in 1,000 clocks"]
    heading += ["sm_90: instructions per byte"]
    return [
        f"`python -m bench model --decoding --publish`, revision {rows[0]['revision']}, Triton {rows[0]['triton']}. "
        f"{LIMITED}",
        "",
        *table(heading, cells, 3),
        "",
    ]


def ragged(folder: Path, table) -> list[str]:
    """Returns lines of Markdown on decoding batches of unequal lengths, if there are results."""
    rows = read(folder / FOLDER / RAGGED)
    columns = [name for name in rows[0] if name not in ("revision", "triton", "scheme", "lengths")]
    heading = ["decoding, time / time that the memory needs", "lengths", *columns]
    return [
        f"`python -m bench ragged --publish`, revision {rows[0]['revision']}, Triton {rows[0]['triton']}. A step "
        "decodes one token of every sequence with 32 query and 8 key heads of 128 channels in bf16. By default, calls "
        "divide several sequences into shares, and one sequence into splits by its shape. `num_splits=32` gives 32 "
        "splits. Items of a fixed number of keys exist only in this simulation. All figures are predicted times as a "
        "multiple of the time in which the memory delivers keys and values.",
        "",
        *table(heading, [[row["scheme"], row["lengths"], *(row[name] for name in columns)] for row in rows], 2),
    ]
