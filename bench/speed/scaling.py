"""Measures how time and memory grow with length, heads and batch, and in decoding with the context and ReRoPE's window.

    python -m bench scaling [--seqlens 512 1024 ... 131072] [--heads 16] [--head-dim 128] [--passes forward]

The command fits a power law to the upper half of every series and prints its exponent. When the length grows, the
exponent should be 2 for the time of attention and 1 for its memory.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..report import plots
from ..report.records import Record, Run
from . import decode
from .contestants import KERNELS, OWN, Contestant
from .options import Table, backwards, parse, parser, problem
from .problem import Problem, exponent
from .session import Session

CUDA = {
    "heads": 16,
    "heads_kv": 16,
    "head_dim": 128,
    "seqlens": [2**n for n in range(9, 18)],
    "tokens": 1,
    "window": 512,
}
CPU = {"heads": 1, "heads_kv": 1, "head_dim": 64, "seqlens": [2**n for n in range(9, 15)], "tokens": 1, "window": 256}
AT = {"cuda": 4096, "cpu": 1024}  # the length at which heads and batch vary
HEADS = {"cuda": (4, 8, 16, 32, 64), "cpu": (1, 2, 4, 8)}
BATCHES = {"cuda": (1, 2, 4, 8, 16), "cpu": (1, 2, 4, 8)}
CONTEXTS = {"cuda": [2**n for n in range(12, 18)], "cpu": [2**n for n in range(11, 16)]}
DECODE_HEADS = {"cuda": {"heads": 32, "heads_kv": 8}, "cpu": {"heads": 8, "heads_kv": 8}}
WINDOWS = (128, 512, 2048, 8192, 32768, 131072)  # windows beyond the longest context are left out
MAX_MEMORY_EXPONENT = 1.1  # a little above 1, because the cos/sin tables grow in steps


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Describes a sweep over one quantity. tables: {value of the quantity: table of the measurements there}."""

    name: str
    x_label: str
    tables: dict[float, Table]
    memory: bool = False

    def series(
        self, records: Sequence[Record], value: Callable[[Record], float | None]
    ) -> dict[str, dict[float, float]]:
        """Returns {contestant: {x: value}}, where x is the quantity that the sweep varies. value: takes a record;
        returns None if the record has no such value."""
        of_title = {table.title: x for x, table in self.tables.items()}
        found: dict[str, dict[float, float]] = {}
        for record in records:
            if record.table in of_title and (y := value(record)):
                found.setdefault(record.contestant, {})[of_title[record.table]] = y
        return found


def sweeps(options) -> list[Sweep]:
    return [*_prefill_sweeps(options), *_decoding_sweeps(options)]


def _prefill_sweeps(options) -> list[Sweep]:
    kind = options.device.type
    base = problem(options, AT[kind], batch=1)
    contestants = [Contestant("SDPA flash", Problem.none, KERNELS["SDPA flash"]), OWN["HoPE"], OWN["ReRoPE"]]

    def table(title: str, backward: bool = False, **changes) -> Table:
        return Table(title, contestants, base.replace(**changes), backward)

    chosen = []
    for backward in backwards(options):
        what = "forward + backward" if backward else "forward"
        tables = {n: table(f"{what}, seqlen {n}", backward, seqlen=n) for n in options.seqlens}
        chosen.append(Sweep(f"{what} over seqlen", "seqlen", tables, memory=True))
    at = f"seqlen {base.seqlen}"
    heads = {n: table(f"forward, {n} heads, {at}", heads=n, heads_kv=n) for n in HEADS[kind]}
    batches = {n: table(f"forward, batch {n}, {at}", batch=n) for n in BATCHES[kind]}
    return [*chosen, Sweep("forward over heads", "heads", heads), Sweep("forward over batch", "batch", batches)]


def _decoding_sweeps(options) -> list[Sweep]:
    kind = options.device.type
    by_name = {contestant.name: contestant for contestant in decode.contestants(options.device)}
    base = problem(options, AT[kind], batch=1, decoding=True, **DECODE_HEADS[kind])

    def table(title: str, names: Sequence[str], **changes) -> Table:
        return Table(title, [by_name[name] for name in names], base.replace(**changes), recorded=True)

    every = ("SDPA flash", "flashrope NoPE", "flashrope RoPE", "flashrope ReRoPE")
    own = ("flashrope NoPE", "flashrope ReRoPE")
    contexts = [n for n in CONTEXTS[kind] if n <= 2 * max(options.seqlens)] or [max(options.seqlens)]
    longest = contexts[-1]
    by_context = {n: table(f"one token, {n} keys", every, seqlen=n) for n in contexts}
    by_window = {
        window: table(f"one token, {longest} keys, window {window}", own, seqlen=longest, window=window)
        for window in WINDOWS
        if window <= longest
    }
    return [
        Sweep("decoding over context", "keys in the cache", by_context),
        Sweep(f"decoding over window, {longest} keys", "window", by_window),
    ]


def panels_of(chosen: Sequence[Sweep], run: Run) -> list[tuple[str, str, str, dict[str, dict[float, float]]]]:
    """Returns the panels of ``plots.draw_scaling``."""
    panels = []
    for sweep in chosen:
        panels.append(
            (f"time, {sweep.name}", sweep.x_label, "ms", sweep.series(run.records, lambda record: record.milliseconds))
        )
        if sweep.memory:
            panels.append(
                (
                    f"peak memory, {sweep.name}",
                    sweep.x_label,
                    "MiB beyond the inputs",
                    sweep.series(run.records, lambda record: record.peak_bytes and record.peak_bytes / 2**20),
                )
            )
    return panels


def redraw(run: Run, path: Path) -> bool:
    """Draws the figure of a run that was read from a file."""
    options = options_of(shlex.split(run.argv)[4:], needs_device=False)
    return plots.draw_scaling(run, path, panels_of(sweeps(options), run))


def options_of(argv: list[str], needs_device: bool = True):
    return parse(parser("scaling", __doc__, CUDA, CPU), argv, needs_device)


def upper_half(points: dict[float, float]) -> dict[float, float]:
    """Returns the half of a series with the larger x, or at least three points. The points with smaller x are left out
    because constant overheads affect them."""
    return dict(sorted(points.items())[-max(3, -(-len(points) // 2)) :])


def main(argv: list[str]) -> int:
    options = options_of(argv)
    chosen = sweeps(options)
    session = Session("scaling", argv, options)
    session.measure([table for sweep in chosen for table in sweep.tables.values()])
    session.memory([table for sweep in chosen if sweep.memory for table in sweep.tables.values()])
    panels = panels_of(chosen, session.run)
    too_fast = fit_exponents(panels, session.run)
    session.say("\nexponents of the best fit, upper half of every series")
    for name, power in session.run.exponents.items():
        session.say(f"{power:>8.2f}  {name}")
    for name in too_fast:
        session.say(f"grows faster than its length: {name}")
    if session.folder:
        plots.draw_scaling(session.run, session.folder / f"{session.stem}.png", panels)
    return session.finish(draw=False) or (1 if too_fast else 0)


def fit_exponents(panels, run: Run) -> list[str]:
    """Fills run.exponents. Returns the series of flashrope's memory that grow faster than linearly."""
    too_fast = []
    for title, _, _, series in panels:
        for name, points in series.items():
            if len(points) > 1:
                run.exponents[f"{title}, {name}"] = power = exponent(upper_half(points))
                if "memory" in title and name.startswith("flashrope") and power > MAX_MEMORY_EXPONENT:
                    too_fast.append(f"{title}, {name}")
    return too_fast
