"""Position maps: Self-Extend and dual chunk attention against their papers' formulas, pair by pair, on every backend."""

import cmath
import math

import pytest
import support
import torch
from support import check, problem

from flashrope import Rotary, attention

REFERENCE = support.Target("reference", torch.float64, "cpu")
ROPE = Rotary.rope(16)


def self_extend(i, j, window, group):
    """(position of the query, of the key), as LongLM's paper has them."""
    if i - j < window:
        return i, j
    return i // group + window - window // group, j // group


def dual_chunk(i, j, chunk_size, local_size):
    """As arXiv 2402.17463 and Qwen2.5-1M's engine have them."""
    s = chunk_size - local_size
    n = i // s - j // s
    if n == 0:
        return i % s, j % s
    return (min(i % s + s, chunk_size) if n == 1 else min(2 * s - 1, chunk_size)), j % s


CASES = {  # the scheme without and with the map, and the formula; the lengths reach every band and edge
    "self_extend": (ROPE, lambda r: r.self_extend(20, 4), lambda i, j: self_extend(i, j, 20, 4)),
    "self_extend_odd": (ROPE, lambda r: r.self_extend(21, 7), lambda i, j: self_extend(i, j, 21, 7)),
    "self_extend_all": (ROPE, lambda r: r.self_extend(0, 3), lambda i, j: self_extend(i, j, 0, 3)),
    "self_extend_yarn_log_n": (
        Rotary.rope(16, interleaved=True).yarn(4.0, 64).log_n(20),
        lambda r: r.self_extend(24, 8),
        lambda i, j: self_extend(i, j, 24, 8),
    ),
    "dual_chunk": (ROPE, lambda r: r.dual_chunk(160, 32), lambda i, j: dual_chunk(i, j, 160, 32)),
    "dual_chunk_wide": (ROPE, lambda r: r.dual_chunk(300, 172), lambda i, j: dual_chunk(i, j, 300, 172)),
    "dual_chunk_cope_log_n": (
        Rotary.rope(16).cope(100).log_n(50, clip=False),
        lambda r: r.dual_chunk(128, 0),
        lambda i, j: dual_chunk(i, j, 128, 0),
    ),
}


def scheme(name):
    plain, with_map, _ = CASES[name]
    return with_map(plain)


def by_hand(q, k, v, rotary, positions):
    """out and lse of one head by loops over scalars; positions(i, j): of the query and of the key."""
    pairs, rows = len(rotary.frequencies), []
    channels = [(2 * m, 2 * m + 1) if rotary.interleaved else (m, m + pairs) for m in range(pairs)]
    for r, query in enumerate(q):
        i = r + len(k) - len(q)
        log_n, scores = 1.0, []
        if rotary.log_n_scale:
            length, clip = rotary.log_n_scale
            log_n = math.log(max(i, 0) + 1) / math.log(length)
            log_n = max(log_n, 1.0) if clip else log_n
        for j in range(min(i + 1, len(k))):
            of_q, of_k = positions(i, j)
            score = 0.0
            for (a, b), theta in zip(channels, rotary.frequencies, strict=True):
                x, y = complex(query[a], query[b]), complex(k[j][a], k[j][b])
                score += (x * cmath.exp(1j * theta * (of_q - of_k)) * y.conjugate()).real
            scores.append(score * len(query) ** -0.5 * rotary.temperature * log_n)
        lse = math.log(sum(map(math.exp, scores))) if scores else -math.inf
        weights = [math.exp(s - lse) for s in scores]
        rows.append(([sum(w * v[j][c] for j, w in enumerate(weights)) for c in range(len(v[0]))], lse))
    return tuple(torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))


@pytest.mark.parametrize("lengths", [(70, 70), (5, 300), (9, 7)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name, lengths):
    p = problem(REFERENCE, scheme(name), *lengths, heads=1, group=1)
    if "dual" in name and lengths == (70, 70):  # rows on both sides of two chunks' ends
        p = problem(REFERENCE, scheme(name), 12, 262, heads=1, group=1)
    out, lse = attention(p.q, p.k, p.v, p.rotary, return_lse=True, impl="reference")
    expected, expected_lse = by_hand(*(x[0, :, 0].tolist() for x in (p.q, p.k, p.v)), p.rotary, CASES[name][2])
    torch.testing.assert_close(out[0, :, 0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse[0, 0], expected_lse, rtol=0, atol=1e-12)


FAST = ("self_extend", "dual_chunk")


@pytest.mark.interpreted(lambda target, name: target.dtype == torch.float32 and name in FAST)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(target, name):
    """Shapes that are no multiples of a tile; rows before position 0; rows that straddle chunks."""
    chunks = "dual" in name
    check(target, problem(target, scheme(name), 300 if chunks else 75, seed=1))
    if not target.slow:
        check(target, problem(target, scheme(name), 90, 430, batch=2, seed=2))
        check(target, problem(target, scheme(name), 60, 45, heads=3, group=3, seed=3))
        check(target, problem(target, scheme(name), 1, 700, seed=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_more_shapes(exact, name):
    for lengths in ((90, 430), (60, 45), (1, 400), (130, 129), (257, 257)):
        check(exact, problem(exact, scheme(name), *lengths, seed=5))
