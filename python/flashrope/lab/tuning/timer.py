"""Measures the time of a call on one device.

On a GPU, CUDA events before and after the call are used. Before the call, other data is read through the L2 cache, so
that the cache has no data left to write back. A short sleep on the device lets the host queue the whole call before the
device reaches the first event, so that host time is not measured. On the CPU, the clock is read before and after the
call.
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
FLUSH_BYTES = 256 * 2**20  # at least this much is read to flush the L2 cache: several times the 60 MB of an H200
SLEEP_CYCLES = 1_000_000  # about half a millisecond, and doubled if the host takes longer to queue a call
# About 16 ms. If the host takes longer to queue a call, the measured time includes host time.
MAX_SLEEP_CYCLES = 32 * SLEEP_CYCLES


class Spread(NamedTuple):
    """Quartiles, in the unit of the values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(*statistics.quantiles(values, n=4)) if len(values) > 1 else cls(*values * 3)


class Timer:
    """A callable that runs a call and returns its milliseconds on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = None
        self.sleep = SLEEP_CYCLES
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
            in_time = not start.query()  # the device still sleeps, so the whole call is queued
            stop.record()
            stop.synchronize()
            if in_time or self.sleep >= MAX_SLEEP_CYCLES:
                return start.elapsed_time(stop)
            self.sleep *= 2


def rounds(calls: Mapping[str, Callable], timer: Timer, seconds: float, min_rounds: int = 0) -> dict[str, list[float]]:
    """Returns the milliseconds of every call, per round. A round runs each call once, so that all calls see the same
    state of the device.

    Runs at least min_rounds rounds (0: the device's default), then continues until `seconds` have passed.
    """
    kind = timer.device.type
    for call in calls.values():
        for _ in range(WARM_UP[kind]):
            timer(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, min_rounds, count = time.perf_counter() + seconds, min_rounds or MIN_ROUNDS[kind], 0
    while count < min_rounds or (time.perf_counter() < end and count < MAX_ROUNDS):
        for name, call in calls.items():
            times[name].append(timer(call))
        count += 1
    return times
