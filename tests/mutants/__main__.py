"""``python -m tests.mutants``: breaks the source one place at a time and reports which test notices.

The places are found in the syntax, and --seed draws a sample of them. Every mutant is applied to a copy of the
checkout. The test that noticed the mutant last time runs first, then the tests of the mutant's file (judges.py). The
run ends at the first test that fails, and this test must pass without the mutant. A crash of the interpreter counts as
noticed.

    python -m tests.mutants --rooms kernels,cache --count 100 --csv mutants.csv   (skips what is in the file)
    python -m tests.mutants --site "triton_kernels/cached/decode.py attend_block constant 3"
    python -m tests.mutants --known --seconds 60      (mutants of docs/dev/mutants/results.csv that were noticed)
    python -m tests.mutants --publish mutants.csv     (into docs/dev/mutants)
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from . import page
from .judges import judges, target_options
from .native_build import has_instruction
from .results import INVALID, KILLED, RESULTS, SURVIVED, Row, add, read, write
from .runs import EXECUTED, EXECUTOR, Copy, Ended, Run, preload
from .sites import ROOMS, ROOT, Mutant, files, mutants_of

Tests = tuple[str, ...]
NEEDED = {
    "integrations": ("transformers", find_spec("transformers")),
    "cuda": ("nvcc", shutil.which("nvcc")),
    "amx": ("AMX", has_instruction("amx_bf16")),
    "bfloat16": ("AVX512-BF16", has_instruction("avx512_bf16")),
}


def everything(rooms: tuple[str, ...]) -> list[Mutant]:
    """Returns all mutants of these rooms."""
    return [mutant for file in files(rooms) for mutant in mutants_of(file)]


def drawn(mutants: list[Mutant], seed: str) -> list[Mutant]:
    """Returns the mutants in a seeded random order that alternates between all parts of the source (rooms) and kinds of
    mutation. Otherwise the many mutants of a common kind would hide the few of another."""
    dice, groups = random.Random(seed), {}
    for mutant in mutants:
        groups.setdefault((mutant.room, mutant.kind), []).append(mutant)
    for group in groups.values():
        dice.shuffle(group)
    order = list(groups.values())
    dice.shuffle(order)
    return [mutant for turn in zip_longest(*order) for mutant in turn if mutant]


def examine(
    mutant: Mutant, copy: Copy, stages: list[Tests], sound: set[str], patience: float = math.inf
) -> Generator[Tests, Ended, Ended | None]:
    """Yields the tests to run in the copy, and receives how each run ended. Returns how the last run ended, or None if
    the mutant does not compile.

    sound: tests that pass without a mutant. Tests that are found to pass are added. patience: CPU seconds after which
    no further tests run. Raises RuntimeError if the failed test also fails without the mutant, or if no test ran.
    """
    spent = 0.0
    for tests in stages:
        if spent >= patience:
            return Ended("", f"{spent:.0f} s of its tests")
        try:
            if not copy.apply(mutant):
                return None
            ended = yield tests
        finally:
            copy.restore()
        if ended.how and not ended.test and tests != stages[0]:  # a test named in the results may no longer exist
            raise RuntimeError(f"{' '.join(tests)}: no test ran: {ended.how}")
        if ended.test:
            if ended.test not in sound:
                alone = (*(EXECUTED if EXECUTOR in tests else ()), *target_options(mutant.file), ended.test)
                try:
                    copy.apply(mutant, sound=True)
                    passed = yield alone
                finally:
                    copy.restore()
                if passed.test:
                    raise RuntimeError(f"{ended.test}: fails without a mutant")
                sound.add(ended.test)
            return ended
        spent += ended.seconds
    return Ended()


def stages_of(mutant: Mutant, last: Row | None) -> list[Tests]:
    stages = judges(mutant.file)
    if last and last.verdict == KILLED and exists(last.by):
        stages.insert(0, (*(EXECUTED if EXECUTOR in stages[0] else ()), *target_options(mutant.file), last.by))
    return stages


def exists(test: str) -> bool:
    """Whether the file still has a function with the name of this test."""
    file, _, rest = test.partition("::")
    name = rest.split("[")[0].split("::")[-1]
    path = ROOT / file
    return path.exists() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


def row_of(mutant: Mutant, ended: Ended | None, seconds: float) -> Row:
    verdict = INVALID if ended is None else KILLED if ended.test else SURVIVED
    test, how, _ = ended or Ended()
    return Row(mutant.address, mutant.digest, verdict, test, how, f"{seconds:.0f}")


def results(mutants: Iterator[Mutant], known: dict[str, Row], args, folder: Path) -> Iterator[Row]:
    """Runs the mutants, several at a time (--jobs), and yields their rows. A row without a verdict is an error, which
    `how` describes."""
    free = [Copy(folder / str(n)) for n in range(args.jobs)]
    sound: set[str] = set()
    under_way: list[tuple] = []
    try:
        while True:
            while free and (mutant := next(mutants, None)):
                started, copy = time.monotonic(), free.pop()
                steps = examine(mutant, copy, stages_of(mutant, known.get(mutant.address)), sound, args.patience)
                under_way.append((mutant, copy, steps, None, started))
            if not under_way:
                return
            for item in list(under_way):
                mutant, copy, steps, run, started = item
                if run and (ended := run.ended()) is None:
                    continue
                under_way.remove(item)
                try:
                    tests = steps.send(ended) if run else next(steps)
                    under_way.append((mutant, copy, steps, Run(copy, tests, args.patience), started))
                except StopIteration as stop:
                    free.append(copy)
                    yield row_of(mutant, stop.value, time.monotonic() - started)
                except RuntimeError as error:
                    free.append(copy)
                    yield Row(mutant.address, mutant.digest, "", "", str(error), f"{time.monotonic() - started:.0f}")
            time.sleep(0.02)
    finally:
        for _, _, steps, run, _ in under_way:
            if run:
                run.stop()
            steps.close()


def show(mutant: Mutant) -> str:
    lines = mutant.source().splitlines(), mutant.applied().splitlines()
    return "\n".join(difflib.unified_diff(*lines, mutant.address, "", lineterm="", n=1))


def chosen(args, parser) -> list[Mutant]:
    rooms = tuple(room for room in args.rooms.split(",") if room not in args.without.split(","))
    if unknown := set(rooms) - set(ROOMS):
        parser.error(f"--rooms: expected {', '.join(ROOMS)}, got {', '.join(sorted(unknown))}")
    mutants = everything(rooms)
    if args.site:
        return [mutant for mutant in everything(tuple(ROOMS)) if mutant.address in args.site]
    if args.known:
        killed = {row.mutant: row for row in read(RESULTS).values() if row.verdict == KILLED}
        mutants = [mutant for mutant in mutants if _is_of(killed, mutant)]
    return drawn([mutant for mutant in mutants if args.only in mutant.address], args.seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and exit")
    parser.add_argument("--show", action="store_true", help="print what they change and exit")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="only those of these rooms (default: all)")
    parser.add_argument("--without", default="", help="not those of these rooms")
    parser.add_argument("--only", default="", help="only those whose address contains this")
    parser.add_argument("--site", action="append", metavar="ADDRESS", help="only this one")
    parser.add_argument("--known", action="store_true", help="only mutants that docs/dev/mutants saw noticed")
    parser.add_argument("--seed", default="0", help="any text, for example a commit's hash (default: 0)")
    parser.add_argument("--count", type=int, help="how many to draw (default: all)")
    parser.add_argument("--seconds", type=float, help="start none after this long")
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        metavar="SECONDS",
        help="of the processor for a mutant's tests (default: 60)",
    )
    parser.add_argument("--least", type=float, default=0, help="percentage killed below which the run fails")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--csv", type=Path, help="a file to add the results to; what it has is not run again")
    parser.add_argument(
        "--publish", type=Path, metavar="CSV", help="copy a file of results into docs/dev/mutants and exit"
    )
    args = parser.parse_args()
    if args.publish:
        write(RESULTS, page.merged(read(RESULTS), read(args.publish)))
        page.publish()
        return 0
    mutants = chosen(args, parser)[: args.count]
    if args.list or args.show:
        print("\n".join(show(mutant) if args.show else mutant.address for mutant in mutants))
        return 0
    for room, (needed, found) in NEEDED.items():
        if not found and any(mutant.room == room for mutant in mutants):
            parser.error(f"the room {room} needs {needed}, without which its tests are skipped; see --without")

    done = read(args.csv) if args.csv else {}
    explained = {row.mutant: row for row in read(RESULTS).values() if row.why}
    rows = [done[mutant.address] for mutant in mutants if _is_of(done, mutant)]
    started = time.monotonic()
    todo = [mutant for mutant in mutants if not _is_of(done, mutant) and not _is_of(explained, mutant)]
    print(f"a sample of {len(todo)} mutants, seed {args.seed}", flush=True)
    limited = (m for m in todo if not args.seconds or time.monotonic() - started < args.seconds)
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", f"{folder}/cache")
        for row in results(limited, read(RESULTS), args, Path(folder)):
            print(
                f"{row.verdict or 'ERROR':8} {float(row.seconds):4.0f} s  {row.mutant}  {row.by} {row.how}", flush=True
            )
            if row.verdict:
                rows.append(row)
                if args.csv:
                    add(args.csv, row)
    counted = [row for row in rows if row.counts]
    killed = sum(row.verdict == KILLED for row in counted)
    print(f"killed {killed} of {len(counted)} in {time.monotonic() - started:.0f} s")
    return int(killed * 100 < args.least * len(counted))


def _is_of(rows: dict[str, Row], mutant: Mutant) -> bool:
    """Whether the rows contain a result for this mutant, and not for an earlier mutation at the same address."""
    row = rows.get(mutant.address)
    return row is not None and row.digest == mutant.digest


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):  # so that no test is left running
        signal.signal(ending, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what ran is in the file of --csv")
