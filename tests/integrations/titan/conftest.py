"""The tests in this folder run torchtitan. .ci/run installs it in a separate environment. Without torchtitan the tests
are not collected."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

INSTALLED = find_spec("torchtitan") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))  # ranks.py


def pytest_report_header():
    return None if INSTALLED else "torchtitan is not installed: tests/integrations/titan is skipped"


@pytest.fixture(autouse=True)
def _as_a_single_process():
    import trainings

    trainings.start()


@pytest.fixture(scope="package")
def two_ranks():
    """Provides two ranks, on both of which a test runs a function at the same time."""
    from ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.stop()
