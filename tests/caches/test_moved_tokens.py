"""extend, remove and keep of a PagedKVCache, against lists of tokens with their positions."""

import random

import pytest
import support
import torch
from flashrope import OutOfPages, PagedKVCache, Rotary
from flashrope.backends.registry import load_backend
from paged_oracle import Tokens, look

PAGE, HEADS_KV, HEADS, D, LAYERS = 16, 2, 4, 16, 2
SCHEMES = (Rotary.rope(D).rectify(21).log_n(40), Rotary.hope(D, 100).local(50))
ALL = (*support.TARGETS, support.Target("reference", torch.float64, "cpu"))
TARGETS = [t for t in ALL if hasattr(load_backend(t.impl), "unsupported_positions")]
TARGETS = [t for t in TARGETS if t.dtype == torch.float32 or t.impl == "reference"]
Token = tuple[int, int]  # its number, of which its key and value follow; its position


@pytest.fixture(params=[pytest.param(t, marks=pytest.mark.slow) if t.slow else t for t in TARGETS], ids=str)
def moved(request):
    """Every backend; the interpreter's runs of all that only asks the cache are slow tests."""
    return request.param


class Held:
    """A cache, and for every sequence what it should hold."""

    def __init__(self, target, pages=40, cache_dtype=None, **options):
        self.target, self.cache_dtype = target, cache_dtype
        options = {"layers": LAYERS, "cache_dtype": cache_dtype, **options}
        self.cache = PagedKVCache(pages, PAGE, HEADS_KV, D, target.dtype, target.device, **options)
        for x in (self.cache.k, self.cache.v) if cache_dtype is None else (self.cache.k_scale, self.cache.v_scale):
            x.fill_(torch.nan)
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(LAYERS, 2, 4000, HEADS_KV, D, generator=generator).to(target.device, target.dtype)
        self.tokens: dict[int, list[Token]] = {}
        self.padding: dict[int, int] = {}
        self.written = 0

    def allocate(self) -> int:
        name = self.cache.allocate()
        self.tokens[name], self.padding[name] = [], 0
        return name

    def write(self, names: list[int], count: int, leftpad: list[int] | None = None) -> None:
        """Appends tokens in a step and attends with the last of them."""
        numbers = [[self.written + count * n + m for m in range(count)] for n in range(len(names))]
        k, v = self.rows[:, :, numbers].unbind(1)
        q = support.random((len(names), min(count, 2), HEADS, D), self.target, self.written)
        results = []
        with self.cache.step(names, count, leftpad) as step:
            for layer, rotary in enumerate(SCHEMES):
                options = dict(layer=layer, return_lse=True, impl=self.target.impl, validate=leftpad is None)
                results.append(step.attend(q, rotary, k[layer], v[layer], **options))
        self.written += len(names) * count
        for b, name in enumerate(names):
            pad = leftpad[b] if leftpad else 0
            held = self.tokens[name]
            start = held[-1][1] + 1 if held else -pad
            held += [(number, start + m) for m, number in enumerate(numbers[b]) if m >= pad]
            self.padding[name] += pad
        for layer, (out, lse) in enumerate(results):
            self.compare(names, layer, q, out, lse)

    def compare(self, names, layer, q, out, lse) -> None:
        for b, name in enumerate(names):
            numbers, places = zip(*self.tokens[name], strict=True)
            k, v = (support.kept(x[list(numbers)], self.cache_dtype)[None] for x in self.rows[layer])
            places = torch.tensor(places, dtype=torch.float64, device=q.device)
            queries = places[len(numbers) - q.shape[1] :]
            if len(queries) < q.shape[1]:
                continue  # rows of padding
            p = support.Problem(q[b : b + 1], k, v, SCHEMES[layer], places=(queries, places))
            p = p.replace(grad_out=torch.zeros_like(p.q), grad_lse=torch.zeros_like(lse[b : b + 1]))
            got = {"out": out[b : b + 1], "lse": lse[b : b + 1]}
            support.check_budget(got, p, self.target.dtype, f"sequence {name}: ")

    def read(self) -> None:
        """All sequences with tokens, in one call."""
        names = [name for name, held in self.tokens.items() if held]
        if names:
            q = support.random((len(names), 1, HEADS, D), self.target, self.written)
            for layer, rotary in enumerate(SCHEMES):
                options = dict(layer=layer, return_lse=True, impl=self.target.impl, validate=True)
                self.compare(names, layer, q, *self.cache.attend(names, q, rotary, **options))

    def check(self) -> None:
        """Lengths, and every sequence's tokens, tables and pages."""
        assert self.cache.lengths == {n: len(held) + self.padding[n] for n, held in self.tokens.items()}
        k, v = self.rows.unbind(1)
        expected = {}
        for name, held in self.tokens.items():
            numbers = [number for number, _ in held]
            kept = (support.kept(x[:, numbers], self.cache_dtype) for x in (k, v))
            expected[name] = Tokens([place for _, place in held], *kept)
        look(self.cache, expected)

    # ---- what the calls should do

    def extend(self, name: int, other: int) -> None:
        added = list(self.tokens[other])
        self.cache.extend(name, other)
        held = self.tokens[name]
        by = held[-1][1] + 1 - added[0][1] if held and added else 0
        held += [(number, place + by) for number, place in added]
        self.padding[name] = 0

    def remove(self, name: int, start: int, stop: int, close: bool) -> None:
        self.cache.remove(name, start, stop, close)
        if start == stop:
            return
        held, down = self.tokens[name], (stop - start) * close
        self.tokens[name] = held[:start] + [(number, place - down) for number, place in held[stop:]]
        self.padding[name] = 0

    def keep(self, name: int, first: int, last: int) -> None:
        before = len(self.tokens[name])
        self.cache.keep(name, first, last)
        if before > first + last:
            held = self.tokens[name]
            gap = before - first - last
            self.tokens[name] = held[:first] + [(number, place - gap) for number, place in held[before - last :]]
            self.padding[name] = 0

    def fork(self, name: int) -> int:
        child = self.cache.fork(name)
        self.tokens[child], self.padding[child] = list(self.tokens[name]), self.padding[name]
        return child

    def free(self, name: int) -> None:
        self.cache.free(name)
        del self.tokens[name], self.padding[name]

    def truncate(self, name: int, length: int) -> None:
        self.cache.truncate(name, length)
        pad = self.padding[name] = min(self.padding[name], length)
        del self.tokens[name][length - pad :]


def test_documents_in_any_order(moved):
    """Each is written once; two prompts take them in different orders, and go on on their own."""
    held = Held(moved)
    documents = [held.allocate() for _ in range(3)]
    for name, count in zip(documents, (20, 16, 5), strict=True):
        held.write([name], count)
    free = held.cache.free_pages
    prompts = [held.allocate(), held.allocate()]
    held.write(prompts, 3)
    for name, order in zip(prompts, ((0, 1, 2), (2, 0, 2)), strict=True):
        for n in order:
            held.extend(name, documents[n])
    assert held.cache.free_pages == free - 2  # a page for each prompt's own tokens, none for the documents
    held.read()
    held.check()
    for _ in range(15):  # the shared last pages are copied, once
        held.write(prompts, 1)
    held.write(documents, 2)
    held.read()
    held.check()


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    "range_", [(0, 5), (0, 40), (3, 9), (16, 32), (10, 37), (37, 40), (39, 40), (7, 7), (0, 16)], ids=str
)
def test_remove(moved, range_, close):
    held = Held(moved)
    name = held.allocate()
    held.write([name], 40)
    held.remove(name, *range_, close)
    held.read()
    held.check()
    start, stop = range_
    used = {page for page in held.cache._sequences[name].pages}
    assert len(used) == len({token // PAGE for token in range(40) if not start <= token < stop})
    held.write([name], 3)
    held.write([name], 20)
    held.check()


def test_sinks_and_a_rolling_window(moved):
    """A fixed cache, without end."""
    held = Held(moved, pages=6)
    name = held.allocate()
    for _ in range(60):
        held.write([name], 2)
        held.keep(name, 4, 30)
        held.check()
    assert held.tokens[name][4][0] == 120 - 30 and held.tokens[name][-1][1] == 33
    held.read()


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_left_padding_goes(target):
    held = Held(target)
    names = [held.allocate() for _ in range(3)]
    held.write(names, 75, leftpad=[3, 17, 0])  # beyond 40, from where log n depends on the position
    held.extend(names[2], names[1])
    held.remove(names[0], 2, 5, True)
    assert held.cache.padding == {names[0]: 0, names[1]: 17, names[2]: 0}
    held.read()
    held.check()
    held.keep(names[1], 1, 1)
    held.write(names, 1)
    held.check()


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
def test_quantized(moved, cache_dtype):
    held = Held(moved, cache_dtype=cache_dtype)
    names = [held.allocate(), held.allocate()]
    held.write(names, 20)
    held.extend(*names)
    held.remove(names[0], 5, 23, True)
    held.write(names, 2)
    held.check()


def test_a_step_that_ends_in_an_error(moved):
    held = Held(moved)
    names = [held.allocate(), held.allocate()]
    held.write(names, 20)
    held.extend(*names)
    before = held.cache._sequences[names[0]].entries
    with pytest.raises(KeyboardInterrupt), held.cache.step(names, 40) as step:
        for layer in range(LAYERS):
            step.append(*self_rows(held, 2, 40, layer), layer)
        raise KeyboardInterrupt
    assert held.cache._sequences[names[0]].entries == before
    held.check()
    held.read()
    held.write(names, 3)


def self_rows(held: Held, batch: int, count: int, layer: int):
    return held.rows[layer][:, : batch * count].unflatten(1, (batch, count)).unbind(0)


def test_both_holders_of_a_page_in_one_call(moved):
    """They show different numbers of its rows, and the one with fewer has more slots: a step that fails leaves both."""
    held = Held(moved)
    short, long = held.allocate(), held.allocate()
    held.write([short], 9)
    held.write([long], 40)
    held.extend(long, short)
    held.truncate(long, 45)
    with pytest.raises(KeyboardInterrupt), held.cache.step([short, long], 1) as step:
        for layer in range(LAYERS):
            step.append(*self_rows(held, 2, 1, layer), layer)
        raise KeyboardInterrupt
    held.check()
    held.read()


@pytest.mark.parametrize("pages, max_seqlen, empty", [(18, 256, 0), (18, None, 15), (7, None, 0), (9, 72, 14)], ids=str)
def test_random_walk(moved, pages, max_seqlen, empty):
    """empty: sequences that stay empty, so that the others have the table's last rows."""
    choose = random.Random(pages + empty)
    held = Held(moved, pages=pages, max_seqlen=max_seqlen, cache_dtype=None if empty else "int8")
    for _ in range(empty):
        held.allocate()
    refused = 0
    for _ in range(moved.size(120, 120)):
        names = list(held.tokens)[empty:]
        kind = choose.choice(
            ["allocate"] + ["write"] * 5 + ["extend", "remove", "remove", "keep", "fork", "free", "truncate"] * 2
        )
        if not names or kind == "allocate":
            if len(names) < 7:
                held.allocate()
            continue
        name = choose.choice(names)
        count = len(held.tokens[name])
        free, lengths = held.cache.free_pages, held.cache.lengths
        try:
            if kind == "write":
                held.write(choose.sample(names, choose.randint(1, min(3, len(names)))), choose.choice((1, 2, 17, 33)))
            elif kind == "extend":
                held.extend(name, choose.choice(names))
            elif kind == "remove":
                start, stop = sorted((choose.randint(0, count), choose.randint(0, count)))
                held.remove(name, start, stop, choose.random() < 0.5)
            elif kind == "keep":
                held.keep(name, choose.randint(0, 20), choose.randint(0, 60))
            elif kind == "truncate":
                held.truncate(name, choose.randint(0, count))
            else:
                getattr(held, kind)(name)
        except (OutOfPages, ValueError) as error:
            assert isinstance(error, OutOfPages) or "no room" in str(error), error
            assert (held.cache.free_pages, held.cache.lengths) == (free, lengths)
            refused += 1
        held.check()
    held.read()
    assert refused > 3
    held.cache.reset()
    assert held.cache.free_pages == pages


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
        with pytest.raises(ValueError, match="expected a cache of raw keys, got rotated_keys"):
            call()


def test_not_in_an_open_step():
    cache = PagedKVCache(4, PAGE, HEADS_KV, D, torch.float32, "cpu")
    a, b = cache.allocate(), cache.allocate()
    with cache.step([a], 0):
        for call in (lambda: cache.extend(a, b), lambda: cache.remove(a, 0, 0), lambda: cache.keep(a, 1, 1)):
            with pytest.raises(RuntimeError, match="expected no open step"):
                call()
