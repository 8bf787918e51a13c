"""Regenerates bench/results/README.md from the records in that folder. Nothing is measured or computed here.

python -m bench report [--results DIR] [--figures] [--check]
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from flashrope.console.files import write

from .report import goals, plots, records
from .report.output import RESULTS
from .report.records import Record, Run
from .speed import scaling

TITLES = {
    "hope": "HoPE and RoPE",
    "rerope": "ReRoPE",
    "decode": "Decoding one token",
    "rotation": "Cost of rotation",
    "scaling": "Growth",
    "cpu": "CPU backend against PyTorch's attention",
}
COMPILED = "compiled"  # the folder of tables from python -m bench gate --csv
PEERS = "flash-attention-2"  # the folder of tables from python -m bench peers --csv, and of notes.md
REAL_MODEL = "real_model"  # the folder of measurements on pretrained models, which are not runs of python -m bench
MAIN_KERNELS = ("attention_forward", "attention_grad_kv", "attention_grad_q")
HEADINGS = {  # {column of the tables in COMPILED and PEERS: its heading on the page}
    "pass": "pass",
    "kernel": "kernel",
    "arch": "architecture",
    "D": "head_dim",
    "bands": "bands",
    "tile": "tile",
    "warps": "warps",
    "regs": "registers",
    "spill B": "spilled bytes",
    "spills in loop": "spill instructions in the loop",
    "shared KB": "shared KB",
    "blocks/SM": "blocks per SM",
    "instr/MMA": "instructions per HMMA or HGMMA",
    "instr/product": "instructions per HMMA",
    "ldsm/product": "LDSM per HMMA",
    "mufu+fp32/product": "MUFU and FP32 per HMMA",
}
PEER_ONLY = ("pass", "tile", "warps", "spills in loop", "instr/product", "ldsm/product", "mufu+fp32/product")
COLUMNS = [name for name in HEADINGS if name not in PEER_ONLY]
PEER_COLUMNS = [name for name in HEADINGS if name not in ("bands", "instr/MMA")]
INTRODUCTION = """\
# Benchmarks

`python -m bench report` generates this page from the JSON files in this folder. The files contain every figure with its
quartiles, the command, the versions and the git revision, and say whether the code had uncommitted changes. The page
lists only devices on which someone ran the benchmark. GPUs come first, then figures from machine code, for which no GPU
is needed, then CPUs. In the tables of CPUs, "compiled" means this package's own kernels, and
"composed" means a composition of PyTorch's operators. `bench/on_gpu.sh` runs everything on a GPU and packs the results
into one file. To add these results to the page, unpack the folder `results` of that file into this folder and run
`python -m bench report`.

## Goals

A ratio is the time of a peer divided by the time of flashrope: above 1 flashrope is faster. flashrope's time includes
the rotation. Unless a goal says otherwise, it is for causal attention in bf16 with head_dim 128 and a seqlen of at
least 2048. The table has the figure at every length that was measured, and the run that it is from. The worst figure
decides. A goal that nobody has measured is "not run".
"""

ROTATED_CACHE = "rotate the cache, then SDPA"  # a key of plots.CPU_SERIES
WHY_IT_JUMPS = """\
The line "ReRoPE, rotated cache + SDPA" jumps in the chart. A likely reason is that a step allocates tensors as large as
the keys. Whether glibc keeps their memory or returns it to the system depends on their size and on what was freed
before. Returned memory costs a page fault per 4 KiB at the next step. This run did not count page faults, but another
run did: the same contestants at revision e1f5b9f, with `getrusage` around each call, on two shared cores of an AMD EPYC
without AVX-512. Over 4,096, 8,192 and 16,384 keys a step took 6,656, 10,240 and 32,772 page faults and 15, 27 and
78 ms. The settings `MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184` make glibc keep the memory.
With these settings a step took no page faults and 4.4, 10 and 22 ms. With glibc's defaults and only this contestant in
the process, a step took 0, 4,064 and 32,772 page faults. Two repeats with other work on the machine counted about as
many page faults, but not all of their times showed the difference.\
"""

Runs = list[tuple[Path, Run]]  # (JSON file, its run)


def devices(folder: Path) -> list[tuple[Path, Runs]]:
    """Returns (folder, its files and runs) for every device, GPUs first.

    Raises:
        ValueError: the runs of a device have different versions, or there are no runs.
    """
    found = []
    folders = (path for path in folder.iterdir() if path.is_dir() and path.name != REAL_MODEL)
    for device in sorted(path for path in folders if any(path.glob("*.json"))):
        paths = sorted(device.glob("*.json"), key=lambda path: (list(TITLES).index(path.stem.split("-")[0]), path.stem))
        runs = [(path, records.read(path)) for path in paths]
        records.check_comparable([run for _, run in runs])
        found.append((device, runs))
    if not found:
        raise ValueError(f"{folder}: no results")
    return sorted(found, key=lambda device: _on_cpu(device[1][0][1]))


def _on_cpu(run: Run) -> bool:
    return "threads" in run.device


def draw(runs: Runs) -> None:
    """Draws the figure of every run again, from its file."""
    for path, run in runs:
        if run.command == "scaling":
            scaling.redraw(run, path.with_suffix(".png"))
        elif run.command == "cpu":
            plots.draw_cpu(run, path.with_suffix(".png"))
        else:
            plots.draw(run, path.with_suffix(".png"))


def page(folder: Path, found: Sequence[tuple[Path, Runs]]) -> str:
    """Returns the text of README.md with goals, tables and figures. Links are relative to the folder of the results."""
    lines = [INTRODUCTION, *_goals_table(folder, [each for _, runs in found for each in runs])]
    code = [["", *_compiled(path)] for path in sorted((folder / COMPILED).glob("*.csv"))]
    code += [["", *_peers(path)] for path in sorted((folder / PEERS).glob("*.csv"))]
    machine_code = [line for part in code for line in part]
    for device, runs in found:
        if _on_cpu(runs[0][1]):  # the sections on GPUs and on compiled kernels come before the first CPU
            lines, machine_code = lines + machine_code, []
        lines += ["", f"## {runs[0][1].device['name']}", "", _about([run for _, run in runs])]
        for path, run in runs:
            lines += ["", f"### {TITLES[run.command]}", "", *_section(run)]
            if path.with_suffix(".png").exists():
                lines += ["", f"![{TITLES[run.command]}]({device.name}/{path.stem}.png)"]
    return "\n".join(lines + machine_code) + "\n"


def _goals_table(folder: Path, runs: Runs) -> list[str]:
    """Returns a table with one row per goal: its figures by length, the run that they are from, and the verdict."""
    rows = []
    for goal in goals.evaluate(runs[0][1]):
        cells = [
            f"{_figures(judged)} ({_source(folder, path, run)}): {judged['verdict']}"
            for path, run in runs
            for judged in run.goals
            if judged["goal"] == goal["goal"] and judged.get("measured")
        ] or ["not run"]
        rows.append((goal["goal"], f"{goal['floor']:g}", goals.aim_text(goal) or "–", "; ".join(cells)))
    return _table(["goal", "floor", "aim", "measured"], rows)


def _figures(judged: dict) -> str:
    return ", ".join(f"{figure:.2f} at {int(seqlen):,}" for seqlen, figure in judged["measured"].items())


def _source(folder: Path, path: Path, run: Run) -> str:
    kept = "a log" if all(record.low is None for record in run.records) else "run"
    return f"{run.device['name']}, [{kept}]({path.relative_to(folder).as_posix()}), {run.shown_revision}"


def _about(runs: Sequence[Run]) -> str:
    device = runs[0].device
    hardware = f"{device['threads']} threads, {device['vector']}" if "threads" in device else device["hardware"]
    notes = "".join(f"; {note}" for note in dict.fromkeys(run.note for run in runs if run.note))
    return f"{hardware}; {runs[0].shown_versions}{notes}."


# ---- one run


def _section(run: Run) -> list[str]:
    sizes = run.records[0].sizes
    lines = [f"head_dim {sizes['head_dim']}, {_heads(sizes)}, {sizes['dtype']}: `{run.shown_command}`", *_remarks(run)]
    if run.command == "scaling":
        rows = [(name, f"{power:.2f}") for name, power in run.exponents.items()]
        return [*lines, "", *_table(["upper half of each series", "exponent of the best power-law fit"], rows)]
    if run.command == "cpu":
        shown = [record for record in run.records if plots.of_panel(record, "decoding, ")]
        is_a_line = len({record.seqlen for record in shown if record.contestant == ROTATED_CACHE}) > 2
        return [*lines, "", *_cpu_times(run), "", *_cpu_goals(run), *(["", WHY_IT_JUMPS] if is_a_line else [])]
    run = dataclasses.replace(run, records=[_named(run, record) for record in run.records])
    for backward, passes in ((False, "forward"), (True, "forward + backward")):
        chosen = [record for record in run.records if record.backward == backward]
        if chosen:
            lines += ["", *_times(chosen, "one token" if sizes["decoding"] else passes)]
    for backward, passes in ((False, ""), (True, "forward + backward, ")):
        chosen = [record for record in run.records if record.backward == backward and record.peak_bytes is not None]
        if chosen:
            heading = f"{passes}MiB beyond the inputs"
            lines += ["", *_by_length(heading, chosen, lambda record: f"{record.peak_bytes / 2**20:.1f}")]
    return lines


def _remarks(run: Run) -> list[str]:
    """Returns the measured ceilings, and what was not timed and why."""
    lines = []
    if run.ceilings:
        shown = (
            f"{plots.CEILINGS[name]}: {value:.3g} {'TFLOP/s' if 'flops' in name else 'GB/s'}"
            for name, value in run.ceilings.items()
        )
        lines.append(f"Ceilings measured in the same run: {'; '.join(shown)}.")
    for reason in dict.fromkeys(run.absent.values()):
        names = ", ".join(name for name, why in run.absent.items() if why == reason)
        lines += ["", f"Not run: {names} ({reason})."]
    for name, error in run.wrong.items():
        lines += ["", f"Wrong, therefore not timed: {name} (error {error:.2g} against float64)."]
    for skipped in run.skipped:
        lines += ["", f"Skipped: {skipped}."]
    return lines


def _heads(sizes: dict) -> str:
    if sizes["heads"] == sizes["heads_kv"]:
        return f"{sizes['heads']} head{'s' if sizes['heads'] > 1 else ''}"
    return f"{sizes['heads']} query and {sizes['heads_kv']} key heads"


def _named(run: Run, record: Record) -> Record:
    """Returns the record with the name that the page shows. On the CPU, "composed" (of PyTorch's kernels) or "compiled"
    is added to flashrope's name."""
    kernels = run.device.get("kernels", "composed")  # results without the field predate compiled kernels

    def name(contestant: str) -> str:
        says = not _on_cpu(run) or any(kind in contestant for kind in ("composed", "compiled"))
        return contestant if says else f"{contestant}, {kernels}"

    ours = {each.contestant for each in run.records if each.ours}
    ratios = {name(other) if other in ours else other: ratio for other, ratio in record.ratios.items()}
    return dataclasses.replace(
        record, contestant=name(record.contestant) if record.ours else record.contestant, ratios=ratios
    )


def _times(chosen: Sequence[Record], what: str) -> list[str]:
    """Returns a table of milliseconds. The number in brackets is the ratio to the last row of flashrope."""
    ours = [record.contestant for record in chosen if record.ours][-1:]
    heading = f"{what}, ms" + "".join(f" (ratio to {name})" for name in ours)

    def cell(record: Record) -> str:
        ratios = "".join(f" ({record.ratios[name]:.2f})" for name in ours if name in record.ratios)
        return f"{record.milliseconds:.3g}{ratios}"

    return _by_length(heading, chosen, cell)


def _by_length(heading: str, chosen: Sequence[Record], cell: Callable[[Record], str]) -> list[str]:
    """Returns a table with one row per contestant and one column per shape."""
    cells = {(record.contestant, (record.seqlen, record.sizes["batch"])): cell(record) for record in chosen}
    names, shapes = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))
    rows = [(name, *(cells.get((name, shape), "–") for shape in shapes)) for name in names]
    return _table([heading, *(f"{seqlen:,} x batch {batch}" for seqlen, batch in shapes)], rows)


def _cpu_times(run: Run) -> list[str]:
    rows = []
    for record in (_named(run, each) for each in run.records):
        times = f"{record.milliseconds:.1f} ({record.low:.1f} – {record.high:.1f})"
        ratios = [f"{ratio:.2f} of {name}" for name, ratio in record.ratios.items() if name != record.contestant]
        rows.append((record.table, record.contestant, times, ", ".join(ratios)))
    batches = ", ".join(str(batch) for batch in sorted({record.sizes["batch"] for record in run.records}))
    return _table([f"problem, batch {batches}", "", "ms (quartiles)", "ratio"], rows)


def _cpu_goals(run: Run) -> list[str]:
    rows = [
        (
            goal["goal"],
            f"{goal['worst']:.2f}" + ("" if goal["verdict"] == "met" else " (missed)"),
            f"{goal['floor']:.2f}",
        )
        for goal in run.goals
    ]
    return _table(["ratio of times, ratio of memory, or microseconds", "measured", "goal: at most"], rows)


# ---- compiled kernels


def _rows(path: Path, columns: Sequence[str], command: str) -> list[dict[str, str]]:
    """Reads the rows of a CSV table. Raises ValueError if the table does not have the columns that the command writes,
    or if its rows have different versions."""
    with open(path, newline="") as lines:
        rows = list(csv.DictReader(lines))
    if {"revision", "triton", *columns} - set(rows[0] if rows else ()):
        raise ValueError(f"{path}: expected the table that python -m bench {command} --csv writes")
    if len({(row["triton"], row["revision"]) for row in rows}) > 1:
        raise ValueError(f"{path}: rows of different versions")
    return rows


def _kernels(rows: Sequence[dict[str, str]], columns: Sequence[str], left: int) -> list[str]:
    return _table([HEADINGS[name] for name in columns], [[row[name] or "–" for name in columns] for row in rows], left)


def _compiled(path: Path) -> list[str]:
    """Returns the section on the kernels of prefill and training, from a table that the gate wrote."""
    every = _rows(path, COLUMNS, "gate")
    shown = [
        row for row in every if row["kernel"] in MAIN_KERNELS and row["scheme"].partition(" +")[0] in ("rope", "rerope")
    ]
    file = f"{COMPILED}/{path.name}"
    return [
        f"## Kernels of prefill and training, compiled by Triton {every[0]['triton']}, bf16",
        "",
        f"`python -m bench gate --quick --csv PATH`, revision {every[0]['revision']}. The command needs no GPU. The "
        f"decoding kernels are in [{file}]({file}). On sm_90 these kernels load by cp.async and multiply by wgmma, "
        "without TMA.",
        "",
        *_kernels(shown, COLUMNS, left=2),
    ]


def _peers(path: Path) -> list[str]:
    """Returns the section with a table of ``bench peers`` and the text of notes.md in the same folder."""
    rows = _rows(path, PEER_COLUMNS, "peers")
    notes = path.with_name("notes.md")
    return [
        "## Machine code beside FlashAttention-2's",
        "",
        f"`pip download --no-deps {path.stem.replace('-', '==', 1)}`, then `python -m bench peers {path.stem}-*.whl "
        f"--csv PATH`, revision {rows[0]['revision']}, Triton {rows[0]['triton']}. The kernels are for bf16 and causal "
        "masks. flashrope's kernels rotate by RoPE. Nothing was timed. An HMMA is a product 16x8x16 of one warp. On "
        "sm_90 flashrope's kernels use HGMMA, whose product 64xNx16 counts as N / 8. The figures are for the loop over "
        "tiles without a mask.",
        "",
        *_kernels(rows, PEER_COLUMNS, left=3),
        *(["", notes.read_text().rstrip()] if notes.exists() else []),
    ]


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns a Markdown table. The first `left` columns are left-aligned, the others right-aligned."""
    return [
        "| " + " | ".join(heading) + " |",
        "|" + "|".join(["---"] * left + ["---:"] * (len(heading) - left)) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "python -m bench report", description=__doc__.strip().split("\n")[0], allow_abbrev=False
    )
    p.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: bench/results)")
    p.add_argument("--figures", action="store_true", help="also draw the figures again")
    p.add_argument("--check", action="store_true", help="change nothing; exit with 1 if README.md is out of date")
    options = p.parse_args(argv)
    readme = options.results / "README.md"
    try:
        found = devices(options.results)
        if options.figures and not options.check:
            for _, runs in found:
                draw(runs)
        text = page(options.results, found)
    except ValueError as error:
        print(f"{readme} was not regenerated: {error}")
        return 1
    if readme.exists() and readme.read_text() == text:
        print(f"{readme} is up to date")
        return 0
    if options.check:
        print(f"{readme} is out of date; run python -m bench report")
        return 1
    write(readme, text)
    print(f"written: {readme}")
    return 0
