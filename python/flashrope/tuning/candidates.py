"""What is tried for each direction. The tile of configs.py is always among it."""

from __future__ import annotations

import itertools

from ..backends import tuned_tiles as store
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


def default(shape: store.ShapeClass, capability: int) -> Tile:
    """What serves without tuning."""
    return configs.tile(shape.direction, capability, shape.block_d, shape.itemsize, 2 if shape.banded else 1)


def candidates_of(shape: store.ShapeClass, capability: int) -> list[Tile]:
    """All candidates, the default first."""
    return list(dict.fromkeys([default(shape, capability), *tiles(shape.direction)]))
