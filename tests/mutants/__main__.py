"""``python -m tests.mutants``: breaks the source a line at a time and reports which test notices.

Every mutant is applied to a copy of the checkout, which runs the test that noticed it last time (docs/mutants), then
the tests that it names, then the fast loop, then with --all the default tests, up to the first that fails. That test
must pass without the mutant. A crash of the interpreter counts as noticed.

    python -m tests.mutants --list
    python -m tests.mutants --area decode --quick --csv mutants.csv   (adds to the file; skips what is in it)
    python -m tests.mutants --publish mutants.csv                     (into docs/mutants)
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from . import page
from .results import RESULTS, Row, read, versions, write
from .runs import EXECUTED, EXECUTOR, Copy, Ended, Run, preload
from .table import AREAS, MUTANTS, ROOT, Mutant

LOOP = "@tests/fast.txt"
Tests = tuple[str, ...]


def examine(mutant: Mutant, copy: Copy, stages: list[Tests], sound: set[str]) -> Generator[Tests, Ended, tuple]:
    """Yields the tests to run in the copy and is sent how they ended. Returns (ended, the last tests that ran).

    sound: tests that pass without a mutant; those found on the way are added. Raises RuntimeError where the tests do
    not.
    """

    def run(tests: Tests, changes) -> Generator[Tests, Ended, Ended]:
        copy.apply(changes)
        try:
            return (yield tests)
        finally:
            copy.restore()

    for tests in stages:
        ended = yield from run(tests, mutant.changes)
        if ended.how and not ended.test and tests == mutant.tests:  # a test of the results may be gone
            raise RuntimeError(f"{' '.join(tests)}: no test ran: {ended.how}")
        if ended.test:
            if ended.test not in sound:
                alone = (*(EXECUTED if EXECUTOR in tests else ()), ended.test)
                if (yield from run(alone, mutant.cut)).test:
                    raise RuntimeError(f"{ended.test}: fails without a mutant")
                sound.add(ended.test)
            return ended, tests
    return Ended(), stages[-1]


def stages_of(mutant: Mutant, last: Row | None, quick: bool, everything: bool) -> list[Tests]:
    stages = [mutant.tests] + [(LOOP,)] * (not quick) + [()] * everything
    if last and last.killed == "yes" and exists(last.by):
        stages.insert(0, (*(EXECUTED if EXECUTOR in mutant.tests else ()), last.by))
    return stages


def exists(test: str) -> bool:
    """Whether the file still has a function of this name."""
    file, _, rest = test.partition("::")
    name = rest.split("[")[0].split("::")[-1]
    path = ROOT / file
    return path.exists() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


def row_of(mutant: Mutant, ended: Ended, last: Tests, seconds: float, where: str) -> Row:
    killed, ran = "yes" if ended.test else "no", {(): "default tests", (LOOP,): "fast loop"}.get(last, "its tests")
    day = date.today().isoformat()
    return Row(mutant.area, mutant.name, killed, ended.test, ended.how, ran, f"{seconds:.0f}", day, where)


def results(mutants: Iterator[Mutant], known: dict[str, Row], args, folder: Path) -> Iterator[Row]:
    """Runs --jobs mutants at a time."""
    free = [Copy(folder / str(n)) for n in range(args.jobs)]
    sound: set[str] = set()
    under_way: list[tuple] = []
    where = versions()
    try:
        while True:
            while free and (mutant := next(mutants, None)):
                copy = free.pop()
                steps = examine(mutant, copy, stages_of(mutant, known.get(mutant.name), args.quick, args.all), sound)
                under_way.append((mutant, copy, steps, Run(copy, next(steps)), time.monotonic()))
            if not under_way:
                return
            time.sleep(0.02)
            for item in list(under_way):
                mutant, copy, steps, run, started = item
                if (ended := run.ended()) is None:
                    continue
                under_way.remove(item)
                took = time.monotonic() - started
                try:
                    under_way.append((mutant, copy, steps, Run(copy, steps.send(ended)), started))
                except StopIteration as stop:
                    free.append(copy)
                    yield row_of(mutant, *stop.value, took, where)
                except RuntimeError as error:
                    free.append(copy)
                    yield Row(mutant.area, mutant.name, "error", "", str(error), "", f"{took:.0f}", "", where)
    finally:
        for _, _, steps, run, _ in under_way:
            run.stop()
            steps.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants")
    parser.add_argument("--area", help="only those of these areas, separated by commas")
    parser.add_argument("--without", default="", help="not those of these areas")
    parser.add_argument("--only", help="only those whose name contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th of them")
    parser.add_argument("--quick", action="store_true", help="leave out the fast loop for those that survive")
    parser.add_argument("--all", action="store_true", help="run the default tests too for those that survive")
    parser.add_argument("--again", action="store_true", help="run those again that survived according to --csv")
    parser.add_argument("--seconds", type=float, help="start none after this long, in an order drawn from --seed")
    parser.add_argument("--seed", default="0", help="any text, for example a commit's hash (default: 0)")
    parser.add_argument("--least", type=float, default=100, help="percentage killed below which the run fails")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--csv", type=Path, help="a file to add the results to")
    parser.add_argument("--publish", type=Path, metavar="CSV", help="copy a file of results into docs/mutants and exit")
    args = parser.parse_args()
    if args.publish:
        write(RESULTS, read(args.publish))
        page.PAGE.write_text(page.text(), encoding="utf-8")
        return 0
    areas = set(args.area.split(",") if args.area else AREAS) - set(args.without.split(","))
    chosen = [m for m in MUTANTS if m.area in areas and (args.only or "") in m.name][:: args.every]
    if args.list:
        for m in chosen:
            print(f"{m.area:13} {m.name}" + (f"  equivalent: {m.equivalent}" if m.equivalent else ""))
        print(f"{len(chosen)} mutants, {sum(bool(m.equivalent) for m in chosen)} of them equivalent")
        return 0
    chosen = [m for m in chosen if not m.equivalent]
    for area, needed, found in (
        ("integrations", "transformers", find_spec("transformers")),
        ("cuda", "nvcc", shutil.which("nvcc")),
    ):
        if not found and any(m.area == area for m in chosen):
            parser.error(f"the area {area} needs {needed}, without which its tests are skipped; see --without")

    done = read(args.csv) if args.csv else {}
    todo = [m for m in chosen if m.name not in done or args.again and done[m.name].killed == "no"]
    todo.sort(key=lambda m: m.name not in done)  # survivors first
    started = time.monotonic()
    if args.seconds:
        random.Random(args.seed).shuffle(todo)
        print(f"a sample of {len(todo)} mutants, seed {args.seed}, for {args.seconds:g} s", flush=True)
    limited = (m for m in todo if not args.seconds or time.monotonic() - started < args.seconds)
    preload()
    rows = {m.name: done[m.name] for m in chosen if m.name in done}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", f"{folder}/cache")
        for row in results(limited, read(RESULTS) | done, args, Path(folder)):
            verdict = {"yes": "killed  ", "no": "SURVIVED", "error": "ERROR   "}[row.killed]
            print(f"{verdict} {float(row.seconds):4.0f} s  {row.mutant}  {row.by} {row.how}", flush=True)
            rows[row.mutant] = row
            if args.csv and row.killed != "error":
                write(args.csv, read(args.csv) | {row.mutant: row})
    killed = sum(row.killed == "yes" for row in rows.values())
    print(f"killed {killed} of {len(rows)} in {time.monotonic() - started:.0f} s")
    return int(killed * 100 < args.least * len(rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what ran is in the file of --csv")
