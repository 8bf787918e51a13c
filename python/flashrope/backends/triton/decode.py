"""Chooses the tile of ``attention_decode``, and how its loop over keys is compiled, from the case of a plan."""

from __future__ import annotations

from typing import NamedTuple

from ...schemes.head_parts import Part, channel_parts
from ...triton_kernels import configs
from ...triton_kernels.configs import Tile
from ...triton_kernels.rotating.channels import holds_values
from .device import block_d


class DecodeCase(NamedTuple):
    """The properties of a TritonCachePlan that decide the tile of ``attention_decode``.

    parts: ``Variant.channels``, or () if the kernel holds all channels as pairs.
    placed: the caller gave positions of cached tokens.
    crowded: the head has at least CROWDED_PAIRS pairs, which leave few registers.
    codes: the cache is quantized.
    shared: the head has parts, and the values are channels of the keys.
    latent: shared, with more than 512 channels.
    wide: a key head has more than WIDE_ROWS query rows, in the usual call of the plan.
    """

    parts: tuple[Part, ...]
    placed: bool
    crowded: bool
    codes: bool
    shared: bool
    latent: bool
    wide: bool

    @classmethod
    def of(cls, plan, placed: bool) -> DecodeCase:
        pairs, head_dim = plan.table.shape[-1], plan.rotary.head_dim
        padded = head_dim != 2 * pairs and head_dim <= 2 * configs.WIDEST_PAIRS
        whole = plan.quantized or placed or padded
        parts = () if whole else channel_parts(plan.rotary, plan.call.causal)
        shared = plan.first_value >= 0 and len(parts) > 0
        latent = shared and head_dim > 2 * configs.WIDEST_PAIRS
        wide = not plan.call.num_splits and plan.usual_rows > configs.WIDE_ROWS
        # The tile for many rows has 64 rows on sm_90. There, products with values still run when the next block of keys
        # is loaded. A part that rotates has one slot of shared memory, so the next block would overwrite values that
        # these products still read.
        wide = wide and not (latent and _rotates_values(parts[0], plan))
        return cls(parts, placed, pairs >= configs.CROWDED_PAIRS, plan.quantized, shared, latent, wide)

    @property
    def direction(self) -> str:
        """Returns the entry of ``configs`` that has the tile: the first row whose condition holds."""
        rows = (
            (self.latent and self.wide, "decode shared wide"),
            (self.wide, "decode wide"),
            (not self.crowded, "decode"),
            (self.shared, "decode shared"),
            (self.codes or self.placed, "decode codes"),
            (len(self.parts) > 0, "decode parts"),
            (True, "decode"),
        )
        return next(direction for holds, direction in rows if holds)

    def tile(self, plan) -> tuple[Tile, bool, bool]:
        """Returns (tile, ``Variant.aligned_maps``, ``Variant.one_run``)."""
        tile = plan.tile(self.direction, plan.cache, block_d(plan.head_dim_v))
        maps = plan.lowered.maps
        aligned_maps = bool(maps) and not self.placed and _maps_align(plan, tile.block_n)
        if maps and not aligned_maps:
            # Every key has its own row of cos and sin. If these rows were loaded ahead, they would fill shared memory.
            tile = tile._replace(num_stages=1)
        if self.placed:
            tile, one_run = _tile_of_explicit_positions(plan, tile)
            return tile, False, one_run
        return tile, aligned_maps, False

    def shares_fit(self, plan) -> bool:
        """Whether the decode kernel divides keys into shares.

        A program needs some registers to go on to its next piece. If the loop over keys leaves too few, a
        multiprocessor would hold fewer blocks than with splits, or a block of keys would take longer. The loop leaves
        enough for:

        - float32: 32 to 64 channels, unless the cache is quantized or the tile is wide.
        - 16 bits, below 256 channels: heads of 128 channels always, and heads of 64 if the cache is not quantized and
          the tile is not wide.
        - 16 bits, 256 channels or more: heads in parts. If values are channels of the keys, the head must also have
          more than 512 channels, and if the tile is wide, the cache must be paged.

        With explicit positions it leaves too few.
        """
        (small, usual), head_dim = configs.SHARE_DIMS, plan.rotary.head_dim
        if self.placed:
            return False
        if plan.itemsize > 2:
            return small // 2 <= head_dim <= small and not self.codes and not self.wide
        if head_dim < 2 * configs.CROWDED_PAIRS:
            return head_dim == usual or (head_dim == small and not self.codes and not self.wide)
        if not self.shared:
            return len(self.parts) > 0
        return self.latent and (plan.page_size > 0 or not self.wide)

    def key_groups(self, plan, tile: Tile, aligned_maps: bool, shares: bool, weighted: bool) -> int:
        """Returns ``Variant.key_groups``. Groups need a kernel that loads three tiles (the first members of all pairs,
        the second members, and the values) with elements of 16 bits or more, and in which no key has its own row of cos
        and sin."""
        maps_fit = aligned_maps or not plan.lowered.maps
        plain = maps_fit and plan.first_value < 0 and not (self.codes or self.placed or self.parts)
        if not plain or plan.rotary.interleaved:
            return 1
        width = max(2 * plan.table.shape[-1], block_d(plan.head_dim_v))
        return configs.key_groups(tile, plan.capability, width, plan.itemsize, plan.num_bands, shares, weighted)


def _rotates_values(part: Part, plan) -> bool:
    """Whether channels of the part that rotates are values."""
    return holds_values(part.first, part.second, part.width, plan.first_value, plan.head_dim_v)


def _maps_align(plan, block_n: int) -> bool:
    """Whether every tile of block_n keys lies in one chunk, and either lies in one group or holds whole groups."""
    maps = [plan.lowered.maps[rotation] for rotation in plan.lowered.k_copies]
    return all(x.chunk % block_n == 0 and 0 in (x.group % block_n, block_n % x.group) for x in maps)


def _tile_of_explicit_positions(plan, tile: Tile) -> tuple[Tile, bool]:
    """Returns (the tile for explicit positions, whether each tile of keys lies in one page). In one page, consecutive
    keys have consecutive positions. Otherwise every key needs its own rows of cos and sin."""
    if plan.lowered.maps and not plan.stored:
        tile = tile._replace(num_stages=2)  # with more stages, cos and sin of the keys would fill shared memory
    if (plan.stored or plan.lowered.maps) and plan.table.shape[-1] >= configs.EXPLICIT_PAIRS:
        tile = tile._replace(block_n=min(tile.block_n, configs.EXPLICIT_KEYS))
    if not plan.page_size:
        return tile, True
    tile = tile._replace(block_n=min(tile.block_n, plan.page_size))
    if plan.call.tables.leftpad is None and plan.page_size % tile.block_n == 0:
        return tile, True
    return tile._replace(block_n=configs.SMALLEST_TILE, num_stages=1), False
