"""The CPU kernels of a mutant: one target, and only the source files that the mutant changes, without optimisation."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

from .sites import ROOT

SOURCES = ROOT / "csrc/cpu"
TARGETS = {"x86_64": ("x86-64-v3", "-march=x86-64-v3"), "aarch64": ("armv8-a", "-march=armv8-a")}
FLAGS = ("-std=c++17", "-O0", "-fno-math-errno", "-fPIC")


class NativeBuild:
    """objects: a folder that keeps the unchanged files, compiled once for all copies."""

    def __init__(self, objects: Path):
        self.objects = objects
        self.compiler = shlex.split(os.environ.get("CXX") or "c++")
        self.target, option = TARGETS[platform.machine()]
        self.options = [*self.compiler, *FLAGS, option]

    def library(self, sources: Path, changed: str, to: Path) -> bool:
        """Builds the library of a copy's sources. changed: the name of the file that differs. False where it does not
        compile."""
        self.objects.mkdir(parents=True, exist_ok=True)
        to.mkdir(parents=True, exist_ok=True)
        linked = []
        for source in sorted(SOURCES.glob("*.cpp")):
            sound = not changed.endswith(".h") and source.name != changed
            built = (self.objects if sound else to) / f"{source.stem}.o"
            if not sound or not built.exists():
                from_folder = SOURCES if sound else sources
                if not self._run("-c", str(from_folder / source.name), "-o", str(built)):
                    return False
            linked.append(str(built))
        return self._run("-shared", *linked, "-o", str(to / f"{self.target}.so"))

    def _run(self, *arguments: str) -> bool:
        return subprocess.run([*self.options, *arguments], capture_output=True, check=False).returncode == 0
