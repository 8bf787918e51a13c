"""Compiles Triton kernels without a GPU, from the launches that the backend makes.

The backend runs on meta tensors. Every launch is caught with its arguments. So a kernel is specialised exactly as on
the device: for arguments that are divisible by 16, integers equal to 1, and None.
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from flashrope.backends.triton.accumulators import held_once
from flashrope.backends.triton.launcher import compiling
from flashrope.triton_kernels.arguments import ScoreGrads
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

from . import amdgcn, predict, sass
from .architectures import SHARED, target


class OfflineDriver:
    """Implements what triton.runtime needs from a driver before it loads a kernel onto a device."""

    def __init__(self, arch: int | str):
        self.target = target(arch)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int | str:
        return self.target.arch  # Triton remembers a device's target, so every architecture is a device of its own

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_device_interface(self):
        return torch.cuda


class AbsentDevice(OfflineDriver):
    """Implements the driver of a device that is not present, together with the driver's ``utils``. Triton checks this
    device's limits, and launches kernels by launcher_cls(source, metadata)."""

    def __init__(self, arch: int | str, launcher_cls: Callable):
        super().__init__(arch)
        self.utils, self.launcher_cls = self, launcher_cls

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.target.arch]}

    def load_binary(self, name, binary, shared, device):
        return True, True, 0, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module):
        pass


@contextlib.contextmanager
def active(arch: int | str, device: OfflineDriver | None = None) -> Iterator[None]:
    """Makes Triton compile for this architecture within the context."""
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
    """Holds a caught launch. Launches with equal ``key`` run the same compiled kernel."""

    arch: int | str
    kernel: triton.JITFunction
    args: tuple
    kwargs: dict
    key: tuple

    @property
    def stores_scores(self) -> bool:
        """Whether the kernel writes or reads stored gradients of scores."""
        return any(isinstance(x, ScoreGrads) for x in self.args)

    def compile(self):
        with active(self.arch), compiling():
            return self.kernel.warmup(*self.args, grid=(1,), **self.kwargs)


def catch(arch: int | str, kernel: triton.JITFunction, *args, **kwargs) -> Launch:
    """Returns the launch of a kernel for an architecture. Compiles nothing."""
    seen = []

    def skip_compilation(*, compile, **_):
        seen.append(compile["key"])
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, skip_compilation
    # The cache of compiled kernels is empty, so that Triton calls the hook.
    compiled, kernel.device_caches = kernel.device_caches, defaultdict(kernel.create_binder)
    try:
        with active(arch), compiling():
            kernel.warmup(*args, grid=(1,), **kwargs)
    finally:
        knobs.runtime.jit_cache_hook, kernel.device_caches = before, compiled
    return Launch(arch, kernel, args, kwargs, (arch, kernel.__module__, kernel.__name__, seen[-1]))


@contextlib.contextmanager
def caught_launches(launcher, arch: int | str) -> Iterator[list[Launch]]:
    """Replaces ``launcher.launch`` within the context. Launches are appended to the yielded list, and no kernel is
    compiled or run."""
    launches = []
    before = launcher.launch, launcher.resident_blocks, launcher.ir_allows
    launcher.resident_blocks = lambda *args, **kwargs: 1
    launcher.ir_allows = lambda *args, **kwargs: True
    launcher.launch = lambda kernel, grid, *args, **kwargs: launches.append(catch(arch, kernel, *args, **kwargs))
    try:
        with active(arch):
            yield launches
    finally:
        launcher.launch, launcher.resident_blocks, launcher.ir_allows = before


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds the figures of a compiled kernel.

    loop: the instruction mix of its hot loop, empty if it has none, None without nvdisasm. loop_spills: bytes of local
    memory that a thread touches in the tile loops, None without nvdisasm. slots: how many tiles the smallest cp.async
    buffer of the loops holds, None if there is no such buffer. model: the hot loop as the issue model simulates it,
    None if the model does not apply. held_once: whether one thread holds each element of dQ, as the PTX instruction
    ``red`` requires; None if the kernel does not use ``red``. serialised: what ptxas says about wgmma that it ran one
    after the other or made wait, empty if it says nothing.
    """

    registers: int
    spill_stores: int  # bytes per thread
    spill_loads: int
    shared: int  # bytes per block
    warps: int
    stages: int
    loop: dict[str, int] | None
    loop_spills: int | None = None
    slots: int | None = None
    model: predict.Loop | None = None
    held_once: bool | None = None
    serialised: str = ""


def tool(name: str) -> str | None:
    """Returns the path of a program in Triton's package, or the path in TRITON_<NAME>_PATH. None if it is missing."""
    try:
        return getattr(knobs.nvidia, name).path
    except RuntimeError:  # Triton's "Cannot find ..."
        return None


def missing_tools() -> list[str]:
    return [name for name in ("cuobjdump", "nvdisasm") if tool(name) is None]


def measure(compiled) -> Measured | amdgcn.Measured:
    """Returns registers, spills and the hot loop of a kernel that Triton's ``warmup`` returned.

    Registers come from cuobjdump. Spills come from the disassembly: the widths of its local-memory instructions add up
    to the number that ``ptxas -v`` prints. If cuobjdump or nvdisasm is missing, both figures come from ptxas.
    """
    if "amdgcn" in compiled.asm:
        return amdgcn.measure(compiled)
    metadata, loop, loop_spills, model = compiled.metadata, None, None, None
    missing = missing_tools()
    log = ptxas_log(compiled) if missing or "wgmma" in compiled.asm["ptx"] else ""
    if missing:
        registers, stores, loads = ptxas_usage(log)
    else:
        registers, stack = cubin_usage(compiled.asm["cubin"])
        stores, loads, loop, loop_spills = 0, 0, {}, 0
        if stack or "mma" in compiled.asm["ptx"]:  # otherwise nvdisasm, which takes half a second, has nothing to count
            listing = sass.disassemble(compiled.asm["cubin"], tool("nvdisasm"))
            stores, loads = sass.local_bytes(listing)
            loop, loop_spills = dict(sass.hot_loop(listing) or {}), sass.local_bytes_in_loops(listing)
            model = predict.inner_loop(listing, metadata.target.arch, registers, metadata.shared, metadata.num_warps)
    return Measured(
        registers,
        stores,
        loads,
        metadata.shared,
        metadata.num_warps,
        metadata.num_stages,
        loop,
        loop_spills,
        slots(compiled.asm["ttgir"]),
        model,
        held_once(compiled.asm["ttgir"]) if "red.relaxed" in compiled.asm["ptx"] else None,
        serialised(log),
    )


def slots(ttgir: str) -> int | None:
    """Returns how many tiles [M, N] or [G, M, N] the smallest buffer of a tile loop holds, or None if there are no such
    buffers. In Triton's GPU IR such a buffer is an allocation of shape (slots, M, N) or (slots, G, M, N) without an
    initial value."""
    buffers = re.findall(r"local_alloc\s*: \(\) -> !ttg\.memdesc<(\d+)(?:x\d+){2,3}x[a-z]", ttgir)
    return min(map(int, buffers), default=None)


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Returns (registers, bytes of stack) per thread, from ``cuobjdump -res-usage``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool("cuobjdump"), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    functions = re.findall(r"\bREG:(\d+) STACK:(\d+)", report)
    return max(int(registers) for registers, _ in functions), max(int(stack) for _, stack in functions)


def ptxas_log(compiled) -> str:
    """Returns what ``ptxas -v`` prints. For that, Triton assembles the PTX again with its own flags, because a kernel
    from Triton's cache has no log."""
    metadata = compiled.metadata
    backend = make_backend(metadata.target)
    log = io.StringIO()
    before, knobs.nvidia.dump_ptxas_log = knobs.nvidia.dump_ptxas_log, True
    try:
        with contextlib.redirect_stdout(log):
            backend.make_cubin(compiled.asm["ptx"], {}, backend.parse_options(metadata._asdict()), metadata.target.arch)
    finally:
        knobs.nvidia.dump_ptxas_log = before
    return log.getvalue()


def ptxas_usage(report: str) -> tuple[int, int, int]:
    """Returns (registers, spill bytes stored, spill bytes loaded) from what ``ptxas -v`` prints."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return (
        max(int(registers) for registers in re.findall(r"Used (\d+) registers", report)),
        sum(int(stored) for stored, _ in spills),
        sum(int(loaded) for _, loaded in spills),
    )


def serialised(report: str) -> str:
    """Returns the first of the messages C7510 to C7518, or an empty text. ptxas prints them where it gives up on
    wgmma that run behind other instructions, and lets each wait instead."""
    found = re.search(r"\(C751[0-8]\).*", report)
    return found[0] if found else ""


def compile_all(
    launches: list[Launch], jobs: int, inspect: Callable[[Any], Any] = measure
) -> Iterator[tuple[int, Any, float]]:
    """Compiles every launch, in `jobs` processes.

    Yields (index, inspect(compiled) or the compiler's error as text, seconds of processor time) as they finish.
    """
    global _work
    _work = launches, inspect
    if jobs == 1:
        yield from map(_compile_one, range(len(launches)))
        return
    # The processes are forked because a launch holds functions and tensors that cannot be pickled.
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_compile_one, range(len(launches)))


_work: tuple[list[Launch], Callable[[Any], Any]] = [], measure


def _compile_one(index: int) -> tuple[int, Any, float]:
    started = _processor_seconds()
    launches, inspect = _work
    try:
        result = inspect(launches[index].compile())
    except Exception as error:  # a compiler's failure is a result too, and the other kernels still compile
        result = f"{type(error).__name__}: {error}"
    return index, result, _processor_seconds() - started


def _processor_seconds() -> float:
    """Returns the processor time of this process and of the programs that it ran, mostly ptxas."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
