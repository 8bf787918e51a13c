"""Runs tables of contestants: checks each, times them in turns, prints as it goes, keeps everything in files.

options = parser("hope", ...).parse_args(argv)
session = Session("hope", argv, options)
session.table(Table(...)); ...; session.finish()
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from . import check, goals, machine, plots
from .contestants import Contestant, Unavailable
from .problem import Problem
from .results import Record, Run
from .timing import Spread, Timer, ratio, rounds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = {"cuda": 1.0, "cpu": 4.0}
MEMORY_SHARE = 0.8  # of what is free that a contestant may be expected to take


@dataclasses.dataclass(frozen=True)
class Table:
    """Contestants on one problem. ``recorded``: replayed as CUDA graphs."""

    title: str
    contestants: Sequence[Contestant]
    problem: Problem
    backward: bool = False
    recorded: bool = False


def parser(command: str, doc: str, cuda: dict, cpu: dict) -> argparse.ArgumentParser:
    """Options that all subcommands share; cuda and cpu hold the defaults of heads, heads_kv, head_dim, seqlens, tokens
    and window for either device."""
    p = argparse.ArgumentParser(
        f"python -m bench {command}", description=doc.strip().split("\n")[0], allow_abbrev=False
    )
    p.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda, cuda:1, cpu (default: a GPU if there is one)",
    )
    p.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on the CPU")
    for name, what in (
        ("heads", "query heads"),
        ("heads-kv", "key heads"),
        ("head-dim", "channels of a head"),
        ("window", "of ReRoPE"),
        ("tokens", "of a batch: batch is tokens / seqlen"),
    ):
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=positive, help=f"{what} (default: GPU {cuda.get(key)}, CPU {cpu.get(key)})")
    p.add_argument("--batch", type=positive, help="fixed, instead of --tokens")
    p.add_argument(
        "--seqlens",
        type=positive,
        nargs="+",
        help=f"default: GPU {_words(cuda['seqlens'])}; CPU {_words(cpu['seqlens'])}",
    )
    p.add_argument("--train-length", type=positive, default=8192, help="of HoPE (default 8192)")
    p.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--passes",
        nargs="+",
        choices=("forward", "both"),
        default=["forward", "both"],
        help="forward; forward and backward",
    )
    p.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="only those whose name holds one of these (default: all)"
    )
    p.add_argument(
        "--seconds",
        type=float,
        help=f"for the rounds of a table (default: GPU {SECONDS['cuda']}, CPU {SECONDS['cpu']})",
    )
    p.add_argument("--threads", type=positive, help="of the CPU (default: PyTorch's)")
    p.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="files go to a folder of the device's name in here (default bench/results)",
    )
    p.add_argument("--note", default="", help="kept with the results, such as what else the machine did")
    p.set_defaults(defaults={"cuda": cuda, "cpu": cpu})
    return p


def parse(p: argparse.ArgumentParser, argv: list[str], needs_device: bool = True) -> argparse.Namespace:
    """The options with the device's defaults in place; refuses a device that is not there, where it is needed."""
    options = p.parse_args(argv)
    try:
        options.device = torch.device(options.device)
    except RuntimeError as error:
        p.error(f"--device: {str(error).splitlines()[0]}")
    if options.device.type not in ("cpu", "cuda"):
        p.error(f"--device: expected cpu or cuda, got {options.device}")
    if needs_device and options.device.type == "cuda" and not torch.cuda.is_available():
        p.error("--device: no CUDA device is available")
    if options.device.type == "cuda":
        options.device = torch.device("cuda", options.device.index or 0)
    for name, value in options.defaults[options.device.type].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.dtype = DTYPES[options.dtype or ("bf16" if options.device.type == "cuda" else "fp32")]
    options.seconds = SECONDS[options.device.type] if options.seconds is None else options.seconds
    if options.heads % options.heads_kv:
        p.error(f"--heads: expected a multiple of --heads-kv {options.heads_kv}, got {options.heads}")
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def problem(options: argparse.Namespace, seqlen: int, **changes) -> Problem:
    return Problem(
        options.batch or max(1, options.tokens // seqlen),
        seqlen,
        options.heads,
        options.heads_kv,
        options.head_dim,
        options.dtype,
        options.device,
        options.causal,
        options.window,
        options.train_length,
    ).replace(**changes)


def prefill_tables(options: argparse.Namespace, contestants: Sequence[Contestant]) -> list[Table]:
    """One table for every pass and length."""
    tables = []
    for backward in backwards(options):
        for p in (problem(options, seqlen) for seqlen in options.seqlens):
            title = f"seqlen {p.seqlen}, batch {p.batch}, {'forward + backward' if backward else 'forward'}"
            tables.append(Table(title, contestants, p, backward))
    return tables


def backwards(options: argparse.Namespace) -> list[bool]:
    """Of --passes: without and with a backward."""
    return [passes == "both" for passes in ("forward", "both") if passes in options.passes]


def stem(command: str, options: argparse.Namespace) -> str:
    """The files' name: results of other sizes lie beside these, a new run of the same replaces them."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == options.dtype)
    return f"{command}-d{options.head_dim}-h{options.heads}x{options.heads_kv}-{dtype}" + (
        "" if options.causal else "-full"
    )


class Session:
    """One command on one device: what it measured, and the files it goes to."""

    def __init__(self, command: str, argv: list[str], options: argparse.Namespace):
        self.options, self.device, self.timer = options, options.device, Timer(options.device)
        device = machine.describe(self.device)
        self.run = Run(
            command,
            shlex.join(["python", "-m", "bench", command, *argv]),
            device,
            machine.versions(),
            machine.ceilings(self.device, options.dtype),
            load_average={"start": machine.load_average()},
            note=options.note,
        )
        self.folder, self.stem = options.out / machine.slug(device["name"]), stem(command, options)
        self.tables: list[Table] = []
        self.peaks: dict[tuple[str, str], int] = {}
        self.bar = tqdm(disable=None, unit="step", leave=False, dynamic_ncols=True, file=sys.stderr)
        self.say(self.run.argv)
        self.say(
            f"{device['hardware']}, torch {self.run.versions['torch']}, triton {self.run.versions['triton']}, "
            f"revision {self.run.versions['revision']}"
            + (f", {device['threads']} threads, {device['vector']}" if "threads" in device else "")
        )
        ceilings = self.run.ceilings
        self.say(
            f"measured here: product {ceilings['product_tflops']:.3g} TFLOP/s, copy {ceilings['copy_gbs']:.3g} GB/s (read and "
            f"written), read {ceilings['read_gbs']:.3g} GB/s"
        )

    def say(self, text: str = "") -> None:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def plan(self, tables: Sequence[Table]) -> None:
        """Checks all contestants that were asked for, then measures the tables."""
        if self.options.contestants:
            tables = [
                dataclasses.replace(
                    table,
                    contestants=[
                        contestant
                        for contestant in table.contestants
                        if any(part in contestant.name for part in self.options.contestants)
                    ],
                )
                for table in tables
            ]
        self.bar.reset(total=sum(len(table.contestants) for table in tables) * 2)
        for table in tables:
            self.check(table)
        for reason in dict.fromkeys(self.run.absent.values()):
            self.say(f"not run ({reason}): {', '.join(name for name, why in self.run.absent.items() if why == reason)}")
        for table in tables:
            self.table(table)

    def check(self, table: Table) -> None:
        """Finds out which contestants can run and are right; every one once for a forward and once with a backward."""
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
            except (
                Exception
            ) as failure:  # whatever a peer or a compiler does not support is a finding, and the others still run
                reason = f"failed: {brief(failure)}"
            if reason is not None:
                self.run.absent[name] = reason
            elif error > (allowed := check.TOLERANCE[table.problem.dtype]):
                self.run.wrong[name] = error
                self.say(f"WRONG, so not timed: {name}: error {error:.2g} against float64, allowed {allowed:.2g}")
            else:
                self.run.errors[name] = error

    def table(self, table: Table) -> None:
        """Times the contestants that are right in turns; prints and saves."""
        torch.compiler.reset()  # or the compiler would give up specialising after some lengths
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
        self.run.write(self.folder, self.stem)

    def calls(self, table: Table):
        """(contestant, call) of those that are right and fit, each called once. Yields none where the inputs do not
        fit."""
        inputs = None
        for contestant in table.contestants:
            name = label(contestant, table.backward)
            self.step(f"{table.title}: {contestant.name}")
            if name not in self.run.errors:
                continue
            try:
                self.expect_room(table, contestant)
                inputs = inputs or inputs_of(table)
                call = bound(contestant.prepare(table.problem), *inputs, table.backward)
                call()
                if self.timer.memory_is_cheap:
                    self.peaks[table.title, contestant.name] = self.timer.peak_bytes(call)
                yield contestant, self.timer.record(call) if table.recorded else call
            except MemoryError as short:
                self.skip(f"{table.title}: {name}: {short}")
            except Exception as failure:  # as in check; memory that runs out has several types
                self.skip(f"{table.title}: {name}: {brief(failure)}")

    def expect_room(self, table: Table, contestant: Contestant) -> None:
        """Raises MemoryError where a contestant cannot be expected to fit."""
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
        """Peak memory of everything that was timed in these tables (default: in all), which is then kept and printed.
        On the CPU measured now, after all timing, for it slows the process down; on a GPU each call's was noted when it
        was prepared."""
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
        self.bar.reset(total=sum(len(table.contestants) for table in tables))
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
                    call = bound(contestant.prepare(table.problem), *inputs, table.backward)
                    call()  # tables and compiled code are kept from call to call
                    record.peak_bytes = self.timer.peak_bytes(call)
                except (
                    Exception
                ) as failure:  # as in calls: it ran before, yet another neighbour may hold the memory now
                    self.skip(f"memory, {table.title}: {contestant.name}: {brief(failure)}")

    def finish(self, draw: bool = True) -> int:
        """Goals, files, and with draw the figure of plots.draw. The exit code: 1 where one of our own is wrong or
        failed, or nothing ran."""
        self.bar.close()
        self.run.load_average["end"] = machine.load_average()
        self.run.goals = goals.evaluate(self.run)
        self.say("\n" + goals.text(self.run.goals))
        self.run.write(self.folder, self.stem)
        if draw:
            plots.draw(self.run, self.folder / f"{self.stem}.png")
        self.say(f"\nwritten: {self.folder / self.stem}.{{json,csv,png}}")
        failed = [
            name
            for name in (*self.run.wrong, *(n for n, why in self.run.absent.items() if why.startswith("failed:")))
            if name.startswith("flashrope")
        ]
        if failed:
            self.say(f"one of flashrope's own is wrong or failed: {', '.join(failed)}")
        return 1 if failed or not self.run.records else 0

    def skip(self, line: str) -> None:
        self.run.skipped.append(line)
        self.say(f"skipped: {line}")

    def step(self, what: str) -> None:
        self.bar.set_description_str(what[:60], refresh=False)
        self.bar.update()


def prefill(command: str, doc: str, cuda: dict, cpu: dict, contestants: Callable, argv: list[str]) -> int:
    """A subcommand that times contestants(device) at every pass and length."""
    options = parse(parser(command, doc, cuda, cpu), argv)
    session = Session(command, argv, options)
    session.plan(prefill_tables(options, contestants(options.device)))
    session.memory()
    return session.finish()


def inputs_of(table: Table) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v, and a gradient of out."""
    tensors = table.problem.tensors(grad=table.backward)
    return tensors, torch.randn_like(tensors[0], requires_grad=False)


def bound(call: Callable, tensors, grad_out, backward: bool) -> Callable:
    if not backward:
        return lambda: call(*tensors)
    return lambda: torch.autograd.grad(call(*tensors), tensors, grad_out)


def label(contestant: Contestant, backward: bool) -> str:
    return f"{contestant.name}, backward" if backward else contestant.name


def brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def text_of(table: Table, records: Sequence[Record]) -> str:
    """One table, as printed."""
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
    """For every pass the contestants down and the lengths across."""
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


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _words(values) -> str:
    return " ".join(map(str, values))
