import pytest
from ranks import Ranks


@pytest.fixture(scope="package")  # while other tests run, the polling of idle ranks takes a quarter of a core
def ranks():
    """Provides four ranks, on which a test runs a function at once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
