"""The compile gate: every Triton kernel the configurations can select, compiled without a GPU, held against ceilings.

    python -m bench gate [--arch 80 90] [--head-dim 64 128] [--quick] [--csv PATH] [--jobs N]

For every case the backend runs on meta tensors: forward and backward, or over a cache. Launches that need the same
machine code are compiled once. Prints one row per compiled kernel and exits with 1 when one does not compile, spills
more than SPILL_CEILINGS allows, asks for more shared memory than a block of its architecture can have, takes more
instructions per tensor-core instruction than bench.ceilings allows, or reads keys and values in pieces of less than 16
bytes. The column "model" is the tensor cores' estimated utilisation on sm_80 (bench.model).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import sys
import time
from collections.abc import Callable

import torch
import triton

from flashrope import Rotary
from flashrope.backends import AttentionCall, CacheCall, CacheLayout
from flashrope.backends import triton as backend
from flashrope.backends.triton import launcher

from . import machine, model
from .ceilings import most_instructions
from .offline import MULTIPROCESSORS, Launch, Measured, caught_launches, compile_all, missing_tools

KERNELS = ("rotate_rows", "attention_forward", "attention_delta", "attention_grad_kv", "attention_grad_q")
DECODE_KERNELS = ("append_rows", "attention_decode", "combine_splits")
CHUNK_KERNELS = ("append_rows", "rotate_cached_rows", "attention_forward")
ORDER = ("rotate_rows", "rotate_cached_rows", *KERNELS[1:], *DECODE_KERNELS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH, SEQLEN, HEADS_Q, HEADS_KV, WINDOW, PAGE_SIZE = 2, 4096, 40, 8, 1024, 256  # neither head count a multiple of 16


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What, beside sizes and type, makes another kernel out of the same source."""

    name: str
    rotary: Callable[[int], Rotary]
    causal: bool = True
    packed: bool = False  # cu_seqlens
    positions: bool = False
    aligned: bool = True  # to 16 bytes
    grad_lse: bool = False
    cache: str = ""  # "contiguous" or "paged": attention over a cache instead
    seqlen_q: int = 1  # over a cache


ONE_BAND = Scheme("rope", Rotary.rope)
TWO_BANDS = Scheme("rerope", lambda head_dim: Rotary.rope(head_dim).rectify(WINDOW))
TWO_SIDED = Scheme("two-sided", TWO_BANDS.rotary, causal=False)
NOPE = Scheme("nope", Rotary.none)
PACKED = Scheme("packed", lambda head_dim: Rotary.rope(head_dim, interleaved=True), packed=True, grad_lse=True)
POSITIONS = Scheme("positions", lambda head_dim: Rotary.rope(head_dim, rotary_dim=head_dim // 2), positions=True)
UNALIGNED = Scheme("unaligned", Rotary.rope, aligned=False)
DECODE = tuple(
    Scheme(f"{scheme.name} {cache}", scheme.rotary, cache=cache)
    for cache in ("contiguous", "paged")
    for scheme in (ONE_BAND, TWO_BANDS)
)
WIDE = Scheme("rerope wide", TWO_BANDS.rotary, cache="paged", seqlen_q=16)  # many rows, as of speculated tokens
CHUNKS = tuple(
    Scheme(f"{scheme.name} {cache} chunk", scheme.rotary, cache=cache, seqlen_q=512)
    for cache in ("contiguous", "paged")
    for scheme in (ONE_BAND, TWO_BANDS)
)
PARTIAL = Scheme(
    "rerope partial",
    lambda head_dim: Rotary.rope(head_dim, rotary_dim=head_dim // 2).rectify(WINDOW),
    cache="contiguous",
)
VARIANTS = (TWO_SIDED, NOPE, PACKED, POSITIONS, UNALIGNED)


@dataclasses.dataclass(frozen=True)
class Case:
    arch: int
    head_dim: int
    dtype: str
    scheme: Scheme

    @property
    def kernels(self) -> set[str]:
        """Those it must launch."""
        if self.scheme.cache:
            return set(CHUNK_KERNELS if self.scheme in CHUNKS else DECODE_KERNELS)
        return set(KERNELS) - ({"rotate_rows"} if self.scheme.name == "nope" else set())

    def launches(self) -> list[Launch]:
        """What forward and backward launch for this case, or one step over a cache."""
        scheme, rows = self.scheme, (BATCH * SEQLEN,) if self.scheme.packed else (BATCH, SEQLEN)

        def tensor(*shape, dtype=DTYPES[self.dtype]):
            return torch.empty(shape, dtype=dtype, device="meta")

        if scheme.cache:
            return self._cache_launches(tensor)

        def heads(count):
            return tensor(*rows, count, self.head_dim + (0 if scheme.aligned else 1))[..., : self.head_dim]

        q, k, v = heads(HEADS_Q), heads(HEADS_KV), heads(HEADS_KV)
        rotary = scheme.rotary(self.head_dim)
        cu_seqlens = tensor(BATCH + 1, dtype=torch.int32) if scheme.packed else None
        positions = tensor(BATCH, SEQLEN, dtype=torch.float32) if scheme.positions else None
        call = AttentionCall(
            rotary, scheme.causal, self.head_dim**-0.5, positions, cu_seqlens, cu_seqlens, SEQLEN, SEQLEN
        )
        with caught_launches(launcher, self.arch) as launches:
            out, lse, rotated_k = backend.forward(q, k, v, call)
            grad_lse = torch.empty_like(lse) if scheme.grad_lse else None
            backend.backward(torch.empty_like(out), grad_lse, q, k, v, out, lse, rotated_k, call)
        return launches

    def _cache_launches(self, tensor) -> list[Launch]:
        scheme, pages = self.scheme, SEQLEN // PAGE_SIZE
        rows = (BATCH, SEQLEN) if scheme.cache == "contiguous" else (BATCH * pages, PAGE_SIZE)
        q, new = (tensor(BATCH, scheme.seqlen_q, heads, self.head_dim) for heads in (HEADS_Q, HEADS_KV))
        cache, seqlens = tensor(*rows, HEADS_KV, self.head_dim), tensor(BATCH, dtype=torch.int32)
        table = tensor(BATCH, pages, dtype=torch.int32) if scheme.cache == "paged" else None
        layout = CacheLayout(seqlens, table, None, scheme.seqlen_q)
        call = CacheCall(scheme.rotary(self.head_dim), scheme.causal, self.head_dim**-0.5, layout)
        with caught_launches(launcher, self.arch) as launches:
            backend.append_to_cache(cache, cache, new, new, layout)
            backend.attention_with_cache(q, cache, cache, call)
        return launches


def cases(quick: bool) -> list[Case]:
    """bf16 with one and two bands on the main architectures; around them, every other choice once, mostly where
    registers are scarcest. fp16 was seen to compile to bf16's figures and sm_89 to sm_86's."""

    def grid(archs, head_dims, dtype, *schemes):
        return [Case(arch, head_dim, dtype, scheme) for arch in archs for head_dim in head_dims for scheme in schemes]

    main = grid((80, 90), (64, 128), "bf16", ONE_BAND, TWO_BANDS, *DECODE, *CHUNKS)
    if quick:
        return main
    wide = grid((80, 90), (256,), "bf16", ONE_BAND) + grid((80,), (256,), "bf16", TWO_BANDS)
    padded = grid((80, 90), (96,), "bf16", ONE_BAND) + grid((80,), (32,), "bf16", ONE_BAND)
    types = grid((80, 90), (128,), "fp16", ONE_BAND) + grid((80,), (64, 128), "fp32", ONE_BAND)
    variants = grid((80,), (128,), "bf16", NOPE, PACKED, POSITIONS) + grid((80,), (64,), "bf16", TWO_SIDED, UNALIGNED)
    small_shared = grid((86,), (64, 128), "bf16", TWO_BANDS) + grid((86,), (128, 256), "bf16", ONE_BAND)
    cache = grid((80, 90), (64, 128), "bf16", WIDE) + grid((80, 90), (96, 256), "bf16", DECODE[0], DECODE[-1])
    cache += (
        grid((80,), (128,), "bf16", PARTIAL)
        + grid((80,), (128,), "fp32", DECODE[-1])
        + grid((86,), (128,), "bf16", DECODE[-1])
    )
    return main + wide + padded + types + variants + small_shared + cache


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Spilled bytes per thread allowed to one kernel; a field left empty holds for all."""

    spill: float
    kernel: str = ""
    arch: int = 0
    above: int = 0  # head_dims larger than this
    head_dim: int = 0
    dtype: str = ""
    scheme: str = ""
    triton: str = ""  # version prefix

    def covers(self, kernel: str, case: Case) -> bool:
        return (
            self.kernel in ("", kernel)
            and self.arch in (0, case.arch)
            and case.head_dim > self.above
            and self.head_dim in (0, case.head_dim)
            and self.dtype in ("", case.dtype)
            and self.scheme in ("", case.scheme.name)
            and triton.__version__.startswith(self.triton)
        )


LISTED = float("inf")  # printed with its figure, not limited
# First match decides. Limited are one and two bands in half precision, head_dim 64 and 128, on sm_80 and sm_90.
SPILL_CEILINGS = (
    Ceiling(LISTED, above=128),  # no tile of 256 channels holds its accumulators in 255 registers
    *(Ceiling(LISTED, head_dim=head_dim) for head_dim in (32, 96)),
    *(Ceiling(LISTED, scheme=scheme.name) for scheme in VARIANTS),
    *(Ceiling(LISTED, arch=arch) for arch in (86, 89)),
    Ceiling(LISTED, dtype="fp32"),
    Ceiling(64, "attention_grad_kv", arch=80, above=64),
    Ceiling(0),
)


@dataclasses.dataclass
class Row:
    """One compiled kernel and the cases that run it."""

    launch: Launch
    cases: list[Case]
    result: Measured | str | None = None
    seconds: float = 0  # of processor time

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
            "arch": f"sm_{first.arch}",
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
            first.arch,
            tuple(DTYPES).index(first.dtype),
            first.head_dim,
            self.label["bands"],
        )

    def figures(self) -> dict[str, str]:
        if isinstance(self.result, str):
            return {"warps": "fails"}
        m, limits = self.result, MULTIPROCESSORS[self.launch.arch]
        figures = {
            "warps": m.warps,
            "stages": m.stages,
            "regs": m.registers,
            "spill B": m.spill_stores,
            "shared KB": f"{m.shared / 1024:g}",
            "blocks/SM": limits.resident_blocks(m.registers, m.shared, m.warps),
        }
        if m.loop:
            figures |= {"MMA": m.loop["mma"], "instr/MMA": f"{m.loop['total'] / m.loop['mma']:.2f}"}
        if m.loop and self.launch.arch == model.ARCH:
            figures["model"] = f"{model.utilisation(m.loop):.0%}"
        if m.loop and self.rotates_no_keys:
            figures["16 B loads"] = m.loop.get("global 16 B", 0)
        return {name: str(value) for name, value in figures.items()}

    @property
    def rotates_no_keys(self) -> bool:
        """Its hot loop does not: of memory it reads keys and values alone, and page numbers."""
        first = self.cases[0]
        rotates_none = (
            self.kernel == "attention_forward"
            and first.scheme.aligned
            or self.kernel == "attention_decode"
            and "rerope" in first.scheme.name
        )
        return rotates_none and first.head_dim in (64, 128)

    def violations(self) -> list[str]:
        name = " ".join(self.label.values())
        if isinstance(self.result, str):
            return [f"{name}: does not compile: {self.result}"]
        first, found = self.cases[0], []
        ceiling = next(c.spill for c in SPILL_CEILINGS if c.covers(self.kernel, first))
        if self.result.spill_stores > ceiling:
            found.append(f"{name}: spills {self.result.spill_stores} bytes per thread, the ceiling is {ceiling}")
        limit = MULTIPROCESSORS[first.arch].shared_per_block
        if self.result.shared > limit:
            found.append(
                f"{name}: needs {self.result.shared} bytes of shared memory, a block of sm_{first.arch} has {limit}"
            )
        most = (
            most_instructions(self.kernel, first.scheme.name, first.arch, first.head_dim)
            if first.dtype == "bf16"
            else None
        )
        if self.result.loop and most is not None and self.result.loop["total"] > most * self.result.loop["mma"]:
            found.append(
                f"{name}: {self.result.loop['total'] / self.result.loop['mma']:.2f} instructions per tensor-core instruction in "
                f"the hot loop, the ceiling is {most}"
            )
        if self.result.loop and self.rotates_no_keys and first.dtype != "fp32":
            loads = 2 * self.launch.kwargs["SHAPE"].block_n * first.head_dim * 2 // (16 * 32 * self.result.warps)
            wide, narrow = (
                self.result.loop.get("global 16 B", 0),
                self.result.loop.get("global", 0) - self.result.loop.get("global 16 B", 0),
            )
            if wide != loads or (narrow and first.scheme.cache != "paged"):
                found.append(
                    f"{name}: {wide} loads of 16 bytes and {narrow} narrower, keys and values need {loads} and none"
                )
        return found


def plan(chosen: list[Case]) -> list[Row]:
    """One row per kernel to compile. Raises when a case does not reach every pass it must."""
    rows = {}
    for case in chosen:
        launches = case.launches()
        absent = case.kernels - {launch.kernel.__name__ for launch in launches}
        if absent:
            raise RuntimeError(f"{case}: launched no {', '.join(sorted(absent))}")
        for key, launch in {launch.key: launch for launch in launches}.items():
            rows.setdefault(key, Row(launch, [])).cases.append(case)
    return list(rows.values())


COLUMNS = (
    "kernel",
    "arch",
    "D",
    "dtype",
    "bands",
    "scheme",
    "warps",
    "stages",
    "regs",
    "spill B",
    "shared KB",
    "blocks/SM",
    "MMA",
    "instr/MMA",
    "model",
    "16 B loads",
)


def print_table(rows: list[Row]) -> None:
    lines = [COLUMNS] + [tuple((row.label | row.figures()).get(column, "-") for column in COLUMNS) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(
                cell.ljust(width) if i < 6 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )


def write_csv(path: str, rows: list[Row]) -> None:
    """The table and the mix of the hot loop; the cases a kernel serves, by scheme."""
    classes = sorted({name for row in rows if isinstance(row.result, Measured) for name in row.result.loop or ()})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(
            file,
            ["revision", "triton", *COLUMNS, *(f"loop {name}" for name in classes), "compile s", "schemes"],
            restval="",
        )
        writer.writeheader()
        for row in rows:
            loop = row.result.loop or {} if isinstance(row.result, Measured) else {}
            writer.writerow(
                {"revision": machine.revision(), "triton": triton.__version__}
                | row.label
                | row.figures()
                | {f"loop {name}": n for name, n in loop.items()}
                | {
                    "compile s": f"{row.seconds:.1f}",
                    "schemes": " ".join(dict.fromkeys(case.scheme.name for case in row.cases)),
                }
            )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench gate", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(MULTIPROCESSORS), help="only these architectures")
    parser.add_argument("--head-dim", type=int, nargs="+", help="only these head_dims")
    parser.add_argument(
        "--quick", action="store_true", help="sm_80 and sm_90, head_dim 64 and 128, bf16, one and two bands"
    )
    parser.add_argument(
        "--csv", metavar="PATH", help="write the table there, with the instruction mix of the hot loops"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes")
    options = parser.parse_args(argv)
    chosen = [
        case
        for case in cases(options.quick)
        if (not options.arch or case.arch in options.arch)
        and (not options.head_dim or case.head_dim in options.head_dim)
    ]
    if not chosen:
        parser.error("no case has this architecture and head_dim")
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set; interpreted kernels cannot be compiled")
    started = time.monotonic()
    rows = plan(chosen)
    print(f"Triton {triton.__version__}: {len(rows)} kernels for {len(chosen)} cases", flush=True)
    if missing := missing_tools():
        print(
            f"{' and '.join(missing)} not in this Triton package: registers and spills come from ptxas -v, loops are not counted"
        )
    done = 0
    for index, rows[index].result, rows[index].seconds in compile_all([row.launch for row in rows], options.jobs):
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{len(rows)}", end="", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row.order)
    print_table(rows)
    if options.csv:
        write_csv(options.csv, rows)
    violations = [line for row in rows for line in row.violations()]
    print(f"{len(rows)} kernels in {time.monotonic() - started:.0f} s, {len(violations)} over their ceilings")
    for line in violations:
        print(line)
    return 1 if violations else 0
