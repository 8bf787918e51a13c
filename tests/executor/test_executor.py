"""Tests the executor's builds, and runs the tests of every backend on it. conftest.py runs the executor's own cases."""

import os
import time

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from executor.machine import build

from .conftest import executed, skip_where_nothing_runs


@pytest.mark.parametrize("missing", ["compiler", "nvcc"])
def test_what_is_missing_is_named(monkeypatch, missing):
    reasons = {
        "compiler": r"the PTX executor needs a C\+\+ compiler: none of \$CXX, g\+\+, clang\+\+ and c\+\+ was found",
        "nvcc": r"the CUDA C\+\+ kernels need nvcc, which is not on PATH",
    }
    if missing == "nvcc":
        monkeypatch.setattr(build, "library", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(pytest.skip.Exception, match=reasons[missing]):
        skip_where_nothing_runs(cuda=missing == "nvcc")


def test_old_entries_of_the_cache_are_removed(tmp_path):
    now, names = time.time(), ["executor-1", "extension-1", "triton/a", "triton/b", "executor-2"]
    for age, name in enumerate(reversed(names)):  # the last entry is in use
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(bytes(100_000))
        os.utime(tmp_path / name, (now - 5000 * age,) * 2)
    build.trim(tmp_path, 1_000_000)
    assert all((tmp_path / name).exists() for name in names)
    build.trim(tmp_path, 330_000)
    assert [name for name in names if not (tmp_path / name).exists()] == names[:2]
    build.trim(tmp_path, 0)
    assert [name for name in names if (tmp_path / name).exists()] == names[-1:]


# Tests that look into the interpreter or start processes.
ELSEWHERE = ("rotated_keys_are_those_of_the_window", "every_key_of_a_chunk", "nothing_outside_the_buffers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["operators/test_accuracy", "caches/test_decode", "operators/test_varlen", "kernels/test_decode_triton"]
)
@pytest.mark.parametrize("arch", [80, 90])
def test_the_tests_of_every_backend(arch, file):
    """Runs about a quarter of the tests that the interpreter runs, and a quarter of the tests that are too slow for the
    interpreter. All schemes, layouts and options appear, but not in every combination."""
    skip_where_nothing_runs(cuda=False)
    deselect = "not " + " and not ".join(ELSEWHERE)
    executed(arch, "--executor-sample", "4", "-m", "slow or not slow", f"tests/{file}.py", "-k", deselect)
