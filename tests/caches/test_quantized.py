"""A call over a quantized cache computes attention over the dequantized keys and values, whichever backend and kernel
writes or reads them."""

import pytest
import support
import torch
from caching import BITS, PAGE, Cached, dequantized, pack, page_sizes, quantized, unpacked
from flashrope import (
    KVCache,
    Rotary,
    attention,
    attention_with_cache,
    rotate,
)
from flashrope.backends.cache_tables import CacheLayer, CacheTables
from flashrope.backends.cpu import loader
from flashrope.backends.registry import load_backend
from support import SCHEMES
from test_decode import MIXED, causalities, mappings
from test_rotate import by_complex_numbers
from test_rotated_keys import cached as rotated
from test_rotated_keys import caches, contiguous, paged, tokens

bits = pytest.mark.parametrize("cache_dtype", BITS)


@pytest.mark.interpreted(
    lambda target, page_size, scheme, cache_dtype: (
        target.dtype == torch.float32
        and bool(page_size) == (scheme in ("rope_partial", "hope_compact", "hope_rerope_log_n"))
        and (cache_dtype == "int8") == (scheme in ("rope", "rerope", "rope_interleaved", "hope_rerope_log_n"))
    )
)
@bits
@page_sizes
@pytest.mark.parametrize(
    "scheme",
    ["none", "rope", "rope_interleaved", "rope_partial", "hope_compact", "rerope", "leaky", "hope_rerope_log_n"],
)
def test_one_token(target, page_size, scheme, cache_dtype):
    options = dict(leftpad=(3, 0, 0, 40), page=page_size, cache_dtype=cache_dtype)
    Cached(target, SCHEMES[scheme](16), (45, 1, 64, 22), **options).check()


@pytest.mark.interpreted(lambda exact, page_size, cache_dtype, causal: bool(page_size) == causal)
@causalities
@bits
@page_sizes
def test_several_tokens(exact, page_size, cache_dtype, causal):
    options = dict(leftpad=(3, 0, 0), page=page_size, causal=causal, cache_dtype=cache_dtype)
    Cached(exact, SCHEMES["leaky"](16), (45, 5, 64), 5, **options).check()


@pytest.mark.interpreted(
    lambda exact, page_size, scheme, cache_dtype: (
        bool(page_size) == (scheme in ("rope_interleaved", "rerope"))
        and (cache_dtype == "int8") == (scheme in ("rerope", "rope_partial"))
    )
)
@bits
@page_sizes
@pytest.mark.parametrize("scheme", ["none", "rope_partial", "rope_interleaved", "rerope", "yarn_leaky_local_log_n"])
def test_chunks(exact, page_size, scheme, cache_dtype):
    """Chunks give the right results. More than 64 queries may be served by another kernel. One sequence fills the
    cache, and one starts after padding."""
    options = dict(heads=(2, 1), leftpad=(0, 30), page=page_size, cache_dtype=cache_dtype)
    Cached(exact, SCHEMES[scheme](16), (112, 66), 66, **options).check()


@pytest.mark.interpreted(
    lambda exact, page_size, mapped, cache_dtype: bool(page_size) == mapped == (cache_dtype == "int4")
)
@bits
@page_sizes
@mappings
def test_packed(exact, page_size, mapped, cache_dtype):
    options = dict(leftpad=(10, 3, 0, 0, 2, 0, 1, 0), page=page_size, mapped=mapped, cache_dtype=cache_dtype)
    Cached.packed(exact, SCHEMES["hope_rerope_log_n"](16), MIXED, **options).check()


@pytest.mark.interpreted(lambda exact, seqlen_q, head_dim, cache_dtype: (head_dim == 24) == (cache_dtype == "int4"))
@bits
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_the_layout_of_vllm(exact, seqlen_q, head_dim, cache_dtype):
    """Quantized K and V and their scales may lie in one buffer, as in vLLM. Its rows are aligned to only 4 bytes."""
    rotary = Rotary.rope(head_dim, rotary_dim=12).rectify(21)
    options = dict(heads=(2, 1), page=PAGE, cache_dtype=cache_dtype, layout="vllm")
    Cached(exact, rotary, (110, 80), seqlen_q, **options).check()


@pytest.mark.interpreted(lambda target, scheme, head_dim, cache_dtype: (head_dim == 96) == (cache_dtype == "int8"))
@bits
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize(
    "scheme",
    [
        Rotary.none,
        lambda d: Rotary.rope(d, rotary_dim=d // 2).rectify(11),
        lambda d: Rotary.rope(d, rotary_dim=d // 2 + 2).rectify(11),  # both channels of a pair share words
        lambda d: Rotary.rope(d, rotary_dim=10).rectify(11),  # a byte of int4 keys holds a first and a second member
        SCHEMES["hope_rerope_log_n"],
    ],
    ids=["none", "partial", "sharing", "ten", "interleaved"],
)
def test_keys_that_do_not_rotate(target, scheme, head_dim, cache_dtype):
    """Keys that do not rotate are right in heads that are wide enough for 16-bit words."""
    Cached(target, scheme(head_dim), (60, 33), heads=(2, 1), leftpad=(3, 0), cache_dtype=cache_dtype).check()


@bits
def test_rows_at_odd_bytes(exact, cache_dtype):
    c = Cached(exact, SCHEMES["rerope"](128), (60, 33), heads=(2, 1), cache_dtype=cache_dtype)
    for got, want in zip(c.replace(layout="odd bytes").call(), c.call(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted(
    lambda exact, seqlen_q, head_dim, cache_dtype: (head_dim == 64) == (seqlen_q == 1) == (cache_dtype == "int8")
)
@bits
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_rotated_keys(exact, seqlen_q, head_dim, cache_dtype):
    """Rotated keys give the right results: keys are rotated, rounded, then quantized, and a later call rotates only
    queries."""
    rotary = Rotary.rope(head_dim, rotary_dim=12)
    c = rotated(exact, rotary, (90, 70), seqlen_q, heads=(2, 1), leftpad=(3, 0), page=PAGE, cache_dtype=cache_dtype)
    out, lse = c.call()
    for b, (p, place) in enumerate(zip(c.problems, c.visible, strict=True)):
        codes = unpacked(c.k_cache[place], cache_dtype)
        stored = codes * c.scales["k_scale"][place].double()[..., None]
        numbers, scale = quantized(c.stored(p.k)[0].to(p.k), cache_dtype)
        torch.testing.assert_close(c.scales["k_scale"][place].double(), scale, rtol=1e-6, atol=0)
        assert (codes - numbers).abs().max() <= 1  # rounding may move a number across the middle between two steps
        assert ((codes - numbers) != 0).double().mean() < 1e-2
        raw = by_complex_numbers(stored[None], rotary, -torch.arange(stored.shape[0])).to(out.device)
        want = p.replace(k=raw, v=dequantized(p.v, cache_dtype))
        support.check_budget({"out": out[b : b + 1], "lse": lse[b : b + 1]}, want, exact.dtype, f"sequence {b}: ")


@bits
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_reference(seqlen_q, cache_dtype):
    target = support.Target("reference", torch.float64, "cpu")
    options = dict(leftpad=(3, 0), page=PAGE, cache_dtype=cache_dtype)
    Cached(target, SCHEMES["hope_rerope_log_n"](16), (90, 70), seqlen_q, **options).check()


@bits
def test_sdpa(cache_dtype):
    """Calls with one token, with a chunk and with packed queries give the right results with PyTorch's kernels."""
    target = support.Target("sdpa", torch.float32, "cpu")
    for seqlen_q, scheme in ((1, "rope"), (70, "rerope")):
        Cached(target, SCHEMES[scheme](16), (90, 70), seqlen_q, page=PAGE, cache_dtype=cache_dtype).check()
    Cached.packed(target, SCHEMES["leaky"](16), MIXED, mapped=True, cache_dtype=cache_dtype).check()


@bits
def test_wide_heads(exact, cache_dtype):
    Cached(exact, Rotary.hope(128, 100, compact=True), (60, 33), heads=(2, 1), cache_dtype=cache_dtype).check()


@bits
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, 1e-44, 2.5e-43, 3e38])
def test_rows_of_one_value(exact, cache_dtype, value):
    """Rows of NaN, infinities, zeros, the smallest or the largest numbers change only the scale and values of their own
    row."""
    seqlens, largest = support.int32([3, 5], exact.device), 2 ** (BITS[cache_dtype] - 1) - 1
    q, k, v = (support.random((2, 1, heads, 16), exact, n) for n, heads in enumerate((4, 2, 2)))
    k[1, 0, 1, 3] = value
    if abs(value) < 1e-42:  # 2.5e-43 divided by its scale is beyond the largest code, because the scale is rounded
        k[1, 0, 1] = value
    results = []
    for new in (k, k.nan_to_num(1.0, 1.0, 1.0).clamp(-4, 4)):
        zeros = torch.zeros(2, 2, 32, 2, 16, device=exact.device)
        codes, scales = pack(zeros, cache_dtype), torch.ones_like(zeros[..., 0])
        out = attention_with_cache(
            q, *codes, Rotary.rope(16), seqlens, k=new, v=v, impl=exact.impl, k_scale=scales[0], v_scale=scales[1]
        )
        results.append((out, codes, scales))
    (out, codes, scales), (other_out, other_codes, other_scales) = results
    written, scale = unpacked(codes[0, 1, 5, 1], cache_dtype), scales[0, 1, 5, 1]
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
    """Returns (rows, head_dim): normal numbers, ties of 8 and 4 bits, zeros, subnormal and large numbers, NaN,
    infinities."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(head_dim, generator=generator) * 10.0**power for power in (-30, -3, 0, 0, 0, 0, 4, 30)]
    for largest in (127, 7):  # the scale is 1, so that multiples of 0.5 are ties
        ties = (torch.arange(head_dim) * 37 % (4 * largest) - 2 * largest) / 2
        ties[-1] = largest
        rows += [ties, -ties, ties * 2.0**-20]
    rows += [torch.zeros(head_dim), -torch.zeros(head_dim)]
    rows += [torch.full((head_dim,), value) for value in (1e-44, 2.5e-43, 3e38)]
    for channel, value in ((0, torch.nan), (head_dim - 1, torch.nan), (3, torch.inf), (head_dim - 1, -torch.inf)):
        rows.append(torch.randn(head_dim, generator=generator))
        rows[-1][channel] = value
    rows.append(rows[-1].clone())
    rows[-1][1] = torch.nan  # in the same row as an infinity
    return torch.stack(rows).to(dtype)


def appended(impl, rows, cache_dtype, device="cpu") -> list[torch.Tensor]:
    """Returns the caches and scales after the rows were appended to a cache with room for 40."""
    head_dim = rows.shape[-1]
    k = torch.stack((rows, rows.roll(5, 0)), 1)[None].to(device)  # two heads
    tables = CacheTables(torch.zeros(1, dtype=torch.int32, device=device), new=len(rows))
    packed = [pack(torch.full((1, 40, 2, head_dim), 5.0, device=device), cache_dtype) for _ in range(2)]
    scales = [torch.full((1, 40, 2), 3.0, device=device) for _ in range(2)]
    load_backend(impl).append_to_cache(CacheLayer(*packed, *scales), k, k.roll(3, 1), tables)
    return [x.cpu() for x in (*packed, *scales)]


def equal_to_sdpa(found, rows, cache_dtype) -> None:
    for x, other in zip(found, appended("sdpa", rows, cache_dtype), strict=True):
        torch.testing.assert_close(x, other, rtol=0, atol=0, equal_nan=True)
    assert found[2].isnan().sum() == 2 * 3 and (found[2][0, len(rows) :] == 3).all()


@pytest.mark.skipif(loader.load() is None, reason="no compiled kernels")
@bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 200, 256])
def test_the_compiled_append_writes_what_sdpa_writes(head_dim, dtype, cache_dtype):
    rows = rows_to_quantize(dtype, head_dim)
    equal_to_sdpa(appended("cpu", rows, cache_dtype), rows, cache_dtype)


@bits
@pytest.mark.parametrize("target", [t for t in support.TARGETS if t.impl == "triton"], ids=str)
def test_the_triton_append_writes_what_sdpa_writes(target, cache_dtype):
    rows = rows_to_quantize(target.dtype, 24)
    equal_to_sdpa(appended("triton", rows, cache_dtype, target.device), rows, cache_dtype)


def test_what_quantization_costs(exact):
    """For normally distributed keys and values, 8 bits change the result by less than 1%, and 4 bits by less than
    17%."""
    if exact.slow:
        pytest.skip("the other backends do the same")
    q, k, v = (support.random((4, 200, heads, 64), exact, n) for n, heads in enumerate((4, 2, 2)))
    want = attention(q, k, v, Rotary.rope(64), impl=exact.impl)
    for cache_dtype, bound in (("int8", 0.01), ("int4", 0.17)):
        cache = KVCache(4, 200, 2, 64, torch.float32, exact.device, cache_dtype=cache_dtype)
        out = cache.attend(q, Rotary.rope(64), k, v, impl=exact.impl)
        error = ((out - want).square().mean() / want.square().mean()).sqrt().item()
        assert bound / 4 < error < bound


# ---- our caches

ROPE = Rotary.rope(16).rectify(21)


def over_quantized(q, k, v, rotary, cache_dtype):
    exact = q.double(), dequantized(k, cache_dtype), dequantized(v, cache_dtype)
    return attention(*exact, rotary, impl="reference").float()


@caches
@bits
def test_a_prompt_then_steps(make, cache_dtype):
    cache, attend, append = make(cache_dtype=cache_dtype)
    q, k, v = tokens(60)
    append(k[:, :40], v[:, :40])
    append(torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16))  # rejected drafts
    for name in [None] if make is contiguous else cache.sequences:
        cache.truncate(name, 40)
    out = [attend(q[:, a:b], ROPE, k[:, a:b], v[:, a:b]) for a, b in ((40, 41), (41, 46), (46, 60))]
    want = over_quantized(q, k, v, ROPE, cache_dtype)
    torch.testing.assert_close(torch.cat(out, 1), want[:, 40:], rtol=1e-4, atol=1e-5)
    assert f"dtype=torch.float32, device='cpu', cache_dtype='{cache_dtype}'" in repr(cache) and "head_dim=16" in repr(
        cache
    )
    slots = 2 * 96 if make is contiguous else 20 * PAGE
    assert cache.nbytes == slots * 2 * 2 * (16 * BITS[cache_dtype] // 8 + 4)
    plain, _, _ = make()
    assert plain.cache_dtype is None and plain.k_scale is None and plain.scales() == (None, None)


@bits
def test_a_fork_copies_codes_and_scales(cache_dtype):
    cache, _, append = paged(cache_dtype=cache_dtype, layers=2)
    q, k, v = tokens(50)
    append(torch.stack([k, v])[:, :, :40], torch.stack([v, k])[:, :, :40])
    child, other = cache.fork(cache.sequences[0]), torch.randn(1, 10, 2, 16)
    for name, new in (([child], (other, other)), ([cache.sequences[0]], (k[:1, 40:], v[:1, 40:]))):
        with cache.step(name, 10) as step:
            outs = [step.attend(q[:1, 40:], ROPE, *pair, layer=n) for n, pair in enumerate((new, new[::-1]))]
        full_k, full_v = (torch.cat((x[:, :40], y.expand(2, -1, -1, -1)), 1) for x, y in zip((k, v), new, strict=True))
        for out, pair in zip(outs, ((full_k, full_v), (full_v, full_k)), strict=True):
            expected = over_quantized(q, *pair, ROPE, cache_dtype)[:1, 40:]
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@caches
def test_rotated_keys_of_a_cache(make):
    rotary = Rotary.rope(16)
    cache, attend, append = make(cache_dtype="int8", rotated_keys=rotary)
    q, k, v = tokens(50)
    append(k[:, :40], v[:, :40])
    out = attend(q[:, 40:], rotary, k[:, 40:], v[:, 40:])
    stored = dequantized(rotate(k, rotary), "int8")
    unrotated = by_complex_numbers(stored, rotary, -torch.arange(50))
    want = attention(q.double(), unrotated, dequantized(v, "int8"), rotary, impl="reference").float()
    torch.testing.assert_close(out, want[:, 40:], rtol=1e-3, atol=1e-3)
    if make is contiguous:
        torch.testing.assert_close(cache.k_scale[:, :50], quantized(rotate(k, rotary), "int8")[1].float())
