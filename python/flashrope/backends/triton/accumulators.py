"""Checks whether a compiled kernel may add its accumulators to memory with ``red``, directly from their layout.

The layout that Triton chooses must have two properties. This file checks both, because a later version of Triton may
choose another layout. First, no element may be in two threads. If a tile is too small for its warps, Triton gives
several warps a copy of the same elements, and all copies would be added. Second, four consecutive elements of a thread
must be the elements that one lane has in a 16 x 8 block. The layouts of mma.sync and wgmma have the second property. If
a property is missing, the kernel uses ``tl.atomic_add``, which converts the layout first.
"""

from __future__ import annotations

import re

# #mma1 = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 8], instrShape = [16, 8]}>
_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)$", re.MULTILINE)
_ACCUMULATOR = re.compile(
    r"#ttg\.nvidia_mma<\{versionMajor = [23],.* warpsPerCTA = \[(\d+), (\d+)\],.*instrShape = \[16, (\d+)[,\]]"
)
# tt.elementwise_inline_asm "red..." {...} %a, %b : tensor<64x64xi64, #mma1>, tensor<64x64xf32, #mma1> -> ...
_RED = re.compile(r'elementwise_inline_asm "red\..* : tensor<[^>]*>, tensor<(\d+)x(\d+)xf32, (#\w+)> ->')


def held_once(ttgir: str) -> bool:
    """Whether every element of the accumulators that a kernel adds with ``red`` is in one thread only.

    ttgir: Triton's GPU IR of the kernel. Returns False also if the kernel has no ``red``, or if this file does
    not recognize its layout.
    """
    layouts, adds = dict(_LAYOUT.findall(ttgir)), _RED.findall(ttgir)
    return bool(adds) and all(_covers(layouts.get(name, ""), int(rows), int(columns)) for rows, columns, name in adds)


def _covers(layout: str, rows: int, columns: int) -> bool:
    """Whether all warps of a layout fit into the tile, so that no warp holds a copy."""
    found = _ACCUMULATOR.match(layout)
    if not found:
        return False
    warps_m, warps_n, width = map(int, found.groups())
    return 16 * warps_m <= rows and width * warps_n <= columns
