"""Compiles the candidates of a workload, checks each against the reference, and times those that pass.

All candidates of a race alternate, round by round, so that they see the same state of the device. The default tile
stays unless another is faster by more than ``MIN_GAIN``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import torch
from triton import AsyncCompileMode
from triton.runtime.errors import OutOfResources

from ..backends.triton import launcher, tiles
from ..backends.triton.device import compute_capability
from ..backends.triton.tiles import Choice
from ..backends.tuned_tiles import Winner
from ..cli.progress import Bar
from .candidates import KERNELS, choices_of
from .timer import Spread, Timer, rounds
from .workloads import CHECK_WINDOW, Results, Workload

# Largest error of a row against float64, relative to its norm and the mean norm of all rows, added. lse: absolute.
TOLERANCE = {torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
CHECKS = 2  # a race between warps may go well once
MIN_GAIN = 0.02
FIRST_ROUNDS, FINALISTS, NEAR = 3, 4, 1.15  # the best of a short race, and within NEAR of the first, run a long one
MAX_SECONDS = 4.0  # of one long race
COMPILING_SHARE = 0.6  # of the time for the workloads that share kernels


class Outcome(NamedTuple):
    """What became of a candidate: the reason why it was dropped, or its time in the last race that it ran in."""

    choice: Choice
    dropped: str = ""
    milliseconds: Spread | None = None


class Examined(NamedTuple):
    """outcomes: of every candidate, the default first."""

    workload: Workload
    outcomes: list[Outcome]

    @property
    def default(self) -> Outcome:
        return self.outcomes[0]

    @property
    def winner(self) -> Outcome | None:
        """The fastest, or the default if that is nearly as fast. None where no candidate could be timed."""
        timed = [outcome for outcome in self.outcomes if outcome.milliseconds]
        best = min(timed, key=lambda outcome: outcome.milliseconds.median, default=None)
        if best and self.default.milliseconds:
            if best.milliseconds.median > (1 - MIN_GAIN) * self.default.milliseconds.median:
                return self.default
        return best

    def record(self) -> Winner | None:
        """For the file."""
        if not self.winner:
            return None
        choice, _, spread = self.winner
        default = self.default.milliseconds or spread
        return Winner(tuple(choice.tile), choice.kernel, round(spread.median, 4), round(default.median, 4))


def describe(choice: Choice) -> str:
    block_m, block_n, num_warps, num_stages = choice.tile
    kernel = f", {choice.kernel} kernel" if choice.kernel else ""
    return f"{block_m} x {block_n}, {num_warps} warps, {num_stages} stages{kernel}"


def examine(
    workloads: Sequence[Workload], device: torch.device, seconds: float, bar: Bar, jobs: int = 0
) -> Iterator[Examined]:
    """Examines the workloads in turn, those with the same kernels together. Stops when the time is over.

    seconds: for everything. jobs: compiling threads (0: all processors).
    """
    end = time.monotonic() + seconds
    groups = [list(group) for _, group in itertools.groupby(workloads, lambda workload: workload.kernels)]
    for at, group in enumerate(groups):
        now = time.monotonic()
        if now >= end:
            return
        yield from _examine_group(group, device, now + (end - now) / (len(groups) - at), bar, jobs)


def steps(workloads: Sequence[Workload], device: torch.device) -> int:
    """Steps of the bar: one for each compilation, check and race."""
    groups = [list(group) for _, group in itertools.groupby(workloads, lambda workload: workload.kernels)]
    return sum(len(_choices(group[0], device)) * (2 + len(group)) for group in groups)


def _choices(workload: Workload, device: torch.device) -> list[Choice]:
    return choices_of(workload.shape_class, workload.head_dim, compute_capability(device))


def _examine_group(group, device, end: float, bar: Bar, jobs: int) -> Iterator[Examined]:
    first = group[0]
    choices = _choices(first, device)
    bar.start(f"{first.shape_class}: compiling")
    seconds = COMPILING_SHARE * (end - time.monotonic())
    dropped = compile_ahead(first.check(), choices, device, seconds, jobs, bar)
    bar.start(f"{first.shape_class}: checking")
    exact = first.check().exact(device, CHECK_WINDOW)
    call = first.check().call(device, CHECK_WINDOW)
    for choice in choices:
        dropped[choice] = dropped.get(choice) or fault(first, choice, call, exact)
        bar.step()
    for at, workload in enumerate(group):
        bar.start(f"{workload.shape_class}: timing")
        running = [choice for choice in choices if not dropped[choice]]
        times = race(workload, running, device, (end - time.monotonic()) / (len(group) - at)) if running else {}
        bar.step(len(choices))
        yield Examined(workload, [Outcome(choice, dropped[choice], times.get(choice)) for choice in choices])


# ---- compiling


def compile_ahead(
    workload: Workload, choices: Sequence[Choice], device: torch.device, seconds: float, jobs: int, bar: Bar
) -> dict[Choice, str]:
    """Compiles the kernel of this direction for every choice, in threads. Returns those not compiled in time, and why.

    A kernel that does not compile is noticed by ``fault``, which launches it.
    """
    if launcher.interpreted():
        return {}
    call, end, name = workload.call(device, CHECK_WINDOW), time.monotonic() + seconds, KERNELS[workload.direction]
    futures: dict[Future, Choice] = {}
    threads = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    with threads, AsyncCompileMode(threads, ignore_errors=True), _cancelled_by_errors(futures):
        for choice in choices:
            with tiles.forced(workload.direction, choice), _compiled_only(name) as kernels:
                call()
            futures.update((kernel.future, choice) for kernel in kernels if hasattr(kernel, "future"))
        bar.step(len(choices) - len(futures))
        pending = set(futures)
        while pending and time.monotonic() < end:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.step(len(done))
        late = [future for future in pending if future.cancel()]
        bar.step(len(pending))
    return {futures[future]: "not compiled in time" for future in late}


@contextlib.contextmanager
def _cancelled_by_errors(futures: Iterable[Future]) -> Iterator[None]:
    """Cancels what has not started if the block raises, as at Ctrl-C; the end of a pool waits for all the others."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise


@contextlib.contextmanager
def _compiled_only(name: str) -> Iterator[list]:
    """In this context nothing is launched. The kernel of this name is compiled instead, and appended to the list."""
    kernels, before = [], launcher.launch

    def launch(kernel, grid, *args, **options):
        if kernel.__name__ in (name, "hopper_forward"):
            kernels.append(kernel.warmup(*args, grid=grid, **options))

    launcher.launch = launch
    try:
        yield kernels
    finally:
        launcher.launch = before


# ---- checking


def fault(workload: Workload, choice: Choice, call: Callable[[], Results], exact: Results) -> str:
    """Why a candidate cannot be used; "" if its results are right, each time that it ran."""
    with tiles.forced(workload.direction, choice), _new_tensors_are_nan():
        try:
            errors = [error(*pair) for _ in range(CHECKS) for pair in zip(call(), exact, strict=True)]
        except OutOfResources as failure:
            return f"needs {failure.required} of {failure.name}, this device has {failure.limit}"
        except Exception as failure:  # whatever the compiler or the driver says: another candidate may run
            return f"does not run: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:80]}"
    worst = max(errors)
    return "" if worst <= TOLERANCE[workload.dtype] else f"wrong: error {worst:.2g} against float64"


@contextlib.contextmanager
def _new_tensors_are_nan() -> Iterator[None]:
    """Or a row that a kernel leaves out could hold what another candidate wrote there."""
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "deterministic: expected True")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a row, relative to its norm plus the mean norm; of lse the largest difference.

    inf where a result is nan.
    """
    difference = got.double() - exact
    if exact.ndim == 3:  # lse
        worst = difference.abs().max()
    else:
        norms = exact.norm(dim=-1)
        worst = (difference.norm(dim=-1) / (norms + norms.mean())).max()
    return worst.nan_to_num(nan=torch.inf).item()


# ---- timing


def race(workload: Workload, choices: Sequence[Choice], device: torch.device, seconds: float) -> dict[Choice, Spread]:
    """Milliseconds of each choice. A short race picks the finalists, among them the first choice, of a long one."""
    timer = Timer(device)
    calls = dict(zip(choices, map(partial(_with_choice, workload, workload.call(device)), choices), strict=True))
    times = {choice: Spread.of(of) for choice, of in rounds(calls, timer, 0.0, FIRST_ROUNDS).items()}
    ranked = sorted(times, key=lambda choice: times[choice].median)
    near = [choice for choice in ranked[:FINALISTS] if times[choice].median <= NEAR * times[ranked[0]].median]
    final = {choice: calls[choice] for choice in dict.fromkeys([choices[0], *near])}
    if len(final) > 1:
        found = rounds(final, timer, min(max(seconds, 0.0), MAX_SECONDS))
        times |= {choice: Spread.of(of) for choice, of in found.items()}
    return times


def _with_choice(workload: Workload, call: Callable[[], Results], choice: Choice) -> Callable[[], None]:
    def run():
        with tiles.forced(workload.direction, choice):
            call()

    return run
