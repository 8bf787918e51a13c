"""Memory that a cached call would write twice, or write before it is read: refused by name, on every backend."""

import itertools
import random

import pytest
import torch
from flashrope import (
    CacheLayer,
    CacheTables,
    PagedKVCache,
    Rotary,
    attention,
    attention_varlen_with_cache,
    attention_with_cache,
)
from flashrope.operators import memory
from flashrope.operators.fields import flatten
from flashrope.operators.library import OPERATORS
from support import int32

B, SLOTS, HEADS_KV, D, NEW = 2, 32, 2, 16, 3
SCHEME = Rotary.rope(D)
TWICE, OWN = "both are written", "memory of its own for every element"


class Call:
    """The tensors of a call over a contiguous cache, of which a test replaces some."""

    def __init__(self, target, quantized=False):
        def x(*shape):
            return torch.randn(shape, device=target.device, dtype=target.dtype)

        self.q = x(B, NEW, 2 * HEADS_KV, D)
        self.k_cache, self.v_cache = x(B, SLOTS, HEADS_KV, D), x(B, SLOTS, HEADS_KV, D)
        self.k, self.v = x(B, NEW, HEADS_KV, D), x(B, NEW, HEADS_KV, D)
        self.lengths, self.impl = int32([5, 9], target.device), target.impl
        self.options = {}
        if quantized:
            self.k_cache, self.v_cache = (torch.zeros_like(x, dtype=torch.int8) for x in (self.k_cache, self.v_cache))
            for name in ("k_scale", "v_scale"):
                self.options[name] = torch.zeros(B, SLOTS, HEADS_KV, device=target.device)

    def run(self):
        caches = self.q, self.k_cache, self.v_cache, SCHEME, self.lengths
        return attention_with_cache(*caches, k=self.k, v=self.v, impl=self.impl, **self.options)


def same_cache(c):
    c.v_cache = c.k_cache


def shifted_cache(c):
    rows = torch.randn(B, SLOTS + 1, HEADS_KV, D).to(c.q)
    c.k_cache, c.v_cache = rows[:, 1:], rows[:, :-1]


def shared_channels(c):
    rows = torch.randn(B, SLOTS, HEADS_KV, D + 8).to(c.q)
    c.k_cache, c.v_cache = rows[..., :D], rows[..., 8:]


def heads_of_one(c):
    c.v_cache = c.v_cache[:, :, :1].expand(-1, -1, HEADS_KV, -1)


def sequences_of_one(c):
    c.k_cache = c.k_cache[:1].expand(B, -1, -1, -1)


def overlapping_rows(c):
    c.k_cache = c.k_cache.flatten().as_strided((B, SLOTS, HEADS_KV, D), (SLOTS * D, D, D, 1))


def keys_in_the_cache(c):
    c.k = c.k_cache[:, 4 : 4 + NEW]


def values_in_the_cache_of_keys(c):
    c.v = c.k_cache[:, 4 : 4 + NEW]


def one_scale(c):
    c.options["v_scale"] = c.options["k_scale"]


def expanded_scale(c):
    c.options["k_scale"] = c.options["k_scale"][..., :1].expand(-1, -1, HEADS_KV)


REFUSED = {  # what to change, what the error names first, what it says
    "same cache": (same_cache, "v_cache", TWICE),
    "shifted cache": (shifted_cache, "v_cache", TWICE),
    "shared channels": (shared_channels, "v_cache", TWICE),
    "heads of one": (heads_of_one, "v_cache", OWN),
    "sequences of one": (sequences_of_one, "k_cache", OWN),
    "overlapping rows": (overlapping_rows, "k_cache", OWN),
    "keys in the cache": (keys_in_the_cache, "k", "k_cache is written while k is read"),
    "values in the cache of keys": (values_in_the_cache_of_keys, "v", "k_cache is written while v is read"),
    "one scale": (one_scale, "v_scale", TWICE),
    "expanded scale": (expanded_scale, "k_scale", OWN),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(exact, case):
    change, name, message = REFUSED[case]
    c = Call(exact, quantized="scale" in case)
    change(c)
    before = [x.clone() for x in (c.k_cache, c.v_cache, *c.options.values())]
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        c.run()
    for x, y in zip((c.k_cache, c.v_cache, *c.options.values()), before, strict=True):
        assert torch.equal(x, y)


def interleaved_pages(c):
    """As in vLLM: keys and values of a page side by side."""
    pages = torch.randn(B, 2, SLOTS, HEADS_KV, D).to(c.q)
    c.k_cache, c.v_cache = pages.unbind(1)


def interleaved_channels(c):
    c.k_cache, c.v_cache = torch.randn(B, SLOTS, HEADS_KV, 2 * D).to(c.q).chunk(2, -1)


def heads_first(c):
    c.k_cache, c.v_cache = torch.randn(2, B, HEADS_KV, SLOTS, D).to(c.q).transpose(2, 3)


def layers_of_one_tensor(c):
    c.k_cache, c.v_cache = torch.randn(B, SLOTS, 2, HEADS_KV, D).to(c.q).unbind(2)


def same_new_rows(c):
    """Read only: keys and values may be one tensor, and part of the queries' projection."""
    rows = torch.randn(B, NEW, 2 * HEADS_KV, D).to(c.q)
    c.q, c.k, c.v = rows, rows[:, :, :HEADS_KV], rows[:, :, :HEADS_KV]


def expanded_new_rows(c):
    c.k = c.v = c.k[:, :, :1].expand(-1, -1, HEADS_KV, -1)


def free_rows_of_the_cache(c):
    """Slots of the same storage that no cache has."""
    rows = torch.randn(B, SLOTS + NEW, HEADS_KV, D).to(c.q)
    c.k_cache, c.k = rows[:, :SLOTS], rows[:, SLOTS:]


@pytest.mark.parametrize(
    "change",
    [
        interleaved_pages,
        interleaved_channels,
        heads_first,
        layers_of_one_tensor,
        same_new_rows,
        expanded_new_rows,
        free_rows_of_the_cache,
    ],
)
def test_served(exact, change):
    """Memory between the rows of another tensor is not shared with it."""
    c = Call(exact)
    change(c)
    kept = [x.clone(memory_format=torch.contiguous_format) for x in (c.q, c.k_cache, c.v_cache, c.k, c.v)]
    out = c.run()
    written = c.k_cache, c.v_cache
    c.q, c.k_cache, c.v_cache, c.k, c.v = kept
    torch.testing.assert_close(out, c.run())
    for x, y in zip(written, (c.k_cache, c.v_cache), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("change", [same_cache, heads_of_one, sequences_of_one], ids=lambda change: change.__name__)
def test_what_is_only_read_may_overlap(exact, change):
    c = Call(exact)
    change(c)
    c.k = c.v = None
    out = c.run()
    c.k_cache, c.v_cache = c.k_cache.clone(), c.v_cache.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(out, c.run())
    none = c.q.new_empty(B, 0, HEADS_KV, D)
    change(c)
    c.k, c.v = none, none
    c.run()


def test_pages_that_alternate(exact):
    """As in transformers' continuous batching: page n of v_cache is page n + 1 of k_cache, and the table has every
    second one. Page n of both may not overlap."""
    c = Call(exact)
    pages = torch.randn(9, 16, HEADS_KV, D).to(c.q)
    table = int32([[0, 4], [6, 2]], exact.device)
    c.k_cache, c.v_cache, c.options["block_table"] = pages[:-1], pages[1:], table
    kept = pages[:-1].clone(), pages[1:].clone()
    out = c.run()
    c.k_cache, c.v_cache = kept
    torch.testing.assert_close(out, c.run())
    for shift in (0, 1, 15):
        rows = pages.flatten(0, 1)
        c.k_cache, c.v_cache = (rows[n : n + 128].unflatten(0, (8, 16)) for n in (0, shift))
        with pytest.raises(ValueError, match="^v_cache: expected no memory of k_cache"):
            c.run()


def test_stored_positions(exact):
    c = Call(exact)
    c.options["slot_positions"] = torch.zeros(B, 1, device=exact.device).expand(B, SLOTS)
    with pytest.raises(ValueError, match=f"^slot_positions: expected {OWN}"):
        c.run()


def test_attention_takes_aliases(exact):
    x = torch.randn(1, 20, 2, D, device=exact.device, dtype=exact.dtype)
    torch.testing.assert_close(
        attention(x, x, x, SCHEME, impl=exact.impl), attention(x, x.clone(), x.clone(), SCHEME, impl=exact.impl)
    )
    one = x[:, :, :1].expand(-1, -1, 2, -1)
    torch.testing.assert_close(
        attention(x, one, one, SCHEME, impl=exact.impl),
        attention(x, one.contiguous(), one.contiguous(), SCHEME, impl=exact.impl),
    )


def test_the_other_calls(exact):
    """Packed queries, and a step of a paged cache whose own pages come back as new keys."""
    c = Call(exact)
    cu = int32([0, NEW, 2 * NEW], exact.device)
    q, k, v = (x.flatten(0, 1) for x in (c.q, c.k, c.v))
    with pytest.raises(ValueError, match="^v_cache: expected no memory of k_cache"):
        attention_varlen_with_cache(q, c.k_cache, c.k_cache, SCHEME, cu, c.lengths, NEW, k=k, v=v, impl=exact.impl)
    cache = PagedKVCache(2, 16, HEADS_KV, D, exact.dtype, exact.device)
    name = cache.allocate()
    cache.append([name], c.k[:1], c.v[:1], impl=exact.impl)
    with pytest.raises(ValueError, match="^k: expected no memory of k_cache"):
        cache.append([name], cache.k[:1, :NEW], c.v[:1], impl=exact.impl)
    assert cache.lengths == {name: NEW}


def test_operator(exact):
    """Compiled models call it: it checks the memory that it gets when it runs."""
    c = Call(exact)
    tables = flatten(CacheTables, CacheTables(c.lengths, new=c.k.shape[1]))
    with pytest.raises(ValueError, match="^v_cache: expected no memory of k_cache"):
        layer = flatten(CacheLayer, CacheLayer(c.k_cache, c.k_cache))
        OPERATORS.append_to_cache(*layer, c.k, c.v, *tables, None, exact.impl)


def test_geometry():
    """Against sets of addresses, for random shapes and strides."""
    choose = random.Random(0)

    def draw():
        shape = torch.Size(choose.choice((1, 1, 2, 3, 5)) for _ in range(3))
        return (
            shape,
            tuple(choose.choice((0, 1, 2, 3, 4, 6, 7, 12, 15, 30)) for _ in range(3)),
            choose.choice((1, 2, 4)),
        )

    def bytes_of(layout) -> list[int]:
        shape, strides, itemsize = layout
        indices = itertools.product(*map(range, shape))
        return [sum(map(int.__mul__, index, strides)) * itemsize for index in indices]

    seen = set()
    for _ in range(3000):
        a, b, distance = draw(), draw(), choose.randrange(-60, 60)
        elements = bytes_of(a)
        repeats = len(set(elements)) < len(elements)
        assert memory._repeats(*a[:2]) == repeats, a
        one, two = ({x + n for x in bytes_of(y) for n in range(y[2])} for y in (a, b))
        meet = not one.isdisjoint(x + distance for x in two)
        assert memory._meet(distance, a, b) == meet, (a, b, distance)
        assert memory._size(*a) == max(one) + 1
        seen.add((repeats, meet))
    assert len(seen) == 4


def test_tensors_without_memory_overlap_nothing():
    """Kernels are compiled from calls on the meta device, where every address is 0."""
    k_cache, v_cache, k, v = (torch.empty(B, seqlen, HEADS_KV, D, device="meta") for seqlen in (SLOTS, SLOTS, NEW, NEW))
    tables = CacheTables(torch.zeros(B, dtype=torch.int32, device="meta"))
    memory.check_append(CacheLayer(k_cache, v_cache), k, v, tables)
