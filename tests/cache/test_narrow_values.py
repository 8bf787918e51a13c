"""Tests caches whose values are narrower than their keys, such as the expanded cache of multi-head latent attention."""

import re

import pytest
import torch
from caching import PAGE, Cached, cached_call, page_sizes
from flashrope import KVCache, PagedKVCache, Rotary, attention_with_cache, rotate
from flashrope.backends import cuda
from flashrope.calls.cache_tables import CacheLayer, CacheTables
from flashrope.calls.records import CacheCall
from support import SCHEMES, int32

LATENT = Rotary.rope(192, rotary_dim=64)
WIDTHS = {(24, 16): "rerope", (64, 40): "rope", (80, 8): "leaky", (192, 128): "rope_partial", (320, 16): "rope"}
widths = pytest.mark.parametrize("width", WIDTHS, ids=str)


@pytest.mark.interpreted(lambda target, width, page_size: bool(page_size) == (width[0] in (64, 192)))
@page_sizes
@widths
def test_queries(target, width, page_size):
    rotary, options = SCHEMES[WIDTHS[width]](width[0]), dict(page=page_size, head_dim_v=width[1], heads=(4, 2))
    for queries in (1, 5):
        Cached(target, rotary, (45, 30), queries, leftpad=(0, 3), **options).check()


@pytest.mark.interpreted(lambda target, page_size: page_size)
@page_sizes
def test_a_chunk(target, page_size):
    rotary, options = SCHEMES["rerope"](48), dict(page=page_size, head_dim_v=24)
    Cached(target, rotary, (90, 71), 70, **options).check()
    Cached.packed(target, rotary, [(1, 40), (70, 71), (0, 5)], **options).check()


@pytest.mark.parametrize("layout", ["poisoned", "heads first", "shared"])
def test_layouts(target, layout):
    Cached(target, SCHEMES["rerope"](24), (40, 30), 2, layout=layout, head_dim_v=16).check()


def test_splits(target):
    call = Cached(target, SCHEMES["leaky"](24), (120, 7), 2, head_dim_v=8)
    for splits in (1, 3):
        call.replace().check(num_splits=splits)


def test_placed_and_mapped_tokens(target):
    mapped = Cached.packed(target, SCHEMES["rerope"](24), [(3, 20), (1, 9)], head_dim_v=16, page=PAGE, mapped=True)
    mapped.check()
    call = Cached(target, SCHEMES["rerope"](24), (40, 30), 2, new=0, page=PAGE, head_dim_v=16)
    entries = call.block_table.shape[1]
    starts = (torch.arange(entries) * (PAGE + 3)).expand(2, -1)
    call.at(page_positions=int32(starts.tolist())).check()


def test_rotated_keys(target):
    rotary = Rotary.rope(24).local(21)
    Cached(target, rotary, (40, 30), 2, head_dim_v=16, stored=lambda k: rotate(k, rotary, impl="reference")).check()


@pytest.mark.parametrize("paged", [False, True])
def test_cache_objects(paged):
    options = dict(heads_kv=2, head_dim=192, head_dim_v=128, dtype=torch.float32, device="cpu", layers=2)
    q, k, v = (torch.randn(1, 40, heads, width) for heads, width in ((4, 192), (2, 192), (2, 128)))
    cache = PagedKVCache(8, 16, **options) if paged else KVCache(1, 64, **options)
    run = [[cache.allocate()]] if paged else []
    outs = []
    for i, j in ((0, 39), (39, 40)):
        with cache.step(*run, j - i) as step:
            outs.append([step.attend(q[:, i:j], LATENT, k[:, i:j], v[:, i:j], layer=n) for n in range(2)])
    again = attention_with_cache(q, k, v, LATENT, int32([40]), impl="reference")
    assert again.shape[-1] == cache.head_dim_v == cache.v.shape[-1] == 128
    for layer in range(2):
        torch.testing.assert_close(torch.cat([x[layer] for x in outs], 1), again, rtol=1e-4, atol=1e-5)
    if paged:
        fork = cache.fork(run[0][0])
        cache.remove(fork, 3, 20)
        assert cache.lengths[fork] == 23
    assert "head_dim_v=128" in repr(cache)
    assert cache.nbytes == cache.k.nbytes + cache.v.nbytes


def test_compiled(monkeypatch):
    q, k, v = torch.randn(1, 1, 2, 24), torch.randn(1, 16, 1, 24), torch.randn(1, 16, 1, 16)
    rotary, lengths = Rotary.rope(24), int32([9])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        return attention_with_cache(q, k, v, rotary, lengths, impl="cpu")

    torch.testing.assert_close(attend(q, k, v), attention_with_cache(q, k, v, rotary, lengths), rtol=1e-5, atol=1e-6)


# ---- refused

Q, K, V, LENGTHS = torch.zeros(1, 1, 2, 24), torch.zeros(1, 16, 1, 24), torch.zeros(1, 16, 1, 16), int32([9])
ROPE = Rotary.rope(24)
SCALE = torch.ones(1, 16, 1)
NEW = torch.zeros(1, 1, 1, 24)


def attend(v_cache, **options):
    cached_call(Q, K, v_cache, ROPE, LENGTHS, **options)


REFUSED = {
    "wider": (
        lambda: attend(torch.zeros(1, 16, 1, 32)),
        "v_cache: expected head_dim to be a multiple of 8 up to 24, the head_dim of k_cache, got 32",
    ),
    "12": (
        lambda: attend(torch.zeros(1, 16, 1, 12)),
        "v_cache: expected head_dim to be a multiple of 8 up to 24, the head_dim of k_cache, got 12",
    ),
    "slots": (
        lambda: attend(torch.zeros(1, 17, 1, 16)),
        "v_cache: expected shape (1, 16, 1, 16), the shape of k_cache except for head_dim, got (1, 17, 1, 16)",
    ),
    "new values": (lambda: attend(V, k=NEW, v=NEW), "v: expected shape (1, 1, 1, 16), got (1, 1, 1, 24)"),
    "quantized": (
        lambda: (
            attend(V.char(), k_scale=torch.ones(1, 16, 1), v_scale=torch.ones(1, 16, 1))
            if K.dtype == torch.int8
            else cached_call(
                Q, K.char(), V.char(), ROPE, LENGTHS, k_scale=torch.ones(1, 16, 1), v_scale=torch.ones(1, 16, 1)
            )
        ),
        "v_cache: expected head_dim 24 as in q, got 16",
    ),
    "quantized cache": (
        lambda: KVCache(1, 16, 1, 24, torch.float32, "cpu", head_dim_v=16, cache_dtype="int8"),
        "head_dim_v: expected head_dim = 24 in a cache of int8 (quantized values need the head_dim of the keys), got "
        "16",
    ),
    "wider cache": (
        lambda: KVCache(1, 16, 1, 24, torch.float32, "cpu", head_dim_v=32),
        "head_dim_v: expected a multiple of 8 up to head_dim = 24, got 32",
    ),
    "cuda": (
        lambda: cuda.attention_with_cache(Q.half(), CacheLayer(K, V), CacheCall(ROPE, True, 1.0, CacheTables(LENGTHS))),
        "impl='cuda' cannot serve this call: its kernels need a v_cache with the head_dim of k_cache, 24, got 16; "
        "use impl='triton'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()
