"""The compiled kernels run without a GPU, in processes of their own: in this one Triton interprets.

``tests/executor/cases.py`` has the cases. The default tests run those marked quick; the others that are not slow take
some minutes where nothing is compiled yet:

    PYTHONPATH=tests pytest -p executor.plugin --executor 80 tests/executor/cases.py tests/executor/mutants.py
"""

import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from executor import build, extension

TESTS = pathlib.Path(__file__).parents[1]
NAMES = ("instructions", "watches", "cases", "mutants", "counts", "tuning", "sizes", "reproducible", "hostile")
CASES = [f"tests/executor/{name}.py" for name in NAMES]
CUDA_CASES = [f"tests/executor/{name}.py" for name in ("cuda_kernels", "cuda_packed", "cuda_mutants", "cuda_sizes")]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")


@pytest.fixture(scope="module")
def library():
    try:
        return build.library()
    except build.NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def nvcc(library):
    try:
        return extension.nvcc()
    except extension.NoNvcc as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("missing", "fixture"), [("compiler", library), ("nvcc", nvcc)], ids=["compiler", "nvcc"])
def test_what_is_missing_is_named(monkeypatch, missing, fixture):
    reasons = {
        "compiler": r"the PTX executor needs a C\+\+ compiler: none of \$CXX, g\+\+, clang\+\+ and c\+\+ was found",
        "nvcc": r"the CUDA C\+\+ kernels need nvcc, which is not on PATH",
    }
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(pytest.skip.Exception, match=reasons[missing]):
        fixture.__wrapped__(*([None] if missing == "nvcc" else []))


def test_old_entries_of_the_cache_are_removed(tmp_path):
    now, names = time.time(), ["executor-1", "extension-1", "triton/a", "triton/b", "executor-2"]
    for age, name in enumerate(reversed(names)):  # the last one is in use
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(bytes(100_000))
        os.utime(tmp_path / name, (now - 5000 * age,) * 2)
    build.trim(tmp_path, 1_000_000)
    assert all((tmp_path / name).exists() for name in names)
    build.trim(tmp_path, 330_000)
    assert [name for name in names if not (tmp_path / name).exists()] == names[:2]
    build.trim(tmp_path, 0)
    assert [name for name in names if (tmp_path / name).exists()] == names[-1:]


def executed(arch: int, *arguments: str) -> None:
    """pytest with these arguments, with the executor as the tests' "triton" target."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "executor.plugin", "--executor", str(arch), *arguments],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# .ci/run has a step for each architecture, which runs all files
@pytest.mark.parametrize(
    ("arch", "files"),
    [
        pytest.param(80, ["tests/executor/cases.py", "tests/executor/watches.py"], id="80"),
        pytest.param(80, CASES, marks=pytest.mark.slow, id="80-all"),
        pytest.param(90, CASES, marks=pytest.mark.slow, id="90-all"),
    ],
)
def test_quick_cases(library, arch, files):
    executed(arch, "-m", "quick", *files)


@pytest.mark.parametrize("arch", [80, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (86, 90))])
def test_cuda_kernels(nvcc, arch):
    executed(arch, "-m", "quick", *CUDA_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 90])
def test_all_cases(library, arch):
    executed(arch, "-m", "slow or not slow", *CASES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_all_cuda_cases(nvcc, arch):
    executed(arch, "-m", "slow or not slow", *CUDA_CASES)


# They look into the interpreter, or start processes of their own.
ELSEWHERE = ("rotated_keys_are_those_of_the_window", "every_key_of_a_chunk", "nothing_outside_the_buffers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["operators/test_accuracy", "caches/test_decode", "operators/test_varlen", "kernels/test_decode_triton"]
)
@pytest.mark.parametrize("arch", [80, 90])
def test_the_tests_of_every_backend(library, arch, file):
    """About a quarter of those that the interpreter runs, and of those that are too slow for it: all schemes, layouts
    and options appear, not all with one another."""
    deselect = "not " + " and not ".join(ELSEWHERE)
    executed(arch, "--executor-sample", "4", "-m", "slow or not slow", f"tests/{file}.py", "-k", deselect)
