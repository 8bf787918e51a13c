"""The torch.library operators: schemas, shapes, autograd, dispatch to an implementation. No maths.

Both operators are opaque, so torch.compile and torch.export keep them whole. The scheme travels as the text of its
Rotary: one constant in a graph, readable in an exported program.
"""

from __future__ import annotations

import torch

from .backends import Call, backend
from .rotary import Rotary

LIBRARY = torch.library.Library("flashrope", "DEF")

_CALL = ("Tensor? positions, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
         "str rotary, bool causal, float softmax_scale, str impl")

# turned_keys is the workspace of rotated keys, kept for the backward; an implementation that has none returns it empty.
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor out, Tensor lse, Tensor turned_keys)")
LIBRARY.define("attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
               f"Tensor lse, Tensor turned_keys, {_CALL}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)")


def _call(positions, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, rotary, causal, softmax_scale) -> Call:
    return Call(Rotary.from_text(rotary), causal, softmax_scale, positions, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _forward(q, k, v, *call_and_impl):
    *call, impl = call_and_impl
    return backend(impl).forward(q, k, v, _call(*call))


def _backward(grad_out, grad_lse, q, k, v, out, lse, turned_keys, *call_and_impl):
    *call, impl = call_and_impl
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    return backend(impl).backward(grad_out, grad_lse, q, k, v, out, lse, turned_keys, _call(*call))


LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("flashrope::attention", lib=LIBRARY)
def _(q, k, v, *call_and_impl):
    *call, impl = call_and_impl
    call = _call(*call)
    workspace = backend(impl).turned_keys_shape(k, call)
    return (torch.empty_like(q, memory_format=torch.contiguous_format),
            q.new_empty(call.lse_shape(q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32),
            k.new_empty(workspace))


@torch.library.register_fake("flashrope::attention_backward", lib=LIBRARY)
def _(grad_out, grad_lse, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, *output, positions, cu_seqlens_q, cu_seqlens_k)


def _grads(ctx, grad_out, grad_lse, _):
    if grad_out is None and grad_lse is None:
        return (None,) * 12
    *tensors, positions, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    grads = torch.ops.flashrope.attention_backward(grad_out, grad_lse, *tensors, positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants)
    return *grads, *(None,) * 9


def _no_second_backward(ctx, *grads):
    raise RuntimeError("flashrope: attention has no second derivative; use impl='reference', which autograd differentiates freely")


torch.library.register_autograd("flashrope::attention", _grads, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("flashrope::attention_backward", _no_second_backward, lib=LIBRARY)
