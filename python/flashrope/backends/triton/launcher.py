"""Launches kernels. If a kernel has run before, Triton's own inspection of arguments is bypassed.

Triton inspects every argument of every launch to find the kernel that it compiled for such arguments. This inspection
takes several times as long as the launch itself. In decoding, where kernels are short, it takes most of the time.

Triton's key of a compiled kernel contains the target device, the compiler options, and the traits of each argument. The
traits of a tensor are its dtype and whether its address is a multiple of 16. The traits of an integer are whether it is
1, whether it is a multiple of 16, and whether it has 32 or 64 bits. None and constexprs are part of the key by value. A
tuple has the traits of its fields. In this package's launches, only the number of bits of an integer varies: integers
outside tuples are ``do_not_specialize``, and integers inside tuples are encoded so that all have the same traits
(``triton_kernels/arguments.py``). So ``_traits`` below, with the kernel, the device and the options,
distinguishes at least as many kernels as Triton's key. tests/backends/test_launches.py makes random calls and compares
the kernel found here with the kernel that Triton finds.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import cache

import triton
from triton._C.libtriton import ir
from triton.compiler import CompiledKernel, make_backend
from triton.runtime._async_compile import FutureKernel

from ...schemes.resident import refuse_capture
from ...triton_kernels.arguments import FIELDS
from ..shared.splits import multiprocessor
from .carveout import prefer_shared_memory

MAX_PROGRAMS = 1 << 31

_compiled: dict[tuple, tuple] = {}  # {_key of a launch: (compiled kernel, the constants after its arguments)}
_allowed: dict[tuple, bool] = {}  # results of ir_allows


@cache  # Triton reads the setting when the kernels are imported
def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


_on_amd = threading.RLock()  # Triton's settings are shared by all threads of the process


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Returns a context in which Triton compiles a kernel. For AMD's GPUs the context turns off buffer operations,
    because the pass that introduces them fails on these kernels (docs/dev/targets.md)."""
    if triton.runtime.driver.active.get_current_target().backend != "hip":
        yield
        return
    with _on_amd, triton.knobs.amd.scope():
        triton.knobs.amd.use_buffer_ops = False
        yield


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """Runs the kernel. All launches of the package go through this function.

    options: constexprs as keywords, and options of the compiler.

    Raises:
        ValueError: the grid has 2^31 programs or more. Triton would silently skip such a launch.
    """
    if math.prod(grid) >= MAX_PROGRAMS:
        raise ValueError(f"{kernel.__name__}: expected fewer than 2^31 programs, got a grid of {grid}")
    if interpreted():
        kernel[grid](*args, **options)
        return
    key = _key(kernel, args, options)
    if known := _compiled.get(key):
        compiled, constants = known
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
        return
    refuse_capture(f"kernel {kernel.__name__} for these arguments")
    with compiling():
        compiled = kernel[grid](*args, **options)
    if isinstance(compiled, CompiledKernel):  # false if a hook took over, or if a thread is still compiling
        prefer_shared_memory(compiled)
        _compiled[key] = compiled, [options[name] for name in kernel.arg_names[len(args) :]]


class Launch:
    """A kernel that runs repeatedly with arguments of equal traits (``_traits``). From the third run on, the lookup of
    the compiled kernel is skipped."""

    def __init__(self, kernel, grid: tuple[int, ...], options: dict):
        self._kernel, self._grid, self._options = kernel, grid, options
        self._run: Callable[..., None] | None = None
        self._constants: list = []
        self._launches = 0

    def __call__(self, *args) -> None:
        if self._run is not None:
            self._run(*args, *self._constants)
            return
        launch(self._kernel, self._grid, *args, **self._options)
        self._launches += 1
        if self._launches == 2 and not interpreted():  # not at the first: a plan of one layer launches only once
            if known := _compiled.get(_key(self._kernel, args, self._options)):
                compiled, self._constants = known
                self._run = compiled[(*self._grid, 1, 1)[:3]]


def _key(kernel, args: tuple, options: dict) -> tuple:
    """Returns the key of a compiled kernel: its name, device, options, and the traits of its arguments."""
    return kernel.__name__, triton.runtime.driver.active.get_current_device(), *_traits(args), *options.items()


def resident_blocks(capability: int | str, kernel, *args, **options) -> int | None:
    """Returns how many blocks of the kernel that ``launch`` would run fit on one multiprocessor. The first call
    compiles the kernel. Returns None if a hook of Triton compiled nothing."""
    if interpreted():
        return 1
    if (compiled := _compile(kernel, args, options)) is None:
        return None
    compiled.run  # noqa: B018  loads the kernel, which sets n_regs
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    return multiprocessor(capability).resident_blocks(compiled.n_regs, shared, num_warps)


def ir_allows(allows: Callable[[str], bool], kernel, *args, **options) -> bool:
    """Returns whether ``allows`` returns True for the TTGIR of the kernel that ``launch`` would run. Returns False in
    the interpreter, and if a hook of Triton compiled nothing.

    The first call compiles the kernel. The result is cached.
    """
    if interpreted():
        return False
    key = (allows, *_key(kernel, args, options))
    if key not in _allowed:
        if (compiled := _compile(kernel, args, options)) is None:
            return False
        _allowed[key] = allows(ttgir_of(compiled))
    return _allowed[key]


def _compile(kernel, args: tuple, options: dict) -> CompiledKernel | None:
    """Compiles the kernel that ``launch`` would run. Waits for it if Triton compiles in other threads."""
    refuse_capture(f"kernel {kernel.__name__} for these arguments")
    with compiling():
        compiled = kernel.warmup(*args, grid=(1,), **options)
    if isinstance(compiled, FutureKernel):
        compiled = compiled.result()
    return compiled if isinstance(compiled, CompiledKernel) else None


def ttgir_of(compiled: CompiledKernel) -> str:
    """Returns Triton's GPU IR of a compiled kernel.

    Triton's cache need not have it: with TRITON_STORE_BINARY_ONLY=1 only binaries are stored. The source is then
    lowered again, without the steps from the IR to the binary.
    """
    if (stored := compiled.asm.get("ttgir")) is not None:
        return stored
    source, target = compiled.src, compiled.metadata.target
    backend = make_backend(target)
    options = backend.parse_options(compiled.metadata._asdict())
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module, metadata = source.make_ir(target, options, *functions, context), dict(compiled.metadata._asdict())
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


def _traits(args: tuple) -> list:
    """Returns the traits of arguments by which Triton distinguishes compiled kernels: dtypes, alignment of pointers,
    whether an integer needs 64 bits, and which arguments are None."""
    traits = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            traits.append(arg >> 31)
            continue
        if kind in FIELDS:
            count, optional = FIELDS[kind]
            pointers = arg[:count]
            if optional:
                traits += [number is None for number in arg[optional:]]
        else:
            pointers = (arg,)
        for x in pointers:
            traits += (None,) if x is None else (x.dtype, x.data_ptr() & 15)
    return traits


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up. A call of triton.cdiv would take several microseconds on the host, because triton.cdiv
    also works inside kernels."""
    return -(-a // b)
