"""Measures speed and memory of the CPU backend, compared with PyTorch's attention in the same run.

    python -m bench cpu [--seqlen 8192] [--heads 8] [--head-dim 64] [--window 1024] [--threads 2] [--seconds 30]
                        [--target TARGET] [--wide] [--grid] [--lengths] [--busy] [--training] [--check]
                        [--out DIR] [--publish] [--note TEXT]

SDPA gets the tensors in the layout that suits it best, with the heads first in memory. flashrope is timed twice:
composed of PyTorch's kernels, and with the compiled kernels if the installation has them. A round times every
contestant once, so that all contestants see the same state of the machine. A row of a table shows the median and the
quartiles of a contestant's time over the rounds. Every contestant has a base, the contestant that it is compared with.
The row also shows the ratio of the contestant's time to its base's time in the same round, as the median over the
rounds. The speed of the forward pass in bfloat16 is also shown as a fraction of the speed at which PyTorch multiplies
two 1024 x 1024 matrices.

--check exits with 1 if a goal is missed. --grid adds ReRoPE's forward for every window and length. --lengths adds the
tables that the chart by length needs. --busy adds decoding while another process computes. --training adds training
steps of a small model. --wide measures only head_dim 512. --target uses the compiled kernels of another target. For
x86-64-v3, set ATEN_CPU_CAPABILITY=avx2 and MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment, so that SDPA uses only AVX2
too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from flashrope import Rotary, attention
from flashrope.backends.cpu import loader
from flashrope.console.progress import duration
from flashrope.lab.tuning.timer import MIN_ROUNDS
from torch.nn.functional import scaled_dot_product_attention

from .. import machine
from ..report.output import add_output_options, output_folder
from ..report.records import Record, Run, command_line
from . import check, cpu_wide
from .cpu_cases import (
    COMPILED,
    SDPA,
    Entry,
    compiled_kernels,
    decoding_entries,
    for_check,
    forward_entries,
    map_entries,
    of_kernels,
    peer_entries,
    quantized_entries,
    training_entries,
    with_kernels,
)
from .cpu_host import host_times
from .problem import Problem
from .session import bound
from .timer import Spread, Timer, ratio, rounds
from .training import SIZES, tokens_per_second, training_problem, training_steps

CPU = torch.device("cpu")
# (seqlen, window) of ReRoPE's forward. The last one is also compared with dense score matrices.
SHORT = ((512, 64), (2048, 128), (2048, 512))
GRID_SEQLENS, GRID_WINDOWS = (2048, 4096, 8192, 16384), (128, 256, 512, 1024, 2048, 4096)
CACHE_SEQLENS = (32768, 2048)
CHUNK = 512  # how many queries a chunk of prefill over a quantized cache has
BACKWARD_SEQLEN = 4096  # the longest seqlen of the backward
# For the expected time of a run: how many times as long one multiply-add takes as one in SDPA's forward pass.
BACKWARD_COST = 3.6  # in forward and backward together
DECODING_COST = 40  # in decoding, where a step reads the whole cache for one query
# DENSE_SEQLEN: the longest seqlen at which two dense score matrices are measured.
LENGTHS, DENSE_SEQLEN = (512, 1024, 2048, 4096, 8192, 16384, 32768), 2048
BUSY = ", beside a busy process"
BFLOAT16_TARGETS = tuple(loader.EXTENDED)  # the targets whose kernels multiply in bfloat16
# --check allows a figure to exceed its goal by this factor, because ratios depend on the processor: the same commit
# took 0.59 of SDPA's time on one EPYC with AVX-512 and 0.90 on another.
SLACK = 1.5
ATTEMPTS = 3  # --check passes if one attempt passes: another process can only make a run look worse


class Goal(NamedTuple):
    """Describes the largest allowed value of a figure.

    Three kinds of figures have a goal but are not checked. Microseconds depend on the machine. Resident memory depends
    on how much malloc keeps. Ratios to SDPA in bfloat16 are not checked where the compiled kernels convert bfloat16 to
    float32, or where SDPA multiplies with AMX.
    """

    figure: str
    limit: float
    without_avx512: float | None = None  # limit for kernels of targets below x86-64-v4. None: the same limit
    checked: bool = True
    multiplied: float | None = None  # limit for kernels that multiply in bfloat16. None: the same limit

    def limit_of(self, target: str) -> float:
        if self.multiplied is not None and target in BFLOAT16_TARGETS:
            return self.multiplied
        if self.without_avx512 is None or "x86-64-v4" in loader.parts(target):
            return self.limit
        return self.without_avx512

    def is_checked(self, target: str, instructions: frozenset[str]) -> bool:
        multiplied = self.multiplied is not None and target in BFLOAT16_TARGETS and "amx_bf16" not in instructions
        return self.checked or multiplied


GOALS = (
    # goals of the compiled kernels
    Goal("decoding, 32768 keys: ReRoPE, compiled / SDPA", 1.0, 1.2),
    Goal("decoding, 32768 keys: ReRoPE, compiled, paged / ReRoPE, compiled", 1.15),
    Goal("decoding, 32768 keys: HoPE, compiled / SDPA", 1.2),
    Goal("decoding, 2048 keys: ReRoPE, compiled / SDPA", 1.5),
    Goal("decoding, 32768 keys, bfloat16: ReRoPE, compiled / SDPA", 1.0, 1.2, checked=False),
    Goal("decoding, 32768 keys, bfloat16: ReRoPE, compiled / ReRoPE, compiled, float32", 0.7),
    Goal("decoding, 32768 keys, maps: Self-Extend, compiled / RoPE, compiled", 1.3),
    Goal("decoding, 32768 keys, maps: dual chunk, compiled / RoPE, compiled", 1.3),
    Goal("forward, seqlen 512, window 64: ReRoPE, compiled / SDPA", 0.8, 1.0),
    Goal("forward, seqlen 2048, window 128: ReRoPE, compiled / SDPA", 1.0, 1.2),
    Goal("forward, seqlen 2048, window 512: ReRoPE, compiled / SDPA", 1.0, 1.2),
    *(
        goal
        for title in (
            "forward, seqlen 2048, window 512, bfloat16",
            "forward, seqlen 8192, window 1024, bfloat16",
            "forward + backward, seqlen 4096, window 1024, bfloat16",
        )
        for name in ("HoPE, compiled", "ReRoPE, compiled")
        for goal in (
            Goal(f"{title}: {name} / SDPA", 1.0, 1.2, checked=False, multiplied=0.6),
            Goal(f"{title}: {name} / {name}, float32", 1.1, multiplied=0.6),
        )
    ),
    Goal("forward, seqlen 4096, window 1024, maps: Self-Extend, compiled / RoPE, compiled", 1.3),
    Goal("forward, seqlen 4096, window 1024, maps: dual chunk, compiled / RoPE, compiled", 1.3),
    Goal("forward, seqlen 8192, window 1024: ReRoPE, compiled / SDPA", 1.0, 1.2),
    Goal("forward, seqlen 8192, window 1024: HoPE, compiled / SDPA", 1.0, 1.2),
    Goal("forward + backward, seqlen 4096, window 1024: ReRoPE, compiled / SDPA", 0.85, 1.0),
    Goal("memory when seqlen doubles, forward + backward: ReRoPE, compiled", 2.2, checked=False),
    # goals of the compiled kernels over a quantized cache
    *(
        Goal(f"decoding, 32768 keys, cache types: {cache}, int8 / {cache}, {other}", *limits)
        for cache in ("ReRoPE", "ReRoPE, paged", "HoPE", "HoPE, paged", "HoPE, rotated")
        for other, limits in (("float32", (0.5, 0.65)), ("bfloat16", (0.8, 0.9)))
    ),
    *(
        Goal(f"chunk of 512 over 8192 keys, cache types: {cache}, int8 / {cache}, bfloat16", 1.1)
        for cache in ("ReRoPE", "ReRoPE, paged", "HoPE", "HoPE, paged", "HoPE, rotated")
    ),
    *(Goal(figure, limit) for figure, limit in cpu_wide.GOALS),
    # goals of the backend composed of PyTorch's kernels
    Goal("decoding, 32768 keys: ReRoPE, composed / SDPA", 1.35),
    Goal("decoding, 32768 keys: ReRoPE, composed / rotate the cache, then SDPA", 0.2),
    Goal("forward, seqlen 8192, window 1024: ReRoPE, composed / SDPA", 1.35),
    Goal("forward + backward, seqlen 4096, window 1024: ReRoPE, composed / SDPA", 1.6),
    Goal("memory when seqlen doubles, forward + backward: ReRoPE, composed", 2.2),
    Goal("host time at seqlen 1 beyond its operators, us", 60.0, checked=False),
    Goal("host time over 16 cached keys beyond its operators, us", 100.0, checked=False),
)


class Bench:
    """Measures tables, prints them, and stores the ratio of every contestant to its base as a figure."""

    def __init__(self, options, run: Run, kernels):
        self.options, self.run, self.kernels = options, run, kernels
        self.figures: dict[str, float] = {}

    def problem(self, seqlen: int, window: int, **changes) -> Problem:
        o = self.options
        sizes = (1, seqlen, o.heads, o.heads, o.head_dim, torch.float32, CPU)
        return Problem(*sizes, window=window, train_length=512).replace(**changes)

    def measure(self, title: str, chosen: list[Entry], p: Problem, share: float, backward: bool = False) -> None:
        """Measures a table, unless it was measured before. share: which fraction of --seconds it gets."""
        if any(record.table == title for record in self.run.records):
            return
        problems = [p.replace(dtype=each.dtype or p.dtype) for each in chosen]
        self.check(title, chosen, problems, backward)
        tensors = {mine.dtype: mine.tensors() for mine in problems}
        calls = {}
        for each, mine in zip(chosen, problems, strict=True):
            arranged = [each.arrange(x).requires_grad_(backward) for x in tensors[mine.dtype]]
            grad_out = torch.randn_like(tensors[mine.dtype][0])
            calls[each.name] = bound(each.contestant.prepare(mine), arranged, each.arrange(grad_out), backward)
        times = rounds(calls, Timer(CPU), self.options.seconds * share)
        self.report(title, chosen, p, times, backward)

    def check(self, title: str, chosen: list[Entry], problems: list[Problem], backward: bool) -> None:
        for each, mine in zip(chosen, problems, strict=True):
            if not (error := check.error(for_check(each), mine, backward)) <= check.TOLERANCE[mine.dtype]:
                raise RuntimeError(f"{each.name} is wrong, nothing is timed: error {error:.2g} against float64")
            self.run.errors[f"{title}: {each.name}"] = error

    def report(self, title: str, chosen: list[Entry], p: Problem, times: dict[str, list[float]], backward: bool):
        count = len(times[chosen[0].name])
        print(f"\n{title}, {count} rounds\n{'':<30}{'median':>12}{'quartiles':>23}   ratio")
        for name, base, contestant, _, _ in chosen:
            spread = Spread.of(times[name])
            found = ratio(times, name, base)
            print(
                f"{name:<30}{spread.median:>9.2f} ms{spread.low:>11.2f} - {spread.high:>9.2f}   {found:.2f} of {base}"
            )
            self.figures |= {f"{title}: {name} / {other}": ratio(times, name, other) for other in times}
            times_of = (spread.median, spread.low, spread.high, count)
            self.run.records.append(
                Record(title, name, contestant.ours, p.sizes(), backward, *times_of, ratios={base: found})
            )

    def forward(self, seqlen: int, window: int, share: float, schemes=("ReRoPE",), peers=0, dtype=torch.float32):
        """Measures the forward. peers: how many of ``peer_entries`` to include."""
        title = f"forward, seqlen {seqlen}, window {window}" + (", bfloat16" if dtype is torch.bfloat16 else "")
        chosen = forward_entries(self.kernels, schemes, dtype is torch.bfloat16) + peer_entries()[:peers]
        self.measure(title, chosen, self.problem(seqlen, window, dtype=dtype), share)

    def backward(self, seqlen: int, window: int, share: float, schemes=("ReRoPE",), peers=0, dtype=torch.float32):
        half = dtype is torch.bfloat16
        title = f"forward + backward, seqlen {seqlen}, window {window}" + (", bfloat16" if half else "")
        chosen = forward_entries(self.kernels, schemes, half) + peer_entries()[:peers]
        self.measure(title, chosen, self.problem(seqlen, window, dtype=dtype), share, True)

    def decode(self, keys: int, share: float, dtype: torch.dtype = torch.float32, busy: bool = False) -> None:
        title = f"decoding, {keys} keys" + (", bfloat16" if dtype is torch.bfloat16 else "")
        p = self.problem(keys, min(self.options.window, keys // 4), decoding=True, dtype=dtype)
        chosen = decoding_entries(self.kernels, dtype is torch.bfloat16)
        self.measure(title + (BUSY if busy else ""), chosen, p, share)

    def maps(self, seqlen: int, window: int, keys: int, share: float) -> None:
        """Measures schemes that map positions, in prefill and decoding."""
        prefill, decoding = self.problem(seqlen, window), self.problem(keys, window, decoding=True)
        title = f"forward, seqlen {seqlen}, window {window}, maps"
        self.measure(title, map_entries(self.kernels, False), prefill, share)
        self.measure(f"decoding, {keys} keys, maps", map_entries(self.kernels, True), decoding, share)

    def cache_types(self, keys: int, seqlen: int, share: float) -> None:
        """Measures quantized and other caches, in decoding and in a chunk of prefill. Does nothing without compiled
        kernels."""
        if self.kernels is None:
            return
        window = min(self.options.window, keys // 4)
        title = f"decoding, {keys} keys, cache types"
        self.measure(title, quantized_entries(self.kernels), self.problem(keys, window, decoding=True), share)
        title = f"chunk of {CHUNK} over {seqlen} keys, cache types"
        prefill = self.problem(seqlen, min(self.options.window, seqlen // 4))
        self.measure(title, quantized_entries(self.kernels, CHUNK), prefill, share)

    def memory(self) -> None:
        """Measures by which factor the peak memory grows when the length doubles. The figure is the largest factor over
        three lengths.

        The compiled kernels allocate outside of PyTorch, so their peak is the resident memory of the process.
        """
        print("\npeak memory of ReRoPE, forward + backward, beyond its inputs")
        options, timer = self.options, Timer(CPU)
        heads, rotary = max(options.heads // 4, 1), Rotary.rope(options.head_dim).rectify(max(options.window // 4, 1))
        for kind, kernels in of_kernels(self.kernels).items():
            peaks = []
            for seqlen in (options.seqlen // 4, options.seqlen // 2, options.seqlen):
                tensors = [torch.randn(1, seqlen, heads, options.head_dim, requires_grad=True) for _ in range(3)]
                call = with_kernels(kernels, lambda _: lambda q, k, v: attention(q, k, v, rotary), None)
                call(*tensors)  # its cos/sin tables are kept between calls
                grads = lambda call=call, tensors=tensors: torch.autograd.grad(call(*tensors).sum(), tensors)  # noqa: E731
                peaks.append(peak_resident_bytes(grads) if kernels else timer.peak_bytes(grads))
                dense_mib = 4 * heads * seqlen**2 / 2**20
                print(
                    f"{kind:<10}seqlen {seqlen:<6} {heads} heads {peaks[-1] / 2**20:>8.1f} MiB = "
                    f"{peaks[-1] / (4 * tensors[0].numel()):.1f} times q (one dense score matrix: {dense_mib:.0f} MiB)"
                )
            growth = max(b / a for a, b in zip(peaks, peaks[1:], strict=False))
            self.figures[f"memory when seqlen doubles, forward + backward: ReRoPE, {kind}"] = growth

    def product(self) -> None:
        """Prints the speed of the compiled bfloat16 forward pass as a fraction of the speed of PyTorch's matmul."""
        a, b = torch.randn(2, 1024, 1024, dtype=torch.bfloat16).unbind()
        p = self.problem(min(self.options.seqlen, SHORT[-1][0]), SHORT[-1][1], dtype=torch.bfloat16)
        calls, work = {"product": lambda: a @ b}, {"product": 2 * 1024**3}
        tensors = p.tensors()
        for each in forward_entries(self.kernels, ("HoPE", "ReRoPE")):
            if each.name.endswith(f", {COMPILED}"):
                calls[each.name] = partial(each.contestant.prepare(p), *tensors)
                work[each.name] = 2 * p.heads * p.seqlen**2 * p.head_dim
        times = rounds(calls, Timer(CPU), self.options.seconds * 0.05)
        speeds = {name: work[name] / (1e6 * Spread.of(each).median) for name, each in times.items()}
        print(f"\nbfloat16: PyTorch's product of 1024 x 1024 {speeds['product']:.0f} GFLOP/s")
        for name in list(calls)[1:]:
            print(
                f"forward, seqlen {p.seqlen}: {name} {speeds[name]:.0f}, {speeds[name] / speeds['product']:.2f} of it"
            )

    def busy(self) -> None:
        """Measures decoding while another process computes, and prints how much each contestant's ratio to SDPA
        grows."""
        neighbor = multiprocessing.get_context("spawn").Process(target=compute_forever, daemon=True)
        neighbor.start()
        try:
            for keys in CACHE_SEQLENS:
                self.decode(keys, 0.1, busy=True)
        finally:
            neighbor.terminate()
        print(f"\n{'ratio to SDPA beside a busy process / ratio when quiet':<60}")
        for keys in CACHE_SEQLENS:
            for kind in of_kernels(self.kernels):
                name = f": ReRoPE, {kind} / {SDPA}"
                quiet, loud = (self.figures[f"decoding, {keys} keys{how}{name}"] for how in ("", BUSY))
                print(f"{keys} keys, {kind:<10}{loud:>8.2f} / {quiet:.2f} = {loud / quiet:.2f}")

    def training(self) -> None:
        """Measures training steps of the model that ``flashrope demo`` trains, with and without this package."""
        for batch, seqlen in SIZES:
            p = training_problem(batch, seqlen)
            chosen, title = training_entries(self.kernels), f"training steps, batch {batch}, seqlen {seqlen}"
            self.check(title, chosen, [p] * len(chosen), True)
            times = rounds(training_steps(chosen, p), Timer(CPU), self.options.seconds * 0.5)
            self.report(title, chosen, p, times, True)
            print(f"tokens per second: {tokens_per_second(times, p)}")

    def lengths(self) -> None:
        """Measures the same contestants at every length, for the chart by length."""
        schemes = "HoPE", "ReRoPE"
        for seqlen in LENGTHS:
            window, peers = min(seqlen // 4, 1024), 3 if seqlen <= DENSE_SEQLEN else 2
            if seqlen < LENGTHS[-1]:
                self.forward(seqlen, window, 0.05, schemes, peers)
            if seqlen <= 2 * BACKWARD_SEQLEN:
                self.backward(seqlen, window, 0.05, schemes, peers)
            self.decode(seqlen, 0.02)

    def tables(self) -> None:
        o = self.options
        if o.wide:
            return cpu_wide.measure(self)
        for seqlen, window in SHORT:
            last = (seqlen, window) == SHORT[-1]
            schemes, peers = ("HoPE", "ReRoPE") if last else ("ReRoPE",), 3 if last else 0
            self.forward(min(seqlen, o.seqlen), min(window, o.seqlen // 4), 0.05, schemes, peers)
        seqlen, window = SHORT[-1]
        both, half = ("HoPE", "ReRoPE"), torch.bfloat16
        self.forward(min(seqlen, o.seqlen), min(window, o.seqlen // 4), 0.05, both, dtype=half)
        self.forward(o.seqlen, min(o.window, o.seqlen // 4), 0.3, both, peers=2)
        self.forward(o.seqlen, min(o.window, o.seqlen // 4), 0.1, both, dtype=half)
        seqlen = min(o.seqlen, BACKWARD_SEQLEN)
        self.backward(seqlen, min(o.window, seqlen // 4), 0.15, both, peers=2)
        self.backward(seqlen, min(o.window, seqlen // 4), 0.1, both, dtype=half)
        for keys in CACHE_SEQLENS:
            self.decode(keys, 0.1)
        self.decode(CACHE_SEQLENS[0], 0.1, torch.bfloat16)
        self.maps(seqlen, min(o.window, seqlen // 4), CACHE_SEQLENS[0], 0.05)
        self.cache_types(CACHE_SEQLENS[0], o.seqlen, 0.05)
        cpu_wide.measure(self)
        if o.lengths:
            self.lengths()
        if o.grid:
            for seqlen in GRID_SEQLENS:
                for window in (w for w in GRID_WINDOWS if w < seqlen):
                    self.forward(seqlen, window, 0.05)

    def all(self) -> None:
        self.tables()
        o = self.options
        if o.wide:
            return
        if o.busy:
            self.busy()
        if o.training:
            self.training()
        if self.kernels:
            self.product()
        beyond = host_times(o.heads, o.head_dim)
        self.figures |= {goal.figure: us for goal, us in zip(GOALS[-2:], beyond, strict=True)}
        self.memory()  # last: the profiler slows down every later operator of the process

    def goals(self) -> list[str]:
        """Prints every goal that was measured. Returns the goals that are checked and missed by more than the slack."""
        print("\ngoals")
        failed, target = [], self.kernels.path.stem if self.kernels else ""
        for goal in GOALS:
            figure, limit, checked = goal.figure, goal.limit_of(target), goal.is_checked(target, loader.instructions())
            if (got := self.figures.get(figure)) is None:
                print(f"{'':<8}{figure:<76}{'-':>7}, allowed {limit:.2f}: not measured")
                continue
            verdict = "met" if got <= limit else "MISSED"
            print(f"{verdict:<8}{figure:<76}{got:>7.2f}, allowed {limit:.2f}{'' if checked else ', not checked'}")
            self.run.goals.append({"goal": figure, "floor": limit, "worst": got, "verdict": verdict})
            if checked and got > limit * SLACK:
                failed.append(figure)
        return failed


class Plan(Bench):
    """Collects the tables that a Bench with the same options would measure, but measures nothing."""

    def __init__(self, options, kernels):
        super().__init__(options, Run("cpu", "", {}, {}, {}), kernels)
        self.planned: dict[str, tuple[float, float]] = {}  # title: (share of --seconds, products in a round)
        self.tables()
        for keys in CACHE_SEQLENS if options.busy else ():
            self.decode(keys, 0.1, busy=True)

    def measure(self, title: str, chosen: list[Entry], p: Problem, share: float, backward: bool = False) -> None:
        chunk = CHUNK if title.startswith("chunk") else p.seqlen / 2
        rows = DECODING_COST if p.decoding else chunk
        products = 2 * p.seqlen * rows * p.heads * p.head_dim * (BACKWARD_COST if backward else 1)
        self.planned.setdefault(title, (share, products * len(chosen)))

    def seconds(self, rate: float) -> float:
        """Estimates the time of all rounds, and of the one call that precedes the first round of each table. rate: how
        many multiply-adds SDPA computes per second."""
        rounds_of = ((self.options.seconds * share, products / rate) for share, products in self.planned.values())
        return sum(max(time, MIN_ROUNDS["cpu"] * each) + each for time, each in rounds_of)


def sdpa_rate(heads: int, head_dim: int, seqlen: int) -> float:
    """Returns SDPA's multiply-adds per second in a causal forward pass of this length."""
    q, k, v = torch.randn(3, 1, heads, seqlen, head_dim)
    timer, call = Timer(CPU), lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    timer(call)
    return seqlen**2 * heads * head_dim / (1e-3 * min(timer(call) for _ in range(3)))


def expected_time(plan: Plan, rate: float) -> str:
    """Returns the expected time of a run's rounds as text. It is a lower bound on the time of the run, because the
    times of compiling, of checks and of memory measurements are not known in advance."""
    return (
        f"expected time: {duration(plan.seconds(rate))} for {len(plan.planned)} tables; "
        "checks, compiling and memory take about as long again"
    )


def peak_resident_bytes(call: Callable) -> int:
    """Returns the peak resident memory of this process during the call, beyond what it held before. Works only on
    Linux."""

    def of_process(name: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that malloc keeps would hide what the call allocates
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = of_process("VmRSS")
    call()
    return of_process("VmHWM") - before


def compute_forever() -> None:
    torch.set_num_threads(1)
    x = torch.randn(512, 512)
    while True:
        x @ x


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench cpu",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in (("seqlen", 8192), ("heads", 8), ("head-dim", 64), ("window", 1024), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="time for the rounds of all tables that are always measured (default 30). Each table of --grid, --lengths "
        "and --busy adds 2%% to 10%% to it, each table of --training 50%%. Every table has at least three rounds",
    )
    parser.add_argument("--target", help="use the compiled kernels of this target, for example x86-64-v3")
    parser.add_argument("--wide", action="store_true", help="measure only head_dim 512 and values in keys")
    parser.add_argument("--grid", action="store_true", help="also measure ReRoPE's forward for every window and length")
    parser.add_argument("--lengths", action="store_true", help="also measure the tables of the chart by length")
    parser.add_argument("--busy", action="store_true", help="also measure decoding while another process computes")
    parser.add_argument("--training", action="store_true", help="also measure training steps of the demo's model")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with 1 if a ratio is over its goal by more than {SLACK - 1:.0%}% in each of {ATTEMPTS} attempts",
    )
    add_output_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, versions, kernels = machine.describe(CPU), machine.versions(), compiled_kernels(options.target)
    print(
        f"{command_line('cpu', argv)}\n{device['name']}, torch {versions['torch']}, {device['threads']} threads, "
        f"{device['vector']}"
    )
    plan = Plan(options, kernels)
    print(
        expected_time(plan, sdpa_rate(options.heads, options.head_dim, min(options.seqlen, BACKWARD_SEQLEN))),
        flush=True,
    )
    for attempt in range(ATTEMPTS if options.check else 1):
        load = {"start": machine.load_average()}
        run = Run("cpu", command_line("cpu", argv), device, versions, {}, load_average=load, note=options.note)
        bench = Bench(options, run, kernels)
        bench.all()
        failed = bench.goals()
        if not failed:
            break
        if options.check:
            print(
                f"\nattempt {attempt + 1} of {ATTEMPTS}, over its goal by more than {SLACK - 1:.0%}: "
                f"{', '.join(sorted(failed))}"
            )
    if folder := output_folder(options):
        run.load_average["end"] = machine.load_average()
        stem = "cpu-wide" if options.wide else f"cpu-d{options.head_dim}-h{options.heads}x{options.heads}-fp32"
        run.write(folder / machine.slug(device["name"]), stem)
        print(f"\nwritten: {folder / machine.slug(device['name']) / stem}.{{json,csv}}")
    return 1 if options.check and failed else 0
