"""docs/mutants.md from docs/mutants/results.csv."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .results import RESULTS, Row, read
from .table import AREAS, MUTANTS, ROOT

PAGE = ROOT / "docs/mutants.md"


def text() -> str:
    rows = read(RESULTS)
    counted = [m for m in MUTANTS if not m.equivalent]
    lines = [INTRODUCTION, "", HEADER]
    totals: Counter[str] = Counter()
    for area, name in AREAS.items():
        ran = [rows[m.name] for m in counted if m.area == area and m.name in rows]
        counts = Counter(mutants=sum(m.area == area for m in counted), run=len(ran))
        counts += Counter(
            killed=sum(row.killed == "yes" for row in ran), seconds=round(sum(float(r.seconds) for r in ran))
        )
        totals += counts
        lines.append(_row(name, counts, _killers(ran)))
    lines += [_row("**all**", totals, ""), ""]
    survivors = [rows[m.name] for m in counted if m.name in rows and rows[m.name].killed == "no"]
    lines += _listed("Survivors", [f"{row.area}: {row.mutant} (ran: {row.ran})" for row in survivors])
    lines += _listed("Not run", [f"{m.area}: {m.name}" for m in counted if m.name not in rows])
    proven = [f"{m.area}: {m.name}. {m.equivalent[0].upper()}{m.equivalent[1:]}." for m in MUTANTS if m.equivalent]
    lines += _listed("Equivalent: no result changes, so they do not count", proven)
    days = sorted({row.date for row in rows.values()})
    lines += ["## Where", "", f"Run on {_and(days)}, one at a time, on one core of:", ""]
    lines += [f"- {on} ({count} mutants)" for on, count in Counter(row.on for row in rows.values()).most_common()]
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Mutants

A mutant is one changed line of the source: a window off by one, a rotation that is missing in a gradient, a page that
is not clamped. A test suite that notices few of them says little. `python -m tests.mutants` applies them to a copy of
the checkout one at a time, and runs the tests that each names up to the first that fails. That test must pass without
the mutant. The slow tests are not run.

```bash
python -m tests.mutants --quick --csv mutants.csv   # all; cuda and integrations need nvcc, transformers and vLLM
python -m tests.mutants --publish mutants.csv       # this page and mutants/results.csv, a row for each mutant
```

Seconds are the wall time of the run that found the test, on a machine that did other work as well. A later run starts
with that test, and needs a few seconds a mutant.
`.ci/run` repeats a sample of them for every commit, and fails where fewer than 95% are killed."""
HEADER = "| area | mutants | run | killed | seconds | killed by |\n|---|---:|---:|---:|---:|---|"


def _row(name: str, counts: Counter[str], killers: str) -> str:
    numbers = [counts[column] for column in ("mutants", "run", "killed", "seconds")]
    return f"| {' | '.join([name, *map(str, numbers), killers])} |"


def _killers(rows: list[Row]) -> str:
    files = Counter(Path(row.by.split("::")[0]).name for row in rows if row.killed == "yes")
    return ", ".join(f"{file} {count}" for file, count in files.most_common())


def _listed(title: str, items: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {item}" for item in items), ""] if items else []


def _and(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else "".join(items)
