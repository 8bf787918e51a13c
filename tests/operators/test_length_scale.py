"""Tests Qwen2.5-1M's factor on the queries in every call. For a sequence of n keys it is max(1, 0.1 ln(n / length) +
1)."""

import dataclasses
import math

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import KVCache, Rotary, attention, attention_varlen, attention_with_cache
from flashrope.integrations.scheme_options import read_options
from packing import packing
from support import int32

PLAIN = Rotary.rope(16).dual_chunk(160, 32)
SCALED = Rotary.rope(16).dual_chunk(160, 32, length_scale=100)
TRITON = "triton", torch.float32


def factor(n):
    return max(1.0, 0.1 * math.log(n / 100) + 1)


def tensor(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@pytest.mark.parametrize("n", [60, 140, 270])
def test_one_length(n, impl):
    q, k, v = (tensor(2, n, 2, 16, seed=seed).requires_grad_() for seed in range(3))
    results = []
    for rotary, by in ((SCALED, 1.0), (PLAIN, factor(n))):
        out, lse = attention(q * by, k, v, rotary, return_lse=True, impl=impl)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert (n > 100) == (not torch.equal(results[0][0], attention(q, k, v, PLAIN, impl=impl)))


OTHERS = {
    "dual_chunk": SCALED,
    "steps": dataclasses.replace(Rotary.hope(16, 60).rectify(21, 4.0).log_steps(7, 0.5), length_scale=30.0),
}
REFERENCE = support.Target("reference", torch.float64, "cpu")
# The factor does not depend on the type: it is tested in float64, and in float32 on Triton.
TARGETS = [REFERENCE, *(t for t in support.TARGETS if t.dtype == torch.float64 or (t.impl, t.dtype) == TRITON)]
targets = pytest.mark.parametrize("target", TARGETS, ids=str)
others = pytest.mark.parametrize("scheme", OTHERS)


@targets
@others
def test_packed_sequences_by_their_own_lengths(target, scheme):
    p = packing(target, OTHERS[scheme], (1, 30, 4, 0), (2, 40, 130, 3), heads=2)
    p.check(p.run(target.impl), target.dtype)


def test_no_sequence():
    none = tensor(0, 2, 16)
    assert attention_varlen(none, none, none, SCALED, int32([0]), int32([0]), 1, 1).shape == (0, 2, 16)


@targets
@others
@pytest.mark.parametrize("rows", [1, 3, 70, (1, 7, 4)], ids=["one", "several", "prefilled", "packed"])
@pytest.mark.parametrize("pads", [None, (90, 0, 60)], ids=["", "padded"])
def test_a_cache_by_the_keys_that_it_holds(target, scheme, rows, pads):
    """Over a cache, the factor depends on the number of keys after the padding, including the new ones."""
    if target.slow and not (rows in (1, 70) and pads and (scheme == "steps") == (rows == 1)):
        pytest.skip("slow in the interpreter, and the same kernels")
    options = {"page": PAGE} if isinstance(rows, tuple) else {"new": 0 if rows == 3 else None}
    Cached(target, OTHERS[scheme], (170, 75, 150), rows, heads=(2, 1), leftpad=pads, **options).check()


def test_tables_of_any_content():
    """Lengths and paddings that are out of range are clamped by the kernels. The factor clamps them in the same way."""
    caches, q = [tensor(3, 220, 2, 16, seed=seed) for seed in range(2)], tensor(3, 1, 2, 16)
    out = attention_with_cache(q, *caches, SCALED, int32([-5, 1 << 30, 0]), cache_leftpad=int32([3, -7, 1 << 30]))
    assert out.isfinite().all()


def test_a_growing_cache():
    q, k, v = (tensor(1, 120, 1, 16, seed=seed) for seed in range(3))
    cache = KVCache(1, 120, 1, 16, dtype=torch.float64, device="cpu")
    for stop in (119, 120):
        rows = slice(0 if stop == 119 else 119, stop)
        out = cache.attend(q[:, rows], SCALED, k[:, rows], v[:, rows])
    whole = attention(q * factor(120), k, v, PLAIN)
    torch.testing.assert_close(out, whole[:, -1:], rtol=1e-12, atol=1e-12)


def test_the_scheme():
    assert SCALED != PLAIN and SCALED.length_scale == 100 and PLAIN.length_scale is None
    assert "score scale: max(1, 0.1 * ln(n / 100) + 1)" in repr(SCALED)
    assert SCALED.log_n(50).length_scale == 100


def test_as_an_option_of_convert():
    assert read_options({"dual_chunk": [160, 32, 100]}, None) == {"dual_chunk": (160, 32, 100)}
    with pytest.raises(TypeError, match=r"dual_chunk: expected a pair \(chunk_size, local_size\), or three numb"):
        read_options({"dual_chunk": (160, 32, 100, 1)}, None)
    with pytest.raises(TypeError, match=r"self_extend: expected a pair \(window, group\), got"):
        read_options({"self_extend": (160, 32, 100)}, None)
