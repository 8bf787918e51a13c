"""Runs the CUDA extension of csrc/ on the executor.

nvcc compiles csrc/decode.cu to PTX and to the host code around it. csrc/library.cpp is compiled as in setup.py.
``machine/cuda/runtime.cpp`` replaces libcudart. The extension's own operators check their arguments, fill the parameter
block, choose kernel, grid and shared memory, and launch the PTX on the executor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import pathlib
import shutil

import torch

from .machine import build
from .machine.driver import Machine

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
RUNTIME = pathlib.Path(__file__).parent / "machine" / "cuda" / "runtime.cpp"
DEVICE_FLAGS = ("-std=c++17", "-O3", "-DUSE_CUDA", "--expt-relaxed-constexpr")  # the flags of setup.py
HOST_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden")


class NoNvcc(RuntimeError):
    """Raised if there is no nvcc."""


def nvcc() -> str:
    path = shutil.which("nvcc")
    if path is None:
        raise NoNvcc("the CUDA C++ kernels need nvcc, which is not on PATH")
    return path


@dataclasses.dataclass(frozen=True)
class Built:
    """The path of operators.so and the PTX of its kernels."""

    operators: pathlib.Path
    ptx: pathlib.Path


def built(arch: int) -> Built:
    """Returns the built extension. Compiles the parts that are not in the cache yet."""
    compiler, cxx, package = nvcc(), build.compiler(), pathlib.Path(torch.__file__).parent
    driver = build.library()
    sources = [*sorted(SOURCES.glob("*.[hc]*")), RUNTIME]
    key = build.digest(sources, DEVICE_FLAGS, HOST_FLAGS, compiler, cxx, torch.__version__, str(driver), arch)
    folder = build.used(build.cache() / f"extension-{key}")
    result = Built(folder / "operators.so", folder / "decode.ptx")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of pytest-xdist may build at once
        if not result.operators.exists():
            _compile(folder, arch, compiler, cxx, package, driver)
    return result


def _compile(folder, arch, compiler, cxx, package, driver) -> None:
    target = f"-gencode=arch=compute_{arch},code=compute_{arch}"
    options = ["-ccbin", cxx, "-lineinfo", "-Xcompiler", "-fPIC", f"-I{SOURCES}", target]
    keep = ["--keep", "--keep-dir", str(folder)]
    objects = [folder / f"{name}.o" for name in ("decode", "library", "runtime")]
    decode, library, runtime = map(str, objects)
    host = [cxx, *HOST_FLAGS]
    version = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    build.run([compiler, *DEVICE_FLAGS, *options, *keep, "-c", str(SOURCES / "decode.cu"), "-o", decode])
    build.run(
        [*host, *version, f"-I{SOURCES}", f"-I{package}/include", "-c", str(SOURCES / "library.cpp"), "-o", library]
    )
    of_nvcc = ["-ccbin", cxx, "-Xcompiler", ",".join(HOST_FLAGS)]  # nvcc knows where its own headers are
    build.run([compiler, *of_nvcc, "-c", str(RUNTIME), "-o", runtime])
    libraries = [f"-L{package}/lib", "-ltorch_cpu", "-lc10", str(driver)]
    linked = folder / "linked.so"
    build.run([cxx, "-shared", decode, library, runtime, *libraries, "-Wl,-z,defs", "-o", str(linked)])
    for path in folder.iterdir():
        if path.suffix != ".ptx" and path.name not in ("linked.so", "lock"):
            path.unlink()
    linked.rename(folder / "operators.so")


class Operators:
    """``torch.ops.flashrope_cuda`` for CPU tensors."""

    def __init__(self, machine: Machine):
        self.machine, paths = machine, built(machine.arch)
        self.ptx, self.namespace = paths.ptx.read_text(), _loaded(paths.operators)
        operators = {name: getattr(self.namespace, name).default for name in ("decode", "append")}
        self.arguments = {name: [x.name for x in each._schema.arguments] for name, each in operators.items()}
        self.library = ctypes.CDLL(str(paths.operators))
        self.library.runtime_use_ptx.restype = ctypes.c_char_p
        self.use(self.ptx)

    def use(self, ptx: str) -> None:
        """Sets the PTX of the kernels of later calls. Raises ValueError if the executor refuses the PTX."""
        if error := self.library.runtime_use_ptx(ptx.encode()):
            raise ValueError(error.decode())

    def decode(self, *args) -> None:
        self._call("decode", args)

    def append(self, *args) -> None:
        self._call("append", args)

    def _call(self, name, args) -> None:
        tensors = [(n, x) for n, x in zip(self.arguments[name], args, strict=True) if isinstance(x, torch.Tensor)]
        self.machine.register(tensors)
        try:  # not through the dispatcher, which would look for a CPU kernel
            getattr(self.namespace, name).default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args)
        finally:
            self.machine.collect()


operators = functools.cache(Operators)


@functools.cache
def _loaded(path: pathlib.Path):
    torch.ops.load_library(path)
    return torch.ops.flashrope_cuda
