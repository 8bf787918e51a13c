"""A model of how busy the tensor cores of an sm_80 multiprocessor are in a tile loop, from its instruction mix.

It ranks tiles; it does not predict times. Per warp and iteration, in clocks of its scheduler: an HMMA 16x8x16 takes 8,
a special function 8, a float32 instruction 2. An LDSM.x4 occupies the multiprocessor's shared memory for 4 clocks,
which four schedulers share, so it counts 16; any other shared-memory access counts 4. Products and shared memory
overlap. Special functions and half of the float32 work do not overlap with them, because warps run in step. Every
instruction takes one clock to issue. For FlashAttention-2's loops the model gives 67% (head_dim 128) and 54% (64).
"""

from __future__ import annotations

from collections.abc import Mapping

ARCH = 80


def utilisation(loop: Mapping[str, int]) -> float:
    """Share of the time in which the tensor cores work, 0 to 1.

    loop: an instruction mix of ``sass``, per warp. The number of warps per scheduler cancels out.
    """
    tensor = 8 * loop["mma"]
    shared = 16 * loop.get("ldsm", 0) + 4 * loop.get("shared", 0)
    special, fp32 = 8 * loop.get("mufu", 0), 2 * loop.get("fp32", 0)
    return tensor / max(max(tensor, shared) + special + fp32 / 2, loop["total"])
