"""Allocates what the shares and splits of the decode kernel store, and launches what combines them."""

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
