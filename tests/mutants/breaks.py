"""The form of a mutant: a line of the source, changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Group:
    """Mutants of one file.

    tests: what pytest runs first, as its arguments; usually enough. breaks: (what is wrong, the text, what takes its
    place); the text occurs once in the file.
    """

    area: str
    file: str
    tests: tuple[str, ...]
    breaks: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Mutant:
    area: str
    file: str
    wrong: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.file).name}: {self.wrong}"

    def apply(self, root: Path) -> None:
        """Changes the file under ``root``. Raises ValueError unless the text occurs once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected {self.old!r} once in {self.file}, got {text.count(self.old)} times"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutants_of(groups: tuple[Group, ...]) -> list[Mutant]:
    return [Mutant(g.area, g.file, *broken, g.tests) for g in groups for broken in g.breaks]
