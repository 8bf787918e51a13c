"""torch.func's transforms and forward-mode differentiation of the attention operators.

grad, vjp, jacrev and vmap work, in any order. A jvp, or a second derivative, raises and names impl="reference", whose
forward is plain PyTorch.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

LAST_TENSOR = 3  # of the arguments behind a call's tensors: positions, cu_seqlens_q, cu_seqlens_k; then constants


def transforming() -> bool:
    """Forward-mode differentiation, or outside of a compiler any transform of torch.func, sees this call."""
    if forward_ad._current_level >= 0:
        return True
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _no_jvp(ctx, *tangents):
    raise NotImplementedError(
        "flashrope: expected no forward-mode derivative (jvp, jacfwd, linearize, dual tensors) of attention, got "
        "tangents; use impl='reference', which PyTorch differentiates freely"
    )


def no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "flashrope: attention has no second derivative; use impl='reference', which autograd differentiates freely"
    )


def attention(*arguments) -> tuple[torch.Tensor, ...]:
    """The operator ``attention`` where ``transforming()``."""
    if torch.compiler.is_compiling():
        _no_jvp(None)
    return Attention.apply(*arguments)


class Attention(torch.autograd.Function):
    """The operator ``attention``; its arguments, which are listed in ``ops``, and results."""

    @staticmethod
    def forward(*arguments):
        from .library import OPERATORS

        return OPERATORS.attention(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, positions, cu_seqlens_q, cu_seqlens_k, *ctx.constants = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(q, k, v, *output, positions, cu_seqlens_q, cu_seqlens_k)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *_):
        if grad_out is None and grad_lse is None:
            return (None,) * (6 + len(ctx.constants))
        grads = AttentionBackward.apply(grad_out, grad_lse, *ctx.saved_tensors, *ctx.constants)
        return *grads, *(None,) * (LAST_TENSOR + len(ctx.constants))

    jvp = staticmethod(_no_jvp)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(Attention, info.batch_size, in_dims, arguments, tensors=3, rows=())


class AttentionBackward(torch.autograd.Function):
    """The operator ``attention_backward``."""

    @staticmethod
    def forward(*arguments):
        from .library import OPERATORS

        return OPERATORS.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(no_second_derivative)
    jvp = staticmethod(_no_jvp)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap(AttentionBackward, info.batch_size, in_dims, arguments, tensors=9, rows=(7, 8))


def _vmap(function, size: int, in_dims, arguments, tensors: int, rows: tuple[int, ...]):
    """One call for all; packed sequences, and what else shares no batch dimension, one call after another.

    tensors: how many arguments come before positions. rows: those of them whose second dimension has the batch
    (``Kept``). All others have it first.
    """
    count = tensors + LAST_TENSOR
    moved = [
        x if x is None else x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        for x, dim in zip(arguments[:count], in_dims, strict=False)
    ]
    constants = arguments[count:]
    packed = moved[count - 1] is not None
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
    """The mapped dimension, which is the first, made part of dimension dim of what follows; empty tensors stay so."""
    if x is None:
        return None
    if x.ndim == 2 and not x.shape[1]:  # nothing was kept
        return x.new_empty(0)
    return x.movedim(0, dim).flatten(dim, dim + 1)


def _split(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The inverse of ``_merge``."""
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
            "flashrope: expected no forward-mode derivative of attention over a cache, got tangents; use attention "
            "with impl='reference'"
        )
