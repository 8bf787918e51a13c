"""Compiles the CPU kernels: ``python csrc/cpu/build.py FOLDER [TARGET ...]``, as setup.py does at installation.

Every target becomes one library FOLDER/TARGET.so, for processors that have its instructions;
python/flashrope/backends/cpu/loader.py chooses among them. FOLDER/build.json says what compiled them and why one is
missing. It needs a C++ compiler and nothing else: neither torch nor Python's headers.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-shared", "-fPIC")
TARGETS = {
    "x86_64": {"x86-64-v3": ["-march=x86-64-v3"], "x86-64-v4": ["-march=x86-64-v4"]},
    "aarch64": {"armv8-a": ["-march=armv8-a"], "armv8.2-a": ["-march=armv8.2-a+fp16"]},
}


def build(folder: Path, targets: list[str] | None = None, machine: str = platform.machine()) -> dict[str, str]:
    """Compiles the targets, all of this machine by default. Returns why a target is missing, by its name."""
    known = TARGETS.get(machine, {})
    folder.mkdir(parents=True, exist_ok=True)
    compiler = command()
    report = {"compiler": version(compiler), "missing": {}}

    def compiled(target: str) -> str:
        return compile_target([*compiler, *FLAGS, *known[target]], folder / f"{target}.so")

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        names = list(targets or known)
        for target, error in zip(names, threads.map(compiled, names), strict=True):
            if error:
                report["missing"][target] = error
    (folder / "build.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return report["missing"]


def command() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def has_compiler() -> bool:
    return shutil.which(command()[0]) is not None


def version(compiler: list[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0]


def compile_target(arguments: list[str], library: Path) -> str:
    """The error, or "". A library that was there stays until the new one is complete."""
    if not has_compiler():
        library.unlink(missing_ok=True)
        return f"no C++ compiler: {arguments[0]} is not on PATH"
    new = library.with_suffix(f".{os.getpid()}.tmp")
    sources = sorted(path.name for path in SOURCES.glob("*.cpp"))  # relative, so that no path gets into the library
    done = subprocess.run([*arguments, *sources, "-o", new.resolve()], cwd=SOURCES, capture_output=True, text=True)
    if done.returncode == 0:
        os.replace(new, library)
        return ""
    new.unlink(missing_ok=True)
    library.unlink(missing_ok=True)
    lines = done.stderr.splitlines()
    reason = next(
        (line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit code {done.returncode}"
    )
    return f"{shlex.join(arguments)} failed: {reason[:300]}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    problems = build(Path(sys.argv[1]), sys.argv[2:] or None)
    sys.exit("\n".join(f"{target}: {problem}" for target, problem in problems.items()) or 0)
