"""Lists the architectures that the gate compiles for, and the limits of their multiprocessors."""

from __future__ import annotations

from flashrope.backends.shared.splits import MULTIPROCESSORS
from triton.backends.compiler import GPUTarget

MAIN = (80, 86, 90)  # their machine code is analysed in full
NEWER = (89, 100, 120)
AMD = ("gfx942", "gfx950")
NVIDIA = tuple(sorted(MAIN + NEWER))
ALL = NVIDIA + AMD
# Bytes of shared memory per block.
SHARED = {arch: MULTIPROCESSORS[arch].shared_per_block for arch in ALL}


def target(arch: int | str) -> GPUTarget:
    """Returns Triton's target for an architecture such as 80, or AMD's "gfx942"."""
    return GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)


def name_of(arch: int | str) -> str:
    return arch if isinstance(arch, str) else f"sm_{arch}"


def parse(name: str) -> int | str:
    """Parses an architecture given as 120, sm_120 or gfx942. Raises ValueError for any other text."""
    for arch in ALL:
        if name in (str(arch), name_of(arch)):
            return arch
    raise ValueError(name)
