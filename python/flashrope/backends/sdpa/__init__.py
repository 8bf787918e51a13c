"""The backend ``sdpa``: PyTorch's attention kernels over rotated queries and keys.

On the CPU every scheme is divided into pieces that the kernel computes (attention.py, cached.py). On a GPU one or two
calls over whole sequences compute the schemes that have such a form (whole.py). Other devices compute one band.
"""

from __future__ import annotations

import torch

from ...calls.plans import CACHE_OPTIONS
from ...calls.records import AttentionCall, Kept, KeptShapes, refuse
from ..shared.runs import unsupported_positions
from ..shared.step_part import StepPart as part_of
from . import attention, whole
from .cached import attend as attend_part
from .operators import HALF_TYPES, SDPA, Operator, operators_on
from .plan import append_to_cache, plan_cache
from .rotated import rotate

__all__ = [
    "CACHE_OPTIONS",
    "append_to_cache",
    "attend_part",
    "backward",
    "forward",
    "kept_shapes",
    "part_of",
    "plan_cache",
    "rotate",
    "unsupported_positions",
    "unsupported_reason",
]


IN_PIECES = ("cpu", "meta")  # devices whose calls attention.py divides into pieces


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    if q.device.type in IN_PIECES:
        return ""
    if cached:
        return f"over a cache it needs tensors on the CPU, q is on {q.device}; use impl='triton'"
    if q.is_cuda and q.dtype not in HALF_TYPES:
        return f"PyTorch's kernels on a GPU compute in float16 and bfloat16, got {q.dtype}; use impl='triton'"
    return ""


def kept_shapes(k: torch.Tensor, call: AttentionCall) -> KeptShapes:
    """Returns empty shapes on the CPU: to save memory, the backward rotates the keys again, in one pass over k."""
    return KeptShapes() if k.device.type in IN_PIECES else whole.kept_shapes(k, call)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
    """Returns (out, lse, kept), as ``AttentionBackend`` describes."""
    if q.device.type in IN_PIECES:
        return *attention.forward(q, k, v, call), None
    refuse("sdpa", whole.unserved(call) or ("" if q.is_cuda else _unserved_elsewhere(q, k, v, call)))
    return whole.forward(q, k, v, call, _operators(q))


def backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: Kept | None,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of raw q, k and v, as ``AttentionBackend`` describes."""
    if q.device.type in IN_PIECES:
        return attention.backward(grad_out, grad_lse, q, k, v, out, lse, call)
    return whole.backward(grad_out, grad_lse, q, k, v, out, lse, kept, call, _operators(q))


def _unserved_elsewhere(q, k, v, call: AttentionCall) -> str:
    """Returns why a device without operators that return lse, such as XPU or MPS, cannot serve a call, or ""."""
    plain = whole.one_window(call) is None and call.cu_seqlens_q is None and call.positions is None
    if plain and (q.shape[1] == k.shape[1] or not call.causal):
        return ""
    return (
        f"on {q.device.type} PyTorch's kernels compute one band without a window, batches of equal lengths, and no "
        "explicit positions; use impl='reference'"
    )


def _operators(q: torch.Tensor) -> tuple[Operator, ...]:
    if not q.is_cuda:
        return (SDPA,)
    if torch.version.hip:
        return operators_on(None)
    major, minor = torch.cuda.get_device_capability(q.device)
    return operators_on(10 * major + minor)
