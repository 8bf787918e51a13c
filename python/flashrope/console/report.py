"""Formats lists of settings and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def aligned(title: str, rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """Returns a title and a table. The first row is the heading. The first column is aligned left, and the others are
    aligned right. Columns are at least ``width`` wide."""
    first = max(len(row[0]) for row in rows)
    widths = [max(width, 3 + max(map(len, column))) for column in list(zip(*rows, strict=True))[1:]]
    text = [row[0].ljust(first) + "".join(map(str.rjust, row[1:], widths)) for row in rows]
    return "\n".join([title, text[0], "-" * len(text[0]), *text[1:]])


def lines(facts: dict[str, str], *names: str) -> str:
    """Returns lines with the named facts (by default all facts), wrapped to 110 columns."""
    return "\n".join(
        textwrap.fill(
            facts[name], 110, initial_indent=f"{name + ':':11}", subsequent_indent=" " * 11, break_long_words=False
        )
        for name in names or facts
    )
