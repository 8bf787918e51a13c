"""The compiled kernels run without a GPU, in processes of their own: in this one Triton interprets.

``tests/executor/cases.py`` has the cases. The default tests run those marked quick; the others that are not slow take
some minutes where nothing is compiled yet:

    PYTHONPATH=tests pytest -p executor.plugin --executor 80 tests/executor/cases.py tests/executor/mutants.py
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from executor import build, extension

TESTS = pathlib.Path(__file__).parent
CASES = [f"tests/executor/{name}.py" for name in ("watches", "cases", "mutants", "counts", "tuning")]
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


@pytest.mark.parametrize("arch", [80, pytest.param(90, marks=pytest.mark.slow)])  # .ci/run has a step for each
def test_quick_cases(library, arch):
    executed(arch, "-m", "quick", *CASES)


@pytest.mark.parametrize("arch", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_cuda_kernels(nvcc, arch):
    executed(arch, "tests/executor/cuda_kernels.py")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 90])
def test_all_cases(library, arch):
    executed(arch, "-m", "slow or not slow", *CASES)


# They look into the interpreter, or start processes of their own.
ELSEWHERE = ("rotated_keys_are_those_of_the_window", "every_key_of_a_chunk", "nothing_outside_the_buffers")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["accuracy", "decode", "varlen", "decode_triton"])
@pytest.mark.parametrize("arch", [80, 90])
def test_the_tests_of_every_backend(library, arch, file):
    """Those that the interpreter runs, and those that are too slow for it."""
    executed(arch, "-m", "slow or not slow", f"tests/test_{file}.py", "-k", "not " + " and not ".join(ELSEWHERE))
