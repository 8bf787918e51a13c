"""Tests extreme sizes: offsets beyond 2^31 elements on the CPU, positions to 16 million, and empty tensors.

tests/executor/test_executed_sizes.py tests the compiled kernels.
"""

import itertools
from functools import partial

import pytest
import sparse
import support
import torch
from flashrope import (
    KVCache,
    PagedKVCache,
    Rotary,
    attention,
    attention_varlen,
    attention_varlen_with_cache,
    attention_with_cache,
)
from flashrope.backends.registry import load_backend
from flashrope.backends.shared import host_rotation as rotation
from flashrope.calls.records import AttentionCall
from flashrope.schemes.bands import PositionMap
from flashrope.schemes.scales import QueryScale
from support import NAMES, SCHEMES, int32

FAR = 2**24  # positions
on_cpu = pytest.mark.parametrize("target", [t for t in support.TARGETS if t.impl in ("cpu", "sdpa")], ids=str)


# ---- offsets

linux = pytest.mark.skipif(not hasattr(sparse.mmap, "MAP_ANONYMOUS"), reason="sparse memory needs mmap")


@linux
@on_cpu
def test_strides(target):
    p = support.problem(target, SCHEMES["rerope"](16), 70, 90, batch=2, heads=4, seed=50)
    far = {n: sparse.spread(getattr(p, n), (2**35 + 64, 2**25, 2**32 + 128, 1)) for n in ("q", "k", "v", "grad_out")}
    support.check(target, p.replace(**far))


@linux
@on_cpu
def test_rows_of_packed_sequences(target):
    """The last rows of packed tensors with 2^31 elements are right."""
    lengths, total, rotary = (40, 70), 2**26 + 200, Rotary.rope(16).rectify(9)
    p = support.problem(target, rotary, sum(lengths), heads=2, group=1, seed=51)
    start = total - sum(lengths)
    cu = int32([start, start + lengths[0], total])
    call = AttentionCall(rotary, True, 0.25, None, cu, cu, 70, 70)
    q, k, v, grad_out = (sparse.at_end(x[0], total) for x in (p.q, p.k, p.v, p.grad_out))
    backend = load_backend(target.impl)
    with sparse.Sparse():
        out, lse, kept = backend.forward(q, k, v, call)
        grads = backend.backward(grad_out, None, q, k, v, out, lse, kept, call)
    assert out.numel() > 2**31 and not out[:100].any()
    for first, length in ((start, lengths[0]), (total - lengths[1], lengths[1])):
        rows, small = slice(first, first + length), slice(first - start, first - start + length)
        of = {n: getattr(p, n)[:, small] for n in ("q", "k", "v", "grad_out")}
        part = p.replace(**of, grad_lse=torch.zeros_like(p.grad_lse[:, :, small]))
        results = (out[None, rows], lse[None, :, rows], *(x[None, rows] for x in grads))
        support.check_budget(dict(zip(NAMES, results, strict=True)), part, target.dtype)


@linux
@on_cpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_slots_of_caches(target, page_size):
    """The last of 16 million slots, after 2^31 elements, and the last of 100 million pages are read and written
    correctly."""
    if target.dtype == torch.float64 and not page_size:
        pytest.skip("angles of 16 million radians: float64 has no digits to spare for them")
    rotary, heads, d = SCHEMES["local"](32), 4, 32
    q, k, v = (support.random((1, n, heads, d), target, 52 + i) for i, n in enumerate((3, 63, 63)))
    if page_size:
        pages = 10**8 // target.dtype.itemsize
        caches = [sparse.empty((pages, page_size, heads, d), target.dtype) for _ in "kv"]
        table, first = int32([[pages - 1, pages - 3, 5, pages - 2, *[2**31 - 1] * 4]]), 0
        places = [int(table[0, n // page_size]) * page_size + n % page_size for n in range(63)]
    else:
        caches = [sparse.empty((1, FAR, heads, d), target.dtype) for _ in "kv"]
        table, first = None, FAR - 63
        places = range(first, FAR)
    rows = [x.flatten(0, 1) for x in caches]
    for to, x in zip(rows, (k, v), strict=True):
        to[torch.tensor(places[:60])] = x[0, :60]
    out, lse = attention_with_cache(
        q,
        *caches,
        rotary,
        int32([first + 60]),
        k=k[:, 60:],
        v=v[:, 60:],
        block_table=table,
        return_lse=True,
        impl=target.impl,
    )
    for to, x in zip(rows, (k, v), strict=True):
        assert torch.equal(to[torch.tensor(places)], x[0])
    p = support.Problem(q, k, v, rotary, grad_out=torch.zeros_like(q), grad_lse=torch.zeros_like(lse))
    support.check_budget({"out": out, "lse": lse}, p, target.dtype)


def test_a_cache_of_more_slots_than_positions_is_refused():
    """A cache with more slots than there are positions is refused. Distances are 32-bit numbers, and bands without an
    end use 2^30."""
    caches = [sparse.empty((1, 2**30 + 1, 1, 8), torch.float32) for _ in "kv"]
    with pytest.raises(
        ValueError, match=r"k_cache: expected room for at most 1073741824 tokens a sequence, got 1073741825"
    ):
        attention_with_cache(torch.zeros(1, 1, 1, 8), *caches, Rotary.rope(8), int32([5]))
    full = [sparse.empty((1, 2**30, 1, 8), torch.float32) for _ in "kv"]
    attention_with_cache(torch.zeros(1, 1, 1, 8), *full, Rotary.rope(8), int32([5]), impl="cpu")
    table = sparse.empty((1, 2**26 + 1), torch.int32)
    pages = [torch.zeros(3, 16, 1, 8) for _ in "kv"]
    with pytest.raises(ValueError, match="block_table: expected room for at most 1073741824 tokens"):
        attention_with_cache(torch.zeros(1, 1, 1, 8), *pages, Rotary.rope(8), int32([5]), block_table=table)


# ---- positions


@pytest.fixture
def small_tables(monkeypatch):
    """Fails the test if the CPU backend makes a table of all positions from 0 to the largest position of the call."""
    table = rotation.rotations_between

    def made(*arguments):
        first, stop = arguments[3:5]
        assert stop - first <= 2**15, f"a table of {stop - first} positions"
        return table(*arguments)

    monkeypatch.setattr(rotation, "rotations_between", made)
    rotation.rotation_of_rows.cache_clear()


@pytest.mark.parametrize("first", [2**20, FAR - 3, FAR, FAR + 4090, 2**30])
def test_a_rotation_far_away_is_exact(first, small_tables):
    rotary, factors = Rotary.rope(64), rotation.QueryFactors(QueryScale(0.5))
    for rows, of_rows in itertools.product((1, 7, 5000), (PositionMap(1.0, 0.0), PositionMap(0.25, 12.0))):
        got = rotation.rotation_of_rows(rotary, of_rows, factors, first, rows, torch.float32)
        positions = torch.arange(first, first + rows, dtype=torch.float64)
        want = rotation.rotation_at(rotary, positions, of_rows, factors, torch.float32)
        assert got.cos.shape == want.cos.shape
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_sixteen_million_positions_away_is_as_exact(exact):
    """Positions up to 16 million are as exact as early ones. The test compares root mean square errors over 4096 lse,
    or 256 in the interpreter. With 4096, the error is known to about 1%."""
    rotary, rows, heads = Rotary.rope(64, base=500_000.0), 64, 4 if exact.slow else 64
    p = support.problem(exact, rotary, rows, heads=heads, group=1, seed=53)
    errors = {}
    for offset in (0, FAR):
        positions = torch.arange(rows, device=exact.device, dtype=torch.float64)[None] + offset
        lse = attention(p.q, p.k, p.v, rotary, positions=positions, return_lse=True, impl=exact.impl)[1]
        wide = (p.q.double(), p.k.double(), p.v.double(), rotary)
        right = attention(*wide, positions=positions, return_lse=True, impl="reference")[1]
        errors[offset] = (lse.double() - right).square().mean().sqrt().item()
    assert errors[FAR] <= 1.2 * errors[0], errors


FAR_TARGETS = [
    pytest.param(t, id=str(t), marks=pytest.mark.slow if t.slow else ())
    for t in support.TARGETS
    if t.dtype == torch.float32
]


@linux
@pytest.mark.parametrize("target", FAR_TARGETS)
@pytest.mark.parametrize("scheme", ["rope", "leaky"])
def test_sixteen_million_cached_tokens_away_is_as_exact(target, scheme, small_tables):
    """Queries after 16 million slots are as exact as early ones. On a GPU their angles come from two levels of tables.
    Compares 1024 lse."""
    exact = target
    rotary, rows, heads, batch = Rotary.rope(16, base=500_000.0), 16, 16, 4
    rotary = rotary.local(50) if scheme == "rope" else rotary.rectify(9, 4.0).local(50)
    q, k, v = (support.random((batch, n, heads, 16), exact, 54 + i) for i, n in enumerate((rows, 80, 80)))
    wide = (q.double(), k.double(), v.double(), rotary)
    right = attention(*wide, return_lse=True, impl="reference")[1]
    errors = {}
    for first in (0, FAR - 80):
        make = sparse.empty if first and exact.device == "cpu" else partial(torch.zeros, device=exact.device)
        caches = [make((batch, first + 80, heads, 16), dtype=exact.dtype) for _ in "kv"]
        for to, x in zip(caches, (k, v), strict=True):
            to[:, first:] = x
        lengths = int32([first + 80] * batch, exact.device)
        lse = attention_with_cache(q, *caches, rotary, lengths, return_lse=True, impl=exact.impl)[1]
        errors[first] = (lse.double() - right).square().mean().sqrt().item()
    assert errors[FAR - 80] <= 1.2 * errors[0], errors


# ---- many sequences


@pytest.mark.interpreted(lambda **_: False)
def test_a_thousand_sequences(exact):
    """Packs a thousand sequences of 0 to 3 tokens each. The same sequences, appended to a cache of 100,000 pages, give
    the same results."""
    target, rotary, lengths = exact, SCHEMES["rerope"](16), [n % 4 for n in range(1000)]
    starts = list(itertools.accumulate(lengths, initial=0))
    q, k, v = (support.random((1, starts[-1], heads, 16), target, 60 + heads)[0] for heads in (4, 2, 2))
    out, lse = attention_varlen(q, k, v, rotary, *[int32(starts)] * 2, 3, 3, return_lse=True, impl=target.impl)
    cache = PagedKVCache(100_000, 16, 2, 16, target.dtype, target.device, max_seqlen=64)
    sequences = [cache.allocate() for _ in lengths]
    assert cache.free_pages == 100_000
    for n in (1, 2, 3):
        some = [b for b, length in enumerate(lengths) if length == n]
        rows = torch.tensor([starts[b] for b in some])[:, None] + torch.arange(n)
        got = cache.attend([sequences[b] for b in some], q[rows], rotary, k[rows], v[rows], impl=target.impl)
        p = support.Problem(q[rows], k[rows], v[rows], rotary)
        p = p.replace(grad_out=torch.zeros_like(p.q), grad_lse=lse.new_zeros(len(some), 4, n))
        for name, x in (("packed", out[rows]), ("cached", got)):
            support.check_budget({"out": x}, p, target.dtype, name + " ")
    assert cache.free_pages == 100_000 - 750
    cache.reset()
    assert cache.free_pages == 100_000 and sorted(cache._pool.free) == list(range(100_000))


# ---- empty tensors

EMPTY = [impl for impl in ("cpu", "sdpa", "reference", "triton") if impl != "triton" or support.INTERPRETED]


@pytest.mark.parametrize("impl", EMPTY)
def test_nothing_at_all(impl):
    """A call without any sequences, queries, keys, slots, pages, table entries or new keys returns zeros for out and
    -inf for lse."""
    rotary = Rotary.rope(16).rectify(5)
    for causal, (batch, rows, keys) in itertools.product((True, False), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)]):
        q, k, v = (torch.randn(batch, n, h, 16, requires_grad=True) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
        out, lse = attention(q, k, v, rotary, causal=causal, return_lse=True, impl=impl)
        check_empty(out, lse, (batch, rows, 4, 16), (batch, 4, rows))
        if out.requires_grad:
            grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
            assert all(g is None or (g.shape == x.shape and not g.any()) for g, x in zip(grads, (q, k, v), strict=True))
    for starts_q, starts_k in (([0], [0]), ([0, 0, 0], [0, 0, 0]), ([0, 3, 3], [0, 0, 0]), ([0, 0, 0], [0, 3, 3])):
        q, k, v = (torch.randn(n, h, 16) for n, h in ((starts_q[-1], 4), (starts_k[-1], 2), (starts_k[-1], 2)))
        out, lse = attention_varlen(q, k, v, rotary, int32(starts_q), int32(starts_k), 3, 3, return_lse=True, impl=impl)
        check_empty(out, lse, q.shape, (4, len(q)))
    for batch, rows, capacity, new in itertools.product((0, 2), (0, 3), (0, 16), (None, 0)):
        q, cache = torch.randn(batch, rows, 4, 16), torch.randn(2, batch, capacity, 2, 16)
        added = (None, None) if new is None else torch.randn(2, batch, new, 2, 16).unbind()
        lengths = torch.zeros(batch, dtype=torch.int32)
        out, lse = attention_with_cache(q, *cache, rotary, lengths, k=added[0], v=added[1], return_lse=True, impl=impl)
        check_empty(out, lse, q.shape, (batch, 4, rows))
    for batch, pages, entries in itertools.product((0, 2), (0, 3), (0, 2)):
        q, cache = torch.randn(batch, 1, 4, 16), torch.randn(2, pages, 16, 2, 16)
        added = torch.randn(2, batch, 1, 2, 16)
        before, lengths = cache.clone(), torch.full((batch,), entries * 16, dtype=torch.int32)
        table = torch.full((batch, entries), 5 if pages == 0 else 0, dtype=torch.int32)
        attention_with_cache(
            q, *cache, rotary, lengths, k=added[0], v=added[1], block_table=table, impl=impl
        )  # the cache has no slot for it
        assert torch.equal(cache, before)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        out, lse = attention_varlen_with_cache(
            q[:, 0], *cache, rotary, starts, lengths * 0, 1, block_table=table, return_lse=True, impl=impl
        )
        check_empty(out, lse, (batch, 4, 16), (4, batch))


def check_empty(out, lse, shape, lse_shape) -> None:
    assert out.shape == shape and lse.shape == lse_shape and not out.any() and (lse == -torch.inf).all()


def test_caches_without_tokens():
    rotary, nothing = Rotary.rope(16), torch.zeros(2, 0, 1, 16)
    for cache, who in (
        (KVCache(2, 32, 1, 16, torch.float32), ()),
        (PagedKVCache(2, 16, 1, 16, torch.float32), ([0, 1],)),
    ):
        if who:
            cache.allocate(), cache.allocate()
        cache.append(*who, nothing, nothing)
        out = cache.attend(*who, torch.randn(2, 1, 1, 16), rotary)
        assert not out.any() and cache.attend(*who, nothing, rotary).shape == nothing.shape
    assert PagedKVCache(2, 16, 1, 16, torch.float32).attend([], nothing[:0], rotary).shape == (0, 0, 1, 16)
