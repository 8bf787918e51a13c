"""Tests that csrc/cpu/build.py caches compiled libraries. A cached library has the same bytes as a new one, and is
never used for other sources, flags or compilers."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "csrc/cpu/build.py"
TARGET = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}.get(os.uname().machine, "")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("c++") or not TARGET, reason="needs Linux and a C++ compiler"
)


class Checkout:
    """Makes a folder with two small sources, a copy of build.py, and a compiler that logs its calls."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.environment = {"XDG_CACHE_HOME": str(folder / "cache")}
        (folder / "source").mkdir()
        shutil.copy(BUILD, folder / "source")
        (folder / "source/one.cpp").write_text(
            '#include "common.h"\n#include <system.h>\nextern "C" int f() { return A + B; }'
        )
        (folder / "source/common.h").write_text("constexpr int A = 1;\n")
        (folder / "system").mkdir()
        (folder / "system/system.h").write_text("constexpr int B = 2;\n")
        for name in ("as", "ld"):
            self.write(
                name, f'#!/bin/sh\nif [ "$*" = --version ]; then echo 1; else exec {shutil.which(name)} "$@"; fi'
            )
        self.write(
            "c++",
            f'''#!/bin/sh
echo "$*" >>"{folder}/log"
case "$*" in *--version) echo version 1; exit;; *-print-prog-name=*) for last; do :; done
echo "{folder}/${{last#*=}}"; exit;; esac
exec {shutil.which("c++")} -isystem "{folder}/system" "$@"''',
        )

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def change(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new))

    def build(self, **environment: str) -> tuple[bytes, bool]:
        """Builds the library. Returns its bytes, and whether the compiler ran."""
        self.count += 1
        out, log = self.folder / f"out{self.count}", self.folder / "log"
        log.unlink(missing_ok=True)
        plain = {name: value for name, value in os.environ.items() if name != "FLASHROPE_BUILD_CACHE"}
        env = {**plain, "CXX": str(self.folder / "c++"), **self.environment, **environment}
        subprocess.run([sys.executable, self.folder / "source/build.py", out, TARGET], check=True, env=env)
        assert sorted(path.name for path in out.iterdir()) == sorted(["build.json", f"{TARGET}.so"])
        library = out / f"{TARGET}.so"
        assert library.stat().st_mode & 0o777 == 0o755 and library.stat().st_mtime > time.time() - 60
        return library.read_bytes(), bool(re.search(r"\.tmp$", log.read_text(), re.MULTILINE))

    def entries(self) -> list[Path]:
        return sorted((self.folder / "cache/flashrope/cpu-kernels").iterdir())


@pytest.fixture
def checkout(tmp_path):
    os.umask(0o022)
    return Checkout(tmp_path)


def test_a_library_is_compiled_once(checkout, tmp_path):
    first, compiled = checkout.build()
    assert compiled and len(checkout.entries()) == 1
    assert checkout.build() == (first, False)
    assert checkout.build(FLASHROPE_BUILD_CACHE="0") == (first, True)  # the cache changes no byte
    elsewhere = tmp_path / "else where"
    assert checkout.build(FLASHROPE_BUILD_CACHE=str(elsewhere)) == (first, True)
    assert checkout.build(FLASHROPE_BUILD_CACHE=str(elsewhere)) == (first, False)
    assert len(checkout.entries()) == len(list(elsewhere.iterdir())) == 1
    assert checkout.build(XDG_CACHE_HOME="relative", HOME=str(tmp_path)) == (first, True)
    assert list((tmp_path / ".cache/flashrope/cpu-kernels").iterdir())


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("source/one.cpp", "A + B", "A - B"),
        ("source/common.h", "A = 1", "A = 7"),
        ("system/system.h", "B = 2", "B = 7"),
        ("source/build.py", '"-O3"', '"-O1"'),
        ("source/build.py", '["-march=', '["-mtune=generic", "-march='),
        ("c++", "version 1", "version 2"),
        ("as", "echo 1", "echo 2"),
        ("ld", "echo 1", "echo 2"),
    ],
    ids=lambda value: value.replace("/", "-"),
)
def test_what_changes_a_library_compiles_it_again(checkout, file, old, new):
    first, _ = checkout.build()
    checkout.change(file, old, new)
    other, compiled = checkout.build()
    assert compiled and len(checkout.entries()) == 2
    assert file in ("c++", "as", "ld") or "-m" in old or other != first
    assert checkout.build() == (other, False)


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 5000], ids=["empty", "short", "other"])
def test_a_damaged_entry_is_compiled_again(checkout, content):
    first, _ = checkout.build()
    (entry,) = checkout.entries()
    entry.write_bytes(content)
    assert checkout.build() == (first, True) and checkout.build() == (first, False)


def test_without_a_place_for_it(checkout, tmp_path):
    (tmp_path / "file").write_text("")
    first, _ = checkout.build()
    assert checkout.build(FLASHROPE_BUILD_CACHE=str(tmp_path / "file")) == (first, True)


def test_what_fails_is_not_kept(checkout):
    checkout.change("source/one.cpp", "A + B", "A + unknown")
    with pytest.raises(subprocess.CalledProcessError):
        checkout.build()
    assert not checkout.entries()
