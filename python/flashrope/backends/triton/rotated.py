"""Rotates queries or keys with the kernel that also rotates keys before the forward."""

from __future__ import annotations

import torch

from ...calls.records import RotateCall
from ...schemes.cos_sin import coarse_rows, position_table, two_level_table
from ...schemes.scales import UNSCALED
from ...triton_kernels import configs
from ...triton_kernels.arguments import NO_CACHE, CacheLayout, SchemeArguments, encode_int, tensor_view
from ...triton_kernels.rotating.rotate import rotate_rows
from . import launcher
from .attention import scalar_positions
from .device import current_device, scheme_on, variant_of, vector_size, with_int32_offsets
from .launcher import cdiv


def rotate(x: torch.Tensor, call: RotateCall) -> torch.Tensor:
    """Rotates x by the positions of the call in one launch, as ``RotateBackend`` describes."""
    x, tables, rotary, positions = with_int32_offsets(x), call.tables, call.rotary, call.positions
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    seqlen, heads, _ = x.shape[-3:]
    batch, max_seqlen, cu_seqlens, cache = x.shape[0], seqlen, None, NO_CACHE
    if tables is not None:
        numbers = map(encode_int, (tables.seqlen_new, call.capacity, 0, 0))
        tensors = (tables.seqlens, None, tables.leftpad, *(None,) * 7)
        cache, cu_seqlens = CacheLayout(*tensors, *numbers), tables.cu_seqlens_q
    if cu_seqlens is not None:
        batch, max_seqlen = cu_seqlens.shape[0] - 1, min(tables.max_seqlen_q, seqlen)
    if positions is None:
        table = two_level_table(rotary, True, coarse_rows(max(call.capacity, seqlen)), x.device)
        table_rows = table.shape[1]
    else:
        table = position_table(rotary, call.position_map.of(positions))
        positions, table_rows = scalar_positions(positions), table.shape[1] * table.shape[2]
    variant = variant_of(rotary, vector_size(x, out), 0, 0, 0, configs.ROTATE_ROWS)
    with current_device(x):
        scheme = scheme_on(rotary, True, x.device)
        launcher.launch(
            rotate_rows,
            (cdiv(max_seqlen, configs.ROTATE_ROWS) * batch, cdiv(heads, configs.ROTATE_HEADS), 1),
            tensor_view(x),
            tensor_view(out),
            scheme.q_rotations,
            SchemeArguments(scheme.bands, table, positions, None, 0.0, *UNSCALED),
            cu_seqlens,
            None,
            seqlen,
            seqlen,
            max_seqlen,
            table_rows,
            heads,
            cache,
            HEADS_PER_PROGRAM=configs.ROTATE_HEADS,
            VARIANT=variant,
            **configs.row_options(configs.ROTATE_WARPS, variant.block_d),
        )
    return out
