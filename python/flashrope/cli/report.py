"""Lists of settings, tables, and one progress bar per job."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from .progress import columns, duration, seconds_left


class Bars:
    """One progress bar of ``total`` steps per name, with the time left. Where stderr is not a terminal, a line is
    printed at the first step and at every quarter instead."""

    def __init__(self, names: Sequence[str], total: int):
        from tqdm import tqdm

        self._names, self._total, self._steps = names, total, [0] * len(names)
        self._began = [0.0] * len(names)  # when the first step was done, which compiles
        width: dict[str, Any] = (
            {"dynamic_ncols": True} if _has_width() else {"ncols": columns(), "nrows": len(names) + 2}
        )
        self._bars = [tqdm(total=total, desc=name, position=at, disable=None, **width) for at, name in enumerate(names)]

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_) -> None:
        for bar in self._bars:
            bar.close()

    def update(self, bar: int, step: int, loss: float | None = None) -> None:
        """Set bar number ``bar`` to ``step``."""
        shown, before = self._bars[bar], self._steps[bar]
        self._steps[bar] = step
        if before < 1 <= step:
            self._began[bar] = time.monotonic()
        if not shown.disable:
            if loss is not None:
                shown.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            shown.update(step - shown.n)
        elif before < 1 <= step or any(before < self._total * quarter // 4 <= step for quarter in (1, 2, 3, 4)):
            print(
                f"{self._names[bar]}: {step} of {self._total}"
                + (f", loss {loss:.3f}" if loss is not None else "")
                + self._left(bar),
                flush=True,
            )

    def step(self) -> None:
        """Advance the first bar by one."""
        self.update(0, self._steps[0] + 1)

    def _left(self, bar: int) -> str:
        done = self._steps[bar] - 1
        left = seconds_left(time.monotonic() - self._began[bar], done, self._total - 1) if done > 0 else None
        return f", about {duration(left)} left" if left else ""


def _has_width() -> bool:
    """Whether the terminal of stderr reports a width, which tqdm follows. At a size of 0 tqdm would draw nothing."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # no terminal
        return True


def aligned(title: str, rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """A title and a table: the first row is the heading, the first column is aligned left and the others right, each at
    least ``width`` wide."""
    first = max(len(row[0]) for row in rows)
    widths = [max(width, 3 + max(map(len, column))) for column in list(zip(*rows, strict=True))[1:]]
    text = [row[0].ljust(first) + "".join(map(str.rjust, row[1:], widths)) for row in rows]
    return "\n".join([title, text[0], "-" * len(text[0]), *text[1:]])


def lines(facts: dict[str, str], *names: str) -> str:
    """The named facts (by default all), wrapped to 110 columns."""
    return "\n".join(
        textwrap.fill(
            facts[name], 110, initial_indent=f"{name + ':':11}", subsequent_indent=" " * 11, break_long_words=False
        )
        for name in names or facts
    )
