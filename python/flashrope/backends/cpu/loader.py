"""Chooses the best library of compiled kernels (csrc/cpu) in the installation that this processor can run.

setup.py compiles the libraries (csrc/cpu/build.py). If none can run, ``impl=None`` takes the backend ``sdpa``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from ...calls.records import refuse
from .library import Library

FOLDER = Path(__file__).parent / "kernels"
SOURCES = Path(__file__).parents[4] / "csrc/cpu"  # in a checkout
# The instruction sets that each library needs, by Linux's names for them. The best library is last.
X86_64_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
X86_64_V4 = X86_64_V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
INSTRUCTIONS = {
    "armv8-a": frozenset({"asimd"}),
    "armv8.2-a": frozenset(["asimd", "asimdhp", "asimdrdm", "atomics", "fphp", "crc32"]),
    "x86-64-v3": X86_64_V3,
    "x86-64-v4": X86_64_V4,
    "x86-64-v4-bf16": X86_64_V4 | {"avx512_bf16"},
    "x86-64-v4-amx": X86_64_V4 | {"avx512_bf16", "amx_tile", "amx_bf16"},
}
EXTENDED = {
    "x86-64-v4-bf16": "x86-64-v4",
    "x86-64-v4-amx": "x86-64-v4",
}  # {target whose library lacks functions: target whose library has them}


class Found(NamedTuple):
    """A library and its target, or None and one line that says why no library was found."""

    library: Library | None
    target: str
    problem: str


def instructions() -> frozenset[str]:
    """Returns the processor's instruction sets by Linux's names. Empty if the system is not Linux."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return frozenset()
    return frozenset(flags.partition(":")[2].split())


@cache
def permitted(target: str) -> bool:
    """Returns whether Linux lets this process use the registers of a target. A process must request the registers of
    AMX, once for all threads (https://docs.kernel.org/arch/x86/xstate.html)."""
    if "amx_tile" not in INSTRUCTIONS[target]:
        return True
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def runnable() -> list[str]:
    """Returns the targets whose libraries this processor can run, the best first."""
    present = instructions()
    return [target for target, needed in reversed(INSTRUCTIONS.items()) if needed <= present and permitted(target)]


@cache
def find() -> Found:
    """Returns the best library that loads."""
    if sys.platform != "linux":
        return Found(None, "", f"the compiled kernels need Linux, this is {sys.platform}")
    if not (targets := runnable()):
        return Found(None, "", "the processor has neither AVX2 nor the instructions of ARMv8")
    problems: dict[str, list[str]] = {}  # problem: the targets that have it
    for target in targets:
        if not (problem := next(filter(None, map(problem_of, parts(target))), "")):
            try:
                return Found(open_target(target), target, "")
            except (OSError, AttributeError) as error:
                problem = f"cannot be loaded ({error}); install flashrope again"
        problems.setdefault(problem, []).append(target)
    return Found(None, "", "; ".join(f"{', '.join(named)}: {problem}" for problem, named in problems.items()))


def parts(target: str) -> list[str]:
    """Returns the target and the target that it extends, if any. If there are two, both libraries are needed."""
    return [target, *([EXTENDED[target]] if target in EXTENDED else [])]


def open_target(target: str) -> Library:
    """Opens the library of a target, even if this processor cannot run it. Raises OSError or AttributeError."""
    if not permitted(target):
        raise OSError(f"Linux does not permit this process to use the registers of {target}")
    own, *extended = (FOLDER / f"{part}.so" for part in parts(target))
    return Library(extended[0], own) if extended else Library(own)


def problem_of(target: str) -> str:
    """Returns why the library of a target cannot be opened, or ""."""
    path = FOLDER / f"{target}.so"
    if not path.exists():
        return _missing(target)
    return f"older than csrc/cpu, build it again: python csrc/cpu/build.py {FOLDER}" if _stale(path) else ""


def _missing(target: str) -> str:
    try:
        report = json.loads((FOLDER / "build.json").read_text(encoding="utf-8"))
        return " ".join(report["missing"][target].split())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not in this installation, which was built without a C++ compiler"


def compiler() -> str:
    """Returns the name of the compiler that built the libraries."""
    try:
        return json.loads((FOLDER / "build.json").read_text(encoding="utf-8"))["compiler"] or "an unknown compiler"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown compiler"


def _stale(path: Path) -> bool:
    """Whether a source of this checkout is newer than the library."""
    built = path.stat().st_mtime
    return any(source.stat().st_mtime > built for pattern in ("*.cpp", "*.h") for source in SOURCES.rglob(pattern))


def load() -> Library | None:
    """Returns the library for the CPU backend, or None."""
    return find().library


def missing() -> str:
    """Returns why there is no library, or ""."""
    if load() is not None:
        return ""
    return f"its kernels are not loaded ({find().problem or 'switched off'}); use impl='sdpa'"


def required() -> Library:
    """Returns the library. Raises ValueError if there is none."""
    library = load()
    if library is None:
        refuse("cpu", missing())
    return cast(Library, library)


@cache
def warn_once() -> None:
    """Warns once in a process if there is no library, and says why."""
    if load() is None and sys.platform == "linux":
        problem = find().problem
        warnings.warn(f"flashrope: attention on the CPU is slow without its compiled kernels: {problem}", stacklevel=2)
