"""Reads and writes the files of a run: a JSON file with everything, and a CSV file of the records.

Runs of different versions are never combined.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from flashrope.console import files

from ..machine import CHANGED
from .output import without_output_options

SAME = ("revision", "torch", "triton", "cuda")  # runs are combined only if they agree in these versions and the device


@dataclasses.dataclass
class Record:
    """Holds the measurement of one contestant on one problem. milliseconds: the median over the rounds. low, high: the
    quartiles, in milliseconds, or None if only a log was kept. rounds: then 0."""

    table: str
    contestant: str
    ours: bool
    sizes: dict
    backward: bool
    milliseconds: float
    low: float | None
    high: float | None
    rounds: int
    tflops: float | None = None  # Problem.flops divided by the time, for attention with many queries
    gbs: float | None = None  # bytes that must be moved, divided by the time
    ceiling: str = ""  # name of the measured ceiling that `share` refers to
    share: float | None = None
    ratios: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # {contestant of flashrope: this record's time / its time}
    peak_bytes: int | None = None

    @property
    def seqlen(self) -> int:
        return self.sizes["seqlen"]


@dataclasses.dataclass
class Run:
    """Holds everything that one command measured on one device."""

    command: str
    argv: str
    device: dict
    versions: dict[str, str]
    ceilings: dict[str, float]
    records: list[Record] = dataclasses.field(default_factory=list)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # {contestant: why it did not run}
    wrong: dict[str, float] = dataclasses.field(default_factory=dict)  # {contestant: its error against float64}
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # errors of the correct contestants
    skipped: list[str] = dataclasses.field(default_factory=list)
    goals: list[dict] = dataclasses.field(default_factory=list)
    exponents: dict[str, float] = dataclasses.field(default_factory=dict)  # {series: exponent of the fitted power law}
    load_average: dict[str, list[float] | None] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def shown_command(self) -> str:
        """Returns the command without its output folder and its note."""
        words = without_output_options(shlex.split(self.argv))
        if "--note" in words:
            del words[words.index("--note") : words.index("--note") + 2]
        return shlex.join(words)

    @property
    def shown_revision(self) -> str:
        """Returns the revision in words, which say whether the code had uncommitted changes."""
        revision = self.versions["revision"]
        changed = " with uncommitted changes" if revision.endswith(CHANGED) else ""
        return f"revision {revision.removesuffix(CHANGED)}{changed}"

    @property
    def shown_versions(self) -> str:
        return ", ".join([*(f"{name} {self.versions[name]}" for name in ("torch", "triton")), self.shown_revision])

    def write(self, folder: Path, stem: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / f"{stem}.json", json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        _write_csv(folder / f"{stem}.csv", self)


def command_line(command: str, argv: Sequence[str]) -> str:
    """Returns the command as it is recorded, which leaves out the folder of its results."""
    return shlex.join(["python", "-m", "bench", command, *without_output_options(list(argv))])


def read(path: Path) -> Run:
    """Reads a run from a JSON file. Raises ValueError with the file's name if the file does not hold a run."""
    try:
        fields = json.loads(path.read_text())
        return Run(**(fields | {"records": [Record(**record) for record in fields["records"]]}))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the results of a run ({error})") from None


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises ValueError if the runs differ in device or versions."""
    for name, of in [("device", lambda run: run.device["name"])] + [
        (name, lambda run, name=name: run.versions[name]) for name in SAME
    ]:
        seen = sorted({of(run) for run in runs})
        if len(seen) > 1:
            raise ValueError(f"runs of different {name} cannot be combined: {', '.join(seen)}")


def _write_csv(path: Path, run: Run) -> None:
    ours = sorted({name for record in run.records for name in record.ratios})
    rows = []
    for record in run.records:
        row = dataclasses.asdict(record)
        row |= row.pop("sizes") | {f"time / {name}": ratio for name, ratio in row.pop("ratios").items()}
        rows.append({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [name for name in names if not name.startswith("time / ")] + [f"time / {name}" for name in ours]
    files.write(path, files.csv_text(columns, [[row.get(name, "") for name in columns] for row in rows]))
