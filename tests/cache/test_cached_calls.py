"""Tests calls over caches, with one sequence per row or packed: wrong tables, memory around the buffers, PyTorch's
compilers."""

import os
import subprocess
import sys

import pytest
import support
import torch
from caching import PAGE, UNUSED, Cached, same
from flashrope import CacheLayer, CacheTables, Rotary, attention_with_cache
from flashrope.calls.records import CacheCall
from flashrope.operators.fields import flatten
from support import int32
from test_rotate import by_complex_numbers

# ---- wrong tables

HOSTILE = {
    "negative length": ("cache_seqlens", -5),
    "largest length": ("cache_seqlens", 2**31 - 1),
    "negative page": ("block_table", -3),
    "huge page": ("block_table", UNUSED),
    "negative pad": ("cache_leftpad", -9),
    "pad beyond": ("cache_leftpad", 1 << 30),
    "huge slot": ("slot_mapping", 2**40),
}
KINDS = {  # queries: the number of queries of each sequence; lengths: the number of its tokens, including the queries
    "contiguous": dict(lengths=(30, 20, 40), queries=2, page=0),
    "paged": dict(lengths=(30, 20, 40), queries=2, page=PAGE),
    "packed": dict(lengths=(30, 20, 80), queries=(1, 4, 66), page=PAGE),
}


@pytest.mark.interpreted(
    lambda exact, entry, kind: entry[1] in (-5, UNUSED, 2**40) if kind == "packed" else entry[1] in (1 << 30, -3)
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_wrong_entries_affect_only_their_sequence(exact, entry, kind):
    """With validate=True, the error names the wrong entry. With validate=False, the caches and results of the other
    sequences stay bitwise identical."""
    name, value = entry
    if name == "block_table" and kind == "contiguous" or name == "slot_mapping" and kind != "packed":
        pytest.skip("the call has no such table")
    right = Cached(exact, Rotary.rope(16).rectify(9), **KINDS[kind], leftpad=(2, 1, 0), mapped=name == "slot_mapping")
    wrong = right.replace()
    getattr(wrong, name)[1] = value
    with pytest.raises(ValueError, match=rf"{name}: (sequence|token) 1\b"):
        wrong.call()
    (out, lse), (want_out, want_lse) = wrong.call(validate=False), right.call()
    for b in (0, 2):
        if kind == "packed":
            rows = right.rows(b)
            assert torch.equal(out[rows], want_out[rows]) and torch.equal(lse[:, rows], want_lse[:, rows])
        else:
            assert torch.equal(out[b], want_out[b]) and torch.equal(lse[b], want_lse[b])
        pages = b if kind == "contiguous" else right.block_table[b][right.block_table[b] != UNUSED].long()
        assert same(wrong.k_cache[pages], right.k_cache[pages], wrong.v_cache[pages], right.v_cache[pages])


def test_two_sequences_on_one_page(exact):
    """Shared pages may be read but not written."""
    c = Cached(exact, Rotary.rope(16), (20, 20), page=PAGE)
    c.block_table[1] = c.block_table[0]
    with pytest.raises(
        ValueError, match="block_table: sequence 1, entry 1: expected a page that no other entry writes to, got"
    ):
        c.call()


def test_negative_slots_are_left_out(exact):
    """A slot of -1 writes nothing. If -1 were used as an index, the call would write before the cache. The cache is the
    end of a larger tensor, so the test can see such a write."""
    c = Cached(exact, Rotary.rope(16), (4, 10), (1, 2), capacity=32, mapped=True)
    whole = torch.zeros(4, *c.k_cache.shape[1:]).to(c.k_cache)
    before, slots = whole.clone(), torch.tensor([3, -1, 42], device=exact.device)
    c.call(k_cache=whole[2:], slot_mapping=slots)
    changed = (whole != before).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
    assert changed.tolist() == [64 + 3, 64 + 42]


# ---- memory around the buffers

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
print("done", flush=True)
ctypes.string_at(k_cache.data_ptr() + k_cache.numel() * 4, 1)
print("alive", flush=True)
"""
guard_pages = pytest.mark.skipif(not hasattr(os, "fork"), reason="guard pages need mprotect")


GUARDED_CALLS = [("cpu", 2, 24)]  # 24 channels do not fill whole vectors
if support.INTERPRETED:
    GUARDED_CALLS += [("triton", 2, 16), pytest.param("triton", 66, 16, marks=pytest.mark.slow)]


@guard_pages
@pytest.mark.parametrize(("impl", "seqlen_q", "head_dim"), GUARDED_CALLS)
def test_nothing_outside_the_buffers_is_touched(impl, seqlen_q, head_dim):
    """A call touches no memory outside the buffers, with a contiguous and with a paged cache. Guard pages surround
    every buffer, and a process that touches one dies."""
    words = [impl, str(seqlen_q), str(head_dim)]
    paths = os.pathsep.join([os.path.dirname(support.__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-c", GUARDED, *words], capture_output=True, text=True, env=environment)
    assert "\ndone\n" in run.stdout and run.returncode < 0, (run.stdout, run.stderr[-2000:])
    assert "alive" not in run.stdout, "the guard pages guard nothing"


# ---- the call


CPU, ROPE = support.Target("cpu", torch.float32, "cpu"), Rotary.rope(16)
CALLS = {
    "dense": lambda: Cached(CPU, ROPE, (4, 10)),
    "appended": lambda: Cached(CPU, ROPE, (4, 11), (1, 2)),
    "mapped": lambda: Cached(CPU, ROPE, (4, 11), (1, 2), mapped=True),
    "quantized": lambda: Cached(CPU, ROPE, (4, 12), 3, cache_dtype="int8"),
    "rotated": lambda: Cached(CPU, ROPE, (4, 12), 3, stored=lambda k: by_complex_numbers(k, ROPE)),
}


WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")


def arguments_of(kind):
    """Returns the public function and its arguments, without NaN."""
    call, given = CALLS[kind]().arguments()
    floats = {name: given[name] for name in given.keys() & set(WRITTEN) if given[name].is_floating_point()}
    return call, given | {name: x.nan_to_num(1.0) for name, x in floats.items()}


@pytest.mark.parametrize("kind", ["dense", "appended", "mapped", "quantized"])
def test_opcheck(kind):
    c, (_, given) = CALLS[kind](), arguments_of(kind)
    tables, operators = flatten(CacheTables, c.parts()[0]), torch.ops.flashrope
    layer = flatten(CacheLayer, CacheLayer(*(given.get(name) for name in WRITTEN)))
    for rotated_by in (None, ROPE.text):
        torch.library.opcheck(operators.append_to_cache, (*layer, given["k"], given["v"], *tables, rotated_by, "cpu"))
    call = CacheCall(Rotary.rope(16).rectify(5), True, 0.25, c.parts()[0])
    torch.library.opcheck(operators.attention_with_cache, (c.q, *layer, *flatten(CacheCall, call), "cpu"))


@pytest.mark.parametrize("kind", CALLS)
def test_compile_keeps_the_write(kind):
    """A call compiles to one graph. The graph writes to the caches and scales as the eager call does."""
    torch._dynamo.reset()
    public, call = arguments_of(kind)

    def step(**call):
        return public(**call) + 0, call["k_cache"].sum()

    one, other = ({name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()} for _ in "12")
    for a, b in zip(step(**one), torch.compile(step, fullgraph=True, backend="aot_eager")(**other), strict=True):
        assert torch.equal(a, b)
    for name in call.keys() & set(WRITTEN):
        assert torch.equal(one[name], other[name]) and not torch.equal(one[name], call[name])


def test_decoding_needs_no_rotated_copy_of_the_cache(monkeypatch):
    """For any length, ReRoPE rotates at most as many keys as its window has. No rotated copy of the whole cache is
    made."""
    from flashrope.backends.sdpa import cached

    rotated, plain = [], cached.rotate
    monkeypatch.setattr(cached, "rotate", lambda x, *rest: rotated.append(x.shape) or plain(x, *rest))
    for seqlen in (100, 1000, 30000):
        rotated.clear()
        cache = torch.randn(2, 1, seqlen, 2, 16)
        attention_with_cache(
            torch.randn(1, 1, 4, 16), *cache, Rotary.rope(16).rectify(64), int32([seqlen]), impl="sdpa"
        )
        assert 0 < sum(rows for _, rows, heads, _ in rotated if heads == 2) <= 64


def test_the_cuda_kernels_refuse_maps(monkeypatch):
    """The CUDA kernels raise an error that names the position maps, for one sequence per row and for packed queries.
    Without a map the same call passes the checks and tries to load the kernels' library."""
    from flashrope.backends import cuda

    class Reached(Exception):
        pass

    def operators():
        raise Reached

    monkeypatch.setattr(cuda, "unsupported_reason", lambda q, cached=False: "")
    monkeypatch.setattr(cuda, "_operators", operators)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
    target, rope = support.Target("cuda", torch.float32, "cpu"), Rotary.rope(16)
    for queries in (1, (1, 20, 4)):
        c = Cached(target, rope, (208, 150, 24), queries, new=0, page=PAGE)
        pytest.raises(Reached, c.call)
        for c.rotary in (rope.self_extend(24, 4), rope.self_extend(20, 5).log_n(50), rope.dual_chunk(160, 32)):
            with pytest.raises(ValueError, match=r"impl='cuda' .* no position maps \(self_extend, dual_chunk\); use "):
                c.call()
