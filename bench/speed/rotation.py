"""Measures the cost of rotation: flashrope's pass over the keys, a separate pass over q and k, and the whole forward.

python -m bench rotation [--head-dim 128] [--heads 16] [--heads-kv 16] [--seqlens 512 2048 8192]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from flashrope import rotate
from flashrope.backends import reference
from flashrope.calls.records import AttentionCall

from . import options as bench_options
from .contestants import ENCODINGS, KERNELS, OWN, Contestant, best_rope, fused, positions
from .prefill import CPU, CUDA
from .problem import Problem
from .session import Session


def keys_only(problem: Problem):
    """Returns a call that only rotates the keys, as a HoPE forward does before the attention."""
    return (keys_on_cpu if problem.device.type == "cpu" else keys_by_triton)(problem)


def hope_call(problem: Problem) -> AttentionCall:
    lengths = {"max_seqlen_q": problem.seqlen, "max_seqlen_k": problem.seqlen}
    return AttentionCall(problem.hope(), problem.causal, problem.head_dim**-0.5, **lengths)


def keys_on_cpu(problem: Problem):
    from flashrope.backends.shared.host_rotation import rotate as rotate_keys
    from flashrope.backends.shared.host_rotation import rotation_for
    from flashrope.schemes.bands import EVERYWHERE

    call = hope_call(problem)
    rotation = rotation_for(problem.tensors()[1], call, EVERYWHERE.keys, 0, False)
    return lambda q, k, v: rotate_keys(k, rotation, call.rotary)


def keys_by_triton(problem: Problem):
    from flashrope.backends.triton import kept_shapes
    from flashrope.backends.triton.attention import AttentionPlan
    from flashrope.backends.triton.device import current_device

    call = hope_call(problem)

    def rotate_keys(q, k, v):
        rotated_k = k.new_empty(kept_shapes(k, call).rotated_k)
        with current_device(k):
            AttentionPlan(q, k, v, call, None, rotated_k).rotate_keys(k, rotated_k)
        return rotated_k[0].unflatten(0, k.shape[:-2])  # a rotated copy may hold only the channels that rotate

    return rotate_keys


def separate(encoding: Callable, problem: Problem):
    """Returns a call that only rotates q and k."""
    both = encoding(problem)
    return lambda q, k, v: both(q, k)[1]


def own_rotation(problem: Problem):
    """Returns a call of ``flashrope.rotate`` for q and k."""
    rotary = problem.rope()
    return lambda q, k, v: (rotate(q, rotary), rotate(k, rotary))[1]


def exact_keys(scheme, problem: Problem):
    return lambda q, k, v: reference.rotate_by(k, scheme(problem), positions(problem))


def moved(with_queries: bool, problem: Problem) -> int:
    """Returns how many bytes a rotation of the keys reads and writes. with_queries: whether it rotates q as well."""
    return problem.bytes_of_cache() + 2 * problem.bytes_of_q() * with_queries


def contestants(device: torch.device) -> list[Contestant]:
    """Returns two kinds of contestants: rotations without attention, whose speed is a share of a copy's, and whole
    forwards, which include a rotation."""

    def rotation(name, scheme, prepare, with_queries=True, ours=False):
        return Contestant(
            name,
            scheme,
            prepare,
            ours,
            moved=partial(moved, with_queries),
            ceiling="copy_gbs",
            exact=partial(exact_keys, scheme),
        )

    in_place = partial(separate, partial(fused, in_place=True))
    return [
        *(
            rotation(f"{name} of q and k", Problem.rope, partial(separate, ENCODINGS[name]))
            for name in (best_rope(device), "eager RoPE")
        ),
        rotation("flashrope.rotate of q and k", Problem.rope, own_rotation, ours=True),
        rotation("fused RoPE of q and k, in place", Problem.rope, in_place),
        rotation("flashrope, keys only", Problem.hope, keys_only, with_queries=False, ours=True),
        Contestant("SDPA flash", Problem.none, KERNELS["SDPA flash"]),
        *(OWN[name] for name in ("NoPE", "RoPE", "HoPE")),
    ]


def main(argv: list[str]) -> int:
    options = bench_options.parse(bench_options.parser("rotation", __doc__, CUDA, CPU), argv)
    options.passes = ["forward"]
    session = Session("rotation", argv, options)
    session.measure(bench_options.prefill_tables(options, contestants(options.device)))
    return session.finish()
