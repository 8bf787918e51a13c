"""The launch of the forward for sm_90 with TMA (``triton_kernels/hopper_forward.py``).

It serves where ``configs.forward_tma_tile`` has a tile and ``unsupported_reason`` has none; the plain kernel elsewhere.
"""

from __future__ import annotations

import torch
import triton

from ...triton_kernels import configs
from ...triton_kernels.arguments import tensor_view
from . import launcher
from .device import shape_of
from .launcher import cdiv

BLOCK_M = 128  # two warp groups of 64 rows


def serves_triton() -> bool:
    """Whether this version of Triton compiles the kernel: Gluon is experimental and changes between versions."""
    return triton.__version__.startswith("3.6.")


def unsupported_reason(plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Why this kernel cannot serve the call of an ``AttentionPlan``; "" if it can."""
    rotary = plan.rotary
    rotates_pairs_apart = rotary.changes_channels and not rotary.interleaved
    if launcher.interpreted():
        return "Triton's interpreter has no Gluon"
    if not serves_triton():
        return f"it is written for the Gluon of Triton 3.6, this is Triton {triton.__version__}"
    if not 90 <= plan.capability < 100:
        return f"it needs compute capability 9.x, the device has {plan.capability / 10}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, got {q.dtype}"
    if rotary.head_dim not in (64, 128):
        return f"it needs head_dim 64 or 128, got {rotary.head_dim}"
    if v.shape[-1] != rotary.head_dim:
        return f"it needs v as wide as q and k, {rotary.head_dim}, got {v.shape[-1]}"
    if rotates_pairs_apart and rotary.rotary_dim != rotary.head_dim:
        return "it needs rotary_dim equal to head_dim, or interleaved pairs"
    if plan.lowered.maps:
        return "it has no position maps"
    if plan.cu_seqlens.q is not None:
        return "it takes no packed sequences"
    if plan.vec == 1:
        return "it needs addresses and strides that are multiples of 16 bytes"
    if any(size > 1 and stride == 0 for x in (k, v) for size, stride in zip(x.shape, x.stride(), strict=True)):
        return "it needs keys and values without repeated dimensions"
    return ""


def attend(plan, tile: configs.Tile, q, k, rotated_k, v, out, lse) -> None:
    """As ``AttentionPlan.attend``."""
    from ...triton_kernels.hopper_forward import hopper_forward  # Gluon is imported where it is used

    lowered = plan.lowered
    if lowered.k_copies:
        rotated_k = rotated_k.view(-1, *k.shape[1:])
    shape = shape_of(plan.rotary, plan.vec, plan.num_bands, lowered.rotated_bands, 0, BLOCK_M, tile.block_n)
    launcher.launch(
        hopper_forward,
        (cdiv(plan.seqlen_q, BLOCK_M) * plan.batch * plan.heads_q,),
        tensor_view(q),
        descriptor(k, tile.block_n),
        descriptor(rotated_k if lowered.k_copies else k, tile.block_n),
        descriptor(v, tile.block_n),
        out,
        lse,
        plan.scheme,
        plan.seqlen_q,
        plan.seqlen_k,
        plan.batch,
        plan.table_rows,
        plan.heads_q,
        plan.heads_kv,
        STAGES=tile.num_stages,
        SHAPE=shape,
        **configs.options(tile.num_warps),
    )


def descriptor(x: torch.Tensor, block_n: int):
    """x (batch, seqlen, heads, head_dim) for TMA, which reads block_n rows of one head at a time."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ...triton_kernels.hopper_forward import TILE_LAYOUT

    head_dim = x.shape[-1]
    strides = [stride if size > 1 else head_dim for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, block_n, 1, head_dim], TILE_LAYOUT)
