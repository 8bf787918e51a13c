"""Tests ``KVCache`` and ``PagedKVCache`` whose values are channels of their keys."""

import re

import pytest
import torch
from flashrope import CacheLayer, CacheTables, KVCache, PagedKVCache, Rotary, attention_with_cache, plan_cache
from support import int32

WIDTH, VALUES = 64, slice(0, 48)
ROPE, REROPE = Rotary.rope(WIDTH), Rotary.rope(WIDTH).rectify(11)
OPTIONS = dict(heads_kv=2, head_dim=WIDTH, dtype=torch.float32, device="cpu", values=VALUES)


def tokens(rows, layers=1, seed=0):
    """Returns q (layers, 1, rows, 4, WIDTH), k (layers, 1, rows, 2, WIDTH) and one key weight per layer."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(layers, 1, rows, heads, WIDTH, generator=generator) for heads in (4, 2))
    return q, k, torch.rand(layers, WIDTH, generator=generator) + 0.5


def expected(q, k, weight=None, rotary=REROPE):
    """Returns attention of q to its own and all earlier keys, in float64, over caches that share no memory."""
    q, k = q.double(), k.double()
    weighted = k if weight is None else k * weight.double()
    return attention_with_cache(q, weighted, k[..., VALUES].clone(), rotary, int32([k.shape[1]]), impl="reference")


def close(got, wanted):
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_with_weights_and_schemes(paged):
    q, k, weight = tokens(40, layers=3)
    cache = PagedKVCache(8, 16, layers=3, **OPTIONS) if paged else KVCache(1, 64, layers=3, **OPTIONS)
    run = [[cache.allocate()]] if paged else []
    for i, j in ((0, 33), (33, 39), (39, 40)):
        with cache.step(*run, j - i) as step:
            for n in range(3):
                out = step.attend(q[n, :, i:j], REROPE, k[n, :, i:j], layer=n, key_weight=weight[n])
                close(out, expected(q[n, :, i:j], k[n, :, :j], weight[n]))
    for rotary in (ROPE, Rotary.none(WIDTH)):  # another scheme over the same keys, then without weights
        close(cache.attend(*run, q[1, :, 30:], rotary, layer=1), expected(q[1, :, 30:], k[1], rotary=rotary))
    assert cache.k.nbytes == cache.nbytes and cache.v.data_ptr() == cache.k.data_ptr()
    assert "values=0:48" in repr(cache) and cache.values == VALUES and cache.head_dim_v == 48


@pytest.mark.parametrize("paged", [False, True])
def test_a_step_that_fails_changes_nothing(paged):
    q, k, _ = tokens(20, layers=2)
    cache = PagedKVCache(4, 16, layers=2, **OPTIONS) if paged else KVCache(1, 64, layers=2, **OPTIONS)
    run = [[cache.allocate()]] if paged else []
    cache.append(*run, k[:, :, :18])
    with pytest.raises(ValueError, match="^layer 1: expected 1 new keys"), cache.step(*run, 1) as step:
        step.append(-k[0, :, 18:19], layer=0)
    with cache.step(*run, 2) as step:
        for n in range(2):
            step.append(k[n, :, 18:], layer=n)
    for n in range(2):
        close(cache.attend(*run, q[n], REROPE, layer=n), expected(q[n], k[n]))


def test_leftpad_truncate_and_reset():
    q, k, weight = tokens(30)
    cache = KVCache(2, 64, **OPTIONS)
    both = k[0].expand(2, -1, -1, -1)
    padded = torch.cat((torch.full_like(both[:, :3], torch.nan), both), 1)
    cache.append(padded[:, :30], leftpad=[3, 3])
    cache.truncate(None, 20)
    out = cache.attend(q[0, :, 17:].expand(2, -1, -1, -1), REROPE, both[:, 17:], key_weight=weight[0])
    for b in range(2):
        close(out[b : b + 1], expected(q[0, :, 17:], k[0], weight[0]))
    cache.reset()
    assert cache.lengths == [0, 0]


def test_forks_extend_remove_and_keep():
    q, k, weight = tokens(60)
    (q, k, weight), cache = (q[0], k[0], weight[0]), PagedKVCache(16, 16, max_seqlen=200, **OPTIONS)
    one = cache.allocate()
    cache.append([one], k[:, :37])
    fork = cache.fork(one)
    out = cache.attend([one, fork], q[:, 37:40].expand(2, -1, -1, -1), REROPE, k[:, 37:43].reshape(2, 3, 2, WIDTH))
    close(out[:1], expected(q[:, 37:40], k[:, :40]))
    close(out[1:], expected(q[:, 37:40], torch.cat((k[:, :37], k[:, 40:43]), 1)))
    other = cache.allocate()
    cache.append([other], k[:, 40:50])
    cache.extend(one, other)
    out = cache.attend([one], q[:, 50:51], REROPE, k[:, 50:51], key_weight=weight)
    close(out, expected(q[:, 50:51], torch.cat((k[:, :40], k[:, 40:50], k[:, 50:51]), 1), weight))
    cache.remove(one, 5, 25)
    left = torch.cat((k[:, :5], k[:, 25:51]), 1)
    close(cache.attend([one], q[:, 30:31], REROPE, key_weight=weight), expected(q[:, 30:31], left, weight))
    cache.keep(one, 4, 10)
    left = torch.cat((left[:, :4], left[:, -10:]), 1)
    close(cache.attend([one], q[:, 30:31], REROPE), expected(q[:, 30:31], left))


def test_capture():
    q, k, weight = tokens(40, layers=2)
    cache = PagedKVCache(8, 16, layers=2, **OPTIONS)
    run = cache.allocate()
    cache.append([run], k[:, :, :30])
    step, layers = cache.capture([run], 1), [cache.cache_layer(n) for n in range(2)]
    layers = [layer._replace(key_weight=w) for layer, w in zip(layers, weight, strict=True)]
    plan = plan_cache(step.tables, like=layers[0], rotary=REROPE, seqlen_q=1, heads_q=4)
    for token in range(30, 40):
        step.update()
        plan.refresh()
        for n, layer in enumerate(layers):
            out = plan.attend(q[n, :, token : token + 1], layer, k[n, :, token : token + 1])
            close(out, expected(q[n, :, token : token + 1], k[n, :, : token + 1], weight[n]))
        step.advance()


@pytest.mark.parametrize("make", [lambda **x: KVCache(1, 48, **x), lambda **x: PagedKVCache(3, 16, **x)])
def test_latent_attention(make):
    """Latent attention is right: 512 of 576 channels are the values, and the other 64 rotate."""
    rotary = Rotary.rope(576, rotary_dim=64, first_channel=512)
    cache = make(heads_kv=1, head_dim=576, values=slice(512), dtype=torch.float32, device="cpu", layers=1)
    q, k = torch.randn(1, 40, 4, 576), torch.randn(1, 40, 1, 576)
    run = [[cache.allocate()]] if isinstance(cache, PagedKVCache) else []
    out = cache.attend(*run, q, rotary, k, softmax_scale=192**-0.5)
    shared = k.double()
    wanted = attention_with_cache(
        q.double(), shared, shared[..., :512], rotary, int32([40]), softmax_scale=192**-0.5, impl="reference"
    )
    close(out, wanted)
    assert cache.nbytes == 48 * 576 * 4


REFUSED = {
    "values given": (
        lambda c: c.append(*[torch.zeros(1, 1, 2, WIDTH)] * 2),
        "v: expected None, because the values of this cache are channels of its keys, got a tensor",
    ),
    "values in attend": (
        lambda c: c.attend(torch.zeros(1, 1, 2, WIDTH), ROPE, *[torch.zeros(1, 1, 2, WIDTH)] * 2),
        "v: expected None, because the values of this cache are channels of its keys, got a tensor",
    ),
    "no slice": (
        lambda c: KVCache(1, 16, **OPTIONS | {"values": 48}),
        "values: expected None, or a slice of the channels of the keys, got 48",
    ),
    "steps": (
        lambda c: KVCache(1, 16, **OPTIONS | {"values": slice(0, 64, 2)}),
        "values: expected a slice of 8, 16, ..., 512 consecutive channels of head_dim 64, got slice(0, 64, 2)",
    ),
    "12 channels": (
        lambda c: KVCache(1, 16, **OPTIONS | {"values": slice(0, 12)}),
        "values: expected a slice of 8, 16, ..., 512 consecutive channels of head_dim 64, got slice(0, 12, None)",
    ),
    "rotated keys": (
        lambda c: KVCache(1, 16, rotated_keys=ROPE, **OPTIONS),
        f"rotated_keys: not supported with values (they are channels of the raw keys), got {ROPE!r}",
    ),
    "codes": (
        lambda c: KVCache(1, 16, cache_dtype="int8", **OPTIONS),
        "cache_dtype: not supported with values (they are channels of the raw keys), got 'int8'",
    ),
    "a width": (
        lambda c: KVCache(1, 16, head_dim_v=48, **OPTIONS),
        "head_dim_v: not supported with values (they are channels of the raw keys), got 48",
    ),
    "576 with values of their own": (
        lambda c: KVCache(1, 16, 1, 576),
        "head_dim: expected a multiple of 8 up to 512, or 576 with values=, got 576",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call(KVCache(1, 16, **OPTIONS))


def test_a_cache_layer_says_where_its_values_are():
    cache = KVCache(1, 16, **OPTIONS | {"values": slice(16, None)})
    assert cache.cache_layer().first_value == 16 and KVCache(1, 16, 2, 64).cache_layer().first_value is None
    assert CacheLayer(cache.k, cache.v).first_value == 16 and CacheTables(int32([3])).capacity(cache.k) == 16
