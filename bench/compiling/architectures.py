"""Limits of one streaming multiprocessor, by architecture."""

from __future__ import annotations

import dataclasses

KB = 1024


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

    shared_per_block: int  # bytes
    shared: int  # bytes
    threads: int
    blocks: int

    def resident_blocks(self, registers: int, shared: int, warps: int) -> int:
        """How many blocks fit at once. registers: per thread; shared: bytes per block; warps: per block."""
        registers_per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
        return min(
            65536 // registers_per_warp // warps,
            self.shared // (shared + KB),  # CUDA itself takes 1 KB per block
            self.threads // (32 * warps),
            self.blocks,
        )


MULTIPROCESSORS = {
    80: Multiprocessor(163 * KB, 164 * KB, 2048, 32),
    86: Multiprocessor(99 * KB, 100 * KB, 1536, 16),
    89: Multiprocessor(99 * KB, 100 * KB, 1536, 24),
    90: Multiprocessor(227 * KB, 228 * KB, 2048, 32),
}
# Bytes of shared memory per block, also for architectures that the gate does not compile for.
SHARED = {arch: limits.shared_per_block for arch, limits in MULTIPROCESSORS.items()} | {120: 99 * KB}
