"""Packed queries over a cache, for backends whose functions take batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .calls import CacheCall, CacheLayout, accumulation_type, cached_lse_shape
from .quantized import stores


def append_packed(append: Callable, k_cache, v_cache, k, v, layout: CacheLayout) -> None:
    """``append_to_cache`` of packed k and v by a backend's function for batches; the host reads the lengths."""
    if layout.slot_mapping is not None:
        page, row, fits = layout.mapped_places(k_cache)
        for cache, new in stores(k_cache, v_cache, k, v, layout):
            cache.index_put_((page[fits], row[fits]), new[fits])
        return
    for sequences, rows, part in layout.runs(k.shape[0]):
        caches = (k_cache, v_cache) if part.block_table is not None else (k_cache[sequences], v_cache[sequences])
        batch = (x[rows].unflatten(0, (part.seqlens.shape[0], -1)) for x in (k, v))
        append(*caches, *batch, layout.scale_run(sequences, part))


def attend_packed(attend: Callable, q, k_cache, v_cache, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention_with_cache`` of packed q by a backend's function for batches; the host reads the lengths."""
    runs = call.layout.once("runs", lambda: list(call.layout.runs(q.shape[0])))
    if len(runs) == 1 and runs[0][1].stop - runs[0][1].start == q.shape[0]:  # as in decoding: nothing to gather
        ((sequences, _, part),) = runs
        return _attend_run(attend, q, k_cache, v_cache, call, sequences, part)
    out = q.new_zeros(q.shape)
    lse = q.new_full(cached_lse_shape(q), float("-inf"), dtype=accumulation_type(q))
    for sequences, rows, part in runs:
        out[rows], lse[:, rows] = _attend_run(attend, q[rows], k_cache, v_cache, call, sequences, part)
    return out, lse


def _attend_run(attend: Callable, q, k_cache, v_cache, call: CacheCall, sequences: slice, part: CacheLayout):
    """(out, lse) of the rows q of one of ``CacheLayout.runs``."""
    caches = (k_cache, v_cache) if part.block_table is not None else (k_cache[sequences], v_cache[sequences])
    batch = q.view(part.seqlens.shape[0], -1, *q.shape[1:])
    out, lse = attend(batch, *caches, call.with_layout(call.layout.scale_run(sequences, part)))
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
