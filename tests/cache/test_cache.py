"""Compares KVCache and PagedKVCache with lists of token numbers, and their attention with one full call."""

import random

import pytest
import torch
from flashrope import KVCache, OutOfPages, PagedKVCache, Rotary, attention

LAYERS, HEADS_KV, HEAD_DIM, PAGE = 3, 1, 8, 16
UNUSED = 2**31 - 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEMES = {"rope": Rotary.rope(HEAD_DIM), "rerope": Rotary.rope(HEAD_DIM).rectify(7)}
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randn(2, LAYERS, 4096, HEADS_KV, HEAD_DIM, generator=GENERATOR, dtype=torch.float64).to(DEVICE)


def rows(lists, layer=0, dtype=torch.float64):
    """Returns k and v (sequences, tokens, heads_kv, head_dim) of lists of token numbers, in one layer."""
    return TOKENS[:, layer][:, torch.tensor(lists, dtype=torch.long)].to(dtype)


def queries(seqlen_q, sequences, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequences, seqlen_q, 2 * HEADS_KV, HEAD_DIM, generator=generator).to(DEVICE, dtype)


def paged(pages=8, dtype=torch.float64, **options) -> PagedKVCache:
    cache = PagedKVCache(pages, PAGE, HEADS_KV, HEAD_DIM, dtype, DEVICE, **options)
    cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
    return cache


def contiguous(sequences=3, capacity=40, dtype=torch.float64, **options) -> KVCache:
    cache = KVCache(sequences, capacity, HEADS_KV, HEAD_DIM, dtype, DEVICE, **options)
    cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
    return cache


def pages_of(cache, sequence) -> list[int]:
    table = cache.block_table([sequence])
    assert table.shape == (1, cache.max_pages) and table.dtype == torch.int32 and table.is_contiguous()
    return [page for page in table[0].tolist() if page != UNUSED]


def check(cache: PagedKVCache, model: dict[int, list[int]], reserved=()) -> None:
    """Checks lengths, tables, the contents of all layers and the number of free pages."""
    assert cache.sequences == sorted(model)
    names = list(model)
    assert list(cache.lengths.values()) == cache.seqlens(names).tolist() == [len(model[name]) for name in names]
    used = set()
    for name, table in zip(names, cache.block_table(names).tolist(), strict=True):
        pages = [page for page in table if page != UNUSED]
        assert table == pages + [UNUSED] * (cache.max_pages - len(pages))
        assert all(0 <= page < cache.pages for page in pages) and len(set(pages)) == len(pages)
        needed = -(-len(model[name]) // PAGE)
        assert len(pages) >= needed if name in reserved else len(pages) == needed
        used.update(pages)
        for layer in range(cache.layers):
            for pool, held in zip(cache.layer(layer), rows([model[name]], layer), strict=True):
                got = pool[pages].flatten(0, 1)[: len(model[name])]
                assert torch.equal(got, held[0]), f"contents of sequence {name}"
    assert cache.free_pages == cache.pages - len(used), "pages free and held"
    unheld = [page for page in range(cache.pages) if page not in used]
    for layer in range(cache.layers):
        for pool in cache.layer(layer):
            pool[unheld] = torch.nan  # if a later call reads these pages, its result is NaN


def expected(scheme, q, tokens, layer=0, dtype=torch.float64):
    """Returns the attention of every sequence computed separately. Rows of q before a sequence's first token are 0."""
    outs = []
    for b, sequence in enumerate(tokens):
        none = max(q.shape[1] - len(sequence), 0)
        k, v = rows([sequence], layer, dtype)
        out = attention(q[b : b + 1, none:], k, v, SCHEMES[scheme], impl="reference")
        outs.append(torch.cat([torch.zeros_like(q[:1, :none]), out], 1))
    return torch.cat(outs)


class Failure(Exception):
    pass


def test_lengths_and_padding_are_properties_of_both_caches():
    paged = PagedKVCache(8, 16, 1, 8, dtype=torch.float32, device="cpu")
    first, second = paged.allocate(), paged.allocate()
    k = torch.randn(2, 5, 1, 8)
    paged.append([second, first], k, k, leftpad=[0, 3])
    contiguous = KVCache(2, 8, 1, 8, dtype=torch.float32, device="cpu")
    contiguous.append(k, k, leftpad=[3, 0])
    for name in (first, second):
        assert paged.lengths[name] == contiguous.lengths[name] == 5
        assert paged.padding[name] == contiguous.padding[name] == {first: 3, second: 0}[name]
    assert paged.lengths == {first: 5, second: 5}
    with pytest.raises(ValueError, match="sequence 7 was never allocated"):
        paged.lengths[7]
    with pytest.raises(TypeError, match="not callable"):
        paged.lengths([second, first])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_attend_equals_attention(scheme, impl, dtype):
    """Chunked prefill, verification and decoding of three sequences give the results of attention in both caches, with
    tokens dropped in between."""
    tokens, caches = [[], [], []], (contiguous(capacity=80, dtype=dtype), paged(15, dtype))
    names = [caches[1].allocate() for _ in tokens]
    generator = random.Random(5)
    for seqlen_new, dropped in ((19, 0), (30, 4), (1, 0), (5, 3), (1, 0), (1, 0), (4, 1)):
        new = [[generator.randrange(TOKENS.shape[1]) for _ in range(seqlen_new)] for _ in tokens]
        tokens = [old + more for old, more in zip(tokens, new, strict=True)]
        q = queries(seqlen_new, 3, seqlen_new, dtype)
        exact = expected(scheme, q, tokens, dtype=dtype)
        for out in (
            caches[0].attend(q, SCHEMES[scheme], *rows(new, dtype=dtype), impl=impl, validate=True),
            caches[1].attend(names, q, SCHEMES[scheme], *rows(new, dtype=dtype), impl=impl, validate=True),
        ):
            torch.testing.assert_close(out, exact)
        again, lse = caches[1].attend(names, q, SCHEMES[scheme], impl=impl, return_lse=True)
        torch.testing.assert_close(again, exact)
        torch.testing.assert_close(caches[0].attend(q, SCHEMES[scheme], impl=impl, return_lse=True)[1], lse)
        tokens = [old[: len(old) - dropped] for old in tokens]
        caches[0].truncate(None, len(tokens[0]))
        for name in names:
            caches[1].truncate(name, len(tokens[0]))


class TestKVCache:
    def test_against_lists(self):
        cache, model, generator = contiguous(), [[], [], []], random.Random(2)
        where = cache.seqlens.data_ptr()  # a CUDA graph holds the address
        for _ in range(200):
            b, kind = (
                generator.randrange(3),
                generator.choice(("append", "append", "truncate", "all", "each", "reset", "full")),
            )
            if kind == "append" and max(map(len, model)) < cache.capacity:
                seqlen_new = generator.randint(0, min(9, cache.capacity - max(map(len, model))))
                new = [[generator.randrange(TOKENS.shape[1]) for _ in range(seqlen_new)] for _ in model]
                cache.append(*rows(new))
                model = [old + more for old, more in zip(model, new, strict=True)]
            elif kind == "truncate":
                cache.truncate(b, len(model[b]) // 2)
                del model[b][len(model[b]) // 2 :]
            elif kind == "all":
                length = max(min(map(len, model)) - 2, 0)
                cache.truncate(None, length)
                model = [old[:length] for old in model]
            elif kind == "each":
                model = [old[: max(len(old) - b, 0)] for b, old in enumerate(model)]
                cache.truncate(None, [len(old) for old in model])
            elif kind == "reset" and generator.random() < 0.2:
                cache.reset(b)
                model[b] = []
            elif kind == "full":
                before = cache.k.clone()
                more = cache.capacity - max(map(len, model)) + 1
                with pytest.raises(
                    ValueError, match=f"has {max(map(len, model))} of 40 slots in use: no room for {more}"
                ):
                    cache.append(*rows([[1] * more] * 3))
                assert torch.equal(cache.k.nan_to_num(), before.nan_to_num())
            assert cache.lengths == cache.seqlens.tolist() == [len(tokens) for tokens in model]
            for b, tokens in enumerate(model):
                for room, exact in zip((cache.k, cache.v), rows([tokens]), strict=True):
                    assert torch.equal(room[b, : len(tokens)], exact[0])
        cache.reset()
        assert cache.lengths == cache.seqlens.tolist() == [0, 0, 0]
        assert cache.seqlens.data_ptr() == where

    def test_advance(self):
        cache = contiguous()
        cache.advance(38)
        with pytest.raises(ValueError, match="sequence 0 has 38 of 40 slots in use: no room for 3"):
            cache.advance(3)
        assert cache.lengths == cache.seqlens.tolist() == [38] * 3

    def test_repr(self):
        cache = KVCache(2, 32, 1, 8, device=DEVICE)
        assert cache.k.dtype == torch.bfloat16 and cache.nbytes == 2 * 2 * 32 * 8 * 2
        assert repr(cache) == (
            "KVCache(batch=2, capacity=32, heads_kv=1, head_dim=8, dtype=torch.bfloat16, "
            f"device='{cache.k.device}'; 0 to 0 slots in use, 2,048 bytes)"
        )


class TestPagedKVCache:
    def test_forks_diverge(self):
        cache = paged()
        parent = cache.allocate()
        cache.append([parent], *rows([[1] * 20]))
        children = [cache.fork(parent) for _ in range(2)]
        assert cache.free_pages == 6 and pages_of(cache, children[0]) == pages_of(cache, parent)
        cache.append(children, *rows([[2], [3]]))
        assert cache.free_pages == 4  # the parent still holds the page
        check(cache, {parent: [1] * 20, children[0]: [1] * 20 + [2], children[1]: [1] * 20 + [3]})
        assert len({pages_of(cache, name)[0] for name in cache.sequences}) == 1

    def test_all_holders_of_a_page_in_one_call(self):
        """If all sequences that share a page append in one call, one of them writes in place. This holds for any order
        and lengths."""
        for order in (0, 1):
            cache = paged(3)
            long = cache.allocate()
            cache.append([long], *rows([[1] * 10]))
            short = cache.fork(long)
            cache.truncate(short, 4)
            names = [long, short][:: -1 if order else 1]
            cache.append(names, *rows([[2, 3], [4, 5]][:: -1 if order else 1]))
            assert cache.free_pages == 1
            check(cache, {long: [1] * 10 + [2, 3], short: [1] * 4 + [4, 5]})

    def test_out_of_pages(self):
        cache = paged()
        first, second = cache.allocate(), cache.allocate()
        cache.append([first], *rows([[1] * 90]))
        with pytest.raises(OutOfPages, match=r"^needs 5 more pages, 2 of 8 are free: 3 missing$"):
            cache.append([second], *rows([[2] * 70]))
        with pytest.raises(OutOfPages, match="^needs 3 more pages, 2 of 8 are free: 1 missing$"):
            cache.allocate(33)
        check(cache, {first: [1] * 90, second: []})
        third = cache.fork(first)
        cache.append([second], *rows([[2] * 32]))
        with pytest.raises(OutOfPages, match="^needs 1 more page, 0 of 8 are free: 1 missing$"):
            cache.append([third], *rows([[3]]))
        check(cache, {first: [1] * 90, second: [2] * 32, third: [1] * 90})
        cache.free(first)
        cache.append([third], *rows([[3]]))
        check(cache, {second: [2] * 32, third: [1] * 90 + [3]})

    def test_many_sequences(self):
        """The table on the device grows, and a reused row holds nothing of its previous sequence."""
        cache = paged(80, max_seqlen=32)
        model = {}
        for name in range(70):
            assert cache.allocate() == name
            model[name] = [name] * 3
        cache.append(list(model), *rows(list(model.values())))
        check(cache, model)
        for name in range(0, 70, 2):
            cache.free(name)
            del model[name]
        for name in range(70, 140):
            assert cache.allocate() == name
            model[name] = []
        check(cache, model)
        # Rows were reused, and no change is left to send.
        assert len(cache._pool.table) == 128 and not cache._pool.changed

    def test_reserve_and_advance(self):
        """Pages can be reserved before the tokens are counted. A CUDA graph needs this, because it writes with tables
        that were made before the replay."""
        cache = paged(4)
        name = cache.allocate(20)
        assert cache.free_pages == 2 and cache.lengths[name] == 0
        pages = pages_of(cache, name)
        cache.k[pages], cache.v[pages] = rows([list(range(32))]).view(2, 2, PAGE, HEADS_KV, HEAD_DIM)
        cache.advance([name], 18)
        check(cache, {name: list(range(18))}, [name])
        with pytest.raises(ValueError, match=f"at most 14, the tokens reserved for sequence {name}, got 15"):
            cache.advance([name], 15)
        child = cache.fork(name)
        with pytest.raises(ValueError, match=f"at most 0, the tokens reserved for sequence {name}, got 1"):
            cache.advance([name], 1)  # the page is now shared
        cache.reserve([name], 1)
        cache.advance([name], 0)
        assert cache.free_pages == 1 and pages_of(cache, name)[1] != pages_of(cache, child)[1]
        check(cache, {name: list(range(18)), child: list(range(18))}, [name])
        cache.truncate(name, 16)
        assert cache.free_pages == 2

    def test_neither_full_nor_reserved_pages_are_copied(self):
        cache = paged(4)
        parent = cache.allocate(3 * PAGE)
        cache.append([parent], *rows([[1] * PAGE]))
        child = cache.fork(parent)
        assert len(pages_of(cache, parent)) == 3 and len(pages_of(cache, child)) == 1
        cache.append([parent, child], *rows([[2], [3]]))
        assert cache.free_pages == 0
        check(cache, {parent: [1] * PAGE + [2], child: [1] * PAGE + [3]}, [parent])

    def test_a_freed_sequence_is_refused(self):
        cache = paged(4)
        first, second = cache.allocate(), cache.allocate()
        cache.append([first, second], *rows([[1] * 20] * 2))
        cache.free(first)
        with pytest.raises(ValueError, match="sequence 0 was freed"):
            cache.attend([first], queries(1, 1, 0), SCHEMES["rope"])
        assert cache.allocate() == 2  # reuses the row of the table
        assert pages_of(cache, 2) == [] and len(pages_of(cache, second)) == 2

    def test_repr(self):
        cache = paged(dtype=torch.float32, max_seqlen=33)
        cache.allocate(20)
        assert cache.max_pages == 3 and cache.nbytes == 2 * 8 * PAGE * 8 * 4
        assert repr(cache) == (
            "PagedKVCache(pages=8, page_size=16, heads_kv=1, head_dim=8, dtype=torch.float32, "
            f"device='{cache.k.device}', max_seqlen=33; 6 pages free, sequences [0], 8,192 bytes)"
        )


@pytest.mark.interpreted(lambda exact: True)
def test_a_ragged_step_gives_a_sequence_the_bits_of_a_step_alone(exact):
    """With an explicit number of splits, whatever else is in the step changes no bit of a sequence's results."""
    rotary, heads, options = Rotary.rope(16).rectify(20).log_n(30), (4, 2, 2), dict(num_splits=2, impl=exact.impl)

    def tokens(count: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        new = (torch.randn(count, h, 16, generator=generator, dtype=torch.float32) for h in heads)
        return [x.to(exact.device, exact.dtype) for x in new]

    def serve(others: bool) -> list[torch.Tensor]:
        cache = PagedKVCache(24, 16, 2, 16, dtype=exact.dtype, device=exact.device)
        names = [cache.allocate() for _ in range(3 if others else 1)]
        outs = []
        for n, counts in enumerate(([40, 5, 66], [1, 3, 1], [4, 1, 0])):
            counts = counts[: len(names)]
            parts = [tokens(count, 10 * n + b) for b, count in enumerate(counts)]
            q, k, v = (torch.cat(each) for each in zip(*parts, strict=True))
            with cache.step(names, counts) as step:
                outs.append(step.attend(q, rotary, k, v, **options)[: counts[0]])
        return outs

    for alone, beside in zip(serve(False), serve(True), strict=True):
        assert torch.equal(alone, beside)
