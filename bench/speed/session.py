"""Runs tables of contestants: checks every contestant, times the contestants alternately, prints results, and may write
files.

session = Session("hope", argv, options)
session.measure(tables)
session.finish()
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from flashrope.console.progress import Bar, duration

from .. import machine
from ..progress import steps
from ..report import goals, plots
from ..report.output import output_folder
from ..report.records import Record, Run, command_line
from . import ceilings, check
from .contestants import Contestant, Unavailable
from .options import Table, stem
from .timer import Spread, Timer, ratio, rounds

MEMORY_SHARE = 0.8  # largest share of the free memory that a contestant may need


class Session:
    """Runs one command on one device. It holds the measurements and, if wanted, writes them to files."""

    def __init__(self, command: str, argv: list[str], options: argparse.Namespace):
        self.options, self.device, self.timer = options, options.device, Timer(options.device)
        device = machine.describe(self.device)
        self.run = Run(
            command,
            command_line(command, argv),
            device,
            machine.versions(),
            ceilings.ceilings(self.device, options.dtype),
            load_average={"start": machine.load_average()},
            note=options.note,
        )
        folder = output_folder(options)
        self.folder = folder and folder / machine.slug(device["name"])
        self.stem = stem(command, options)
        self.tables: list[Table] = []
        self.peaks: dict[tuple[str, str], int] = {}
        self.bar = Bar(0)
        self.say(self.run.argv)
        self.say(
            f"{device['hardware']}, torch {self.run.versions['torch']}, triton {self.run.versions['triton']}, "
            f"revision {self.run.versions['revision']}"
            + (f", {device['threads']} threads, {device['vector']}" if "threads" in device else "")
        )
        self.say(ceilings.text(self.run.ceilings))

    def say(self, text: str = "") -> None:
        self.bar.clear()
        print(text, flush=True)

    def measure(self, tables: Sequence[Table]) -> None:
        """Checks the contestants, then times them, table by table."""
        if self.options.contestants:
            tables = [dataclasses.replace(table, contestants=self.chosen(table.contestants)) for table in tables]
        self.bar = Bar(sum(len(table.contestants) for table in tables) * 2)
        self.say(expected_time(len(tables), self.options.seconds))
        self.say(f"checking the contestants of {len(tables)} tables")
        for table in tables:
            self.check(table)
        for reason in dict.fromkeys(self.run.absent.values()):
            self.say(f"not run ({reason}): {', '.join(name for name, why in self.run.absent.items() if why == reason)}")
        for table in steps(self.run.command, tables, lambda table: table.title, self.say):
            self.table(table)

    def chosen(self, contestants: Sequence[Contestant]) -> list[Contestant]:
        """Returns the contestants that --contestants names."""
        return [each for each in contestants if any(part in each.name for part in self.options.contestants)]

    def check(self, table: Table) -> None:
        """Finds out which contestants can run and are correct. The forward and the forward with backward are checked
        separately, each once."""
        for contestant in table.contestants:
            name = label(contestant, table.backward)
            self.step(f"checking {name}")
            if contestant.name in self.run.absent or name in (*self.run.absent, *self.run.wrong, *self.run.errors):
                continue
            reason = None
            try:
                error = check.error(contestant, table.problem, table.backward)
            except Unavailable as unavailable:
                reason = str(unavailable)
            except Exception as failure:  # a peer or compiler may not support the table; others still run
                reason = f"failed: {brief(failure)}"
            if reason is not None:
                self.run.absent[name] = reason
            elif error > (allowed := check.TOLERANCE[table.problem.dtype]):
                self.run.wrong[name] = error
                self.say(f"WRONG, not timed: {name}: error {error:.2g} against float64, allowed {allowed:.2g}")
            else:
                self.run.errors[name] = error

    def table(self, table: Table) -> None:
        """Times the correct contestants alternately, prints the table, and writes the files with the results so far."""
        torch.compiler.reset()  # without a reset, the compiler stops specialising after some lengths
        calls = {contestant.name: call for contestant, call in self.calls(table)}
        records = []
        if calls:
            times = rounds(calls, self.timer, self.options.seconds)
            ours = [c.name for c in table.contestants if c.ours and c.name in calls]
            records = [
                self.record(table, contestant, times, ours)
                for contestant in table.contestants
                if contestant.name in calls
            ]
        self.run.records += records
        self.tables.append(table)
        self.say("\n" + text_of(table, records))
        self.write()

    def calls(self, table: Table):
        """Yields (contestant, call) of the correct contestants that fit into memory, each called once."""
        inputs = None
        for contestant in table.contestants:
            name = label(contestant, table.backward)
            self.step(f"{table.title}: {contestant.name}")
            if name not in self.run.errors:
                continue
            try:
                self.expect_room(table, contestant)
                inputs = inputs or inputs_of(table)
                call = ready(contestant, table, *inputs)
                call()
                if self.timer.memory_is_cheap:
                    self.peaks[table.title, contestant.name] = self.timer.peak_bytes(call)
                yield contestant, self.timer.record(call) if table.recorded else call
            except MemoryError as short:
                self.skip(f"{table.title}: {name}: {short}")
            except Exception as failure:  # the other contestants still run; out-of-memory errors have several types
                self.skip(f"{table.title}: {name}: {brief(failure)}")

    def expect_room(self, table: Table, contestant: Contestant) -> None:
        """Raises MemoryError if a contestant is not expected to fit."""
        p = table.problem
        inputs = 2 * p.bytes_of_q() + p.bytes_of_cache()
        needed = inputs * (4 if table.backward else 2) + contestant.scratch(p)
        free = self.timer.free_bytes()
        if needed > MEMORY_SHARE * free:
            raise MemoryError(f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")

    def record(self, table: Table, contestant: Contestant, times: dict[str, list[float]], ours: list[str]) -> Record:
        p, name = table.problem, contestant.name
        spread = Spread.of(times[name])
        record = Record(
            table.title,
            name,
            contestant.ours,
            p.sizes(),
            table.backward,
            spread.median,
            spread.low,
            spread.high,
            len(times[name]),
            ceiling=contestant.ceiling,
            ratios={own: ratio(times, name, own) for own in ours if own != name},
        )
        if contestant.moved is None:
            record.tflops = p.flops(table.backward) / spread.median / 1e9
        else:
            record.gbs = contestant.moved(p) / spread.median / 1e6
        record.share = (record.tflops or record.gbs) / self.run.ceilings[contestant.ceiling]
        return record

    def memory(self, tables: Sequence[Table] | None = None) -> None:
        """Records and prints the peak memory of everything that was timed in these tables (default: all).

        On a GPU the peak was recorded when each call was prepared. On the CPU it is measured here, because the profiler
        slows down the rest of the process.
        """
        tables = self.tables if tables is None else tables
        if self.timer.memory_is_cheap:
            for table in tables:
                for record in self.run.records:
                    if record.table == table.title:
                        record.peak_bytes = self.peaks.get((record.table, record.contestant))
        else:
            self.measure_memory(tables)
        lines = memory_text(self.run.records)
        if lines:
            self.say("\npeak memory beyond the inputs, MiB\n" + lines)

    def measure_memory(self, tables: Sequence[Table]) -> None:
        records = {(record.table, record.contestant): record for record in self.run.records}
        self.bar = Bar(sum(len(table.contestants) for table in tables))
        for table in tables:
            torch.compiler.reset()
            inputs = None
            for contestant in table.contestants:
                self.step(f"memory, {table.title}: {contestant.name}")
                record = records.get((table.title, contestant.name))
                if record is None:
                    continue
                inputs = inputs or inputs_of(table)
                try:
                    call = ready(contestant, table, *inputs)
                    call()  # cos/sin tables and compiled code are kept between calls
                    record.peak_bytes = self.timer.peak_bytes(call)
                except Exception as failure:  # another process may hold the memory now
                    self.skip(f"memory, {table.title}: {contestant.name}: {brief(failure)}")

    def finish(self, draw: bool = True) -> int:
        """Judges the goals and writes the files; with draw, also the figure of ``plots.draw``.

        Returns the exit code: 1 if one of flashrope's contestants is wrong or failed, or if nothing ran.
        """
        self.bar.clear()
        self.run.load_average["end"] = machine.load_average()
        self.run.goals = goals.evaluate(self.run)
        self.say("\n" + goals.text(self.run.goals))
        self.write()
        if self.folder:
            if draw:
                plots.draw(self.run, self.folder / f"{self.stem}.png")
            self.say(f"\nwritten: {self.folder / self.stem}.{{json,csv,png}}")
        failed = [
            name
            for name in (*self.run.wrong, *(n for n, why in self.run.absent.items() if why.startswith("failed:")))
            if name.startswith("flashrope")
        ]
        if failed:
            self.say(f"wrong or failed: {', '.join(failed)}")
        return 1 if failed or not self.run.records else 0

    def write(self) -> None:
        if self.folder:
            self.run.write(self.folder, self.stem)

    def skip(self, line: str) -> None:
        self.run.skipped.append(line)
        self.say(f"skipped: {line}")

    def step(self, what: str) -> None:
        self.bar.step(note=what)


def expected_time(tables: int, seconds: float) -> str:
    """Returns the expected time of a run's rounds as text. It is a lower bound on the time of the run, because the
    times of compiling, of checks and of memory measurements are not known in advance."""
    each = f"{tables} table{'s' if tables != 1 else ''} of {seconds:g} s each (--seconds)"
    return (
        f"expected time: {duration(tables * seconds)} for {each}; checks, compiling and memory take about as long again"
    )


def inputs_of(table: Table) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns [q, k, v] and a gradient of the output."""
    tensors = table.problem.tensors(grad=table.backward)
    return tensors, torch.randn_like(tensors[0], requires_grad=False)


def bound(call: Callable, tensors, grad_out, backward: bool) -> Callable:
    if not backward:
        return lambda: call(*tensors)
    return lambda: torch.autograd.grad(call(*tensors), tensors, grad_out)


def ready(contestant: Contestant, table: Table, tensors, grad_out) -> Callable:
    """Returns the contestant's call on these tensors, made in its setting."""
    with contestant.setting():
        call = bound(contestant.prepare(table.problem), tensors, grad_out, table.backward)
    if contestant.setting is nullcontext:
        return call

    def in_setting():
        with contestant.setting():
            return call()

    return in_setting


def label(contestant: Contestant, backward: bool) -> str:
    return f"{contestant.name}, backward" if backward else contestant.name


def brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def text_of(table: Table, records: Sequence[Record]) -> str:
    """Returns the text of one table."""
    if not records:
        return f"{table.title}: nothing to time"
    ours = [record.contestant for record in records if record.ours]
    width = max(len(record.contestant) for record in records) + 2
    lines = [
        f"{table.title}, {records[0].rounds} rounds",
        f"{'':<{width}}{'median':>12}{'quartiles':>22}{'speed':>17}{'ceiling':>9}   "
        + "   ".join(f"time / {name}" for name in ours),
    ]
    for record in records:
        speed = f"{record.gbs:.4g} GB/s   " if record.tflops is None else f"{record.tflops:.3g} TFLOP/s"
        row = f"{record.contestant:<{width}}{record.milliseconds:>9.3f} ms{record.low:>11.3f} -{record.high:>9.3f}"
        row += f"{speed:>17}{record.share:>9.1%}   "
        row += "   ".join(
            f"{record.ratios[name]:.2f}".rjust(len(name) + 7) if name in record.ratios else " " * (len(name) + 7)
            for name in ours
        )
        lines.append(row.rstrip())
    return "\n".join(lines)


def memory_text(records: Sequence[Record]) -> str:
    """Returns a table for every pass, with one row per contestant and one column per length."""
    lines = []
    for backward in (False, True):
        peaks = {
            (record.contestant, record.seqlen): record.peak_bytes
            for record in records
            if record.backward == backward and record.peak_bytes is not None
        }
        if not peaks:
            continue
        names, seqlens = (list(dict.fromkeys(key[at] for key in peaks)) for at in (0, 1))
        width = max(map(len, names)) + 2
        lines.append(
            f"{'forward + backward' if backward else 'forward':<{width}}"
            + "".join(f"{seqlen:>10}" for seqlen in seqlens)
        )
        lines += [
            f"{name:<{width}}"
            + "".join(
                f"{peaks[name, seqlen] / 2**20:>10.1f}" if (name, seqlen) in peaks else f"{'-':>10}"
                for seqlen in seqlens
            )
            for name in names
        ]
    return "\n".join(lines)
