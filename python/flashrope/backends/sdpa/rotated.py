"""Rotates queries or keys with PyTorch's operations, on any device."""

from __future__ import annotations

import torch

from ...calls import addresses
from ...calls.records import RotateCall
from ..shared import host_rotation as rotation
from ..shared.host_rotation import Rotation, table_and_rows
from ..shared.precision import without_autocast


@without_autocast
def rotate(x: torch.Tensor, call: RotateCall) -> torch.Tensor:
    """Rotates x by the positions of the call, as ``RotateBackend`` describes."""
    batch = x if x.ndim == 4 else x[None]
    table, _ = table_and_rows(batch, call)
    if table is None:
        return x.clone(memory_format=torch.contiguous_format)
    if call.tables is not None:
        index = addresses.new_positions(call.tables, call.capacity, *batch.shape[:2]).clamp_(min=0)
        if table.cos.ndim == 3:
            table = Rotation._make(x if x is None else x[index] for x in table)
    table = Rotation._make(part if part is None else part.to(x.device) for part in table)
    return rotation.rotate(batch, table, call.rotary).to(x.dtype).reshape(x.shape).contiguous()
