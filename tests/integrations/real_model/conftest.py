"""The tests in this folder run SmolLM2-135M. .ci/run real-model installs its weights and names the file in
FLASHROPE_REAL_MODEL. Without this variable the tests are not collected."""

import os

import pytest

PATH = os.environ.get("FLASHROPE_REAL_MODEL", "")
collect_ignore_glob = [] if PATH else ["test_*.py"]


def pytest_report_header():
    return None if PATH else "FLASHROPE_REAL_MODEL is not set: tests/integrations/real_model is skipped"


@pytest.fixture(scope="session")
def loaded():
    """Returns (model, tokens) of the file, in float32."""
    import torch
    from flashrope.lab.evaluation.checkpoint import load

    return load(PATH, torch.device("cpu"))


@pytest.fixture
def model(loaded):
    from flashrope.integrations.transformers import revert

    yield loaded[0]
    revert(loaded[0])


@pytest.fixture(scope="session")
def tokens(loaded):
    return loaded[1]
