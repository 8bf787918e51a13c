"""Chooses the tile of a launch: the tile that ``flashrope tune`` has found for such calls on this device, or the
default of configs.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache, lru_cache

import torch
import triton

from ..._version import __version__
from ...triton_kernels import configs
from ...triton_kernels.configs import Tile
from .. import tuned_tiles as store

# Directions that are tuned and forced under the name of another direction. A call launches the kernel of only one of
# the two directions, depending on its sizes.
TUNED_AS = {"grad_q scores": "grad_q"}


@lru_cache(maxsize=4096)
def choose(
    direction: str,
    device: torch.device,
    capability: int | str,
    block_d: int,
    itemsize: int,
    num_bands: int,
    keys: int,
    grouped: bool,
    cache: str = "",
    block_dv: int = 0,
) -> Tile:
    """Returns the tile of a launch. All launches that have a tile get it from this function.

    keys: the length of the longest sequence of keys, or the capacity of the cache. cache: as in ``store.ShapeClass``.
    block_dv: 0 means that it equals block_d. The other arguments are those of ``configs.tile``. If v has a different
    head_dim than k, the default tile is used, because such calls are not tuned.
    """
    tuned_as = TUNED_AS.get(direction, direction)
    if tuned_as in _forced:
        return _forced[tuned_as]
    max_keys = store.max_keys(keys)
    if block_dv in (0, block_d):
        shape = store.ShapeClass(tuned_as, block_d, itemsize, num_bands > 1, cache, grouped, max_keys)
        if winner := store.tuned().get(setup_of(device, capability), {}).get(shape):
            return Tile(*winner.tile)
    return configs.tile(direction, capability, block_d, itemsize, num_bands, block_dv, cache, max_keys)


_forced: dict[str, Tile] = {}


@contextlib.contextmanager
def forced(direction: str, tile: Tile) -> Iterator[None]:
    """Makes ``choose`` return this tile for this direction inside the with statement. Tuning measures candidates this
    way."""
    before = dict(_forced)
    _forced[direction] = tile
    choose.cache_clear()
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
        choose.cache_clear()


@cache
def setup_of(device: torch.device, capability: int | str) -> store.Setup:
    """Returns the setup of this device. A tile is used only in the setup in which it was tuned."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return store.Setup(name, capability, triton.__version__, __version__)
