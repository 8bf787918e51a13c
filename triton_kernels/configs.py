"""The only tuning numbers: tile sizes, warps and pipeline stages by architecture, head_dim and direction.

The compute capability picks a table: "sm80" (A100), "sm86" (sm_86, sm_89 and from
sm_120 on, 99 KB of shared memory), "sm90" (H100, H200 and, until one was measured, what lies between).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton


class Tile(NamedTuple):
    """block_m: query rows, block_n: key rows of a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Rows are {BLOCK_D: Tile}, BLOCK_D the power of two that holds head_dim. "banded" rows replace those of the direction
# where a scheme has several bands and the accumulator's change of frame takes the registers. No tile below was timed
# yet: they are the largest that compile without spills (python -m bench gate), ranked by ldmatrix and instructions per
# tensor-core instruction.
HALF = {
    "sm80": {
        "forward": {
            16: Tile(128, 64, 4, 3),
            32: Tile(128, 64, 4, 3),
            64: Tile(128, 64, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(128, 32, 8, 2),
        },
        "grad_kv": {
            16: Tile(32, 128, 4, 3),
            32: Tile(32, 128, 4, 3),
            64: Tile(32, 128, 8, 2),
            128: Tile(32, 128, 8, 3),
            256: Tile(32, 64, 8, 1),
        },
        "grad_q": {
            16: Tile(128, 64, 4, 2),
            32: Tile(128, 64, 4, 2),
            64: Tile(128, 64, 8, 2),
            128: Tile(128, 32, 8, 2),
            256: Tile(64, 32, 8, 1),
        },
        "grad_kv banded": {128: Tile(32, 64, 8, 2)},
        "decode": {
            16: Tile(16, 64, 4, 3),
            32: Tile(16, 64, 4, 3),
            64: Tile(16, 64, 4, 3),
            128: Tile(16, 64, 8, 3),
            256: Tile(16, 32, 8, 3),
        },
        "decode wide": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(32, 64, 8, 3),
            256: Tile(32, 32, 8, 2),
        },
    },
    "sm86": {
        "forward": {
            16: Tile(128, 64, 4, 2),
            32: Tile(128, 64, 4, 2),
            64: Tile(128, 64, 4, 2),
            128: Tile(128, 64, 8, 2),
            256: Tile(64, 32, 4, 1),
        },
        "grad_kv": {
            16: Tile(32, 128, 4, 2),
            32: Tile(32, 128, 4, 2),
            64: Tile(32, 128, 8, 2),
            128: Tile(32, 128, 8, 2),
            256: Tile(32, 32, 8, 1),
        },
        "grad_q": {
            16: Tile(128, 64, 4, 2),
            32: Tile(128, 64, 4, 2),
            64: Tile(128, 64, 8, 2),
            128: Tile(128, 32, 8, 2),
            256: Tile(32, 32, 8, 1),
        },
        "grad_kv banded": {128: Tile(32, 64, 8, 2)},
        "decode": {
            16: Tile(16, 64, 4, 3),
            32: Tile(16, 64, 4, 3),
            64: Tile(16, 64, 4, 3),
            128: Tile(16, 64, 8, 3),
            256: Tile(16, 32, 8, 3),
        },
        "decode wide": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(32, 64, 8, 3),
            256: Tile(32, 32, 8, 2),
        },
    },
    "sm90": {
        "forward": {
            16: Tile(128, 64, 4, 3),
            32: Tile(128, 64, 4, 3),
            64: Tile(128, 64, 8, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(128, 64, 8, 2),
        },
        "grad_kv": {
            16: Tile(32, 128, 4, 3),
            32: Tile(32, 128, 4, 3),
            64: Tile(32, 128, 8, 3),
            128: Tile(32, 128, 8, 3),
            256: Tile(32, 64, 8, 1),
        },
        "grad_q": {
            16: Tile(128, 64, 4, 2),
            32: Tile(128, 64, 4, 2),
            64: Tile(128, 64, 8, 2),
            128: Tile(128, 64, 8, 2),
            256: Tile(64, 64, 8, 1),
        },
        "grad_kv banded": {128: Tile(32, 64, 8, 2)},
        "decode": {
            16: Tile(16, 64, 4, 3),
            32: Tile(16, 64, 4, 3),
            64: Tile(16, 64, 4, 3),
            128: Tile(16, 64, 8, 3),
            256: Tile(16, 32, 8, 3),
        },
        "decode wide": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(32, 64, 8, 3),
            256: Tile(32, 32, 8, 2),
        },
    },
}
# Where newer compilers (seen: 3.9) spill and 3.6 does not.
NEWER_HALF = {
    "sm80": {
        "forward": {64: Tile(128, 32, 4, 3)},
        "forward banded": {64: Tile(128, 32, 4, 3), 128: Tile(128, 32, 8, 3)},
    },
    "sm90": {
        "grad_q banded": {128: Tile(128, 64, 8, 3)},
        "decode": {64: Tile(16, 64, 4, 2)},
        "decode wide": {128: Tile(32, 32, 8, 3)},
    },
}
# float32 products run without tensor cores ("ieee"); these serve correctness, not speed.
FLOAT = {
    "forward": {
        16: Tile(32, 32, 4, 1),
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 4, 1),
        256: Tile(16, 16, 4, 1),
    },
    "grad_kv": {
        16: Tile(32, 32, 4, 1),
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(16, 32, 4, 1),
        256: Tile(16, 16, 4, 1),
    },
    "grad_q": {
        16: Tile(32, 32, 4, 1),
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 16, 4, 1),
        256: Tile(16, 16, 4, 1),
    },
    "decode": {
        16: Tile(16, 32, 4, 1),
        32: Tile(16, 32, 4, 1),
        64: Tile(16, 32, 4, 1),
        128: Tile(16, 16, 4, 1),
        256: Tile(16, 16, 4, 1),
    },
    "decode wide": {
        16: Tile(32, 32, 4, 1),
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 16, 4, 1),
        256: Tile(16, 16, 4, 1),
    },
}
# The elementwise passes, any type: rows per program, warps, heads per program (which share one load of cos and sin).
TURN_ROWS, TURN_WARPS, TURN_HEADS = 32, 4, 4
DELTA_ROWS, DELTA_WARPS = 64, 4
APPEND_ROWS, APPEND_WARPS = 32, 4
COMBINE_SPLITS, COMBINE_WARPS = 16, 4  # splits that one step of a program combines

# Over a cache, where the caller leaves num_splits open: query tokens that the decode kernel takes at most, beyond which
# the forward kernel serves; blocks for every multiprocessor, the fewest keys and the most splits that pay.
DECODE_SEQLEN = 64
WIDE_ROWS = 16  # more rows of queries under one head of keys take the "decode wide" tile
BLOCKS_PER_MULTIPROCESSOR, MIN_KEYS_PER_SPLIT, MAX_SPLITS = 2, 256, 256


def options(num_warps: int, **others: int) -> dict[str, int | bool]:
    """For Triton's compiler. Products and sums fuse, which from Triton 3.10 on is not its default."""
    return {"num_warps": num_warps, "enable_fp_fusion": True, **others}


def family(capability: int) -> str:
    """The table for a compute capability such as 80 or 90."""
    if capability < 80:
        raise ValueError(f"the Triton kernels need compute capability 8.0 or newer, this device has {capability / 10}")
    return "sm80" if capability == 80 else "sm90" if 90 <= capability < 120 else "sm86"


def num_splits(programs: int, capacity: int, multiprocessors: int) -> int:
    """Parts to split the keys of a cache into, by shapes alone; programs: those that one split has."""
    return max(
        1, min(BLOCKS_PER_MULTIPROCESSOR * multiprocessors // programs, capacity // MIN_KEYS_PER_SPLIT, MAX_SPLITS)
    )


@lru_cache(maxsize=1024)
def tile(direction: str, capability: int, block_d: int, itemsize: int, num_bands: int) -> Tile:
    """direction: "forward", "grad_kv", "grad_q", "decode" or "decode wide" (many rows of queries). The most special row
    decides."""
    tables = [FLOAT]
    if itemsize == 2:
        tables = [HALF[family(capability)]]
        if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6):
            tables.insert(0, NEWER_HALF.get(family(capability), {}))
    names = [f"{direction} banded", direction] if num_bands > 1 else [direction]
    return next(table[name][block_d] for table in tables for name in names if block_d in table.get(name, {}))
