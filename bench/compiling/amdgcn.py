"""What the AMD backend's assembly says about a compiled kernel: registers, spills, and its tile loops.

Needs no ROCm: Triton's package assembles by itself, and the figures are in the text (``.vgpr_count`` and others of the
metadata behind the code).
"""

from __future__ import annotations

import dataclasses
import re

from flashrope.backends.splits import multiprocessor

from . import sass

_INSTRUCTION = re.compile(r"^\t([a-z][a-z0-9_]*)(?:\s+([^;]*))?")
_LABEL = re.compile(r"^(\.LBB\w+):")


@dataclasses.dataclass(frozen=True)
class Measured:
    """registers: vector registers of a lane, accumulation registers included; agprs: those among them. spilled: vector
    registers in scratch memory. shared: bytes of local data share (LDS). waves: of a SIMD, as registers and LDS allow.
    loop, loop_spills: as in ``offline.Measured``."""

    registers: int
    agprs: int
    spilled: int
    spilled_scalars: int  # to lanes of vector registers, not to memory
    shared: int
    waves: int
    warps: int
    stages: int
    loop: dict[str, int]
    loop_spills: int


def measure(compiled) -> Measured:
    text, metadata = compiled.asm["amdgcn"], compiled.metadata

    def figure(name: str) -> int:
        return int(re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)$", text, re.MULTILINE)[1])

    registers, code = figure("vgpr_count"), listing(text)
    blocks = multiprocessor(metadata.target.arch).resident_blocks(registers, metadata.shared, metadata.num_warps)
    return Measured(
        registers,
        figure("agpr_count"),
        figure("vgpr_spill_count"),
        figure("sgpr_spill_count"),
        metadata.shared,
        blocks * metadata.num_warps // 4,
        metadata.num_warps,
        metadata.num_stages,
        dict(sass.hot_loop(code) or {}),
        sass.local_bytes_in_loops(code),
    )


def listing(text: str) -> sass.Listing:
    """Assembly as an instruction listing. A wave's instructions take its classes from ``sass.CLASSES``."""
    opcodes, labels, branches = [], {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.match(line):
            opcode, operands = instruction[1], instruction[2] or ""
            if opcode.startswith(("s_cbranch", "s_branch")):
                branches.append((operands.strip(), len(opcodes)))
            opcodes.append(opcode)
        elif line.startswith(".Lfunc_end"):
            break
    loops = {(labels[target], at) for target, at in branches if labels.get(target, at + 1) <= at}
    return sass.Listing(tuple(opcodes), tuple(sorted(loops)))
