"""Reads and writes the file of results, which has one row per mutant."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from .sites import ROOT

RESULTS = ROOT / "docs/dev/mutants/results.csv"
KILLED, SURVIVED, INVALID = "killed", "survived", "does not compile"


class Row(NamedTuple):
    """The result of a mutant. mutant: its address. digest: a digest of the change. If the code has changed since then,
    the digest differs, and the row is not used. by: the test that noticed. how: how the run ended, unless the test just
    failed.
    seconds: the time of the run, including a run of the test `by` without the mutant. why: for a survivor, why no test
    notices; it begins with "equivalent" if no result can change."""

    mutant: str
    digest: str
    verdict: str
    by: str
    how: str
    seconds: str
    why: str = ""

    @property
    def counts(self) -> bool:
        return self.verdict != INVALID and not self.why.startswith("equivalent")


def read(path: Path) -> dict[str, Row]:
    """Returns the rows by the mutant's address, or nothing if there is no file. The last row of an address counts."""
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {row["mutant"]: Row(**row) for row in csv.DictReader(file)}


def add(path: Path, row: Row) -> None:
    """Appends a row, so that an interrupted run can be resumed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Row._fields] * new + [row])


def write(path: Path, rows: dict[str, Row]) -> None:
    """Writes the whole file, in the order of addresses."""
    path.unlink(missing_ok=True)
    for _, row in sorted(rows.items()):
        add(path, row)
