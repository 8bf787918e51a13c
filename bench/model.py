"""Predicts clocks of the kernels' inner loops, and speeds on an A100, from their machine code. Needs no GPU.

    python -m bench model [--arch 80 86 89] [--head-dim 64 128] [--publish]
    python -m bench model --peers torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl --publish   # with validation
    python -m bench model --head-dim 320 384 448 512 --scheme rope rerope "rope atomic" "rerope atomic" --publish
    python -m bench model --decoding --publish         # whether memory or the loop limits decoding
    python -m bench model --candidates --publish       # the order in which flashrope tune tries tiles

The first table has the inner loop over tiles of every kernel: clocks of a pass, the share of the time in which the
tensor cores work on needed products, and how the schedulers spend their clocks. The second table has TFLOP/s of causal
attention on an A100. Blocks start in the order of launch. A block takes the clocks of its loops and of its code
outside the loops. The time of kernels that only move data follows from the bandwidth. The model also predicts
FlashAttention-2's kernels, and the result is compared with the figures that their authors published. --peers reads
their machine code, and stores only figures of the code. HGMMA, the tensor-core instruction of sm_90, is not simulated.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flashrope.backends import splits
from flashrope.backends.triton import score_grads
from flashrope.cli.files import replacing, write
from flashrope.triton_kernels import configs

from . import machine
from .compiling import bounds, candidates, cases, issue, offline, peers, predict, sass, waves
from .compiling.table import print_table
from .report import predicted
from .report.output import RESULTS
from .report.predicted import DECODING, DEVICE, FOLDER, LOOPS

ARCHS, HEAD_DIMS = tuple(issue.RATES), (64, 96, 128, 256, 320, 384, 448, 512)
SCHEMES = (cases.ONE_BAND, cases.TWO_BANDS, *cases.SEVEN, *cases.ATOMIC, *cases.DECODE, *cases.MAPS)
ON_REQUEST = (*cases.PARTS, cases.TRAINED, cases.TRAINED_BANDS, *cases.CHUNKS, *cases.FEW_CHUNKS)
NAMES = {
    "attention_forward": "forward",
    "attention_grad_kv": "dK and dV",
    "attention_grad_q": "dQ",
    "attention_decode": "decoding",
    "attention_chunks": "prefill",
}
THEIRS, ORDER, WIDE = "flash-attention-2.csv", "candidates.csv", "a100-wide.csv"
LOOP_COLUMNS = (
    *("kernel", "scheme", "arch", "D", "tile", "warps", "stages", "regs", "local", "blocks/SM", "clocks"),
    *("tensor", "B/clk", *(f"% {name}" for name in issue.WAITS)),
)
THEIR_COLUMNS = ("step", "D", "block_m", "block_n", "regs", "blocks/SM", "fixed", "inner", *LOOP_COLUMNS[10:])
SEQLENS = (512, 2048, 8192, 16384, 32768, 131072)
TOKENS, WIDTH = 16384, 2048  # tokens per batch and heads * head_dim, as in FlashAttention-2's paper
DEVICE_COLUMNS = ("who", "pass", "D", *map(str, SEQLENS))
# TFLOP/s of FlashAttention-2, forward and backward, causal, A100 80 GB SXM4, bf16 or fp16, 16k tokens, 2048 channels:
# Dao 2023 (arXiv 2307.08691, July 2023), figure 4, the two panels with a causal mask.
PUBLISHED = {
    64: {512: 88, 2048: 140, 8192: 165, 16384: 171},
    128: {512: 99, 2048: 155, 8192: 182, 16384: 189},
}
CACHES = (4096, 16384, 65536, 131072)  # numbers of cached keys, for batch 1 and 8 key heads
CACHE_COLUMNS = ("scheme", "D", *map(str, CACHES))
HEADS_KV = 8


# ---- inner loops


def launches(arch: int, head_dim: int, scheme: cases.Scheme) -> list[offline.Launch]:
    """Returns the scheme's launches that the model can predict. The forward is left out for schemes that differ from
    another scheme only in their backward ("seven", "atomic")."""
    found = cases.Case(arch, head_dim, "bf16", scheme).launches()
    names = set(NAMES)
    if not scheme.deterministic or scheme.recomputed:
        names -= {"attention_forward"}
    return list({launch.key: launch for launch in found if launch.kernel.__name__ in names}.values())


def inspected(compiled) -> tuple[offline.Measured, predict.Block | None]:
    measured = offline.measure(compiled)
    if not measured.model:
        return measured, None
    listing = sass.disassemble(compiled.asm["cubin"], offline.tool("nvdisasm"))
    return measured, predict.block(listing, measured.model)


def loop_figures(loop: predict.Loop, products: float | None, tile_bytes: float = 0) -> dict[str, str]:
    figures = {"clocks": f"{loop.clocks:.0f}"}
    if products:
        figures["tensor"] = f"{loop.tensor_share(products):.1%}"
    if tile_bytes:
        figures["B/clk"] = f"{loop.bytes_per_clock(tile_bytes):.1f}"
    return figures | {f"% {name}": f"{100 * share:.0f}" for name, share in loop.waits.items()}


class Kernel:
    """Holds a compiled kernel of a scheme and the clocks of its block."""

    def __init__(self, scheme: cases.Scheme, launch: offline.Launch, measured: offline.Measured, block: predict.Block):
        self.scheme, self.launch, self.measured, self.block = scheme, launch, measured, block
        self.name, self.variant = launch.kernel.__name__, launch.kwargs["VARIANT"]

    @property
    def key(self) -> tuple[int, int, str, str]:
        return self.launch.arch, self.variant.head_dim, self.scheme.name, self.name

    def row(self) -> dict[str, str]:
        m, decoding = self.measured, self.name == "attention_decode"
        kinds = not self.scheme.deterministic, self.launch.stores_scores
        products = predict.useful_products(self.name, self.variant, *kinds)
        return {
            "kernel": NAMES[self.name],
            "scheme": self.scheme.name,
            "arch": f"sm_{self.launch.arch}",
            "D": str(self.variant.head_dim),
            "tile": f"{self.variant.block_m} x {self.variant.block_n}",
            "warps": str(m.warps),
            "stages": str(m.stages),
            "regs": str(m.registers),
            "local": str(m.loop.get("local", 0)),
            "blocks/SM": str(m.model.blocks),
            **loop_figures(m.model, products, predict.cache_bytes(self.variant, self.scheme.bits) if decoding else 0),
        }


def kernels(archs, head_dims, schemes, jobs: int) -> list[Kernel]:
    """Compiles and simulates the kernels, and returns them. Leaves out kernels to which the model does not apply."""
    chosen = [
        (scheme, launch)
        for arch in archs
        for head_dim in head_dims
        for scheme in schemes
        for launch in launches(arch, head_dim, scheme)
    ]
    found: list[Kernel | None] = [None] * len(chosen)
    print(f"compiling and simulating {len(chosen)} kernels, some seconds each (--jobs {jobs})", flush=True)
    compiled = offline.compile_all([launch for _, launch in chosen], jobs, inspected)
    for done, (at, result, _) in enumerate(compiled, 1):
        if sys.stderr.isatty():
            print(f"\r{done}/{len(chosen)}", end="" if done < len(chosen) else "\n", file=sys.stderr, flush=True)
        if isinstance(result, str):
            raise SystemExit(f"{chosen[at][1].kernel.__name__}: {result}")
        measured, block = result
        found[at] = Kernel(*chosen[at], measured, block) if block else None
    return [kernel for kernel in found if kernel]


# ---- FlashAttention-2


def their_rows(path: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        library, _ = peers.library(path, Path(folder))
        for peer, registers, listing in peers.found_in(library, 80):
            loop = predict.inner_loop(listing, 80, registers, peer.shared, peer.warps, whole_tiles=True)
            block = predict.block(listing, loop, whole_tiles=True)
            yield {
                "step": peer.step,
                "D": str(peer.head_dim),
                "block_m": str(peer.block_m),
                "block_n": str(peer.block_n),
                "regs": str(registers),
                "blocks/SM": str(loop.blocks),
                "fixed": f"{block.fixed:.0f}",
                "inner": f"{block.inner:.0f}",
                **loop_figures(loop, peer.products),
            }


def their_seconds(rows: list[dict[str, str]], problem: waves.Problem, device: waves.Device) -> tuple[float, float]:
    """Returns FlashAttention-2's seconds for (forward, backward).

    The masked tiles of its forward are unrolled, so they are part of the fixed clocks. The forward first starts the
    query tiles with the fewest keys, and the backward first starts the key tiles with the most queries. The backward
    also reads the output and its gradient, zeroes a float32 sum and converts it.
    """
    of_step = {row["step"]: row for row in rows if int(row["D"]) == problem.head_dim}
    times = {}
    for step, lengths_of in (("forward", waves.query_tile_lengths), ("backward", waves.key_tile_lengths)):
        row = of_step[step]
        block_m, block_n, resident = (int(row[name]) for name in ("block_m", "block_n", "blocks/SM"))
        inner = float(row["inner"])
        block = predict.Block(float(row["fixed"]), inner, 0 if step == "forward" else inner, resident)
        lengths = lengths_of(block, problem, block_m, block_n)
        times[step] = waves.seconds(device, lengths, resident, problem.batch * problem.heads)
    return times["forward"], times["backward"] + waves.copy_seconds(device, 7 * problem.tensor_bytes)


# ---- whole calls


def our_seconds(
    found: dict[tuple, Kernel], scheme: cases.Scheme, problem: waves.Problem, device: waves.Device
) -> tuple[float, float] | None:
    """Returns our kernels' seconds for (forward, backward), or None if `found` lacks a kernel. The forward includes the
    rotation of keys that precedes it, and the backward includes the rotation of queries."""
    every_head = problem.batch * problem.heads
    bands = len(scheme.rotary(problem.head_dim).bands_for(True))
    passes = [("attention_grad_kv", waves.key_tile_lengths), ("attention_grad_q", waves.query_tile_lengths)]
    # Four kinds of tensors are moved once: q, its rotated copy for every band, the output and the gradient of the
    # output. The kernel of the row statistics reads the output and its gradient.
    copies, layout = 1 + bands + 2, None
    stores = scheme.deterministic and not scheme.recomputed
    if stores and configs.storing_is_faster(80, 2, problem.head_dim, problem.head_dim):
        sizes = problem.seqlen, problem.seqlen, problem.batch, problem.heads, problem.heads, 2
        layout = score_grads.layout_of(*sizes, causal=True, packed=False)
        kernel = found.get((80, problem.head_dim, scheme.name, "attention_grad_kv"))
        key_tiles = -(-problem.seqlen // kernel.variant.block_n) if kernel else 0
        if layout is None or not layout.is_busy(key_tiles, device.multiprocessors):
            scheme, layout = cases.SEVEN[SCHEMES.index(scheme)], None
    if not scheme.deterministic:
        copies += 4 * bands + 1  # the float32 sum of dQ of every band is zeroed and read
        passes = passes[:1]
    forward = SCHEMES[bands - 1]  # the scheme with the same forward kernel
    launched = [(forward, "attention_forward"), *((scheme, name) for name, _ in passes)]
    if any((80, problem.head_dim, each.name, name) not in found for each, name in launched):
        return None

    def seconds(scheme: cases.Scheme, name: str, lengths_of, heads: int = every_head) -> float:
        kernel = found[80, problem.head_dim, scheme.name, name]
        variant = kernel.variant
        lengths = lengths_of(kernel.block, problem, variant.block_m, variant.block_n)
        return waves.seconds(device, sorted(lengths, reverse=True), kernel.block.resident, heads)

    times = [seconds(forward, "attention_forward", waves.query_tile_lengths)]
    times[0] += waves.copy_seconds(device, 2 * problem.tensor_bytes)
    if layout is None:
        times.append(sum(seconds(scheme, *each) for each in passes))
    else:  # the pass of dK and dV writes the gradients of scores while it computes, and the pass of dQ reads them
        counts = [count for _, count in layout.launches(None)]
        panel = 2 * configs.PANEL_ROWS * configs.PANEL_KEYS
        times.append(
            sum(
                max(seconds(scheme, *each, count), waves.copy_seconds(device, count * layout.panels * panel))
                for count in counts
                for each in passes
            )
        )
    times[1] += waves.copy_seconds(device, copies * problem.tensor_bytes)
    return times[0], times[1]


def problem(seqlen: int, head_dim: int, scheme: cases.Scheme | None = None) -> waves.Problem:
    window = cases.WINDOW if scheme and "rerope" in scheme.name else 0
    return waves.Problem(max(1, TOKENS // seqlen), WIDTH // head_dim, seqlen, head_dim, window)


def device_rows(found: dict[tuple, Kernel], theirs: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yields rows of TFLOP/s by length: FlashAttention-2 as predicted and as published, and our schemes. A length has
    no figure if --scheme leaves out a scheme whose kernel it needs."""
    passes = (("forward", 1.0, slice(0, 1)), ("backward", 2.5, slice(1, 2)), ("both", 3.5, slice(0, 2)))
    for head_dim in sorted({*PUBLISHED, *(head_dim for arch, head_dim, *_ in found if arch == 80)}):
        ours = [scheme for scheme in SCHEMES[:6] if (80, head_dim, scheme.name, "attention_grad_kv") in found]
        for scheme in ([None] if theirs and head_dim in PUBLISHED else []) + ours:
            times = {}
            for seqlen in SEQLENS:
                sizes = problem(seqlen, head_dim, scheme)
                seconds = our_seconds(found, scheme, sizes, waves.A100) if scheme else None
                if not scheme:
                    times[seqlen] = their_seconds(theirs, sizes, waves.A100)
                elif seconds:
                    times[seqlen] = seconds
            if not times:
                continue
            for name, factor, part in passes:
                speeds = {
                    seqlen: waves.tflops(problem(seqlen, head_dim), factor, each[part])
                    for seqlen, each in times.items()
                }
                label = {"who": scheme.name if scheme else "FlashAttention-2", "pass": name, "D": str(head_dim)}
                yield label | {str(seqlen): f"{speed:.0f}" for seqlen, speed in speeds.items()}
                if not scheme and name == "both":
                    published = PUBLISHED[head_dim]
                    yield label | {"who": "published"} | {str(at): str(speed) for at, speed in published.items()}
                    errors = {str(at): f"{speeds[at] / speed - 1:+.0%}" for at, speed in published.items()}
                    yield label | {"who": "error of the model"} | errors


def decode_seconds(kernel: Kernel, keys: int, device: waves.Device) -> float:
    """Returns the seconds to decode one token for batch 1 and HEADS_KV key heads. It is the time of the blocks or the
    time of the memory, whichever is longer."""
    block, tiles = kernel.block, -(-keys // kernel.variant.block_n)
    count = splits.choose_splits(HEADS_KV, tiles, device.multiprocessors * block.resident)
    length = block.clocks(-(-tiles // count), 0)
    nbytes = HEADS_KV * keys * predict.cache_bytes(kernel.variant) / kernel.variant.block_n
    blocks = waves.seconds(device, [length] * count, block.resident, HEADS_KV)
    return max(blocks, waves.copy_seconds(device, nbytes))


def cache_rows(found: dict[tuple, Kernel]) -> Iterator[dict[str, str]]:
    """Yields rows of the GB/s that decoding reads, by the number of cached keys."""
    for kernel in found.values():
        if kernel.name == "attention_decode" and kernel.launch.arch == 80 and kernel.variant.head_dim in PUBLISHED:
            per_key = HEADS_KV * predict.cache_bytes(kernel.variant) / kernel.variant.block_n
            speeds = {keys: keys * per_key / decode_seconds(kernel, keys, waves.A100) / 1e9 for keys in CACHES}
            yield {"scheme": kernel.scheme.name, "D": str(kernel.variant.head_dim)} | {
                str(keys): f"{speed:.0f}" for keys, speed in speeds.items()
            }


# ---- the command


def write_csv(path: Path, columns, rows: list[dict[str, str]]) -> None:
    versions = machine.versions()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, ["revision", "triton", *columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"revision": versions["revision"], "triton": versions["triton"], **row} for row in rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="") as lines:
        return list(csv.DictReader(lines))


def order_candidates(folder: Path, options: argparse.Namespace) -> None:
    """Ranks the candidates that the options select. With --publish, writes them into the stored table of all
    candidates."""
    chosen = [
        (family, direction, head_dim, bands)
        for family, arch in candidates.FAMILIES.items()
        for direction in options.direction or candidates.KERNELS
        for head_dim in candidates.HEAD_DIMS
        for bands in candidates.BANDS
        if arch in options.arch and head_dim in options.head_dim
    ]
    rows = candidates.ranking_rows(chosen, options.jobs)
    print_table(candidates.COLUMNS, rows, left=5)
    if options.publish:
        table = folder / ORDER
        rows = candidates.merged(candidates.read_table(table) if table.exists() else [], rows)
        candidates.write_table(folder / ORDER, rows)
        source = Path(__file__).resolve().parents[1] / "python/flashrope/tuning/candidates.py"
        write(source, candidates.with_order(source.read_text(), rows))


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench model", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=[80, 86], help="default: 80 86")
    p.add_argument(
        "--head-dim", type=int, nargs="+", choices=HEAD_DIMS, help="default: 64 128; with --decoding also 256 512"
    )
    p.add_argument(
        "--scheme", nargs="+", choices=[each.name for each in SCHEMES + ON_REQUEST], help="only these schemes"
    )
    p.add_argument("--peers", type=Path, metavar="PATH", help="also read FlashAttention-2, as bench peers does")
    p.add_argument("--decoding", action="store_true", help="instead list what limits decoding, on sm_80 and sm_90")
    p.add_argument("--candidates", action="store_true", help="instead rank the candidates of flashrope tune")
    p.add_argument("--direction", nargs="+", choices=candidates.KERNELS, help="only these candidates")
    p.add_argument("--publish", action="store_true", help=f"write the tables to bench/results/{FOLDER}")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes (default: all cores)")
    options = p.parse_args(argv)
    options.head_dim = options.head_dim or (bounds.HEAD_DIMS if options.decoding else (64, 128))
    if offline.missing_tools():
        p.error(f"missing: {' '.join(offline.missing_tools())}, which are part of Triton's package")
    folder = RESULTS / FOLDER
    complete = not options.scheme and {80, 86} <= set(options.arch) and set(PUBLISHED) <= set(options.head_dim)
    only_wide = min(options.head_dim) > 256 and 80 in options.arch
    if options.publish and not (options.candidates or options.decoding or complete or only_wide):
        p.error("--publish: expected every scheme at head_dim 64 and 128 on sm_80 and sm_86, or only head_dim > 256")
    if options.candidates:
        order_candidates(folder, options)
        return 0
    if options.decoding:
        rows = list(bounds.table([d for d in bounds.HEAD_DIMS if d in options.head_dim], options.jobs))
        print_table(bounds.COLUMNS, rows, left=1)
        if options.publish:
            write_csv(folder / predicted.BOUNDS, bounds.COLUMNS, rows)
        return 0
    theirs = list(their_rows(options.peers)) if options.peers else read_csv(folder / THEIRS)
    chosen = [each for each in SCHEMES + ON_REQUEST if each.name in (options.scheme or [x.name for x in SCHEMES])]
    compiled = kernels(options.arch, options.head_dim, chosen, options.jobs)
    found = {kernel.key: kernel for kernel in compiled}
    loops = [kernel.row() for kernel in compiled]
    whole = list(device_rows(found, theirs))
    cached = list(cache_rows(found))
    for title, columns, rows, left in (
        ("inner loops of FlashAttention-2's kernels: clocks of a pass, and what they go to", THEIR_COLUMNS, theirs, 1),
        ("inner loops of ours", LOOP_COLUMNS, loops, 2),
        ("TFLOP/s on an A100 by seqlen, causal, predicted except for the published rows", DEVICE_COLUMNS, whole, 2),
        ("GB/s of decoding on an A100 by keys in the cache, predicted", CACHE_COLUMNS, cached, 1),
    ):
        if rows:
            print(f"\n{title}")
            print_table(columns, rows, left)
    if options.publish:
        if wide := [row for row in whole if int(row["D"]) > 256]:
            write_csv(folder / WIDE, DEVICE_COLUMNS, wide)
        if complete:
            write_csv(folder / LOOPS, LOOP_COLUMNS, loops)
            write_csv(folder / DEVICE, DEVICE_COLUMNS, [row for row in whole if int(row["D"]) in PUBLISHED])
            write_csv(folder / DECODING, CACHE_COLUMNS, cached)
        if options.peers:
            write_csv(folder / THEIRS, THEIR_COLUMNS, theirs)
    return 0
