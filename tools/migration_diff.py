"""Writes the difference between examples/migration/before.py and after.py to docs/migration.md.

python tools/migration_diff.py
"""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migration.md"
BEGIN, END = "<!-- difference:begin -->", "<!-- difference:end -->"


def difference() -> str:
    before, after = ((ROOT / "examples" / "migration" / f"{name}.py").read_text() for name in ("before", "after"))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before.py", "after.py", n=1, lineterm="")
    return f"{BEGIN}\n```diff\n" + "\n".join(lines) + f"\n```\n{END}"


def render() -> str:
    """Returns the page with the difference in it."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    return head + difference() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(render())
