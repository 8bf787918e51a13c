"""Runs each file of cases in a separate process, in which the executor is the tests' "triton" target. The process of
this conftest.py cannot run the cases, because Triton's interpreter is switched on in it. All items are slow tests,
because CI has separate steps for these cases. The item "quick" of test_cases.py runs the cases of all files that are
marked quick, for sm_80. The other items of a file run all of its cases, with one item per architecture. With the option
``-p executor.plugin``, pytest collects the cases as usual instead.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from . import extension
from .machine import build

TESTS = pathlib.Path(__file__).parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    here = module_path.name == "test_executor.py" or parent.config.pluginmanager.has_plugin("executor.plugin")
    return None if here else Cases.from_parent(parent, path=module_path)


class Cases(pytest.File):
    def collect(self):
        if self.path.name == "test_cases.py":
            files = [x for x in self.path.parent.glob("test_*.py") if "mark.quick" in x.read_text(encoding="utf-8")]
            yield self._process("quick", 80, "quick", sorted(files))
        for arch in (80, 86, 90):
            yield self._process(f"all-{arch}", arch, "slow or not slow")

    def _process(self, name: str, arch: int, chosen: str, files: list[pathlib.Path] | None = None):
        process = Process.from_parent(self, name=name, arch=arch, chosen=chosen, files=files)
        process.add_marker(pytest.mark.slow)
        return process


class Process(pytest.Item):
    """An item that runs the chosen cases of one or several files in a separate process."""

    def __init__(self, *, arch: int, chosen: str, files: list[pathlib.Path] | None = None, **options):
        super().__init__(**options)
        self.arch, self.chosen, self.files = arch, chosen, files or [self.path]

    def runtest(self):
        skip_where_nothing_runs(cuda=self.path.name.startswith("test_cuda_"))
        executed(self.arch, "-m", self.chosen, *map(str, self.files))

    def reportinfo(self):
        return self.path, None, f"{self.path.name}: {self.name}"


def skip_where_nothing_runs(cuda: bool) -> None:
    """Skips without a compiler or with a GPU. ``cuda``: for the CUDA C++ kernels, which also need nvcc."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels themselves")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton has no wheel for this platform")
    try:
        build.library()
        if cuda:
            extension.nvcc()
    except (build.NoCompiler, extension.NoNvcc) as error:
        pytest.skip(str(error))


def executed(arch: int, *arguments: str) -> None:
    """Runs pytest with these arguments and the executor as the tests' "triton" target."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "executor.plugin", "--executor", str(arch), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False)
    if done.returncode:
        pytest.fail(done.stdout[-8000:] + done.stderr[-2000:], pytrace=False)
