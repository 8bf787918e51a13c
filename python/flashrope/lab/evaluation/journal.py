"""Writes results to a file line by line, so that an interrupted run keeps its finished results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...console import files
from ...console.options import BadInput
from .readings import Measured


class Journal:
    """A file with one line of JSON for the settings of a run, and then one line for every finished piece of the run.

    Opening the file of an earlier run continues that run. An incomplete last line is dropped.

        journal = Journal(path, {"model": "...", "text": "..."})
        if ("ReRoPE", 3) not in {(row["scheme"], row["window"]) for row in journal.rows}:
            journal.add({"scheme": "ReRoPE", "window": 3, "loss": 2.9})
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool = False):
        """
        settings: everything that the rows depend on. JSON must preserve the values.
        overwrite: start a new run even if the file exists.

        Raises:
            BadInput: the file has rows of another run. The message names the first setting that differs.
        """
        self.path, self.rows = path, list[dict[str, Any]]()
        wanted = json.loads(json.dumps(dict(settings)))
        lines = [] if overwrite else _lines(path)
        if lines:
            _check_same(path, lines[0], wanted)
            self.rows = lines[1:]
        self._rewrite([wanted, *self.rows])

    def check_schemes(self, schemes: Iterable[Measured]) -> None:
        """Checks that the rows of these schemes were measured with the options that the schemes have now.

        Raises:
            BadInput: a scheme's options have changed since its rows were written. The message names the first such
                scheme.
        """
        words = {scheme.label: scheme.words for scheme in schemes}
        for row in self.rows:
            if row["words"] != words.get(row["scheme"], row["words"]):
                raise BadInput(
                    f"--out: {self.path.parent} holds a run with another scheme, {row['scheme']} with {row['words']} "
                    f"instead of {words[row['scheme']]}; name another folder, or add --overwrite"
                )

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes a row. The row is on disk when this method returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(dict(row))

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        files.write(self.path, "".join(json.dumps(line) + "\n" for line in lines))


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n")[:-1]:  # text after the last newline is an incomplete line
        try:
            found.append(json.loads(line))
        except ValueError:
            raise BadInput(f"--out: {path} is not a file of results; name another folder, or add --overwrite") from None
    return found


def _check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise BadInput(
                f"--out: {path} holds a run with another {name}, {_short(found.get(name))} instead of {_short(value)}; "
                "name another folder, or add --overwrite"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
