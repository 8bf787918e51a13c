"""Builds the CPU kernels of a mutant, for one target and without optimisation. Only files that the mutant changes are
compiled."""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import subprocess
from pathlib import Path

from .sites import ROOT

SOURCES = ROOT / "csrc/cpu"
OPTIONS = runpy.run_path(str(SOURCES / "build.py"))["TARGETS"]  # {machine: {target: the compiler's options}}
TARGETS = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}
BFLOAT16 = "bf16"  # the folder of the kernels that multiply in bfloat16
EXTENDED, BFLOAT16_TARGET = "x86-64-v4", "x86-64-v4-bf16"  # the kernels of this folder extend the first target
AMX, AMX_TARGET = ("amx.h", "decode_amx.h"), "x86-64-v4-amx"
FLAGS = ("-std=c++17", "-O0", "-fno-math-errno", "-fPIC")


def has_instruction(name: str) -> bool:
    """Whether this processor has an instruction set, by Linux's name for it."""
    path = Path("/proc/cpuinfo")
    return path.exists() and name in path.read_text().split()


def target_of(source: Path) -> str:
    """Returns the target for which a source of the CPU kernels is compiled."""
    if source.parent.name != BFLOAT16:
        return TARGETS[platform.machine()]
    return AMX_TARGET if source.name in AMX else BFLOAT16_TARGET


class NativeBuild:
    """Builds libraries. objects: a folder with the compiled unchanged files, which all copies share."""

    def __init__(self, objects: Path):
        self.objects = objects
        self.compiler = shlex.split(os.environ.get("CXX") or "c++")

    def libraries(self, sources: Path, changed: str, to: Path) -> bool:
        """Builds the library that a copy's sources belong to, and for csrc/cpu/bf16 also the library that it extends.

        Args:
            sources: the folder in the copy.
            changed: the name of the file that differs.

        Returns False if the copy does not compile.
        """
        target = target_of(sources / changed)
        if sources.name != BFLOAT16:
            return self._library(SOURCES, sources, changed, to, target)
        return self._library(SOURCES, SOURCES, "", to, EXTENDED) and self._library(
            SOURCES / BFLOAT16, sources, changed, to, target
        )

    def _library(self, sound: Path, sources: Path, changed: str, to: Path, target: str) -> bool:
        options = OPTIONS[platform.machine()][target]
        kept = self.objects / target
        for folder in (kept, to):
            folder.mkdir(parents=True, exist_ok=True)
        linked = []
        for source in sorted(sound.glob("*.cpp")):
            same = not changed.endswith(".h") and source.name != changed
            built = (kept if same else to) / f"{source.stem}.o"
            if not same or not built.exists():
                from_folder = sound if same else sources
                if not self._run(*options, "-c", str(from_folder / source.name), "-o", str(built)):
                    return False
            linked.append(str(built))
        return self._run("-shared", *linked, "-o", str(to / f"{target}.so"))

    def _run(self, *arguments: str) -> bool:
        return subprocess.run([*self.compiler, *FLAGS, *arguments], capture_output=True, check=False).returncode == 0
