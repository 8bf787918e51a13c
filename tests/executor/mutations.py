"""Ways to break a compiled kernel: each changes one line of PTX, or returns None where it does not apply."""

from __future__ import annotations

import re
from collections.abc import Callable

Mutation = Callable[[str], str | None]
REMOVED = "// removed"


def removed(opcode: str) -> Mutation:
    return lambda line: REMOVED if re.search(rf"(^|\s){re.escape(opcode)}\b", line) else None


def replaced(pattern: str, replacement: str) -> Mutation:
    def mutate(line):
        changed, count = re.subn(pattern, replacement, line, count=1)
        return changed if count else None

    return mutate


def offset(opcode: str, by: int) -> Mutation:
    """Moves the address of a memory instruction by this many bytes."""

    def mutate(line):
        if not re.search(rf"(^|\s){opcode}", line):
            return None
        return re.sub(
            r"\[\s*(%\w+)\s*(?:\+\s*(-?\d+)\s*)?\]", lambda m: f"[{m[1]}+{int(m[2] or 0) + by}]", line, count=1
        )

    return mutate


def second_offset(opcode: str, by: int) -> Mutation:
    """Like ``offset``, for cp.async's global address."""

    def mutate(line):
        if opcode not in line:
            return None
        head, tail = line.rsplit("[", 1)
        return head + re.sub(r"\[\s*(%\w+)\s*(?:\+ 0 )?\]", rf"[\1+{by}]", "[" + tail, count=1)

    return mutate


def swapped(opcode: str, first: int, second: int) -> Mutation:
    """Exchanges two register operands, counted over all registers of the line."""

    def mutate(line):
        if not re.search(rf"(^|\s){opcode}", line):
            return None
        registers = list(re.finditer(r"%(?:rs?d?|f)\d+", line))
        if len(registers) <= max(first, second):
            return None
        a, b = registers[first], registers[second]
        return line[: a.start()] + b[0] + line[a.end() : b.start()] + a[0] + line[b.end() :]

    return mutate


def inverted_guard(opcode: str) -> Mutation:
    return lambda line: re.sub(r"@%p", "@!%p", line) if re.search(rf"@%p\d+ {opcode}", line) else None


def dropped_guard(opcode: str) -> Mutation:
    return lambda line: re.sub(r"@!?%p\d+ ", "", line) if re.search(rf"@!?%p\d+ {opcode}", line) else None


def weakened(opcode: str) -> Mutation:
    """A wait_group that leaves one more group in flight."""
    return lambda line: re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", line) if opcode in line else None


def added(pattern: str, by: int) -> Mutation:
    """Adds ``by`` to the literal at the end of a matching line."""
    return lambda line: re.sub(r"(\d+);", lambda m: f"{int(m[1]) + by};", line) if re.search(pattern, line) else None


EVERYWHERE = {
    "barrier removed": removed("bar.sync"),
    "global load 16 bytes off": offset("ld.global", 16),
    "global store 16 bytes off": offset("st.global", 16),
    "guard of a global load inverted": inverted_guard("ld.global"),
    "guard of a global store inverted": inverted_guard("st.global"),
    "guard of a global store dropped": dropped_guard("st.global"),
    "shared load 16 bytes off": offset("ld.shared", 16),
    "shared store 16 bytes off": offset("st.shared", 16),
    "guard of a shared store dropped": dropped_guard("st.shared"),
    "guard of a shared store inverted": inverted_guard("st.shared"),
    "less becomes less or equal": replaced(r"setp\.lt\.s32", "setp.le.s32"),
    "comparison inverted": replaced(r"setp\.lt\.s32", "setp.ge.s32"),
    "shuffle from another lane": replaced(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 2,", r"\1, 4,"),
    "xor with another bit": replaced(r"(xor\.b32\s+%r\d+, %r\d+), 32;", r"\1, 16;"),
    "shift by one more": added(r"shl\.b32", 1),
    "address 17 bytes off": added(r"add\.s32\s+%r\d+, %r\d+, \d{4,};", 17),  # wgmma descriptors drop the low four bits
    "maximum becomes minimum": replaced(r"\bmax\.f32", "min.f32"),
    "red 4 bytes off": offset("red", 4),
    "red of another's": swapped(r"red\S*\.v4", 1, 2),
    "red of parity and half swapped": swapped(r"red\S*\.v4", 2, 3),
    "exponential left out": replaced(r"ex2\.approx\.ftz\.f32", "mov.f32"),
}
COPIES = {
    "cp.async.wait_group removed": removed("cp.async.wait_group"),
    "cp.async.wait_group weakened": weakened("cp.async.wait_group"),
    "cp.async.commit_group removed": removed("cp.async.commit_group"),
    "copy to 16 bytes further": offset(r"cp\.async\.c[ag]", 16),
    "copy from 16 bytes further": second_offset("cp.async.cg", 16),
    "copy from one element further": second_offset("cp.async.cg", 2),
}
MATRICES = {
    "ldmatrix 16 bytes off": offset("ldmatrix", 16),
    ".trans lost": replaced(r"\.trans", ""),
    "A's registers swapped": swapped("mma.sync", 4, 5),
    "B's registers swapped": swapped("mma.sync", 8, 9),
    "ldmatrix results swapped": swapped("ldmatrix", 0, 1),
}
WGMMA = {
    "wgmma.wait_group removed": removed("wgmma.wait_group"),
    "wgmma.wait_group weakened": weakened("wgmma.wait_group"),
    "wgmma.fence removed": removed("wgmma.fence"),
    "fence.proxy.async removed": removed("fence.proxy.async"),
    "descriptor 32 bytes off": added(r"add\.s64\s+%rd\d+, %rd\d+, 46116862933052\d+;", 2),
    "descriptor of another swizzle": added(r"or\.b64\s+%rd\d+, %rd\d+, 46116862933052\d+;", 1 << 62),
    "transposition flipped": replaced(r"(wgmma\.mma.*), 1;", r"\1, 0;"),
    "accumulation lost": replaced(r"(wgmma\.mma.*), %p\d+, 1, 1", r"\1, 0, 1, 1"),
    "A's registers swapped (wgmma)": replaced(r"(wgmma\.mma.*\}, \{)(%r\d+),(%r\d+)", r"\1\3,\2"),
    "stmatrix 16 bytes off": offset("stmatrix", 16),
}
NVCC = {  # it branches where Triton predicates, and keeps the operands of a shuffle in registers
    "branch inverted": replaced(r"@(%p\d+ bra)", r"@!\1"),
    "branch never taken": replaced(r"^\s*@%p\d+ bra.*", REMOVED),
    "shuffle from lane 4 further": replaced(r"(shfl\.sync\.bfly\.b32\s+%r\d+\|%p\d+, %r\d+, )%r\d+", r"\g<1>4"),
    "bar.warp.sync removed": removed("bar.warp.sync"),
    "parameter 4 bytes off": offset("ld.param.u32", 4),
    "other comparison inverted": replaced(r"setp\.ge\.s32", "setp.lt.s32"),
    "greater becomes greater or equal": replaced(r"setp\.ge\.s32", "setp.gt.s32"),
    "multiply without add": replaced(r"fma\.rn\.f32(\s+%f\d+, %f\d+, %f\d+), %f\d+;", r"mul.f32\1;"),
    "minimum becomes maximum": replaced(r"\bmin\.s32", "max.s32"),
}
MUTATIONS = EVERYWHERE | COPIES | MATRICES | WGMMA | NVCC


def sites(text: str, executed: list[int], mutation: Mutation, most: int) -> list[int]:
    """Up to ``most`` executed lines of the PTX (from 1) that the mutation changes, spread over the kernel."""
    lines = text.splitlines()
    found = [n for n in executed if (changed := mutation(lines[n - 1])) is not None and changed != lines[n - 1]]
    if len(found) <= most:
        return found
    return (
        [found[round(k * (len(found) - 1) / (most - 1))] for k in range(most)] if most > 1 else [found[len(found) // 2]]
    )


def mutated(text: str, line: int, mutation: Mutation) -> str:
    lines = text.splitlines()
    lines[line - 1] = mutation(lines[line - 1])
    return "\n".join(lines) + "\n"
