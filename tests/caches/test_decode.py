"""attention_with_cache: every sequence gives the last rows of one full call, for any other content of the cache."""

import dataclasses
import os
import subprocess
import sys

import pytest
import support
import torch
from flashrope import CacheLayer, CacheTables, Rotary, attention_with_cache
from flashrope.operators.fields import flatten
from support import COEFFICIENT, SCHEMES
from test_needles import needle

PAGE = 16
UNUSED = 2147480000  # a table entry beyond a sequence; it may be anything


@dataclasses.dataclass
class Cached:
    """Sequences of different lengths in a cache, which lacks their last seqlen_new keys. Its free slots are NaN."""

    sequences: list[support.Problem]
    seqlen_new: int
    capacity: int
    leftpad: tuple[int, ...] | None
    page_size: int = 0

    def __post_init__(self):
        pads = self.leftpad or (0,) * len(self.sequences)
        first = self.sequences[0].k
        rooms, tables, lengths = [], [], []
        if self.page_size:
            used = [-(-(pad + p.k.shape[1]) // self.page_size) for p, pad in zip(self.sequences, pads, strict=True)]
            total = max(sum(used) + 2, len(used) * self.capacity // self.page_size)
            inner = 1 + torch.randperm(total - 2, generator=torch.Generator().manual_seed(3))
            # with the first and the last page, to which wrong page numbers are clamped
            free = [0, *inner.tolist()[: max(sum(used) - 2, 0)], total - 1]
            pool = first.new_full((2, total, self.page_size, *first.shape[2:]), torch.nan)
        for p, pad in zip(self.sequences, pads, strict=True):
            old = p.k.shape[1] - self.seqlen_new
            room = first.new_full((2, self.capacity, *first.shape[2:]), torch.nan)
            room[0, pad : pad + old], room[1, pad : pad + old] = p.k[0, :old], p.v[0, :old]
            rooms.append(room)
            lengths.append(pad + old)
            if self.page_size:
                pages = [free.pop(0) for _ in range(used[len(tables)])]
                for n, page in enumerate(pages):
                    pool[:, page] = room[:, n * self.page_size : (n + 1) * self.page_size]
                tables.append(pages + [UNUSED] * (self.capacity // self.page_size - len(pages)))
        device = first.device
        self.k_cache, self.v_cache = pool if self.page_size else torch.stack(rooms, 1)
        self.cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.block_table = torch.tensor(tables, dtype=torch.int32, device=device) if self.page_size else None
        self.cache_leftpad = torch.tensor(pads, dtype=torch.int32, device=device) if self.leftpad else None

    def run(self, impl: str, **options):
        p = self.sequences[0]
        new = slice(-self.seqlen_new, None) if self.seqlen_new else slice(0, 0)
        k, v = (
            torch.cat([getattr(p, name)[:, new] for p in self.sequences]) if self.seqlen_new else None for name in "kv"
        )
        return attention_with_cache(
            torch.cat([p.q for p in self.sequences]),
            self.k_cache,
            self.v_cache,
            p.rotary,
            self.cache_seqlens,
            k=k,
            v=v,
            block_table=self.block_table,
            cache_leftpad=self.cache_leftpad,
            causal=p.causal,
            softmax_scale=p.softmax_scale,
            return_lse=True,
            impl=impl,
            validate=True,
            **options,
        )

    def check(self, target, **options) -> None:
        before = self.cache_seqlens.clone()
        out, lse = self.run(target.impl, **options)
        assert torch.equal(before, self.cache_seqlens)
        assert out.dtype == target.dtype and lse.dtype == support.lse_type(target)
        for b, p in enumerate(self.sequences):
            got = {"out": out[b : b + 1], "lse": lse[b : b + 1]}
            support.check_budget(got, p, target.dtype, f"sequence {b}: ")


def cached(
    target,
    rotary,
    lengths,
    seqlen_q,
    heads=4,
    group=2,
    seqlen_new=None,
    leftpad=None,
    capacity=64,
    page_size=0,
    **options,
) -> Cached:
    sequences = [
        support.problem(target, rotary, seqlen_q, n, heads=heads, group=group, seed=10 * b, **options)
        for b, n in enumerate(lengths)
    ]
    return Cached(sequences, seqlen_q if seqlen_new is None else seqlen_new, capacity, leftpad, page_size)


LAYOUTS = {"contiguous": 0, "paged": PAGE}
layouts = pytest.mark.parametrize("page_size", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.mark.interpreted(
    lambda target, page_size, scheme: (
        target.dtype == torch.float32
        and bool(page_size)
        == (scheme in ("rope_interleaved", "rope_partial", "hope_rerope_log_n", "yarn_leaky_local_log_n"))
    )
)
@layouts
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_token(target, page_size, scheme):
    cached(
        target, SCHEMES[scheme](16), (45, 1, 64, 22), 1, leftpad=(3, 0, 0, 40), capacity=80, page_size=page_size
    ).check(target)


@pytest.mark.interpreted(lambda exact, page_size, scheme, causal: (scheme == "hope_rerope_log_n") == bool(page_size))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@layouts
@pytest.mark.parametrize("scheme", ["rope_partial", "leaky", "hope_rerope_log_n", "local"])
def test_several_tokens(exact, page_size, scheme, causal):
    cached(
        exact, SCHEMES[scheme](16), (45, 5, 64), 5, leftpad=(3, 0, 0), capacity=80, page_size=page_size, causal=causal
    ).check(exact)


@pytest.mark.interpreted(lambda exact, scheme: scheme == "leaky")
@pytest.mark.parametrize("scheme", ["rope", "leaky"])
def test_rows_before_the_first_key_that_see_keys_ahead(exact, scheme):
    """The tables have no negative positions."""
    cached(exact, SCHEMES[scheme](16), (3, 45), 9, seqlen_new=0, heads=2, capacity=80, causal=False).check(exact)


@pytest.mark.interpreted(lambda target, scheme, seqlen_q: False)
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("scheme", ["none", "rope_interleaved", "hope_zeros", "rerope", "local", "log_n_trained"])
def test_equal_lengths(target, scheme, seqlen_q):
    """One batch, computed in one piece where nothing has to be merged."""
    cached(target, SCHEMES[scheme](16), (20, 20), seqlen_q, leftpad=(3, 3)).check(target)


@pytest.mark.interpreted(
    lambda exact, seqlen_q, page_size: exact.impl == "triton" and seqlen_q in (17, 70) and page_size
)
@layouts
@pytest.mark.parametrize("seqlen_q", [2, 17, 64, 65, 70, 150])
def test_long_chunks(exact, page_size, seqlen_q):
    cached(
        exact, Rotary.rope(16).rectify(21).log_n(20), (150, 170), seqlen_q, heads=2, capacity=192, page_size=page_size
    ).check(exact)


@pytest.mark.interpreted(
    lambda exact, page_size, scheme: (
        bool(page_size) == (scheme != "hope_rerope_log_n")
        and scheme in ("rope_interleaved", "hope_rerope_log_n", "yarn_leaky_local_log_n")
    )
)
@layouts
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_of_every_scheme(exact, page_size, scheme):
    """More than 64 queries, which another kernel may serve: one sequence fills the cache, one starts after padding."""
    cached(
        exact, SCHEMES[scheme](16), (112, 66), 66, heads=2, leftpad=(0, 30), capacity=112, page_size=page_size
    ).check(exact)


@pytest.mark.interpreted(lambda exact, page_size, scheme: scheme == "hope_rerope_log_n" and page_size)
@layouts
@pytest.mark.parametrize("scheme", ["leaky", "hope_rerope_log_n", "local"])
def test_chunks_that_see_keys_ahead(exact, page_size, scheme):
    cached(
        exact,
        SCHEMES[scheme](16),
        (112, 70),
        66,
        heads=2,
        leftpad=(0, 9),
        capacity=112,
        page_size=page_size,
        causal=False,
    ).check(exact)


@pytest.mark.interpreted(lambda exact, page_size: page_size)
@layouts
def test_chunks_longer_than_their_sequences(exact, page_size):
    """More queries than keys: no key, one key, some keys."""
    rotary = Rotary.rope(16).rectify(7).log_n(20)
    cached(
        exact, rotary, (0, 1, 40), 66, heads=2, seqlen_new=0, leftpad=(0, 5, 0), capacity=80, page_size=page_size
    ).check(exact)


@pytest.mark.interpreted(lambda target, head_dim, heads: target.dtype == torch.float16 and head_dim == 128)
@pytest.mark.parametrize(
    ("head_dim", "heads"), [(8, (4, 4)), (40, (6, 3)), (64, (3, 3)), (72, (5, 1)), (128, (4, 1)), (256, (2, 2))]
)
def test_head_dims_and_groups_of_chunks(target, head_dim, heads):
    rotary = Rotary.hope(head_dim, 100, interleaved=head_dim == 128).rectify(21)
    cached(target, rotary, (96, 70), 65, heads=heads[0], group=heads[0] // heads[1], capacity=96, page_size=PAGE).check(
        target
    )


@pytest.mark.interpreted(lambda target, head_dim, heads: target.dtype == torch.float16 and head_dim in (40, 96, 128))
@pytest.mark.parametrize(
    ("head_dim", "heads"),
    [(8, (4, 4)), (40, (6, 3)), (64, (8, 8)), (72, (5, 1)), (96, (32, 4)), (128, (8, 1)), (256, (4, 2))],
)
def test_head_dims_and_groups(target, head_dim, heads):
    rotary = Rotary.hope(head_dim, 100, interleaved=head_dim == 128).rectify(21)
    cached(target, rotary, (50, 33), 2, heads=heads[0], group=heads[0] // heads[1], page_size=PAGE).check(target)


@layouts
def test_lengths_from_nothing_to_full(exact, page_size):
    """No key, one key, a page, the full capacity; also queries without new keys, and more queries than keys."""
    rotary = Rotary.rope(16).rectify(7)
    cached(exact, rotary, (0, 1, PAGE, 64), 1, seqlen_new=0, page_size=page_size).check(exact)
    cached(exact, rotary, (0, 2, 64), 4, seqlen_new=0, page_size=page_size).check(exact)
    cached(exact, rotary, (0, 0), 1, seqlen_new=0, page_size=page_size).check(exact)


@pytest.mark.parametrize("leftpad", [None, (0, 0, 70, 1)], ids=["", "leftpad"])
def test_pages_of_whole_blocks(exact, leftpad):
    """The keys of a block then lie in one page, unless left padding moves them."""
    rotary, lengths = Rotary.rope(16).rectify(7), (0, 64, 100, 190)
    cached(exact, rotary, lengths, 1, seqlen_new=0, capacity=192, page_size=64, leftpad=leftpad).check(exact)


@pytest.mark.interpreted(lambda exact, distance, kind: distance == 21)
@pytest.mark.parametrize("distance", [0, 20, 21, 22])
@pytest.mark.parametrize("kind", ["rectify", "local"])
def test_needles_on_the_edge(exact, kind, distance):
    full = needle(exact, getattr(Rotary.rope(16), kind)(21), distance)
    rows = [
        full.replace(
            **{name: getattr(full, name)[:, -n - 1 : -n] for name in ("q", "grad_out")},
            grad_lse=full.grad_lse[..., -n - 1 : -n],
            k=full.k[:, :-n],
            v=full.v[:, :-n],
        )
        for n in range(1, 4)
    ]
    if kind == "rectify" or distance < 21:  # every third row has a needle, which dominates its row
        assert max(support.exact_and_bound(p)[0]["lse"].max() for p in rows) > 8
    Cached(rows, 1, 80, None, PAGE).check(exact)


@layouts
def test_token_by_token_is_one_full_call(exact, page_size):
    """A sequence that grows in chunks of several sizes, compared with the rows of one call."""
    chunks = (13, 1, 1, 7, 66, 1, 1, 3)
    p = support.problem(exact, Rotary.rope(16).rectify(9).log_n(10), sum(chunks))
    full, bound = support.exact_and_bound(p)
    caches = [x.new_full((7, PAGE, 1, 16) if page_size else (1, 7 * PAGE, 1, 16), torch.nan) for x in (p.k, p.v)]
    table = torch.tensor([[2, 0, 6, 3, 1, 5, 4]], dtype=torch.int32, device=exact.device) if page_size else None
    rows, start = [], 0
    for chunk in chunks:
        new = slice(start, start + chunk)
        seqlens = torch.tensor([start], dtype=torch.int32, device=exact.device)
        rows.append(
            attention_with_cache(
                p.q[:, new],
                *caches,
                p.rotary,
                seqlens,
                k=p.k[:, new],
                v=p.v[:, new],
                block_table=table,
                return_lse=True,
                impl=exact.impl,
            )
        )
        start += chunk
    got = {"out": torch.cat([out for out, _ in rows], 1), "lse": torch.cat([lse for _, lse in rows], 2)}
    assert max(support.excess(got, full, bound, exact.dtype).values()) <= COEFFICIENT[exact.dtype]


def test_paged_and_contiguous_are_bitwise_identical(target):
    rotary = SCHEMES["hope_rerope_log_n"](16)
    contiguous, paged = (
        cached(target, rotary, (45, 1, 60), 2, seqlen_new=0, page_size=page_size).run(target.impl)
        for page_size in (0, PAGE)
    )
    assert all(torch.equal(a, b) for a, b in zip(contiguous, paged, strict=True))


def test_leftpad_is_bitwise_identical(exact):
    rotary = SCHEMES["hope_rerope_log_n"](16)
    plain, padded = (
        cached(exact, rotary, (45, 30), 2, leftpad=pads, capacity=80).run(exact.impl) for pads in (None, (7, 19))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, padded, strict=True))


# ---- wrong tables


HOSTILE = {
    "negative length": ("cache_seqlens", -5),
    "length beyond": ("cache_seqlens", 1 << 30),
    "largest length": ("cache_seqlens", 2**31 - 1),
    "negative page": ("block_table", -3),
    "huge page": ("block_table", UNUSED),
    "negative pad": ("cache_leftpad", -9),
    "pad beyond": ("cache_leftpad", 1 << 30),
}


@pytest.mark.interpreted(lambda exact, entry, page_size: entry[1] in (1 << 30, -3, UNUSED) and page_size)
@layouts
@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_wrong_entries_affect_only_their_sequence(exact, entry, page_size):
    """validate names them; without it the caches and results of other sequences stay bitwise identical."""
    name, value = entry
    if name == "block_table" and not page_size:
        pytest.skip("a contiguous cache has no table")
    make = lambda: cached(exact, Rotary.rope(16).rectify(9), (30, 20, 40), 2, leftpad=(2, 1, 0), page_size=page_size)  # noqa: E731
    right, wrong = make(), make()
    table = getattr(wrong, name)
    (table[1] if name == "block_table" else table)[1 if name != "block_table" else slice(None)] = value
    with pytest.raises(ValueError, match=rf"{name}: sequence 1\b"):
        wrong.run(exact.impl)
    new = [torch.cat([getattr(p, x)[:, -2:] for p in wrong.sequences]) for x in "kv"]
    q = torch.cat([p.q for p in wrong.sequences])
    out, lse = attention_with_cache(
        q,
        wrong.k_cache,
        wrong.v_cache,
        wrong.sequences[0].rotary,
        wrong.cache_seqlens,
        k=new[0],
        v=new[1],
        block_table=wrong.block_table,
        cache_leftpad=wrong.cache_leftpad,
        return_lse=True,
        impl=exact.impl,
    )
    want_out, want_lse = right.run(exact.impl)
    for b in (0, 2):
        assert torch.equal(out[b], want_out[b]) and torch.equal(lse[b], want_lse[b])
        if page_size:
            pages = right.block_table[b][right.block_table[b] != UNUSED].long()
            assert all(
                torch.equal(x[pages].nan_to_num(7), y[pages].nan_to_num(7))
                for x, y in ((wrong.k_cache, right.k_cache), (wrong.v_cache, right.v_cache))
            )
        else:
            assert torch.equal(wrong.k_cache[b].nan_to_num(7), right.k_cache[b].nan_to_num(7))


def test_two_sequences_on_one_page(exact):
    """Shared pages may be read but not written."""
    c = cached(exact, Rotary.rope(16), (20, 20), 1, page_size=PAGE)
    c.block_table[1] = c.block_table[0]
    with pytest.raises(
        ValueError, match="block_table: sequence 1, entry 1: expected a page that no other entry writes to, got"
    ):
        c.run(exact.impl)


GUARDED = """
import ctypes, interpreting, mmap, sys, torch
from flashrope import Rotary, attention, attention_with_cache

libc, keep = ctypes.CDLL(None, use_errno=True), []

def guarded(x):
    '''A copy of x that ends where a protected page begins.'''
    size = x.numel() * x.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
    keep.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, 0) == 0
    assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE + room), mmap.PAGESIZE, 0) == 0
    buffer = (ctypes.c_char * size).from_address(start + mmap.PAGESIZE + room - size)
    keep.append(buffer)
    return torch.frombuffer(buffer, dtype=x.dtype).view(x.shape).copy_(x)

impl, seqlen_q, head_dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if impl == "triton":
    interpreting.make_faster()
new_empty = torch.Tensor.new_empty


def guarded_empty(x, *shape, **options):
    made = new_empty(x, *shape, **options)
    return guarded(made) if shape[0] else made


torch.Tensor.new_empty = guarded_empty
chunk = seqlen_q > 64
# of a chunk, the 3 * (66 + 63 - 1) rotated keys of 64 bytes fill whole pages of memory
heads, capacity = (1, 160) if chunk else (2, 37)
rotary = Rotary.rope(head_dim).rectify(63 if chunk else 9)
tables = [[0, 1, 2], [3, 4, 0], [1, 2, 3]], [[-1, 99, 2147480000], [-2147483648, 4, 5], [4, 4, 4]]
if chunk:
    tables = [[table * 3 for table in entries] for entries in tables]
for paged in False, True:
    q, k, v = (guarded(torch.randn(3, seqlen_q, heads * group, head_dim)) for group in (2, 1, 1))
    rows = (24 if chunk else 5, 16) if paged else (3, capacity)
    k_cache, v_cache = (guarded(torch.randn(*rows, heads, head_dim)) for _ in "kv")
    for lengths, entries, pads in [
        ([84, 40, 0], 0, None),
        ([-7, 1 << 30, 2**31 - 1], 1, [-5, 1 << 30, 35]),
        ([35, 36, 37], 1, [0, 1, 2]),
        ([2**31 - 1, 36, 37], 0, [1 << 30, -5, 0]),
    ]:
        lists = [lengths, tables[entries] if paged else None, pads]
        seqlens, table, pad = (None if x is None else guarded(torch.tensor(x, dtype=torch.int32)) for x in lists)
        options = dict(block_table=table, cache_leftpad=pad, impl=impl)
        attention_with_cache(q, k_cache, v_cache, rotary, seqlens, k=k, v=v, **options)
    print("done with", "pages" if paged else "rows", flush=True)
if impl == "cpu":
    for lengths in (1, 37), (70, 70), (130, 65):
        tensors = [guarded(torch.randn(1, n, heads, head_dim)).requires_grad_() for n in (*lengths, lengths[1])]
        out = attention(*tensors, rotary, impl=impl)
        torch.autograd.grad(out, tensors, guarded(out.detach()))
if sys.argv[4] == "fault":
    ctypes.string_at(k_cache.data_ptr() + k_cache.numel() * 4, 1)
print("done")
"""
guard_pages = pytest.mark.skipif(not hasattr(os, "fork"), reason="guard pages need mprotect")


@guard_pages
@pytest.mark.parametrize(
    ("impl", "seqlen_q"),
    [("reference", 2), ("cpu", 2)]
    + ([("triton", 2), pytest.param("triton", 66, marks=pytest.mark.slow)] if support.INTERPRETED else []),
)
def test_nothing_outside_the_buffers_is_touched(impl, seqlen_q):
    """With guard pages around every buffer, of a cache of rows and one of pages: a process that touches one dies."""
    run = guarded_run(impl, seqlen_q, 16)
    assert run.returncode == 0 and "done\n" in run.stdout, (run.stdout, run.stderr[-2000:])


@guard_pages
def test_head_dims_that_are_no_whole_vector():
    run = guarded_run("cpu", 2, 24)
    assert run.returncode == 0 and "done\n" in run.stdout, (run.stdout, run.stderr[-2000:])


def guarded_run(impl: str, seqlen_q: int, head_dim: int, fault: str = ""):
    words = [impl, str(seqlen_q), str(head_dim), fault]
    paths = os.pathsep.join([os.path.dirname(support.__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", GUARDED, *words], capture_output=True, text=True, env=environment)


@guard_pages
def test_touching_a_guard_page_kills_the_process():
    run = guarded_run("cpu", 2, 16, fault="fault")
    assert run.returncode < 0 and "done\n" not in run.stdout


# ---- the call
def arguments():
    call = dict(
        q=torch.randn(2, 1, 4, 16),
        k_cache=torch.randn(2, 32, 2, 16),
        v_cache=torch.randn(2, 32, 2, 16),
        rotary=Rotary.rope(16),
        cache_seqlens=torch.tensor([3, 9], dtype=torch.int32),
        k=torch.randn(2, 1, 2, 16),
        v=torch.randn(2, 1, 2, 16),
    )
    return call


def test_opcheck():
    rotary, rope = Rotary.rope(16).rectify(5), Rotary.rope(16).text
    call = arguments()
    cache = call["k_cache"], call["v_cache"]
    layer = flatten(CacheLayer, CacheLayer(*cache))
    tables = flatten(CacheTables, CacheTables(call["cache_seqlens"], new=1))
    for rotated_by in (None, rope):
        torch.library.opcheck(
            torch.ops.flashrope.append_to_cache, (*layer, call["k"], call["v"], *tables, rotated_by, "cpu")
        )
    torch.library.opcheck(
        torch.ops.flashrope.attention_with_cache,
        (call["q"], *layer, *tables, 0, rotary.text, False, True, 0.25, "cpu"),
    )


def test_compile_keeps_the_write():
    """One graph, which writes to the caches as eager mode does."""

    def step(q, k_cache, v_cache, rotary, cache_seqlens, k, v):
        out = attention_with_cache(q, k_cache, v_cache, rotary, cache_seqlens, k=k, v=v)
        return out + 0, k_cache.sum()

    call = arguments()
    other = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for a, b in zip(step(**call), torch.compile(step, fullgraph=True, backend="aot_eager")(**other), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(call["k_cache"], other["k_cache"]) and torch.equal(call["v_cache"], other["v_cache"])


def test_decoding_needs_no_rotated_copy_of_the_cache(composed, monkeypatch):
    """ReRoPE rotates the last window keys only, for any length; the cache itself is never copied."""
    from flashrope.backends.cpu import cached

    rotated = []
    plain = cached.rotate
    monkeypatch.setattr(
        cached, "rotate", lambda x, rotation, rotary: rotated.append(x.shape) or plain(x, rotation, rotary)
    )
    for seqlen in (100, 1000, 30000):
        rotated.clear()
        cache = torch.randn(2, 1, seqlen, 2, 16)
        seqlens = torch.tensor([seqlen], dtype=torch.int32)
        attention_with_cache(torch.randn(1, 1, 4, 16), *cache, Rotary.rope(16).rectify(64), seqlens)
        keys = sum(rows for _, rows, heads, _ in rotated if heads == 2)
        assert 0 < keys <= 64
