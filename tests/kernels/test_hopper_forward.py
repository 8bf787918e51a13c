"""The forward for sm_90 with TMA, on the PTX executor: ``tests/executor/hopper.py``, in a process that compiles."""

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from executor.conftest import executed, skip_where_nothing_runs

CASES = ("tests/executor/asynchronous_watches.py", "tests/executor/hopper.py")


@pytest.mark.slow  # .ci/run has a step for it
def test_all_cases():
    skip_where_nothing_runs(cuda=False)
    executed(90, "-m", "slow or not slow", *CASES)
