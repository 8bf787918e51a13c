"""Applies the issue model to a compiled kernel: to its inner loop, and to one whole block. Nothing runs on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import issue, sass
from .architectures import MULTIPROCESSORS

# The matrix products over a tile of scores that a kernel needs: how many as wide as q and k, and how many as wide as v.
PRODUCTS = {
    "attention_forward": (1, 1),
    "attention_chunks": (1, 1),
    "attention_grad_kv": (2, 2),
    "attention_grad_q": (2, 1),
}
ATOMIC_PRODUCTS = (3, 2)
STORED_PRODUCTS = (1, 0)  # of dQ, from stored gradients of scores
MULTIPLY_ADDS = 16 * 8 * 16  # in one HMMA


@dataclass(frozen=True)
class Loop:
    """The inner loop over tiles on one multiprocessor. clocks: for one pass of all resident blocks. waits: as in
    ``issue.Steady``."""

    arch: int
    clocks: float
    blocks: int
    warps: int
    waits: dict[str, float]

    def tensor_share(self, products: float) -> float:
        """Returns the share of the time in which the tensor cores work on needed products, 0 to 1. products: the needed
        HMMA 16x8x16 of one block in one pass. Padding does not count, and a product that several warps compute counts
        once."""
        return products * self.blocks * issue.RATES[self.arch].hmma / issue.SCHEDULERS / self.clocks

    def bytes_per_clock(self, tile_bytes: float) -> float:
        """Returns the bytes that one multiprocessor reads per clock. tile_bytes: the bytes that a block reads in a
        pass."""
        return tile_bytes * self.blocks / self.clocks


@dataclass(frozen=True)
class Block:
    """Clocks of a block when the multiprocessor has as many blocks as fit. fixed: everything outside of tile loops,
    once. inner, edge: a pass through the inner loop, and through the slowest other tile loop."""

    fixed: float
    inner: float
    edge: float
    resident: int

    def clocks(self, inner: float, edge: float) -> float:
        return self.fixed + inner * self.inner + edge * self.edge


def code_of(listing: sass.Listing, arch: int, parts: Sequence[tuple[int, int]]) -> list[issue.Instruction]:
    """Returns the instructions of the given parts (first, last) of a listing."""
    chosen = [at for first, last in parts for at in range(first, last + 1)]
    columns = ([column[at] for at in chosen] for column in (listing.opcodes, listing.operands, listing.controls))
    return issue.decoded(*columns, issue.RATES[arch])


def bounds_of_loops(listing: sass.Listing, whole_tiles: bool = False) -> list[tuple[int, int]]:
    """Returns (first, last) of the tile loops, sorted by instructions per product, fewest first. whole_tiles: a loop
    over tiles may contain other loops. It is recognised by its exponentials, which loops across one product do not
    have."""

    def cost(bounds: tuple[int, int]) -> float:
        counts = mix(bounds)
        return counts["total"] / counts["mma"]

    def mix(bounds: tuple[int, int]):
        return sass.mix(listing.opcodes[bounds[0] : bounds[1] + 1])

    if whole_tiles:
        return sorted((each for each in listing.loops if mix(each)["mma"] and mix(each)["mufu"]), key=cost)
    return sorted(sass.tile_bounds(listing), key=cost)


def resident(arch: int, registers: int, shared: int, warps: int) -> int:
    return MULTIPROCESSORS[arch].resident_blocks(registers, shared, warps)


def inner_loop(
    listing: sass.Listing, arch: int, registers: int, shared: int, warps: int, whole_tiles: bool = False
) -> Loop | None:
    """Returns the inner loop, or None if the model does not apply: there is no loop with tensor-core instructions, the
    architecture is not simulated, or a block does not fit."""
    if arch not in issue.RATES or not listing.controls:
        return None
    found, blocks = bounds_of_loops(listing, whole_tiles), resident(arch, registers, shared, warps)
    if not found or not blocks:
        return None
    steady = issue.steady(code_of(listing, arch, found[:1]), warps, blocks, issue.RATES[arch])
    return Loop(arch, steady.clocks, blocks, warps, steady.waits)


def block(listing: sass.Listing, loop: Loop, whole_tiles: bool = False) -> Block:
    """Returns the whole block around an inner loop."""
    found, rates = bounds_of_loops(listing, whole_tiles), issue.RATES[loop.arch]
    if whole_tiles:  # the other loops contain this one
        found = found[:1]
    edges = [
        issue.Multiprocessor(code_of(listing, loop.arch, [each]), loop.warps, loop.blocks, rates).run(1, 2).clocks
        for each in found[1:]
    ]
    within = {at for first, last in found for at in range(first, last + 1)}
    outside = [(at, at) for at in range(len(listing.opcodes)) if at not in within]
    fixed = issue.once(code_of(listing, loop.arch, outside), loop.warps, loop.blocks, rates)
    return Block(fixed, loop.clocks, max(edges, default=loop.clocks), loop.blocks)


def useful_products(kernel: str, variant, atomic: bool = False, stored: bool = False) -> float | None:
    """Returns how many HMMA 16x8x16 of a block a tile of scores needs, or None for kernels that products do not limit.

    variant: a ``Variant`` of the kernels. atomic: dQ is computed with dK and dV. stored: gradients of scores are
    stored.
    """
    if kernel not in PRODUCTS:
        return None
    if stored and kernel == "attention_grad_q":
        return variant.block_m * variant.block_n * STORED_PRODUCTS[0] * variant.head_dim / MULTIPLY_ADDS
    of_q, of_v = ATOMIC_PRODUCTS if atomic and kernel == "attention_grad_kv" else PRODUCTS[kernel]
    widths = of_q * variant.head_dim + of_v * (variant.head_dim_v or variant.head_dim)
    return variant.block_m * variant.block_n * widths / MULTIPLY_ADDS


def cache_bytes(variant, bits: int = 16) -> int:
    """Returns the bytes of a tile's keys and values. bits: of a number in the cache. Fewer than 16 are quantized, and
    every key and value of a head then has a float32 scale."""
    width = variant.head_dim  # values may be channels of the keys
    if variant.first_value < 0:
        width += variant.head_dim_v or variant.head_dim
    return variant.block_n * (width * bits // 8 + (2 * 4 if bits < 16 else 0))
