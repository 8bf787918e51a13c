"""Says what the compiled kernels serve. Each function returns the reason why they do not, or ""."""

from __future__ import annotations

import torch

from ...calls.cache_tables import CacheLayer
from ...calls.records import AttentionCall, CacheCall, RotateCall
from ...schemes.bands import Band, have_maps
from ..shared.runs import Placed
from . import loader
from .library import DTYPES, MAX_BANDS, MAX_HEAD_DIM


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    if q.device.type != "cpu":
        return f"it needs tensors on the CPU, q is on {q.device}"
    if q.dtype not in DTYPES:
        return f"the compiled kernels compute in float32, bfloat16 and float16, got {q.dtype}; use impl='sdpa'"
    return loader.missing()


def unserved_attention(q: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> str:
    return unsupported_reason(q) or _unserved_scheme(max(q.shape[-1], v.shape[-1]), call.bands)


def unserved_rotation(x: torch.Tensor, call: RotateCall) -> str:
    return unsupported_reason(x) or _unserved_scheme(x.shape[-1], ())


def unserved_cache(q, layer: CacheLayer, call: CacheCall) -> str:
    """q: a tensor, or ``plans.Queries``."""
    reason = unsupported_reason(q, True) or _unserved_scheme(max(q.shape[-1], layer.v.shape[-1]), call.bands)
    if reason or call.tables.positions is None:
        return reason
    # position maps need absolute positions, but positions in a run are relative to its first key
    if call.rotary.axis or have_maps(call.bands):
        kind = "positions of several axes" if call.rotary.axis else "maps of positions (Self-Extend, dual chunk)"
        return f"its kernels do not support {kind} over explicit positions of cached tokens; use impl='sdpa'"
    return ""


def unserved_runs(placed: list[Placed]) -> str:
    """placed: the sequences of a call with explicit positions."""
    for b, sequence in enumerate(placed):
        if not sequence.long_runs:
            return (
                f"sequence {b} has {len(sequence.keys)} runs of consecutive positions among {sequence.seqlen} keys, "
                "for which masks are faster; use impl='sdpa'"
            )
    return ""


def _unserved_scheme(width: int, bands: tuple[Band, ...]) -> str:
    if width > MAX_HEAD_DIM:
        return f"its kernels support head_dim up to {MAX_HEAD_DIM}, got {width}; use impl='sdpa'"
    if len(bands) > MAX_BANDS:
        return f"its kernels support schemes of up to {MAX_BANDS} bands, got {len(bands)}; use impl='sdpa'"
    return ""
