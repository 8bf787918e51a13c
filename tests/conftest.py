"""Defines fixtures and options. Without a GPU, switches Triton's interpreter on before triton is imported.

--cpu-target selects the compiled CPU kernels of another instruction set. --threads N sets the CPU threads of the tests
and of the processes that they start (default 1). --perturb-training SEED changes the result of every training by
rounding errors only. No test may pass or fail because of it.
"""

import os
import signal
import subprocess
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # numpy reads the variable at import

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore SIGINT; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import interpreting
import support

if support.INTERPRETED:
    interpreting.make_faster()


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=1, help="CPU threads of the tests and of the processes they start")
    parser.addoption("--walk-seconds", type=float, default=0, help="how long each random walk of test_walks.py takes")
    parser.addoption("--walk-seed", type=int, default=0, help="the seed of the random walks (default: 0)")
    parser.addoption("--cpu-target", metavar="TARGET", help="the compiled CPU kernels of this target: x86-64-v3, ...")
    parser.addoption("--perturb-training", type=int, metavar="SEED", help="perturb weights by rounding before training")


def pytest_configure(config):
    os.environ["OMP_NUM_THREADS"] = str(config.getoption("threads"))
    torch.set_num_threads(config.getoption("threads"))
    if config.getoption("perturb_training") is not None:
        from perturb import perturb

        perturb(config.getoption("perturb_training"))
    from flashrope.backends.cpu import loader

    target = config.getoption("cpu_target")
    if not hasattr(config, "workerinput"):  # only in the main process, not in every worker of xdist
        _build_cpu_kernels(target)
    if target:
        library = loader.open_target(target)
        loader.load = lambda: library
    config.addinivalue_line(
        "markers",
        "interpreted(chosen): the parameters that Triton's interpreter runs too by default; its others are slow",
    )
    config.addinivalue_line(
        "filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning"
    )  # the interpreter causes this warning


def pytest_xdist_auto_num_workers(config):
    """Returns the number of workers for -n auto. On a GPU nearly all of the time goes into compiling, which keeps one
    core per worker busy. Each worker holds up to 2 GiB of GPU memory."""
    cores = os.cpu_count() or 1
    return min(cores, 16, max(torch.cuda.mem_get_info()[0] >> 31, 1)) if torch.cuda.is_available() else min(cores, 8)


@pytest.hookimpl(tryfirst=True)  # must run before -m selects tests by their markers
def pytest_collection_modifyitems(items):
    cases: dict[str, dict[str, int]] = {}  # of each test: {a case without its target: its number}
    order = []
    for item in items:
        values = getattr(item, "callspec", None)
        target = values and next(
            (values.params[x] for x in ("target", "exact", "placed_target") if x in values.params), None
        )
        if not isinstance(target, support.Target):
            order.append((len(cases), 0))
            continue
        numbers = cases.setdefault(f"{item.path}::{item.originalname}", {})
        number = numbers.setdefault(values.id.replace(str(target), "", 1), len(numbers))
        order.append((len(cases), number))
        if target.slow:
            marker = item.get_closest_marker("interpreted")
            chosen = not marker or marker.args[0](**values.params)
        else:
            chosen = target.takes(number)
        if not chosen:
            item.add_marker(pytest.mark.slow)
    # one case after another on all targets, which share the exact results of support.exact_and_bound
    items[:] = [items[n] for n in sorted(range(len(items)), key=order.__getitem__)]


@pytest.fixture(params=support.TARGETS, ids=str)
def target(request):
    """Runs the test with every backend, in every type that the backend is tested in."""
    return request.param


@pytest.fixture(params=[t for t in support.TARGETS if t.dtype == torch.float32], ids=str)
def exact(request):
    """Runs the test with every backend in float32, which has the tightest budget of the types that all backends
    share."""
    return request.param


def _build_cpu_kernels(target):
    """Builds the kernels of a target, by default the best target for this processor, if the checkout lacks them or
    their sources have changed."""
    from flashrope.backends.cpu import loader

    if not (target or loader.runnable()) or not (loader.SOURCES / "build.py").exists():
        return
    if outdated := list(filter(loader.problem_of, loader.parts(target or loader.runnable()[0]))):
        subprocess.run([sys.executable, loader.SOURCES / "build.py", loader.FOLDER, *outdated], capture_output=True)
        loader.find.cache_clear()


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch):
    """Restores the loader after each test. Benchmarks replace it and do not put it back."""
    from flashrope.backends.cpu import loader

    monkeypatch.setattr(loader, "load", loader.load)


@pytest.fixture
def compiled():
    """Runs the test with the compiled kernels of the CPU backend."""
    from flashrope.backends.cpu import loader

    if loader.load() is None:
        pytest.skip("needs the compiled CPU kernels")
    return loader.load()


@pytest.fixture
def without_kernels(monkeypatch):
    """Runs the test as if the compiled CPU kernels were missing."""
    from flashrope.backends.cpu import loader

    monkeypatch.setattr(loader, "load", lambda: None)


@pytest.fixture(autouse=True, scope="session")
def untuned(tmp_path_factory):
    """Makes the tests use the default tiles, even if the user has tuned ones."""
    from flashrope.backends import tuned_tiles as store

    before, missing = store.path, tmp_path_factory.mktemp("cache") / "tiles.json"
    store.path = lambda: missing
    yield
    store.path = before


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
