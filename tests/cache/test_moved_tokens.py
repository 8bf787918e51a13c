"""Tests extend, remove and keep of a PagedKVCache, and all its calls in any order, against what the cache should
hold."""

import random
import re

import pytest
import support
import torch
from flashrope import OutOfPages, PagedKVCache, Rotary
from flashrope.backends.registry import load_backend
from paged_oracle import Held

PAGE, HEADS_KV, HEADS, D, LAYERS = 16, 2, 4, 16, 2
SCHEMES = (Rotary.rope(D).rectify(21).log_n(40), Rotary.hope(D, 100).local(50))
ALL = (*support.TARGETS, support.Target("reference", torch.float64, "cpu"))
TARGETS = [t for t in ALL if "positions" in load_backend(t.impl).CACHE_OPTIONS]
TARGETS = [t for t in TARGETS if t.dtype == torch.float32 or t.impl == "reference"]


@pytest.fixture(params=[pytest.param(t, marks=pytest.mark.slow) if t.slow else t for t in TARGETS], ids=str)
def moved(request):
    """Runs the test with every backend. Runs in Triton's interpreter are slow tests."""
    return request.param


def held_by(target, pages=40, **options) -> Held:
    return Held(target, pages, PAGE, (HEADS, HEADS_KV), SCHEMES, **options)


def test_documents_in_any_order(moved):
    """Each document is written once. Two prompts take the documents in different orders, and then continue
    separately."""
    held = held_by(moved)
    documents = [held.allocate() for _ in range(3)]
    for name, count in zip(documents, (20, 16, 5), strict=True):
        held.write([name], count)
    free = held.cache.free_pages
    prompts = [held.allocate(), held.allocate()]
    held.write(prompts, 3)
    for name, order in zip(prompts, ((0, 1, 2), (2, 0, 2)), strict=True):
        for n in order:
            held.extend(name, documents[n])
    assert held.cache.free_pages == free - 2  # a page for each prompt's own tokens, no page for the documents
    held.read()
    held.look()
    for _ in range(15):  # the shared last pages are copied once
        held.write(prompts, 1)
    held.write(documents, 2)
    held.read()
    held.look()


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    "range_", [(0, 5), (0, 40), (3, 9), (16, 32), (10, 37), (37, 40), (39, 40), (7, 7), (0, 16)], ids=str
)
def test_remove(moved, range_, close):
    held = held_by(moved)
    name = held.allocate()
    held.write([name], 40)
    held.remove(name, *range_, close)
    held.read()
    held.look()
    start, stop = range_
    used = {page for page in held.cache._sequences[name].pages}
    assert len(used) == len({token // PAGE for token in range(40) if not start <= token < stop})
    held.write([name], 3)
    held.write([name], 20)
    held.look()


def test_sinks_and_a_rolling_window(moved):
    """A cache of fixed size can generate without end if `keep` drops the middle tokens."""
    held = held_by(moved, pages=6)
    name = held.allocate()
    for _ in range(60):
        held.write([name], 2)
        held.keep(name, 4, 30)
        held.look()
    assert held.tokens[name].positions == [0, 1, 2, 3, *range(4, 34)]
    held.read()


def test_left_padding_goes(moved):
    held = held_by(moved)
    names = [held.allocate() for _ in range(3)]
    # more than 40 tokens, because log n depends on the position only from there on
    held.write(names, 43, leftpad=[3, 17, 0])
    held.extend(names[2], names[1])
    held.remove(names[0], 2, 5, True)
    assert held.cache.padding == {names[0]: 0, names[1]: 17, names[2]: 0}
    held.read()
    held.look()
    held.keep(names[1], 1, 1)
    held.write(names, 1)
    held.look()


def test_quantized(moved):
    held = held_by(moved, cache_dtype="int8")
    names = [held.allocate(), held.allocate()]
    held.write(names, 20)
    held.extend(*names)
    held.remove(names[0], 5, 23, True)
    held.write(names, 2)
    held.look()


def test_a_step_that_ends_in_an_error(moved):
    held = held_by(moved)
    names = [held.allocate(), held.allocate()]
    held.write(names, 20)
    held.extend(*names)
    before = held.cache._sequences[names[0]].entries
    held.write(names, 40, fails=True)
    assert held.cache._sequences[names[0]].entries == before
    held.look()
    held.read()
    held.write(names, 3)


def test_both_holders_of_a_page_in_one_call(moved):
    """Two sequences share a page but see different numbers of its rows. The sequence that sees fewer rows is the longer
    one. A step that fails leaves both sequences unchanged."""
    held = held_by(moved)
    short, long = held.allocate(), held.allocate()
    held.write([short], 9)
    held.write([long], 40)
    held.extend(long, short)
    held.truncate(long, 45)
    held.write([short, long], 1, fails=True)
    held.look()
    held.read()


KINDS = ["allocate"] + ["write"] * 5 + ["padded", "fails"] * 2 + ["reserve", "freed", "refused"]
KINDS += ["extend", "remove", "remove", "keep", "fork", "free", "truncate"] * 2


class Walk:
    """Makes random calls of a cache. empty: the number of sequences that stay empty, so that the others have the last
    rows of the table."""

    def __init__(self, target, pages: int, max_seqlen: int | None, empty: int):
        self.choose = random.Random(pages + empty)
        self.held = held_by(target, pages, max_seqlen=max_seqlen, cache_dtype=None if empty else "int8")
        self.empty = [self.held.allocate() for _ in range(empty)]
        self.freed: list[int] = []

    def step(self, kind: str) -> None:
        held, choose = self.held, self.choose
        names = [name for name in held.tokens if name not in self.empty]
        if not names or kind == "allocate":
            if len(names) < 9:
                held.allocate(choose.choice((0, 0, 20)))
            return
        name, some = choose.choice(names), choose.sample(names, choose.randint(1, min(3, len(names))))
        count, new = len(held.tokens[name].positions), choose.choice((1, 2, 17, 33))
        if kind in ("write", "fails"):
            held.write(some, new, fails=kind == "fails")
        elif kind == "padded":  # sequences without tokens get padding, or more padding
            pads = [held.padding[x] + (not held.tokens[x].positions) * choose.randint(0, new) for x in some]
            held.write(some, new, pads, fails=choose.random() < 0.4)
        elif kind == "reserve":
            held.cache.reserve(some, choose.choice((1, 20)))
        elif kind == "freed" and self.freed:
            gone = choose.choice(self.freed)
            held.refused(f"sequence {gone} was freed", lambda: held.cache.reserve([*names, gone], 1))
        elif kind == "refused":  # refused after it has taken pages
            k, v = held.new(len(some), 9, HEADS_KV), held.new(len(some), 9, HEADS_KV)
            with held.cache.step(some, 9) as step:
                step.attend(held.new(len(some), 1, HEADS)[0], SCHEMES[0], k[0], v[0], layer=0, num_splits=0)
        elif kind == "extend":
            held.extend(name, choose.choice(names))
        elif kind == "remove":
            start, stop = sorted((choose.randint(0, count), choose.randint(0, count)))
            held.remove(name, start, stop, choose.random() < 0.5)
        elif kind == "keep":
            held.keep(name, choose.randint(0, 20), choose.randint(0, 60))
        elif kind == "truncate":
            held.truncate(name, choose.randint(0, count))
        elif kind == "free":
            held.free(name)
            self.freed.append(name)
        elif kind == "fork":
            held.fork(name)


@pytest.mark.parametrize("pages, max_seqlen, empty", [(18, 256, 0), (18, None, 15), (7, None, 0), (9, 72, 14)], ids=str)
def test_random_walk(pages, max_seqlen, empty):
    """A refused call changes nothing, even if it has already taken pages or written some layers."""
    walk = Walk(support.Target("cpu", torch.float32, "cpu"), pages, max_seqlen, empty)
    held, cache, refused = walk.held, walk.held.cache, 0
    for _ in range(240):
        before = cache.free_pages, held.pages()
        kind = walk.choose.choice(KINDS)
        try:
            walk.step(kind)
        except (OutOfPages, ValueError) as error:
            if isinstance(error, OutOfPages):
                needs, free, of, missing = map(int, re.findall(r"\d+", str(error)))
                assert (free, of, missing) == (before[0], pages, needs - free) and missing > 0
            else:
                assert "no room" in str(error) or kind == "refused" and "num_splits" in str(error), error
            assert (cache.free_pages, held.pages()) == before
            refused += kind != "refused"
        held.look()
    held.read()
    assert refused > 3
    cache.reset()
    assert cache.free_pages == pages and not cache.sequences


REFUSED = {
    "unknown": (lambda c, s: c.extend(s, 99), ValueError, "sequence 99 was never allocated"),
    "too long": (lambda c, s: [c.extend(s, s) for _ in range(9)], ValueError, "0 has 12 of 20 block-table entries"),
    "backwards": (lambda c, s: c.remove(s, 5, 4), ValueError, "start: expected at least 0 and at most 4, got 5"),
    "beyond": (lambda c, s: c.remove(s, 0, 41), ValueError, "stop: expected at least 0 and at most 40, got 41"),
    "float": (lambda c, s: c.remove(s, 0, 4.0), TypeError, "stop: expected an integer, got 4.0"),
    "close": (lambda c, s: c.remove(s, 0, 4, 1), TypeError, "close: expected True or False, got 1"),
    "negative": (lambda c, s: c.keep(s, -1, 4), ValueError, "first: expected at least 0, got -1"),
    "tables": (
        lambda c, s: c.attend([s], torch.zeros(1, 1, 4, D), SCHEMES[0], page_first=torch.zeros(1, 20).int()),
        TypeError,
        r"page_first: not accepted by attend\(\); the cache tracks it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name):
    call, error, message = REFUSED[name]
    cache = PagedKVCache(40, PAGE, HEADS_KV, D, torch.float32, "cpu", max_seqlen=320)
    sequence = cache.allocate()
    cache.append([sequence], *torch.randn(2, 1, 40, HEADS_KV, D))
    if name == "tables":
        cache.remove(sequence, 3, 4)
    with pytest.raises(error, match=message):
        call(cache, sequence)


def test_rotated_keys_do_not_move():
    cache = PagedKVCache(4, PAGE, HEADS_KV, D, torch.float32, "cpu", rotated_keys=Rotary.rope(D))
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], *torch.randn(2, 2, 20, HEADS_KV, D))
    for call in (lambda: cache.extend(a, b), lambda: cache.remove(a, 0, 1), lambda: cache.keep(a, 1, 1)):
        with pytest.raises(ValueError, match="not supported with rotated_keys"):
            call()


def test_not_in_an_open_step():
    cache = PagedKVCache(4, PAGE, HEADS_KV, D, torch.float32, "cpu")
    a, b = cache.allocate(), cache.allocate()
    with cache.step([a], 0):
        for call in (lambda: cache.extend(a, b), lambda: cache.remove(a, 0, 0), lambda: cache.keep(a, 1, 1)):
            with pytest.raises(RuntimeError, match="not supported while a step is open"):
                call()
