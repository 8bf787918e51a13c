"""Runs PTX from any source on the executor, without Triton."""

from __future__ import annotations

import ctypes
import struct

from .driver import Machine


class InvalidPtx(ValueError):
    """PTX for another target or version, or with an instruction that the executor does not support."""


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    ]


class Kernel:
    """The first kernel of a PTX module: kernel(grid, *arguments, shared_bytes=0)."""

    def __init__(self, machine: Machine, text: str):
        self.machine, self.library = machine, machine.library
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        if self.library.cuModuleLoadData(ctypes.byref(module), text.encode()):
            raise InvalidPtx(self._message())
        self.library.cuModuleGetFunction(ctypes.byref(self.function), module, b"")
        threads = ctypes.c_int()
        self.library.cuFuncGetAttribute(ctypes.byref(threads), 0, self.function)
        self.threads = threads.value

    def __call__(self, grid: tuple[int, ...], *arguments, shared_bytes: int = 0) -> None:
        """arguments: tensors (passed by address), ints (32 bits; ctypes.c_int64 for 64), floats (32 bits), ctypes
        arrays.

        Raises:
            ExecutionError: the findings, unless the machine is not strict.
        """
        self.machine.register([(f"argument {n}", x) for n, x in enumerate(arguments) if hasattr(x, "data_ptr")])
        values = [_value(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = LaunchConfig((*grid, 1, 1)[:3], (self.threads, 1, 1), shared_bytes)
        if self.library.cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None):
            raise RuntimeError(self._message())
        self.machine.collect()

    def _message(self) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(0, ctypes.byref(text))
        return text.value.decode()


def _value(x):
    if hasattr(x, "data_ptr"):
        return ctypes.c_uint64(x.data_ptr())
    if isinstance(x, float):
        return ctypes.c_uint32(struct.unpack("I", struct.pack("f", x))[0])
    return x if isinstance(x, (ctypes._SimpleCData, ctypes.Array)) else ctypes.c_int32(x)
