"""Computes the time of a call from the clocks of its blocks. Multiprocessors take the blocks in the order of launch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .predict import Block


@dataclass(frozen=True)
class Device:
    """Describes a device by its data sheet. clock: boost clock in Hz. bandwidth: bytes per second."""

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float


A100 = Device("A100-SXM4-80GB", 108, 1.41e9, 2.039e12)


@dataclass(frozen=True)
class Problem:
    """Describes a causal self-attention. window: ReRoPE's window, or 0 for a scheme with one band."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    window: int = 0

    @property
    def flops(self) -> float:
        """Returns the floating-point operations of the forward, counted as FlashAttention's authors count them. The
        backward has 2.5 times as many."""
        return 2 * self.batch * self.heads * self.seqlen**2 * self.head_dim

    @property
    def tensor_bytes(self) -> int:
        """Returns the bytes of one tensor such as q, in 16 bits."""
        return 2 * self.batch * self.heads * self.seqlen * self.head_dim


def seconds(device: Device, lengths: Sequence[float], resident: int, rounds: int) -> float:
    """Returns the time in seconds in which a device runs all blocks of `rounds` rounds.

    lengths: the durations of one round's blocks in clocks, in the order in which the blocks start. resident: how many
    blocks a multiprocessor runs at once.
    """
    slots = [0.0] * (device.multiprocessors * resident)
    for _ in range(rounds):
        for length in lengths:
            heapq.heapreplace(slots, slots[0] + length)
    return max(slots) / device.clock


def copy_seconds(device: Device, nbytes: float) -> float:
    """Returns the time in seconds that the device's bandwidth allows for reading and writing `nbytes` in total."""
    return nbytes / device.bandwidth


def _edges(block_m: int, block_n: int, window: int) -> int:
    """Returns how many tiles in a row of tiles lie on the diagonal or on the window's edge."""
    diagonal = max(1, -(-block_m // block_n))
    return diagonal + (diagonal + 1 if window else 0)


def query_tile_lengths(block: Block, problem: Problem, block_m: int, block_n: int) -> list[float]:
    """Returns the clocks of every block that handles a tile of queries, the shortest first. Such a block visits all
    keys up to its own queries."""
    lengths = []
    for first in range(0, problem.seqlen, block_m):
        tiles = -(-min(first + block_m, problem.seqlen) // block_n)
        edges = min(tiles, _edges(block_m, block_n, problem.window))
        lengths.append(block.clocks(tiles - edges, edges))
    return lengths


def key_tile_lengths(block: Block, problem: Problem, block_m: int, block_n: int) -> list[float]:
    """Returns the clocks of every block that handles a tile of keys, the longest first. Such a block visits all queries
    from its own keys on."""
    lengths = []
    for first in range(0, problem.seqlen, block_n):
        tiles = -(-problem.seqlen // block_m) - first // block_m
        edges = min(tiles, _edges(block_n, block_m, problem.window))
        lengths.append(block.clocks(tiles - edges, edges))
    return lengths


def tflops(problem: Problem, factor: float, times: Iterable[float]) -> float:
    """Returns TFLOP/s. factor: 1 for the forward, 2.5 for the backward, 3.5 for both."""
    return factor * problem.flops / sum(times) / 1e12
