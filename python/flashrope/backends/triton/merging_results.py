"""Merges the results of two sets of keys in one launch, for the composition of PyTorch's kernels."""

from __future__ import annotations

import torch

from ...schemes.rotary import Rotary
from ...triton_kernels import configs
from ...triton_kernels.arguments import tensor_view
from ...triton_kernels.attention.merge import merge_rows
from . import launcher
from .device import block_d, current_device, variant_of, vector_size
from .launcher import cdiv


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor, first: int, rotary: Rotary
) -> None:
    """Merges more (batch, rows, heads, head_dim_v) and more_lse (batch, heads, rows) into the rows of out and lse from
    ``first`` on, in place. lse is contiguous.."""
    batch, rows, heads, head_dim_v = more.shape
    fields = 0, 0, 0, configs.STATISTICS_ROWS
    variant = variant_of(rotary, vector_size(out, more), *fields, head_dim_v=head_dim_v)
    with current_device(out):
        launcher.launch(
            merge_rows,
            (cdiv(rows, configs.STATISTICS_ROWS) * batch * heads,),
            tensor_view(out),
            lse,
            tensor_view(more),
            more_lse.contiguous(),
            first,
            rows,
            lse.shape[-1],
            heads,
            VARIANT=variant,
            **configs.row_options(configs.STATISTICS_WARPS, block_d(head_dim_v)),
        )
