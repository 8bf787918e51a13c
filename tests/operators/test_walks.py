"""Random walks against float64: chains of all builders, shapes, strides, types, packed sequences, cache operations.

By default a few hundred cases from a fixed seed. ``--walk-seconds N`` walks for N seconds a test, and --walk-seed takes
another seed; -rP shows how many cases that were. A failure is shrunk and prints a script that repeats it.
"""

import time

import pytest
import support
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from walks.caches import walks
from walks.calls import calls, packed

ROUND = 10  # cases, where a time is given
TARGETS = [t for t in support.TARGETS if not t.slow]
INTERPRETED = [t for t in support.TARGETS if t.slow and t.dtype == torch.float32]


def walk(request, cases, target, least: int = 40) -> None:
    """Cases in rounds, each with a seed of its own, until the time is over; without a time, `least` of them."""
    seconds, first = request.config.getoption("walk_seconds"), request.config.getoption("walk_seed")
    end, number = time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < end:

        @seed(first * 1_000_003 + number)
        @settings(
            max_examples=ROUND if seconds else least,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def step(case):
            note(case.script(target))
            case.check(target)

        step()
        number += 1
    if seconds:
        print(f"{number * ROUND} cases")


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_calls(request, target):
    walk(request, calls(longest=300), target)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_packed_sequences(request, target):
    walk(request, packed(longest=100), target, 25)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_caches(request, target):
    walk(request, walks(longest=24), target, 25)


@pytest.mark.slow
@pytest.mark.parametrize("target", INTERPRETED, ids=str)
def test_kernels(request, target):
    walk(request, calls(longest=70), target, 10)


@pytest.mark.slow
@pytest.mark.parametrize("target", INTERPRETED, ids=str)
def test_kernels_packed(request, target):
    walk(request, packed(longest=40), target, 6)


@pytest.mark.slow
@pytest.mark.parametrize("target", INTERPRETED, ids=str)
def test_kernels_over_caches(request, target):
    walk(request, walks(longest=12), target, 6)
