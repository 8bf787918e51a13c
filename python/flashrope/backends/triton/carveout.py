"""Asks the CUDA driver for as much shared memory as the resident blocks of a kernel need.

A multiprocessor divides one memory between shared memory and L1 cache. Triton asks for shared memory only if a block of
a kernel has more than ``LIMIT`` bytes. For other kernels the driver divides the memory by a rule of its own, which may
leave too little for the blocks that ``splits`` expects to be resident. Not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
from functools import cache

import triton
from triton.compiler import CompiledKernel

from ..shared.splits import multiprocessor

LIMIT = 48 << 10
PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute in cuda.h; its value is in percent


@cache
def _driver() -> ctypes.CDLL | None:
    """Returns CUDA's driver, or None if this process has none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return driver


def wants_shared_memory(capability: int, registers: int, shared: int, warps: int) -> bool:
    """Returns whether several blocks of a kernel fit on a multiprocessor and together need more than ``LIMIT`` bytes.

    registers: per thread. shared: bytes of shared memory per block, at most ``LIMIT``. warps: per block."""
    return shared <= LIMIT < shared * multiprocessor(capability).resident_blocks(registers, shared, warps)


def prefer_shared_memory(compiled: CompiledKernel) -> None:
    """Asks for all the shared memory of a multiprocessor if a loaded kernel needs it. This is a hint to the driver, so
    errors are ignored. Does nothing on AMD and without a GPU."""
    if not type(triton.runtime.driver.active).__module__.startswith("triton.backends.nvidia"):
        return
    metadata = compiled.metadata
    wants = wants_shared_memory(metadata.target.arch, compiled.n_regs, metadata.shared, metadata.num_warps)
    if wants and (driver := _driver()):
        driver.cuFuncSetAttribute(compiled.function, PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
