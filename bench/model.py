"""How busy the tensor cores of an sm_80 multiprocessor are in a tile loop, by its instruction mix. It ranks tiles; it
is no timing.

Per warp and iteration, in clocks of its scheduler: an HMMA 16x8x16 takes 8, a special function 8, a float32 instruction
2, an LDSM.x4 occupies the multiprocessor's shared memory for 4 and, as four schedulers share that, counts 16, another
access 4. Products and shared memory overlap; special functions and half of the float32 work do not overlap with them,
for warps run in step; and every instruction takes a clock to issue. On FlashAttention-2's loops this gives 67%
(head_dim 128) and 54% (64).
"""

from __future__ import annotations

from collections.abc import Mapping

ARCH = 80


def utilisation(loop: Mapping[str, int]) -> float:
    """Share of the time in which the tensor cores work, 0 to 1, of a mix of bench.sass (per warp: warps of a scheduler
    add up on both sides of the fraction)."""
    tensor = 8 * loop["mma"]
    shared = 16 * loop.get("ldsm", 0) + 4 * loop.get("shared", 0)
    special, fp32 = 8 * loop.get("mufu", 0), 2 * loop.get("fp32", 0)
    return tensor / max(max(tensor, shared) + special + fp32 / 2, loop["total"])
