"""Writes files atomically, checks output folders, and formats CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .options import BadInput


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. When the block ends without an error, the temporary file replaces
    ``path``."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def folder(name: str) -> Path:
    """Returns the folder of the option --out. Makes the folder if it does not exist. Raises BadInput if it is not
    writable."""
    out = Path(name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise BadInput(f"--out: cannot write to {out} ({error.strerror})") from None
    return out


def check_folder(name: str, results: Sequence[str], overwrite: bool) -> None:
    """Checks that ``folder`` will succeed, and that the folder holds no results unless overwrite is True. Does not make
    the folder.

    Raises:
        BadInput: a check failed. The message names --out and the reason.
    """
    out = Path(name)
    there = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInput(f"--out: cannot write to {out} ({'not writable' if there.is_dir() else 'Not a directory'})")
    found = [each for each in results if (out / each).exists()]
    if found and not overwrite:
        raise BadInput(
            f"--out: expected a folder without results, got {out} with {', '.join(found)}; name another one, or add "
            "--overwrite"
        )


def write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()
