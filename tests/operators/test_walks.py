"""Compares random walks with float64: chains of all builders, shapes, strides, types, packed sequences, calls over a
cache, cache operations.

By default about forty cases are drawn from a fixed seed, and CI draws more (.ci/run walks). ``--walk-seconds N``
walks for N seconds per test, and ``--walk-seed`` sets another seed. ``-rP`` shows the number of cases. A failing case
is made smaller, and the test prints a script that repeats the case.
"""

import time

import pytest
import support
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from walks.cached_calls import cached_calls
from walks.caches import walks
from walks.calls import calls, packed
from walks.contiguous import contiguous_walks

ROUND = 10  # cases per round if a time is given
TARGETS = [t for t in support.TARGETS if not t.slow or t.dtype != torch.float16]


def walk(request, cases, target, least: int) -> None:
    """Runs cases in rounds, each with its own seed, until the time is up. Without a time it runs `least` cases."""
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


# (what is drawn, its longest sequence, the number of cases without a time); the same for the interpreter
WALKS = {
    "calls": (calls, (300, 40), (5, 4)),
    "packed_sequences": (packed, (100, 25), (3, 3)),
    "cached_calls": (cached_calls, (200, 60), (3, 3)),
    "caches": (walks, (24, 25), (2, 3)),
    "contiguous_caches": (contiguous_walks, (24, 25), (2, 3)),
}


EXACT = (torch.float32, torch.float64)
CASES = [(kind, target) for target in TARGETS for kind in WALKS]
CASES.append(("cached_calls", support.Target("reference", torch.float64, "cpu")))


@pytest.mark.parametrize(
    "kind, target",
    [pytest.param(k, t, marks=[pytest.mark.slow] * (t.slow or t.dtype not in EXACT)) for k, t in CASES],
    ids=str,
)
def test_walk(request, kind, target):
    cases, *sizes = WALKS[kind]
    longest, least = sizes[target.slow]
    walk(request, cases(longest=longest), target, least)
