"""Defines what the executor records about a launch."""

from __future__ import annotations

import dataclasses


class ExecutionError(AssertionError):
    """A kernel broke a rule of the executor. The message lists the findings."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes of one tensor in one launch."""

    size: int  # from the first element to the end of the last
    read: int  # bytes that lanes requested
    written: int
    sectors_read: int  # bytes in 32-byte sectors; a warp instruction counts each sector once
    sectors_written: int
    distinct_read: int  # bytes that were read at least once, each counted once


@dataclasses.dataclass(frozen=True)
class Launch:
    function: int  # the driver's handle of the kernel
    kernel: str
    grid: tuple[int, int, int]
    threads: int  # per block
    shared_bytes: int
    seconds: float
    findings: list[str]
    opcodes: dict[str, tuple[int, int]]  # how often warps and lanes executed the instruction
    executed_lines: list[int]  # lines of the PTX that at least one lane executed
    tensors: dict[str, Traffic]  # by the name of the kernel's argument

    @classmethod
    def from_json(cls, data: dict) -> Launch:
        opcodes = {name: tuple(counts) for name, counts in data["opcodes"].items()}
        tensors = {name: Traffic(*numbers) for name, numbers in data["tensors"].items()}
        return cls(**data | {"grid": tuple(data["grid"]), "opcodes": opcodes, "tensors": tensors})

    def warps(self, *prefixes: str) -> int:
        """Returns how many instructions with an opcode that starts with one of the prefixes were executed by warps. ""
        counts all instructions."""
        return sum(warps for name, (warps, _) in self.opcodes.items() if name.startswith(prefixes or ("",)))

    def lanes(self, *prefixes: str) -> int:
        return sum(lanes for name, (_, lanes) in self.opcodes.items() if name.startswith(prefixes or ("",)))

    @property
    def tensor_flops(self) -> int:
        """Returns the operations of mma and wgmma. A multiplication and an addition count as two."""
        flops = self.warps("mma.") * 2 * 16 * 8 * 16
        for name, (warps, _) in self.opcodes.items():
            if name.startswith("wgmma.mma"):
                columns = int(name.split(".m64n")[1].split("k")[0])
                flops += warps * 2 * 16 * columns * 16  # each warp holds 16 of the 64 rows
        return flops

    @property
    def special_functions(self) -> int:
        """Returns how many lanes ran ex2, lg2, rcp or sqrt."""
        return self.lanes("ex2.", "lg2.", "rcp.", "sqrt.")

    @property
    def bytes_read(self) -> int:
        return sum(t.sectors_read for t in self.tensors.values())
