"""How the decode kernel divides the keys of a batch: which heads take shares, and what both divisions store."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...triton_kernels import configs
from ...triton_kernels.arguments import Result, Variant, Workspace
from ...triton_kernels.shares import CUT_FIELDS, PIECE_FIELDS, SHARE_FIELDS
from . import launcher
from .device import block_d


class Decode(NamedTuple):
    """The launches of ``attention_decode`` and, if the keys of a sequence can be divided, of the kernel that combines
    its results. num_splits: 0 for shares. partial: results of several splits. workspace: for shares. rows: of a tile of
    queries."""

    decode: launcher.Launch
    q_strides: tuple[int, int, int]
    num_splits: int
    partial: Result | None = None
    workspace: Workspace | None = None
    combine: launcher.Launch | None = None
    rows: int = 0


class Head(NamedTuple):
    """What decides how many registers the loop over keys needs. itemsize: of the queries. codes: the cache is
    quantized. channels: whether the kernel takes the head in parts. shared: values are channels of the keys, in such a
    head. wide: a tile of many query rows."""

    head_dim: int
    itemsize: int
    codes: bool
    channels: bool
    shared: bool
    wide: bool


def shares_fit(head: Head, paged: bool) -> bool:
    """Returns whether the loop over keys leaves the registers that lead a program to its next piece.

    Where it does not, a multiprocessor would hold fewer blocks than with splits, or a block of keys would take longer:
    for 16-bit heads of fewer than 64 channels, of 64 over quantized caches or with many query rows, and of 65 to 255
    other than 128; for float32 outside of 32 to 64 channels; from 256 channels on for heads that the kernel takes
    whole, that hold the values in at most 512 channels, or that have many query rows over contiguous latent caches."""
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
    """Allocates what ``plan_shares`` fills, and the results of segments that are cut."""

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
    """Returns the launch of a kernel that combines results. block_m: the rows of a tile of queries, for shares."""
    variant = Variant(head_dim_v, block_d(head_dim_v), block_m=block_m)
    options = {"BLOCK_S": configs.COMBINE_SPLITS, "VARIANT": variant, **configs.options(configs.COMBINE_WARPS)}
    return launcher.Launch(kernel, (programs,), options)
