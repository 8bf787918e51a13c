"""Makes contestants of tiles and of key groups that are not in use, and runs the code of another architecture.

A setting is a context. Compiling, checks and timings of its contestant run inside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

from .contestants import Contestant

FIELDS = tuple(Tile.__annotations__)  # the first four are the numbers that every tile has


def tile_of(text: str) -> tuple[str, Tile]:
    """Reads DIRECTION=block_m,block_n,warps,stages[,FIELD=NUMBER], such as grad_qkv=64,128,8,3.

    Raises ValueError if the text is not of this form, or if tiles have no such field.
    """
    direction, _, numbers = text.partition("=")
    try:
        words = numbers.split(",")
        sizes = dict(zip(FIELDS, map(int, words[:4]), strict=False))
        tile = Tile(**sizes | {name: int(value) for name, value in (word.split("=") for word in words[4:])})
    except (TypeError, ValueError):
        fields = f"{','.join(FIELDS[:4])}[,FIELD=NUMBER]"
        raise ValueError(f"tile: expected DIRECTION={fields}, such as grad_qkv=64,128,8,3, got {text!r}") from None
    return direction, tile


def forced_tile(direction: str, tile: Tile) -> AbstractContextManager[None]:
    from flashrope.backends.triton import chosen_tiles as tiles

    return tiles.forced(direction, tile)


def every_group(tile: Tile, capability: int | str, block_d: int, itemsize: int, *args) -> int:
    """Returns as many groups of keys as warps wherever the tile has room for them."""
    fits = tile.block_m == configs.SMALLEST_TILE and tile.block_n == configs.SMALLEST_TILE * tile.num_warps
    return tile.num_warps if itemsize == 2 and fits else 1


def one_group(*args, **kwargs) -> int:
    return 1


@contextlib.contextmanager
def grouped(rule: Callable[..., int]) -> Iterator[None]:
    """Makes the decode kernel take as many groups of keys as the rule says."""
    before, configs.key_groups = configs.key_groups, rule
    try:
        yield
    finally:
        configs.key_groups = before


def with_setting(contestant: Contestant, what: str, setting: Callable[[], AbstractContextManager]) -> Contestant:
    """Returns the contestant under a setting. It counts as a peer of flashrope, so that ratios compare the two."""
    name = f"{contestant.name.removeprefix('flashrope ')} with {what}"
    return dataclasses.replace(contestant, name=name, ours=False, setting=setting)


def with_tiles(contestants: Sequence[Contestant], texts: Sequence[str], names: Sequence[str]) -> list[Contestant]:
    """Returns one contestant for every tile and every one of flashrope's contestants with one of these names."""
    found = [contestant for contestant in contestants if contestant.name in names]
    return [
        with_setting(contestant, f"tile {text}", partial(forced_tile, *tile_of(text)))
        for contestant in found
        for text in texts
    ]


GROUPS = {  # what to call a rule, the rule, and flashrope's contestants that it is applied to
    "key groups": (every_group, ("RoPE", "ReRoPE")),
    "one key group": (one_group, ("NoPE", "RoPE", "RoPE, paged", "ReRoPE")),
}


def with_groups(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Returns flashrope's decoding with key groups wherever they fit, and without them. For the given contestants,
    ``configs.key_groups`` decides."""
    return [
        with_setting(each, what, partial(grouped, rule))
        for what, (rule, names) in GROUPS.items()
        for each in contestants
        if each.name in [f"flashrope {name}" for name in names]
    ]


def run_code_of(arch: int) -> None:
    """Makes this process choose tiles and kernels of another compute capability. Triton and ptxas must be told too:
    TRITON_OVERRIDE_ARCH, and TRITON_PTXAS_PATH=bench/ptxas90."""
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)


def named_after(arch: int, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Returns the contestants. Where one runs flashrope's kernels, its name then ends with the architecture."""
    return [
        dataclasses.replace(each, name=f"{each.name}, code for sm_{arch}") if each.runs_flashrope else each
        for each in contestants
    ]
