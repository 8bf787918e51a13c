"""Prints what a command is about to do, item by item, and finds in a log what an interrupted command did not reach.

    python -m bench.progress LOG

prints one line for every unfinished command of the log, such as "hope: 7 of 12 done, not reached: ...".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
SEPARATOR = " | "
_PLAN = re.compile(r"^([\w-]+): to do: (.*)$")
_STARTED = re.compile(r"^([\w-]+): (\d+) of (\d+): ")
_FINISHED = re.compile(r"^([\w-]+): (\d+) of \2 done$")
_COMPILED = re.compile(r"^compiled (\d+) of (\d+): ")  # printed by python -m bench sanitize --compile
_PYTEST = re.compile(r"\[ *(\d+)/(\d+)\]")  # console_output_style=count


def steps(
    command: str, items: Sequence[Item], name: Callable[[Item], str] = str, say: Callable[[str], None] | None = None
) -> Iterator[Item]:
    """Yields the items. Prints their names first, then each one as it starts, and at the end that all are done."""
    say = say or _print
    say(f"{command}: to do: {SEPARATOR.join(map(name, items))}")
    for at, item in enumerate(items, 1):
        say(f"{command}: {at} of {len(items)}: {name(item)}")
        yield item
    say(f"{command}: {len(items)} of {len(items)} done")


def _print(line: str) -> None:
    print(line, flush=True)


def unfinished(log: Iterable[str]) -> list[str]:
    """Returns one line for every plan printed by ``steps`` that the log does not finish, and one for an unfinished
    pytest run."""
    plans: list[list] = []  # [command, names, how many were started, finished]
    tests = compiled = None
    for line in log:
        if match := _PLAN.match(line):
            plans.append([match[1], match[2].split(SEPARATOR), 0, False])
        elif match := _STARTED.match(line) or _FINISHED.match(line):
            plan = next((plan for plan in reversed(plans) if plan[0] == match[1]), None)
            if plan:
                plan[2:] = int(match[2]), _FINISHED.match(line) is not None
        elif match := _COMPILED.match(line):
            compiled = int(match[1]), int(match[2])
        for match in _PYTEST.finditer(line):
            tests = int(match[1]), int(match[2])
    found = []
    for command, names, started, finished in plans:
        if not finished:
            done = max(started - 1, 0)
            found.append(f"{command}: {done} of {len(names)} done, not reached: {', '.join(names[done:])}")
    if compiled and compiled[0] < compiled[1]:
        found.append(f"compiling: {compiled[0]} of {compiled[1]} kernels done, not reached: every case")
    if tests and tests[0] < tests[1]:
        found.append(f"tests: {tests[0]} of {tests[1]} run, not reached: {tests[1] - tests[0]}")
    return found


if __name__ == "__main__":
    for line in unfinished(Path(sys.argv[1]).read_text(errors="replace").splitlines()):
        print(line)
