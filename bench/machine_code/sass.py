"""Counts machine instructions of a compiled kernel: accesses to local memory, and the instruction mix of tile loops.

A tile loop is an innermost loop that issues tensor-core instructions. The disassembler, ``nvdisasm``, is part of
Triton's package, so this needs neither a CUDA toolkit nor a GPU.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence

# {class: pattern of its instructions}. The first match decides. HMMA is a 16x8x16 product of one warp, HGMMA is a
# 64xNx16 product of one warp group, and UTCHMMA (sm_100) is a product of a whole block. Patterns in lower case are for
# AMD's assembly (module ``amdgcn``).
CLASSES = {
    "mma": r"HMMA|HGMMA|UTCHMMA|v_mfma",
    "mufu": r"MUFU|v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_",
    "fp32": r"(?:FFMA|FMUL|FADD)\b|v_(?:pk_)?(?:fma|fmac|mul|add|sub|subrev)_f32",
    "ldsm": r"LDSM",
    "shared": r"LDS|STS|ds_(?:read|write)",
    "global": r"LDG(?!DEPBAR)|STG|UTMALDG|UTMASTG|UBLKCP|RED|ATOM|global_|flat_|buffer_(?!inv|wb)",
    "local": r"LDL|STL|scratch_",
    "barrier": r"BAR\b|SYNCS|s_barrier",
}
_CLASS = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in CLASSES.items()))
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*)")
_UPPER_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclasses.dataclass(frozen=True)
class Listing:
    """Holds the instructions of a kernel.

    opcodes: the opcode of every instruction, in address order. loops: (first, last) of every loop, as indices into
    opcodes; the instruction at last branches back to first. operands: the operands of every instruction, as text.
    controls: the upper half of every instruction's encoding, which holds its control bits. It is empty in a listing
    without encodings.
    """

    opcodes: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]
    operands: tuple[str, ...] = ()
    controls: tuple[int, ...] = ()


def disassemble(cubin: bytes, nvdisasm: str) -> Listing:
    """Returns the listing of every function in a cubin. Raises CalledProcessError when nvdisasm cannot read it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return parse(
            subprocess.run([nvdisasm, "-c", "-hex", file.name], check=True, capture_output=True, text=True).stdout
        )


def parse(text: str) -> Listing:
    """Returns the listing in an output of ``nvdisasm -c``, with or without ``-hex``."""
    opcodes, operands, controls, branches, labels = [], [], [], [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.match(line):
            if instruction[1].startswith("BRA") and (target := _TARGET.search(instruction[2])):
                branches.append((target[1], len(opcodes)))
            opcodes.append(instruction[1])
            operands.append(instruction[2].strip())
        elif upper := _UPPER_HALF.match(line):
            controls.append(int(upper[1], 16))
    loops = {(labels[target], at) for target, at in branches if labels.get(target, at + 1) <= at}
    return Listing(tuple(opcodes), tuple(sorted(loops)), tuple(operands), tuple(controls))


def classify(opcode: str) -> str:
    match = _CLASS.match(opcode)
    return match.lastgroup if match else "other"


def mix(opcodes: Sequence[str]) -> Counter:
    """Returns how many instructions belong to each class of CLASSES, and three more counts.

    "global 16 B" counts the instructions of the class "global" that move 16 bytes per thread. "products" is the
    tensor-core work, in products 16x8x16 of one warp. "total" counts all instructions except NOPs.
    """
    counts = Counter(classify(opcode) for opcode in opcodes)
    counts += Counter("global 16 B" for opcode in opcodes if classify(opcode) == "global" and _width(opcode) == 16)
    counts["products"] = sum(map(_products, opcodes))
    counts["total"] = sum(opcode not in ("NOP", "s_nop") for opcode in opcodes)
    return counts


def tile_bounds(listing: Listing) -> list[tuple[int, int]]:
    """Returns (first, last) of every tile loop, in address order."""
    with_mma = [
        (first, last)
        for first, last in listing.loops
        if any(classify(opcode) == "mma" for opcode in listing.opcodes[first : last + 1])
    ]
    return [
        (first, last)
        for first, last in with_mma
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in with_mma)
    ]


def tile_loops(listing: Listing) -> list[Counter]:
    """Returns the mix of every tile loop, in address order."""
    return [mix(listing.opcodes[first : last + 1]) for first, last in tile_bounds(listing)]


def hot_loop(listing: Listing) -> Counter | None:
    """Returns the mix of the tile loop with the fewest instructions per product. It is the loop over inner tiles,
    because they need no mask."""
    return min(tile_loops(listing), key=lambda counts: counts["total"] / counts["mma"], default=None)


def local_bytes(listing: Listing) -> tuple[int, int]:
    """Returns (stored, loaded) bytes of local memory per thread. Each instruction counts once, as ptxas counts spills.

    Triton kernels keep no arrays in local memory: all of it is spilled registers.
    """
    return _local_bytes(listing.opcodes, "STL"), _local_bytes(listing.opcodes, "LDL")


def local_bytes_in_loops(listing: Listing) -> int:
    """Returns how many bytes of local memory a thread stores and loads in the tile loops, one pass through each. Spills
    outside the tile loops cost time only once."""
    return sum(
        _local_bytes(listing.opcodes[first : last + 1], "STL", "LDL", "scratch_")
        for first, last in tile_bounds(listing)
    )


def _local_bytes(opcodes: Sequence[str], *names: str) -> int:
    return sum(_width(opcode) for opcode in opcodes if opcode.startswith(names))


def _products(opcode: str) -> float:
    """Returns how many products 16x8x16 one instruction computes per warp: 1 for HMMA.16816, 1/2 for HMMA.1688, and N /
    8 for HGMMA.64xNx16, of which each of four warps computes a quarter."""
    if wide := re.match(r"HGMMA\.64x(\d+)x16\b", opcode):
        return int(wide[1]) / 8
    return {"16816": 1.0, "1688": 0.5}.get(opcode.split(".")[1], 0.0) if opcode.startswith("HMMA.") else 0.0


def _width(opcode: str) -> int:
    """Returns how many bytes an instruction moves per thread: 4 for STL, 8 for STL.64, 16 for LDL.LU.128, 1 for STL.U8,
    and 16 for global_load_dwordx4."""
    if amd := re.search(r"_(dword|short|byte|ushort|ubyte|sbyte)(?:x(\d))?(?:_d16\w*)?$", opcode):
        return {"dword": 4, "short": 2, "ushort": 2}.get(amd[1], 1) * int(amd[2] or 1)
    size = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
    return int(size[1]) // 8 if size else 4
