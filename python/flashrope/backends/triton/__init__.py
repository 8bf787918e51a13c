"""The Triton backend. ``attention`` and ``cached`` plan the launches, and ``launcher`` starts them.

CPU tensors run in Triton's interpreter if TRITON_INTERPRET=1 was set before the process started.
"""

from __future__ import annotations

import torch

from ...calls.plans import CACHE_OPTIONS

try:
    from ...triton_kernels.configs import family
    from .attention import backward, forward, kept_shapes
    from .cached import plan_cache, unsupported_positions
    from .device import compute_capability
    from .launcher import interpreted
    from .merging_results import merge
    from .rotated import rotate
    from .writing import append_to_cache

    IMPORT_ERROR = ""
except ImportError as error:  # no wheel for this platform
    IMPORT_ERROR = str(error)

__all__ = [
    "CACHE_OPTIONS",
    "append_to_cache",
    "backward",
    "compute_capability",
    "forward",
    "kept_shapes",
    "merge",
    "plan_cache",
    "rotate",
    "unsupported_positions",
    "unsupported_reason",
]


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    """Returns why the Triton kernels cannot serve tensors like q, or ""."""
    if IMPORT_ERROR:
        return f"triton cannot be imported ({IMPORT_ERROR})"
    if q.dtype == torch.float64:
        return "the Triton kernels compute in float32; for float64 use impl='reference' or, on the CPU, impl='sdpa'"
    if q.device.type == "meta":
        return ""
    if interpreted():
        if q.dtype == torch.bfloat16:
            return (
                "Triton's interpreter computes with the bit patterns of bfloat16, so results would be garbage; use "
                f"float16 or float32 there, got {q.dtype}"
            )
        return ""
    if not q.is_cuda:
        return (
            f"the Triton kernels need a CUDA device, q is on {q.device} (on the CPU set TRITON_INTERPRET=1 before "
            "Python starts)"
        )
    try:
        family(compute_capability(q.device))
    except ValueError as error:
        return f"{error} ({q.device})"
    return ""
