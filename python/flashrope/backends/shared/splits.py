"""Chooses the number of splits of a cache's keys that fills a device. Only shapes are used."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from ...calls.records import MAX_SPLITS

FULL = 0.85  # the splits must keep this share of the device's resident blocks busy, if there are enough keys
# SPLIT_COST and COMBINE_COST are in units of the time of a key tile. Both are estimates, not measurements.
SPLIT_COST = 2  # per block: starting it and storing a partial result
COMBINE_COST = 4  # the launch that combines the partial results

KB = 1024


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """Limits of one streaming multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability"). shared_per_block, shared: bytes of shared memory."""

    shared_per_block: int
    shared: int
    threads: int
    blocks: int

    def resident_blocks(self, registers: int, shared: int, warps: int) -> int:
        """Returns how many blocks fit at once. registers: per thread. shared: bytes per block. warps: per block."""
        registers_per_warp = -(-max(registers, 1) * 32 // 256) * 256  # registers are allocated in units of 256
        return min(
            65536 // registers_per_warp // warps,
            self.shared // (shared + KB),  # CUDA itself takes 1 KB per block
            self.threads // (32 * warps),
            self.blocks,
        )


@dataclasses.dataclass(frozen=True)
class ComputeUnit:
    """Limits of one AMD compute unit of CDNA 3 or 4 (LLVM, "User Guide for AMDGPU Backend", and getMaxWorkGroupsPerCU).
    shared_per_block, shared: bytes of local data share (LDS). A compute unit has four SIMDs. Each SIMD has 512 vector
    registers per lane for at most 8 waves."""

    shared_per_block: int
    shared: int

    def waves(self, registers: int) -> int:
        """Returns the waves per SIMD. registers: VGPRs per lane, including AccVGPRs."""
        return min(512 // (-(-max(registers, 1) // 8) * 8), 8)  # registers are allocated in units of 8

    def resident_blocks(self, registers: int, shared: int, warps: int) -> int:
        """Returns how many blocks fit at once. registers: per lane. shared: bytes of LDS per block. warps: waves of 64
        lanes per block."""
        return min(4 * self.waves(registers) // warps, self.shared // max(shared, 1), 16)


MULTIPROCESSORS: dict[int | str, Multiprocessor | ComputeUnit] = {
    80: Multiprocessor(163 * KB, 164 * KB, 2048, 32),
    86: Multiprocessor(99 * KB, 100 * KB, 1536, 16),
    89: Multiprocessor(99 * KB, 100 * KB, 1536, 24),
    90: Multiprocessor(227 * KB, 228 * KB, 2048, 32),
    100: Multiprocessor(227 * KB, 228 * KB, 2048, 32),
    120: Multiprocessor(99 * KB, 100 * KB, 1536, 24),
    "gfx942": ComputeUnit(64 * KB, 64 * KB),
    "gfx950": ComputeUnit(160 * KB, 160 * KB),
}


def multiprocessor(capability: int | str) -> Multiprocessor | ComputeUnit:
    """Returns the limits for a compute capability such as 80, or for AMD's "gfx942" or "gfx950". A compute capability
    that is not listed gets the limits of the next lower one that is listed."""
    if isinstance(capability, str):
        return MULTIPROCESSORS[capability]
    older = (known for known in MULTIPROCESSORS if isinstance(known, int) and known <= capability)
    return MULTIPROCESSORS[max(older, default=80)]


def busy_share(programs: int, splits: int, resident: int) -> float:
    """Returns the average share of the device's `resident` blocks that is busy, if all blocks take the same time."""
    blocks = programs * splits
    return blocks / (_waves(blocks, resident) * resident)


@lru_cache(maxsize=4096)
def choose_splits(programs: int, tiles: int, resident: int) -> int:
    """Returns the fastest number of splits among the numbers that keep the share ``FULL`` of the device busy. If
    there is no such number, returns the fastest of all numbers.

    programs: the number of blocks of one split. tiles: key tiles of a sequence. resident: blocks that the device holds
    at once.
    """

    def time(splits: int) -> int:
        waves = _waves(programs * splits, resident)
        return waves * (-(-tiles // splits) + SPLIT_COST) + (COMBINE_COST if splits > 1 else 0)

    numbers = range(1, max(1, min(tiles, MAX_SPLITS)) + 1)
    full = [splits for splits in numbers if busy_share(programs, splits, resident) >= FULL]
    return min(full or numbers, key=time)


def _waves(blocks: int, resident: int) -> int:
    return -(-blocks // resident)
