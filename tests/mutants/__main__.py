"""``python -m tests.mutants``: breaks the source a line at a time and reports which test notices.

First the tests run without a mutant. Then every mutant gets a copy of the checkout, is applied to it, and runs the tests
that its group names (pytest -x), then, if it survives, the fast loop, then with --all the default tests. A crash of the
interpreter counts as noticed.

    python -m tests.mutants --list
    python -m tests.mutants --area decode --jobs 2 --csv mutants.csv     (adds to the file; what is in it is not run again)
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import host, kernels
from .breaks import ROOT, Mutant, mutants_of

COLUMNS = ("area", "mutant", "killed", "by", "seconds")
LOOP = "@tests/fast.txt"
LIMIT = 900  # seconds for one run of pytest; a mutant that hangs is noticed

MUTANTS = mutants_of((*kernels.GROUPS, *host.GROUPS))


def copy_checkout(to: Path) -> None:
    """The files of the checkout, with the kernels where the package looks for them."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    ).stdout
    archive = subprocess.run(
        ["tar", "-C", ROOT, "--null", "-T", "-", "--ignore-failed-read", "-cf", "-"],
        input=listed,
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-C", to, "-xf", "-"], input=archive.stdout, check=True)
    (to / "python/flashrope/triton_kernels").symlink_to(to / "triton_kernels")


def run(mutant: Mutant, everything: bool) -> tuple[bool, str, float]:
    """(whether a test noticed, which, seconds)."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        copy_checkout(root)
        mutant.apply(root)
        started = time.perf_counter()
        for tests in (mutant.tests, (LOOP,), *([()] if everything else [])):
            if by := failed_test(root, tests):
                return True, by, time.perf_counter() - started
        return False, "", time.perf_counter() - started


def check_unbroken(mutants: list[Mutant]) -> None:
    """Raises RuntimeError if tests that the mutants name fail without a mutant, which would count as noticed."""
    with tempfile.TemporaryDirectory(prefix="unbroken-") as folder:
        copy_checkout(Path(folder))
        for tests in (*dict.fromkeys(mutant.tests for mutant in mutants), (LOOP,)):
            if by := failed_test(Path(folder), tests):
                raise RuntimeError(f"{' '.join(tests)}: fails without a mutant: {by}")


def failed_test(root: Path, tests: tuple[str, ...]) -> str:
    """The first test that fails, or how the run ended otherwise; "" if all pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "python"), os.environ.get("PYTHONPATH", "")]),
    }
    # its own Triton cache: the mutant's kernels have other sources anyway, but nothing is left behind
    environment |= {"TRITON_CACHE_DIR": str(root / ".triton"), "XDG_CACHE_HOME": str(root / ".cache")}
    # one cache for all: it holds the compiled CPU kernels, by a hash of their sources
    cache = f"cache_dir={Path(tempfile.gettempdir()) / 'flashrope-mutants'}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-o", cache, *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} s"
    if done.returncode == 0:
        return ""
    if done.returncode == 5:  # no test was selected
        raise RuntimeError(f"no test matches {' '.join(tests)}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else f"exit code {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and check that each still applies")
    parser.add_argument("--area", help="only those of these areas, separated by commas")
    parser.add_argument("--only", help="only those whose name contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th of them")
    parser.add_argument("--all", action="store_true", help="run the default tests too for those that survive")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--csv", type=Path, help="a file to add the results to")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.area or m.area in args.area.split(",")]
    chosen = [m for m in chosen if not args.only or args.only in m.name][:: args.every]
    if args.list:
        for m in chosen:
            print(f"{m.area:13} {m.name}")
        print(f"{len(chosen)} mutants")
        return 0
    if any(m.area == "integrations" for m in chosen) and importlib.util.find_spec("transformers") is None:
        parser.error("the area integrations needs transformers, without which its tests are skipped")
    done = {row["mutant"]: row for row in read(args.csv)}
    todo = [m for m in chosen if m.name not in done]

    def report(mutant: Mutant) -> dict[str, str]:
        killed, by, seconds = run(mutant, args.all)
        row = dict(
            zip(COLUMNS, (mutant.area, mutant.name, "yes" if killed else "no", by, f"{seconds:.0f}"), strict=True)
        )
        print(f"{'killed  ' if killed else 'SURVIVED'} {seconds:5.0f} s  {mutant.name}  {by}", flush=True)
        if args.csv:
            append(args.csv, row)
        return row

    if todo:
        check_unbroken(todo)
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [*done.values(), *pool.map(report, todo)]
    killed = Counter(row["killed"] for row in rows)
    print(f"killed {killed['yes']} of {len(rows)}")
    return int(killed["no"] > 0)


def read(path: Path | None) -> list[dict[str, str]]:
    if path is None or not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict[str, str]) -> None:
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
