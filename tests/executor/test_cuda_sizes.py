"""Tests offsets beyond 2^31 elements in the CUDA C++ kernels. See ``test_executed_sizes.py``."""

import pytest
import sparse
import torch
from flashrope import Rotary
from flashrope.backends import cuda
from flashrope.calls.cache_tables import CacheLayer, CacheTables
from flashrope.calls.records import CacheCall
from support import int32

from . import test_executed_sizes as sizes
from .test_cuda_kernels import BF16, operators, random

__all__ = ["operators"]  # the fixture that every test here uses
LOCAL = Rotary.rope(64).local(21)


def append_and_attend(q, caches, new, tables, num_splits=2):
    layer = CacheLayer(*caches)
    cuda.append_to_cache(layer, *new, tables)
    return cuda.attention_with_cache(q, layer, CacheCall(LOCAL, True, 0.125, tables, num_splits))


def test_slots_of_a_contiguous_cache():
    """Two sequences of 16 million slots, with 2^31 elements each, are read correctly."""
    (q, k, v), capacity = sizes.cached_tokens(3), sizes.CAPACITY
    caches = [sparse.empty((2, capacity, 2, 64), BF16) for _ in "kv"]
    lengths = [capacity - 3, capacity - 8]
    for to, x in zip(caches, (k, v), strict=True):
        for b, length in enumerate(lengths):
            to[b, length - sizes.KEYS : length] = x[b, : sizes.KEYS]
    tables = CacheTables(int32(lengths), None, None, 3)
    got = append_and_attend(q, caches, (k[:, sizes.KEYS :], v[:, sizes.KEYS :]), tables)
    for to, x in zip(caches, (k, v), strict=True):
        assert all(torch.equal(to[b, n - sizes.KEYS : n + 3], x[b]) for b, n in enumerate(lengths))
    sizes.check_far(got, q, k, v, LOCAL)


@pytest.mark.parametrize("stride", [0, 2**24], ids=["dense", "strided"])
def test_pages(stride):
    """The last of 500 million pages is read correctly. So are rows, heads and pages that are far apart, in a cache of
    2^37 elements."""
    q, k, v = sizes.cached_tokens(3, 2, 64, 1)
    k, v = k[:, :, :1], v[:, :, :1]
    pages = 2**9 + 1 if stride else 5 * 10**8
    strides = (16 * stride, stride, 8 * stride, 1) if stride else None
    caches = [sparse.empty((pages, 16, 1, 64), BF16, strides) for _ in "kv"]
    places = torch.arange(sizes.KEYS + 3)
    table = int32([[pages - 1, pages - 4, 3, pages - 2]])
    page, row = table[0].long()[places // 16], places % 16
    for to, x in zip(caches, (k, v), strict=True):
        to[page[: sizes.KEYS], row[: sizes.KEYS]] = x[0, : sizes.KEYS]
    tables = CacheTables(int32([sizes.KEYS]), table, None, 3)
    got = append_and_attend(q, caches, (k[:, sizes.KEYS :], v[:, sizes.KEYS :]), tables)
    assert all(torch.equal(to[page, row], x[0]) for to, x in zip(caches, (k, v), strict=True))
    sizes.check_far(got, q, k, v, LOCAL)


def test_two_million_sequences(machine):
    """The last blocks of 2^21 sequences are right, with 2^32 elements of q, of out and of the partial results."""
    batch, heads, rotary = 2**21, 16, Rotary.rope(128).local(20)
    q, k, v = (random(1, n, h, 128, dtype=BF16, seed=80 + n) for n, h in ((1, heads), (50, 1), (50, 1)))
    results = []
    for sequences, last in ((1, 0), (batch, 4)):
        machine.reset(last_blocks=last)
        queries = sparse.at_end(q, sequences)
        caches = [sparse.empty((sequences, 64, 1, 128), BF16) for _ in "kv"]
        for to, x in zip(caches, (k, v), strict=True):
            to[-1, :50] = x[0]
        tables = CacheTables(int32([50]).expand(sequences).contiguous())
        with sparse.Sparse():
            out, lse = cuda.attention_with_cache(
                queries, CacheLayer(*caches), CacheCall(rotary, True, 128**-0.5, tables, 1)
            )
        results.append((out[-1:], lse[-1:]))
    assert machine.launches[-1].tensors["partial_out"].size == 2**34
    # a block combines four rows
    assert sizes.same((results[0][0][..., -16:, :], results[0][1]), results[1])
    sizes.check_far(results[0], q, k, v, rotary)
