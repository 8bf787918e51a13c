"""Tests p-RoPE and STRING: the papers' formulas, and how the schemes combine with other changes."""

import math

import pytest
import support
import torch
from flashrope import Band, Rotary, attention, attention_with_cache


@pytest.mark.parametrize("fraction, pairs", [(0, 0), (0.25, 16), (0.3, 19), (0.75, 48), (1, 64), (1.0, 64)])
def test_p_rope_rotates_the_first_pairs(fraction, pairs):
    rotary, rope = Rotary.p_rope(128, fraction, base=1e6), Rotary.rope(128, base=1e6)
    assert rotary.frequencies == rope.frequencies[:pairs] + (0.0,) * (64 - pairs)
    assert rotary.rotary_dim == 128 and (rotary == rope) == (fraction == 1)


def test_p_rope_is_hope_with_another_cut():
    hope = Rotary.hope(64, 512)
    kept = sum(map(bool, hope.frequencies))
    assert Rotary.p_rope(64, kept / 32) == hope
    assert Rotary.p_rope(64, 0.5, interleaved=True).interleaved


@pytest.mark.parametrize("fraction", [-0.1, 1.01, math.nan])
def test_p_rope_refuses_numbers(fraction):
    with pytest.raises(ValueError, match="^fraction: expected a number from 0 to 1, got"):
        Rotary.p_rope(64, fraction)


@pytest.mark.parametrize("fraction", [True, "0.5", None])
def test_p_rope_refuses_types(fraction):
    with pytest.raises(TypeError, match="^fraction: expected a number from 0 to 1, got"):
        Rotary.p_rope(64, fraction)


def test_string_sees_far_keys_nearer():
    rotary = Rotary.rope(16).string(start=40, window=7)
    assert rotary.bands == (Band(0, 40, 1.0, 0.0), Band(40, math.inf, 1.0, -33.0))
    assert Rotary.rope(16).local(100).string(40, 7).bands[-1].stop == 100
    assert Rotary.rope(16).local(40).string(40, 7) == Rotary.rope(16).local(40)


@pytest.mark.parametrize("causal", [True, False])
def test_string_is_attention_over_the_formula(exact, causal):
    """Attention equals a softmax over scores in which each pair (q, k) is rotated by the distance that the paper
    defines."""
    start, window, seqlen, d = 21, 5, 70, 16
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, seqlen, 2, d, generator=generator, dtype=torch.float64) for _ in range(3))
    distance = (torch.arange(seqlen)[:, None] - torch.arange(seqlen)).double()
    seen = torch.where(distance.abs() < start, distance, distance.sign() * (distance.abs() - start + window))
    angle = seen[..., None] * Rotary.rope(d).inv_freq
    (qx, qy), (kx, ky) = q.chunk(2, -1), k.chunk(2, -1)
    same, crossed = (torch.einsum("bihm,bjhm->hijm", *pair) for pair in ((qx, kx), (qx, ky)))
    same += torch.einsum("bihm,bjhm->hijm", qy, ky)
    crossed = torch.einsum("bihm,bjhm->hijm", qx, ky) - torch.einsum("bihm,bjhm->hijm", qy, kx)
    scores = (same * angle.cos() + crossed * angle.sin()).sum(-1) / math.sqrt(d)
    if causal:
        scores = scores.masked_fill(distance < 0, -math.inf)
    expected = torch.einsum("hij,bjhd->bihd", scores.softmax(-1), v)
    own = (x.to(exact.device, exact.dtype) for x in (q, k, v))
    out = attention(*own, Rotary.rope(d).string(start, window), causal=causal, impl=exact.impl)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)


def test_string_decodes_like_a_prefill(exact):
    rotary = Rotary.p_rope(16, 0.5).string(21, 5).log_n(30)
    q, k, v = (torch.randn(2, 60, 2, 16, device=exact.device, dtype=exact.dtype) for _ in range(3))
    whole = attention(q, k, v, rotary, impl=exact.impl)
    lengths = support.int32([60, 60], exact.device)
    out = attention_with_cache(q[:, -1:], k, v, rotary, lengths, impl=exact.impl)
    torch.testing.assert_close(out, whole[:, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 0), "start: expected a positive integer, got 0"),
        ((8, 8), "window: expected less than start = 8, got 8; far keys move nearer, not away"),
        ((8, -1), "window: expected a non-negative integer, got -1"),
        ((8.0, 1), "start: expected a positive integer, got 8.0"),
    ],
)
def test_string_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rotary.rope(16).string(*arguments)


def test_one_window_per_scheme():
    with pytest.raises(ValueError, match="string: this scheme is rectified already"):
        Rotary.rope(16).rectify(8).string(8, 1)
    with pytest.raises(ValueError, match="rectify: this scheme has string already"):
        Rotary.rope(16).string(8, 1).rectify(8)
    with pytest.raises(ValueError, match="string: bands over the distance need one-dimensional positions"):
        Rotary.axial(16).string(8, 1)
