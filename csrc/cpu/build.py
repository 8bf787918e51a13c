"""Compiles the CPU kernels: ``python csrc/cpu/build.py FOLDER [TARGET ...]``, as setup.py does at installation.

Every target becomes one library FOLDER/TARGET.so, for processors that have its instructions;
python/flashrope/backends/cpu/loader.py chooses among them. FOLDER/build.json says what compiled them and why one is
missing. It needs a C++ compiler and nothing else: neither torch nor Python's headers.

CXX names the compiler, with options: ``CXX="python -m ziglang c++ -target aarch64-linux-gnu.2.28"`` compiles for ARM
on any machine. The targets are those of the machine that the compiler compiles for.
"""

from __future__ import annotations

import json
import os
import platform
import re
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
ZIG_TARGETS = {  # zig c++ has names of its own
    "x86-64-v3": ["-mcpu=x86_64_v3"],
    "x86-64-v4": ["-mcpu=x86_64_v4"],
    "armv8-a": ["-mcpu=generic"],
    "armv8.2-a": ["-mcpu=generic+v8_2a+fullfp16"],
}
# What manylinux_2_28 has (PEP 600). torch's own wheels, from 2.11 on, ask for as much.
MANYLINUX = "manylinux_2_28"
NEWEST = {b"GLIBC": (2, 28), b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11), b"GCC": (7, 0, 0)}
SYSTEM_LIBRARIES = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libdl.so.2", "libgcc_s.so.1"} | {
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}


def build(folder: Path, targets: list[str] | None = None, machine: str = "") -> dict[str, str]:
    """Compiles the targets, all of the compiler's machine by default. Returns why a target is missing, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = command()
    known = TARGETS.get(machine or target_machine(compiler), {})
    if any("zig" in Path(word).name for word in compiler):
        known = {name: ZIG_TARGETS[name] for name in known}
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


def target_machine(compiler: list[str]) -> str:
    """The machine that the compiler compiles for, by Python's name; this machine where the compiler does not say."""
    try:
        done = subprocess.run([*compiler, "-E", "-dM", "-x", "c++", os.devnull], capture_output=True, text=True)
    except OSError:
        return platform.machine()
    return next((name for name in TARGETS if f"#define __{name}__ 1" in done.stdout), platform.machine())


def platform_tag(folder: Path) -> str | None:
    """The platform of a wheel with the libraries of a folder, by the machine that they are compiled for and the
    versions that they ask of the system: manylinux_2_28_x86_64, or linux_x86_64 where one asks for newer. None without
    libraries."""
    libraries = [path.read_bytes() for path in sorted(folder.glob("*.so"))]
    if not libraries:
        return None
    (machine,) = {ELF_MACHINES[int.from_bytes(library[18:20], "little")] for library in libraries}
    return f"{MANYLINUX if all(map(_suits_manylinux, libraries)) else 'linux'}_{machine}"


def _suits_manylinux(library: bytes) -> bool:
    """Reads every string that looks like a version or a library, so a string too many only asks for more."""
    versions = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d[\d.]*)(?=\0)", library)
    needed = re.findall(rb"\0((?:lib|ld-)[\w+-]+\.so[.\d]*)(?=\0)", library)
    return all(tuple(map(int, version.split(b"."))) <= NEWEST[name] for name, version in versions) and (
        {name.decode() for name in needed} <= SYSTEM_LIBRARIES
    )


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
