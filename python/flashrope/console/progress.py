"""Shows progress: on a terminal as a bar with the time left, otherwise as a line from time to time."""

from __future__ import annotations

import math
import shutil
import sys
import time

WIDTH = 30
EVERY = 30.0  # seconds between lines if there is no terminal
SETTLED = 1.0  # seconds of work after which the time left can be estimated


def duration(seconds: float) -> str:
    """Returns a time such as "45 s", "2 min 10 s" or "3 h 05 min". The time is rounded up, so "0 s" appears only at the
    end."""
    seconds = math.ceil(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"


def seconds_left(elapsed: float, done: float, total: float) -> float | None:
    """Returns the seconds left at the pace so far, or None if nothing is done yet or less than a second has passed."""
    return elapsed / done * (total - done) if done and elapsed >= SETTLED else None


def columns() -> int:
    """Returns the width of the terminal, or 80 if the terminal reports 0, as under script(1)."""
    return shutil.get_terminal_size().columns or 80


class Bar:
    """A progress bar that counts steps up to total. It is written to stderr, so that stdout contains only results.

    When it is used as a context manager, the bar is cleared at the end of the block.

    Args:
        total: the number of steps.
        stream: where to draw. Default: stderr.
        limit: seconds after which the work ends even if steps are left.
    """

    def __init__(self, total: int, stream=None, limit: float = math.inf):
        self.total, self.done, self.limit = total, 0, limit
        self.stream = sys.stderr if stream is None else stream
        self.text, self.note, self.began = "", "", time.monotonic()
        self.said = self.began  # the time at which the last line was printed
        self.live = self.stream.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_) -> None:
        self.clear()

    def start(self, text: str) -> Bar:
        """Sets the text for the next steps. Time counts from the first call. Returns the bar."""
        if not self.text:
            self.began = time.monotonic()
        self.text, self.note = text, ""
        if self.live:
            self._draw()
        else:
            self._say(f"{text} ({self._time()})" if self.done else text)
        return self

    def step(self, count: int = 1, note: str = "") -> None:
        """Counts steps as done. note: a second text, which is shown until the next step."""
        self.done, self.note = min(self.done + count, self.total), note
        if self.live:
            self._draw()
        elif time.monotonic() - self.said >= EVERY:
            self._say(f"{self._join(self.text, self.note)}: {self.done} of {self.total} ({self._time()})")

    def clear(self) -> None:
        """Clears the bar, to make room for other output."""
        if self.live:
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        print(line, file=self.stream, flush=True)

    def _join(self, *words: str) -> str:
        return ", ".join(filter(None, words))

    def _time(self) -> str:
        elapsed = time.monotonic() - self.began
        left = seconds_left(elapsed, self.done, self.total)
        if left is not None:
            left = min(left, max(self.limit - elapsed, 0.0))
        return duration(elapsed) + (f", about {duration(left)} left" if left else "")

    def _draw(self) -> None:
        filled = WIDTH * self.done // max(self.total, 1)
        share = 100 * self.done // max(self.total, 1)
        line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {share}% {self._time()}  {self._join(self.note, self.text)}"
        print(f"\r\x1b[K{line[: columns() - 1]}", end="", file=self.stream, flush=True)
