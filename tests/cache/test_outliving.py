"""Steps, caches and plans that are used after what they were made for has changed: they look it up again, or raise."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flashrope import CacheLayer, CacheTables, KVCache, PagedKVCache, Rotary, plan_cache
from support import device_of

HEADS, D = 2, 16
ROPE = Rotary.rope(D)
impls = pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])


def rows(n: int, seqlen: int, seed: int = 0, layers: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (layers,) * bool(layers) + (n, seqlen, HEADS, D)
    return [torch.randn(shape, generator=generator) for _ in "qkv"]


def paged(pages: int = 8, layers: int = 1, **options) -> PagedKVCache:
    return PagedKVCache(pages, 16, HEADS, D, torch.float32, "cpu", layers=layers, **options)


def contiguous(batch: int = 1, layers: int = 1) -> KVCache:
    return KVCache(batch, 64, HEADS, D, torch.float32, "cpu", layers=layers)


# ---- steps


@pytest.mark.parametrize("ended", ["free", "reset"])
def test_a_step_of_a_sequence_that_ended(ended):
    cache = paged()
    a = cache.allocate()
    cache.append([a], *rows(1, 20)[1:])
    step = cache.step([a], 2)
    cache.free(a) if ended == "free" else cache.reset()
    b = cache.allocate()
    _, k, v = rows(1, 32, 1)
    cache.append([b], k, v)
    with pytest.raises(ValueError, match=f"^sequence {a} was freed"), step:
        step.append(*rows(1, 2)[1:])
    pages = cache.block_table([b])[0, :2].tolist()
    assert torch.equal(cache.k[pages].flatten(0, 1), k[0])
    cache.reset()
    assert cache.free_pages == 8


def test_a_step_appends_to_what_is_there_when_it_is_entered():
    cache = paged()
    a = cache.allocate()
    cache.append([a], *rows(1, 20)[1:])
    step = cache.step([a], 2)
    cache.truncate(a, 3)
    cache.remove(a, 0, 1)
    child = cache.fork(a)
    _, k, v = rows(1, 2, 1)
    for length in (4, 6):  # a step may be entered twice
        with step:
            step.append(k, v)
        assert cache.lengths == {a: length, child: 2}
    q, k_all, v_all = rows(1, 20)
    wanted = paged()
    b = wanted.allocate()
    wanted.append([b], *(torch.cat((x[:, 1:3], y, y), 1) for x, y in ((k_all, k), (v_all, v))))
    assert torch.equal(cache.attend([a], q[:, :1], ROPE), wanted.attend([b], q[:, :1], ROPE))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_padding_that_changed_before_a_step_was_entered(kind):
    def attend(late: bool) -> torch.Tensor:
        cache = contiguous() if kind == "contiguous" else paged()
        own = () if kind == "contiguous" else ([cache.allocate()],)
        step = cache.step(*own, 1)
        cache.append(*own, *rows(1, 10)[1:], leftpad=[6])
        q, k, v = rows(1, 1, 1)
        with step if late else cache.step(*own, 1) as step:
            out = step.attend(q, ROPE, k, v)
        assert (cache.padding if kind == "contiguous" else list(cache.padding.values())) == [6]
        return out

    assert torch.equal(attend(late=True), attend(late=False))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_padding_that_was_dropped_before_a_step_was_entered(kind):
    cache = contiguous() if kind == "contiguous" else paged()
    own = () if kind == "contiguous" else ([cache.allocate()],)
    cache.append(*own, *rows(1, 10)[1:], leftpad=[6])
    step, padded = cache.step(*own, 1), cache.step(*own, 1, leftpad=[6])
    cache.truncate(own[0][0] if own else None, 0)
    q, k, v = rows(1, 1, 1)
    with step:
        assert torch.allclose(step.attend(q, ROPE, k, v), v)
    assert (cache.padding if kind == "contiguous" else list(cache.padding.values())) == [0]
    with pytest.raises(ValueError, match="^leftpad of entry 0: expected at least 0 and at most 0, got 6"), padded:
        pass


def test_a_step_keeps_its_own_arguments():
    cache = paged()
    names, leftpad = [cache.allocate()], [2]
    step = cache.step(names, 3, leftpad)
    names.append(cache.allocate())
    leftpad[0] = 9
    with step:
        step.append(*rows(1, 3)[1:])
    assert cache.padding[names[0]] == 2 and cache.lengths == {names[0]: 3, names[1]: 0}


def test_a_step_of_another_thread():
    """A cache has no lock. A second thread is told to hold one, not to leave a step that it did not open."""
    cache = contiguous()
    with cache.step(1) as step, ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="while another thread has a step of this cache open .* threading.Lock"):
            other.submit(cache.reset).result()
        step.append(*rows(1, 1)[1:])
    assert cache.lengths == [1]


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_an_abandoned_step_can_be_discarded(kind):
    cache = contiguous(layers=2) if kind == "contiguous" else paged(layers=2)
    own = () if kind == "contiguous" else ([cache.allocate()],)
    step = cache.step(*own, 20)
    step.__enter__()
    step.append(*rows(1, 20)[1:], layer=0)
    for call in (cache.reset, lambda: pickle.dumps(cache), lambda: copy.deepcopy(cache)):
        with pytest.raises(RuntimeError, match="while a step is open; .* or call discard_step"):
            call()
    cache.discard_step()
    cache.discard_step()
    assert not any(cache.lengths if kind == "contiguous" else cache.lengths.values())
    assert kind == "contiguous" or cache.free_pages == 8
    with pytest.raises(RuntimeError, match="^step: discarded before its with statement was left"):
        step.__exit__(None, None, None)
    with cache.step(*own, 1) as step:
        for layer in range(2):
            step.append(*rows(1, 1)[1:], layer=layer)


def test_the_layer_of_a_step():
    cache = contiguous(layers=2)
    q, k, v = rows(1, 1)
    with cache.step(1) as step:
        for layer in (-1, 2, None, True):
            for call in (
                lambda layer=layer: step.attend(q, ROPE, k, v, layer=layer),
                lambda layer=layer: step.append(k, v, layer),
            ):
                with pytest.raises((ValueError, TypeError), match="^layer: expected"):
                    call()
        step.append(k, v, 0)
        step.append(k, v, 1)


# ---- copies of a cache


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("options", [{}, {"values": slice(0, 8)}, {"cache_dtype": "int8"}], ids=str)
def test_a_copied_cache(options, how, inference):
    cache = paged(layers=2, **options)
    a = cache.allocate()
    q, k, v = rows(1, 20, layers=2)
    v = None if "values" in options else v
    cache.append([a], k, v)
    with torch.inference_mode(inference):
        again = pickle.loads(pickle.dumps(cache)) if how == "pickle" else copy.deepcopy(cache)
    for each in (cache, again):
        b = each.fork(a)  # the next token copies a page that the fork shares
        with torch.inference_mode(not inference):
            each.append([b], k[:, :, :1], None if v is None else v[:, :, :1])
    for layer in range(2):
        wanted = cache.attend([a, b], q[layer].expand(2, -1, -1, -1), ROPE, layer=layer)
        assert torch.equal(again.attend([a, b], q[layer].expand(2, -1, -1, -1), ROPE, layer=layer), wanted)
        assert again.layer(layer)[0].untyped_storage().data_ptr() == again.k.untyped_storage().data_ptr()
    if v is None:
        assert again.v.untyped_storage().data_ptr() == again.k.untyped_storage().data_ptr()
    assert again.k.data_ptr() != cache.k.data_ptr()


def test_another_default_device_or_dtype():
    cache = paged()
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], *rows(2, 20)[1:])
    q = rows(2, 1, 1)[0]

    def change(cache: PagedKVCache) -> torch.Tensor:
        cache.extend(a, b)
        cache.remove(a, 3, 9)
        cache.keep(a, 4, 8)
        return cache.attend([a, b], q, ROPE)

    again = copy.deepcopy(cache)
    wanted = change(cache)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert torch.equal(change(again), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- plans


def planned(impl: str, scheme: Rotary = ROPE):
    device = device_of(impl)
    layer = CacheLayer(*(torch.zeros(2, 16, HEADS, D, device=device) for _ in "kv"))
    tables = CacheTables(torch.full((2,), 5, dtype=torch.int32, device=device), new=1)
    return plan_cache(tables, like=layer, rotary=scheme, seqlen_q=1, heads_q=HEADS, impl=impl), layer, tables


@impls
@pytest.mark.parametrize("made", ["in inference mode", "before it"])
def test_a_forgotten_refresh_in_inference_mode(impl, made):
    if device_of(impl) != "cpu" and made == "in inference mode":
        pytest.skip("tables on a GPU that were made in inference mode are not watched")
    with torch.inference_mode(made == "in inference mode"):
        plan, layer, tables = planned(impl)
    with torch.inference_mode():
        q, k, v = (x.to(layer.k.device) for x in rows(2, 1))
        plan.attend(q, layer, k, v)
        plan.attend(q, layer)
        tables.seqlens.add_(1)
        with pytest.raises(ValueError, match="^tables: expected tables that are unchanged"):
            plan.attend(q, layer)
        plan.refresh()
        plan.attend(q, layer, k, v)


@impls
def test_the_guards_of_a_plan_under_a_default_device(impl):
    plan, layer, tables = planned(impl)
    q, k, v = (x.to(layer.k.device) for x in rows(2, 1))
    with torch.device(layer.k.device):
        plan.attend(q, layer, k, v)
        with pytest.raises(ValueError, match="^k: expected new keys once for every layer"):
            plan.attend(q, layer, k, v)
        with pytest.raises(ValueError, match="^k: expected new keys once for every layer"):
            plan.append(layer, k, v)
        tables.seqlens.add_(1)
        with pytest.raises(ValueError, match="^tables: expected tables that are unchanged"):
            plan.attend(q, layer)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copied_plan(how):
    plan, layer, _ = planned("cpu")
    q, k, v = rows(2, 1)
    wanted = plan.attend(q, layer, k, v)
    own = pickle.loads(pickle.dumps((plan, layer))) if how == "pickle" else copy.deepcopy((plan, layer))
    layer.k.fill_(torch.nan)
    plan.tables.seqlens.zero_()
    again, layer = own
    assert torch.equal(again.attend(q, layer), wanted)


@impls
def test_out_that_cannot_be_written(impl):
    plan, layer, tables = planned(impl)
    q, k, v = (x.to(layer.k.device) for x in rows(2, 1))
    tight = layer.k.flatten()[: q.numel()].view(q.shape)
    for out, error, message in (
        ([1.0], TypeError, "expected a tensor, got list"),
        (torch.empty_like(q, device="meta"), ValueError, "expected a contiguous tensor .* got .* on meta"),
        (torch.empty_like(q, requires_grad=True), ValueError, "expected a tensor that does not require grad"),
        (tight, ValueError, "expected memory that does not overlap layer.k"),
        (q, ValueError, "expected memory that does not overlap q"),
        (v, ValueError, "expected memory that does not overlap v"),
    ):
        with pytest.raises(error, match=f"^out: {message}"):
            plan.attend(q, layer, k, v, out=out)
    assert not layer.k.any()  # nothing was written


@impls
@pytest.mark.parametrize("through", ["plain", "operators"])
def test_autograd_hears_of_writes(impl, through):
    """A graph that needs the values before a write raises an error instead of using the values after it."""
    plan, layer, tables = planned(impl)
    device = layer.k.device
    q, k, v = (x.to(device) for x in rows(2, 1))
    out, weight = torch.zeros_like(q), torch.ones((), device=device, requires_grad=True)
    with torch.device(device) if through == "operators" else torch.enable_grad():
        for written in (out, layer.k, layer.v):
            plan.refresh()
            loss = (written * weight).sum()
            plan.attend(q, layer, k, v, out=out)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
