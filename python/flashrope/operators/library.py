"""The torch.library operators: schemas, shapes, autograd, dispatch to a backend. No maths.

The operators are opaque, so torch.compile and torch.export keep them whole. The scheme travels as the text of its
Rotary: one constant in a graph, readable in an exported program.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..backends.calls import (
    ONE_PER_QUERY,
    AttentionCall,
    CacheCall,
    CacheLayout,
    Kept,
    accumulation_type,
    cached_lse_shape,
    out_shape,
)
from ..backends.registry import DIFFERENTIABLE, check_backend, load_backend
from ..rotary.rotary import Rotary
from . import autograd as transforms

try:  # Hugging Face's kernel-builder gives every build a namespace of its own, so that several load side by side
    from .._ops import add_op_namespace_prefix
except ImportError:

    def add_op_namespace_prefix(op_name: str) -> str:
        return f"flashrope::{op_name}"


NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
OPERATORS = getattr(torch.ops, NAMESPACE)
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_CALL = (
    "Tensor? positions, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "str rotary, bool causal, float softmax_scale, bool deterministic, str impl"
)

# rotated_k, table: what the backward needs again (calls.Kept); empty where a backend keeps none.
LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor out, Tensor lse, Tensor rotated_k, Tensor table)"
)
LIBRARY.define(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, Tensor rotated_k, Tensor table, {_CALL}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


# Two operators: the first writes to the caches, the second only reads them.
LIBRARY.define(
    "append_to_cache(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? block_table, Tensor? cu_seqlens_q, Tensor? slot_mapping, SymInt max_seqlen_q, str impl) -> ()"
)
LIBRARY.define(
    "attention_with_cache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, "
    "Tensor? cache_leftpad, SymInt seqlen_new, Tensor? cu_seqlens_q, SymInt max_seqlen_q, int num_splits, str rotary, "
    "bool causal, float softmax_scale, str impl) -> (Tensor out, Tensor lse)"
)


def call_from_arguments(
    positions, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, rotary, causal, softmax_scale, deterministic
) -> AttentionCall:
    """The call that the operators' arguments from positions to deterministic describe; rotary is text."""
    lengths, scheme = (max_seqlen_q, max_seqlen_k), (Rotary.from_text(rotary), causal, softmax_scale)
    return AttentionCall(*scheme, positions, cu_seqlens_q, cu_seqlens_k, *lengths, deterministic)


def _arguments(call: AttentionCall) -> tuple:
    """The inverse of ``call_from_arguments``."""
    tensors = (call.positions, call.cu_seqlens_q, call.cu_seqlens_k)
    scheme = (call.rotary.text, call.causal, call.softmax_scale)
    return (*tensors, call.max_seqlen_q, call.max_seqlen_k, *scheme, call.deterministic)


# ---- what the operators do


def _attention(q, k, v, *arguments):
    *arguments, impl = arguments
    out, lse, kept = load_backend(impl).forward(q, k, v, call_from_arguments(*arguments))
    return out, lse, *(kept or _nothing_kept(k))


def _nothing_kept(k) -> Kept:
    return Kept(k.new_empty(0), k.new_empty(0, dtype=torch.float32))


def _attention_backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, table, *arguments):
    *arguments, impl = arguments
    call = call_from_arguments(*arguments)
    return _run_backward(load_backend(impl), grad_out, grad_lse, (q, k, v, out, lse), Kept(rotated_k, table), call)


def _run_backward(backend, grad_out, grad_lse, saved, kept: Kept | None, call: AttentionCall):
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    return backend.backward(grad_out, grad_lse, *saved, kept, call)


def _append_to_cache(
    k_cache, v_cache, k, v, cache_seqlens, block_table, cu_seqlens_q, slot_mapping, max_seqlen_q, impl
):
    seqlen_new = k.shape[1] if cu_seqlens_q is None else ONE_PER_QUERY
    layout = CacheLayout(cache_seqlens, block_table, None, seqlen_new, cu_seqlens_q, slot_mapping, max_seqlen_q)
    load_backend(impl).append_to_cache(k_cache, v_cache, k, v, layout)


def _attention_with_cache(q, k_cache, v_cache, cache_seqlens, block_table, cache_leftpad, seqlen_new, *arguments):
    cu_seqlens_q, max_seqlen_q, num_splits, rotary, causal, scale, impl = arguments
    layout = CacheLayout(cache_seqlens, block_table, cache_leftpad, seqlen_new, cu_seqlens_q, None, max_seqlen_q)
    call = CacheCall(Rotary.from_text(rotary), causal, scale, layout, num_splits)
    return load_backend(impl).attention_with_cache(q, k_cache, v_cache, call)


LIBRARY.impl("append_to_cache", _append_to_cache, "CompositeExplicitAutograd")
LIBRARY.impl("attention_with_cache", _attention_with_cache, "CompositeExplicitAutograd")
LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")


# ---- shapes, for tracing


@torch.library.register_fake(add_op_namespace_prefix("attention"), lib=LIBRARY)
def _(q, k, v, *arguments):
    *arguments, impl = arguments
    check_backend(impl, q)
    call = call_from_arguments(*arguments)
    out = q.new_empty(out_shape(q, v))
    lse = q.new_empty(call.lse_shape(q), dtype=accumulation_type(q))
    shapes = load_backend(impl).kept_shapes(k, call)
    return out, lse, k.new_empty(shapes.rotated_k), k.new_empty(shapes.table, dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("attention_backward"), lib=LIBRARY)
def _(grad_out, grad_lse, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@torch.library.register_fake(add_op_namespace_prefix("append_to_cache"), lib=LIBRARY)
def _(*_):
    return None


@torch.library.register_fake(add_op_namespace_prefix("attention_with_cache"), lib=LIBRARY)
def _(q, *arguments):
    check_backend(arguments[-1], q, cached=True)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(cached_lse_shape(q), dtype=accumulation_type(q))


# ---- autograd of the operators


def _save(ctx, inputs, output):
    q, k, v, positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output, positions, cu_seqlens_q, cu_seqlens_k)


def _grads(ctx, grad_out, grad_lse, *_):
    if grad_out is None and grad_lse is None:
        return (None,) * 13
    *saved, positions, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    arguments = (positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants)
    grads = OPERATORS.attention_backward(grad_out, grad_lse, *saved, *arguments)
    return *grads, *(None,) * 10


torch.library.register_autograd(add_op_namespace_prefix("attention"), _grads, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    add_op_namespace_prefix("attention_backward"), transforms.no_second_derivative, lib=LIBRARY
)


def _no_gradient(ctx, *grads):
    raise RuntimeError("flashrope: attention over a cache has no gradient; use attention in training")


torch.library.register_autograd(add_op_namespace_prefix("attention_with_cache"), _no_gradient, lib=LIBRARY)


# ---- the calls that api.py makes
# In plain eager mode they go straight to the backend: torch.library's Python layers take longer than a short call does.


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call: AttentionCall, impl: str):
        out, lse, kept = load_backend(impl).forward(q, k, v, call)
        ctx.call, ctx.impl = call, impl
        ctx.set_materialize_grads(False)
        # The last three: autograd then notices if they change before backward runs.
        arguments = (call.positions, call.cu_seqlens_q, call.cu_seqlens_k)
        ctx.save_for_backward(q, k, v, out, lse, *(kept or (None, None)), *arguments)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        *saved, rotated_k, table = ctx.saved_tensors[:7]
        call, kept = ctx.call, None if rotated_k is None else Kept(rotated_k, table)
        # The result of a collective is a tensor subclass; create_graph=True asks for a second derivative.
        tensors = (x for x in (grad_out, grad_lse, *saved) if x is not None)
        if _is_plain(*tensors) and not torch.is_grad_enabled():
            grads = _run_backward(load_backend(ctx.impl), grad_out, grad_lse, saved, kept, call)
        else:
            saved += kept or _nothing_kept(saved[1])
            grads = OPERATORS.attention_backward(grad_out, grad_lse, *saved, *_arguments(call), ctx.impl)
        return *grads, None, None


def attention(q, k, v, call: AttentionCall, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of ``flashrope::attention``."""
    if impl in DIFFERENTIABLE:
        return load_backend(impl).forward(q, k, v, call)[:2]
    if not _is_plain(q, k, v):
        through = transforms.attention if transforms.transforming() else OPERATORS.attention
        return through(q, k, v, *_arguments(call), impl)[:2]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _EagerAttention.apply(q, k, v, call, impl)
    return load_backend(impl).forward(q, k, v, call)[:2]


def append_to_cache(k_cache, v_cache, k, v, layout: CacheLayout, impl: str) -> None:
    """``flashrope::append_to_cache``."""
    if _is_plain(k_cache, v_cache, k, v, layout.seqlens):
        load_backend(impl).append_to_cache(k_cache, v_cache, k, v, layout)
        return
    packed = (layout.cu_seqlens_q, layout.slot_mapping, layout.max_seqlen_q)
    OPERATORS.append_to_cache(k_cache, v_cache, k, v, layout.seqlens, layout.block_table, *packed, impl)


def attention_with_cache(q, k_cache, v_cache, k, v, call: CacheCall, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashrope::append_to_cache`` if there are new keys, then ``flashrope::attention_with_cache``."""
    layout = call.layout
    new = (k, v) if k is not None and k.shape[-3] else ()
    if _is_plain(q, k_cache, v_cache, layout.seqlens, *new):
        backend = load_backend(impl)
        if new:
            backend.append_to_cache(k_cache, v_cache, k, v, layout)
        return backend.attention_with_cache(q, k_cache, v_cache, call)
    if transforms.transforming():
        transforms.check_no_tangents(q, k_cache, v_cache, *new)
    if new:
        append_to_cache(k_cache, v_cache, k, v, layout, impl)
    tables = (layout.seqlens, layout.block_table, layout.leftpad, layout.seqlen_new)
    packed = (layout.cu_seqlens_q, layout.max_seqlen_q)
    scheme = (call.rotary.text, call.causal, call.softmax_scale)
    return OPERATORS.attention_with_cache(q, k_cache, v_cache, *tables, *packed, call.num_splits, *scheme, impl)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_plain(*tensors: torch.Tensor) -> bool:
    """No compiler, tracer, mode, transform or tensor subclass needs to see the operator."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and _PLAIN.issuperset(map(type, tensors))
    )
