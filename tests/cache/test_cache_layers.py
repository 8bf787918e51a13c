"""Tests one cache for all layers of a model: its steps, left padding and autocast. The tokens of a step are kept in all
layers or, after an error, in none."""

import random
import re

import pytest
import torch
from flashrope import KVCache, OutOfPages, PagedKVCache, attention, attention_with_cache
from flashrope.operators.cache_plan import CachePlan
from test_cache import DEVICE, HEAD_DIM, LAYERS, PAGE, SCHEMES, Failure, queries, rows
from test_cache import contiguous as contiguous_of
from test_cache import expected as exact
from test_cache import paged as paged_of

IMPL = "reference" if DEVICE == "cuda" else None  # float64


def contiguous(sequences=3, layers=LAYERS, **options) -> KVCache:
    return contiguous_of(sequences, **{"capacity": 60, "layers": layers, **options})


def paged(pages=12, layers=LAYERS, **options) -> PagedKVCache:
    return paged_of(pages, layers=layers, **options)


def write(step, lists, layers=range(LAYERS)):
    for layer in layers:
        step.append(*rows(lists, layer), layer=layer)


class Both:
    """A contiguous or a paged cache, with the same calls for both. Sequences are numbered from 0."""

    def __init__(self, kind: str, sequences: int = 3, **options):
        self.contiguous = kind == "contiguous"
        self.cache = contiguous(sequences, **options) if self.contiguous else paged(**options)
        self.names = [] if self.contiguous else [self.cache.allocate() for _ in range(sequences)]
        self.first = () if self.contiguous else (self.names,)

    def step(self, *arguments, **options):
        return self.cache.step(*self.first, *arguments, **options)

    def attend(self, *arguments, **options):
        return self.cache.attend(*self.first, *arguments, **options)

    def append(self, *arguments, **options):
        return self.cache.append(*self.first, *arguments, **options)

    def truncate(self, sequence, length):
        return self.cache.truncate(sequence if self.contiguous else self.names[sequence], length)

    @property
    def lengths(self):
        return self.cache.lengths if self.contiguous else [self.cache.lengths[name] for name in self.names]

    @property
    def padding(self):
        return self.cache.padding if self.contiguous else [self.cache.padding[name] for name in self.names]

    def on_device(self):
        if self.contiguous:
            return self.cache.seqlens.tolist(), self.cache.leftpad.tolist()
        return self.cache.seqlens(self.names).tolist(), self.cache.leftpad(self.names).tolist()


both = pytest.mark.parametrize("kind", ["contiguous", "paged"])


# ---- steps


@both
@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_steps_equal_attention(scheme, impl, kind):
    """Steps give the results of attention: prompts padded on the left, chunks, verification of drafts, and decoding.
    Every layer holds different keys."""
    cache, generator = Both(kind), random.Random(3)
    pads, tokens = [0, 4, 17], [[], [], []]
    done = 0
    for seqlen_new, dropped in ((19, 0), (20, 4), (1, 0), (5, 3), (1, 1)):
        new = [[generator.randrange(512) for _ in range(seqlen_new)] for _ in tokens]
        for sequence, more, pad in zip(tokens, new, pads, strict=True):
            sequence.extend(more[max(pad - done, 0) :])
        done += seqlen_new
        q = queries(seqlen_new, 3, seqlen_new)
        with cache.step(seqlen_new, leftpad=None if done > seqlen_new else pads) as step:
            for layer in random.Random(done).sample(range(LAYERS), LAYERS):
                out = step.attend(q, SCHEMES[scheme], *rows(new, layer), layer=layer, impl=impl or IMPL, validate=True)
                torch.testing.assert_close(out, exact(scheme, q, tokens, layer))
        assert cache.lengths == [done] * 3 and cache.padding == pads
        assert cache.on_device() == ([done] * 3, pads)
        for layer in range(LAYERS):
            out = cache.attend(q, SCHEMES[scheme], layer=layer, impl=impl or IMPL, validate=True)
            torch.testing.assert_close(out, exact(scheme, q, tokens, layer))
        done -= dropped
        for b, sequence in enumerate(tokens):
            cache.truncate(b, done)
            del sequence[len(sequence) - dropped :]


@both
def test_sinks_of_every_layer(kind):
    """The first layer of a step makes the step's plan. Every layer, including the first, uses its own sinks."""
    cache, tokens = Both(kind), [[1, 2, 3]] * 3
    q = queries(3, 3, 3)
    sinks = [torch.full((q.shape[-2],), float(layer), device=DEVICE) for layer in range(LAYERS)]
    with cache.step(3) as step:
        for layer in range(LAYERS):
            out = step.attend(q, SCHEMES["rope"], *rows(tokens, layer), layer=layer, impl=IMPL, sinks=sinks[layer])
            every = rows(tokens, layer)
            torch.testing.assert_close(out, attention(q, *every, SCHEMES["rope"], impl=IMPL, sinks=sinks[layer]))


@both
def test_a_default_device_changes_nothing(kind):
    """The tables of a cache are on the cache's device, even under torch.device("meta"), which servers use to make
    models."""
    cache, new = Both(kind), [rows([[1, 2, 3]] * 3, layer) for layer in range(LAYERS)]
    with torch.device("meta"), cache.step(3, leftpad=[0, 1, 2]) as step:
        for layer in range(LAYERS):
            step.append(*new[layer], layer=layer)
    assert cache.on_device() == ([3] * 3, [0, 1, 2])


@both
@pytest.mark.parametrize("writes", range(LAYERS + 1))
def test_a_failed_step_leaves_nothing(kind, writes):
    """A step that raises an error after `writes` layers have written leaves the cache as it was."""
    cache = Both(kind)
    cache.append(*(torch.stack(x) for x in zip(*(rows([[1] * 10] * 3, layer) for layer in range(LAYERS)), strict=True)))
    pages = None if cache.contiguous else cache.cache.block_table(cache.names).tolist()
    with pytest.raises(Failure), cache.step(17, leftpad=None) as step:
        write(step, [[2] * 17] * 3, range(writes))
        raise Failure
    assert cache.lengths == [10] * 3 and cache.on_device() == ([10] * 3, [0] * 3)
    if pages:
        assert cache.cache.block_table(cache.names).tolist() == pages and cache.cache.free_pages == 12 - 3
    q = queries(2, 3)
    for layer in range(LAYERS):
        out = cache.attend(q, SCHEMES["rope"], layer=layer, impl=IMPL, validate=True)
        torch.testing.assert_close(out, exact("rope", q, [[1] * 10] * 3, layer))
    with cache.step(1) as step:  # the cache is usable
        write(step, [[3]] * 3)
    assert cache.lengths == [11] * 3


@both
def test_failed_steps_forget_their_left_padding(kind):
    cache = Both(kind)
    with pytest.raises(Failure), cache.step(9, leftpad=[1, 2, 3]) as step:
        write(step, [[1] * 9] * 3)
        raise Failure
    assert cache.padding == [0, 0, 0] and cache.on_device() == ([0] * 3, [0] * 3)


def test_a_kernel_that_fails_in_the_last_layer(monkeypatch):
    """A step leaves the cache as it was if its last layer fails after the kernel has written, for example for lack of
    memory. The page that is written is shared by forks."""
    cache = paged(4)
    parent = cache.allocate()
    with cache.step([parent], 10) as step:
        write(step, [[1] * 10])
    child = cache.fork(parent)
    calls = []

    def fails(*arguments, call=CachePlan._run):
        calls.append(call(*arguments))
        if len(calls) == LAYERS:
            raise MemoryError
        return calls[-1]

    monkeypatch.setattr(CachePlan, "_run", fails)
    with pytest.raises(MemoryError), cache.step([parent, child], 9) as step:
        for layer in range(LAYERS):
            step.attend(queries(1, 2), SCHEMES["rope"], *rows([[7] * 9] * 2, layer), layer=layer, impl=IMPL)
    monkeypatch.undo()
    assert cache.free_pages == 3 and cache.lengths == {parent: 10, child: 10}
    for layer in range(LAYERS):
        out = cache.attend([parent, child], queries(1, 2), SCHEMES["rope"], layer=layer, impl=IMPL, validate=True)
        torch.testing.assert_close(out, exact("rope", queries(1, 2), [[1] * 10] * 2, layer))


@both
def test_a_layer_that_writes_nothing(kind):
    cache = Both(kind)
    message = re.escape("layer 1: expected 4 new keys and values in this step, got none")
    with pytest.raises(ValueError, match=message), cache.step(4) as step:
        write(step, [[1] * 4] * 3, (2, 0))
    assert cache.lengths == [0] * 3
    with cache.step(0):
        pass  # nothing to write


@both
@pytest.mark.parametrize("pads", [None, [0, 2, 5]], ids=["", "padded"])
def test_a_layer_reads_the_keys_of_another_in_a_step(kind, pads):
    """A layer can read the keys of another layer in a step. In some models later layers have no keys and read those of
    an earlier layer."""
    cache, tokens = Both(kind), [1, 2, 3, 4, 5]
    with cache.step(5, leftpad=pads) as step:
        write(step, [tokens] * 3)
    q = queries(2, 3)
    with cache.step(2) as step:
        before = step.attend(q, SCHEMES["rope"], layer=0, impl=IMPL)
        write(step, [[6, 7]] * 3)
        after = step.attend(q, SCHEMES["rope"], layer=0, impl=IMPL)
    for got, all_tokens in ((before, tokens), (after, [*tokens, 6, 7])):
        for n, pad in enumerate(pads or [0] * 3):
            if pad < len(all_tokens):
                torch.testing.assert_close(got[n : n + 1], exact("rope", q[n : n + 1], [all_tokens[pad:]], 0))
            else:
                assert not got[n].any()


@both
def test_nothing_else_changes_the_cache_during_a_step(kind):
    cache = Both(kind, layers=1)
    k, v = rows([[1] * 4] * 3, 0)
    cache.append(k, v)
    calls = {"advance": (*cache.first, 1), "step": None, "append": (*cache.first, k, v)}
    calls["attend"] = (*cache.first, queries(1, 3), SCHEMES["rope"], k, v)
    if cache.contiguous:
        calls |= {"truncate": (0, 1), "reset": ()}
    else:
        calls |= {name: (cache.names[0],) for name in ("fork", "free")}
        calls |= {"allocate": (), "reserve": (cache.names, 1), "truncate": (cache.names[0], 1), "reset": ()}
    with cache.step(4) as step:
        for name, arguments in calls.items():
            with pytest.raises(RuntimeError, match="not supported while a step is open"):
                if arguments is None:
                    cache.step(1).__enter__()
                else:
                    getattr(cache.cache, name)(*arguments)
        step.append(k, v)
    assert cache.lengths == [8] * 3
    with pytest.raises(RuntimeError, match="inside the with statement"):
        step.append(k, v)
    with pytest.raises(RuntimeError, match="inside the with statement"):
        step.attend(queries(1, 3), SCHEMES["rope"])


# ---- left padding


@both
def test_padding_longer_than_the_first_chunk(kind):
    cache, tokens, q = Both(kind), [list(range(11)), list(range(100, 104)), [7]], queries(4, 3)
    padded = [[0] * (12 - len(sequence)) + sequence for sequence in [tokens[0], tokens[1], tokens[2]]]
    pads = [1, 8, 11]
    for start in (0, 4, 8):
        chunk = [sequence[start : start + 4] for sequence in padded]
        with cache.step(4, leftpad=[min(pad, start + 4) for pad in pads]) as step:
            for layer in range(LAYERS):
                out = step.attend(q, SCHEMES["rerope"], *rows(chunk, layer), layer=layer, impl=IMPL, validate=True)
                seen = [sequence[pad : start + 4] for sequence, pad in zip(padded, pads, strict=True)]
                torch.testing.assert_close(out, exact("rerope", q, seen, layer))
    assert cache.padding == pads


@both
def test_truncation_keeps_the_padding_that_is_left(kind):
    cache = Both(kind, layers=1)
    cache.append(*rows([[1] * 12] * 3, 0), leftpad=[0, 5, 12])
    for b in range(3):
        cache.truncate(b, 8)
    assert cache.padding == [0, 5, 8] and cache.on_device() == ([8] * 3, [0, 5, 8])
    for b in range(3):
        cache.truncate(b, 0)
    assert cache.padding == [0, 0, 0] and cache.on_device() == ([0] * 3, [0, 0, 0])


def test_forks_inherit_the_padding():
    cache = paged()
    parent = cache.allocate()
    with cache.step([parent], 20, leftpad=[6]) as step:
        write(step, [list(range(20))])
    child = cache.fork(parent)
    cache.free(parent)
    assert [cache.padding[child]] == cache.leftpad([child]).tolist() == [6]
    q = queries(2, 1)
    with cache.step([child], 2) as step:
        for layer in range(LAYERS):
            out = step.attend(q, SCHEMES["rerope"], *rows([[30, 31]], layer), layer=layer, impl=IMPL)
            torch.testing.assert_close(out, exact("rerope", q, [[*range(6, 20), 30, 31]], layer))


@both
def test_attend_with_left_padding_and_one_layer(kind):
    cache, q = Both(kind, layers=1), queries(12, 3)
    new = [[9, *range(11)], [9] * 5 + list(range(7)), list(range(12))]
    out = cache.attend(q, SCHEMES["rope"], *rows(new, 0), leftpad=[1, 5, 0], impl=IMPL, validate=True)
    torch.testing.assert_close(out, exact("rope", q, [new[0][1:], new[1][5:], new[2]], 0))
    out = cache.attend(q[:, :1], SCHEMES["rope"], *rows([[50]] * 3, 0), impl=IMPL, validate=True)
    torch.testing.assert_close(out, exact("rope", q[:, :1], [[*new[0][1:], 50], [*new[1][5:], 50], [*new[2], 50]], 0))


def test_the_padding_of_a_contiguous_cache_stays_in_place():
    """The padding of a contiguous cache keeps its address, because a CUDA graph holds it."""
    cache = contiguous(layers=1)
    where = cache.leftpad.data_ptr(), cache.seqlens.data_ptr()
    cache.append(*rows([[1] * 4] * 3, 0), leftpad=[1, 2, 3])
    cache.reset(1)
    assert cache.leftpad.tolist() == [1, 0, 3] and cache.padding == [1, 0, 3]
    assert (cache.leftpad.data_ptr(), cache.seqlens.data_ptr()) == where
    out = attention_with_cache(
        queries(1, 3), *cache.layer(0), SCHEMES["rope"], cache.seqlens, cache_leftpad=cache.leftpad, impl=IMPL
    )
    assert out.shape == (3, 1, 2, HEAD_DIM)


# ---- pages


class TestOutOfPages:
    def test_a_request_that_can_never_fit(self):
        cache = paged(4)
        other = cache.allocate(3 * PAGE)
        for call in (
            lambda: cache.allocate(4 * PAGE + 1),
            lambda: cache.reserve([other], 4 * PAGE + 1),
            lambda: cache.step([other], 4 * PAGE + 1).__enter__(),
        ):
            with pytest.raises(OutOfPages, match="; the whole pool is too small for this call$") as caught:
                call()
            assert caught.value.never
        with pytest.raises(OutOfPages) as caught:
            cache.allocate(2 * PAGE)
        assert not caught.value.never and str(caught.value) == "needs 2 more pages, 1 of 4 are free: 1 missing"
        with pytest.raises(OutOfPages) as caught:
            cache.allocate(4 * PAGE)
        assert not caught.value.never  # enough once the other sequence is freed
        assert cache.free_pages == 1 and cache.sequences == [other]

    def test_all_sequences_of_a_call_together(self):
        cache = paged(4)
        names = [cache.allocate() for _ in range(3)]
        cache.reserve([names[2]], 1)
        with pytest.raises(OutOfPages) as caught:
            cache.reserve(names[:2], 2 * PAGE)
        assert not caught.value.never  # enough once the third sequence is freed
        with pytest.raises(OutOfPages) as caught:
            cache.reserve(names, 2 * PAGE)
        assert caught.value.never

    @pytest.mark.parametrize("outside", [False, True])
    def test_shared_pages(self, outside):
        """Two forks that write need one copy of their last page. If a third sequence outside the call also holds the
        page, the forks need two copies."""
        cache = paged(2)
        parent = cache.allocate()
        with cache.step([parent], 4) as step:
            write(step, [[1] * 4])
        names = [parent, cache.fork(parent)]
        if outside:
            cache.fork(parent)
            with pytest.raises(OutOfPages) as caught:
                cache.reserve(names, 1)
            assert not caught.value.never
        else:
            cache.reserve(names, 1)
            assert cache.free_pages == 0

    def test_a_longer_max_seqlen_than_the_pool(self):
        cache = paged(2, max_seqlen=100)
        with pytest.raises(OutOfPages) as caught:
            cache.allocate(90)
        assert caught.value.never
        with pytest.raises(ValueError, match="length: expected at least 0 and at most 100, got 101"):
            cache.allocate(101)


# ---- autocast


@both
def test_autocast(kind):
    """Under autocast float32 becomes the autocast type, as in attention."""
    cache = Both(kind, layers=2, dtype=torch.bfloat16)
    new = [[1, 2, 3, 4]] * 3
    with torch.autocast(DEVICE, torch.bfloat16):
        q = queries(4, 3, dtype=torch.float32)
        with cache.step(4) as step:
            for layer in range(2):
                k, v = rows(new, layer, torch.float32)
                out = step.attend(q, SCHEMES["rope"], k, v.bfloat16() if layer else v, layer=layer)
                assert out.dtype == torch.bfloat16
                torch.testing.assert_close(out, attention(q, k, v, SCHEMES["rope"]), atol=1e-2, rtol=1e-2)
        assert cache.attend(q, SCHEMES["rope"], layer=1).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"q: expected torch.bfloat16, the dtype of the cache, got torch.float32$"):
        cache.attend(q, SCHEMES["rope"], layer=1)
    single = Both(kind, layers=1, dtype=torch.float32)
    k, v = rows(new, 0, torch.float32)
    for call in (
        lambda: single.attend(q, SCHEMES["rope"], k, v),
        lambda: single.attend(q.bfloat16(), SCHEMES["rope"]),
        lambda: single.append(k, v),
    ):
        message = "the dtype of the cache, got torch.bfloat16; autocast casts float32 to torch.bfloat16"
        with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(TypeError, match=message):
            call()
    assert single.lengths == [0] * 3
    single = Both(kind, layers=1, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        single.append(k, v)
        single.attend(q, SCHEMES["rope"], k, v)
    assert single.lengths == [8] * 3


# ---- storage and arguments


@pytest.mark.parametrize("make", [contiguous, lambda **o: paged(3, **o)])
def test_layers_are_views_of_one_tensor(make):
    cache, one = make(), make(layers=1)
    assert one.k.ndim == 4 and cache.k.shape == (LAYERS, *one.k.shape) and cache.nbytes == LAYERS * one.nbytes
    assert one.layer()[0] is one.k and one.layer(0)[1] is one.v
    for layer in range(LAYERS):
        for view, whole, single in zip(cache.layer(layer), (cache.k, cache.v), one.layer(0), strict=True):
            assert view.data_ptr() == whole[layer].data_ptr() and view.stride() == single.stride()
            if DEVICE == "cpu":
                assert view.transpose(1, 2).is_contiguous()  # in memory the heads come before the rows
    assert f"layers={LAYERS}; " in repr(cache).replace(", max_seqlen=48", "") and "layers" not in repr(one)


@pytest.mark.parametrize("layers, error", [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_construction(layers, error):
    with pytest.raises(error, match="layers: expected"):
        contiguous(layers=layers)
    with pytest.raises(error, match="layers: expected"):
        paged(layers=layers)


def test_no_room_and_no_pages_at_the_start_of_a_step():
    with pytest.raises(ValueError, match="sequence 0 has 0 of 60 slots in use: no room for 61"), contiguous().step(61):
        raise AssertionError("the step was entered")
    cache = paged(2)
    name = cache.allocate()
    with pytest.raises(OutOfPages), cache.step([name], 33):
        raise AssertionError("the step was entered")
    assert cache.free_pages == 2


def test_made_in_inference_mode():
    with torch.inference_mode():
        caches = contiguous(1), paged(24)
        name = caches[1].allocate()
    for step in (caches[0].step(2, leftpad=[1]), caches[1].step([name], 2, leftpad=[1])):
        with step:
            write(step, [[1, 2]])
    with torch.inference_mode(), caches[0].step(1) as step:
        write(step, [[3]])
    assert caches[0].lengths == [3] and caches[0].leftpad.tolist() == [1]
    with torch.inference_mode():
        names = [name, *(caches[1].fork(name) for _ in range(17))]  # the table grows
    with caches[1].step(names, 1) as step:
        write(step, [[3]] * 18)
    assert caches[1].lengths == dict.fromkeys(names, 3)
    q = queries(1, 18)
    out = caches[1].attend(names, q, SCHEMES["rope"], layer=1, impl=IMPL)
    torch.testing.assert_close(out, exact("rope", q, [[2, 3]] * 18, 1))


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has nothing to wait for")
def test_no_call_waits_for_the_device():
    new, q, rotary = rows([[1] * 5] * 2, dtype=torch.bfloat16), queries(1, 2, dtype=torch.bfloat16), SCHEMES["rope"]
    row, pages = contiguous_of(2, dtype=torch.bfloat16), paged_of(20, torch.bfloat16)

    def calls():
        row.append(*new), row.attend(q, rotary, *new), row.truncate(0, 7), row.truncate(None, [3, 4]), row.reset()
        names = [pages.allocate(), pages.allocate(20)]
        pages.append(names, *new)
        names = [names[0], pages.fork(names[0])]
        pages.attend(names, q, rotary, *new)
        pages.truncate(names[0], 6), pages.free(names[1]), pages.reset()

    calls()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
