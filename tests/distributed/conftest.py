import pytest
from ranks import Ranks


@pytest.fixture(scope="package")  # while other tests run, the polling of idle ranks takes a quarter of a core
def ranks():
    """Runs a function of a module, with arguments, on four ranks at once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
