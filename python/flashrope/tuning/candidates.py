"""What is tried for each direction. The tile of configs.py is always among it."""

from __future__ import annotations

import itertools

from ..backends import tuned_tiles as store
from ..backends.triton.tiles import TMA, Choice, default
from ..triton_kernels import configs
from ..triton_kernels.configs import Tile

# The kernels that take the tile of a direction.
KERNELS = {
    "forward": "attention_forward",
    "grad_kv": "attention_grad_kv",
    "grad_q": "attention_grad_q",
    "grad_qkv": "attention_grad_kv",
    "decode": "attention_decode",
}
# block_m (rows of queries), block_n (keys), warps, stages
GRIDS = {
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3)),
    "grad_kv": ((32, 64), (64, 128), (4, 8), (2, 3)),
    "grad_q": ((64, 128), (32, 64), (4, 8), (2, 3)),
    "grad_qkv": ((32, 64), (64, 128), (4, 8), (2, 3)),
    "decode": ((16,), (32, 64, 128), (4, 8), (2, 3, 4)),
}


def tiles(direction: str) -> list[Tile]:
    return [Tile(*numbers) for numbers in itertools.product(*GRIDS[direction])]


def choices_of(shape: store.ShapeClass, head_dim: int, capability: int) -> list[Choice]:
    """All candidates, the default first. On sm_90 those of the kernel with TMA are among them."""
    found = [default(shape, capability), *map(Choice, tiles(shape.direction))]
    if shape.direction == "forward" and not shape.cache and 90 <= capability < 100:
        found += [Choice(tile, TMA) for tile in configs.FORWARD_TMA_TILES.get(head_dim, ())]
    return list(dict.fromkeys(found))
