"""A call over a quantized cache computes attention over the dequantized keys and values, whichever backend and kernel
writes or reads them."""

import pytest
import support
import torch
from caching import PAGE, Cached, cached_call, dequantized, page_sizes, quantized
from flashrope import (
    KVCache,
    Rotary,
    attention,
    rotate,
)
from flashrope.backends.cpu import loader
from flashrope.backends.registry import load_backend
from flashrope.calls.cache_tables import CacheLayer, CacheTables
from support import SCHEMES
from test_decode import MIXED, causalities, mappings
from test_rotate import by_complex_numbers
from test_rotated_keys import cached as rotated
from test_rotated_keys import caches, contiguous, paged, tokens


@pytest.mark.interpreted(
    lambda target, page_size, scheme: (
        target.dtype == torch.float32
        and bool(page_size) == (scheme in ("rope_partial", "hope_compact", "hope_rerope_log_n"))
    )
)
@page_sizes
@pytest.mark.parametrize(
    "scheme",
    ["none", "rope", "rope_interleaved", "rope_partial", "hope_compact", "rerope", "leaky", "hope_rerope_log_n"],
)
def test_one_token(target, page_size, scheme):
    options = dict(leftpad=(3, 0, 0, 40), page=page_size, cache_dtype="int8")
    Cached(target, SCHEMES[scheme](16), (45, 1, 64, 22), **options).check()


@pytest.mark.interpreted(lambda exact, page_size, causal: bool(page_size) == causal)
@causalities
@page_sizes
def test_several_tokens(exact, page_size, causal):
    options = dict(leftpad=(3, 0, 0), page=page_size, causal=causal, cache_dtype="int8")
    Cached(exact, SCHEMES["leaky"](16), (45, 5, 64), 5, **options).check()


@pytest.mark.interpreted(lambda exact, page_size, scheme: bool(page_size) == (scheme in ("rope_interleaved", "rerope")))
@page_sizes
@pytest.mark.parametrize("scheme", ["none", "rope_partial", "rope_interleaved", "rerope", "yarn_leaky_local_log_n"])
def test_chunks(exact, page_size, scheme):
    """Chunks give the right results. More than 64 queries may be served by another kernel. One sequence fills the
    cache, and one starts after padding."""
    options = dict(heads=(2, 1), leftpad=(0, 30), page=page_size, cache_dtype="int8")
    Cached(exact, SCHEMES[scheme](16), (112, 66), 66, **options).check()


@pytest.mark.interpreted(lambda exact, page_size, mapped: bool(page_size) == mapped)
@page_sizes
@mappings
def test_packed(exact, page_size, mapped):
    options = dict(leftpad=(10, 3, 0, 0, 2, 0, 1, 0), page=page_size, mapped=mapped, cache_dtype="int8")
    Cached.packed(exact, SCHEMES["hope_rerope_log_n"](16), MIXED, **options).check()


@pytest.mark.interpreted(lambda exact, seqlen_q, head_dim: (head_dim == 24) == (seqlen_q == 1))
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_the_layout_of_vllm(exact, seqlen_q, head_dim):
    """Quantized K and V and their scales may lie in one buffer, as in vLLM. Its rows are aligned to only 4 bytes."""
    rotary = Rotary.rope(head_dim, rotary_dim=12).rectify(21)
    options = dict(heads=(2, 1), page=PAGE, cache_dtype="int8", layout="vllm")
    Cached(exact, rotary, (110, 80), seqlen_q, **options).check()


@pytest.mark.interpreted(lambda target, scheme, head_dim: head_dim == 96)
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize(
    "scheme",
    [
        Rotary.none,
        lambda d: Rotary.rope(d, rotary_dim=d // 2).rectify(11),
        lambda d: Rotary.rope(d, rotary_dim=d // 2 + 2).rectify(11),  # both channels of a pair share words
        lambda d: Rotary.rope(d, rotary_dim=10).rectify(11),  # words hold a first and a second member
        SCHEMES["hope_rerope_log_n"],
    ],
    ids=["none", "partial", "sharing", "ten", "interleaved"],
)
def test_keys_that_do_not_rotate(target, scheme, head_dim):
    """Keys that do not rotate are right in heads that are wide enough for 16-bit words."""
    Cached(target, scheme(head_dim), (60, 33), heads=(2, 1), leftpad=(3, 0), cache_dtype="int8").check()


def test_rows_at_odd_bytes(exact):
    c = Cached(exact, SCHEMES["rerope"](128), (60, 33), heads=(2, 1), cache_dtype="int8")
    for got, want in zip(c.replace(layout="odd bytes").call(), c.call(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted(lambda exact, seqlen_q, head_dim: (head_dim == 64) == (seqlen_q == 1))
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_rotated_keys(exact, seqlen_q, head_dim):
    """Rotated keys give the right results: keys are rotated, rounded, then quantized, and a later call rotates only
    queries."""
    rotary = Rotary.rope(head_dim, rotary_dim=12)
    c = rotated(exact, rotary, (90, 70), seqlen_q, heads=(2, 1), leftpad=(3, 0), page=PAGE, cache_dtype="int8")
    out, lse = c.call()
    for b, (p, place) in enumerate(zip(c.problems, c.visible, strict=True)):
        codes = c.k_cache[place].double()
        stored = codes * c.scales["k_scale"][place].double()[..., None]
        numbers, scale = quantized(c.stored(p.k)[0].to(p.k))
        torch.testing.assert_close(c.scales["k_scale"][place].double(), scale, rtol=1e-6, atol=0)
        assert (codes - numbers).abs().max() <= 1  # rounding may move a number across the middle between two steps
        assert ((codes - numbers) != 0).double().mean() < 1e-2
        raw = by_complex_numbers(stored[None], rotary, -torch.arange(stored.shape[0])).to(out.device)
        want = p.replace(k=raw, v=dequantized(p.v))
        support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, want, exact.dtype, f"sequence {b}: ")


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_reference(seqlen_q):
    target = support.Target("reference", torch.float64, "cpu")
    options = dict(leftpad=(3, 0), page=PAGE, cache_dtype="int8")
    Cached(target, SCHEMES["hope_rerope_log_n"](16), (90, 70), seqlen_q, **options).check()


def test_sdpa():
    """Calls with one token, with a chunk and with packed queries give the right results with PyTorch's kernels."""
    target = support.Target("sdpa", torch.float32, "cpu")
    for seqlen_q, scheme in ((1, "rope"), (70, "rerope")):
        Cached(target, SCHEMES[scheme](16), (90, 70), seqlen_q, page=PAGE, cache_dtype="int8").check()
    Cached.packed(target, SCHEMES["leaky"](16), MIXED, mapped=True, cache_dtype="int8").check()


def test_wide_heads(exact):
    Cached(exact, Rotary.hope(128, 100, compact=True), (60, 33), heads=(2, 1), cache_dtype="int8").check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, 1e-44, 2.5e-43, 3e38])
def test_rows_of_one_value(exact, value):
    """Rows of NaN, infinities, zeros, the smallest or the largest numbers change only the scale and values of their own
    row."""
    seqlens, largest = support.int32([3, 5], exact.device), 127
    q, k, v = (support.random((2, 1, heads, 16), exact, n) for n, heads in enumerate((4, 2, 2)))
    k[1, 0, 1, 3] = value
    if abs(value) < 1e-42:  # 2.5e-43 divided by its scale is beyond the largest code, because the scale is rounded
        k[1, 0, 1] = value
    results = []
    for new in (k, k.nan_to_num(1.0, 1.0, 1.0).clamp(-4, 4)):
        zeros = torch.zeros(2, 2, 32, 2, 16, device=exact.device)
        codes, scales = zeros.to(torch.int8), torch.ones_like(zeros[..., 0])
        out = cached_call(
            q, *codes, Rotary.rope(16), seqlens, k=new, v=v, impl=exact.impl, k_scale=scales[0], v_scale=scales[1]
        )
        results.append((out, codes, scales))
    (out, codes, scales), (other_out, other_codes, other_scales) = results
    written, scale = codes[0, 1, 5, 1].double(), scales[0, 1, 5, 1]
    if value != value:
        assert scale.isnan() and not written.any() and out[1, 0, 2:].isnan().all()
    elif abs(value) < 1e-42:
        assert value < 1e-43 or (written == largest).all()
        assert scale <= value and written.abs().max() <= largest and (value or not (scale or written.any()))
    else:
        limit = min(abs(value), torch.finfo(torch.float32).max)
        torch.testing.assert_close(scale.item(), limit / largest, rtol=1e-6, atol=0.0)
        assert written[3] == (largest if value > 0 else -largest)
    assert torch.equal(out[0], other_out[0]) and torch.equal(out[1, 0, :2], other_out[1, 0, :2])
    codes[0, 1, 5, 1], scales[0, 1, 5, 1] = other_codes[0, 1, 5, 1], other_scales[0, 1, 5, 1]
    assert torch.equal(codes, other_codes) and torch.equal(scales, other_scales)


def rows_to_quantize(dtype, head_dim):
    """Returns (rows, head_dim): normal numbers, ties, zeros, subnormal and large numbers, NaN,
    infinities."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(head_dim, generator=generator) * 10.0**power for power in (-30, -3, 0, 0, 0, 0, 4, 30)]
    ties = (torch.arange(head_dim) * 37 % (4 * 127) - 2 * 127) / 2  # the scale is 1, so multiples of 0.5 are ties
    ties[-1] = 127
    rows += [ties, -ties, ties * 2.0**-20]
    rows += [torch.zeros(head_dim), -torch.zeros(head_dim)]
    rows += [torch.full((head_dim,), value) for value in (1e-44, 2.5e-43, 3e38)]
    for channel, value in ((0, torch.nan), (head_dim - 1, torch.nan), (3, torch.inf), (head_dim - 1, -torch.inf)):
        rows.append(torch.randn(head_dim, generator=generator))
        rows[-1][channel] = value
    rows.append(rows[-1].clone())
    rows[-1][1] = torch.nan  # in the same row as an infinity
    return torch.stack(rows).to(dtype)


def appended(impl, rows, device="cpu") -> list[torch.Tensor]:
    """Returns the caches and scales after the rows were appended to a cache with room for 40."""
    head_dim = rows.shape[-1]
    k = torch.stack((rows, rows.roll(5, 0)), 1)[None].to(device)  # two heads
    tables = CacheTables(torch.zeros(1, dtype=torch.int32, device=device), new=len(rows))
    packed = [torch.full((1, 40, 2, head_dim), 5, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.full((1, 40, 2), 3.0, device=device) for _ in range(2)]
    load_backend(impl).append_to_cache(CacheLayer(*packed, *scales), k, k.roll(3, 1), tables)
    return [x.cpu() for x in (*packed, *scales)]


def equal_to_sdpa(found, rows) -> None:
    for x, other in zip(found, appended("sdpa", rows), strict=True):
        torch.testing.assert_close(x, other, rtol=0, atol=0, equal_nan=True)
    assert found[2].isnan().sum() == 2 * 3 and (found[2][0, len(rows) :] == 3).all()


@pytest.mark.skipif(loader.load() is None, reason="no compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 200, 256])
def test_the_compiled_append_writes_what_sdpa_writes(head_dim, dtype):
    rows = rows_to_quantize(dtype, head_dim)
    equal_to_sdpa(appended("cpu", rows), rows)


@pytest.mark.parametrize("target", [t for t in support.TARGETS if t.impl == "triton"], ids=str)
def test_the_triton_append_writes_what_sdpa_writes(target):
    rows = rows_to_quantize(target.dtype, 24)
    equal_to_sdpa(appended("triton", rows, target.device), rows)


def test_what_quantization_costs(exact):
    """For normally distributed keys and values, int8 changes the result by less than 1%."""
    if exact.slow:
        pytest.skip("the other backends do the same")
    q, k, v = (support.random((4, 200, heads, 64), exact, n) for n, heads in enumerate((4, 2, 2)))
    want = attention(q, k, v, Rotary.rope(64), impl=exact.impl)
    cache = KVCache(4, 200, 2, 64, torch.float32, exact.device, cache_dtype="int8")
    out = cache.attend(q, Rotary.rope(64), k, v, impl=exact.impl)
    assert 0.0025 < ((out - want).square().mean() / want.square().mean()).sqrt().item() < 0.01


# ---- our caches

ROPE = Rotary.rope(16).rectify(21)


def over_quantized(q, k, v, rotary):
    exact = q.double(), dequantized(k), dequantized(v)
    return attention(*exact, rotary, impl="reference").float()


@caches
def test_a_prompt_then_steps(make):
    cache, attend, append = make(cache_dtype="int8")
    q, k, v = tokens(60)
    append(k[:, :40], v[:, :40])
    append(torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16))  # rejected drafts
    for name in [None] if make is contiguous else cache.sequences:
        cache.truncate(name, 40)
    out = [attend(q[:, a:b], ROPE, k[:, a:b], v[:, a:b]) for a, b in ((40, 41), (41, 46), (46, 60))]
    want = over_quantized(q, k, v, ROPE)
    torch.testing.assert_close(torch.cat(out, 1), want[:, 40:], rtol=1e-4, atol=1e-5)
    assert "dtype=torch.float32, device='cpu', cache_dtype='int8'" in repr(cache) and "head_dim=16" in repr(cache)
    slots = 2 * 96 if make is contiguous else 20 * PAGE
    assert cache.nbytes == slots * 2 * 2 * (16 + 4)
    plain, _, _ = make()
    assert plain.cache_dtype is None and plain.k_scale is None and plain.scales() == (None, None)


def test_a_fork_copies_codes_and_scales():
    cache, _, append = paged(cache_dtype="int8", layers=2)
    q, k, v = tokens(50)
    append(torch.stack([k, v])[:, :, :40], torch.stack([v, k])[:, :, :40])
    child, other = cache.fork(cache.sequences[0]), torch.randn(1, 10, 2, 16)
    for name, new in (([child], (other, other)), ([cache.sequences[0]], (k[:1, 40:], v[:1, 40:]))):
        with cache.step(name, 10) as step:
            outs = [step.attend(q[:1, 40:], ROPE, *pair, layer=n) for n, pair in enumerate((new, new[::-1]))]
        full_k, full_v = (torch.cat((x[:, :40], y.expand(2, -1, -1, -1)), 1) for x, y in zip((k, v), new, strict=True))
        for out, pair in zip(outs, ((full_k, full_v), (full_v, full_k)), strict=True):
            expected = over_quantized(q, *pair, ROPE)[:1, 40:]
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@caches
def test_rotated_keys_of_a_cache(make):
    rotary = Rotary.rope(16)
    cache, attend, append = make(cache_dtype="int8", rotated_keys=rotary)
    q, k, v = tokens(50)
    append(k[:, :40], v[:, :40])
    out = attend(q[:, 40:], rotary, k[:, 40:], v[:, 40:])
    stored = dequantized(rotate(k, rotary))
    unrotated = by_complex_numbers(stored, rotary, -torch.arange(50))
    want = attention(q.double(), unrotated, dequantized(v), rotary, impl="reference").float()
    torch.testing.assert_close(out, want[:, 40:], rtol=1e-3, atol=1e-3)
    if make is contiguous:
        torch.testing.assert_close(cache.k_scale[:, :50], quantized(rotate(k, rotary))[1].float())


def test_a_pickled_cache_of_another_type_is_refused():
    state = KVCache(1, 16, 2, 16, torch.float32, "cpu", cache_dtype="int8").__getstate__() | {"cache_dtype": "int4"}
    with pytest.raises(ValueError, match="cache_dtype: expected None or 'int8', got 'int4'"):
        KVCache.__new__(KVCache).__setstate__(state)
