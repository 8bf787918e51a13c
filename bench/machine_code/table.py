"""Prints aligned columns on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, str]], left: int) -> None:
    """Prints a heading and one line per row. A missing value is printed as "-". The first `left` columns are
    left-aligned, the others right-aligned."""
    lines = [tuple(columns), *(tuple(row.get(column, "-") for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
