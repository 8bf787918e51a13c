"""Finds the places where the source can be mutated. They are found in the syntax, so that no source line is quoted."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = {  # a file belongs to the first room with a pattern that matches it
    "kernels": ("triton_kernels/*.py",),
    "calls": ("python/flashrope/calls/*.py",),
    "backends": ("python/flashrope/backends/*.py",),
    "amx": ("csrc/cpu/bf16/amx.h", "csrc/cpu/bf16/decode_amx.h"),
    "bfloat16": ("csrc/cpu/bf16/*.cpp", "csrc/cpu/bf16/*.h"),
    "cpu": ("csrc/cpu/*.cpp", "csrc/cpu/*.h"),
    "cuda": ("csrc/decode.cu", "csrc/positions.cuh", "csrc/decode.h"),
    "cache": ("python/flashrope/cache/*.py",),
    "operators": ("python/flashrope/operators/*.py",),
    "schemes": ("python/flashrope/schemes/*.py",),
    "integrations": (
        "python/flashrope/integrations/*.py",
        "python/flashrope/integrations/transformers/*.py",
        "python/flashrope/integrations/vllm/*.py",
    ),
}
# The numbers in configs.py change only how long kernels run. The tests of megatron.py need an additional package.
WITHOUT = ("*/__init__.py", "triton_kernels/configs.py", "*/integrations/megatron.py")


class Mutant(NamedTuple):
    """A changed range of characters of a file. address: file, function, kind and number, which identify it in the
    results."""

    address: str
    file: str
    start: int
    end: int
    new: str

    def source(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8")

    def applied(self) -> str:
        text = self.source()
        return text[: self.start] + self.new + text[self.end :]

    @property
    def digest(self) -> str:
        """Returns a digest of the replaced text and of its replacement. Spaces do not count."""
        change = f"{self.source()[self.start : self.end]} -> {self.new}"
        return hashlib.sha256("".join(change.split()).encode()).hexdigest()[:8]

    @property
    def kind(self) -> str:
        """Returns the kind of mutation: "comparison shifted" for "a.py f comparison shifted 3"."""
        words = self.address.removeprefix(f"{self.file} ").split(" ")
        return " ".join(words[1:-1])

    @property
    def room(self) -> str:
        return room_of(self.file)


class Change(NamedTuple):
    """A change that a finder of sites proposes. start, end: the range of characters that `new` replaces."""

    function: str
    kind: str
    start: int
    end: int
    new: str


def room_of(file: str) -> str:
    return next(room for room, patterns in ROOMS.items() if any(fnmatch(file, pattern) for pattern in patterns))


def files(rooms: tuple[str, ...] = tuple(ROOMS)) -> list[str]:
    paths = [path for room in rooms for pattern in ROOMS[room] for path in sorted(ROOT.glob(_deep(pattern)))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    names = [x for x in names if room_of(x) in rooms and not any(fnmatch(x, pattern) for pattern in WITHOUT)]
    return list(dict.fromkeys(names))


def _deep(pattern: str) -> str:
    return pattern.replace("backends/*", "backends/**/*").replace("triton_kernels/*", "triton_kernels/**/*")


@cache
def mutants_of(file: str) -> list[Mutant]:
    """Returns all mutants of a file, in the order of the file."""
    from . import native_sites, python_sites

    text = (ROOT / file).read_text(encoding="utf-8")
    found = (python_sites if file.endswith(".py") else native_sites).changes(text)
    counts: dict[tuple[str, str], int] = {}
    mutants = []
    for function, kind, start, end, new in sorted(found, key=lambda change: change.start):
        counts[function, kind] = number = counts.get((function, kind), 0) + 1
        mutants.append(Mutant(f"{file} {function} {kind} {number}", file, start, end, new))
    return mutants
