"""Applies the issue model to the inner loop of a compiled kernel. Nothing runs on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import issue, sass
from .architectures import MULTIPROCESSORS

# {kernel: (n, m)}: for a tile of scores the kernel needs n matrix products over the channels of q and k, and m over the
# channels of v.
PRODUCTS = {
    "attention_forward": (1, 1),
    "attention_chunks": (1, 1),
    "attention_grad_kv": (2, 2),
    "attention_grad_q": (2, 1),
}
ATOMIC_PRODUCTS = (3, 2)
STORED_PRODUCTS = (1, 0)  # the same for the dQ kernel if the gradients of scores were stored
MULTIPLY_ADDS = 16 * 8 * 16  # multiply-adds of one HMMA


@dataclass(frozen=True)
class Loop:
    """Describes the inner loop over tiles on one multiprocessor. clocks: the time in which all resident blocks make one
    pass. waits: {entry of ``issue.WAITS``: its share of the schedulers' clocks}."""

    arch: int
    clocks: float
    blocks: int
    warps: int
    waits: dict[str, float]

    def tensor_share(self, products: float) -> float:
        """Returns the share of the time, 0 to 1, in which the tensor cores work on needed products.

        products: how many HMMA 16x8x16 one block needs in one pass. Padding does not count, and a product that several
        warps compute counts once.
        """
        return products * self.blocks * issue.RATES[self.arch].hmma / issue.SCHEDULERS / self.clocks

    def bytes_per_clock(self, tile_bytes: float) -> float:
        """Returns the bytes that one multiprocessor reads per clock. tile_bytes: the bytes that a block reads in a
        pass."""
        return tile_bytes * self.blocks / self.clocks


def code_of(listing: sass.Listing, arch: int, parts: Sequence[tuple[int, int]]) -> list[issue.Instruction]:
    """Returns the instructions of the given parts (first, last) of a listing."""
    chosen = [at for first, last in parts for at in range(first, last + 1)]
    columns = ([column[at] for at in chosen] for column in (listing.opcodes, listing.operands, listing.controls))
    return issue.decoded(*columns, issue.RATES[arch])


def bounds_of_loops(listing: sass.Listing, whole_tiles: bool = False) -> list[tuple[int, int]]:
    """Returns (first, last) of every tile loop, sorted by instructions per product, fewest first.

    whole_tiles: a loop over tiles may contain other loops. It is then recognised by its exponentials, because the loops
    inside a product have none. Default: a tile loop is an innermost loop with tensor-core instructions.
    """

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
    """Simulates the inner loop of a kernel. Returns None if there is no loop with tensor-core instructions, if the
    architecture is not simulated, or if a block does not fit on a multiprocessor."""
    if arch not in issue.RATES or not listing.controls:
        return None
    found, blocks = bounds_of_loops(listing, whole_tiles), resident(arch, registers, shared, warps)
    if not found or not blocks:
        return None
    steady = issue.steady(code_of(listing, arch, found[:1]), warps, blocks, issue.RATES[arch])
    return Loop(arch, steady.clocks, blocks, warps, steady.waits)


def useful_products(kernel: str, variant, atomic: bool = False, stored: bool = False) -> float | None:
    """Returns how many HMMA 16x8x16 a block needs for one tile of scores, or None for kernels whose speed is not
    limited by products.

    variant: the kernel's ``Variant``. atomic: whether dQ is computed together with dK and dV. stored: whether the
    gradients of scores are stored.
    """
    if kernel not in PRODUCTS:
        return None
    if stored and kernel == "attention_grad_q":
        return variant.block_m * variant.block_n * STORED_PRODUCTS[0] * variant.head_dim / MULTIPLY_ADDS
    of_q, of_v = ATOMIC_PRODUCTS if atomic and kernel == "attention_grad_kv" else PRODUCTS[kernel]
    widths = of_q * variant.head_dim + of_v * (variant.head_dim_v or variant.head_dim)
    return variant.block_m * variant.block_n * widths / MULTIPLY_ADDS


def cache_bytes(variant, quantized: bool = False) -> int:
    """Returns the bytes of a tile's keys and values. In a quantized cache a number has one byte, and every key and
    every value of a head also has a float32 scale. In other caches a number has 16 bits."""
    width = variant.head_dim  # values may be channels of the keys
    if variant.first_value < 0:
        width += variant.head_dim_v or variant.head_dim
    return variant.block_n * (width + 2 * 4 if quantized else 2 * width)
