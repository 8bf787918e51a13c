"""Writes the tables of docs/dev/mutants.md, from docs/dev/mutants/results.csv. The text above them is
written by hand."""

from __future__ import annotations

from collections import Counter

from .results import INVALID, KILLED, RESULTS, SURVIVED, Row, read
from .sites import ROOMS, ROOT, room_of

PAGE = ROOT / "docs/dev/mutants.md"
TABLES = "## Results"
NAMES = {
    "kernels": "Triton kernels",
    "cpu": "C++ kernels of the CPU backend",
    "bfloat16": "C++ kernels of the CPU backend, in bfloat16",
    "amx": "C++ kernels of the CPU backend, in bfloat16 with AMX",
    "cuda": "CUDA C++ kernels, in the PTX executor",
}


def publish() -> None:
    """Writes the page's tables."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(TABLES)
    PAGE.write_text(head + tables(read(RESULTS)), encoding="utf-8")


def merged(old: dict[str, Row], new: dict[str, Row]) -> dict[str, Row]:
    """Returns the old rows, in which new rows replace those of the same mutants. A survivor keeps its reason if its
    change is still the same."""
    rows = dict(old)
    for address, row in new.items():
        before = old.get(address)
        if before and before.digest == row.digest and row.verdict == SURVIVED and not row.why:
            row = row._replace(why=before.why)
        rows[address] = row
    return rows


def tables(rows: dict[str, Row]) -> str:
    lines = [TABLES, "", "| room | killed | of | % | equivalent | seconds a mutant |", "|---|---:|---:|---:|---:|---:|"]
    ran = [row for row in rows.values() if row.verdict != INVALID]
    for room in ROOMS:
        if of_room := [row for row in ran if room_of(file_of(row)) == room]:
            lines.append(_line(NAMES.get(room, room), of_room))
    lines += [_line("**all**", ran), ""]
    invalid = len(rows) - len(ran)
    lines += [
        f"{invalid} more did not compile.",
        "",
        "## Survivors",
        "",
        "| mutant | why no test notices |",
        "|---|---|",
    ]
    survivors = [row for _, row in sorted(rows.items()) if row.verdict == SURVIVED]
    lines += [f"| `{row.mutant}` | {row.why or 'not looked at'} |" for row in survivors]
    return "\n".join(lines) + "\n"


def file_of(row: Row) -> str:
    return row.mutant.partition(" ")[0]


def _line(name: str, rows: list[Row]) -> str:
    counted = [row for row in rows if row.counts]
    killed = sum(row.verdict == KILLED for row in counted)
    seconds = sum(float(row.seconds) for row in rows) / max(len(rows), 1)
    numbers = Counter(row.counts for row in rows)
    return (
        f"| {name} | {killed} | {len(counted)} | {100 * killed / max(len(counted), 1):.0f} "
        f"| {numbers[False]} | {seconds:.0f} |"
    )
