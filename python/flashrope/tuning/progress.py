"""A progress bar on a terminal; elsewhere one line for each item."""

from __future__ import annotations

import shutil
import sys
import time

WIDTH = 30


class Bar:
    """Counts steps up to total. Written to stderr, so that what is printed on stdout stays clean."""

    def __init__(self, total: int, stream=None):
        self.total, self.done = total, 0
        self.stream = sys.stderr if stream is None else stream
        self.text, self.began = "", time.monotonic()
        self.live = self.stream.isatty()

    def start(self, text: str) -> None:
        """Names what the next steps belong to."""
        self.text = text
        if self.live:
            self._draw()
        else:
            print(text, file=self.stream, flush=True)

    def step(self, count: int = 1) -> None:
        self.done = min(self.done + count, self.total)
        if self.live:
            self._draw()

    def clear(self) -> None:
        """Makes room for other output."""
        if self.live:
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    def _draw(self) -> None:
        filled = WIDTH * self.done // max(self.total, 1)
        seconds = int(time.monotonic() - self.began)
        line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {self.done}/{self.total} {seconds} s  {self.text}"
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{line[: columns - 1]}", end="", file=self.stream, flush=True)
