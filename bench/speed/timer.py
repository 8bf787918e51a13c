"""Measures time and memory of a call on one device. The clock is in flashrope.lab.tuning.timer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from flashrope.lab.tuning import timer
from flashrope.lab.tuning.timer import WARM_UP, Spread, rounds

__all__ = ["Spread", "Timer", "ratio", "rounds"]


class Timer(timer.Timer):
    """Extends the timer of flashrope: it also replays CUDA graphs and measures memory."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.memory_is_cheap = device.type == "cuda"  # on a GPU peak_bytes does not slow down the process

    def record(self, call: Callable) -> Callable:
        """Records the call as a CUDA graph and returns its replay. Use this for calls so short that the launches would
        dominate their time. On the CPU it returns the call itself.

        Raises an exception if the call synchronises with the host.
        """
        if self.flush is None:
            return call
        stream = torch.cuda.Stream(self.device)  # a capture must be preceded by a warm-up outside the default stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP["cuda"]):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return partial(_replay, graph, call)

    def peak_bytes(self, call: Callable) -> int:
        """Returns the peak memory of PyTorch's allocator during the call, beyond what it held before.

        On the CPU this uses the profiler, which slows down every later operator of the process. So measure time first.
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
        """Returns the memory available to a new tensor."""
        if self.flush is None:
            return _available_cpu()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def _replay(graph: torch.cuda.CUDAGraph, call: Callable) -> None:
    """Replays the graph of a call. The call is an argument because it holds tensors that the graph reads."""
    graph.replay()


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Returns the median over the rounds of (time of `name`) / (time of `base` in the same round)."""
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
