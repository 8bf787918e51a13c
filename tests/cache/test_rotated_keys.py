"""A call over a cache of rotated keys computes the last rows of full attention over each sequence's raw keys."""

import pytest
import support
import torch
from caching import PAGE, Cached, cached_call, page_sizes
from flashrope import (
    KVCache,
    PagedKVCache,
    Rotary,
    attention,
    rotate,
)
from support import SCHEMES
from test_decode import MIXED, causalities, mappings
from test_needles import needle
from test_rotate import ROTATIONS, SEVERAL, by_complex_numbers

OVER_KEYS = [name for name in ROTATIONS if name != "slope"]


def cached(target, rotary, *arguments, make=Cached, **options) -> Cached:
    """Returns a call over a cache of rotated keys."""
    return make(target, rotary, *arguments, stored=lambda k: by_complex_numbers(k, rotary), **options)


@pytest.mark.interpreted(
    lambda target, page_size, scheme: target.dtype == torch.float32 and bool(page_size) == (len(scheme) % 2 == 0)
)
@page_sizes
@pytest.mark.parametrize("scheme", OVER_KEYS)
def test_one_token(target, page_size, scheme):
    """The new key is rotated once, at its own position after the left padding."""
    cached(target, ROTATIONS[scheme](16), (45, 1, 64, 22), leftpad=(3, 0, 0, 40), page=page_size).check()


def test_new_keys_in_the_padding_are_rotated_by_an_angle(exact):
    """New keys in the padding have negative positions. Rotation keeps the length of each of their pairs. If cos and sin
    were read from before the table, the lengths would change."""
    q, k, v = (support.random((1, 1, 2, 16), exact, seed) for seed in (1, 2, 3))
    caches = [torch.zeros(1, 60, 2, 16, device=exact.device) for _ in range(2)]
    seqlens, leftpad = (torch.tensor([n], dtype=torch.int32, device=exact.device) for n in (2, 50))
    cached_call(
        q, *caches, Rotary.rope(16), seqlens, k=k, v=v, cache_leftpad=leftpad, rotated_keys=True, impl=exact.impl
    )
    lengths = [x[0].view(2, 2, 8).square().sum(1) for x in (caches[0][:, 2], k[:, 0])]
    torch.testing.assert_close(*lengths, rtol=1e-5, atol=1e-6)


@pytest.mark.interpreted(lambda exact, page_size, scheme, causal: (scheme == "local") == bool(page_size))
@causalities
@page_sizes
@pytest.mark.parametrize("scheme", ["rope_interleaved", "hope_yarn", "local", "rotated_scale"])
def test_several_tokens(exact, page_size, scheme, causal):
    cached(exact, ROTATIONS[scheme](16), (45, 5, 64), 5, leftpad=(3, 0, 7), page=page_size, causal=causal).check()


@causalities
@pytest.mark.parametrize("seqlen_q", [9, 70])
def test_more_queries_than_keys(exact, seqlen_q, causal):
    """Queries before the first key are at negative positions. Without a causal mask they see keys."""
    cached(exact, Rotary.rope(16), (5, 64, 2), seqlen_q, new=2, capacity=80, causal=causal).check()


@page_sizes
@pytest.mark.parametrize("scheme", ["rope_partial", "local"])
def test_chunks(exact, page_size, scheme):
    """Chunks with enough queries for the prefill kernel are right."""
    cached(exact, SCHEMES[scheme](16), (80, 130), 70, leftpad=(5, 0), capacity=144, page=page_size).check()


@pytest.mark.interpreted(lambda exact, distance: distance == 21)
@pytest.mark.parametrize("distance", [0, 1, 20, 21])
def test_a_needle(exact, distance):
    """A key that takes nearly all probability of a row is found at its distance. Half of the keys are rotated before
    the call, half by the call."""
    p = needle(exact, Rotary.rope(16), distance)
    room = p.k.new_full((2, 1, 80, *p.k.shape[2:]), torch.nan)
    room[0, :, 2:37], room[1, :, 2:37] = rotate(p.k[:, :35], p.rotary, impl=exact.impl), p.v[:, :35]
    seqlens, leftpad = support.int32([37], exact.device), support.int32([2], exact.device)
    out, lse = cached_call(
        p.q, *room, p.rotary, seqlens, k=p.k[:, 35:], v=p.v[:, 35:], cache_leftpad=leftpad, return_lse=True,
        impl=exact.impl, rotated_keys=True,
    )  # fmt: skip
    support.check_budget({"out": out, "lse": lse}, p, exact.dtype)


@pytest.mark.interpreted(lambda exact, page_size, mapped, leftpad: bool(page_size) == mapped == bool(leftpad))
@page_sizes
@pytest.mark.parametrize("leftpad", [None, (3, 0, 5, 11, 0, 0, 2, 1)], ids=["", "leftpad"])
@mappings
def test_packed(exact, page_size, mapped, leftpad):
    rotary = Rotary.rope(16, rotary_dim=8).log_n(40)
    cached(exact, rotary, MIXED, make=Cached.packed, leftpad=leftpad, page=page_size, mapped=mapped).check()


def test_sinks_and_length_scale(exact):
    """Sinks and length scales apply to the scores as over raw keys."""
    rotary = Rotary(**{f: getattr(Rotary.rope(16), f) for f in ("head_dim", "frequencies")}, length_scale=8.0)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=exact.device)
    got, want = (make(exact, rotary, (45, 9), 3).call(sinks=sinks) for make in (cached, Cached))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_sdpa(seqlen_q):
    """Calls with one token and with a chunk give the right results with PyTorch's kernels."""
    target = support.Target("sdpa", torch.float32, "cpu")
    cached(target, Rotary.rope(16).local(21), (45, 64), seqlen_q, leftpad=(3, 0), page=PAGE).check()


def test_a_prompt_with_padding(exact):
    """A prompt may include its padding: the first new keys are at negative positions."""
    q, k, v = (x.to(exact.device) for x in tokens(30))
    k_cache, v_cache = torch.full((2, 2, 40, 2, 16), torch.nan, device=exact.device)
    seqlens, pads = support.int32([0, 0], exact.device), [11, 0]
    out = cached_call(
        q, k_cache, v_cache, ROPE, seqlens, k=k, v=v, cache_leftpad=support.int32(pads, exact.device),
        rotated_keys=True, impl=exact.impl,
    )  # fmt: skip
    for b, pad in enumerate(pads):
        want = attention(*(x[b : b + 1, pad:].double() for x in (q, k, v)), ROPE, impl="reference")
        torch.testing.assert_close(out[b : b + 1, pad:].double(), want, rtol=1e-4, atol=1e-5)


def test_far_from_the_first_key(exact):
    """A new key beyond the first coarse row of the cos/sin table (1,024 positions per row) is rotated correctly."""
    cache = KVCache(1, 3000, 2, 16, torch.float32, exact.device, rotated_keys=ROPE)
    cache.advance(2500)
    k, v = torch.randn(2, 1, 1, 2, 16).to(exact.device)
    cache.append(k, v, impl=exact.impl)
    want = by_complex_numbers(k, ROPE, torch.tensor([2500]))
    torch.testing.assert_close(cache.k[:, 2500:2501].double().cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rotated", "raw", "quantized"])
def test_nothing_outside_the_pages_is_written(exact, kind):
    """Tokens for slots below 0, slots beyond the cache and pages that do not exist are not written. Only the last token
    has a valid slot."""
    quantized = kind == "quantized"
    room = torch.zeros(2, 6, 16, 2, 16, device=exact.device).to(torch.int8 if quantized else torch.float32)
    scales = torch.zeros(2, 6, 16, 2, device=exact.device)
    q, k, v = (torch.randn(4, heads, 16).to(exact.device) for heads in (4, 2, 2))
    starts = torch.arange(5, dtype=torch.int32, device=exact.device)
    slots = torch.tensor([-1, -17, 64, 35], device=exact.device)
    table = support.int32([[-1], [4], [2**30], [2]], exact.device)
    options = {"block_table": table, "impl": exact.impl, "rotated_keys": kind == "rotated"}
    options |= {"k_scale": scales[0, 1:5], "v_scale": scales[1, 1:5]} if quantized else {}
    seqlens = support.int32([1, 1, 1, 4], exact.device)
    for placed, row in (({"slot_mapping": slots}, 3), ({}, 4)):
        room.zero_(), scales.zero_()
        cached_call(q, *room[:, 1:5], ROPE, starts, seqlens, 1, k=k, v=v, **options, **placed)
        for written in (room.abs().amax((-1, -2)), scales.amax(-1))[: 1 + quantized]:
            assert written.nonzero().tolist() == [[0, 3, row], [1, 3, row]]
    assert quantized or torch.equal(room[1, 3, 4], v[3])


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_reference(seqlen_q):
    target = support.Target("reference", torch.float64, "cpu")
    rotary = Rotary.rope(16, rotary_dim=8).scale_rotated(2.0)
    cached(target, rotary, (45, 5, 64), seqlen_q, leftpad=(3, 0, 7), page=PAGE).check()


def test_padding_reads_no_table(compiled):
    """The compiled CPU kernel writes keys in the padding, whose positions are negative, as if they were at position 0.
    It reads nothing before the table."""
    cache, _, append = contiguous(rotated_keys=ROPE)
    _, k, v = tokens(20)
    append(k, v, leftpad=[7, 0])
    assert torch.equal(cache.k[0, :8], k[0, :8]) and not torch.equal(cache.k[0, 8], k[0, 8])


def test_wrong_tables_touch_nothing_else(exact):
    """Lengths beyond the capacity and padding beyond the length write nothing elsewhere. New keys without a slot are
    dropped."""
    k, v = torch.randn(2, 3, 2, 2, 16).to(exact.device)
    q = torch.randn(3, 2, 2, 16).to(exact.device)
    k_cache, v_cache = torch.zeros(2, 3, 32, 2, 16).to(exact.device)
    seqlens, pads = (support.int32(x, exact.device) for x in ([-5, 31, 2**31 - 1], [-7, 2**31 - 1, 4]))
    out = cached_call(
        q, k_cache, v_cache, Rotary.rope(16), seqlens, k=k, v=v, cache_leftpad=pads, rotated_keys=True, impl=exact.impl
    )
    assert out.shape == q.shape
    written = k_cache.abs().sum((-1, -2)) > 0
    assert written.nonzero().tolist() == [[0, 0], [0, 1], [1, 31]]
    assert torch.equal(v_cache[0, :2], v[0]) and torch.equal(v_cache[1, 31], v[1, 0])


@pytest.mark.parametrize("name", SEVERAL)
def test_schemes_of_several_rotations_are_refused_by_name(name):
    x = torch.zeros(1, 16, 2, 16)
    match = f"^rotary: expected a scheme .* so that its keys can be stored rotated; got {name}, whose"
    with pytest.raises(ValueError, match=match):
        cached_call(x, x, x, SEVERAL[name], support.int32([3]), rotated_keys=True)
    with pytest.raises(ValueError, match=match):
        KVCache(1, 16, 2, 16, device="cpu", rotated_keys=SEVERAL[name])
    with pytest.raises(TypeError, match="rotated_keys: expected True or False, got 1"):
        cached_call(x, x, x, Rotary.rope(16), support.int32([3]), rotated_keys=1)


# ---- our caches

ROPE, HOPE = Rotary.rope(16), Rotary.hope(16, 100)
F32 = {"dtype": torch.float32, "device": "cpu"}


def tokens(seqlen, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, seqlen, heads, 16, generator=generator) for heads in (4, 2, 2)]


def contiguous(**options):
    cache = KVCache(2, 96, 2, 16, **F32, **options)
    return cache, cache.attend, cache.append


def paged(**options):
    cache = PagedKVCache(20, 16, 2, 16, **F32, **options)
    names = [cache.allocate(), cache.allocate()]
    return cache, lambda *a, **o: cache.attend(names, *a, **o), lambda *a, **o: cache.append(names, *a, **o)


caches = pytest.mark.parametrize("make", [contiguous, paged], ids=["KVCache", "PagedKVCache"])


@caches
@pytest.mark.parametrize(
    "rotary", [ROPE, HOPE.log_n(20), ROPE.scale_rotated(2.0).local(30)], ids=["rope", "hope", "scaled"]
)
def test_append_then_steps(make, rotary):
    """Keys are rotated once, by append or by attend, whichever appends them."""
    cache, attend, append = make(rotated_keys=rotary)
    (q, k, v), parts = tokens(60), [(0, 40), (40, 41), (41, 46), (46, 60)]
    append(k[:, :40], v[:, :40], leftpad=[7, 0])
    out = [attend(q[:, a:b], rotary, k[:, a:b], v[:, a:b]) for a, b in parts[1:]]
    for b, pad in enumerate((7, 0)):
        want = attention(*(x[b : b + 1, pad:].double() for x in (q, k, v)), rotary, impl="reference")[:, 40 - pad :]
        torch.testing.assert_close(torch.cat(out, 1)[b : b + 1].double(), want, rtol=1e-4, atol=1e-5)
    assert "rotated keys" in repr(cache) and cache.rotated_keys == (rotary,)


@caches
def test_truncate_and_fork(make):
    cache, attend, append = make(rotated_keys=ROPE)
    q, k, v = tokens(50)
    append(k[:, :40], v[:, :40])
    append(torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16))  # rejected drafts
    if make is contiguous:
        cache.truncate(None, 40)
    else:
        for name in cache.sequences:
            cache.truncate(name, 40)
        child = cache.fork(cache.sequences[0])
        out = cache.attend([child], q[:1, 40:], ROPE, k[:1, 40:], v[:1, 40:])
        torch.testing.assert_close(out, attention(q, k, v, ROPE)[:1, 40:], rtol=1e-4, atol=1e-5)
    out = attend(q[:, 40:], ROPE, k[:, 40:], v[:, 40:])
    torch.testing.assert_close(out, attention(q, k, v, ROPE)[:, 40:], rtol=1e-4, atol=1e-5)


@caches
def test_layers_of_different_schemes(make):
    """Layers may have different schemes, as in models whose sliding-window layers have their own table."""
    schemes = [ROPE.local(20), Rotary.rope(16, base=500.0)]
    cache, _, append = make(rotated_keys=schemes, layers=2)
    q, k, v = tokens(40)
    append(torch.stack([k, k])[:, :, :30], torch.stack([v, v])[:, :, :30])
    selected = [] if make is contiguous else [cache.sequences]
    with cache.step(*selected, 10) as step:
        for layer, rotary in enumerate(schemes):
            out = step.attend(q[:, 30:], rotary, k[:, 30:], v[:, 30:], layer=layer)
            torch.testing.assert_close(out, attention(q, k, v, rotary)[:, 30:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="^rotary: expected .* by which the keys of layer 1 are rotated, got"):
        with cache.step(*selected, 1) as step:
            step.attend(q[:, :1], schemes[0], k[:, :1], v[:, :1], layer=1)


@caches
def test_what_a_cache_of_rotated_keys_refuses(make):
    cache, attend, append = make(rotated_keys=ROPE)
    q, k, v = tokens(10)
    append(k, v)
    for other in (HOPE, Rotary.rope(16, interleaved=True), ROPE.rectify(5), ROPE.log_n(20)):
        with pytest.raises(
            ValueError, match="^rotary: expected .* by which the keys of layer 0 are rotated, got .* raw"
        ):
            attend(q, other, k, v)
    with pytest.raises(ValueError, match="tables that depend on the length, such as those of dynamic NTK and longrope"):
        attend(q, ROPE.ntk(2.0), k, v)
    with pytest.raises(ValueError, match="^cache_leftpad: expected None, because padding would move keys"):
        attend(q[:, :1], ROPE, cache_leftpad=support.int32([1, 0]))
    with pytest.raises(TypeError, match=r"^rotated_keys: not accepted by attend\(\); the cache tracks it"):
        attend(q[:, :1], ROPE, rotated_keys=True)
    lengths = cache.lengths if make is contiguous else list(cache.lengths.values())
    assert lengths == [10, 10]
    raw, attend, _ = make()
    attend(q, ROPE, k, v)
    attend(q[:, :1], HOPE.rectify(5))  # a cache of raw keys takes any scheme
    assert raw.rotated_keys is None and "rotated" not in repr(raw)
    with pytest.raises(TypeError, match=r"^rotated_keys: not accepted by attend\(\); the cache tracks it"):
        attend(q[:, :1], ROPE, rotated_keys=True)


@pytest.mark.parametrize(
    "error, match, given, layers",
    [
        (TypeError, "^rotated_keys: expected a Rotary, or None for raw keys, got True", True, 1),
        (TypeError, "expected a Rotary, or a list of 2, one per layer, or None .* got", [ROPE], 2),
        (TypeError, "expected a Rotary for layer 1, got NoneType", [ROPE, None], 2),
        (ValueError, "^rotated_keys: expected head_dim 16, the head_dim of the cache, got 32", Rotary.rope(32), 1),
        (ValueError, "^rotated_keys: axial schemes are not supported", Rotary.axial(16, 2), 1),
    ],
)
def test_arguments(error, match, given, layers):
    for make in (contiguous, paged):
        with pytest.raises(error, match=match):
            make(rotated_keys=given, layers=layers)


def test_appended_keys_are_what_rotate_gives():
    """A cache that is filled with rotated keys from `rotate` equals one that `append` has filled."""
    cache, _, append = contiguous(rotated_keys=ROPE.scale_rotated(3.0))
    _, k, v = tokens(20)
    append(k, v)
    torch.testing.assert_close(cache.k[:, :20], rotate(k, ROPE.scale_rotated(3.0)), rtol=1e-6, atol=1e-6)
    assert torch.equal(cache.v[:, :20], v)
