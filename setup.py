"""Maps the source folders to one package: triton_kernels/ is `flashrope.triton_kernels`, python/flashrope is the rest.

csrc/cpu/build.py compiles the CPU kernels for Linux with the C++ compiler (CXX, default c++). The kernels depend only
on libc and libstdc++, so one wheel serves every Python 3. The wheel is tagged manylinux_2_28 if it needs no newer
versions of these libraries. A cross compiler in CXX makes a wheel for another machine (docs/dev/releasing.md). Without
a compiler the installation succeeds without the kernels, and the wheel serves every platform.

FLASHROPE_BUILD_CUDA=1 builds the CUDA extension of csrc/ too. The build environment (pip install --no-build-isolation)
then needs nvcc, a C++ compiler, ninja, pybind11, and the headers of torch: any torch from 2.11 on, with or without
CUDA. The build needs no GPU, and reads TORCH_CUDA_ARCH_LIST (default "8.0;9.0+PTX") and MAX_JOBS. The build makes two
modules. _cuda.abi3.so has the kernels and works with every Python version and every torch from 2.11 on. _build_info
says which versions the kernels were built with. _build_info works only with the Python version that the wheel's tag
names.

The sdist and the wheel without CUDA have the same bytes wherever they are built with the same setuptools and compiler.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from gzip import GzipFile
from importlib import import_module
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
TORCH_TARGET_VERSION = (2, 11)
DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"
EPOCH = os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")  # time of all files in a package; bdist_wheel reads it
os.umask(0o022)  # mode of the metadata in a wheel
CUDA = os.environ.get("FLASHROPE_BUILD_CUDA", "0") not in ("", "0")
CPU_BUILD = runpy.run_path(str(ROOT / "csrc/cpu/build.py"))
CPU_KERNELS = Extension("flashrope.backends.cpu.kernels", [])


class ReproducibleBuild(build_py):
    """Gives files the same mode, whatever their mode in the checkout."""

    def copy_file(self, infile, outfile, **_):
        return super().copy_file(infile, outfile, preserve_mode=False)


class ReproducibleSdist(sdist):
    """Sorts the names, and gives every file the same time, owner and mode."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **_):
        if format != "gztar" or root_dir is not None:
            raise SystemExit(f"sdist: expected the format gztar, got {format}")
        path, folder = f"{base_name}.tar.gz", Path(base_dir)

        def uniform(entry):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = int(EPOCH), 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        with open(path, "wb") as file, GzipFile("", "wb", 9, file, int(EPOCH)) as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for name in sorted([folder, *folder.rglob("*")]):
                    archive.add(name, recursive=False, filter=uniform)
        return path


class Build(build_ext):
    """Builds the CPU kernels, and on request the CUDA extension."""

    def run(self):
        self.in_source = self.inplace or self.editable_mode
        super().run()

    def build_extensions(self):
        if CPU_KERNELS in self.extensions:
            self.extensions = [ext for ext in self.extensions if ext is not CPU_KERNELS]
            folder = (ROOT / "python" if self.in_source else Path(self.build_lib)) / "flashrope/backends/cpu/kernels"
            if not self.in_source:
                shutil.rmtree(folder, ignore_errors=True)  # an earlier build may have been for another machine
                self.distribution.cpu_kernels = folder
            self.build_cpu(folder)
        if self.extensions:
            self.build_cuda()

    def build_cpu(self, folder):
        """Builds the libraries of CPU kernels. A library that cannot be built is left out, and build.json in the folder
        says why."""
        try:
            missing = CPU_BUILD["build"](folder)
        except OSError as error:  # a folder that cannot be written to
            missing = {"all targets": str(error)}
        for target, problem in missing.items():
            print(f"compiled CPU kernels, {target}: {problem}", file=sys.stderr)

    def build_cuda(self):
        """Compiles with nvcc and the C++ compiler through ninja."""
        tools = {name: needed_program(name) for name in ("nvcc", os.environ.get("CXX", "c++"), "ninja")}
        nvcc, cxx, ninja = tools.values()
        torch, pybind11 = (
            needed_module("torch", "its headers (2.11 or newer)"),
            needed_module("pybind11", "its headers"),
        )
        headers = Path(torch.__file__).parent / "include"
        if not (headers / "torch/csrc/stable/library.h").exists():
            raise SystemExit(f"FLASHROPE_BUILD_CUDA: torch {torch.__version__} has no stable ABI headers in {headers}")
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES
        outputs = {
            ext.name.rsplit(".", 1)[1]: Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions
        }
        for path in outputs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        target = f"0x{TORCH_TARGET_VERSION[0]:02x}{TORCH_TARGET_VERSION[1]:02x}000000000000"
        info = {"ARCHITECTURES": architectures, "NVCC": nvcc_version(nvcc), "REVISION": revision()}
        (build / "build_info.h").write_text(
            "".join(f'#define FLASHROPE_{name} "{value}"\n' for name, value in info.items())
        )
        (build / "build.ninja").write_text(
            NINJA.format(
                nvcc=nvcc,
                cxx=cxx,
                source=ROOT / "csrc",
                build=build,
                torch=headers,
                pybind11=pybind11.get_include(),
                python=sysconfig.get_path("include"),
                target=target,
                gencode=" ".join(gencode(architectures)),
                library=outputs["_cuda"],
                info=outputs["_build_info"],
            )
        )
        jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
        subprocess.run([ninja, "-C", build, *jobs], check=True)

    def get_ext_filename(self, fullname):
        *package, name = fullname.split(".")
        return os.path.join(*package, "_cuda.abi3.so") if name == "_cuda" else super().get_ext_filename(fullname)


class Wheel(bdist_wheel):
    """Tags the wheel: the CPU kernels need a platform, but no particular version of Python."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        if CUDA or self.root_is_pure:
            return python, abi, platform
        folder = getattr(self.distribution, "cpu_kernels", None)  # an editable installation has no such folder
        return "py3", "none", folder and CPU_BUILD["platform_tag"](folder) or platform


# The library depends on libtorch_cpu and libtorch_cuda, which torch has loaded before it. It is linked with empty
# libraries of the same names, so that it can be built where torch has no CUDA.
NINJA = """\
rule nvcc
  command = {nvcc} -std=c++17 -O3 -DUSE_CUDA --expt-relaxed-constexpr -Xcompiler -fPIC -I{source} {gencode} $
      -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule cxx
  command = {cxx} -std=c++17 -O2 -fPIC -fvisibility=hidden -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule stub
  command = {cxx} -shared -x c++ /dev/null -Wl,-soname,$soname -o $out
rule library
  command = {nvcc} -shared -cudart static $in -Xlinker --no-as-needed $stubs -o $out
rule module
  command = {cxx} -shared $in -o $out

build {build}/decode.o: nvcc {source}/decode.cu
build {build}/library.o: cxx {source}/library.cpp
  flags = -DUSE_CUDA -DTORCH_TARGET_VERSION={target} -I{source} -isystem {torch}
build {build}/build_info.o: cxx {source}/build_info.cpp | {build}/build_info.h
  flags = -I{build} -isystem {pybind11} -isystem {python}
build {build}/libtorch_cpu.so: stub
  soname = libtorch_cpu.so
build {build}/libtorch_cuda.so: stub
  soname = libtorch_cuda.so
build {library}: library {build}/decode.o {build}/library.o | {build}/libtorch_cpu.so {build}/libtorch_cuda.so
  stubs = -Xlinker {build}/libtorch_cpu.so -Xlinker {build}/libtorch_cuda.so
build {info}: module {build}/build_info.o
"""


def needed_program(name):
    path = shutil.which(name)
    beside = Path(sys.executable).parent / name  # in a virtual environment that is not activated
    if path is None and beside.exists():
        path = str(beside)
    if path is None:
        raise SystemExit(f"FLASHROPE_BUILD_CUDA: needs {name}, which is not on PATH")
    return path


def needed_module(name, use):
    try:
        return import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"FLASHROPE_BUILD_CUDA: needs {name} for {use} ({error}); install it and build with "
            "pip install --no-build-isolation"
        ) from error


def gencode(architectures):
    """Returns nvcc's options for architectures in torch's notation, such as "8.0;9.0+PTX"."""
    options = []
    for name in re.split(r"[;\s]+", architectures.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if not match or int(match[1]) < 8:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected numbers from 8.0 on such as 8.0;9.0+PTX, got {name!r}")
        number = match[1] + match[2] + match[3]
        options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return options


def nvcc_version(nvcc):
    report = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"\bV(\d+\.\d+\.\d+)", report)
    return match[1] if match else "unknown"


def revision():
    """Returns the checkout's git revision, or "unknown" outside a checkout."""
    try:
        command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


EXTENSIONS = [CPU_KERNELS] if sys.platform == "linux" and CPU_BUILD["has_compiler"]() else []
if CUDA:
    EXTENSIONS += [
        Extension("flashrope._cuda", ["csrc/decode.cu", "csrc/library.cpp"]),
        Extension("flashrope._build_info", ["csrc/build_info.cpp"]),
    ]

setup(
    package_dir={
        "flashrope": "python/flashrope",
        "flashrope.triton_kernels": "triton_kernels",
    },
    packages=[
        "flashrope",
        "flashrope.backends",
        "flashrope.backends.cpu",
        "flashrope.backends.sdpa",
        "flashrope.backends.shared",
        "flashrope.backends.triton",
        "flashrope.cache",
        "flashrope.calls",
        "flashrope.cli",
        "flashrope.console",
        "flashrope.integrations",
        "flashrope.integrations.torchtitan",
        "flashrope.integrations.transformers",
        "flashrope.integrations.vllm",
        "flashrope.lab",
        "flashrope.lab.commands",
        "flashrope.lab.evaluation",
        "flashrope.lab.small_models",
        "flashrope.lab.tuning",
        "flashrope.operators",
        "flashrope.schemes",
        "flashrope.triton_kernels",
        "flashrope.triton_kernels.attention",
        "flashrope.triton_kernels.cached",
        "flashrope.triton_kernels.rotating",
    ],
    package_data={"flashrope": ["py.typed"]},
    ext_modules=EXTENSIONS,
    cmdclass={"bdist_wheel": Wheel, "build_ext": Build, "build_py": ReproducibleBuild, "sdist": ReproducibleSdist},
)
