"""Reads the mutants of by_hand.txt: bugs that happened, and changes that no mutation operator makes. They quote the
source.

Blocks are separated by an empty line. `file` and `tests` apply to all mutants that follow.

    file: triton_kernels/forward.py

    a window reaches one key too far
    - if distance < stop:
    + if distance <= stop:
"""

from __future__ import annotations

from pathlib import Path

from .sites import ROOT, Mutant

FILE = Path(__file__).parent / "by_hand.txt"
MOST = 60


def parsed(text: str) -> list[tuple[str, str, str, str]]:
    """Returns (file, description of the bug, text that occurs once, its replacement) for every block with a change."""
    found, file = [], ""
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line[:2].strip() == mark) for mark in "-+")
        name = next((line for line in lines if line[:2].strip() not in ("-", "+", "#")), "")
        if name.startswith("file: "):
            file = name[6:]
        elif old:
            found.append((file, name, old, new))
    return found


def mutant_of(file: str, wrong: str, old: str, new: str) -> Mutant:
    """Returns the mutant. Raises ValueError unless ``old`` occurs exactly once."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if (count := text.count(old)) != 1:
        raise ValueError(f"{file}: expected {old!r} once, got {count} times")
    start = text.index(old)
    return Mutant(f"{file} by hand: {wrong}", file, start, start + len(old), new)


def mutants() -> list[Mutant]:
    return [mutant_of(*block) for block in parsed(FILE.read_text(encoding="utf-8"))]
