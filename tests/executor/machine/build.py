"""Compiles the executor's C++ once per version of its sources, and limits the size of the folder with the results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterable

SOURCES = pathlib.Path(__file__).parent
FLAGS = [
    "-std=c++20",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=default",
    "-fPIC",
    "-pthread",
]
MOST_BYTES = 1 << 30  # limit of the cache's size
IN_USE_SECONDS = 3600


class NoCompiler(RuntimeError):
    """Raised if there is no C++ compiler, or if it is too old."""


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoCompiler("the PTX executor needs a C++ compiler: none of $CXX, g++, clang++ and c++ was found")


def digest(files: Iterable[pathlib.Path], *others) -> str:
    """Returns a digest of the files' names and contents, and of everything else that a build depends on."""
    hashed = hashlib.sha256(repr(others).encode())
    for path in files:
        hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


def cache() -> pathlib.Path:
    """Returns the folder with all builds of the executor and of the CUDA extension, and the kernels that Triton
    compiles for the executor."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "flashrope"


def trim(folder: pathlib.Path, most_bytes: int = MOST_BYTES) -> None:
    """Removes the oldest entries until the folder holds at most ``most_bytes``. Entries that were used in the last hour
    stay."""
    triton = folder / "triton"
    entries = [path for place in (folder, triton) if place.exists() for path in place.iterdir() if path != triton]
    sized = []
    for path in entries:
        with contextlib.suppress(FileNotFoundError):  # another process may have removed the entry
            files = [path, *path.rglob("*")]
            sized.append((path.stat().st_mtime, sum(file.stat().st_size for file in files), path))
    total = sum(size for _, size, _ in sized)
    for used, size, path in sorted(sized):
        if total <= most_bytes or used > time.time() - IN_USE_SECONDS:
            return
        shutil.rmtree(path, ignore_errors=True)
        total -= size


def used(folder: pathlib.Path) -> pathlib.Path:
    """Makes the folder if it does not exist, updates its time of last use, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    return folder


def own_folder() -> pathlib.Path:
    """Returns the folder in which this version of the executor is kept."""
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    # -march=native: the library only runs on the kind of processor that it was compiled on
    cpu = pathlib.Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    return used(cache() / f"executor-{digest(files, FLAGS, version, flags)}")


def library(jobs: int | None = None) -> pathlib.Path:
    """Returns the path of the compiled executor. The file is named libcuda.so.1, because Triton loads the driver by
    this name."""
    folder = own_folder()
    built = folder / "libcuda.so.1"
    if built.exists():
        return built
    work = folder / f"building-{os.getpid()}"
    work.mkdir(exist_ok=True)
    sources = sorted(SOURCES.glob("*.cpp"))
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda source: _compile(source, work), sources))
    run([compiler(), "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", *map(str, objects), "-o", str(work / "built")])
    (work / "built").replace(built)  # another process may already have built the library
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
