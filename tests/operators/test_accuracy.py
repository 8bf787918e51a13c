"""Compares out, lse and gradients of every backend with float64, within the budget of ``support``."""

import pytest
import support
import torch
from flashrope import Rotary, attention
from formula import by_hand
from support import SCHEMES, check, problem


def by_bands(rotary, causal):
    """Returns the positions that a scheme gives to a query and a key, from its bands and their mirror images."""
    bands = [band[:4] for band in rotary.bands]
    if not causal:
        bands += [(1 - stop, 1 - start, slope, -offset) for start, stop, slope, offset in bands]

    def positions(i, j):
        held = [(slope * i + offset, slope * j) for start, stop, slope, offset in bands if start <= i - j < stop]
        return held[-1] if held else None

    return positions


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_is_the_formula(scheme, causal):
    double = support.Target("reference", torch.float64, "cpu")
    for seqlen_q, seqlen_k in ((26, 26), (3, 26), (26, 24)):
        p = problem(double, SCHEMES[scheme](8), seqlen_q, seqlen_k, heads=1, group=1, causal=causal)
        out, lse = attention(p.q, p.k, p.v, p.rotary, causal=causal, return_lse=True, impl="reference")
        want, want_lse = by_hand(p, by_bands(p.rotary, causal))
        torch.testing.assert_close(out[0, :, 0], want, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[0, 0], want_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", ["R", "R.interpolate(3.0)", "R.log_n(20)", "R.log_steps(8.0, 0.1)"])
def test_the_reference_at_positions_up_to_two_to_the_30(scheme, dtype, default):
    """Integer positions are exact in float64. In torch's default dtype they would be rounded beyond 2^24, or 2^8."""
    rotary = eval(scheme, {"R": Rotary.rope(8)})
    p = problem(support.Target("reference", torch.float64, "cpu"), rotary, 26, heads=1, group=1)
    at = [(1 << 30) - 41_297_763 * n for n in range(26)]
    p = p.replace(positions=torch.tensor([at]).to(dtype))
    torch.set_default_dtype(default)
    try:
        got = support.run(p, "reference")
    finally:
        torch.set_default_dtype(torch.float32)
    scales = rotary.query_scale.of(torch.tensor(at, dtype=torch.float64), 26)
    unscaled = Rotary(rotary.head_dim, rotary.frequencies)
    by_row = p.replace(rotary=unscaled, q=p.q * scales[None, :, None, None])
    want, want_lse = by_hand(by_row, lambda i, j: (at[i], at[j]) if j <= i else None)
    torch.testing.assert_close(got["out"][0, :, 0], want, rtol=0, atol=1e-6)
    torch.testing.assert_close(got["lse"][0, 0], want_lse, rtol=0, atol=1e-6)
    exact = support.run(p.replace(positions=p.positions.double()), "reference")
    for name in exact:
        assert torch.equal(got[name], exact[name]), name


@pytest.mark.interpreted(
    lambda target, scheme: (
        scheme
        in (
            ("rope_interleaved", "hope_compact", "rerope", "local", "yarn_leaky_local_log_n")
            if target.dtype == torch.float32
            else ("rope", "yarn_leaky_local_log_n")
        )
    )
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_causal(target, scheme):
    check(target, problem(target, SCHEMES[scheme](target.size(16, 64)), target.size(70, 400), seed=1))


@pytest.mark.interpreted(lambda exact, scheme: scheme in ("rope", "rerope", "yarn_leaky_local_log_n"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_seen_both_ways(exact, scheme):
    check(exact, problem(exact, SCHEMES[scheme](16), exact.size(40, 300), exact.size(50, 333), causal=False, seed=2))


LENGTHS = [(1, 1), (1, 70), (20, 70), (70, 20), (33, 32), (0, 5), (5, 0), (0, 0)]


@pytest.mark.interpreted(lambda exact, seqlens, causal: causal or seqlens == (20, 70))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seqlens", LENGTHS, ids=lambda pair: f"{pair[0]}x{pair[1]}")
def test_lengths(exact, seqlens, causal):
    for rotary in (Rotary.hope(16, 100), Rotary.rope(16).rectify(21).log_n(20)):
        check(exact, problem(exact, rotary, *seqlens, causal=causal, seed=3))


@pytest.mark.parametrize("scheme", ["rope", "rerope", "local", "yarn_leaky_local_log_n"])
def test_long(scheme):
    """Sequences longer than every block size of the CPU kernels, with whole and partial chunks of a band, stay within
    the budget."""
    for target in support.TARGETS:
        if target.slow or target.dtype == torch.float16:
            continue
        for seqlens, causal in (((530, 530), True), ((130, 500), False)):
            check(target, problem(target, SCHEMES[scheme](16), *seqlens, seed=4, causal=causal, group=1 + causal))


def test_second_coarse_row(exact):
    """Positions beyond the first coarse row of the table (1,024 positions) give the same results as positions before
    it: only relative rotations matter."""
    check(
        exact, problem(exact, Rotary.rope(16, base=100.0).rectify(20, 3.0).local(60), 9, 1060, heads=1, group=1, seed=6)
    )


@pytest.mark.interpreted(
    lambda exact, kind, window: window in {"rectify": (0, 32, 33), "leaky": (33,), "local": (1, 32)}[kind]
)
@pytest.mark.parametrize(
    "kind, window",
    [
        (kind, window)
        for kind in ("rectify", "leaky", "local")
        for window in (0, 1, 31, 32, 33, 64, 69, 70, 200)
        if window or kind != "local"
    ],
)
def test_windows(exact, kind, window):
    rope = Rotary.rope(16)
    rotary = rope.local(window) if kind == "local" else rope.rectify(window, 3.0 if kind == "leaky" else None)
    check(exact, problem(exact, rotary, 70, seed=5))
    if not exact.slow:
        check(exact, problem(exact, rotary, 60, 70, seed=5, causal=False))


@pytest.mark.interpreted(lambda target, head_dim: head_dim in ((8, 40) if target.dtype == torch.float32 else (72,)))
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 128, 160, 192, 256])
def test_head_dims(target, head_dim):
    for rotary in (Rotary.rope(head_dim).rectify(21), Rotary.hope(head_dim, 100, interleaved=True)):
        check(target, problem(target, rotary, 40, seed=6))


def test_forward_in_two_parts_of_the_channels(target):
    """The Triton kernel takes heads of 128 and 256 channels in two parts if the type has 16 bits and a warp has many
    rows. In half pairing each part has one member of every pair. Interleaved, each part has whole pairs."""
    for rotary in (
        Rotary.rope(128, rotary_dim=32),
        Rotary.hope(128, 100, interleaved=True),
        Rotary.rope(256, rotary_dim=64),
    ):
        check(target, problem(target, rotary, 40, seed=16, heads=2))


@pytest.mark.interpreted(lambda target, layout: target.dtype == torch.float32)
@pytest.mark.parametrize("layout", ["transposed", "poisoned"])
def test_layouts(target, layout):
    check(target, problem(target, Rotary.rope(16).rectify(21), 50, batch=2, seed=7, layout=layout))


def test_packed_projection(exact):
    """q, k and v may be views of one projection, and grad_out may be expanded from a scalar (stride 0), as in
    out.sum().backward()."""
    qkv = support.random((2, 40, 6, 16), exact, 8)
    q, k, v = qkv.split((4, 1, 1), dim=2)
    grad_out = torch.ones((), device=exact.device, dtype=exact.dtype).expand(q.shape)
    grad_lse = torch.zeros((), device=exact.device, dtype=torch.float32).expand(2, 4, 40)
    check(exact, support.Problem(q, k, v, Rotary.hope(16, 100), grad_out=grad_out, grad_lse=grad_lse))


@pytest.mark.interpreted(lambda exact, heads, group: heads < 6)
@pytest.mark.parametrize(("heads", "group"), [(5, 1), (4, 2), (3, 3), (6, 3)])
def test_grouped_heads(exact, heads, group):
    """Results are right for grouped heads, whether or not the number of heads is a multiple of 4, the number of heads
    that one program rotates."""
    for rotary in (Rotary.rope(16), Rotary.rope(16).rectify(21)):
        check(exact, problem(exact, rotary, 25 if exact.slow else 45, batch=2, heads=heads, group=group, seed=9))


@pytest.mark.interpreted(lambda exact, positions: positions in ("fractions", "axial"))
@pytest.mark.parametrize("positions", ["integers", "fractions", "shared", "axial"])
def test_positions(exact, positions):
    generator = torch.Generator().manual_seed(10)
    given = torch.rand(2, 40, generator=generator) * 90 - 5
    rotary = Rotary.rope(16).yarn(2.0, 100)
    if positions == "integers":
        given = given.to(torch.int32)
        rotary = rotary.local(21)
    elif positions == "shared":
        given, rotary = given[:1], rotary.log_n(20)
    elif positions == "axial":
        given, rotary = (
            torch.stack((torch.arange(40) // 8, torch.arange(40) % 8), -1).expand(2, 40, 2),
            Rotary.axial(16),
        )
    check(
        exact,
        problem(exact, rotary, 40, batch=2, seed=11, positions=given.to(exact.device), causal=positions != "axial"),
    )


def test_softmax_scale(exact):
    for scale in (0.7, 0.0):
        check(exact, problem(exact, Rotary.rope(16).rectify(21), 40, seed=12, softmax_scale=scale))


@pytest.mark.parametrize("missing", ["grad_out", "grad_lse"])
def test_one_gradient_comes_alone(exact, missing):
    p = problem(exact, Rotary.rope(16).rectify(21), 40, seed=13)
    both = support.exact_and_bound(p)[1]
    p = p.replace(**{missing: torch.zeros_like(getattr(p, missing))})
    exact_values, _ = support.exact_and_bound(p)
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    out, lse = attention(*leaves, p.rotary, return_lse=True, impl=exact.impl)
    results, grads = (lse, p.grad_lse) if missing == "grad_out" else (out, p.grad_out)
    got = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    for name, x, leaf in zip(support.NAMES[2:], got, leaves, strict=True):
        error = ((torch.zeros_like(leaf) if x is None else x).double() - exact_values[name]).abs()
        assert (error <= 16 * 2**-24 * both[name]).all(), name


@pytest.mark.interpreted(lambda target: target.dtype == torch.float32)
def test_gradients_repeat_bit_for_bit(target):
    p = problem(target, Rotary.rope(16).rectify(21), target.size(50, 400), heads=2, seed=14)
    first, second = support.run(p, target.impl), support.run(p, target.impl)
    for name in support.NAMES:
        assert torch.equal(first[name], second[name]), name
