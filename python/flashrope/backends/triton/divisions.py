"""Decides for which heads the decode kernel divides keys into shares, and allocates what shares and splits store."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...triton_kernels import configs
from ...triton_kernels.arguments import Result, Variant, Workspace
from ...triton_kernels.cached.shares import CUT_FIELDS, PIECE_FIELDS, SHARE_FIELDS
from . import launcher
from .device import block_d


class Decode(NamedTuple):
    """The launches of ``attention_decode`` and, if the keys of a sequence can be divided, of the kernel that combines
    its results. num_splits: 0 for shares. partial: the results of several splits. workspace: the Workspace of shares.
    rows: the number of query rows of a tile, for shares."""

    decode: launcher.Launch
    q_strides: tuple[int, int, int]
    num_splits: int
    partial: Result | None = None
    workspace: Workspace | None = None
    combine: launcher.Launch | None = None
    rows: int = 0


class Head(NamedTuple):
    """Properties of a head and a call that decide how many registers the loop over keys needs. itemsize: bytes of an
    element of q. codes: whether the cache is quantized. channels: whether the kernel divides the head into parts.
    shared: whether the kernel divides the head into parts and the values are channels of the keys. wide: whether a tile
    has many query rows."""

    head_dim: int
    itemsize: int
    codes: bool
    channels: bool
    shared: bool
    wide: bool


def shares_fit(head: Head, paged: bool) -> bool:
    """Whether the decode kernel divides keys into shares.

    A program needs some registers to go on to its next piece. If the loop over keys leaves too few, a multiprocessor
    would hold fewer blocks than with splits, or a block of keys would take longer. The loop leaves enough for:

    - float32: 32 to 64 channels, unless the cache is quantized or the tile is wide.
    - 16 bits, below 256 channels: heads of 128 channels always, and heads of 64 if the cache is not quantized and the
      tile is not wide.
    - 16 bits, 256 channels or more: heads in parts. If values are channels of the keys, the head must also have more
      than 512 channels, and if the tile is wide, the cache must be paged.
    """
    small, usual = configs.SHARE_DIMS
    if head.itemsize > 2:
        return small // 2 <= head.head_dim <= small and not head.codes and not head.wide
    if head.head_dim < 2 * configs.CROWDED_PAIRS:
        return head.head_dim == usual or (head.head_dim == small and not head.codes and not head.wide)
    if not head.shared:
        return head.channels
    return head.head_dim > 2 * configs.WIDEST_PAIRS and (paged or not head.wide)


def share_workspace(
    programs: int, segments: int, batch: int, block_m: int, head_dim_v: int, device: torch.device
) -> Workspace:
    """Allocates the tensors that ``plan_shares`` fills, and the partial results of segments that are cut."""

    def numbers(*shape: int, dtype=torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Workspace(
        numbers(programs, SHARE_FIELDS.value),
        numbers(segments + programs, PIECE_FIELDS.value),
        numbers(programs, CUT_FIELDS.value),
        numbers(batch),
        numbers(2 * programs, block_m, head_dim_v, dtype=torch.float32),
        numbers(2 * programs, block_m, dtype=torch.float32),
    )


def combine_launch(kernel, programs: int, head_dim_v: int, block_m: int = 0) -> launcher.Launch:
    """Returns the launch of a kernel that combines results. block_m: number of query rows of a tile, for shares."""
    variant = Variant(head_dim_v, block_d(head_dim_v), block_m=block_m)
    options = {"BLOCK_S": configs.COMBINE_SPLITS, "VARIANT": variant, **configs.options(configs.COMBINE_WARPS)}
    return launcher.Launch(kernel, (programs,), options)
