"""The torch.library operators: schemas, shapes, autograd, dispatch to an implementation. No maths.

The operators are opaque, so torch.compile and torch.export keep them whole. The scheme travels as the text of its
Rotary: one constant in a graph, readable in an exported program.
"""

from __future__ import annotations

import torch

from .backends import CacheCall, AttentionCall, load_backend
from .rotary import Rotary

try:  # Hugging Face's kernel-builder gives every build a namespace of its own, so that several load side by side
    from ._ops import add_op_namespace_prefix
except ImportError:

    def add_op_namespace_prefix(op_name: str) -> str:
        return f"flashrope::{op_name}"


NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
OPERATORS = getattr(torch.ops, NAMESPACE)
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_CALL = (
    "Tensor? positions, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "str rotary, bool causal, float softmax_scale, str impl"
)

# rotated_k is the workspace of rotated keys, kept for the backward; empty where an implementation has none.
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor out, Tensor lse, Tensor rotated_k)")
LIBRARY.define(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, Tensor rotated_k, {_CALL}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


# Two operators: one writes into the caches, the other only reads them.
_CACHE = "Tensor cache_seqlens, Tensor? block_table"
LIBRARY.define(f"append_to_cache(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, {_CACHE}, str impl) -> ()")
LIBRARY.define(
    f"attention_with_cache(Tensor q, Tensor k_cache, Tensor v_cache, {_CACHE}, Tensor? cache_leftpad, "
    "SymInt seqlen_new, int num_splits, str rotary, bool causal, float softmax_scale, str impl) "
    "-> (Tensor out, Tensor lse)"
)


def _call(
    positions, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, rotary, causal, softmax_scale
) -> AttentionCall:
    return AttentionCall(
        Rotary.from_text(rotary),
        causal,
        softmax_scale,
        positions,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
    )


def _forward(q, k, v, *call_and_impl):
    *call, impl = call_and_impl
    out, lse, rotated_k = load_backend(impl).forward(q, k, v, _call(*call))
    return out, lse, k.new_empty(0) if rotated_k is None else rotated_k


def _backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, *call_and_impl):
    *call, impl = call_and_impl
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    return load_backend(impl).backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, _call(*call))


def _append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table, impl):
    load_backend(impl).append_to_cache(k_cache, v_cache, k, v, cache_seqlens, block_table)


def _attention_with_cache(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    block_table,
    cache_leftpad,
    seqlen_new,
    num_splits,
    rotary,
    causal,
    softmax_scale,
    impl,
):
    call = CacheCall(
        Rotary.from_text(rotary),
        causal,
        softmax_scale,
        cache_seqlens,
        seqlen_new,
        block_table,
        cache_leftpad,
        num_splits,
    )
    return load_backend(impl).attention_with_cache(q, k_cache, v_cache, call)


LIBRARY.impl("append_to_cache", _append_to_cache, "CompositeExplicitAutograd")
LIBRARY.impl("attention_with_cache", _attention_with_cache, "CompositeExplicitAutograd")
LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake(add_op_namespace_prefix("attention"), lib=LIBRARY)
def _(q, k, v, *call_and_impl):
    *call, impl = call_and_impl
    call = _call(*call)
    workspace = load_backend(impl).rotated_k_shape(k, call)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(call.lse_shape(q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32),
        k.new_empty(workspace),
    )


@torch.library.register_fake(add_op_namespace_prefix("attention_backward"), lib=LIBRARY)
def _(grad_out, grad_lse, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@torch.library.register_fake(add_op_namespace_prefix("append_to_cache"), lib=LIBRARY)
def _(*_):
    return None


@torch.library.register_fake(add_op_namespace_prefix("attention_with_cache"), lib=LIBRARY)
def _(q, *_):
    batch, seqlen_q, heads_q, _ = q.shape
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(batch, heads_q, seqlen_q, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32),
    )


def _save(ctx, inputs, output):
    q, k, v, positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, *output, positions, cu_seqlens_q, cu_seqlens_k)


def _grads(ctx, grad_out, grad_lse, _):
    if grad_out is None and grad_lse is None:
        return (None,) * 12
    *tensors, positions, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    grads = [
        grad for grad in (grad_out, grad_lse) if grad is not None
    ]  # a collective's result is a subclass of its own
    backward = OPERATORS.attention_backward if torch.is_grad_enabled() or not _plain(*tensors, *grads) else _backward
    grads = backward(grad_out, grad_lse, *tensors, positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants)
    return *grads, *(None,) * 9


def _no_second_backward(ctx, *grads):
    raise RuntimeError(
        "flashrope: attention has no second derivative; use impl='reference', which autograd differentiates freely"
    )


torch.library.register_autograd(add_op_namespace_prefix("attention"), _grads, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(add_op_namespace_prefix("attention_backward"), _no_second_backward, lib=LIBRARY)


class _Eager(torch.autograd.Function):
    """The operator's own functions without torch.library around them. A setup_context of its own would cost a look at
    the signature in every call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *grads):
        return _grads(ctx, *grads)


def attention(q, k, v, *call_and_impl):
    """out and lse of flashrope::attention. In plain eager mode past the dispatcher, whose Python layers take longer
    than a short call does."""
    if not _plain(q, k, v):
        return OPERATORS.attention(q, k, v, *call_and_impl)[:2]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Eager.apply(q, k, v, *call_and_impl)[:2]
    *call, impl = call_and_impl
    return load_backend(impl).forward(q, k, v, _call(*call))[:2]


def append_to_cache(k_cache, v_cache, k, v, *rest):
    """flashrope::append_to_cache, past the dispatcher in plain eager mode."""
    call = _append_to_cache if _plain(k_cache, v_cache, k, v) else OPERATORS.append_to_cache
    call(k_cache, v_cache, k, v, *rest)


def attention_with_cache(q, k_cache, v_cache, cache_seqlens, k, v, block_table, cache_leftpad, *rest):
    """flashrope::append_to_cache where there are new keys, then flashrope::attention_with_cache; past the dispatcher in
    plain eager mode."""
    seqlen_new = 0 if k is None else k.shape[1]
    plain = (
        _plain(q, k_cache, v_cache, cache_seqlens) if k is None else _plain(q, k_cache, v_cache, cache_seqlens, k, v)
    )
    if seqlen_new:
        append = _append_to_cache if plain else OPERATORS.append_to_cache
        append(k_cache, v_cache, k, v, cache_seqlens, block_table, rest[-1])
    attend = _attention_with_cache if plain else OPERATORS.attention_with_cache
    return attend(q, k_cache, v_cache, cache_seqlens, block_table, cache_leftpad, seqlen_new, *rest)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _plain(*tensors: torch.Tensor) -> bool:
    """Nobody is watching: no compiler, tracer, mode, transform or tensor subclass that needs to see the operator."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and _PLAIN.issuperset(map(type, tensors))
    )
