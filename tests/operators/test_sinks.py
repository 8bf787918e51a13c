"""Tests attention sinks in every call: compares out, lse and gradients with the formula, and tests refusals."""

import math

import pytest
import support
import torch
from caching import Cached
from flashrope import KVCache, Rotary, attention, attention_with_cache
from flashrope.backends import reference
from flashrope.calls.records import AttentionCall
from packing import packing
from support import SCHEMES, check, problem

SINKS = torch.tensor([-1.5, 0.0, 0.75, 3.0])


def with_sinks(p, sinks=SINKS):
    return p.replace(sinks=sinks.to(p.grad_lse))


def specified(q, k, v, rotary, sinks, causal=True):
    """Returns out and lse of the reference's formula in float64."""
    call = AttentionCall(rotary, causal, q.shape[-1] ** -0.5)
    return reference.dense_attention(q.double(), k.double(), v.double(), call, sinks.double())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", ["none", "rope", "rerope", "local"])
def test_sinks_added_to_the_results_are_those_of_the_formula(scheme, causal):
    double = support.Target("reference", torch.float64, "cpu")
    for seqlen_q, seqlen_k in ((26, 26), (3, 26), (26, 20)):  # in the last case, 6 causal rows see only the sink
        p = problem(double, SCHEMES[scheme](16), seqlen_q, seqlen_k, heads=4, batch=2, causal=causal)
        leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v, SINKS.double())]
        *tensors, sinks = leaves
        results = attention(*tensors, p.rotary, causal=causal, sinks=sinks, return_lse=True, impl="reference")
        wanted = specified(*tensors, p.rotary, sinks, causal)
        grads, wanted_grads = (torch.autograd.grad(x, leaves, (p.grad_out, p.grad_lse)) for x in (results, wanted))
        for got, want in zip((*results, *grads), (*wanted, *wanted_grads), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.interpreted(lambda target, scheme: scheme == "rerope" and target.dtype == torch.float32)
@pytest.mark.parametrize("scheme", ["rope", "rerope"])
def test_within_the_budget(target, scheme):
    """Out, lse and gradients with sinks are within the budget. Sinks are added to the results of the kernels, so a
    small call is enough in the interpreter."""
    rows, batch = (20, 1) if target.slow else (target.size(70, 400), 2)
    p = problem(target, SCHEMES[scheme](16), rows, heads=4, batch=batch, seed=1)
    check(target, with_sinks(p))
    check(target, with_sinks(problem(target, SCHEMES[scheme](16), 30, 20, heads=4, seed=2)))
    check(target, with_sinks(problem(target, SCHEMES[scheme](16), 1, 5, heads=4, seed=3), SINKS - 9))  # small weights


def test_varlen(exact):
    p = packing(exact, SCHEMES["rerope"](16), (7, 0, 33), sinks=SINKS.to(exact.device))
    p.check(p.run(exact.impl), exact.dtype)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("queries", [1, 5, (5, 1)], ids=["one", "several", "packed"])
def test_with_cache(exact, queries, num_splits):
    """The sink counts once, however many splits the keys are divided into."""
    c = Cached(exact, SCHEMES["rerope"](16), (90, 60), queries, new=0, sinks=SINKS.to(exact.device))
    c.check(num_splits=num_splits)


def test_a_cache_object_takes_them():
    rotary = SCHEMES["rope"](16)
    p = problem(support.Target("cpu", torch.float32, "cpu"), rotary, 9, heads=4, batch=2)
    cache = KVCache(2, 16, 2, 16, dtype=torch.float32, device="cpu")
    want = specified(p.q, p.k, p.v, rotary, SINKS)[0]
    torch.testing.assert_close(cache.attend(p.q, rotary, p.k, p.v, sinks=SINKS).double(), want, rtol=1e-4, atol=1e-5)


def test_no_sink_and_a_row_without_keys():
    """A sink of -inf changes nothing, and no result is NaN."""
    q, k, v = (torch.randn(1, n, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (9, 5, 5))
    sinks = torch.full((2,), -math.inf, requires_grad=True)
    plain = attention(q, k, v, Rotary.rope(16))
    out, lse = attention(q, k, v, Rotary.rope(16), sinks=sinks, return_lse=True)
    assert torch.equal(out, plain) and not lse.isnan().any()
    out.sum().backward()
    assert torch.equal(sinks.grad, torch.zeros(2))


@pytest.mark.parametrize(
    "sinks, error, message",
    [
        ([0.0, 0.0], TypeError, "sinks: expected a tensor, got list"),
        (torch.zeros(2, dtype=torch.int32), TypeError, "sinks: expected a float type, got torch.int32"),
        (torch.zeros(1), ValueError, r"sinks: expected shape \(2,\), one number per head of q, got \(1,\)"),
        (torch.zeros(2, device="meta"), ValueError, "sinks: expected device cpu, the device of q, got meta"),
    ],
)
def test_refusals(sinks, error, message):
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(error, match=message):
        attention(q, q, q, Rotary.rope(16), sinks=sinks)
    with pytest.raises(error, match=message):
        attention_with_cache(q, q, q, Rotary.rope(16), torch.tensor([5], dtype=torch.int32), sinks=sinks)


def test_a_cache_has_no_gradient():
    q = torch.randn(1, 5, 2, 16)
    sinks = torch.zeros(2, requires_grad=True)
    lengths = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="sinks: expected a tensor that does not require grad"):
        attention_with_cache(q, q, q, Rotary.rope(16), lengths, sinks=sinks)
    with torch.no_grad():
        attention_with_cache(q, q, q, Rotary.rope(16), lengths, sinks=sinks)
