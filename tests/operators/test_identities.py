"""Tests equalities between schemes and between ways to call, for every backend."""

import dataclasses

import pytest
import support
import torch
from flashrope import Rotary, attention
from support import NAMES, exact_and_bound, excess, problem, run

D = 16


def same(target, first, second):
    """Checks that two problems with the same exact answer have results that differ by no more than twice the budget."""
    got, other = run(first, target.impl), run(second, target.impl)
    _, bound = exact_and_bound(first)
    over = {
        n: r
        for n, r in excess(got, {n: x.double() for n, x in other.items()}, bound, target.dtype).items()
        if not r <= 2 * support.COEFFICIENT[target.dtype]
    }
    assert not over, f"{over}: {first.rotary} against {second.rotary}"


ROPE = Rotary.rope(D)
PAIRS = {
    "rectified beyond the sequence": (ROPE.rectify(50), ROPE),
    "hope that keeps no pair": (Rotary.hope(D, 1.0), Rotary.none(D)),
    "hope in the paper's layout that keeps no pair": (Rotary.hope(D, 1.0, interleaved=True), Rotary.none(D)),
    "local beyond the sequence": (ROPE.local(50), ROPE),
    "clipped log n within the training length": (ROPE.log_n(1000), ROPE),
}


@pytest.mark.interpreted(lambda exact, pair: pair[0].rotary_dim == 0 or len(pair[0].bands) > 1)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_schemes_that_agree(exact, pair):
    first, second = pair
    p = problem(exact, first, 50, seed=30)
    same(exact, p, p.replace(rotary=second))


def test_pairings_agree_on_permuted_channels(exact):
    p = problem(exact, Rotary.hope(D, 100, interleaved=True), 50, seed=31)
    half = Rotary.hope(D, 100, compact=True)
    assert half.frequencies == p.rotary.frequencies
    pairs = half.rotary_dim // 2
    order = [2 * m for m in range(pairs)] + [2 * m + 1 for m in range(pairs)] + list(range(2 * pairs, D))
    other = p.replace(rotary=half, q=p.q[..., order], k=p.k[..., order])
    got, permuted = run(p, exact.impl), run(other, exact.impl)
    _, bound = exact_and_bound(p)
    expected = {n: permuted[n].double() for n in NAMES}
    for name in ("grad_q", "grad_k"):
        expected[name] = torch.empty_like(expected[name]).index_copy_(
            -1, torch.tensor(order, device=exact.device), expected[name]
        )
    assert max(excess(got, expected, bound, exact.dtype).values()) <= 2 * support.COEFFICIENT[exact.dtype]


@pytest.mark.interpreted(lambda exact, shift: shift > 1)
@pytest.mark.parametrize("shift", [1, 1000])
def test_shifting_all_positions_changes_nothing(exact, shift):
    p = problem(exact, Rotary.hope(D, 100), 40, seed=32)
    positions = torch.arange(40, device=exact.device).expand(1, 40)
    same(exact, p.replace(positions=positions + shift), p)


def test_shifting_all_positions_changes_log_n(exact):
    p = problem(exact, ROPE.log_n(10), 40, seed=33)
    positions = torch.arange(40, device=exact.device).expand(1, 40)
    shifted = p.replace(positions=positions + 500)
    support.check(exact, shifted)
    assert (run(shifted, exact.impl)["out"] - run(p, exact.impl)["out"]).abs().max() > 0.01


@pytest.mark.interpreted(lambda target, rotary: target.dtype == torch.float32 and len(rotary.bands) > 1)
@pytest.mark.parametrize("rotary", [ROPE, ROPE.rectify(11)], ids=["rope", "rerope"])
def test_heads_and_batch_are_bitwise_independent(target, rotary, one_thread):
    """Results of a head and of a sequence are bitwise independent of other heads and sequences. On the CPU this holds
    with one thread. With several threads, MKL chooses its matrix product by how the work is divided."""
    p = problem(target, rotary, 20 if target.slow else 40, batch=3, heads=4, group=2, seed=34)
    whole = run(p, target.impl)
    batch, kv_heads = [2, 0, 1], [1, 0]
    q_heads = [2, 3, 0, 1]
    other = p.replace(
        q=p.q[batch][:, :, q_heads],
        k=p.k[batch][:, :, kv_heads],
        v=p.v[batch][:, :, kv_heads],
        grad_out=p.grad_out[batch][:, :, q_heads],
        grad_lse=p.grad_lse[batch][:, q_heads],
    )
    permuted = run(other, target.impl)
    for name, heads in zip(NAMES, (q_heads, q_heads, q_heads, kv_heads, kv_heads), strict=True):
        moved = whole[name][batch][:, heads] if name == "lse" else whole[name][batch][:, :, heads]
        assert torch.equal(moved, permuted[name]), name


@pytest.mark.interpreted(lambda exact, scheme: scheme == "rerope")
@pytest.mark.parametrize("scheme", ["rope", "rerope", "local", "log_n_trained"])
def test_queries_in_chunks(exact, scheme):
    """In a chunked prefill, query rows [a, b) over keys [0, b) give rows [a, b) of the full call."""
    p = problem(exact, support.SCHEMES[scheme](D), 64, heads=2, group=1, seed=35)
    whole, whole_lse = attention(p.q, p.k, p.v, p.rotary, return_lse=True, impl=exact.impl)
    _, bound = exact_and_bound(p)
    budget = 2 * support.COEFFICIENT[exact.dtype] * support.UNIT_ROUNDOFF[exact.dtype]
    for a, b in ((0, 20), (20, 45), (45, 64)):
        out, lse = attention(p.q[:, a:b], p.k[:, :b], p.v[:, :b], p.rotary, return_lse=True, impl=exact.impl)
        assert ((out - whole[:, a:b]).abs() <= budget * bound["out"][:, a:b]).all()
        lse_error = torch.where(lse == whole_lse[..., a:b], 0, (lse - whole_lse[..., a:b]).abs())
        assert (lse_error <= budget * bound["lse"][..., a:b]).all()


@pytest.mark.interpreted(lambda exact, scheme: scheme == "leaky")
@pytest.mark.parametrize("scheme", ["rope", "rerope", "leaky", "local"])
def test_time_reversed(exact, scheme):
    """Without a mask, a reversed sequence with the signs of all frequencies flipped gives the reversed results:
    distances and frequencies both change sign, so the angles stay the same."""
    p = problem(exact, support.SCHEMES[scheme](D), 50, heads=2, group=1, seed=36, causal=False)
    mirrored = dataclasses.replace(p.rotary, frequencies=tuple(-f for f in p.rotary.frequencies))
    reverse = {n: getattr(p, n).flip(1) for n in ("q", "k", "v", "grad_out")}
    got = run(p.replace(rotary=mirrored, grad_lse=p.grad_lse.flip(2), **reverse), exact.impl)
    expected = {n: x.double().flip(2 if n == "lse" else 1) for n, x in run(p, exact.impl).items()}
    _, bound = exact_and_bound(p)
    bound = {n: x.flip(2 if n == "lse" else 1) for n, x in bound.items()}
    ratios = excess(got, expected, bound, exact.dtype)
    assert max(ratios.values()) <= 2 * support.COEFFICIENT[exact.dtype], ratios
