"""A cached call that would write memory twice, or write memory before reading it, raises an error that names the
tensors, on every backend."""

import itertools
import random

import pytest
import torch
from caching import Cached, cached_call, same
from flashrope import (
    CacheLayer,
    CacheTables,
    PagedKVCache,
    Rotary,
    attention,
)
from flashrope.calls import memory
from flashrope.operators.fields import flatten
from flashrope.operators.torch_library import OPERATORS
from support import int32

B, SLOTS, HEADS_KV, D, NEW = 2, 32, 2, 16, 3
SCHEME = Rotary.rope(D)
VIEW = "expected None, because v_cache is a view of k_cache from channel 0 on"
TWICE, OWN = "both are written", "memory of its own for every element"


def call_of(target, quantized=False) -> dict:
    """Returns the arguments of a call over a contiguous cache. Tests replace some of them."""
    cache_dtype = "int8" if quantized else None
    c = Cached(target, SCHEME, (9 + NEW, 5 + NEW), NEW, capacity=SLOTS, cache_dtype=cache_dtype)
    return c.arguments()[1] | {"impl": target.impl}


def written(given: dict) -> list[torch.Tensor]:
    """Returns the tensors that a call writes to."""
    return [given[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale") if name in given]


def shifted(c):
    rows = torch.randn(B, SLOTS + 1, HEADS_KV, D).to(c["q"])
    return {"k_cache": rows[:, 1:], "v_cache": rows[:, :-1]}


def shared_channels(c):
    rows = torch.randn(B, SLOTS, HEADS_KV, D + 8).to(c["q"])
    return {"k_cache": rows[..., :D], "v_cache": rows[..., 8:]}


SAME = {  # changes of the arguments
    "same cache": lambda c: {"v_cache": c["k_cache"]},
    "heads of one": lambda c: {"v_cache": c["v_cache"][:, :, :1].expand(-1, -1, HEADS_KV, -1)},
    "sequences of one": lambda c: {"k_cache": c["k_cache"][:1].expand(B, -1, -1, -1)},
}
OVERLAPPING = (SLOTS * D, D, D, 1)
REFUSED = {  # (change, what the error names first, what it says)
    "same cache": (SAME["same cache"], "v", VIEW.removeprefix("expected ")),
    "shifted cache": (shifted, "v_cache", TWICE),
    "shared channels": (shared_channels, "v_cache", TWICE),
    "heads of one": (SAME["heads of one"], "v_cache", OWN),
    "sequences of one": (SAME["sequences of one"], "k_cache", OWN),
    "overlapping rows": (lambda c: {"k_cache": c["k_cache"].flatten().as_strided((B, SLOTS, HEADS_KV, D), OVERLAPPING)},
                         "k_cache", OWN),
    "keys in the cache": (lambda c: {"k": c["k_cache"][:, 4 : 4 + NEW]}, "k", "k_cache is written while k is read"),
    "values in the cache of keys": (lambda c: {"v": c["k_cache"][:, 4 : 4 + NEW]}, "v",
                                    "k_cache is written while v is read"),
    "one scale": (lambda c: {"v_scale": c["k_scale"]}, "v_scale", TWICE),
    "expanded scale": (lambda c: {"k_scale": c["k_scale"][..., :1].expand(-1, -1, HEADS_KV)}, "k_scale", OWN),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(exact, case):
    change, name, message = REFUSED[case]
    c = call_of(exact, quantized="scale" in case)
    c |= change(c)
    before = [x.clone() for x in written(c)]
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        cached_call(**c)
    assert all(map(same, written(c), before))


def caches_of(make):
    return lambda c: dict(zip(("k_cache", "v_cache"), make(lambda *shape: torch.randn(*shape).to(c["q"])), strict=True))


def same_new_rows(c):
    """Returns new keys and values that are one slice of the tensor that also holds q. This overlap is
    allowed, because the call only reads these tensors."""
    rows = torch.randn(B, NEW, 2 * HEADS_KV, D).to(c["q"])
    return {"q": rows, "k": rows[:, :, :HEADS_KV], "v": rows[:, :, :HEADS_KV]}


def free_rows_of_the_cache(c):
    """Returns new keys in slots of the cache's storage that belong to no cache."""
    rows = torch.randn(B, SLOTS + NEW, HEADS_KV, D).to(c["q"])
    return {"k_cache": rows[:, :SLOTS], "k": rows[:, SLOTS:]}


SERVED = {
    # as in vLLM, where keys and values of a page are adjacent in memory
    "interleaved pages": caches_of(lambda x: x(B, 2, SLOTS, HEADS_KV, D).unbind(1)),
    "interleaved channels": caches_of(lambda x: x(B, SLOTS, HEADS_KV, 2 * D).chunk(2, -1)),
    "heads first": caches_of(lambda x: x(2, B, HEADS_KV, SLOTS, D).transpose(2, 3)),
    "layers of one tensor": caches_of(lambda x: x(B, SLOTS, 2, HEADS_KV, D).unbind(2)),
    "same new rows": same_new_rows,
    "expanded new rows": lambda c: dict.fromkeys("kv", c["k"][:, :, :1].expand(-1, -1, HEADS_KV, -1)),
    "free rows of the cache": free_rows_of_the_cache,
}


@pytest.mark.parametrize("change", SERVED.values(), ids=SERVED.keys())
def test_served(exact, change):
    """A tensor may lie between the rows of another tensor, because the two do not overlap."""
    c = call_of(exact)
    c |= change(c)
    names = ("q", "k_cache", "v_cache", "k", "v")
    copied = c | {name: c[name].clone(memory_format=torch.contiguous_format) for name in names}
    torch.testing.assert_close(cached_call(**c), cached_call(**copied))
    assert all(map(same, written(c), written(copied)))


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_what_is_only_read_may_overlap(exact, change):
    c = call_of(exact) | {"k": None, "v": None}
    c |= change(c)
    copied = c | {name: c[name].clone(memory_format=torch.contiguous_format) for name in ("k_cache", "v_cache")}
    torch.testing.assert_close(cached_call(**c), cached_call(**copied))
    none = c["q"].new_empty(B, 0, HEADS_KV, D)
    cached_call(**c | {"k": none, "v": none})


def test_pages_that_alternate(exact):
    """Page n of v_cache may be page n + 1 of k_cache if the table uses every second page, as in transformers'
    continuous batching. Page n of both caches may not overlap."""
    c = call_of(exact)
    pages = torch.randn(9, 16, HEADS_KV, D).to(c["q"])
    c["block_table"] = int32([[0, 4], [6, 2]], exact.device)
    for k_cache, v_cache in ((pages[:-1], pages[1:]), (pages[1:], pages[:-1])):
        apart = c | {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()}
        c |= {"k_cache": k_cache, "v_cache": v_cache}
        torch.testing.assert_close(cached_call(**c), cached_call(**apart))
    for shift in (0, 1, 15):
        rows = pages.flatten(0, 1)
        caches = (rows[n : n + 128].unflatten(0, (8, 16)) for n in (0, shift))
        c |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
        with pytest.raises(
            ValueError, match="^v_cache: expected memory that does not overlap k_cache" if shift else f"^v: {VIEW}"
        ):
            cached_call(**c)


def test_stored_positions(exact):
    c = call_of(exact) | {"slot_positions": torch.zeros(B, 1, device=exact.device).expand(B, SLOTS)}
    with pytest.raises(ValueError, match=f"^slot_positions: expected {OWN}"):
        cached_call(**c)


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
    """Packed queries are checked, and so is a step of a paged cache that gets its own pages as new keys."""
    c = Cached(exact, SCHEME, (8, 12), (NEW, NEW), capacity=SLOTS)
    with pytest.raises(ValueError, match=f"^v: {VIEW}"):
        c.call(v_cache=c.k_cache)
    cache = PagedKVCache(2, 16, HEADS_KV, D, exact.dtype, exact.device)
    name, (k, v) = cache.allocate(), (x[None, :NEW] for x in c.new_keys())
    cache.append([name], k, v, impl=exact.impl)
    with pytest.raises(ValueError, match="^k: expected memory that does not overlap k_cache"):
        cache.append([name], cache.k[:1, :NEW], v, impl=exact.impl)
    assert cache.lengths == {name: NEW}


def test_operator(exact):
    """Compiled models call the operator. At run time it checks the memory of its arguments."""
    c = Cached(exact, SCHEME, (8, 12), NEW, capacity=SLOTS)
    tables, layer = c.parts()
    layer = layer._replace(v=layer.k)
    with pytest.raises(ValueError, match="^v_cache: expected memory that does not overlap k_cache"):
        arguments = *flatten(CacheLayer, layer), *c.new_keys(), *flatten(CacheTables, tables)
        OPERATORS.append_to_cache(*arguments, None, exact.impl)


def test_geometry():
    """Compares the overlap check with sets of addresses, for random shapes and strides."""
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


@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("other", range(4))
def test_later_layers_of_a_plan(monkeypatch, one, other):
    """After the first layers, a plan compares only addresses. If two tensors overlap by one element, the plan checks
    everything again. If they only touch, it does not."""
    checked, check = [], memory.check_append
    monkeypatch.setattr(memory, "check_append", lambda *args: checked.append(args) or check(*args))
    shapes = (B, SLOTS, HEADS_KV, D), (B, SLOTS, HEADS_KV, D), (B, NEW, HEADS_KV, D), (B, NEW, HEADS_KV, D)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    room, tables = torch.zeros(2 * sum(sizes)), CacheTables(torch.zeros(B, dtype=torch.int32))

    def layer(*starts):
        k_cache, v_cache, k, v = (
            room[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
        )
        return CacheLayer(k_cache, v_cache), k, v, tables

    apart = [sum(sizes[:n]) for n in range(4)]
    plan = memory.AppendCheck()
    for _ in range(3):
        plan(*layer(*apart))
    assert len(checked) == 1
    if one == other or min(one, other) >= 2:  # new keys and values are only read
        return
    side_by_side = [start + sum(sizes) for start in apart]
    side_by_side[one], side_by_side[other] = 0, sizes[one]
    plan(*layer(*side_by_side))
    assert len(checked) == 1
    side_by_side[other] -= 1
    with pytest.raises(ValueError, match="expected memory that does not overlap"):
        plan(*layer(*side_by_side))


def test_tensors_without_memory_overlap_nothing():
    """Tensors on the meta device overlap nothing, although every address is 0 there. Kernels are compiled from such
    calls."""
    k_cache, v_cache, k, v = (torch.empty(B, seqlen, HEADS_KV, D, device="meta") for seqlen in (SLOTS, SLOTS, NEW, NEW))
    tables = CacheTables(torch.zeros(B, dtype=torch.int32, device="meta"))
    memory.check_append(CacheLayer(k_cache, v_cache), k, v, tables)
