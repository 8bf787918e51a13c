"""``python -m experiments long-context``: writes the tables and the pictures of docs/long_context.md. It makes them
from the journals of ``flashrope loss --by-position`` and ``flashrope passkey``, and from the results of ``python -m
experiments speed``. All of these files are in bench/results/real_model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flashrope.console import files
from flashrope.console.figure import COLOURS, new_figure, save
from flashrope.console.options import BadInput
from flashrope.lab.evaluation.retrieval import Cell, passkey_figure
from flashrope.lab.evaluation.statistics import half_interval, wilson

from . import real_speed, real_training

SUMMARY = "write the tables and the picture of docs/long_context.md again, from bench/results/real_model"
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "real_model"
PAGE, TRAINING_PAGE, SPEED_PAGE = (ROOT / "docs" / f"{name}.md" for name in ("long_context", "training", "speed"))
PICTURE = ROOT / "docs" / "long_context" / "positions.png"
RETRIEVAL_PICTURE = ROOT / "docs" / "long_context" / "passkey.png"
# The names of tables. A page has each table between <!-- NAME:begin --> and <!-- NAME:end -->.
POSITIONS, FAR, RETRIEVAL, COPIED = "positions", "far", "retrieval", "copied"
SPEED, CONTINUED = "speed", "continued"
TRAIN_LENGTH, BIN = 8192, 1024
BASE = "stock"
COLUMNS = (3, 7, 9, 11, 15)  # indices of the bins of 1,024 positions that the table shows
FAR_COLUMNS = (7, 11, 15, 23, 31)  # the same for windows of 32,768 tokens
GIVEN = {"YaRN4": ("YaRN", "factor 4")}  # {name given with --rotary: name and options of the scheme in the table}
SHOWN = {"stock": "the model as it is", "YaRN": "YaRN, factor 2", "ReRoPE, window 2,048": "ReRoPE, window 2,048, log n"}


class Row(NamedTuple):
    """Holds the results of one scheme over all windows in which both the scheme and the unconverted model were
    measured.

    windows: how many windows there are, and how many of them have the full length.
    bins: the mean loss of every bin of positions, in nats per token, over the windows that reach the bin.
    changes: the change of the loss in every bin below the training length, for every window.
    """

    scheme: str
    options: str
    windows: tuple[int, int]
    bins: tuple[float, ...]
    changes: tuple[float, ...]


def run(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition(": ")[2], allow_abbrev=False)
    parser.parse_args(argv)
    journals = read(RESULTS)
    for page, tables in tables_of(RESULTS).items():
        text = page.read_text(encoding="utf-8")
        for name, found in tables.items():
            begin, end = markers(name)
            text = f"{text.split(begin)[0]}{begin}\n{found}\n{end}{text.split(end)[1]}"
        files.write(page, text)
    PICTURE.parent.mkdir(exist_ok=True)
    save(picture(journals), PICTURE)
    save(retrieval_picture(RESULTS), RETRIEVAL_PICTURE)
    print(f"written: {PAGE}, {TRAINING_PAGE}, {SPEED_PAGE}, {PICTURE}, {RETRIEVAL_PICTURE}")


def tables_of(folder: Path) -> dict[Path, dict[str, str]]:
    """Returns {page: {name of a table: its text}}, made from the results in a folder."""
    continued = json.loads((folder / real_training.RESULT).read_text(encoding="utf-8"))
    return {
        PAGE: {
            POSITIONS: table(read(folder), COLUMNS),
            FAR: table(read(folder, FAR), FAR_COLUMNS),
            RETRIEVAL: retrieval_table(folder),
            COPIED: copied_table(folder),
        },
        SPEED_PAGE: {SPEED: speed_tables(folder)},
        TRAINING_PAGE: {CONTINUED: f"`{continued['command']}`:\n\n{real_training.table(continued)}"},
    }


def markers(name: str) -> tuple[str, str]:
    """Returns the two lines of a page that enclose the table of this name."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def read(folder: Path, name: str = POSITIONS) -> list[list[dict]]:
    """Returns the rows of every journal NAME-*.jsonl in a folder, one row for each scheme and window."""
    found = []
    for path in sorted(folder.glob(f"{name}-*.jsonl")):
        settings, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if settings["bin"] != BIN:
            raise BadInput(f"{path}: expected means over {BIN} positions, got {settings['bin']}")
        found.append(rows)
    return found


def rows_of(journals: Sequence[Sequence[dict]]) -> list[Row]:
    """Returns a row for the unconverted model, then the rows of the schemes. The schemes are sorted by the number of
    windows of the full length (most first), then by the loss at the last positions (lowest first).

    Some schemes choose their factor by the length of the text. A scheme that was measured only in shorter windows is
    left out, because its factor is not the factor for the full length.
    """
    measured: dict[tuple[str, str], list[tuple[list[float], list[float]]]] = {}
    for rows in journals:
        bases = {row["window"]: row["bins"] for row in rows if row["scheme"] == BASE}
        for row in rows:
            name, words = GIVEN.get(row["scheme"], (row["scheme"].partition(", window ")[0], row["words"]))
            if row["window"] in bases:
                pair = row["bins"], bases[row["window"]]
                measured.setdefault((name, words), []).append(pair)
    full = max(len(own) for pairs in measured.values() for own, _ in pairs)
    result = []
    for (name, words), pairs in measured.items():
        reaching = [[own[at] for own, _ in pairs if len(own) > at] for at in range(full)]
        if not reaching[-1]:
            continue
        below = TRAIN_LENGTH // BIN
        changes = [a - b for own, base in pairs for a, b in zip(own[:below], base[:below], strict=True)]
        bins = tuple(sum(losses) / len(losses) for losses in reaching)
        result.append(Row(name, words, (len(pairs), len(reaching[-1])), bins, tuple(changes)))
    return sorted(result, key=lambda row: (row.scheme != BASE, -row.windows[1], row.bins[-1]))


def table(journals: Sequence[Sequence[dict]], columns: Sequence[int]) -> str:
    """Returns a Markdown table with the loss by position, and with the change of the loss that a scheme makes below the
    training length."""
    heads = [f"{at}-{at + 1}k" for at in columns]
    lines = [
        "| scheme | options | windows | " + " | ".join(heads) + f" | change below {TRAIN_LENGTH // 1024}k |",
        "|---|---|" + "---:|" * (len(heads) + 2),
    ]
    for row in rows_of(journals):
        cells = [f"{row.bins[at]:.3f}" for at in columns]
        mean = sum(row.changes) / len(row.changes)
        change = "" if row.scheme == BASE else f"{mean:+.3f} ± {half_interval(row.changes):.3f}"
        name = "the model as it is" if row.scheme == BASE else row.scheme
        windows = " / ".join(str(n) for n in sorted(set(row.windows), reverse=True))
        lines.append(f"| {name} | {row.options} | {windows} | " + " | ".join(cells) + f" | {change} |")
    return "\n".join(lines)


def retrieved(folder: Path) -> list[dict]:
    """Returns the cells of the journals of ``flashrope passkey``, one for each scheme, length and depth. If several
    journals have the same cell, their trials are pooled."""
    lines = (path.read_text(encoding="utf-8").splitlines()[1:] for path in sorted(folder.glob("passkey-*.jsonl")))
    pooled: dict[tuple, dict] = {}
    for cell in (json.loads(line) for found in lines for line in found):
        key = cell["scheme"], cell["length"], cell["depth"]
        pooled[key] = _pool(pooled[key], cell) if key in pooled else cell
    return list(pooled.values())


def _pool(a: dict, b: dict) -> dict:
    """Returns a cell with the trials of both cells."""
    trials = a["trials"] + b["trials"]
    log_p = (a["log_probability"] * a["trials"] + b["log_probability"] * b["trials"]) / trials
    chosen = None if None in (a["chosen"], b["chosen"]) else a["chosen"] + b["chosen"]
    counts = {"trials": trials, "found": a["found"] + b["found"], "chosen": chosen}
    return a | counts | {"log_probability": log_p}


def retrieval_picture(folder: Path):
    """Draws how many numbers each scheme finds by length and depth. The unconverted model comes first."""
    found = sorted(retrieved(folder), key=lambda cell: cell["scheme"] != BASE)
    labels = {cell["scheme"]: f"{cell['scheme']}, {cell['words']}" for cell in found}
    cells = [Cell(**{name: cell[name] for name in Cell._fields}) for cell in found]
    return passkey_figure(cells, TRAIN_LENGTH, "SmolLM2-135M", labels | {BASE: "the model as it is"})


def retrieval_table(folder: Path) -> str:
    """Returns a Markdown table from the journals of ``flashrope passkey``. For every scheme and length it says how many
    numbers the scheme finds over all depths, and the log probability of the right number when the number is at the
    start of the text."""
    found: dict[tuple[str, int], list[dict]] = {}
    words = {}
    for cell in retrieved(folder):
        found.setdefault((cell["scheme"], cell["length"]), []).append(cell)
        words[cell["scheme"]] = cell["words"]
    lengths = sorted({length for _, length in found})
    heads = [f"{length:,} tokens: {what}" for length in lengths for what in ("found", "log p at the start")]
    lines = ["| scheme | options | " + " | ".join(heads) + " |", "|---|---|" + "---:|" * len(heads)]
    for scheme in sorted(words, key=lambda name: name != BASE):
        cells = []
        for length in lengths:
            ran = found.get((scheme, length), [])
            hits, trials = sum(cell["found"] for cell in ran), sum(cell["trials"] for cell in ran)
            low, high = wilson(hits, trials) if trials else (0.0, 0.0)
            cells.append(f"{hits} of {trials} ({low:.0%} to {high:.0%})" if trials else "")
            starts = [cell["log_probability"] for cell in ran if cell["depth"] == 0]
            cells.append(f"{starts[0]:.2f}" if starts else "")
        name = "the model as it is" if scheme == BASE else scheme
        lines.append(f"| {name} | {words[scheme]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def copied_table(folder: Path) -> str:
    """Returns a Markdown table from the results of ``flashrope loss --copy``. It has the loss of the second copy of a
    passage at every length, with its 95% interval over the windows of all texts."""
    found: dict[str, dict[int, list[float]]] = {}
    for path in sorted(folder.glob(f"{COPIED}-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["context"] == "copy":
                found.setdefault(row["scheme"], {}).setdefault(row["length"], []).extend(row["windows"])
    lengths = sorted({length for losses in found.values() for length in losses})
    lines = ["| scheme | windows | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |"]
    lines.append("|---|" + "---:|" * (len(lengths) + 1))
    for scheme, losses in sorted(found.items(), key=lambda item: (item[0] != BASE, sum(item[1].get(lengths[-1], [])))):
        cells = [
            f"{sum(each) / len(each):.3f} ± {half_interval(each):.3f}" if (each := losses.get(length)) else ""
            for length in lengths
        ]
        name = "the model as it is" if scheme == BASE else scheme
        lines.append(f"| {name} | {max(map(len, losses.values()))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_tables(folder: Path) -> str:
    """Returns Markdown with the command, the machine and a table for every run of ``python -m experiments speed``,
    shorter texts first, then by machine."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("speed-*.json")]
    return "\n\n".join(
        f"`{run['command']}`, {run['machine']}:\n\n{real_speed.table(run)}"
        for run in sorted(runs, key=lambda run: (run["length"], run["machine"]))
    )


def picture(journals: Sequence[Sequence[dict]]):
    """Draws the loss by position of the unconverted model, YaRN and ReRoPE, over the windows that were measured for all
    three."""
    shown = [found for found in journals if {row["scheme"] for row in found} >= SHOWN.keys()]
    drawn = new_figure((7.2, 3.0))
    axes = drawn.subplots()
    for at, (scheme, label) in enumerate(SHOWN.items()):
        bins = [row["bins"] for found in shown for row in found if row["scheme"] == scheme]
        means = [sum(each) / len(bins) for each in zip(*bins, strict=True)]
        look = dict(linestyle=(0, (4, 2))) if at == 1 else {}  # so that ReRoPE's line is visible behind it
        axes.plot([(n + 0.5) * BIN for n in range(len(means))], means, label=label, color=COLOURS[at], lw=2, **look)
    axes.axvline(TRAIN_LENGTH, color="0.4", linewidth=1, linestyle=":", zorder=0)
    axes.set_xticks(range(0, len(means) * BIN + 1, 2 * BIN), [f"{n}k" for n in range(0, len(means) + 1, 2)])
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("position in tokens; dotted: the training length", fontsize=9)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(f"SmolLM2-135M, {len(shown)} windows", fontsize=10, loc="left")
    return drawn
