"""Compiles Triton kernels for a GPU that is not there, through the launches that the backend really makes.

The backend runs on meta tensors; every launch is caught with its arguments, so that what is compiled is specialised
(divisibility by 16, integers equal to 1, None) exactly as it will be on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import re
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

from . import sass

KB = 1024


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

    shared_per_block: int  # bytes
    shared: int  # bytes
    threads: int
    blocks: int

    def resident_blocks(self, registers: int, shared: int, warps: int) -> int:
        """Blocks of `warps` warps that fit at once; registers per thread, shared bytes per block."""
        registers_per_warp = -(-registers * 32 // 256) * 256  # the unit of allocation
        return min(
            65536 // registers_per_warp // warps,
            self.shared // (shared + KB),  # 1 KB per block is CUDA's own
            self.threads // (32 * warps),
            self.blocks,
        )


MULTIPROCESSORS = {
    80: Multiprocessor(163 * KB, 164 * KB, 2048, 32),
    86: Multiprocessor(99 * KB, 100 * KB, 1536, 16),
    89: Multiprocessor(99 * KB, 100 * KB, 1536, 24),
    90: Multiprocessor(227 * KB, 228 * KB, 2048, 32),
}


SHARED = {arch: limits.shared_per_block for arch, limits in MULTIPROCESSORS.items()} | {120: 99 * KB}


class OfflineDriver:
    """What triton.runtime asks of a driver up to the point where a kernel is loaded onto a device."""

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton remembers the target per device, so every architecture has a device of its own

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_device_interface(self):
        return torch.cuda


class AbsentDevice(OfflineDriver):
    """The driver, and its utils, of a device whose limits hold; what is launched on it goes to launcher_cls(source,
    metadata)."""

    def __init__(self, arch: int, launcher_cls: Callable):
        super().__init__(arch)
        self.utils, self.launcher_cls = self, launcher_cls

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.target.arch]}

    def load_binary(self, name, binary, shared, device):
        return True, True, 0, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module):
        pass


@contextlib.contextmanager
def active(arch: int, device: OfflineDriver | None = None) -> Iterator[None]:
    """Within, Triton compiles for this architecture; afterwards again for the device that is there, if one is."""
    try:
        before = driver.active
    except RuntimeError:  # no device, no driver
        before = None
    driver.set_active(device or OfflineDriver(arch))
    try:
        yield
    finally:
        driver.set_active(before)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One caught launch. Launches with equal ``key`` run the same compiled kernel."""

    arch: int
    kernel: triton.JITFunction
    args: tuple
    kwargs: dict
    key: tuple

    def compile(self):
        with active(self.arch):
            return self.kernel.warmup(*self.args, grid=(1,), **self.kwargs)


def catch(arch: int, kernel: triton.JITFunction, *args, **kwargs) -> Launch:
    """The launch of one kernel for one architecture; compiles nothing."""
    seen = []

    def skip_compilation(*, compile, **_):
        seen.append(compile["key"])
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, skip_compilation
    try:
        with active(arch):
            kernel.warmup(*args, grid=(1,), **kwargs)
    finally:
        knobs.runtime.jit_cache_hook = before
    if not seen:
        raise RuntimeError(f"{kernel.__name__}: compiled before its launch was caught")
    return Launch(arch, kernel, args, kwargs, (arch, kernel.__module__, kernel.__name__, seen[-1]))


@contextlib.contextmanager
def caught_launches(launcher, arch: int) -> Iterator[list[Launch]]:
    """Replaces ``launcher.launch(kernel, grid, *args, **kwargs)``: fills the list instead of running kernels."""
    launches = []
    before = launcher.launch
    launcher.launch = lambda kernel, grid, *args, **kwargs: launches.append(catch(arch, kernel, *args, **kwargs))
    try:
        with active(arch):
            yield launches
    finally:
        launcher.launch = before


@dataclasses.dataclass(frozen=True)
class Measured:
    """A compiled kernel. The loop is the mix of its hot tile loop, empty without one; None without nvdisasm."""

    registers: int
    spill_stores: int  # bytes per thread
    spill_loads: int
    shared: int  # bytes per block
    warps: int
    stages: int
    loop: dict[str, int] | None


def tool(name: str) -> str | None:
    """Path of a program in Triton's package (or of the one that TRITON_<NAME>_PATH names), None where there is none."""
    try:
        return getattr(knobs.nvidia, name).path
    except RuntimeError:  # Triton's "Cannot find ..."
        return None


def missing_tools() -> list[str]:
    return [name for name in ("cuobjdump", "nvdisasm") if tool(name) is None]


def measure(compiled) -> Measured:
    """Registers, spills and the hot loop of what Triton's ``warmup`` returned.

    Registers come from cuobjdump, spills from the disassembly; the sum of its local-memory widths is the number that
    ``ptxas -v`` prints (see tests/test_gate.py). Where one of the two programs is missing, ptxas itself is asked.
    """
    metadata, loop = compiled.metadata, None
    if missing_tools():
        registers, stores, loads = ptxas_usage(compiled)
    else:
        registers, stack = cubin_usage(compiled.asm["cubin"])
        stores, loads, loop = 0, 0, {}
        if stack or "mma" in compiled.asm["ptx"]:  # else there is nothing to count, and nvdisasm takes half a second
            listing = sass.disassemble(compiled.asm["cubin"], tool("nvdisasm"))
            stores, loads = sass.local_bytes(listing)
            loop = dict(sass.hot_loop(listing) or {})
    return Measured(registers, stores, loads, metadata.shared, metadata.num_warps, metadata.num_stages, loop)


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread, from ``cuobjdump -res-usage``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool("cuobjdump"), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    functions = re.findall(r"\bREG:(\d+) STACK:(\d+)", report)
    return max(int(registers) for registers, _ in functions), max(int(stack) for _, stack in functions)


def ptxas_usage(compiled) -> tuple[int, int, int]:
    """(registers, spill bytes stored, loaded) as ``ptxas -v`` reports them when Triton's own code assembles the PTX
    again, so with the flags of this Triton version."""
    metadata = compiled.metadata
    backend = make_backend(metadata.target)
    log = io.StringIO()
    before, knobs.nvidia.dump_ptxas_log = knobs.nvidia.dump_ptxas_log, True
    try:
        with contextlib.redirect_stdout(log):
            backend.make_cubin(compiled.asm["ptx"], {}, backend.parse_options(metadata._asdict()), metadata.target.arch)
    finally:
        knobs.nvidia.dump_ptxas_log = before
    report = log.getvalue()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return (
        max(int(registers) for registers in re.findall(r"Used (\d+) registers", report)),
        sum(int(stored) for stored, _ in spills),
        sum(int(loaded) for _, loaded in spills),
    )


def compile_all(launches: list[Launch], jobs: int) -> Iterator[tuple[int, Measured | str, float]]:
    """(index, what was measured or the compiler's complaint, seconds of processor time) for every launch, as they
    finish, in `jobs` processes."""
    global _launches
    _launches = launches
    if jobs == 1:
        yield from map(_compile_one, range(len(launches)))
        return
    with multiprocessing.get_context("fork").Pool(
        jobs
    ) as pool:  # a launch holds functions and tensors: shared, not pickled
        yield from pool.imap_unordered(_compile_one, range(len(launches)))


_launches: list[Launch] = []


def _compile_one(index: int) -> tuple[int, Measured | str, float]:
    started = _processor_seconds()
    try:
        result = measure(_launches[index].compile())
    except Exception as error:  # any failure of any compiler stage is a finding of the gate, and the others still count
        result = f"{type(error).__name__}: {error}"
    return index, result, _processor_seconds() - started


def _processor_seconds() -> float:
    """Of this process and the programs it ran, ptxas above all."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
