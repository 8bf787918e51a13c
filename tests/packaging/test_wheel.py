"""Tests that the platform tag of a wheel follows from its libraries. .ci/run builds and runs the wheels."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flashrope.backends.cpu import loader

ROOT = Path(__file__).resolve().parents[2]
BUILD = runpy.run_path(str(ROOT / "csrc/cpu/build.py"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wheels are for Linux")


def library(machine: int, *strings: str) -> bytes:
    """Returns the parts of an ELF file that platform_tag reads."""
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + "".join(f"\0{x}\0" for x in strings).encode()


@pytest.mark.parametrize(
    "strings, platform",
    [
        (["libc.so.6", "GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11"], "manylinux_2_28"),
        (["GLIBC_2.2.5", "ld-linux-x86-64.so.2"], "manylinux_2_28"),
        (["GLIBC_2.29"], "linux"),
        (["GLIBCXX_3.4.25"], "linux"),
        (["libtorch_cpu.so"], "linux"),
        (["libc.so"], "linux"),  # musl
    ],
)
def test_the_platform(tmp_path, strings, platform):
    (tmp_path / "a.so").write_bytes(library(62, "libm.so.6", "GLIBC_2.17"))
    (tmp_path / "b.so").write_bytes(library(62, *strings))
    assert BUILD["platform_tag"](tmp_path) == f"{platform}_x86_64"


def test_the_machine_is_that_of_the_libraries(tmp_path):
    assert BUILD["platform_tag"](tmp_path) is None
    (tmp_path / "a.so").write_bytes(library(183))
    assert BUILD["platform_tag"](tmp_path) == "manylinux_2_28_aarch64"


@pytest.mark.skipif(not list(loader.FOLDER.glob("*.so")), reason="the CPU kernels are not compiled")
def test_the_compiled_kernels_suit_manylinux():
    assert BUILD["platform_tag"](loader.FOLDER).startswith("manylinux_2_28_")


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_what_a_compiler_compiles_for(tmp_path):
    source = tmp_path / "none.cpp"
    source.write_text("")
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", tmp_path / "none.so"], check=True)
    assert BUILD["platform_tag"](tmp_path).endswith(BUILD["target_machine"](["c++"]))
    assert BUILD["target_machine"](["no-such-compiler"]) == os.uname().machine
