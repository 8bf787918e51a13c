"""Decides where the results of a run go. They are always printed, but written to files only with --out or --publish."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
VALUE_OPTIONS, FLAGS = ("--out",), ("--publish",)


def add_output_options(p: argparse.ArgumentParser) -> None:
    group = p.add_mutually_exclusive_group()
    group.add_argument("--out", type=Path, metavar="DIR", help="write JSON, CSV and figures to DIR/<device>")
    group.add_argument(
        "--publish", action="store_true", help="write them to bench/results/<device> and regenerate its README.md"
    )
    p.add_argument("--note", default="", help="text to keep with the results, for example what else the machine ran")


def output_folder(options: argparse.Namespace) -> Path | None:
    """Returns the folder in which the device's folder lies or will be made, or None if no files are written."""
    return RESULTS if options.publish else options.out


def without_output_options(words: list[str]) -> list[str]:
    """Returns a command line without the options that say where to write results."""
    kept, words = [], list(words)
    while words:
        word = words.pop(0)
        if word in VALUE_OPTIONS:
            words = words[1:]
        elif word not in FLAGS and not word.startswith(tuple(f"{name}=" for name in VALUE_OPTIONS)):
            kept.append(word)
    return kept
