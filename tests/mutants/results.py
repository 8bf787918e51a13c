"""The file of results: one row a mutant."""

from __future__ import annotations

import contextlib
import csv
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .table import MUTANTS, ROOT

RESULTS = ROOT / "docs/mutants/results.csv"


class Row(NamedTuple):
    """killed: yes or no. by: the test that noticed, how: where it did not just fail. ran: the last tests that ran.
    seconds: including the run of that test without the mutant. on: the machine and the versions."""

    area: str
    mutant: str
    killed: str
    by: str
    how: str
    ran: str
    seconds: str
    date: str
    on: str


def read(path: Path) -> dict[str, Row]:
    """By the mutant's name; nothing where there is no file."""
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {row["mutant"]: Row(**row) for row in csv.DictReader(file)}


def write(path: Path, rows: dict[str, Row]) -> None:
    """The whole file, those of the list in its order and no others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with open(new, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows[m.name] for m in MUTANTS if m.name in rows and not m.equivalent)
    new.replace(path)


def versions() -> str:
    """ "AMD EPYC 9B14, Python 3.11.9, torch 2.13.0, triton 3.6.0" """
    found = []
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join([_processor(), f"Python {platform.python_version()}", *found])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
