"""Runs pytest on copies of the checkout. Each run is a fork of this process. The process has already imported what all
runs need."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import NamedTuple

from .native_build import NativeBuild
from .python_sites import compiles
from .sites import ROOT, Mutant

STALLED, STALLED_SLOWLY = 90, 300  # seconds without a new test after which the mutant counts as noticed
EXECUTOR = "executor.plugin"  # must be loaded before Triton
EXECUTED = ("-p", EXECUTOR, "--executor", "80")  # first arguments of tests that run compiled kernels on the CPU
FAILED, RUNNING = "failed ", "running "
KERNELS = "python/flashrope/backends/cpu/kernels"
PRELOADED = ("numpy", "torch", "pytest", "triton", "triton.language", "transformers")


class Ended(NamedTuple):
    """How a run ended. test: the first test that failed, or the test that ran when the process died (`how` then says
    so). "": all tests passed, or no test ran (`how` is then pytest's output). seconds: processor time."""

    test: str = ""
    how: str = ""
    seconds: float = 0.0


class Watch:
    """Records the running test, so that a crash can be attributed to it, and the first failed test. When the process
    has used `seconds` of processor time, ends it as if all tests had passed."""

    def __init__(self, path: Path, seconds: float = math.inf):
        self.path, self.failed, self.seconds = path, False, seconds

    def write(self, nodeid: str, failed: bool) -> None:
        if not self.failed:
            self.path.write_text(f"{FAILED if failed else RUNNING}{nodeid}", encoding="utf-8")
        self.failed |= failed

    def pytest_runtest_logstart(self, nodeid, location) -> None:
        self.write(nodeid, False)

    def pytest_runtest_logfinish(self, nodeid, location) -> None:
        if not self.failed and time.process_time() > self.seconds:
            os._exit(0)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.write(report.nodeid, True)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(report.nodeid, True)


def preload() -> None:
    """Imports the modules that do not change. Switches Triton's interpreter on first, as tests/conftest.py does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in PRELOADED:
        if find_spec(name.split(".")[0]):
            importlib.import_module(name)


class Copy:
    """A copy of the checkout, in which one mutant at a time is applied. folder: an empty folder for the copy."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.root, self.seen, self.output = folder / "checkout", folder / "test", folder / "output"
        copy_checkout(self.root)
        self.kernels, self.installed = self.root / KERNELS, folder / "kernels"
        self.native = NativeBuild(folder / "objects")
        self.before: tuple[Path, str, os.stat_result] | None = None

    def apply(self, mutant: Mutant, sound: bool = False) -> bool:
        """Applies the mutant to the copy. Returns False if the mutant does not compile. sound: leaves the source
        unchanged and only compiles the files that the mutant would change."""
        path = self.root / mutant.file
        self.before = path, path.read_text(encoding="utf-8"), path.stat()
        if not sound:
            path.write_text(mutant.applied(), encoding="utf-8")
            self._forget_compiled(path)
        if "cpu" in path.parts and path.suffix in (".cpp", ".h"):
            if self.kernels.exists():
                self.kernels.rename(self.installed)
            return self.native.libraries(path.parent, "" if sound else path.name, self.kernels)
        return path.suffix != ".py" or compiles(mutant.applied())

    def restore(self) -> None:
        path, text, stat = self.before
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        self._forget_compiled(path)
        if path.suffix in (".cpp", ".h"):
            shutil.rmtree(self.kernels, ignore_errors=True)
            if self.installed.exists():
                self.installed.rename(self.kernels)

    @staticmethod
    def _forget_compiled(path: Path) -> None:
        if path.suffix == ".py":
            Path(cache_from_source(str(path))).unlink(missing_ok=True)


def copy_checkout(to: Path) -> None:
    """Copies the files of the checkout, with the kernels where the package looks for them."""
    if (ROOT / ".git").exists():
        listed = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True).stdout
        archive = ["tar", "-C", ROOT, "--null", "-T", "-", "--ignore-failed-read", "-cf", "-"]
        files = subprocess.run(archive, input=names, check=True, capture_output=True).stdout
        to.mkdir(parents=True)
        subprocess.run(["tar", "-C", to, "-xf", "-"], input=files, check=True)
        if (ROOT / KERNELS).exists():
            shutil.copytree(ROOT / KERNELS, to / KERNELS)
    else:  # .ci/run works in such a copy
        shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(".venv", "__pycache__", "*.egg-info", ".pytest_cache"))
    (to / "python/flashrope/triton_kernels").symlink_to(to / "triton_kernels")


class Run:
    """A running pytest with these arguments in a copy."""

    def __init__(self, copy: Copy, tests: tuple[str, ...], seconds: float = math.inf):
        self.copy, self.tests, self.seconds = copy, tests, seconds
        copy.seen.write_text("", encoding="utf-8")
        self.pid = self._start()

    def _start(self) -> int:
        root = self.copy.root
        environment = {
            "PYTHONPATH": os.pathsep.join(
                [str(root / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
                + ([str(root / "tests")] if EXECUTOR in self.tests else [])
            ),
            "TRITON_CACHE_DIR": str(self.copy.folder / "triton"),
        }
        cache = f"cache_dir={self.copy.folder.parent / 'pytest'}"
        arguments = ["-q", "-x", "--no-header", "--tb=line", "-o", cache, *self.tests]
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            output = os.open(self.copy.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2)
            os.chdir(root)
            os.environ |= environment
            if EXECUTOR in self.tests:
                main = f"import sys; sys.path[:0] = ['', {str(ROOT)!r}]; from tests.mutants.runs import pytest_in; "
                call = f"pytest_in({str(root)!r}, {str(self.copy.seen)!r}, {arguments!r})"
                os.environ.pop("TRITON_INTERPRET", None)
                os.execv(sys.executable, [sys.executable, "-c", main + call])
            pytest_in(root, self.copy.seen, arguments, self.seconds)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)

    def ended(self) -> Ended | None:
        """Returns how the run ended, or None while it runs."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        state, _, test = self.copy.seen.read_text(encoding="utf-8").partition(" ")
        if not pid:
            limit = STALLED_SLOWLY if EXECUTOR in self.tests or "distributed" in self.tests[-1] else STALLED
            if time.time() - self.copy.seen.stat().st_mtime < limit:
                return None
            self.stop()
            return Ended(test, f"more than {limit} s" if test else f"no test began within {limit} s")
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return Ended(seconds=usage.ru_utime + usage.ru_stime)
        if state == FAILED.strip():
            return Ended(test)
        if state == RUNNING.strip():
            return Ended(test, signal.Signals(-code).name if code < 0 else f"exit code {code}")
        return Ended("", self.copy.output.read_text(encoding="utf-8")[-1000:] or f"exit code {code}")

    def stop(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def pytest_in(root: Path | str, seen: Path | str, arguments: list[str], seconds: float = math.inf) -> None:
    """Runs pytest in this process and then ends it. flashrope, the tests and their helpers are imported from root."""
    import pytest

    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    root = str(root)
    of_executor = [f"{root}/tests"] if EXECUTOR in arguments else []
    sys.path[:] = [f"{root}/python", root, *of_executor, *(x for x in sys.path if x not in ("", str(ROOT)))]
    status = pytest.main(arguments, plugins=[Watch(Path(seen), seconds)])
    sys.stdout.flush()
    os._exit(int(status))
