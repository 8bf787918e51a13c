"""Runs the public calls: directly in the backend, or through the operator. The gradients are the same in both cases.

grad, vjp, jacrev and vmap of torch.func work, and can be nested in any order. A jvp or a second derivative raises an
error that recommends impl="reference", whose forward is plain PyTorch.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..backends.registry import load_backend
from ..calls.protocol import DIFFERENTIABLE
from ..calls.records import AttentionCall
from ..schemes.rotary import Rotary
from . import torch_library
from .fields import FIELDS, flatten, unflatten
from .torch_library import LIBRARY, OPERATORS

INPUTS = 3  # the number of inputs: q, k, v
SAVED = 7  # the number of tensors that backward needs: q, k, v, out, lse, rotated_k, table
TENSORS = sum(torch.Tensor in field.kinds for field in FIELDS[AttentionCall])  # the first leaves of a call


# ---- the calls


def attention(q, k, v, call: AttentionCall, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of ``flashrope::attention``.

    In plain eager mode it calls the backend directly, because torch.library's Python layers take longer than a short
    call.
    """
    plain = is_plain(q, k, v)
    if impl in DIFFERENTIABLE or (
        plain and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    ):
        return load_backend(impl).forward(q, k, v, call)[:2]
    arguments = *flatten(AttentionCall, call), impl
    if plain:
        return _apply_plain(q, k, v, *arguments)[:2]
    if not transforming():
        return OPERATORS.attention(q, k, v, *arguments)[:2]
    if torch.compiler.is_compiling():
        Attention.jvp(None)
    return Attention.apply(q, k, v, *arguments)[:2]


def rotate(x, positions, rotary: Rotary, impl: str) -> torch.Tensor:
    """Rotates x. Calls the operator instead of the backend only if gradients, a transform or a tracer need the
    operator."""
    plain = is_plain(x)
    if impl in DIFFERENTIABLE or (plain and not (torch.is_grad_enabled() and x.requires_grad)):
        return torch_library.rotate(x, positions, rotary, False, impl)
    if plain or transforming():
        return Rotate.apply(x, positions, rotary.text, False, impl)
    return OPERATORS.rotate(x, positions, rotary.text, False, impl)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether the backend can be called directly: no compiler, tracer, mode, transform or tensor subclass needs to see
    the operator."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and _PLAIN.issuperset(map(type, tensors))
    )


def transforming() -> bool:
    """Whether forward-mode differentiation is active, or a transform of torch.func is active outside of a
    compilation."""
    if forward_ad._current_level >= 0:
        return True
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


# ---- gradients


class Attention(torch.autograd.Function):
    """The operator ``flashrope::attention`` with gradients. Its arguments are q, k, v, the leaves of an AttentionCall
    and the backend, and its results are out, lse, rotated_k and table."""

    @staticmethod
    def forward(*arguments):
        run = torch_library.attention if is_plain(*arguments[:INPUTS]) else OPERATORS.attention
        return run(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        arguments = inputs[INPUTS:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        # Saves the tensors among the arguments, too: autograd then raises if they are changed before backward runs.
        ctx.save_for_backward(*inputs[:INPUTS], *output, *arguments[:TENSORS])
        ctx.constants = arguments[TENSORS:]

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *_):
        none = (None,) * (TENSORS + len(ctx.constants))
        if grad_out is None and grad_lse is None:
            return (None,) * INPUTS + none
        inputs = (grad_out, grad_lse, *ctx.saved_tensors, *ctx.constants)
        # The operator is needed for gradients from a collective, which are tensor subclasses, and with
        # create_graph=True, which needs a second derivative.
        if is_plain(*inputs[: 2 + SAVED]) and not torch.is_grad_enabled():
            return *torch_library.attention_backward(*inputs), *none
        run = AttentionBackward.apply if transforming() else OPERATORS.attention_backward
        return *run(*inputs), *none

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "flashrope: attention has no forward-mode derivative (jvp, jacfwd, linearize, dual tensors), got tangents; "
            "use impl='reference', whose forward PyTorch differentiates"
        )

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(Attention, info.batch_size, in_dims, arguments, tensors=INPUTS, rows=())


class AttentionBackward(torch.autograd.Function):
    """The operator ``flashrope::attention_backward``, for transforms of torch.func."""

    @staticmethod
    def forward(*arguments):
        return OPERATORS.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "flashrope: attention has no second derivative; use impl='reference', which autograd differentiates freely"
        )

    jvp = staticmethod(Attention.jvp)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(AttentionBackward, info.batch_size, in_dims, arguments, tensors=2 + SAVED, rows=(7, 8))


class Rotate(torch.autograd.Function):
    """The operator ``flashrope::rotate`` with gradients. A rotation is linear in x, so its derivatives are rotations,
    too."""

    @staticmethod
    def forward(x, positions, rotary, inverse, impl):
        return OPERATORS.rotate(x, positions, rotary, inverse, impl)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, positions, ctx.rotary, ctx.inverse, ctx.impl = inputs
        ctx.save_for_backward(positions)
        ctx.save_for_forward(positions)

    @staticmethod
    def backward(ctx, grad):
        run = Rotate.apply if transforming() or torch.is_grad_enabled() else OPERATORS.rotate
        return run(grad, *ctx.saved_tensors, ctx.rotary, not ctx.inverse, ctx.impl), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return Rotate.apply(tangent, *ctx.saved_tensors, ctx.rotary, ctx.inverse, ctx.impl)

    @staticmethod
    def vmap(info, in_dims, x, positions, *constants):
        size, (dim_x, dim_positions, *_) = info.batch_size, in_dims
        x = x.movedim(dim_x, 0) if dim_x is not None else x.expand(size, *x.shape)
        if positions is not None:
            moved = positions.movedim(dim_positions, 0) if dim_positions is not None else positions[None]
            positions = moved.expand(size, *moved.shape[1:]).flatten(0, 1)
        return Rotate.apply(x.flatten(0, 1), positions, *constants).unflatten(0, (size, -1)), 0


def _no_gradient(ctx, *grads):
    raise RuntimeError("flashrope: attention over a cache has no gradient; use attention in training")


# Attention.apply without its Python layer, which matches arguments to parameter names at every call.
_apply_plain = super(torch.autograd.Function, Attention).apply

torch.library.register_autograd(
    "flashrope::attention", Attention.backward, setup_context=Attention.setup_context, lib=LIBRARY
)
torch.library.register_autograd("flashrope::attention_backward", AttentionBackward.backward, lib=LIBRARY)
torch.library.register_autograd("flashrope::attention_with_cache", _no_gradient, lib=LIBRARY)
torch.library.register_autograd("flashrope::rotate", Rotate.backward, setup_context=Rotate.setup_context, lib=LIBRARY)


def _vmap(function, size: int, in_dims, arguments, tensors: int, rows: tuple[int, ...]):
    """Applies ``function`` under vmap: folds the mapped dimension into the batch and calls it once. Packed inputs have
    no batch, so for them it calls the function once per index of the mapped dimension.

    tensors: the number of arguments before the leaves of the AttentionCall. rows: the indices of the tensors of
    ``calls.Kept``, whose second dimension is the batch. In all other tensors the first dimension is the batch.
    """
    count = tensors + TENSORS
    moved = [
        x if x is None else x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        for x, dim in zip(arguments[:count], in_dims, strict=False)
    ]
    constants = arguments[count:]
    packed = unflatten(AttentionCall, arguments[tensors:])[0].cu_seqlens_q is not None
    if packed or not size:
        if not size:
            raise ValueError("vmap: expected at least one element to map over, got 0")
        results = [function.apply(*(None if x is None else x[n] for x in moved), *constants) for n in range(size)]
        stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)
    merged = [_merge(x, 1 if n in rows else 0) for n, x in enumerate(moved)]
    results = function.apply(*merged, *constants)
    split = tuple(_split(x, size, 1 if function is Attention and n > 1 else 0) for n, x in enumerate(results))
    return split, (0,) * len(split)


def _merge(x: torch.Tensor | None, dim: int) -> torch.Tensor | None:
    """Merges the first dimension, which is mapped, into dimension ``dim`` of the rest. Empty tensors stay empty."""
    if x is None:
        return None
    if x.ndim == 2 and not x.shape[1]:  # the forward saved nothing here
        return x.new_empty(0)
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _split(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Undoes ``_merge``: makes the mapped dimension the first one again."""
    return x.expand(size, 0) if x.ndim == 1 else x.unflatten(dim, (size, -1)).movedim(dim, 0)


def check_no_tangents(*tensors: torch.Tensor) -> None:
    """Raises NotImplementedError if one of the tensors carries a tangent, whichever transform put it there."""
    if torch.compiler.is_compiling():
        _WithoutTangents.jvp(None)
    _WithoutTangents.apply(*tensors)


class _WithoutTangents(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors):
        return tensors[0].new_empty(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "flashrope: attention over a cache has no forward-mode derivative, got tangents; use attention with "
            "impl='reference'"
        )
