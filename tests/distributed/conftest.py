import pytest
from ranks import Ranks


@pytest.fixture(scope="package")  # no wider scope, because idle ranks poll and take a quarter of a core
def ranks():
    """Provides four ranks, on all of which a test runs a function at the same time."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
