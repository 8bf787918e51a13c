import pytest
from ranks import Ranks


@pytest.fixture(scope="package")  # idle ranks poll: a quarter of a core while the other tests run
def ranks():
    """Runs a function of a module, with arguments, on four ranks at once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
