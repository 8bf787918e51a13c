"""Qwen2.5-1M's factor on the queries, max(1, 0.1 ln(n / length) + 1) of a sequence of n keys, in every call."""

import dataclasses
import math

import pytest
import support
import torch
from flashrope import KVCache, Rotary, attention, attention_varlen, attention_varlen_with_cache, attention_with_cache
from flashrope.integrations.options import read_options
from support import int32

PLAIN = Rotary.rope(16).dual_chunk(160, 32)
SCALED = Rotary.rope(16).dual_chunk(160, 32, length_scale=100)
LENGTHS = [208, 40, 150]  # two of them longer than 100


def factor(n):
    return max(1.0, 0.1 * math.log(n / 100) + 1)


def tensor(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("n", [60, 140, 270])
def test_one_length(n, impl):
    q, k, v = (tensor(2, n, 2, 16, seed=seed).requires_grad_() for seed in range(3))
    results = []
    for rotary, by in ((SCALED, 1.0), (PLAIN, factor(n))):
        out, lse = attention(q * by, k, v, rotary, return_lse=True, impl=impl)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))))
    close(*results)
    assert (n > 100) == (not torch.equal(results[0][0], attention(q, k, v, PLAIN, impl=impl)))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_packed_sequences_by_their_own_lengths(impl):
    starts_q, starts_k = int32([0, 30, 70, 75]), int32([0, *LENGTHS]).cumsum(0).to(torch.int32)
    q, k, v = (tensor(n, 2, 16, seed=seed).requires_grad_() for seed, n in enumerate((75, 398, 398)))
    by = torch.tensor([factor(n) for n in LENGTHS], dtype=torch.float64).repeat_interleave(torch.tensor([30, 40, 5]))
    results = []
    for rotary, queries in ((SCALED, q), (PLAIN, q * by[:, None, None])):
        out, lse = attention_varlen(queries, k, v, rotary, starts_q, starts_k, 40, 208, return_lse=True, impl=impl)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))))
    close(*results)
    none = attention_varlen(q[:0], k[:0], v[:0], SCALED, int32([0]), int32([0]), 1, 1)
    assert none.shape == (0, 2, 16)


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("pads", [None, [90, 0, 60]], ids=["", "padded"])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_cache_by_the_keys_that_it_holds(impl, pads, new):
    """Keys behind the padding, the new ones included."""
    caches = [tensor(3, 220, 2, 16, seed=seed) for seed in range(2)]
    q, more = tensor(3, 3, 2, 16, seed=2), [tensor(3, new, 2, 16, seed=seed) for seed in (3, 4)] if new else [None] * 2
    keys = [n + new - pad for n, pad in zip(LENGTHS, pads or [0] * 3, strict=True)]
    by = torch.tensor([factor(n) for n in keys], dtype=torch.float64)[:, None, None, None]
    results = []
    for rotary, queries in ((SCALED, q), (PLAIN, q * by)):
        options = {"cache_leftpad": None if pads is None else int32(pads), "return_lse": True, "impl": impl}
        copies = [x.clone() for x in caches]
        results.append(attention_with_cache(queries, *copies, rotary, int32(LENGTHS), k=more[0], v=more[1], **options))
    close(*results)


@pytest.mark.parametrize("appends", [False, True])
def test_packed_queries_over_pages(appends):
    pages = [tensor(45, 16, 2, 16, seed=seed) for seed in range(2)]
    table = torch.arange(42, dtype=torch.int32).view(3, 14)
    starts, rows = int32([0, 1, 8, 12]), torch.tensor([1, 7, 4])
    q, more = tensor(12, 2, 16, seed=2), [tensor(12, 2, 16, seed=seed) for seed in (3, 4)] if appends else [None] * 2
    keys = torch.tensor(LENGTHS) + (rows if appends else 0)
    by = torch.tensor([factor(n) for n in keys.tolist()], dtype=torch.float64).repeat_interleave(rows)
    results = []
    for rotary, queries in ((SCALED, q), (PLAIN, q * by[:, None, None])):
        copies, options = [x.clone() for x in pages], {"block_table": table, "return_lse": True}
        call = (queries, *copies, rotary, starts, int32(LENGTHS), 7)
        results.append(attention_varlen_with_cache(*call, k=more[0], v=more[1], **options))
    close(*results)


interpreted = pytest.mark.skipif(not support.INTERPRETED, reason="needs the interpreter")
OTHERS = {
    "dual_chunk": SCALED,
    "steps": dataclasses.replace(Rotary.hope(16, 60).rectify(21, 4.0).log_steps(7, 0.5), length_scale=30.0),
}


def against_float64(call, *tensors):
    """call(impl, *tensors) in float32 against the reference in float64."""
    exact = [x.double() for x in tensors]
    for got, want in zip(call("triton", *tensors), call("reference", *exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def differentiated(q, k, v, results):
    out, lse = results
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))


def floats(*shape, seed):
    return tensor(*shape, seed=seed).float().requires_grad_()


@interpreted
@pytest.mark.parametrize("scheme", OTHERS)
def test_the_kernels_of_triton(scheme):
    rotary = OTHERS[scheme]

    def dense(impl, q, k, v):
        return differentiated(q, k, v, attention(q, k, v, rotary, return_lse=True, impl=impl))

    def packed(impl, q, k, v):
        starts = int32([0, 1, 31, 35]), int32([0, 2, 42, 172])
        return differentiated(q, k, v, attention_varlen(q, k, v, rotary, *starts, 30, 130, return_lse=True, impl=impl))

    against_float64(dense, *(floats(1, n, 2, 16, seed=seed) for seed, n in enumerate((20, 130, 130))))
    against_float64(packed, *(floats(n, 2, 16, seed=seed) for seed, n in enumerate((35, 172, 172))))


@interpreted
@pytest.mark.parametrize("rows", [1, 70], ids=["decoded", "prefilled"])
@pytest.mark.parametrize("scheme", OTHERS)
def test_the_kernels_of_triton_with_a_cache(scheme, rows):
    lengths, pads, new = int32([170, 2, 75]), int32([40, 0, 3]), [floats(3, rows, 2, 16, seed=n) for n in (3, 4)]

    def cached(impl, q, k_cache, v_cache, k, v):
        options = {"cache_leftpad": pads, "return_lse": True, "impl": impl}
        return attention_with_cache(q, k_cache.clone(), v_cache.clone(), OTHERS[scheme], lengths, k=k, v=v, **options)

    with torch.no_grad():
        against_float64(cached, floats(3, rows, 2, 16, seed=2), *(floats(3, 260, 2, 16, seed=n) for n in (0, 1)), *new)


def test_tables_of_any_content():
    """Lengths and pads that no cache has; the kernels clamp them, and so does the factor."""
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
