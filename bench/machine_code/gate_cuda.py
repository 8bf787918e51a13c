"""Compiles csrc/decode.cu with nvcc, without a GPU, and checks spills, shared memory and the width of copies.

The command prints one line per kernel. It exits with 1 if a kernel for head_dim up to 128 spills, or needs more shared
memory for two bands than a block can have, or copies K and V in pieces of less than 16 bytes. Without nvcc it prints
that nothing was checked and exits with 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import sass
from .architectures import MULTIPROCESSORS, NVIDIA
from .offline import tool
from .table import print_table

SOURCE = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{SOURCE}")  # the flags of setup.py
NO_SPILL_UP_TO = 128  # head_dim. At 256 a thread holds 128 accumulators, so spills are only listed.
MAX_BANDS = 4
LAUNCH = """
#include <cstdio>
#include <initializer_list>

#include "decode.h"
int main() {
  for (int d : {64, 96, 128, 256}) {
    std::printf("%d %d", d, flashrope::warps_for(d));
    for (int bands = 1; bands <= 4; ++bands) std::printf(" %zu", flashrope::shared_bytes(d, bands));
    std::printf("\\n");
  }
}
"""
_KERNEL = re.compile(r"(?:split|combine|append)_kernel")
_SPLIT = re.compile(r"split_kernelINS_\d+(B?)Float16ELi(\d+)ELb([01])E")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Holds the values that decode.h computes for one head_dim. shared: bytes of shared memory for 1, 2, ... bands."""

    warps: int
    shared: tuple[int, ...]


@dataclasses.dataclass
class Kernel:
    arch: int
    name: str  # mangled
    registers: int
    spill: int  # spilled bytes per thread, stores and loads added
    copies: tuple[int, ...] = ()  # bytes of every asynchronous copy instruction
    shape: Shape | None = None  # only for the split kernel

    @property
    def label(self) -> dict[str, str]:
        if split := _SPLIT.search(self.name):
            return {
                "kernel": "split",
                "arch": f"sm_{self.arch}",
                "D": split[2],
                "dtype": "bf16" if split[1] else "fp16",
                "pairs": "interleaved" if split[3] == "1" else "halves",
            }
        kernel = _KERNEL.search(self.name)[0].removesuffix("_kernel")
        dtype = {"combine": "bf16" if "BFloat16" in self.name else "fp16"}.get(kernel, "-")
        return {"kernel": kernel, "arch": f"sm_{self.arch}", "D": "-", "dtype": dtype, "pairs": "-"}

    @property
    def head_dim(self) -> int:
        return int(self.label["D"]) if self.shape else 0

    def figures(self) -> dict[str, str]:
        figures = {"regs": self.registers, "spill B": self.spill}
        if self.shape:
            limits = MULTIPROCESSORS[self.arch]
            fitting = sum(shared <= limits.shared_per_block for shared in self.shape.shared)
            figures |= {
                "warps": self.shape.warps,
                "shared KB, 2 bands": f"{self.shape.shared[1] / 1024:.1f}",
                "bands that fit": f"{fitting}{'+' if fitting == MAX_BANDS else ''}",
                "blocks/SM": limits.resident_blocks(self.registers, self.shape.shared[1], self.shape.warps),
                "copies": len(self.copies),
                "bytes/copy": "/".join(map(str, sorted(set(self.copies)))) or "none",
            }
        return {name: str(value) for name, value in figures.items()}

    def violations(self) -> list[str]:
        name, found = " ".join(self.label.values()), []
        if self.spill and self.head_dim <= NO_SPILL_UP_TO:
            found.append(f"{name}: spills {self.spill} bytes per thread")
        if self.shape:
            limit = MULTIPROCESSORS[self.arch].shared_per_block
            if self.shape.shared[1] > limit:
                found.append(
                    f"{name}: needs {self.shape.shared[1]} bytes of shared memory, a block of sm_{self.arch} has "
                    f"{limit}"
                )
            if set(self.copies) != {16}:
                found.append(f"{name}: copies K and V by {sorted(set(self.copies)) or 'no'} bytes, expected 16")
        return found


LABELS = ("kernel", "arch", "D", "dtype", "pairs")
COLUMNS = (
    *LABELS,
    *("warps", "regs", "spill B", "shared KB, 2 bands", "bands that fit", "blocks/SM", "copies", "bytes/copy"),
)


def ptxas_report(text: str) -> dict[str, tuple[int, int]]:
    """Returns {kernel: (registers, spilled bytes)} from the output of ``nvcc -Xptxas -v``. Spilled bytes are those
    stored plus those loaded."""
    found, name, spill = {}, "", 0
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name, spill = match[1], 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spill = int(match[1]) + int(match[2])
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            found[name] = int(match[1]), spill
    return found


def functions(disassembly: str) -> dict[str, sass.Listing]:
    """Returns the listing of every kernel in the output of ``nvdisasm -c``."""
    parts = re.split(r"^\.text\.(\w+):$", disassembly, flags=re.MULTILINE)
    return {name: sass.parse(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def copy_bytes(opcodes) -> tuple[int, ...]:
    """Returns how many bytes every cp.async copies per thread: LDGSTS.E.BYPASS.128 copies 16, LDGSTS.E copies 4."""
    sizes = []
    for opcode in opcodes:
        if opcode.startswith("LDGSTS"):
            size = re.search(r"\.(64|128)\b", opcode)
            sizes.append(int(size[1]) // 8 if size else 4)
    return tuple(sizes)


def shapes(cxx: str, folder: Path) -> dict[int, Shape]:
    """Returns the shapes that decode.h computes, by running a small program that includes it."""
    (folder / "launch.cpp").write_text(LAUNCH)
    subprocess.run([cxx, "-std=c++17", f"-I{SOURCE}", folder / "launch.cpp", "-o", folder / "launch"], check=True)
    lines = subprocess.run([folder / "launch"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {d: Shape(warps, tuple(shared)) for d, warps, *shared in (map(int, line.split()) for line in lines)}


def compile_kernels(arch: int, nvcc: str, nvdisasm: str, by_head_dim: dict[int, Shape], folder: Path) -> list[Kernel]:
    cubin = folder / f"sm_{arch}.cubin"
    compiled = subprocess.run(
        [nvcc, *FLAGS, f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", SOURCE / "decode.cu", "-o", cubin],
        capture_output=True,
        text=True,
    )
    if compiled.returncode:
        raise SystemExit(f"nvcc for sm_{arch}:\n{compiled.stderr}")
    listings = functions(subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout)
    kernels = []
    for name, (registers, spill) in ptxas_report(compiled.stdout + compiled.stderr).items():
        copies, split = copy_bytes(listings[name].opcodes), _SPLIT.search(name)
        shape = by_head_dim[int(split[2])] if split else None
        kernels.append(Kernel(arch, name, registers, spill, copies, shape))
    return kernels


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench gate-cuda", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=NVIDIA, default=[80, 90], help="default: 80 90")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes")
    options = parser.parse_args(argv)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("gate-cuda: nvcc is not on PATH; the CUDA kernels were not compiled, and nothing was checked")
        return 0
    cxx, nvdisasm = shutil.which(os.environ.get("CXX", "c++")), shutil.which("nvdisasm") or tool("nvdisasm")
    if cxx is None or nvdisasm is None:
        print(f"gate-cuda: needs {'a C++ compiler' if cxx is None else 'nvdisasm'} as well as nvcc")
        return 1
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folder, by_head_dim = Path(name), shapes(cxx, Path(name))
        compiled = pool.map(lambda arch: compile_kernels(arch, nvcc, nvdisasm, by_head_dim, folder), options.arch)
        kernels = [kernel for kernels in compiled for kernel in kernels]
    kernels.sort(key=lambda each: (each.label["kernel"] != "split", each.arch, each.head_dim, *each.label.values()))
    print_table(COLUMNS, [kernel.label | kernel.figures() for kernel in kernels], left=len(LABELS))
    violations = [line for kernel in kernels for line in kernel.violations()]
    print(f"{len(kernels)} kernels, {len(violations)} over their limits")
    for line in violations:
        print(line)
    return 1 if violations else 0
