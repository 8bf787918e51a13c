"""The form of a mutant: a line of the source, changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Group:
    """Mutants of one file.

    tests: what pytest runs first, as its arguments; usually enough. breaks: (what is wrong, the text, what takes its
    place); the text occurs once in the file. A fourth entry says why the change changes no result: such a mutant is
    equivalent, is not run and does not count. cut: (file, text, what takes its place), changes with which the tests run
    with and without the mutant, so that less has to be compiled.
    """

    area: str
    file: str
    tests: tuple[str, ...]
    breaks: tuple[tuple[str, ...], ...]
    cut: tuple[tuple[str, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Mutant:
    area: str
    file: str
    tests: tuple[str, ...]
    wrong: str
    old: str
    new: str
    equivalent: str = ""
    cut: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{Path(self.file).name}: {self.wrong}"

    @property
    def changes(self) -> tuple[tuple[str, str, str], ...]:
        """(file, text, what takes its place)"""
        return *self.cut, (self.file, self.old, self.new)


def replaced(text: str, old: str, new: str, where: str) -> str:
    """Raises ValueError unless ``old`` occurs once."""
    if (count := text.count(old)) != 1:
        raise ValueError(f"{where}: expected {old!r} once, got {count} times")
    return text.replace(old, new)


def mutants_of(groups: tuple[Group, ...]) -> list[Mutant]:
    return [Mutant(g.area, g.file, g.tests, *broken, cut=g.cut) for g in groups for broken in g.breaks]
