"""Reads registers, spills and tile loops of a compiled kernel from the AMD backend's assembly.

No ROCm is needed: Triton's package has the assembler, and the figures are in the assembly text (``.vgpr_count`` and
others, in the metadata after the code).
"""

from __future__ import annotations

import dataclasses
import re

from flashrope.backends.splits import multiprocessor

from . import sass

_INSTRUCTION = re.compile(r"^\t([a-z][a-z0-9_]*)(?:\s+([^;]*))?")
_LABEL = re.compile(r"^(\.LBB\w+):")


COLUMNS = ("warps", "stages", "VGPRs", "AGPRs", "spills", "in loops", "LDS KB", "waves/SIMD", "MMA", "instr/MMA")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A compiled kernel. registers: vector registers of a lane, accumulation registers included; agprs: how many of
    them are accumulation registers. spilled: vector registers in scratch memory. shared: bytes of local data share
    (LDS). waves: per SIMD, as registers and LDS allow. loop, loop_spills: as in ``offline.Measured``."""

    registers: int
    agprs: int
    spilled: int
    spilled_scalars: int  # to lanes of vector registers, not to memory
    shared: int
    waves: float
    warps: int
    stages: int
    loop: dict[str, int]
    loop_spills: int

    def figures(self) -> dict[str, str]:
        """Returns the figures, keyed by ``COLUMNS``. spills: vector registers; in loops: bytes that a lane spills in
        loops."""
        found = {
            "warps": self.warps,
            "stages": self.stages,
            "VGPRs": self.registers,
            "AGPRs": self.agprs,
            "spills": self.spilled,
            "in loops": self.loop_spills,
            "LDS KB": f"{self.shared / 1024:g}",
            "waves/SIMD": f"{self.waves:g}",
        }
        if self.loop:
            found |= {"MMA": self.loop["mma"], "instr/MMA": f"{self.loop['total'] / self.loop['mma']:.2f}"}
        return {name: str(value) for name, value in found.items()}

    def violations(self, spill: float, in_loops: float, shared_limit: int) -> list[str]:
        found = []
        if 4 * self.spilled > spill:
            found.append(f"spills {self.spilled} vector registers, the limit is {spill / 4:g}")
        if self.loop_spills > in_loops:
            found.append(
                f"touches {self.loop_spills} spilled bytes per lane in its tile loops, the limit is {in_loops}"
            )
        if self.shared > shared_limit:
            found.append(f"needs {self.shared} bytes of LDS, a workgroup has {shared_limit}")
        return found


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
        blocks * metadata.num_warps / 4,
        metadata.num_warps,
        metadata.num_stages,
        dict(sass.hot_loop(code) or {}),
        sass.local_bytes_in_loops(code),
    )


def listing(text: str) -> sass.Listing:
    """Returns the listing of assembly. ``sass.CLASSES`` has the classes of its instructions too."""
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
