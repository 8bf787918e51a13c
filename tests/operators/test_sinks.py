"""Attention sinks in every call: out, lse and gradients against the formula, refusals."""

import math

import pytest
import support
import torch
from flashrope import KVCache, Rotary, attention, attention_varlen, attention_varlen_with_cache, attention_with_cache
from flashrope.backends import reference
from flashrope.backends.calls import AttentionCall
from support import SCHEMES, check, problem

SINKS = torch.tensor([-1.5, 0.0, 0.75, 3.0])


def with_sinks(p, sinks=SINKS):
    return p.replace(sinks=sinks.to(p.grad_lse))


def specified(q, k, v, rotary, sinks, causal=True):
    """out and lse of the reference's formula in float64."""
    call = AttentionCall(rotary, causal, q.shape[-1] ** -0.5)
    return reference.dense_attention(q.double(), k.double(), v.double(), call, sinks.double())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", ["none", "rope", "rerope", "local"])
def test_sinks_added_to_the_results_are_those_of_the_formula(scheme, causal):
    double = support.Target("reference", torch.float64, "cpu")
    for seqlen_q, seqlen_k in ((26, 26), (3, 26), (26, 20)):  # in the last, 6 causal rows see only the sink
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
    """Sinks are added to what the kernels return, so the interpreter sees a small call."""
    rows, batch = (20, 1) if target.slow else (target.size(70, 400), 2)
    p = problem(target, SCHEMES[scheme](16), rows, heads=4, batch=batch, seed=1)
    check(target, with_sinks(p))
    check(target, with_sinks(problem(target, SCHEMES[scheme](16), 30, 20, heads=4, seed=2)))
    check(target, with_sinks(problem(target, SCHEMES[scheme](16), 1, 5, heads=4, seed=3), SINKS - 9))  # small weights


def test_varlen(exact):
    rotary, lengths = SCHEMES["rerope"](16), (7, 0, 33)
    cu_seqlens = torch.tensor([0, 7, 7, 40], dtype=torch.int32, device=exact.device)
    q, k, v = (support.random((1, 40, heads, 16), exact, seed)[0] for seed, heads in enumerate((4, 2, 2)))
    sinks = SINKS.to(exact.device)
    out, lse = attention_varlen(
        q, k, v, rotary, cu_seqlens, cu_seqlens, 33, 33, sinks=sinks, return_lse=True, impl=exact.impl
    )
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        rows = slice(start, start + length)
        wanted = attention(
            q[None, rows], k[None, rows], v[None, rows], rotary, sinks=sinks, return_lse=True, impl=exact.impl
        )
        torch.testing.assert_close(out[rows], wanted[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, rows], wanted[1][0], rtol=1e-4, atol=1e-5)


def cached(target, seqlen_q, seqlen, rotary, batch=2):
    q, k, v = (
        support.random((batch, n, heads, rotary.head_dim), target, seed)
        for seed, (n, heads) in enumerate(((seqlen_q, 4), (seqlen, 2), (seqlen, 2)))
    )
    return q, k, v, SINKS.to(target.device)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_with_cache(exact, seqlen_q, num_splits):
    """The sink counts once, however many parts the keys are split into."""
    rotary = SCHEMES["rerope"](16)
    q, k, v, sinks = cached(exact, seqlen_q, 90, rotary)
    lengths = torch.full((2,), 90, dtype=torch.int32, device=exact.device)
    out, lse = attention_with_cache(
        q, k, v, rotary, lengths, sinks=sinks, return_lse=True, impl=exact.impl, num_splits=num_splits
    )
    want, want_lse = specified(*(x.cpu() for x in (q, k, v)), rotary, SINKS)
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-4, atol=1e-5)


def test_packed_with_cache(exact):
    rotary = SCHEMES["rerope"](16)
    q, k, v, sinks = cached(exact, 5, 60, rotary)
    lengths = torch.full((2,), 60, dtype=torch.int32, device=exact.device)
    cu_seqlens_q = torch.tensor([0, 5, 6], dtype=torch.int32, device=exact.device)  # five rows, then one
    out, lse = attention_varlen_with_cache(
        torch.cat((q[0], q[1, -1:])), k, v, rotary, cu_seqlens_q, lengths, 5, sinks=sinks, return_lse=True,
        impl=exact.impl,
    )  # fmt: skip
    want, want_lse = specified(*(x.cpu() for x in (q, k, v)), rotary, SINKS)
    torch.testing.assert_close(out.cpu().double(), torch.cat((want[0], want[1, -1:])), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        lse.cpu().double(), torch.cat((want_lse[0], want_lse[1, :, -1:]), -1), rtol=1e-4, atol=1e-5
    )


def test_a_cache_object_takes_them():
    rotary = SCHEMES["rope"](16)
    q, k, v, sinks = cached(support.Target("cpu", torch.float32, "cpu"), 9, 9, rotary)
    cache = KVCache(2, 16, 2, 16, dtype=torch.float32, device="cpu")
    want = specified(q, k, v, rotary, sinks)[0]
    torch.testing.assert_close(cache.attend(q, rotary, k, v, sinks=sinks).double(), want, rtol=1e-4, atol=1e-5)


def test_no_sink_and_a_row_without_keys():
    """-inf changes nothing, and no result is NaN."""
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
        (torch.zeros(2, device="meta"), ValueError, "sinks: expected device cpu as q, got meta"),
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
    with pytest.raises(ValueError, match="sinks: expected no gradient to be asked for"):
        attention_with_cache(q, q, q, Rotary.rope(16), lengths, sinks=sinks)
    with torch.no_grad():
        attention_with_cache(q, q, q, Rotary.rope(16), lengths, sinks=sinks)
