"""Tests the loop of examples/serve_loop.py: whatever else a step holds, a request gets the tokens of float64."""

import random
import sys
from pathlib import Path

import pytest
import torch
from flashrope import KVCache, PagedKVCache, Rotary, attention

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from serve_loop import OneLayer, serve

SCHEME = Rotary.rope(32).rectify(24).log_n(40)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fifty_requests_over_forty_pages(dtype):
    draw = random.Random(3)
    model = OneLayer(SCHEME, (4, 2), dtype)
    requests = [{"tokens": [draw.randrange(50) for _ in range(draw.randint(1, 150))]} for _ in range(50)]
    for request in requests:
        request["length"] = len(request["tokens"]) + draw.randint(1, 12)
    prompts = [list(request["tokens"]) for request in requests]
    cache = PagedKVCache(40, 16, 2, 32, dtype, "cpu")
    freed = []
    free, cache.free = cache.free, lambda sequence: (freed.append(sequence), free(sequence))
    serve(cache, requests, model)
    assert cache.free_pages == 40 and len(freed) > 50, "no request had to wait for pages"
    exact = OneLayer(SCHEME, (4, 2), dtype)
    exact.table = exact.table.double()
    for prompt, request in zip(prompts, requests, strict=True):
        assert len(request["tokens"]) == request["length"] and request["tokens"][: len(prompt)] == prompt
        q, k, v = (x[None] for x in exact.qkv(torch.tensor(request["tokens"][:-1])))
        out = attention(q, k, v, SCHEME, impl="reference")[0]
        expected = exact.next_tokens(out[len(prompt) - 1 :])
        assert request["tokens"][len(prompt) :] == expected.tolist()


def test_a_contiguous_cache_takes_a_list_too():
    model, cache = OneLayer(SCHEME, (4, 2), torch.float64), KVCache(3, 64, 2, 32, torch.float64, "cpu")
    ids = torch.randint(0, 50, (3, 30), generator=torch.Generator().manual_seed(1))
    at = [0, 0, 0]
    for numbers in ([20, 1, 0], [1, 4, 9], [9, 0, 2]):
        rows = torch.cat([ids[b, at[b] : at[b] + n] for b, n in enumerate(numbers)])
        q, k, v = model.qkv(rows)
        with cache.step(numbers) as step:
            got = step.attend(q, SCHEME, k, v)
        at = [a + n for a, n in zip(at, numbers, strict=True)]
        for b, n in enumerate(numbers):
            q, k, v = (x[None] for x in model.qkv(ids[b, : at[b]]))
            expected = attention(q, k, v, SCHEME, impl="reference")[0, at[b] - n :] if n else got[:0]
            start = int(step.cu_seqlens[b])
            torch.testing.assert_close(got[start : start + n], expected)
    with pytest.raises(ValueError, match="seqlen_new"):
        cache.step([1, 2])
