"""Draws the results under bench/results: their figures, all of their tables into bench/results/README.md, and the goals
with one figure a device into README.md, between its markers. Nothing is measured or computed here: what is shown is
what the files hold.

    python -m bench readme [--results DIR] [--readme PATH] [--check]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from . import goals, plots, results, scaling, suite
from .results import Record, Run

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
TITLES = {
    "hope": "HoPE and RoPE",
    "rerope": "ReRoPE",
    "decode": "Decoding one token",
    "rotation": "What rotation costs",
    "scaling": "Growth",
    "cpu": "CPU against PyTorch's own attention",
}
FEATURED = {"cpu": "decode", "cuda": "hope"}  # whose figure README.md shows
COMPILED = "compiled"  # the folder of what the gate wrote
MAIN_KERNELS = ("attention_forward", "attention_grad_kv", "attention_grad_q")
COLUMNS = {
    "kernel": "kernel",
    "arch": "architecture",
    "D": "head_dim",
    "bands": "bands",
    "regs": "registers",
    "spill B": "spilled bytes",
    "shared KB": "shared KB",
    "blocks/SM": "blocks per SM",
    "instr/MMA": "instructions per HMMA or HGMMA",
    "model": "tensor cores busy (model)",
}


def devices(folder: Path) -> list[tuple[Path, list[tuple[Path, Run]]]]:
    """(folder, its files and runs) of every device. Raises ValueError where the files of one are of different
    versions."""
    found = []
    for device in sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.json"))):
        paths = sorted(device.glob("*.json"), key=lambda path: (list(TITLES).index(path.stem.split("-")[0]), path.stem))
        runs = [(path, results.read(path)) for path in paths]
        results.check_comparable([run for _, run in runs])
        found.append((device, runs))
    if not found:
        raise ValueError(f"{folder}: no results")
    return found


def draw(runs: Sequence[tuple[Path, Run]]) -> None:
    for path, run in runs:
        (scaling.redraw if run.command == "scaling" else plots.draw)(run, path.with_suffix(".png"))


# ---- bench/results/README.md


def page(found: Sequence[tuple[Path, list[tuple[Path, Run]]]]) -> str:
    """All goals and all tables, with links relative to the folder of the results."""
    lines = [
        "# Results",
        "",
        "Written by `python -m bench readme` from the JSON files here, which hold every figure with its quartiles, the command,",
        "the versions and the git revision. A device that nobody had is absent.",
        "",
        "## Goals",
        "",
        "Above 1 flashrope is faster; its time includes the rotation. bf16, head_dim 128, causal, seqlen 2048 and more unless",
        "said otherwise; the worst over the lengths.",
        "",
        *_goals_table([run for _, runs in found for _, run in runs]),
    ]
    for device, runs in found:
        lines += ["", f"## {runs[0][1].device['name']}", "", *_about([run for _, run in runs])]
        for path, run in runs:
            lines += ["", f"### {TITLES[run.command]}", "", *_of_run(run)]
            if path.with_suffix(".png").exists():
                lines += ["", f"![{TITLES[run.command]}]({device.name}/{path.stem}.png)"]
    return "\n".join(lines) + "\n"


def _goals_table(runs: Sequence[Run]) -> list[str]:
    rows = []
    for goal in goals.evaluate(runs[0]):
        seen = [
            (run.device["name"], judged)
            for run in runs
            for judged in run.goals
            if judged["goal"] == goal["goal"] and judged.get("measured")
        ]
        figures = [f"{judged['worst']:.2f} on {name}: {judged['verdict']}" for name, judged in seen] or ["not run"]
        rows.append((goal["goal"], f"{goal['floor']:g}", goals.aim_text(goal) or "–", "; ".join(figures)))
    return _table(["", "floor", "aim", "measured"], rows)


def _about(runs: Sequence[Run]) -> list[str]:
    first = runs[0]
    hardware = (
        f"{first.device['threads']} threads, {first.device['vector']}"
        if "threads" in first.device
        else first.device["hardware"]
    )
    notes = "".join(f"; {note}" for note in dict.fromkeys(run.note for run in runs if run.note))
    return [f"{hardware}; {first.shown_versions}{notes}."]


def _of_run(run: Run) -> list[str]:
    sizes = run.records[0].sizes
    lines = [f"head_dim {sizes['head_dim']}, {_heads(sizes)}, {sizes['dtype']}: `{run.shown_command}`"]
    if run.ceilings:
        lines.append(
            "Ceilings measured in the same run: "
            + "; ".join(
                f"{plots.CEILINGS[name]}: {value:.3g} {'TFLOP/s' if 'flops' in name else 'GB/s'}"
                for name, value in run.ceilings.items()
            )
            + "."
        )
    for reason in dict.fromkeys(run.absent.values()):
        lines += ["", f"Not run: {', '.join(name for name, why in run.absent.items() if why == reason)} ({reason})."]
    lines += [
        line
        for name, error in run.wrong.items()
        for line in ("", f"Wrong, so not timed: {name} (error {error:.2g} against float64).")
    ]
    lines += [line for skipped in run.skipped for line in ("", f"Skipped: {skipped}.")]
    if run.command == "scaling":
        return [
            *lines,
            "",
            *_table(
                ["power of the best fit, upper half of each series", ""],
                [(name, f"{power:.2f}") for name, power in run.exponents.items()],
            ),
        ]
    if run.command == "cpu":
        rows = [(record.table, record.contestant, _milliseconds(record), _ratios(record)) for record in run.records]
        return [*lines, "", *_table(["", "", "ms (quartiles)", "ratio"], rows), "", *_cpu_goals(run)]
    for backward in (False, True):
        records = [record for record in run.records if record.backward == backward]
        if records:
            lines += [
                "",
                *_by_length(
                    records, "forward + backward" if backward else "one token" if sizes["decoding"] else "forward"
                ),
            ]
    for backward in (False, True):
        records = [record for record in run.records if record.backward == backward and record.peak_bytes is not None]
        if records:
            lines += ["", *_memory(records, f"{'forward + backward, ' if backward else ''}MiB beyond the inputs")]
    return lines


def _heads(sizes: dict) -> str:
    return (
        f"{sizes['heads']} heads"
        if sizes["heads"] == sizes["heads_kv"]
        else f"{sizes['heads']} query and {sizes['heads_kv']} key heads"
    )


def _by_length(records: Sequence[Record], what: str) -> list[str]:
    """Contestants down, lengths across: milliseconds, and in brackets this one's time over the last of our own's."""
    ours = [record.contestant for record in records if record.ours][-1:]
    cells = {
        (record.contestant, record.seqlen): f"{record.milliseconds:.3g}"
        + "".join(f" ({record.ratios[name]:.2f})" for name in ours if name in record.ratios)
        for record in records
    }
    return _lengths_across(f"{what}, ms" + "".join(f" (over {name}'s)" for name in ours), records, cells)


def _memory(records: Sequence[Record], heading: str) -> list[str]:
    return _lengths_across(
        heading, records, {(record.contestant, record.seqlen): f"{record.peak_bytes / 2**20:.1f}" for record in records}
    )


def _lengths_across(heading: str, records: Sequence[Record], cells: dict[tuple[str, int], str]) -> list[str]:
    names, seqlens = (
        list(dict.fromkeys(of(record) for record in records))
        for of in (lambda record: record.contestant, lambda record: record.seqlen)
    )
    return _table(
        [heading, *(f"{seqlen:,}" for seqlen in seqlens)],
        [(name, *(cells.get((name, seqlen), "–") for seqlen in seqlens)) for name in names],
    )


def _milliseconds(record: Record) -> str:
    return f"{record.milliseconds:.1f} ({record.low:.1f} – {record.high:.1f})"


def _ratios(record: Record) -> str:
    return ", ".join(f"{ratio:.2f} of {name}" for name, ratio in record.ratios.items() if name != record.contestant)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """The first `words` columns to the left, numbers to the right."""
    return [
        "| " + " | ".join(heading) + " |",
        "|" + "|".join(["---"] * words + ["---:"] * (len(heading) - words)) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


# ---- README.md
def summary(root: Path, folder: Path, found: Sequence[tuple[Path, list[tuple[Path, Run]]]]) -> str:
    """What README.md shows: the goals that were run, one figure a device, what the compiler says."""
    place = folder.relative_to(root) if folder.is_relative_to(root) else folder
    absent = "" if any("multiprocessors" in runs[0][1].device for _, runs in found) else "No GPU has run this version. "
    lines = [f"{absent}All tables, figures and goals: [{place}/README.md]({place}/README.md)."]
    for device, runs in found:
        gpu = "multiprocessors" in runs[0][1].device
        lines += ["", f"### {runs[0][1].device['name']}", "", *_about([run for _, run in runs])]
        if gpu:
            judged = [[goal for goal in run.goals if goal["measured"]] for _, run in runs]
            rows = [
                (goal["goal"], f"{goal['worst']:.2f}", f"{goal['floor']:g}") for of_run in judged for goal in of_run
            ]
            lines += [
                "",
                *_table(["worst over the lengths; above 1 flashrope is faster", "measured", "at least"], rows),
            ]
        for _, run in runs:
            if run.command == "cpu":
                sizes = run.records[0].sizes
                lines += [
                    "",
                    f"`{run.shown_command}`, {_heads(sizes)} of {sizes['head_dim']}, {sizes['dtype']}:",
                    "",
                    *_cpu_goals(run),
                ]
        figure = next(
            (path.with_suffix(".png") for path, run in runs if run.command == FEATURED["cuda" if gpu else "cpu"]), None
        )
        if figure and figure.exists():
            lines += ["", f"![{TITLES[FEATURED['cuda' if gpu else 'cpu']]}]({place}/{device.name}/{figure.name})"]
    for path in sorted((folder / COMPILED).glob("*.csv")):
        lines += ["", *_compiled(path, place)]
    return "\n".join(lines)


def _cpu_goals(run: Run) -> list[str]:
    return _table(
        ["time over time, memory over memory, microseconds", "measured", "goal: at most"],
        [
            (
                goal["goal"],
                f"{goal['worst']:.2f}" + ("" if goal["verdict"] == "met" else " (missed)"),
                f"{goal['floor']:.2f}",
            )
            for goal in run.goals
        ],
    )


def _compiled(path: Path, place: Path) -> list[str]:
    """The main kernels of a table that the gate wrote."""
    with open(path, newline="") as lines:
        every = list(csv.DictReader(lines))
    if {"revision", "triton", *COLUMNS} - set(every[0] if every else ()):
        raise ValueError(f"{path}: expected the table that python -m bench gate --csv writes")
    rows = [
        row for row in every if row["kernel"] in MAIN_KERNELS and row["scheme"].partition(" +")[0] in ("rope", "rerope")
    ]
    if len({(row["triton"], row["revision"]) for row in every}) > 1:
        raise ValueError(f"{path}: rows of different versions")
    compiler, file = f"Triton {rows[0]['triton']}", f"{place}/{COMPILED}/{path.name}"
    return [
        f"<details><summary>{len(rows)} kernels of prefill and training as {compiler} compiles them, bf16</summary>",
        "",
        *_table(list(COLUMNS.values()), [[row[name] or "–" for name in COLUMNS] for row in rows], words=2),
        "",
        f"`python -m bench gate --quick`, revision {rows[0]['revision']}; no GPU was needed. With decoding: [{file}]({file}).",
        "",
        "</details>",
    ]


def drawn(text: str, section: str) -> str:
    """README.md's text with everything between the markers made anew. Raises ValueError where it has no markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md: expected {BEGIN} and after it {END}, each once")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "python -m bench readme", description=__doc__.strip().split("\n")[0], allow_abbrev=False
    )
    p.add_argument("--results", type=Path, default=suite.RESULTS)
    p.add_argument("--readme", type=Path, default=suite.RESULTS.parent.parent / "README.md")
    p.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit with 1 where the two pages are not what the results give",
    )
    options = p.parse_args(argv)
    folder, root = options.results.resolve(), options.readme.resolve().parent
    try:
        found = devices(folder)
        if not options.check:
            for _, runs in found:
                draw(runs)
        pages = {
            options.readme: drawn(options.readme.read_text(), summary(root, folder, found)),
            folder / "README.md": page(found),
        }
    except ValueError as error:
        print(error)
        return 1
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if options.check:
        print(
            f"not what the results give: {', '.join(map(str, stale))}; python -m bench readme"
            if stale
            else "both pages hold the results"
        )
        return int(bool(stale))
    for path in stale:
        path.write_text(pages[path])
    return 0
