"""Compares the schemes with position maps, Self-Extend and dual chunk attention, with their formulas. The comparison
goes pair by pair on every backend."""

import math

import pytest
import support
import torch
from flashrope import Band, Rotary, attention
from flashrope.schemes.bands import PositionMap
from flashrope.schemes.lowered import UNBOUNDED, lower
from formula import by_hand
from packing import packing
from support import check, problem
from test_needles import match

REFERENCE = support.Target("reference", torch.float64, "cpu")
ROPE = Rotary.rope(16)


def self_extend(i, j, window, group):
    """Returns (mapped position of the query, mapped position of the key) by the formula of LongLM's paper."""
    if i - j < window:
        return i, j
    return i // group + window - window // group, j // group


def dual_chunk(i, j, chunk_size, local_size):
    """Returns (mapped position of the query, mapped position of the key) as in arXiv 2402.17463 and in Qwen2.5-1M's
    engine."""
    s = chunk_size - local_size
    n = i // s - j // s
    if n == 0:
        return i % s, j % s
    return (min(i % s + s, chunk_size) if n == 1 else min(2 * s - 1, chunk_size)), j % s


CASES = {  # {name: (scheme without the map, scheme with the map, formula)}. The lengths reach every band and edge.
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


@pytest.mark.parametrize("lengths", [(70, 70), (5, 300), (9, 7)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name, lengths):
    p = problem(REFERENCE, scheme(name), *lengths, heads=1, group=1)
    if "dual" in name and lengths == (70, 70):  # rows on both sides of the ends of two chunks
        p = problem(REFERENCE, scheme(name), 12, 262, heads=1, group=1)
    out, lse = attention(p.q, p.k, p.v, p.rotary, return_lse=True, impl="reference")
    expected, expected_lse = by_hand(p, lambda i, j: CASES[name][2](i, j) if j <= i else None)
    torch.testing.assert_close(out[0, :, 0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse[0, 0], expected_lse, rtol=0, atol=1e-12)


FAST = ("self_extend", "dual_chunk")


@pytest.mark.interpreted(lambda target, name: target.dtype == torch.float32 and name in FAST)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(target, name):
    """Every backend equals the formula, even if shapes are no multiples of a tile, rows are before position 0, or tiles
    cross the end of a chunk."""
    check(target, problem(target, scheme(name), *((40, 280) if "dual" in name else (50, 75)), seed=1))
    if not target.slow:
        for lengths, options in (((300, 300), {}), ((90, 430), {"batch": 2}), ((60, 45), {"heads": 3, "group": 3})):
            check(target, problem(target, scheme(name), *lengths, seed=2, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_more_shapes(exact, name):
    for lengths in ((90, 430), (60, 45), (1, 400), (130, 129), (300, 300)):
        check(exact, problem(exact, scheme(name), *lengths, seed=5))


# ---- keys at the edges


EDGES = {  # {name: [(query row, key)]}, with keys next to an edge between two bands
    "self_extend": [(60, 41), (60, 40), (63, 43), (67, 47)],
    "dual_chunk": [
        (127, 0),
        (128, 128),
        (128, 127),
        (255, 128),
        (255, 127),
        (256, 128),
        (256, 127),
        (290, 0),
        (290, 255),
    ],
}


@pytest.mark.interpreted(lambda exact, name: name == "self_extend")
@pytest.mark.parametrize("name", EDGES)
def test_needles(exact, name):
    """Makes q and k so that each row has one matching key: after both are rotated by the formula, their score is near
    12."""
    rotary, positions = scheme(name), CASES[name][2]
    seqlen = max(i for i, _ in EDGES[name]) + 1
    p = problem(exact, rotary, seqlen, heads=1, group=1, seed=20)
    k = (p.k * 0.1).float().cpu()
    for i, j in EDGES[name]:
        of_q, of_k = positions(i, j)
        k[0, j, 0] = match(p, i, of_q - of_k)
        one = p.replace(k=k.to(p.k))
        assert support.exact_and_bound(one)[0]["lse"][0, 0, i] > 8
        if not exact.slow:
            check(exact, one)
        k[0, j, 0] = p.k[0, j, 0].float().cpu() * 0.1 if not exact.slow else k[0, j, 0]
    check(exact, p.replace(k=k.to(p.k)))


def test_pairs_of_every_band_are_counted_once():
    """Every pair of the causal triangle lies in exactly one band, at a distance that belongs to the band."""
    i, j = torch.arange(600.0)[:, None], torch.arange(600.0)[None]
    for name in CASES:
        held = [band.holds(i, j) for band in scheme(name).bands]
        assert torch.equal(sum(x.int() for x in held), (j <= i).int())
        for band, pairs in zip(scheme(name).bands, held, strict=True):
            start, stop = band.distances
            assert start <= (i - j)[pairs].min() and (i - j)[pairs].max() < stop


# ---- packed sequences


@pytest.mark.interpreted(lambda exact, name: False)
@pytest.mark.parametrize("name", CASES)
def test_packed_sequences(exact, name):
    """Every packed sequence gets the results of a separate call, whether it has as many keys as queries, more or
    fewer."""
    p = packing(exact, scheme(name), [40, 150, 20], [40, 290, 9], seed=6)
    p.check(p.run(exact.impl), exact.dtype)


# ---- identities


@pytest.mark.interpreted(lambda exact: False)
def test_without_far_keys_it_is_the_plain_scheme(exact):
    p = problem(exact, ROPE, 90, seed=7)
    with torch.no_grad():
        plain = attention(p.q, p.k, p.v, ROPE, impl=exact.impl)
        for rotary in (ROPE.self_extend(96, 8), ROPE.dual_chunk(160, 32), ROPE.self_extend(20, 1)):
            mapped = attention(p.q, p.k, p.v, rotary, impl=exact.impl)
            torch.testing.assert_close(mapped, plain, rtol=1e-5, atol=1e-6)


def test_what_stays_as_it_is():
    assert ROPE.self_extend(20, 1) == ROPE and Rotary.none(16).dual_chunk(160, 32) == Rotary.none(16)
    assert Rotary.none(16).self_extend(20, 4) == Rotary.none(16)


def test_gradients_of_the_atomic_backward(exact):
    for name in ("self_extend", "dual_chunk") if not exact.slow else ("self_extend",):
        check(exact, problem(exact, scheme(name), 60 if exact.slow else 290, seed=8, deterministic=False))


# ---- the scheme's fields, text and lowering


def test_groups_are_counted_within_a_chunk():
    positions = PositionMap(2.0, 3.0, 128, 4, 20).of(torch.arange(300.0))
    assert positions.tolist() == [2 * min(i % 128 // 4, 20) + 3 for i in range(300)]


def test_bands():
    near, far = ROPE.self_extend(20, 4).bands
    assert near == Band(0, 20, 1, 0) and far == Band(20, math.inf, 1, 15, 4)
    assert (
        ROPE.self_extend(20, 4).local(50).bands
        == (near, far._replace(stop=50))
        == ROPE.local(50).self_extend(20, 4).bands
    )
    assert ROPE.local(10).self_extend(20, 4).bands == (Band(0, 10, 1, 0),)
    bands = ROPE.dual_chunk(160, 32).bands
    assert bands == (
        Band(0, 1, 1, 0, 1, 128),
        Band(1, 2, 1, 128, 1, 128, 32),
        Band(2, math.inf, 1, 160, 1, 128, 0),
    )
    assert ROPE.dual_chunk(300, 172).bands[2].offset == 255  # 2 s - 1, less than chunk_size
    assert ROPE.yarn(4.0, 64).dual_chunk(160, 32) == ROPE.dual_chunk(160, 32).yarn(4.0, 64)
    assert "floor(j" in repr(ROPE.self_extend(20, 4)) and "j mod 128" in repr(ROPE.dual_chunk(160, 32))


def test_what_kernels_get():
    """One rotated copy of the keys serves all bands of dual chunk attention. Self-Extend needs one copy for each of its
    two bands, like Leaky ReRoPE."""
    dual = lower(ROPE.dual_chunk(160, 32), True)
    assert len(dual.k_copies) == 1 and dual.k_stops == (UNBOUNDED,) and dual.maps[0].chunk == 128
    assert [(band.start, band.stop) for band in dual.bands] == [(0, 1), (1, 2), (2, UNBOUNDED // 128)]
    assert [dual.maps[band.q_rotation].last for band in dual.bands] == [UNBOUNDED, 32, 0]
    extended = lower(ROPE.self_extend(20, 4), True)
    assert len(extended.k_copies) == 2 and extended.k_stops == (20, UNBOUNDED) and extended.maps[0].chunk == 0
    assert [extended.maps[copy].group for copy in extended.k_copies] == [1, 4]
    assert lower(ROPE.rectify(20), True).maps == lower(ROPE, True).maps == ()


def test_calls_that_are_refused():
    q = torch.randn(1, 6, 2, 16)
    with pytest.raises(ValueError, match="causal: expected True for a scheme that maps positions .* got False"):
        attention(q, q, q, scheme("dual_chunk"), causal=False)
    with pytest.raises(ValueError, match="positions: expected None"):
        attention(q, q, q, ROPE.self_extend(0, 4), positions=torch.arange(6)[None])
