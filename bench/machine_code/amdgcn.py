"""Reads registers, spills and tile loops of a compiled kernel from the AMD backend's assembly.

No ROCm is needed, because Triton's package contains the assembler. The figures, such as ``.vgpr_count``, are in the
metadata after the code of the assembly text.
"""

from __future__ import annotations

import dataclasses
import re

from flashrope.backends.shared.splits import multiprocessor

from . import sass

_INSTRUCTION = re.compile(r"^\t([a-z][a-z0-9_]*)(?:\s+([^;]*))?")
_LABEL = re.compile(r"^(\.LBB\w+):")


COLUMNS = ("warps", "stages", "VGPRs", "AGPRs", "spills", "in loops", "LDS KB", "waves/SIMD", "MMA", "instr/MMA")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds the figures of a compiled kernel.

    registers: vector registers per lane, including accumulation registers. agprs: accumulation registers per lane.
    spilled: how many vector registers are spilled to scratch memory. shared: bytes of local data share (LDS). waves:
    how many waves fit on a SIMD, given the registers and the LDS. loop: the instruction mix of the hot loop, empty if
    there is none. loop_spills: bytes of scratch memory that a lane touches in the tile loops.
    """

    registers: int
    agprs: int
    spilled: int
    spilled_scalars: int  # scalar registers that are spilled to lanes of vector registers, not to memory
    shared: int
    waves: float
    warps: int
    stages: int
    loop: dict[str, int]
    loop_spills: int

    def figures(self) -> dict[str, str]:
        """Returns the figures as text, keyed by ``COLUMNS``. The column "spills" counts vector registers. The column
        "in loops" counts the spilled bytes that a lane touches in the tile loops."""
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
    """Parses assembly text into a listing. ``sass.CLASSES`` classifies AMD's instructions too."""
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
