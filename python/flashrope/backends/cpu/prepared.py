"""The layers of a decoding step, each of which appends its new keys and attends: both compiled calls, filled in once.

In an engine with a layer of a millisecond, filling them in for every layer takes a twentieth of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ..calls import CacheCall
from . import decode, loader, rotated
from .library import DTYPES


def prepare(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    call: CacheCall,
) -> Callable[..., None] | None:
    """As in ``PreparingBackend``."""
    library, layout, total = loader.load(), call.layout, q.shape[0]
    if not library or q.dtype not in DTYPES or layout.block_table is None:
        return None
    quantized = layout.k_scale is not None
    if quantized and q.dtype != torch.float32:  # q and out are converted
        return None
    if layout.positions is not None:
        return None
    runs = layout.once("runs", lambda: list(layout.runs(total)))
    if len(runs) != 1 or runs[0][1] != slice(0, total):
        return None
    part, rotary = runs[0][2], None
    if call.rotated_keys:
        call = call.for_backend()
        rotary = call.rotary
    call, sequences = call.with_layout(layout.scale_run(runs[0][0], part)), part.seqlens.shape[0]
    batch = q.view(sequences, -1, *q.shape[1:])
    if not decode.serves(batch, k_cache, call) or not k.numel():
        return None
    lse = q.new_empty((sequences, q.shape[1], batch.shape[1]), dtype=torch.float32)
    append, appended = rotated.describe_append(library, (k_cache, v_cache), (k, v), layout, rotary)
    attend, attended = decode.describe(library, batch, k_cache, v_cache, out.view(batch.shape), lse, call)
    rotate, append_address = library.rotate, ctypes.byref(append)
    used = appended, attended, lse

    def run(q, k_cache, v_cache, k, v, out, k_scale=None, v_scale=None, _used=used) -> None:
        append.x.data, append.v.data = k.data_ptr(), v.data_ptr()
        append.out.data = attend.k.data = k_cache.data_ptr()
        append.v_cache.data = attend.v.data = v_cache.data_ptr()
        attend.q.data, attend.out.data = q.data_ptr(), out.data_ptr()
        if quantized:
            append.k_scale.data = attend.k_scale.data = k_scale.data_ptr()
            append.v_scale.data = attend.v_scale.data = v_scale.data_ptr()
        rotate(append_address)
        decode.run(library, attend)

    return run
