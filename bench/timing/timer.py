"""Time and memory of a call on one device.

GPU: CUDA events around the call. Before it, other data is read through the L2 cache, which leaves nothing there to
write back. A short sleep on the device lets the host queue the whole call before the first event is reached, so that
host time is not measured. CPU: the clock around the call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

MIN_ROUNDS = {"cpu": 3, "cuda": 10}
MAX_ROUNDS = 200
WARM_UP = {"cpu": 1, "cuda": 3}
FLUSH_BYTES = 256 * 2**20  # at least: several times the L2 cache of an H200 (60 MB)
SLEEP_CYCLES = 1_000_000  # about half a millisecond; doubled if the host takes longer to queue a call
MAX_SLEEP_CYCLES = (
    32 * SLEEP_CYCLES
)  # about 16 ms; a call that takes longer waits for the device, and is timed with that wait


class Spread(NamedTuple):
    """Quartiles, in the unit of the values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(*statistics.quantiles(values, n=4)) if len(values) > 1 else cls(*values * 3)


class Timer:
    """Called with a call, returns its milliseconds on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = None
        self.sleep = SLEEP_CYCLES
        self.memory_is_cheap = device.type == "cuda"  # whether peak_bytes leaves the process unchanged
        if device.type == "cuda":
            size = max(FLUSH_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
            self.flush = torch.zeros(size // 4, device=device)

    def __call__(self, call: Callable) -> float:
        if self.flush is None:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        while True:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.sum()
            torch.cuda._sleep(self.sleep)
            start.record()
            call()
            in_time = not start.query()  # the device still sleeps: the whole call is queued
            stop.record()
            stop.synchronize()
            if in_time or self.sleep >= MAX_SLEEP_CYCLES:
                return start.elapsed_time(stop)
            self.sleep *= 2

    def record(self, call: Callable) -> Callable:
        """The call as a CUDA graph, for work so short that launches would dominate; on the CPU the call itself.

        Raises an exception if the call synchronises with the host.
        """
        if self.flush is None:
            return call
        stream = torch.cuda.Stream(self.device)  # capture needs a warm-up on another stream than the default one
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP["cuda"]):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def peak_bytes(self, call: Callable) -> int:
        """Peak memory of PyTorch's allocator during the call, beyond what it held before.

        On the CPU this uses the profiler, which slows down every later operator of the process: measure time first.
        """
        if self.flush is None:
            return _peak_bytes_cpu(call)
        call()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_bytes(self) -> int:
        """Memory available to a new tensor."""
        if self.flush is None:
            return _available_cpu()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def rounds(calls: Mapping[str, Callable], timer: Timer, seconds: float, min_rounds: int = 0) -> dict[str, list[float]]:
    """Milliseconds of every call. A round runs each call once, so that all of them see the same state of the machine.

    Runs at least min_rounds rounds (0: the device's default), then continues until `seconds` have passed.
    """
    kind = timer.device.type
    for call in calls.values():
        for _ in range(WARM_UP[kind]):
            timer(call)
    times = {name: [] for name in calls}
    end, min_rounds, count = time.perf_counter() + seconds, min_rounds or MIN_ROUNDS[kind], 0
    while count < min_rounds or (time.perf_counter() < end and count < MAX_ROUNDS):
        for name, call in calls.items():
            times[name].append(timer(call))
        count += 1
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """The median over the rounds of (time of `name`) / (time of `base` in the same round)."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def _peak_bytes_cpu(call: Callable) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _available_cpu() -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30
