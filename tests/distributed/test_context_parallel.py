"""Context parallelism against the formula in float64 on the whole sequence, within the budget of single-device attention."""

import pytest
import torch
from ranks import mesh
from support import COEFFICIENT, SCHEMES, Problem, Target, exact_and_bound, excess, problem

from flashrope import Rotary, attention
from flashrope.integrations.distributed import context_parallel_attention, sequence_positions, shard_sequence, unshard_sequence

CHOSEN = ("rope", "hope_paper", "rerope", "leaky", "local", "log_n_clipped", "hope_rerope_log_n", "yarn_leaky_local_log_n")
TYPES = (torch.float32, torch.float64)
SEQLEN = 48  # chunks of 12 and of 6: no multiple of any block


def sharded(p: Problem, group, impl: str | None = None) -> dict[str, torch.Tensor]:
    """The results of a call over the ranks of group, gathered."""
    leaves = [shard_sequence(x, group).detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out = context_parallel_attention(*leaves, p.rotary, group, p.causal, p.softmax_scale, impl)
    grads = torch.autograd.grad(out, leaves, shard_sequence(p.grad_out, group))
    return {name: unshard_sequence(x.detach(), group) for name, x in zip(("out", "grad_q", "grad_k", "grad_v"), (out, *grads), strict=True)}


def holds(ranks: int, scheme: str, dtype: torch.dtype, impl: str, **options) -> dict[str, float]:
    p = problem(Target(impl, dtype, "cpu"), SCHEMES[scheme](16), SEQLEN, **options)
    p = p.replace(grad_lse=torch.zeros_like(p.grad_lse))
    ratios = excess(sharded(p, mesh(ranks), impl), *exact_and_bound(p), dtype)
    over = {name: ratio for name, ratio in ratios.items() if not ratio <= COEFFICIENT[dtype]}
    assert not over, f"error over u * bound, allowed {COEFFICIENT[dtype]}: {over}, {ranks} ranks, {options}, {p.rotary}"
    return ratios


def every_scheme(count: int, dtype: torch.dtype, causal: bool, schemes) -> dict[str, float]:
    """The largest ratio of each result over schemes, batch sizes and heads."""
    worst: dict[str, float] = {}
    for scheme in schemes:
        for heads, group, batch in ((4, 2, 2), (2, 1, 1)):
            for name, ratio in holds(count, scheme, dtype, "cpu", causal=causal, heads=heads, group=group, batch=batch).items():
                worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
@pytest.mark.parametrize("count", [2, 4])
def test_forward_and_gradients(ranks, count, causal, dtype):
    ranks(every_scheme, count, dtype, causal, CHOSEN)
