"""Position maps over a cache of raw keys: one and several queries, contiguous and paged, split, padded, packed."""

import pytest
import support
import torch
from flashrope import KVCache, Rotary, attention, attention_varlen_with_cache, attention_with_cache
from flashrope.backends import cuda
from flashrope.backends.cpu import cached

ROPE = Rotary.rope(16)
SCHEMES = {
    "self_extend": ROPE.self_extend(24, 4),
    "self_extend_odd_log_n": ROPE.self_extend(20, 5).log_n(50),
    "dual_chunk": ROPE.dual_chunk(160, 32),
}
LENGTHS, PADS = [208, 150, 21], [0, 7, 3]  # in all chunks, in the second, in the first


def caches(device, seed=0):
    """Pages of a cache, their table, and the same keys and values in a contiguous cache."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn(2, 45, 16, 1, 16, generator=generator).to(device)
    table = torch.randperm(45, generator=generator)[:39].view(3, 13).to(device)
    return pages, table.to(torch.int32), pages[:, table].flatten(2, 3)


def queries_of(device, *shape):
    return torch.randn(*shape, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)


def numbers(x, device):
    return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)


def close(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


# (queries, splits): one token; several; more than the decode kernel serves
CALLS = [(1, 3), (5, None), (20, None)]


@pytest.mark.interpreted(lambda exact, name, queries, splits, pads: name[-1] != "n" and queries == 1 and pads)
@pytest.mark.parametrize("pads", [None, PADS], ids=["", "padded"])
@pytest.mark.parametrize(("queries", "splits"), CALLS)
@pytest.mark.parametrize("name", SCHEMES)
def test_decoding_is_the_reference(exact, name, queries, splits, pads):
    pages, table, contiguous = caches(exact.device)
    q, seqlens = queries_of(exact.device, 3, queries), numbers(LENGTHS, exact.device)
    options = {"return_lse": True, "cache_leftpad": numbers(pads, exact.device)}
    want = attention_with_cache(q, *contiguous, SCHEMES[name], seqlens, impl="reference", **options)
    options |= {"num_splits": splits, "impl": exact.impl}
    if pads is None:
        close(attention_with_cache(q, *contiguous, SCHEMES[name], seqlens, **options), want)
    close(attention_with_cache(q, *pages, SCHEMES[name], seqlens, block_table=table, **options), want)


@pytest.mark.parametrize("name", SCHEMES)
def test_blocks_that_begin_within_a_chunk(name, composed, monkeypatch):
    """The CPU backend reads a cache in blocks, whose first keys lie anywhere in a chunk."""
    monkeypatch.setattr(cached, "_block_size", lambda row: 48)
    _, _, (k_cache, v_cache) = caches("cpu")
    q, seqlens = queries_of("cpu", 3, 5), numbers(LENGTHS, "cpu")
    call = q, k_cache, v_cache, SCHEMES[name], seqlens
    close(
        attention_with_cache(*call, return_lse=True, impl="cpu"),
        attention_with_cache(*call, return_lse=True, impl="reference"),
    )


@pytest.mark.interpreted(lambda exact, name: False)
@pytest.mark.parametrize("name", SCHEMES)
def test_packed_queries(exact, name):
    pages, table, _ = caches(exact.device)
    lengths, seqlens = numbers([0, 1, 20, 24], exact.device), numbers(LENGTHS, exact.device)
    q = queries_of(exact.device, 24)
    got, want = (
        attention_varlen_with_cache(
            q, *pages, SCHEMES[name], lengths, seqlens, 20, block_table=table, return_lse=True, impl=impl
        )
        for impl in (exact.impl, "reference")
    )
    close(got, want)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_is_the_last_row_of_attention(name):
    """Over a growing cache, across the ends of chunks, on the default backend."""
    q, k, v = (support.random((1, 290, 1, 16), support.Target("cpu", torch.float32, "cpu"), seed) for seed in range(3))
    cache = KVCache(1, 300, 1, 16, dtype=torch.float32, device="cpu")
    whole = attention(q, k, v, SCHEMES[name])
    step = 0
    for stop in (120, 127, 128, 129, 255, 256, 257, 290):
        out = cache.attend(q[:, step:stop], SCHEMES[name], k[:, step:stop], v[:, step:stop])
        torch.testing.assert_close(out, whole[:, step:stop], rtol=1e-4, atol=1e-5)
        step = stop


def test_the_cuda_kernels_refuse_maps(monkeypatch):
    """By name, one sequence per row or packed; the same call without a map comes as far as their library."""

    class Reached(Exception):
        pass

    def operators():
        raise Reached

    monkeypatch.setattr(cuda, "unsupported_reason", lambda q, cached=False: "")
    monkeypatch.setattr(cuda, "_operators", operators)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
    pages, table, _ = caches("cpu")
    seqlens, options = numbers(LENGTHS, "cpu"), {"block_table": table, "impl": "cuda"}
    starts = numbers([0, 1, 20, 24], "cpu")
    for rotary in (*SCHEMES.values(), ROPE):
        for call in (
            lambda: attention_with_cache(queries_of("cpu", 3, 1), *pages, rotary, seqlens, **options),
            lambda: attention_varlen_with_cache(queries_of("cpu", 24), *pages, rotary, starts, seqlens, 20, **options),
        ):
            if rotary is ROPE:
                pytest.raises(Reached, call)
                continue
            with pytest.raises(ValueError, match=r"impl='cuda' .* no position maps \(self_extend, dual_chunk\); use "):
                call()
