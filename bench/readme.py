"""Draws the results under bench/results into README.md, between its markers. Nothing is computed here: tables are the records of the
files, figures are the PNGs beside them.

    python -m bench readme [--results DIR] [--readme PATH] [--check]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import results, suite
from .results import Record, Run

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
TITLES = {"hope": "HoPE and RoPE", "rerope": "ReRoPE", "decode": "Decoding one token", "rotation": "What rotation costs", "scaling": "Growth",
          "cpu": "CPU"}


def section(root: Path, folder: Path) -> str:
    """One device: what it is, its tables, links to its figures. Raises ValueError where its files are of different versions."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (list(TITLES).index(path.stem.split("-")[0]), path.stem))
    runs = [results.read(path) for path in paths]
    results.check_comparable(runs)
    first = runs[0]
    hardware = first.device["hardware"] + (f", {first.device['threads']} threads" if "threads" in first.device else "")
    lines = [f"### {first.device['name']}", "",
             f"{hardware}; torch {first.versions['torch']}, triton {first.versions['triton']}, revision {first.versions['revision']}."]
    for note in dict.fromkeys(run.note for run in runs if run.note):
        lines.append(f"{note[0].upper()}{note[1:]}.")
    for path, run in zip(paths, runs, strict=True):
        lines += ["", *_of_run(run)]
        figure = path.with_suffix(".png")
        if figure.exists():
            relative = figure.relative_to(root) if figure.is_relative_to(root) else figure
            lines += ["", f"<details><summary>figure</summary>\n\n![{TITLES[run.command]}]({relative})\n\n</details>"]
    return "\n".join(lines)


def _of_run(run: Run) -> list[str]:
    sizes = run.records[0].sizes
    lines = [f"**{TITLES[run.command]}**, head_dim {sizes['head_dim']}, {sizes['heads']} query and {sizes['heads_kv']} key heads, {sizes['dtype']} "
             f"(`{run.shown_command}`)"]
    if run.command == "scaling":
        rows = [(name, f"{power:.2f}") for name, power in run.exponents.items() if "flashrope" in name]
        return [*lines, "", *_table(["fitted power of", ""], rows)]
    for backward in (False, True):
        records = [record for record in run.records if record.backward == backward]
        if records and run.command == "cpu":
            lines += ["", *_table(["", "ms", "ratio"], [(f"{record.contestant}, {record.table}", f"{record.milliseconds:.1f}", _ratios(record))
                                                        for record in records])]
        elif records:
            lines += ["", *_by_length(records, "forward + backward" if backward else "one token" if sizes["decoding"] else "forward")]
    return lines


def _by_length(records: Sequence[Record], what: str) -> list[str]:
    """Contestants down, lengths across: milliseconds, and in brackets this one's time over the last of our own's."""
    seqlens = list(dict.fromkeys(record.seqlen for record in records))
    names = list(dict.fromkeys(record.contestant for record in records))
    ours = [record.contestant for record in records if record.ours][-1:]
    cells = {(record.contestant, record.seqlen): f"{record.milliseconds:.3g}" + "".join(f" ({record.ratios[name]:.2f})" for name in ours
                                                                                 if name in record.ratios) for record in records}
    heading = f"{what}, ms" + "".join(f" (over {name}'s)" for name in ours)
    return _table([heading, *(f"{seqlen:,}" for seqlen in seqlens)],
                  [(name, *(cells.get((name, seqlen), "–") for seqlen in seqlens)) for name in names])


def _ratios(record: Record) -> str:
    return ", ".join(f"{ratio:.2f} of {name}" for name, ratio in record.ratios.items() if name != record.contestant)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(heading) + " |", "|" + "|".join(["---"] + ["---:"] * (len(heading) - 1)) + "|",
            *("| " + " | ".join(row) + " |" for row in rows)]


def drawn(text: str, root: Path, folder: Path) -> str:
    """README.md's text with everything between the markers made anew. Raises ValueError where it has no markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md: expected {BEGIN} and after it {END}, each once")
    devices = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.json")))
    if not devices:
        raise ValueError(f"{folder}: no results")
    before, rest = text.split(BEGIN)
    body = "\n\n".join(section(root, device) for device in devices)
    return f"{before}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench readme", description=__doc__.strip().split("\n")[0], allow_abbrev=False)
    p.add_argument("--results", type=Path, default=suite.RESULTS)
    p.add_argument("--readme", type=Path, default=suite.RESULTS.parent.parent / "README.md")
    p.add_argument("--check", action="store_true", help="change nothing; exit with 1 where README.md is not what the results give")
    options = p.parse_args(argv)
    text = options.readme.read_text()
    try:
        new = drawn(text, options.readme.resolve().parent, options.results.resolve())
    except ValueError as error:
        print(error)
        return 1
    if options.check:
        print("README.md holds the results" if new == text else "README.md differs from the results: python -m bench readme")
        return int(new != text)
    options.readme.write_text(new)
    return 0
