"""Files that are either written completely or not at all, and CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It replaces ``path`` when the block ends, unless the block raised."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    os.replace(partial, path)


def write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()
