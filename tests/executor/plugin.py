"""A pytest plugin that makes the executor the tests' "triton" target.

PYTHONPATH=tests pytest -p executor.plugin --executor 90 tests/executor tests/operators/test_accuracy.py
"""

import os
import zlib

os.environ["OMP_NUM_THREADS"] = "1"

from .machine import driver

driver.prepare()  # must run before anything imports triton

import pytest
import support
import torch

TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Must run before conftest makes fixtures from the targets.
support.TARGETS[:] = [support.Target("triton", dtype, "cpu") for dtype in TYPES]


def pytest_addoption(parser):
    parser.addoption("--executor", type=int, default=80, metavar="ARCH", help="architecture: 80, 86, 89, 90 or 120")
    parser.addoption("--executor-sample", type=int, default=1, metavar="N", help="about every Nth test")
    parser.addoption("--offered", choices=("sample", "product"), default="sample", help="cases of test_offered.py")
    parser.addoption("--executor-seed", type=int, default=1, help="order of warps; 0 for one after the other")


def pytest_collection_modifyitems(config, items):
    """Keeps a sample of the tests, spread over all parameters. It is the same in every run, and differs between
    architectures."""
    arch, of = config.getoption("executor"), config.getoption("executor_sample")
    kept = [item for item in items if zlib.crc32(f"{item.nodeid} {arch}".encode()) % of == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_configure(config):
    support.INTERPRETED = True  # tests then use the sizes and settings that they use without a GPU
    config.addinivalue_line("markers", "quick: part of the tests' default run")
    options = {"seed": config.getoption("executor_seed")}
    config.stash[MACHINE] = context = driver.executed(config.getoption("executor"), **options)
    context.machine = context.__enter__()
    from flashrope.backends import triton as backend

    backend.unsupported_reason = lambda q, cached=False: ""  # impl="triton" now serves CPU tensors


def pytest_unconfigure(config):
    config.stash[MACHINE].__exit__(None, None, None)


MACHINE = pytest.StashKey()


@pytest.fixture
def machine(request):
    """Returns the machine of this run, without earlier launches. A test may change its options; they are restored
    afterwards."""
    machine = request.config.stash[MACHINE].machine
    machine.launches.clear()
    yield machine
    machine.reset()


@pytest.fixture
def arch(request) -> int:
    return request.config.getoption("executor")
