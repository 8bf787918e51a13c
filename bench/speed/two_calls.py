"""Computes causal ReRoPE by two calls of a library's attention, as a user would without flashrope.

The first call has the near band, the pairs with distances below the window: q and k are rotated, and the call has a
window. The second call has the far band: row i of q[window:] sees keys 0 to i of k[:-window], which is a plain causal
call. There q is rotated by the constant angle of the window, and k is raw. The outputs are merged by the lse of each.
Each backward takes the merged output and lse, with which it returns exactly the band's share of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch

from .problem import Problem, Unavailable

aten = torch.ops.aten


class Library(NamedTuple):
    """Two functions on tensors (batch, seqlen, heads, head_dim), causal.

    forward: (q, k, v, scale, window) -> out, lse (batch, heads, seqlen), what the backward needs. window 0: none.
    backward: (grad, q, k, v, out, lse, kept, scale, window) -> the gradients of q, k and v.
    """

    forward: Callable
    backward: Callable


def _heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def _limits(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def flash_forward(q, k, v, scale, window=0):
    lengths = None, None, q.shape[1], k.shape[1]
    out, lse, *kept = aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False, scale=scale, **_limits(window))
    return out, lse, kept[:2]


def flash_backward(grad, q, k, v, out, lse, kept, scale, window=0):
    lengths = None, None, q.shape[1], k.shape[1]
    return aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, True, *kept, scale=scale, **_limits(window)
    )


def cudnn_forward(q, k, v, scale, window=0):
    out, lse, *lengths, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, True, False, scale=scale
    )
    return out.transpose(1, 2), lse.reshape(lse.shape[:3]), (seed, offset, None, *lengths)


def cudnn_backward(grad, q, k, v, out, lse, kept, scale, window=0):
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(grad, q, k, v, out), lse.unsqueeze(-1), *kept, 0.0, True, scale=scale
    )
    return _heads_first(*grads)


def _mask(q, window: int):
    """Returns the mask of the near band for torch's kernel on the CPU, which has no window."""
    if not window:
        return None
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    return torch.zeros((), dtype=q.dtype).masked_fill((distance < 0) | (distance >= window), float("-inf"))


def cpu_forward(q, k, v, scale, window=0):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(q, k, v), 0.0, not window, attn_mask=_mask(q, window), scale=scale
    )
    return out.transpose(1, 2), lse, ()


def cpu_backward(grad, q, k, v, out, lse, kept, scale, window=0):
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad, q, k, v, out), lse, 0.0, not window, attn_mask=_mask(q, window), scale=scale
    )
    return _heads_first(*grads)


def _module(name: str):
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from None


def flash_attn_3() -> Library:
    """Returns the calls of flash-attn 3. They are not in its documented interface, whose backward takes no lse."""
    module = _module("flash_attn_interface")

    def forward(q, k, v, scale, window=0):
        out, lse, *_ = module._flash_attn_forward(q, k, v, softmax_scale=scale, causal=True, **_limits(window))
        return out, lse, ()

    def backward(grad, q, k, v, out, lse, kept, scale, window=0):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        to = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        module._flash_attn_backward(
            grad, q, k, v, out, lse, **to, softmax_scale=scale, is_causal=True, **_limits(window)
        )
        return grads

    return Library(forward, backward)


def flash_attn_4() -> Library:
    """Returns the calls of flash-attn 4. They are not in its documented interface, whose backward takes no lse."""
    module = _module("flash_attn.cute.interface")

    def forward(q, k, v, scale, window=0):
        options = {"softmax_scale": scale, "causal": True, "return_lse": True}
        out, lse, *_ = module._flash_attn_fwd(q, k, v, **options, **_limits(window))
        return out, lse, ()

    def backward(grad, q, k, v, out, lse, kept, scale, window=0):
        return module._flash_attn_bwd(q, k, v, out, grad, lse, softmax_scale=scale, causal=True, **_limits(window))[:3]

    return Library(forward, backward)


def _twice(library: Callable[[], Library]) -> Callable[[], tuple[Library, Library]]:
    return lambda: (library(),) * 2


FLASH, CUDNN = Library(flash_forward, flash_backward), Library(cudnn_forward, cudnn_backward)
CPU = Library(cpu_forward, cpu_backward)
# Functions that return the libraries of the near and of the far band on a GPU. cuDNN's call in PyTorch has no window.
# The functions raise Unavailable if the library is not installed.
LIBRARIES: dict[str, Callable[[], tuple[Library, Library]]] = {
    "SDPA flash": lambda: (FLASH, FLASH),
    "SDPA cuDNN": lambda: (FLASH, CUDNN),
    "flash-attn 3": _twice(flash_attn_3),
    "flash-attn 4": _twice(flash_attn_4),
}


def merge(near, near_lse, far, far_lse):
    """Returns the output and the lse of both bands. near, far: (batch, rows, heads, head_dim). lse: (batch, heads,
    rows)."""
    lse = torch.logaddexp(near_lse, far_lse)
    near_share, far_share = ((x - lse).exp().transpose(1, 2)[..., None] for x in (near_lse, far_lse))
    return (near * near_share + far * far_share).to(near.dtype), lse


class _TwoBands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, far_q, raw_k, v, window, libraries, merged):
        """q, k: rotated. far_q: the rows of q from `window` on, rotated by the window's angle. libraries: those of the
        near and of the far band. merged: ``merge`` or a compiled form of it."""
        near_library, far_library = libraries
        scale = q.shape[-1] ** -0.5
        far_k, far_v = raw_k[:, :-window].contiguous(), v[:, :-window].contiguous()
        out, lse, near_kept = near_library.forward(q, k, v, scale, window)
        far, far_lse, far_kept = far_library.forward(far_q, far_k, far_v, scale)
        rest, rest_lse = merged(out[:, window:], lse[..., window:], far, far_lse)
        out, lse = torch.cat((out[:, :window], rest), 1), torch.cat((lse[..., :window], rest_lse), -1)
        ctx.save_for_backward(q, k, v, far_q, far_k, far_v, out, lse)
        ctx.rest = window, libraries, scale, near_kept, far_kept
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, far_q, far_k, far_v, out, lse = ctx.saved_tensors
        window, (near_library, far_library), scale, near_kept, far_kept = ctx.rest
        grad = grad.contiguous()
        dq, dk, dv = near_library.backward(grad, q, k, v, out, lse, near_kept, scale, window)
        far_grad, far_out = grad[:, window:].contiguous(), out[:, window:].contiguous()
        far_lse = lse[..., window:].contiguous()
        far_dq, far_dk, far_dv = far_library.backward(far_grad, far_q, far_k, far_v, far_out, far_lse, far_kept, scale)
        dv[:, :-window] += far_dv
        raw_dk = torch.cat((far_dk, far_dk.new_zeros(far_dk.shape[0], window, *far_dk.shape[2:])), 1)
        return dq, dk, far_dq, raw_dk, dv, None, None, None


def two_calls(rotate: Callable, which: str, problem: Problem):
    """Returns a call that computes ReRoPE in two calls. rotate: makes the rotation before them, from a problem and
    positions. which: the entry of ``LIBRARIES``."""
    if not problem.causal:
        raise Unavailable("two calls compute a causal mask; without it three are needed")
    on_cpu = problem.device.type == "cpu"
    if on_cpu and which != "SDPA flash":
        raise Unavailable("needs a CUDA device")
    window = problem.window
    if problem.seqlen <= window:
        raise Unavailable(f"no pair is beyond the window of {window}")
    libraries = (CPU, CPU) if on_cpu else LIBRARIES[which]()
    far_rows = problem.replace(seqlen=problem.seqlen - window)
    near = rotate(problem)
    far = rotate(far_rows, torch.full((far_rows.seqlen,), window, device=problem.device))
    merged = merge if on_cpu else torch.compile(merge, dynamic=False)

    def attend(q, k, v):
        near_q, near_k = near(q, k)
        far_q = far(q[:, window:].contiguous())
        return _TwoBands.apply(near_q, near_k, far_q, k, v, window, libraries, merged)

    return attend
