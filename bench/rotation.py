"""What rotation costs: the pass over the keys that comes before our forward, the separate pass over q and k that others
make, and the share of either in the whole.

    python -m bench rotation [--head-dim 128] [--heads 16] [--heads-kv 16] [--seqlens 512 2048 8192]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flashrope.backends import AttentionCall, load_backend, reference

from . import suite
from .contestants import ENCODINGS, KERNELS, OWN, Contestant, best_rope, fused, positions
from .hope import CPU, CUDA
from .problem import Problem


def keys_only(problem: Problem):
    """The pass that turns the keys of a HoPE forward once, without the attention."""
    call = AttentionCall(
        problem.hope(), problem.causal, problem.head_dim**-0.5, max_seqlen_q=problem.seqlen, max_seqlen_k=problem.seqlen
    )
    if problem.device.type == "cpu":
        from flashrope.backends.cpu.rotation import turn, turns_for

        turns = turns_for(problem.tensors()[1], call, 1.0, 0.0, 0, False)
        return lambda q, k, v: turn(k, turns, call.rotary)
    triton = load_backend("triton")

    def prepass(q, k, v):
        plan = triton._Plan(q, k, v, call)
        turned = k.new_empty(triton.rotated_k_shape(k, call))
        plan.turn(k, turned, plan.key_slots, keys=True)
        return turned[0].view_as(k)

    return prepass


def separate(encoding: Callable, problem: Problem):
    """q and k rotated, and nothing else."""
    turn = encoding(problem)
    return lambda q, k, v: turn(q, k)[1]


def exact_keys(scheme, problem: Problem):
    return lambda q, k, v: reference.turn(k, scheme(problem), positions(problem))


def moved(with_queries: bool, problem: Problem) -> int:
    """Bytes read and written."""
    return problem.bytes_of_cache() + 2 * problem.bytes_of_q() * with_queries


def contestants(device: torch.device) -> list[Contestant]:
    """Rotations alone, held against copying; then whole forwards, of which the rotations are a share."""

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

    passes = [
        rotation(f"{name} of q and k", Problem.rope, partial(separate, ENCODINGS[name]))
        for name in (best_rope(device), "eager RoPE")
    ]
    passes.append(
        rotation("fused RoPE of q and k, in place", Problem.rope, partial(separate, partial(fused, in_place=True)))
    )
    passes.append(rotation("flashrope, keys alone", Problem.hope, keys_only, with_queries=False, ours=True))
    return [
        *passes,
        Contestant("SDPA flash", Problem.none, KERNELS["SDPA flash"]),
        OWN["NoPE"],
        OWN["RoPE"],
        OWN["HoPE"],
    ]


def main(argv: list[str]) -> int:
    options = suite.parse(suite.parser("rotation", __doc__, CUDA, CPU), argv)
    options.passes = ["forward"]
    session = suite.Session("rotation", argv, options)
    session.plan(suite.prefill_tables(options, contestants(options.device)))
    return session.finish()
