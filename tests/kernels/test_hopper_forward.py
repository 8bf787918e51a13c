"""The forward for sm_90 with TMA, on the PTX executor: ``tests/executor/hopper.py``, in a process that compiles."""

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from test_executor import executed, library, pytestmark  # noqa: F401

CASES = ("tests/executor/asynchronous_watches.py", "tests/executor/hopper.py")


@pytest.mark.slow  # .ci/run has a step for it
def test_quick_cases(library):  # noqa: F811
    executed(90, "-m", "quick", *CASES)


@pytest.mark.slow
def test_all_cases(library):  # noqa: F811
    executed(90, "-m", "slow or not slow", *CASES)
