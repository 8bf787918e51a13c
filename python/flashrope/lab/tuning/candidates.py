"""Lists the candidate tiles of each direction. The tile of configs.py is always one of them."""

from __future__ import annotations

import itertools

from ...backends import tuned_tiles as store
from ...triton_kernels import configs
from ...triton_kernels.configs import Tile

# The kernels that use the tile of a direction.
KERNELS = {
    "forward": "attention_forward",
    "grad_kv": "attention_grad_kv",
    "grad_q": "attention_grad_q",
    "grad_qkv": "attention_grad_kv",
    "decode": "attention_decode",
}


def kernel_of(direction: str, cache: str) -> str:
    """Returns the kernel that uses the tile of a direction. Chunks over a cache have a separate forward kernel."""
    return "attention_chunks" if direction == "forward" and cache else KERNELS[direction]


# block_m (rows of queries), block_n (keys), warps, stages
GRIDS = {
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3)),
    "grad_kv": ((32, 64), (64, 128), (4, 8), (2, 3)),
    "grad_q": ((64, 128), (32, 64), (4, 8), (2, 3)),
    "grad_qkv": ((32, 64), (64, 128), (4, 8), (2, 3)),
    "decode": ((16,), (32, 64, 128), (4, 8), (2, 3, 4)),
}
# Maps (table of configs.py, direction, block_d, whether the scheme has several bands) to tiles whose machine code
# suggests that they are faster than the default. They are tried right after the default. The gate and the executor
# check them as they check defaults. docs/dev/tiles.md has the reasons, and says that a GPU has timed only one of them.
CONTENDERS: dict[tuple[str, str, int, bool], tuple[Tile, ...]] = {
    ("sm80", "grad_qkv", 128, False): (Tile(32, 128, 8, 3),),
    ("sm80", "grad_qkv", 128, True): (Tile(32, 128, 8, 3),),
    ("sm90", "grad_qkv", 128, True): (Tile(64, 128, 8, 3),),
    ("sm90", "forward", 64, False): (Tile(128, 128, 8, 3),),
    ("sm90", "forward", 128, False): (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3, True), Tile(64, 64, 4, 3, True)),
    ("sm90", "forward", 128, True): (Tile(128, 64, 8, 3, True),),
}
# Maps (table of configs.py, direction, block_d, whether the scheme has several bands) to the tiles to try first, the
# best one first. ``python -m bench model --candidates`` prints this order, which it predicts from the machine code.
ORDER: dict[tuple[str, str, int, bool], str] = {
    ("sm80", "forward", 64, False): "128 64 4 3, 64 128 4 3, 128 32 4 3, 128 128 8 3, 128 64 4 2, 128 128 4 3",
    ("sm80", "forward", 64, True): "128 64 4 3, 128 128 8 3, 128 64 4 2, 128 32 4 3, 128 128 4 3, 64 128 4 3",
    ("sm80", "forward", 128, False): "128 32 4 3, 128 128 8 3, 128 64 4 2, 128 32 4 2, 128 64 8 3, 128 128 8 2",
    ("sm80", "forward", 128, True): "128 32 4 3, 128 64 4 2, 128 64 8 3, 128 128 8 2, 128 64 4 3, 128 32 4 2",
    ("sm80", "grad_kv", 64, False): "32 128 4 3, 32 128 4 2, 64 64 4 3, 64 64 4 2, 64 128 8 3, 32 64 4 3",
    ("sm80", "grad_kv", 64, True): "32 128 4 3, 64 128 4 3, 32 128 4 2, 64 64 4 3, 64 128 8 3, 64 64 4 2",
    ("sm80", "grad_kv", 128, False): "64 128 8 3, 32 64 4 3, 64 64 4 2, 32 128 8 3, 64 128 8 2, 32 64 4 2",
    ("sm80", "grad_kv", 128, True): "64 128 8 3, 64 64 4 2, 32 64 4 3, 32 128 8 3, 64 128 8 2, 32 64 4 2",
    ("sm80", "grad_q", 64, False): "128 64 4 3, 128 32 4 3, 64 64 4 3, 128 32 8 3, 64 32 4 3, 64 64 4 2",
    ("sm80", "grad_q", 64, True): "128 32 4 3, 128 64 4 3, 64 64 4 3, 128 64 4 2, 64 32 4 3, 128 64 8 3",
    ("sm80", "grad_q", 128, False): "128 32 4 3, 128 64 4 3, 128 32 4 2, 64 32 4 3, 64 64 4 2, 64 64 4 3",
    ("sm80", "grad_q", 128, True): "128 32 4 3, 128 64 4 3, 128 32 4 2, 128 64 4 2, 64 32 4 3, 64 64 4 3",
    ("sm80", "grad_qkv", 64, False): "32 128 4 3, 64 128 4 3, 64 64 4 3, 64 128 4 2, 32 128 4 2, 64 64 4 2",
    ("sm80", "grad_qkv", 64, True): "32 128 4 3, 64 128 4 2, 64 128 4 3, 32 128 4 2, 64 64 4 3, 64 64 4 2",
    ("sm80", "grad_qkv", 128, False): "64 64 4 2, 32 64 4 3, 64 128 8 3, 32 128 8 3, 64 128 8 2, 32 64 4 2",
    ("sm80", "grad_qkv", 128, True): "64 64 4 2, 64 128 8 3, 32 64 4 3, 32 128 8 3, 64 128 8 2, 32 64 4 2",
    ("sm80", "decode", 64, False): "16 128 4 2, 16 128 4 3, 16 64 4 3, 16 64 4 2, 16 64 4 4, 16 128 8 3",
    ("sm80", "decode", 64, True): "16 128 4 3, 16 128 4 2, 16 64 4 3, 16 64 4 4, 16 128 4 4, 16 64 4 2",
    ("sm80", "decode", 128, False): "16 64 4 3, 16 64 4 2, 16 128 8 3, 16 128 4 3, 16 128 8 2, 16 32 4 3",
    ("sm80", "decode", 128, True): "16 64 4 3, 16 64 4 2, 16 128 8 3, 16 128 4 3, 16 128 8 2, 16 128 4 2",
    ("sm86", "forward", 64, False): "128 64 4 3, 128 64 4 2, 64 32 4 3, 128 32 4 3, 128 128 8 3, 64 128 4 2",
    ("sm86", "forward", 64, True): "128 64 4 3, 128 32 4 3, 128 64 4 2, 128 128 8 3, 64 32 4 3, 128 32 4 2",
    ("sm86", "forward", 128, False): "128 32 4 2, 128 64 8 3, 128 128 8 2, 128 64 8 2, 128 32 4 3, 128 32 8 3",
    ("sm86", "forward", 128, True): "128 32 4 2, 128 64 8 3, 128 128 8 2, 128 64 4 3, 128 64 8 2, 128 32 8 3",
    ("sm86", "grad_kv", 64, False): "32 128 4 3, 32 128 4 2, 64 128 8 3, 64 128 8 2, 64 128 4 2, 32 128 8 3",
    ("sm86", "grad_kv", 64, True): "32 128 4 3, 64 128 4 2, 64 128 8 3, 32 128 4 2, 64 64 4 2, 32 128 8 3",
    ("sm86", "grad_kv", 128, False): "32 128 8 3, 64 128 8 2, 32 128 8 2, 64 128 4 2, 64 64 8 2, 32 64 4 3",
    ("sm86", "grad_kv", 128, True): "32 128 8 3, 64 128 8 2, 32 128 8 2, 64 128 4 2, 32 64 4 3, 32 64 8 3",
    ("sm86", "grad_q", 64, False): "64 32 4 3, 128 64 4 3, 128 32 4 3, 128 32 4 2, 64 32 4 2, 64 64 4 3",
    ("sm86", "grad_q", 64, True): "128 64 4 2, 128 32 4 3, 64 32 4 3, 64 64 4 2, 64 64 4 3, 64 64 8 3",
    ("sm86", "grad_q", 128, False): "128 32 4 3, 64 64 4 2, 128 32 4 2, 64 64 4 3, 64 32 4 3, 128 64 4 2",
    ("sm86", "grad_q", 128, True): "128 64 4 2, 128 32 4 2, 128 32 4 3, 128 64 4 3, 128 64 8 3, 64 32 4 2",
    ("sm86", "grad_qkv", 64, False): "64 64 4 2, 32 128 4 2, 32 64 4 3, 64 128 8 3, 32 64 4 2, 64 128 8 2",
    ("sm86", "grad_qkv", 64, True): "32 128 4 2, 64 64 4 2, 32 64 4 3, 64 128 8 3, 64 64 4 3, 32 64 4 2",
    ("sm86", "grad_qkv", 128, False): "32 128 8 2, 32 64 4 3, 64 64 8 2, 64 64 4 2, 32 64 8 3, 32 128 4 2",
    ("sm86", "grad_qkv", 128, True): "32 128 8 2, 64 64 8 2, 64 64 4 2, 32 64 4 3, 32 128 4 2, 32 64 8 3",
    ("sm86", "decode", 64, False): "16 128 4 2, 16 64 4 3, 16 128 4 3, 16 64 4 2, 16 128 8 3, 16 32 4 4",
    ("sm86", "decode", 64, True): "16 128 4 2, 16 64 4 3, 16 128 4 3, 16 64 4 2, 16 128 8 3, 16 32 4 4",
    ("sm86", "decode", 128, False): "16 64 4 2, 16 128 8 2, 16 32 4 3, 16 64 4 3, 16 128 4 2, 16 64 8 3",
    ("sm86", "decode", 128, True): "16 64 4 2, 16 128 8 2, 16 32 4 3, 16 64 4 3, 16 128 4 2, 16 64 8 3",
}


LIKE = {"sm120": "sm86"}  # for tables that are not in ORDER: the table whose order they use


def tiles(direction: str) -> list[Tile]:
    return [Tile(*numbers) for numbers in itertools.product(*GRIDS[direction])]


def default(shape: store.ShapeClass, capability: int | str) -> Tile:
    """Returns the tile that is used without tuning."""
    bands = 2 if shape.banded else 1
    of_call = {"cache": shape.cache, "max_keys": shape.max_keys}
    return configs.tile(shape.direction, capability, shape.block_d, shape.itemsize, bands, **of_call)


def candidates_of(shape: store.ShapeClass, capability: int | str) -> list[Tile]:
    """Returns all candidates: the default, the tiles of ``CONTENDERS``, the tiles of ``ORDER``, and the others in the
    order of the grid."""
    every = tiles(shape.direction)
    family = configs.family(capability)
    contenders = CONTENDERS.get((family, shape.direction, shape.block_d, shape.banded), ())
    order = ORDER.get((LIKE.get(family, family), shape.direction, shape.block_d, shape.banded), "")
    first = [Tile(*map(int, numbers.split())) for numbers in order.split(",") if numbers]
    ordered = [*contenders, *(tile for tile in first if tile in every), *every]
    return list(dict.fromkeys([default(shape, capability), *ordered]))
