"""Says which of PyTorch's attention operators computes whole sequences on which device.

On the CPU, pieces.py calls torch's flash kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten
HALF_TYPES = (torch.float16, torch.bfloat16)
LSE_ROWS = 256  # rows whose scores are held at once, where lse has to be computed by itself


class PackedLengths(NamedTuple):
    """Packed sequences: q (total_q, heads, head_dim), lse (heads, total_q)."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Problem(NamedTuple):
    """What a call of an operator needs besides its tensors.

    window: each row sees only its last ``window`` keys. None: no window. lengths: None if q is (batch, seqlen, heads,
    head_dim), and lse (batch, heads, seqlen).
    """

    causal: bool
    scale: float
    window: int | None = None
    lengths: PackedLengths | None = None


class Operator(NamedTuple):
    """One of PyTorch's operators.

    forward: (q, k, v, problem) -> (out, lse). backward: (grad_out, q, k, v, out, lse, problem) -> the gradients of q, k
    and v. Keys may have fewer heads than queries. q, k and v have the same head_dim, at most ``head_dim``.
    general: whether it supports windows, packed sequences, and causal calls with seqlen_q != seqlen_k. The last row
        then sees all keys.
    """

    name: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    head_dim: int
    general: bool
    computes_out: bool = False  # the backward computes out again, and does not read what it is given


def is_plain(problem: Problem, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether an operator that is not general computes the problem."""
    if problem.window is not None or problem.lengths is not None:
        return False
    return not problem.causal or seqlen_q == seqlen_k


def readable(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a contiguous copy if its rows do not start at multiples of 16 bytes or if it is expanded. The
    operators below are called without PyTorch's checks."""
    steps = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and stride != 1]
    aligned = all(step * x.element_size() % 16 == 0 for step in (x.storage_offset(), *steps))
    return x if x.stride(-1) == 1 and aligned and 0 not in steps else x.clone(memory_format=torch.contiguous_format)


# ---- cuDNN


def _cudnn_forward(q, k, v, problem: Problem):
    q, k, v = map(readable, (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, problem.causal, False, scale=problem.scale
    )
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def _cudnn_backward(grad_out, q, k, v, out, lse, problem: Problem):
    grad_out, q, k, v, out = map(readable, (grad_out, q, k, v, out))
    seed = lse.new_empty((), dtype=torch.int64)  # of the dropout, which is 0
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(grad_out, q, k, v, out),
        lse.unsqueeze(-1),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        problem.causal,
        scale=problem.scale,
    )
    return tuple(_heads_first(*grads))


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


# ---- FlashAttention-2, or what torch.nn.attention.activate_flash_attention_impl has put in its place


def _flash_arguments(q, k, problem: Problem) -> tuple[tuple, dict[str, Any]]:
    window = {} if problem.window is None else {"window_size_left": problem.window - 1, "window_size_right": 0}
    lengths = problem.lengths or (None, None, q.shape[1], k.shape[1])
    return tuple(lengths), {"scale": problem.scale, **window}


def _flash_forward(q, k, v, problem: Problem):
    q, k, v = map(readable, (q, k, v))
    lengths, options = _flash_arguments(q, k, problem)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, problem.causal, False, **options)
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # the kernel's lse of a row without keys is inf


def _flash_backward(grad_out, q, k, v, out, lse, problem: Problem):
    grad_out, q, k, v, out = map(readable, (grad_out, q, k, v, out))
    lengths, options = _flash_arguments(q, k, problem)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    states = lse.new_empty(2, dtype=torch.uint64), lse.new_empty((), dtype=torch.uint64)  # of the dropout, which is 0
    return aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *lengths, 0.0, problem.causal, *states, **options
    )


# ---- scaled_dot_product_attention, on devices whose operators return no lse


def _sdpa(q, k, v, problem: Problem):
    q, k, v = _heads_first(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=problem.causal, scale=problem.scale, enable_gqa=grouped
    ).transpose(1, 2)


def _sdpa_forward(q, k, v, problem: Problem):
    with torch.no_grad():
        return _sdpa(q, k, v, problem), _lse(q, k, problem)


def _sdpa_backward(grad_out, q, k, v, out, lse, problem: Problem):
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(_sdpa(q, k, v, problem), (q, k, v), grad_out)


def _lse(q, k, problem: Problem) -> torch.Tensor:
    """Returns lse in float32, some rows at a time."""
    keys, found = k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1).float(), []
    for first in range(0, q.shape[1], LSE_ROWS):
        rows = q[:, first : first + LSE_ROWS].transpose(1, 2).float()
        scores = rows @ keys.transpose(-1, -2) * problem.scale
        if problem.causal:
            row = torch.arange(first, first + rows.shape[2], device=q.device)[:, None]
            scores = scores.masked_fill(row < torch.arange(k.shape[1], device=q.device), -torch.inf)
        found.append(scores.logsumexp(-1))
    return torch.cat(found, -1)


CUDNN = Operator("cuDNN", _cudnn_forward, _cudnn_backward, 128, general=False)
FLASH = Operator("FlashAttention-2", _flash_forward, _flash_backward, 256, general=True)
SDPA = Operator("scaled_dot_product_attention", _sdpa_forward, _sdpa_backward, 512, general=False, computes_out=True)


def activated() -> str | None:
    """Returns the name of the FlashAttention that the user has activated in torch, such as "FA3", or None."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current() if current is not None else None


def operators_on(capability: int | None) -> tuple[Operator, ...]:
    """Returns the operators for a GPU, the preferred one first. capability: 90 for 9.0; None: an AMD GPU."""
    if capability is not None and 90 <= capability < 110 and activated() is None:
        return CUDNN, FLASH
    return (FLASH,)


def choose(operators: tuple[Operator, ...], width: int, plain: bool) -> Operator | None:
    """Returns the first operator for this head_dim, or None. plain: the result of ``is_plain``."""
    return next((x for x in operators if width <= x.head_dim and (plain or x.general)), None)
