"""Computes calls with packed sequences with a backend's functions for batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...calls import addresses
from ...calls.cache_tables import CacheLayer, CacheTables
from ...calls.int8 import stores
from ...calls.records import AttentionCall, unseen


def append_packed(append: Callable, layer: CacheLayer, k, v, tables: CacheTables) -> None:
    """Appends packed k and v with a backend's function for batches. Without slot_mapping the host reads the lengths."""
    if tables.slot_mapping is not None:
        page, row, fits = addresses.mapped_places(tables, layer.k)
        for cache, new in stores(layer, k, v):
            cache.index_put_((page[fits], row[fits]), new[fits])
        return
    for sequences, rows, part in addresses.runs(tables, k.shape[0]):
        own = layer if part.block_table is not None else layer.part(sequences)
        batch = (None if x is None else x[rows].unflatten(0, (part.seqlens.shape[0], -1)) for x in (k, v))
        append(own, *batch, part)


def attend_packed(
    attend: Callable, q, layer: CacheLayer, runs: list, total_q: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with packed q (total_q, heads_q, head_dim) in batches of sequences with equally many queries.

    attend: a function that takes (q of a batch, layer, run) and returns (out, lse). runs: tuples that begin with the
        three items of ``addresses.runs``.
    """
    if len(runs) == 1 and runs[0][1] == slice(0, total_q):  # for example in decoding: nothing to gather
        return _attend_run(attend, q, layer, runs[0])
    out, lse = unseen(q, layer.v)
    for run in runs:
        rows = run[1]
        out[rows], lse[:, rows] = _attend_run(attend, q[rows], layer, run)
    return out, lse


def _attend_run(attend: Callable, q, layer: CacheLayer, run):
    """Returns (out, lse) of the query rows of one run."""
    sequences, _, tables, *_ = run
    if tables.block_table is None:
        layer = layer.part(sequences)
    out, lse = attend(q.view(tables.seqlens.shape[0], -1, *q.shape[1:]), layer, run)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def forward_sequences(attend: Callable, q, k, v, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of ``attention_varlen``, one sequence at a time. The host reads cu_seqlens.

    attend: a function that takes (q, k, v, call) of a batch and returns (out, lse).
    """
    out, lse = unseen(q, v)
    for rows, keys, sequence in call.packed_sequences():
        out[rows], lse[:, rows] = (x[0] for x in attend(q[None, rows], k[None, keys], v[None, keys], sequence))
    return out, lse


def backward_sequences(attend_backward: Callable, grad_out, grad_lse, q, k, v, out, lse, call: AttentionCall):
    """Returns the gradients of q, k and v of ``attention_varlen``, one sequence at a time. The host reads cu_seqlens.

    attend_backward: a function that takes (grad_out, grad_lse, q, k, v, out, lse, call) of a batch.
    """
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for rows, keys, sequence in call.packed_sequences():
        grad_q[rows], grad_k[keys], grad_v[keys] = (
            x[0]
            for x in attend_backward(
                None if grad_out is None else grad_out[None, rows],
                None if grad_lse is None else grad_lse[None, :, rows],
                q[None, rows],
                k[None, keys],
                v[None, keys],
                out[None, rows],
                lse[None, :, rows],
                sequence,
            )
        )
    return grad_q, grad_k, grad_v
