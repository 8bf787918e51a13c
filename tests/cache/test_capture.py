"""With ``PagedKVCache.capture``, a step over static tables gives the results of ``step``, also for sequences that were
moved.

Without a GPU, a replay runs the refreshed plan again over the same tensors.
"""

import pytest
import torch
from flashrope import OutOfPages, PagedKVCache, Rotary, plan_cache
from support import device_of

PAGE, HEADS_KV, HEADS, D, LAYERS = 16, 1, 2, 16, 2
SCHEME = Rotary.rope(D).rectify(21)


def random(seed: int, n: int, seqlen: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = HEADS, HEADS_KV, HEADS_KV
    return [torch.randn(n, seqlen, each, D, generator=generator).to(device) for each in heads]


def filled(kind: str, pages: int = 14, device: str = "cpu") -> tuple[PagedKVCache, list[int]]:
    cache = PagedKVCache(pages, PAGE, HEADS_KV, D, torch.float32, device, layers=LAYERS)
    a, b = cache.allocate(), cache.allocate()
    _, k, v = random(1, 2, 29, device)
    cache.append(
        [a, b], k.expand(LAYERS, *k.shape), v.expand(LAYERS, *v.shape), leftpad=[3, 0] if kind == "padded" else None
    )
    if kind == "moved":
        cache.remove(a, 4, 9)
        cache.extend(b, a)
    return cache, [a, b, cache.fork(a)]


@pytest.mark.parametrize(
    ("impl", "kind"),
    [("reference", "padded"), ("triton", "moved"), *(("cpu", kind) for kind in ("plain", "padded", "moved"))],
)
def test_replays(kind, impl):
    device = device_of(impl)
    (cache, names), (other, _) = filled(kind, device=device), filled(kind, device=device)
    step = cache.capture(names, 2)
    held = [x for x in (*step.tables[:3], *(step.tables.positions or ())) if x is not None]
    addresses = [x.data_ptr() for x in held]
    assert (step.tables.positions is not None) == (kind == "moved")
    plan = plan_cache(
        step.tables, like=cache.cache_layer(0), rotary=SCHEME, seqlen_q=2, heads_q=HEADS, dtype=torch.float32, impl=impl
    )
    for n in range(1 if impl == "triton" else 9):  # the sequence grows into further pages
        q, k, v = random(10 + n, 3, 2, device)
        step.update()
        plan.refresh()
        got = [plan.attend(q, cache.cache_layer(layer), k, v * layer) for layer in range(LAYERS)]
        step.advance()
        with other.step(names, 2) as wanted:
            for layer in range(LAYERS):
                assert torch.equal(got[layer], wanted.attend(q, SCHEME, k, v * layer, layer=layer, impl=impl))
    assert cache.lengths == other.lengths and cache.free_pages == other.free_pages
    assert [x.data_ptr() for x in held] == addresses


def test_tables_that_the_graph_does_not_read():
    cache, names = filled("plain")
    step = cache.capture(names, 1)
    cache.remove(names[0], 4, 9)
    with pytest.raises(ValueError, match="^positions: expected None, because the captured step had no positions"):
        step.update()
    cache, names = filled("plain")
    empty = cache.allocate()
    step = cache.capture([empty], 1)
    _, k, v = random(1, 1, 5)
    cache.append([empty], k.expand(LAYERS, *k.shape), v.expand(LAYERS, *v.shape), leftpad=[2])
    with pytest.raises(ValueError, match="^leftpad: expected None, because the captured step had no leftpad"):
        step.update()


def test_no_room():
    cache, names = filled("plain", pages=5)
    step = cache.capture(names, 3)
    step.update()
    step.advance()
    with pytest.raises(OutOfPages):
        step.update()
    with pytest.raises(ValueError, match="^seqlen_new: expected at least 1, got 0"):
        cache.capture(names, 0)


# ---- what changes between update() and advance()


def append(cache: PagedKVCache, names: list[int], count: int) -> None:
    _, k, v = random(7, len(names), count)
    cache.append(names, k.expand(LAYERS, *k.shape), v.expand(LAYERS, *v.shape))


CHANGES = {
    "append": lambda cache, a: append(cache, [a], 1),
    "truncate": lambda cache, a: cache.truncate(a, 5),
    "truncate to its length": lambda cache, a: cache.truncate(a, cache.lengths[a]),  # gives reserved pages back
    "remove": lambda cache, a: cache.remove(a, 0, 2),
    "extend": lambda cache, a: cache.extend(a, a),
    "advance": lambda cache, a: cache.advance([a], 1),
    "free": lambda cache, a: cache.free(a),
    "reset": lambda cache, a: cache.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_update_and_advance(change):
    cache, (a, b, _) = filled("plain")
    append(cache, [a], 3)  # the next token opens a page
    step = cache.capture([b, a], 1)
    step.update()
    CHANGES[change](cache, a)
    before = dict(cache.lengths)
    with pytest.raises(ValueError, match=f"^(advance: expected sequence {a} as it was|sequence [{a}{b}] was freed)"):
        step.advance()
    assert cache.lengths == before
    if change in ("append", "truncate", "truncate to its length", "advance"):
        step.update()
        step.advance()
        assert cache.lengths == {name: length + (name in (a, b)) for name, length in before.items()}


def test_one_advance_for_one_update():
    cache, (a, *_) = filled("plain")
    step = cache.capture([a], 1)
    with pytest.raises(RuntimeError, match="^advance: expected one call of update"):
        step.advance()
    step.update()
    free = cache.free_pages
    step.update()
    assert cache.free_pages == free
    step.advance()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^advance: expected one call of update"):
            step.advance()
    assert cache.lengths[a] == 30
    with cache.step([a], 0), pytest.raises(RuntimeError, match="^update: not supported while a step is open"):
        step.update()
    with cache.step([a], 0), pytest.raises(RuntimeError, match="^capture: not supported while a step is open"):
        cache.capture([a], 1)


def test_an_update_that_raises_changes_nothing():
    cache, (a, *_) = filled("plain")
    step = cache.capture([a], 1)
    cache.remove(a, 0, 1)
    append(cache, [a], 3)  # its pages are full: the next token needs a page, which update() must give back
    before = cache.free_pages, dict(cache.lengths)
    with pytest.raises(ValueError, match="^positions: expected None"):
        step.update()
    assert (cache.free_pages, dict(cache.lengths)) == before
    with pytest.raises(RuntimeError, match="^advance: expected one call of update"):
        step.advance()
    with pytest.raises(ValueError, match=f"^sequence {a} was freed"):
        cache.free(a)
        step.update()


@pytest.mark.parametrize("made", [False, True], ids=["made outside", "made in inference mode"])
def test_inference_mode(made):
    """A captured step works in inference mode and outside of it, and a plan over its tables hears of updates."""
    cache, (a, *_) = filled("padded")
    q, k, v = random(3, 1, 1)
    with torch.inference_mode(made):
        step = cache.capture([a], 1)
    plan = plan_cache(
        step.tables, like=cache.cache_layer(0), rotary=SCHEME, seqlen_q=1, heads_q=HEADS, dtype=torch.float32
    )
    for now in (False, True, False):
        with torch.inference_mode(now):
            step.update()
            plan.refresh()
            for layer in range(LAYERS):
                plan.attend(q, cache.cache_layer(layer), k, v)
            step.advance()
            step.update()
            with pytest.raises(ValueError, match="^tables: expected tables that are unchanged"):
                plan.attend(q, cache.cache_layer(0))
