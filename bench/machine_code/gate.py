"""Runs the compile gate: compiles every Triton kernel that configs.py can select and checks the machine code, without a
GPU.

    python -m bench gate [--target sm_80 gfx942] [--targets all] [--head-dim 64 128] [--scheme NAME] [--quick]
                         [--csv PATH] [--jobs N]

For every case the backend runs on meta tensors: either forward and backward, or one call with a KV cache. Launches that
need the same machine code are compiled once. The command prints one row per compiled kernel. It exits with 1 if a
kernel

- does not compile,
- spills more than ``limits.SPILL_LIMITS`` allows in its tile loops or in total,
- needs more shared memory than a block of its architecture can have,
- has more instructions per tensor-core instruction than ``limits.INSTRUCTION_LIMITS`` allows,
- has more barriers in the hot loop than ``limits.GROUP_BARRIERS`` allows, if each warp has keys of its own,
- reads keys and values in pieces of less than 16 bytes,
- has wgmma that ptxas lets wait for one another (its messages C7510 to C7518), except in ``limits.SERIALISED``,
- accumulates dQ with the PTX instruction ``red`` although several threads hold the same element, or
- reads keys and values of a paged cache into fewer than two slots of shared memory, so that nothing is prefetched. One
  slot is enough if two blocks with a two-stage tile fit on a multiprocessor.

For AMD's GPUs only the first three conditions are checked. Their kernels are printed in a table of their own.

The column "model" gives the share of the inner loop's time in which the tensor cores work on needed products. The issue
model predicts this share for sm_80, sm_86 and sm_89 (module ``issue``, ``python -m bench model``).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import sys
import time
from pathlib import Path

import triton
from flashrope.console.files import replacing

from .. import machine
from . import amdgcn, predict
from .architectures import ALL, AMD, MULTIPROCESSORS, SHARED, name_of, parse
from .cases import DTYPES, ORDER, PLACED_MAPS, Case, cases
from .limits import GROUP_BARRIERS, max_instructions, may_serialise, spill_limit
from .offline import Launch, Measured, compile_all, missing_tools
from .table import print_table


@dataclasses.dataclass
class Row:
    """Holds a compiled kernel and the cases that run it."""

    launch: Launch
    cases: list[Case]
    result: Measured | amdgcn.Measured | str | None = None
    seconds: float = 0  # processor time

    @property
    def kernel(self) -> str:
        return self.launch.kernel.__name__

    @property
    def label(self) -> dict[str, str]:
        first = self.cases[0]
        bands = sorted({len(case.scheme.rotary(case.head_dim).bands_for(case.scheme.causal)) for case in self.cases})
        schemes = dict.fromkeys(case.scheme.name for case in self.cases)
        return {
            "kernel": self.kernel,
            "arch": name_of(first.arch),
            "D": str(first.head_dim),
            "dtype": first.dtype,
            "bands": "/".join(map(str, bands)),
            "scheme": next(iter(schemes)) + (f" +{len(schemes) - 1}" if len(schemes) > 1 else ""),
        }

    @property
    def order(self) -> tuple:
        first = self.cases[0]
        return (
            ORDER.index(self.kernel),
            ALL.index(first.arch),
            tuple(DTYPES).index(first.dtype),
            first.head_dim,
            self.label["bands"],
        )

    def figures(self) -> dict[str, str]:
        if isinstance(self.result, str):
            return {"warps": "fails"}
        if isinstance(self.result, amdgcn.Measured):
            return self.result.figures()
        m, limits = self.result, MULTIPROCESSORS[self.launch.arch]
        figures = {
            "warps": m.warps,
            "stages": m.stages,
            "regs": m.registers,
            "spill B": m.spill_stores,
            "in loops": "-" if m.loop_spills is None else m.loop_spills,
            "shared KB": f"{m.shared / 1024:g}",
            "blocks/SM": limits.resident_blocks(m.registers, m.shared, m.warps),
        }
        if m.loop:
            figures |= {"MMA": m.loop["mma"], "instr/MMA": f"{m.loop['total'] / m.loop['mma']:.2f}"}
        atomic = not self.cases[0].scheme.deterministic
        kinds = self.launch.kwargs["VARIANT"], atomic, self.launch.stores_scores
        if m.model and (products := predict.useful_products(self.kernel, *kinds)):
            figures["model"] = f"{m.model.tensor_share(products):.0%}"
        if m.slots is not None:
            figures["slots"] = m.slots
        if m.loop and self.rotates_no_keys:
            figures["16 B loads"] = m.loop.get("global 16 B", 0)
        return {name: str(value) for name, value in figures.items()}

    @property
    def rotates_no_keys(self) -> bool:
        """Whether the kernel's hot loop must read keys, values and page numbers only: no cos, no sin, no positions."""
        first = self.cases[0]
        forward = self.kernel in ("attention_forward", "attention_chunks") and first.scheme.aligned
        decode = self.kernel == "attention_decode" and "rerope" in first.scheme.name
        plain = not first.scheme.quantized and not first.scheme.placed
        return (forward or decode) and first.head_dim in (64, 128) and plain

    @property
    def prefetches_pages(self) -> bool:
        """Whether the kernel must prefetch pages. It must if it reads a paged cache in a 16-bit type. float32 is exempt
        because its tiles have one stage."""
        first = self.cases[0]
        return (
            self.kernel in ("attention_chunks", "attention_decode")
            and first.scheme.cache == "paged"
            and first.dtype != "fp32"
            and first.scheme not in PLACED_MAPS  # cos and sin of every key fill shared memory, so only one slot fits
        )

    @property
    def needed_slots(self) -> int:
        """Returns how many slots for keys and values a kernel over a paged cache needs. It needs 2. For a two-stage
        tile 1 is enough if two blocks fit on a multiprocessor, because one block then computes while the other
        waits."""
        m = self.result
        resident = MULTIPROCESSORS[self.launch.arch].resident_blocks(m.registers, m.shared, m.warps)
        return 1 if m.stages == 2 and resident > 1 else 2

    def violations(self) -> list[str]:
        if isinstance(self.result, str):
            found = [f"does not compile: {self.result}"]
        elif isinstance(self.result, amdgcn.Measured):
            allowed = spill_limit(self.kernel, self.cases[0])
            found = self.result.violations(allowed.spill, allowed.in_loops, SHARED[self.launch.arch])
        else:
            found = self._memory_violations() + self._loop_violations()
        return [f"{' '.join(self.label.values())}: {line}" for line in found]

    def _memory_violations(self) -> list[str]:
        first, found = self.cases[0], []
        limits = spill_limit(self.kernel, first)
        if self.result.spill_stores > limits.spill:
            found.append(f"spills {self.result.spill_stores} bytes per thread, the limit is {limits.spill}")
        if (self.result.loop_spills or 0) > limits.in_loops:
            touched = self.result.loop_spills
            found.append(
                f"touches {touched} spilled bytes per thread in its tile loops, the limit is {limits.in_loops}"
            )
        times = (self.result.loop or {}).get("local", 0)
        if times > limits.in_hot_loop:
            found.append(f"touches spilled registers {times} times in its hot loop, the limit is {limits.in_hot_loop}")
        limit = MULTIPROCESSORS[first.arch].shared_per_block
        if self.result.shared > limit:
            found.append(
                f"needs {self.result.shared} bytes of shared memory, a block of {name_of(first.arch)} has {limit}"
            )
        return found

    def _loop_violations(self) -> list[str]:
        first, loop, found = self.cases[0], self.result.loop, []
        if self.result.serialised and not may_serialise(self.kernel, first):
            found.append(f"ptxas lets wgmma wait: {self.result.serialised}")
        if self.result.held_once is False:
            found.append("adds dQ up by red where several threads have the same element, or in an unknown layout")
        if not loop:
            return found
        slots = self.result.slots or 0
        if self.prefetches_pages and slots < self.needed_slots:
            found.append(f"{slots} slots for keys and values of a paged cache, at least {self.needed_slots} needed")
        if self.kernel == "attention_decode" and self.launch.kwargs["VARIANT"].key_groups > 1:
            barriers, most = loop.get("barrier", 0), GROUP_BARRIERS[not self.rotates_no_keys]
            if barriers > most:
                found.append(f"{barriers} barriers in the hot loop with groups of keys, the limit is {most}")
        allowed = max_instructions(self.kernel, first)
        if allowed is not None and loop["total"] > allowed * loop["mma"]:
            ratio = loop["total"] / loop["mma"]
            found.append(
                f"{ratio:.2f} instructions per tensor-core instruction in the hot loop, the limit is {allowed}"
            )
        if self.rotates_no_keys and first.dtype != "fp32":
            tiles = 1 if first.scheme.shared_values else 2  # values that are channels of the keys need no load
            needed = tiles * self.launch.kwargs["VARIANT"].block_n * first.head_dim * 2 // (16 * 32 * self.result.warps)
            wide = loop.get("global 16 B", 0)
            narrow = loop.get("global", 0) - wide
            if wide != needed or (narrow and first.scheme.cache != "paged"):
                found.append(
                    f"{wide} loads of 16 bytes and {narrow} narrower loads of keys and values, expected {needed} loads "
                    "of 16 bytes and no others"
                )
        return found


def plan(chosen: list[Case]) -> list[Row]:
    """Returns one row per kernel to compile. Raises RuntimeError if a case does not launch all of its kernels."""
    rows = {}
    for case in chosen:
        launches = case.launches()
        absent = case.kernels - {launch.kernel.__name__ for launch in launches}
        if absent:
            raise RuntimeError(f"{case}: launched no {', '.join(sorted(absent))}")
        for key, launch in {launch.key: launch for launch in launches}.items():
            rows.setdefault(key, Row(launch, [])).cases.append(case)
    return list(rows.values())


LABELS = ("kernel", "arch", "D", "dtype", "bands", "scheme")
FIGURES = (
    "warps",
    "stages",
    "regs",
    "spill B",
    "in loops",
    "shared KB",
    "slots",
    "blocks/SM",
    "MMA",
    "instr/MMA",
    "model",
    "16 B loads",
)
COLUMNS = LABELS + FIGURES


def write_csv(path: str, rows: list[Row]) -> None:
    """Writes the table, the instruction mix of the hot loops, and the schemes that run each kernel."""
    mixes = [getattr(row.result, "loop", None) or {} for row in rows]
    classes = sorted({name for mix in mixes for name in mix})
    figures = dict.fromkeys((*COLUMNS, *(name for row in rows for name in row.figures())))
    columns = ["revision", "triton", *figures, *(f"loop {name}" for name in classes), "compile s", "schemes"]
    with replacing(Path(path)) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row, mix in zip(rows, mixes, strict=True):
            schemes = " ".join(dict.fromkeys(case.scheme.name for case in row.cases))
            writer.writerow(
                {"revision": machine.revision(), "triton": triton.__version__}
                | row.label
                | row.figures()
                | {f"loop {name}": count for name, count in mix.items()}
                | {"compile s": f"{row.seconds:.1f}", "schemes": schemes}
            )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench gate", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--target",
        "--arch",
        dest="arch",
        type=parse,
        nargs="+",
        metavar="TARGET",
        help=f"compile only for these targets: {' '.join(map(name_of, ALL))}; 80 is short for sm_80",
    )
    parser.add_argument(
        "--targets",
        choices=("short", "all"),
        default="short",
        help="what to compile for sm_89, sm_100, sm_120, gfx942 and gfx950. short (default): head_dim 128 with the "
        "main schemes; all: every case that is compiled for sm_80, sm_86 or sm_90",
    )
    parser.add_argument("--head-dim", type=int, nargs="+", help="compile only these head_dims")
    parser.add_argument("--scheme", nargs="+", help="compile only these schemes, named as in the table")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile fewer cases. sm_80 and sm_90: bf16 at head_dim 64 and 128 with one and two bands, and decoding "
        "over quantized caches; the other targets: forward, backward and decoding at head_dim 128",
    )
    parser.add_argument("--csv", metavar="PATH", help="also write the table and the instruction mix of the hot loops")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes (default: all cores)")
    options = parser.parse_args(argv)
    chosen = [
        case
        for case in cases(options.quick, options.targets == "all")
        if (not options.arch or case.arch in options.arch)
        and (not options.head_dim or case.head_dim in options.head_dim)
        and (not options.scheme or case.scheme.name in options.scheme)
    ]
    if not chosen:
        parser.error("no case has this architecture, head_dim and scheme")
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set; interpreted kernels cannot be compiled")
    started = time.monotonic()
    rows = plan(chosen)
    print(f"Triton {triton.__version__}: {len(rows)} kernels for {len(chosen)} cases", flush=True)
    if any(row.launch.arch not in AMD for row in rows) and (missing := missing_tools()):
        print(
            f"this Triton package lacks {' and '.join(missing)}: registers and spills come from ptxas -v, and loops "
            "are not counted"
        )
    compiled = compile_all([row.launch for row in rows], options.jobs)
    for done, (index, result, seconds) in enumerate(compiled, 1):
        rows[index].result, rows[index].seconds = result, seconds
        if sys.stderr.isatty():
            print(f"\r{done}/{len(rows)}", end="", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row.order)
    for columns, of_amd in (COLUMNS, False), (LABELS + amdgcn.COLUMNS, True):
        if of_vendor := [row for row in rows if (row.launch.arch in AMD) is of_amd]:
            print_table(columns, [row.label | row.figures() for row in of_vendor], left=len(LABELS))
    if options.csv:
        write_csv(options.csv, rows)
    violations = [line for row in rows for line in row.violations()]
    print(f"{len(rows)} kernels in {time.monotonic() - started:.0f} s, {len(violations)} over their limits")
    for line in violations:
        print(line)
    return 1 if violations else 0
