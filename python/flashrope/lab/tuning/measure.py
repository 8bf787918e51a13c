"""Compiles the candidates of a workload, checks each against the reference, and times the correct ones.

All candidates of a race alternate, round by round, so that they see the same state of the device. The default tile wins
unless another tile is faster by more than ``MIN_GAIN``.
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
from typing import Any, NamedTuple

import torch
from triton import AsyncCompileMode
from triton.runtime.errors import OutOfResources

from ...backends.triton import chosen_tiles as tiles
from ...backends.triton import launcher
from ...backends.triton.device import compute_capability
from ...backends.tuned_tiles import Winner
from ...console.progress import Bar
from ...triton_kernels.configs import Tile
from .candidates import candidates_of, kernel_of
from .timer import Spread, Timer, rounds
from .workloads import CHECK_WINDOW, Results, Workload

# Largest error of a row against float64, relative to the sum of its norm and the mean norm of all rows. For lse, the
# error is absolute.
TOLERANCE = {torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
CHECKS = 2  # number of runs of a check: if warps race, a single run may be correct by chance
MIN_GAIN = 0.02
FIRST_ROUNDS, FINALISTS, NEAR = 3, 4, 1.15  # finalists are within a factor NEAR of the fastest after a short race
MAX_SECONDS = 4.0  # longest time of one long race
COMPILING_SHARE = 0.6  # compiling may take this share of the time for workloads with the same kernels


class Outcome(NamedTuple):
    """The result of a candidate: the reason why it was dropped, or its time in its last race."""

    tile: Tile
    dropped: str = ""
    milliseconds: Spread | None = None


class Examined(NamedTuple):
    """A workload's results. outcomes: the result of every candidate. The default is first."""

    workload: Workload
    outcomes: list[Outcome]

    @property
    def default(self) -> Outcome:
        return self.outcomes[0]

    @property
    def winner(self) -> Outcome | None:
        """Returns the fastest candidate, or the default if it is nearly as fast. Returns None if no candidate could be
        timed."""
        timed = [(outcome.milliseconds.median, outcome) for outcome in self.outcomes if outcome.milliseconds]
        if not timed:
            return None
        median, best = min(timed, key=lambda entry: entry[0])
        default = self.default.milliseconds
        return self.default if default and median > (1 - MIN_GAIN) * default.median else best

    def record(self) -> Winner | None:
        """Returns the winner in the form in which the file of tuned tiles records it."""
        winner = self.winner
        if not winner or not winner.milliseconds:
            return None
        default = self.default.milliseconds or winner.milliseconds
        return Winner(tuple(winner.tile), round(winner.milliseconds.median, 4), round(default.median, 4))


def examine(
    workloads: Sequence[Workload], device: torch.device, seconds: float, bar: Bar, jobs: int = 0
) -> Iterator[Examined]:
    """Examines the workloads in turn. Workloads with the same kernels are examined together. Stops when the time is up.

    seconds: the time for everything. jobs: number of compiling threads (0: all processors).
    """
    end = time.monotonic() + seconds
    groups = [list(group) for _, group in itertools.groupby(workloads, lambda workload: workload.kernels)]
    for at, group in enumerate(groups):
        now = time.monotonic()
        if now >= end:
            return
        yield from _examine_group(group, device, now + (end - now) / (len(groups) - at), bar, jobs)


def steps(workloads: Sequence[Workload], device: torch.device) -> int:
    """Returns the number of steps of the progress bar: one for each compilation, check and race."""
    groups = [list(group) for _, group in itertools.groupby(workloads, lambda workload: workload.kernels)]
    return sum(len(_candidates(group[0], device)) * (2 + len(group)) for group in groups)


def _candidates(workload: Workload, device: torch.device) -> list[Tile]:
    return candidates_of(workload.shape_class, compute_capability(device))


def _examine_group(group, device, end: float, bar: Bar, jobs: int) -> Iterator[Examined]:
    first = group[0]
    candidates = _candidates(first, device)
    bar.start(f"{first.shape_class}: compiling")
    seconds = COMPILING_SHARE * (end - time.monotonic())
    dropped = compile_ahead(first.check(), candidates, device, seconds, jobs, bar)
    bar.start(f"{first.shape_class}: checking")
    exact = first.check().exact(device, CHECK_WINDOW)
    call = first.check().call(device, CHECK_WINDOW)
    for tile in candidates:
        dropped[tile] = dropped.get(tile) or fault(first, tile, call, exact)
        bar.step()
    for at, workload in enumerate(group):
        bar.start(f"{workload.shape_class}: timing")
        running = [tile for tile in candidates if not dropped[tile]]
        times = race(workload, running, device, (end - time.monotonic()) / (len(group) - at)) if running else {}
        bar.step(len(candidates))
        yield Examined(workload, [Outcome(tile, dropped[tile], times.get(tile)) for tile in candidates])


# ---- compiling


def compile_ahead(
    workload: Workload, candidates: Sequence[Tile], device: torch.device, seconds: float, jobs: int, bar: Bar
) -> dict[Tile, str]:
    """Compiles the kernel of this direction for every tile, in threads.

    Returns {tile: reason} of the tiles that were not compiled in time. A kernel that does not compile is found by
    ``fault``, which launches it.
    """
    if launcher.interpreted():
        return {}
    call, end, name = (
        workload.call(device, CHECK_WINDOW),
        time.monotonic() + seconds,
        kernel_of(workload.direction, workload.cache),
    )
    futures: dict[Future, Tile] = {}
    threads = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    with threads, AsyncCompileMode(threads, ignore_errors=True), _cancelled_by_errors(futures):
        for tile in candidates:
            with tiles.forced(workload.direction, tile), _compiled_only(name) as kernels:
                call()
            futures.update((kernel.future, tile) for kernel in kernels if hasattr(kernel, "future"))
        bar.step(len(candidates) - len(futures))
        pending = set(futures)
        while pending and time.monotonic() < end:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.step(len(done))
        late = [future for future in pending if future.cancel()]
        bar.step(len(pending))
    return {futures[future]: "not compiled in time" for future in late}


@contextlib.contextmanager
def _cancelled_by_errors(futures: Iterable[Future]) -> Iterator[None]:
    """Cancels futures that have not started if the block raises, for example at Ctrl-C. Otherwise the pool would wait
    for them when it closes."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise


@contextlib.contextmanager
def _compiled_only(name: str) -> Iterator[list]:
    """Yields a list. Within the context, the kernel of this name is compiled and appended to the list. Nothing is
    launched."""
    kernels, before = [], launcher.launch

    def launch(kernel, grid, *args, **options):
        if kernel.__name__ == name:
            kernels.append(kernel.warmup(*args, grid=grid, **options))

    launcher.launch = launch
    try:
        yield kernels
    finally:
        launcher.launch = before


# ---- checking


def fault(workload: Workload, tile: Tile, call: Callable[[], Results], exact: Results) -> str:
    """Returns why a candidate cannot be used, or "" if its results were correct in every run."""
    with tiles.forced(workload.direction, tile), _new_tensors_are_nan():
        try:
            errors = [error(*pair) for _ in range(CHECKS) for pair in zip(call(), exact, strict=True)]
        except OutOfResources as failure:
            return f"needs {failure.required} of {failure.name}, this device has {failure.limit}"
        except Exception as failure:  # any error of the compiler or the driver; another candidate may run
            return f"does not run: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:80]}"
    worst = max(errors)
    return "" if worst <= TOLERANCE[workload.dtype] else f"wrong: error {worst:.2g} against float64"


@contextlib.contextmanager
def _new_tensors_are_nan() -> Iterator[None]:
    """Fills new tensors with NaN. Otherwise a row that a kernel does not write could hold another candidate's
    result."""
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "deterministic: expected True")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        deterministic.fill_uninitialized_memory = fill


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest error of a row, relative to the row's norm plus the mean norm. For lse, returns the largest
    difference.

    Returns inf if a result is nan.
    """
    difference = got.double() - exact
    if exact.ndim == 3:  # lse
        worst = difference.abs().max()
    else:
        norms = exact.norm(dim=-1)
        worst = (difference.norm(dim=-1) / (norms + norms.mean())).max()
    return worst.nan_to_num(nan=torch.inf).item()


# ---- timing


def race(workload: Workload, candidates: Sequence[Tile], device: torch.device, seconds: float) -> dict[Tile, Spread]:
    """Returns the milliseconds of each tile. A short race picks the finalists of a long race. The first candidate is
    always a finalist."""
    timer = Timer(device)
    calls = dict(zip(candidates, map(partial(_with_tile, workload, workload.call(device)), candidates), strict=True))
    times = {tile: Spread.of(of) for tile, of in rounds(calls, timer, 0.0, FIRST_ROUNDS).items()}
    ranked = sorted(times, key=lambda tile: times[tile].median)
    near = [tile for tile in ranked[:FINALISTS] if times[tile].median <= NEAR * times[ranked[0]].median]
    final = {tile: calls[tile] for tile in dict.fromkeys([candidates[0], *near])}
    if len(final) > 1:
        found = rounds(final, timer, min(max(seconds, 0.0), MAX_SECONDS))
        times |= {tile: Spread.of(of) for tile, of in found.items()}
    return times


def _with_tile(workload: Workload, call: Callable[[], Results], tile: Tile) -> Callable[[], None]:
    def run():
        with tiles.forced(workload.direction, tile):
            call()

    return run
