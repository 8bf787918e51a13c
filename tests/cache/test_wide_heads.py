"""Tests heads of more than 256 channels over a cache. Calls that no kernel supports at these widths raise an error that
names the reason."""

import pytest
import torch
from caching import PAGE, Cached, cached_call, page_sizes
from flashrope import KVCache, PagedKVCache, Rotary, attention_with_cache
from support import int32

SCHEMES = {
    "rope": lambda d: Rotary.rope(d),
    "p_rope": lambda d: Rotary.p_rope(d, 0.25, base=1e6).rectify(21),
    "behind": lambda d: Rotary.rope(d, rotary_dim=64, interleaved=True, first_channel=d - 64).rectify(21, 4.0),
}


@pytest.mark.interpreted(
    lambda target, scheme, head_dim: (scheme == "behind") == (target.dtype == torch.float32) == (head_dim == 512)
)
@pytest.mark.parametrize("head_dim", [264, 512])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_queries(target, scheme, head_dim):
    rotary = SCHEMES[scheme](head_dim)
    for queries, page in ((1, PAGE), (20, 0)):
        Cached(target, rotary, (45, 30), queries, page=page, heads=(2, 1), leftpad=(0, 3)).check()


@pytest.mark.interpreted(lambda target, page_size: bool(page_size) == (target.dtype == torch.float32))
@page_sizes
def test_packed_queries(target, page_size):
    Cached.packed(target, SCHEMES["p_rope"](512), [(1, 40), (70, 71)], heads=(2, 1), page=page_size).check()


@pytest.mark.parametrize("paged", [False, True])
def test_cache_objects(paged):
    rotary, options = SCHEMES["p_rope"](512), dict(heads_kv=1, head_dim=512, dtype=torch.float32, device="cpu")
    q, k, v = (torch.randn(1, 40, heads, 512) for heads in (2, 1, 1))
    if paged:
        cache = PagedKVCache(4, 16, **options)
        run = [cache.allocate()]
        outs = [cache.attend(run, q[:, i:j], rotary, k[:, i:j], v[:, i:j]) for i, j in ((0, 39), (39, 40))]
    else:
        cache = KVCache(1, 64, **options)
        outs = [cache.attend(q[:, i:j], rotary, k[:, i:j], v[:, i:j]) for i, j in ((0, 39), (39, 40))]
    again = attention_with_cache(q, k, v, rotary, int32([40]), impl="reference")
    torch.testing.assert_close(torch.cat(outs, 1), again, rtol=1e-4, atol=1e-5)


def test_sinks(target):
    call = Cached(target, SCHEMES["p_rope"](512), (45, 30), 2, heads=(2, 1))
    (out, lse), sinks = call.call(), torch.tensor([0.5, -1.0], device=target.device)
    got, _ = call.replace().call(sinks=sinks)
    share = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
    torch.testing.assert_close(got.double(), out.double() * share, rtol=0.02, atol=0.01)


# ---- refused

Q, K = torch.zeros(1, 1, 2, 512), torch.zeros(1, 64, 1, 512)
ROPE, LENGTHS = Rotary.rope(512), int32([40])
SCALES = dict(k_scale=torch.ones(1, 64, 1), v_scale=torch.ones(1, 64, 1))
REFUSED = {
    "520": (
        lambda: attention_with_cache(
            torch.zeros(1, 1, 2, 520), *torch.zeros(2, 1, 64, 1, 520), Rotary.rope(520), LENGTHS
        ),
        "q: expected head_dim to be a multiple of 8 up to 512, got 520",
    ),
    "quantized": (
        lambda: cached_call(Q, K.char(), K.char(), ROPE, LENGTHS, **SCALES),
        "q: quantized caches are not supported beyond head_dim 256 yet, got 512",
    ),
    "rotated keys": (
        lambda: cached_call(Q, K, K.clone(), ROPE, LENGTHS, rotated_keys=True),
        "q: rotated_keys are not supported beyond head_dim 256 yet, got 512",
    ),
    "positions": (
        lambda: cached_call(Q, K, K, ROPE, LENGTHS, slot_positions=torch.zeros(1, 64)),
        "q: explicit positions of cached tokens are not supported beyond head_dim 256 yet, got 512",
    ),
    "cache of int8": (
        lambda: KVCache(1, 64, heads_kv=1, head_dim=512, dtype=torch.float32, device="cpu", cache_dtype="int8"),
        "head_dim: expected a multiple of 8 up to 256 in a cache of int8, got 512",
    ),
    "cache of rotated keys": (
        lambda: KVCache(1, 64, heads_kv=1, head_dim=512, dtype=torch.float32, device="cpu", rotated_keys=ROPE),
        "rotated_keys: not supported beyond head_dim 256 yet, got 512",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
