"""How time and memory grow: with the length, the heads and the batch; in decoding with the context and with ReRoPE's
window.

    python -m bench scaling [--seqlens 512 1024 ... 131072] [--heads 16] [--head-dim 128] [--passes forward]

Prints the power of the best fit over the upper half of every series: 2 for the time of attention over the length, 1 for
its memory.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from . import decoding, plots, suite
from .contestants import KERNELS, OWN, Contestant
from .problem import Problem, exponent
from .results import Record, Run

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
WINDOWS = (128, 512, 2048, 8192, 32768, 131072)  # those up to the longest context
LINEAR = (
    1.1  # the most that the power of a memory that grows with the length may be; tables that grow by steps are in it
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One quantity that varies. Values to tables."""

    name: str
    x_label: str
    tables: dict[float, suite.Table]
    memory: bool = False

    def series(
        self, records: Sequence[Record], value: Callable[[Record], float | None]
    ) -> dict[str, dict[float, float]]:
        """{contestant: {x: value}}"""
        of_title = {table.title: x for x, table in self.tables.items()}
        found: dict[str, dict[float, float]] = {}
        for record in records:
            if record.table in of_title and (y := value(record)):
                found.setdefault(record.contestant, {})[of_title[record.table]] = y
        return found


def sweeps(options) -> list[Sweep]:
    kind = options.device.type
    base = suite.problem(options, AT[kind], batch=1)
    prefill = [Contestant("SDPA flash", Problem.none, KERNELS["SDPA flash"]), OWN["HoPE"], OWN["ReRoPE"]]
    chosen = []
    for backward in suite.backwards(options):
        what = "forward + backward" if backward else "forward"
        chosen.append(
            Sweep(
                f"{what} over seqlen",
                "seqlen",
                {
                    n: suite.Table(f"{what}, seqlen {n}", prefill, base.replace(seqlen=n), backward)
                    for n in options.seqlens
                },
                memory=True,
            )
        )
    chosen.append(
        Sweep(
            "forward over heads",
            "heads",
            {
                n: suite.Table(f"forward, {n} heads, seqlen {base.seqlen}", prefill, base.replace(heads=n, heads_kv=n))
                for n in HEADS[kind]
            },
        )
    )
    chosen.append(
        Sweep(
            "forward over batch",
            "batch",
            {
                n: suite.Table(f"forward, batch {n}, seqlen {base.seqlen}", prefill, base.replace(batch=n))
                for n in BATCHES[kind]
            },
        )
    )
    over_cache = [
        c
        for c in decoding.contestants(options.device)
        if c.name in ("SDPA flash", "flashrope NoPE", "flashrope RoPE", "flashrope ReRoPE")
    ]
    one_token = base.replace(decoding=True, **DECODE_HEADS[kind])
    contexts = [n for n in CONTEXTS[kind] if n <= 2 * max(options.seqlens)] or [max(options.seqlens)]
    chosen.append(
        Sweep(
            "decoding over context",
            "keys in the cache",
            {
                n: suite.Table(f"one token, {n} keys", over_cache, one_token.replace(seqlen=n), recorded=True)
                for n in contexts
            },
        )
    )
    rerope = [c for c in over_cache if c.name in ("flashrope NoPE", "flashrope ReRoPE")]
    chosen.append(
        Sweep(
            f"decoding over window, {contexts[-1]} keys",
            "window",
            {
                w: suite.Table(
                    f"one token, {contexts[-1]} keys, window {w}",
                    rerope,
                    one_token.replace(seqlen=contexts[-1], window=w),
                    recorded=True,
                )
                for w in WINDOWS
                if w <= contexts[-1]
            },
        )
    )
    return chosen


def panels_of(chosen: Sequence[Sweep], run: Run) -> list[tuple[str, str, str, dict[str, dict[float, float]]]]:
    """What plots.draw_scaling takes."""
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
    """The figure of a run that was read from its file."""
    options = options_of(shlex.split(run.argv)[4:], needs_device=False)
    return plots.draw_scaling(run, path, panels_of(sweeps(options), run))


def options_of(argv: list[str], needs_device: bool = True):
    return suite.parse(suite.parser("scaling", __doc__, CUDA, CPU), argv, needs_device)


def upper_half(points: dict[float, float]) -> dict[float, float]:
    """The larger half of a series, three points at least: overheads that do not grow lie below."""
    return dict(sorted(points.items())[-max(3, -(-len(points) // 2)) :])


def main(argv: list[str]) -> int:
    options = options_of(argv)
    chosen = sweeps(options)
    session = suite.Session("scaling", argv, options)
    session.plan([table for sweep in chosen for table in sweep.tables.values()])
    session.memory([table for sweep in chosen if sweep.memory for table in sweep.tables.values()])
    panels, not_linear = panels_of(chosen, session.run), []
    for title, _, _, series in panels:
        for name, points in series.items():
            if len(points) > 1:
                session.run.exponents[f"{title}, {name}"] = power = exponent(upper_half(points))
                if "memory" in title and name.startswith("flashrope") and power > LINEAR:
                    not_linear.append(f"{title}, {name}")
    session.say("\nfitted powers, upper half of every series")
    for name, power in session.run.exponents.items():
        session.say(f"{power:>8.2f}  {name}")
    for name in not_linear:
        session.say(f"grows faster than its length: {name}")
    plots.draw_scaling(session.run, session.folder / f"{session.stem}.png", panels)
    return session.finish(draw=False) or (1 if not_linear else 0)
