import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Runs a function of a module, with arguments, on four ranks at once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
