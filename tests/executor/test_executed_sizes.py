"""Tests offsets beyond 2^31 elements and 2^32 bytes in every tensor of the compiled kernels.

The memory is sparse, so huge strides need little memory. A test runs only a few programs. The results must be bitwise
those of the same numbers in small tensors. The results in small tensors are checked against the error budget.
"""

import math

import pytest
import sparse
import support
import torch
from caching import cached_call
from flashrope import Rotary, attention_with_cache
from flashrope.backends import triton as backend
from flashrope.backends.triton import attention as launches
from flashrope.calls.cache_tables import CacheLayer, CacheTables
from flashrope.calls.plans import attend_once
from flashrope.calls.records import AttentionCall, CacheCall
from packing import packing
from support import NAMES, SCHEMES, int32

BF16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float32))
slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- strides


@pytest.mark.parametrize(
    ("row", "deterministic"), [(2**24 - 8, True), pytest.param(2**24 - 8, False, marks=slow), (2**25, True)]
)
def test_strides(machine, row, deterministic):
    """Strides are right if heads are 2^31 elements apart, sequences 2^35, and rows of a tile up to 2^32 bytes or
    more."""
    p = support.problem(BF16, SCHEMES["rerope"](64), 70, 90, batch=2, heads=4, seed=50, deterministic=deterministic)
    far = {
        name: sparse.spread(getattr(p, name), (2**35 + 64, row, 2**32 + 128, 1)) for name in ("q", "k", "v", "grad_out")
    }
    assert all(x.stride(0) * x.element_size() > 2**32 < x.stride(2) for x in far.values())
    support.check(BF16, p)
    want, got = support.run(p, "triton"), support.run(p.replace(**far), "triton")
    assert all(torch.equal(got[name], want[name]) for name in NAMES if deterministic or name != "grad_q")
    if not deterministic:
        support.check(BF16, p.replace(**far))


# ---- packed rows: out, lse, the workspaces and the gradients

D = 16
LENGTHS = (40, 70)


def packed(rotary, positions=None):
    """Returns q, k, v, grad_out, grad_lse of ``LENGTHS``, and out, lse and the gradients, within the budget."""
    p = packing(BF16, rotary, LENGTHS, seed=60, positions=positions)
    results = p.run("triton")
    p.check(results, torch.bfloat16)
    return (p.q, p.k, p.v, p.grad_out), p.grad_lse, list(results.values())


def run_at_end(total: int, tensors, grad_lse, call: AttentionCall):
    """Returns the results of ``packed``, computed on the last rows of tensors with ``total`` rows."""
    (q, k, v, grad_out), rows = (sparse.at_end(x, total) for x in tensors), sum(LENGTHS)
    with sparse.Sparse():
        out, lse, kept = backend.forward(q, k, v, call)
        grads = backend.backward(grad_out, sparse.at_end(grad_lse, total, 1), q, k, v, out, lse, kept, call)
        assert lse.numel() > 2**31 or total < 2**29
    for x in (out, *grads):
        assert x.numel() >= 2**32 and not x[: LENGTHS[1]].any()
    return [out[-rows:], lse[:, -rows:], *(x[-rows:] for x in grads)]


def far_call(rotary, total: int, **options) -> AttentionCall:
    start = total - sum(LENGTHS)
    cu = int32([start, start + LENGTHS[0], total])  # the host does not read them, as on a device
    return AttentionCall(rotary, True, D**-0.5, None, cu, cu, max(LENGTHS), max(LENGTHS), **options)


@slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_packed_rows(deterministic):
    rotary, total = SCHEMES["hope_rerope_log_n"](D), 2**29 + 200
    tensors, grad_lse, want = packed(rotary)
    got = run_at_end(total, tensors, grad_lse, far_call(rotary, total, deterministic=deterministic))
    exact = [n for n, name in enumerate(NAMES) if deterministic or name != "grad_q"]
    assert same([got[n] for n in exact], [want[n] for n in exact])
    torch.testing.assert_close(got[2], want[2], rtol=2e-2, atol=2e-2)


@slow
def test_packed_positions(monkeypatch):
    """Packed positions are right in a table of 2^33 elements."""
    rotary, total = Rotary.rope(D).log_n(20), 2**28
    positions = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(65)) * 90
    tensors, grad_lse, want = packed(rotary, positions)
    small = launches.position_table(rotary, positions[None])
    table = sparse.at_end(small, total, 2)
    assert table.numel() == 2**33
    monkeypatch.setattr(launches, "position_table", lambda *_: table)
    call = far_call(rotary, total)
    call.positions = sparse.at_end(positions[None], total, 1)
    assert same(run_at_end(total, tensors, grad_lse, call), want)


# ---- caches

KEYS, CAPACITY = 60, 2**24  # 16 million positions, each 128 elements: 2^31 in one sequence
LOCAL = Rotary.rope(64).local(21)


def cached_tokens(seqlen_q: int, heads: int = 4, head_dim: int = 64, batch: int = 2):
    """Returns q of the last tokens of a sequence, and k and v of its last KEYS tokens."""
    shapes = ((seqlen_q, heads), (KEYS + seqlen_q, 2), (KEYS + seqlen_q, 2))
    return [support.random((batch, *shape, head_dim), BF16, 70 + n) for n, shape in enumerate(shapes)]


def check_far(got, q, k, v, rotary) -> None:
    """Checks results against the error budget. A scheme with a window gives the same results far from the first key as
    near it."""
    p = support.Problem(q, k, v, rotary, grad_out=torch.zeros_like(q), grad_lse=torch.zeros_like(got[1]))
    support.check_budget(dict(zip(("out", "lse"), got, strict=True)), p, torch.bfloat16)


@pytest.mark.parametrize("seqlen_q", [3, pytest.param(70, marks=slow)])
def test_slots_of_a_contiguous_cache(machine, seqlen_q):
    q, k, v = cached_tokens(seqlen_q)
    caches = [sparse.empty((2, CAPACITY, 2, 64), x.dtype) for x in (k, v)]
    lengths, new = [CAPACITY - seqlen_q, CAPACITY - seqlen_q - 5], slice(KEYS, None)
    for to, x in zip(caches, (k, v), strict=True):
        for b, length in enumerate(lengths):
            to[b, length - KEYS : length] = x[b, :KEYS]
    options = {"return_lse": True, "impl": "triton", "num_splits": 2 if seqlen_q == 3 else None}
    got = cached_call(q, *caches, LOCAL, int32(lengths), k=k[:, new], v=v[:, new], **options)
    for to, x in zip(caches, (k, v), strict=True):
        for b, length in enumerate(lengths):
            assert torch.equal(to[b, length - KEYS : length + seqlen_q], x[b])
    check_far(got, q, k, v, LOCAL)


PAGES, PAGE = 2**28 + 3, 16  # a cache with one head and 16 channels has 2^36 elements and 2^32 slots


@pytest.mark.parametrize("placed", [False, True], ids=["appended", "placed"])
@pytest.mark.parametrize("seqlen_q", [3, pytest.param(70, marks=slow)])
def test_pages(machine, seqlen_q, placed):
    """Page numbers may be as large as the cache allows, and slots of a slot_mapping may be beyond 2^32."""
    rotary, (q, k, v) = Rotary.rope(16).rectify(21), cached_tokens(seqlen_q, 4, 16, 1)
    q, k, v = q[:, :, :4], k[:, :, :1], v[:, :, :1]
    caches = [sparse.empty((PAGES, PAGE, 1, 16), x.dtype) for x in (k, v)]
    entries = -(-(KEYS + seqlen_q) // PAGE)
    table = int32([[PAGES - 1 - 2 * n for n in range(entries)]])
    slots = torch.tensor([int(table[0, n // PAGE]) * PAGE + n % PAGE for n in range(KEYS + seqlen_q)])
    assert int(slots[0]) > 2**32
    for to, x in zip(caches, (k, v), strict=True):
        to.flatten(0, 1)[slots[:KEYS]] = x[0, :KEYS]
    out, lse = cached_call(
        *(q[0], *caches, rotary, int32([0, seqlen_q]), int32([KEYS + placed * seqlen_q]), seqlen_q),
        k=k[0, KEYS:],
        v=v[0, KEYS:],
        block_table=table,
        slot_mapping=slots[KEYS:] if placed else None,
        return_lse=True,
        impl="triton",
    )
    for to, x in zip(caches, (k, v), strict=True):
        assert torch.equal(to.flatten(0, 1)[slots], x[0])
    check_far((out[None], lse[None]), q, k, v, rotary)


@slow
def test_entries_of_the_block_table(machine):
    """Block-table entries are read correctly for 33 sequences of 2^26 entries, the last at the largest capacity that a
    cache may have."""
    batch, max_pages, pages = 33, 2**26, 64
    rotary, (q, k, v) = Rotary.rope(16).local(21), cached_tokens(3, 2, 16, 1)
    table = sparse.empty((batch, max_pages), torch.int32)
    length = max_pages * PAGE - 3
    first = (length - KEYS) // PAGE
    table[-1, first:] = torch.arange(max_pages - first, dtype=torch.int32)
    caches = [torch.zeros(pages, PAGE, 2, 16, dtype=x.dtype) for x in (k, v)]
    for to, x in zip(caches, (k, v), strict=True):
        at = length - KEYS - first * PAGE
        to.flatten(0, 1)[at : at + KEYS] = x[0, :KEYS]
    queries = torch.zeros(batch, 3, 2, 16, dtype=q.dtype)
    queries[-1] = q[0]
    added = [torch.zeros(batch, 3, 2, 16, dtype=q.dtype) for _ in "kv"]
    for to, x in zip(added, (k, v), strict=True):
        to[-1] = x[0, KEYS:]
    lengths = int32([0] * (batch - 1) + [length])
    table[:-1, 0] = torch.arange(6, 6 + batch - 1)
    out, lse = attention_with_cache(
        *(queries, *caches, rotary, lengths),
        k=added[0],
        v=added[1],
        block_table=table,
        return_lse=True,
        impl="triton",
        num_splits=256,
    )
    check_far((out[-1:], lse[-1:]), q, k, v, rotary)


# ---- grids too large to run: the last blocks


def many_sequences(batch: int, capacity: int, heads: int, head_dim: int):
    """Returns (q, k_cache, v_cache) with 32 key heads. The last head of the last sequence holds (q, k, v)."""
    group = heads // 32
    q = support.random((1, 1, group, head_dim), BF16, 80)
    k, v = (support.random((1, capacity, 1, head_dim), BF16, 81 + n) for n in range(2))
    large = sparse.empty((batch, 1, heads, head_dim), q.dtype)
    large[-1, :, -group:] = q[0]
    caches = [sparse.empty((batch, capacity, 32, head_dim), q.dtype) for _ in "kv"]
    for to, x in zip(caches, (k, v), strict=True):
        to[-1, :, -1:] = x[0]
    return (large, *caches), (q, k, v)


def test_the_buffers_of_256_splits(machine):
    """The buffers for 256 splits hold the right results with 2,048 sequences of 64 heads and 128 channels: 2^32 partial
    results."""
    batch, heads, rotary = 2048, 64, Rotary.rope(128).local(700)
    large, small = many_sequences(batch, 64 * 256, heads, 128)
    length = 64 * 250
    results = []
    for (q, k, v), last in ((small, 0), (large, 256)):
        machine.reset(last_blocks=last)
        tables = CacheTables(int32([length] * q.shape[0]))
        with sparse.Sparse():
            out, lse = attend_once(backend, q, CacheLayer(k, v), CacheCall(rotary, True, 128**-0.5, tables, 256))
        results.append((out[-1:, :, -2:], lse[-1:, -2:]))
        traffic = machine.launches[-2].tensors
    assert traffic["out"].size == 2**34 and same(*results)
    q, k, v = small
    check_far(results[0], q, *(x[:, length - 800 : length] for x in (k, v)), rotary)


def test_many_short_sequences(machine):
    """The last blocks of a grid over 2^23 sequences of 16 rows are right, forward and backward. q has 2^36 elements,
    lse 2^32."""
    batch, rows, heads, rotary = 2**23, 16, 32, SCHEMES["rope"](16)  # the last blocks compute RoPE's only rotation
    p = support.problem(BF16, rotary, rows, heads=1, group=1, seed=90)
    want = support.run(p, "triton")
    support.check(BF16, p)

    def last(x):
        room = sparse.empty((batch, rows, heads, 16), x.dtype)
        room[-1, :, -1:] = x[0]
        return room

    q, k, v, grad_out = map(last, (p.q, p.k, p.v, p.grad_out))
    grad_lse = sparse.empty((batch, heads, rows), torch.float32)
    grad_lse[-1, -1] = p.grad_lse[0, 0]
    machine.reset(last_blocks=8)
    call = AttentionCall(rotary, True, 0.25, None, None, None, rows, rows)
    with sparse.Sparse():
        out, lse, kept = backend.forward(q, k, v, call)
        grads = backend.backward(grad_out, grad_lse, q, k, v, out, lse, kept, call)
    got = (out[-1:, :, -1:], lse[-1:, -1:], *(x[-1:, :, -1:] for x in grads))
    assert math.prod(lse.shape) == 2**32 and same(got, [want[name] for name in NAMES])
