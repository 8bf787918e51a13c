"""Whether a compiled kernel may add to sums with ``red``, which every thread does where it has an accumulator.

Two properties of the layout that Triton chose have to hold, and a later version may choose another. No element may be
in two threads: Triton copies a tile that is too small for its warps, and all copies would be added. And four elements
that follow one another in a thread must be a lane's of a block of 16 x 8, which holds for mma.sync and wgmma. A kernel
without these properties adds by ``tl.atomic_add``, which changes the layout first.
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
    """ttgir: Triton's GPU IR. False also where it has no ``red`` at all, or is of another form than known here."""
    layouts, adds = dict(_LAYOUT.findall(ttgir)), _RED.findall(ttgir)
    return bool(adds) and all(_covers(layouts.get(name, ""), int(rows), int(columns)) for rows, columns, name in adds)


def _covers(layout: str, rows: int, columns: int) -> bool:
    """Whether the warps of a layout need the whole tile."""
    found = _ACCUMULATOR.match(layout)
    if not found:
        return False
    warps_m, warps_n, width = map(int, found.groups())
    return 16 * warps_m <= rows and width * warps_n <= columns
