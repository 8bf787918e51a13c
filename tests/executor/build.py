"""Compiles the executor's C++ once per version of its sources."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterable

SOURCES = pathlib.Path(__file__).parent
FLAGS = (
    "-std=c++20 -O2 -ftree-vectorize -march=native -ffp-contract=off -fno-strict-aliasing -fno-math-errno "
    "-fno-trapping-math -fvisibility=default -fPIC -pthread"
).split()


class NoCompiler(RuntimeError):
    """There is no C++ compiler, or it is too old."""


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoCompiler("the PTX executor needs a C++ compiler: none of $CXX, g++, clang++ and c++ was found")


def digest(files: Iterable[pathlib.Path], *others) -> str:
    """Of the contents of files, and of what else decides about a build."""
    hashed = hashlib.sha256(repr(others).encode())
    for path in files:
        hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


def cache_folder() -> pathlib.Path:
    """Where this version of the executor keeps its library and what Triton compiles for it."""
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    # -march=native: the library belongs to the processor that it was compiled on
    cpu = pathlib.Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "flashrope" / f"executor-{digest(files, FLAGS, version, flags)}"


def library(jobs: int | None = None) -> pathlib.Path:
    """The path of libcuda.so.1, the executor under the name by which Triton asks for the driver."""
    folder = cache_folder()
    built = folder / "libcuda.so.1"
    if built.exists():
        return built
    work = folder / f"building-{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.cpp"))
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda source: _compile(source, work), sources))
    run([compiler(), "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", *map(str, objects), "-o", str(work / "built")])
    (work / "built").replace(built)  # another process may have been quicker
    shutil.rmtree(work, ignore_errors=True)
    return built


def _compile(source: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
    target = work / f"{source.stem}.o"
    run([compiler(), *FLAGS, "-c", str(source), "-o", str(target)])
    return target


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"the PTX executor does not compile with {command[0]}:\n{done.stderr[-2000:]}")
