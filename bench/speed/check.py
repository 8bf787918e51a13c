"""Checks a contestant before it is timed, by comparing its results on a small case with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from flashrope import attention

from .contestants import Contestant
from .problem import Problem

# {dtype: the largest allowed |result - exact| / |exact|, in Euclidean norms}. Correct contestants stay at about a tenth
# of it, even if they round after every operator.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SEQLEN, WINDOW = 320, 96  # neither is a multiple of a tile's 128 rows
KEYS = 512  # in a cache, whose pages must be full
TRAIN_LENGTH = 64  # the train_length of HoPE. HoPE then drops pairs whose angles are noticeable within SEQLEN.


def small(problem: Problem) -> Problem:
    """Returns the same kind of problem, small enough for the dense reference."""
    seqlen = KEYS if problem.decoding else SEQLEN
    return problem.replace(batch=2, seqlen=seqlen, window=WINDOW, train_length=TRAIN_LENGTH)


def error(contestant: Contestant, problem: Problem, backward: bool) -> float:
    """Returns the largest relative error of the output and, with backward, of the gradients of q, k and v. The error is
    inf if a result is nan."""
    case = small(problem)
    tensors = case.tensors(grad=backward)
    grad_out = case.replace(heads_kv=case.heads).tensors(seed=1)[0]
    reference = (
        contestant.exact(case)
        if contestant.exact
        else partial(attention, rotary=contestant.rotary(case), causal=case.causal, impl="reference")
    )
    # Copy the tensors first, because the contestant may rotate in place.
    wide = [x.detach().double().requires_grad_(backward) for x in tensors]
    exact = results(reference, wide, grad_out.double(), backward)
    with contestant.setting():
        got = results(contestant.prepare(case), tensors, grad_out, backward)
    return max(_relative(a, b) for a, b in zip(got, exact, strict=True))


def results(call: Callable, tensors, grad_out, backward: bool) -> tuple[torch.Tensor, ...]:
    out = call(*tensors)
    return (out.detach(), *torch.autograd.grad(out, tensors, grad_out)) if backward else (out,)


def _relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    if got.shape != exact.shape:
        raise ValueError(f"result of shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    value = ((got.double() - exact).norm() / exact.norm()).item()
    return value if value == value else float("inf")
