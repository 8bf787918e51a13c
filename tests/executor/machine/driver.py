"""Runs Triton kernels on CPU tensors, through Triton's own compiler and launcher.

Triton compiles for the architecture as usual, but stops at PTX. Its C launcher passes the PTX, instead of a cubin, and
the parameters to libcuda. The executor (``library.cpp``) takes the place of libcuda.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator

from . import build
from .launches import ExecutionError, Launch


def prepare() -> None:
    """Sets where Triton finds the driver and where it keeps compiled kernels. Call this before triton is imported."""
    folder = build.library().parent
    build.trim(build.cache())
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(build.cache() / "triton"))
    os.environ["TRITON_INTERPRET"] = "0"
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # from here on, dlopen finds the library by name


class Machine:
    """The device, with its options and the launches that it ran."""

    current: Machine | None = None  # not kept in kernels, because kernels outlive a machine
    modules: dict[int, tuple] = {}  # function: the (name, PTX, further arguments) with which Triton loaded it

    def __init__(
        self,
        arch: int,
        threads: int = 1,
        seed: int = 0,
        step_limit: int = 50_000_000,
        last_blocks: int = 0,
        strict: bool = True,
    ):
        """Makes a machine. seed: the seed of the random order of warps; 0 runs warps one after another. last_blocks:
        how many blocks at the end of the grid to run; 0 runs all. strict: a launch with findings raises
        ExecutionError."""
        self.arch, self.launches = arch, []
        self.rewrite = None  # (kernel's name, PTX) -> PTX, applied to every launch
        numbers = {"threads": threads, "seed": seed, "step_limit": step_limit, "last_blocks": last_blocks}
        self.options = numbers | {"strict": strict}
        self.library = ctypes.CDLL(str(build.library()))
        self.library.executor_take_launches.restype = ctypes.c_char_p
        self.reset()

    def reset(self, **changes) -> None:
        """Restores the options that the machine was made with, except for these changes."""
        options = self.options | changes
        seed, step_limit = ctypes.c_uint64(options["seed"]), ctypes.c_uint64(options["step_limit"])
        self.library.executor_configure(self.arch, options["threads"], seed, step_limit, options["last_blocks"])
        self.strict = options["strict"]

    def register(self, named_tensors) -> None:
        self.library.executor_clear_tensors()
        spans: dict[int, tuple[int, str]] = {}  # several arguments may be views of one tensor: the longest counts
        for name, tensor in named_tensors:
            size = span(tensor)
            if size > spans.get(tensor.data_ptr(), (0, ""))[0]:
                spans[tensor.data_ptr()] = size, name
        for base, (size, name) in spans.items():
            self.library.executor_add_tensor(name.encode(), ctypes.c_uint64(base), ctypes.c_uint64(size))

    def collect(self) -> None:
        """Adds the library's launches since the last call to ``launches``."""
        new = [Launch.from_json(data) for data in json.loads(self.library.executor_take_launches())]
        self.launches += new
        findings = [finding for launch in new for finding in launch.findings]
        if findings and self.strict:
            raise ExecutionError("\n".join(findings))


def span(x) -> int:
    """Returns the number of bytes from the first element of a tensor to the end of the last."""
    if not x.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def named_tensors(name: str, value) -> Iterator[tuple]:
    """Yields (name, tensor) of each tensor in an argument, which is a tensor or a tuple."""
    if hasattr(value, "data_ptr"):
        yield name, value
    elif isinstance(value, tuple):
        for field, item in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from named_tensors(name if field == "ptr" else f"{name}.{field}", item)


def _device(machine: Machine):
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    class Utils:
        """Triton's loader, which also remembers the modules that it loads."""

        real = CudaUtils()

        def __getattr__(self, name):
            return getattr(self.real, name)

        def load_binary(self, name, binary, *rest):
            loaded = self.real.load_binary(name, binary, *rest)
            Machine.modules[loaded[1]] = name, binary.rstrip(b"\0").decode(), rest
            return loaded

        def rewritten(self, function):
            if not Machine.current.rewrite:
                return function
            name, text, rest = Machine.modules[function]
            changed = Machine.current.rewrite(name, text)
            return function if changed == text else self.load_binary(name, changed.encode() + b"\0", *rest)[1]

    utils = Utils()

    class Launcher:
        """Triton's launcher. Before each launch it tells the executor which tensors exist."""

        def __init__(self, source, metadata):
            self.launch, self.names = CudaLauncher(source, metadata), list(source.signature)
            self.names = [n if isinstance(n, str) else source.fn.arg_names[n[0]] for n in self.names]

        def __call__(self, x, y, z, stream, function, *args):
            values = args[len(args) - len(self.names) :]
            pairs = zip(self.names, values, strict=True)
            Machine.current.register([found for pair in pairs for found in named_tensors(*pair)])
            self.launch(x, y, z, stream, utils.rewritten(function), *args)
            Machine.current.collect()

    class Device:
        """The part of a driver that triton.runtime needs."""

        def __init__(self):
            self.utils, self.launcher_cls = utils, Launcher

        def get_current_target(self):
            return GPUTarget("cuda", machine.arch, 32)

        def get_current_device(self):
            return machine.arch  # Triton remembers the target by device

        def get_current_stream(self, device=None):
            return 0

        def get_device_interface(self):
            return torch.cuda

    return Device()


@contextlib.contextmanager
def _ptx_for_cubin() -> Iterator[None]:
    """Makes Triton's NVIDIA compiler stop at PTX inside the context. Its cache keeps such modules separate."""
    from triton.backends.nvidia.compiler import CUDABackend

    before = CUDABackend.make_cubin, CUDABackend.hash
    CUDABackend.make_cubin = lambda self, source, metadata, options, capability: source.encode() + b"\0"
    CUDABackend.hash = lambda self: f"ptx-executor-{before[1](self)}"
    try:
        yield
    finally:
        CUDABackend.make_cubin, CUDABackend.hash = before


@contextlib.contextmanager
def executed(arch: int, **options) -> Iterator[Machine]:
    """Makes Triton run its kernels on CPU tensors inside the context. New tensors start as NaN. options: those of
    ``Machine``."""
    import torch
    import triton

    outer = Machine.current
    machine = Machine.current = Machine(arch, **options)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # warn_only: calls with deterministic=False run too
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        before = triton.runtime.driver.active
    except RuntimeError:  # Triton found no device
        before = None
    triton.runtime.driver.set_active(_device(machine))
    try:
        with _ptx_for_cubin():
            yield machine
    finally:
        Machine.current = outer
        if outer:
            outer.reset()
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        triton.runtime.driver.set_active(before)
