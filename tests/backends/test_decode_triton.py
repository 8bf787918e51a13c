"""Tests the Triton kernels over a cache: which changes leave results bitwise the same, which memory and keys the
kernels access and rotate, and what is compiled again."""

import numpy as np
import pytest
import support
import torch
from caching import PAGE, UNUSED, Cached, same

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from flashrope import Rotary, attention_with_cache
from flashrope.backends.triton import launcher
from flashrope.schemes.lowered import lower
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.cached import decode_keys
from flashrope.triton_kernels.rotating import rotate
from support import int32

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or support.INTERPRETED), reason="needs a GPU or Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16
BLOCK = configs.tile("decode", 80, 32, 2, 2).block_n
CAPACITY, HEADS_Q, HEADS_KV = 192, 3, 1
RECTIFIED = Rotary.rope(32).rectify(40)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def reading(lengths, queries=1, rotary=RECTIFIED, **options) -> Cached:
    """Returns a call that appends nothing."""
    options = {"new": 0, "heads": (HEADS_Q, HEADS_KV), "capacity": CAPACITY, **options}
    return Cached(support.Target("triton", DTYPE, DEVICE), rotary, lengths, queries, **options)


def attend(q, k_cache, v_cache, seqlens, rotary=RECTIFIED, num_splits=2, **options):
    """Returns (out, lse) of queries over keys that are already in the caches."""
    seqlens, options = int32(seqlens, DEVICE), dict(num_splits=num_splits, impl="triton", return_lse=True, **options)
    return attention_with_cache(q, k_cache, v_cache, rotary, seqlens, **options)


def assert_same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b), f"differs by up to {(a.double() - b.double()).abs().max():.1e}"


@pytest.mark.parametrize(
    ("rotary", "causal"),
    [
        (RECTIFIED, True),
        (Rotary.rope(32, interleaved=True).rectify(40, 8), True),
        (Rotary.rope(32, rotary_dim=16), False),
    ],
    ids=["rerope", "leaky", "two-sided"],
)
def test_pages_and_what_no_key_uses_change_no_bit(rotary, causal):
    """Contiguous and paged caches give the same bits, with NaN in every row after the lengths and invalid numbers in
    unused entries."""
    plain = reading((150, 67), rotary=rotary, causal=causal)
    plain.check(num_splits=2)
    for changes in ({"page": PAGE}, {"page": 32}, {"layout": "poisoned"}):
        assert_same_bits(plain.replace(**changes).call(num_splits=2), plain.call(num_splits=2))


@pytest.fixture
def products_by_row(monkeypatch):
    """Makes the rounding of a row independent of its index. In the interpreter tl.dot is numpy's matmul, and OpenBLAS's
    kernels for AVX-512 do not treat all rows alike. Tensor cores do, and so does einsum."""
    if support.INTERPRETED:
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))


@pytest.mark.parametrize(("rotary", "length"), [(RECTIFIED, 131), (Rotary.rope(32).local(4 * BLOCK), 5 * BLOCK + 2)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_chunks_change_no_bit(products_by_row, num_splits, rotary, length):
    """Compares six queries of one call with calls of one and of three queries, bit for bit. A block must belong to the
    same split in all of these calls, although the second scheme's window begins one block later for the last query."""
    q, (k, v) = random(1, 6, HEADS_Q, 32, seed=9).float(), random(2, 1, 6 * BLOCK, HEADS_KV, 32).float()
    whole = attend(q, k, v, [length], rotary, num_splits=num_splits)
    for size in (1, 3):
        pieces = [
            attend(q[:, at : at + size], k, v, [length - 6 + at + size], rotary, num_splits=num_splits)
            for at in range(0, 6, size)
        ]
        assert_same_bits([torch.cat([out for out, _ in pieces], 1), torch.cat([lse for _, lse in pieces], 2)], whole)


CHUNK = configs.DECODE_SEQLEN + 1


@pytest.mark.parametrize("page_size", [0, PAGE])
def test_chunks_in_their_own_kernel(page_size):
    """Shuffled pages, invalid numbers in unused entries, NaN in unused slots, neighbours and padding change no bit of a
    chunk."""
    plain = reading((100, 67), CHUNK, heads=(1, 1))
    assert_same_bits(plain.replace(page=page_size, leftpad=(0, 5)).call(), plain.call())


def test_a_tile_of_keys_that_a_band_reaches_in_part_is_rotated():
    """A tile of keys that a band reaches only in part is rotated. The first query sees its farthest key of the near
    band in the last rows of the tile."""
    window, target = 40, support.Target("triton", torch.float32, DEVICE)
    ahead = window - 1 + configs.ROTATE_ROWS * 3 // 4  # keys before the first query, whose near band begins in tile 0
    rotary = Rotary.rope(32).rectify(window, 8)
    assert len(set(lower(rotary, True).k_stops)) == 2
    Cached(target, rotary, (ahead + CHUNK, ahead + CHUNK + 3), CHUNK, capacity=160).check()


def test_neighbours_and_left_padding_change_no_bit():
    together = reading((20, 130, 0), 2)
    out, lse = together.call(num_splits=2)
    assert not out[2].any() and (lse[2] == float("-inf")).all()
    for b in range(2):
        one = slice(b, b + 1)
        alone = together.replace(lengths=together.lengths[one], sequences=together.problems[one])
        assert_same_bits(alone.call(num_splits=2), (out[one], lse[one]))
    assert_same_bits(together.replace(leftpad=(5, 61, 7)).call(num_splits=2), (out, lse))


@pytest.mark.parametrize("seqlen_q", [2, CHUNK])
def test_hostile_lengths_and_pages_touch_nothing_else(seqlen_q):
    """Lengths beyond the capacity, negative lengths and pages that do not exist leave the bits of other sequences and
    all memory around their pages unchanged."""
    heads, options = (1 if seqlen_q > 2 else HEADS_Q, 1), dict(num_splits=None if seqlen_q > 2 else 1, validate=False)
    right = reading((42, 35, 20), seqlen_q, new=2, page=PAGE, heads=heads, layout="poisoned")
    out, lse = right.call(**options)
    assert not out.isnan().any()
    dropped = tuple(x[-2:] for x in right.visible[1])  # the wrong sequence writes nothing
    right.k_cache[dropped] = right.v_cache[dropped] = torch.nan
    lengths = [(CAPACITY + 5, None), (UNUSED, None), (-UNUSED, None)]
    for length, entry in [*((33, x) for x in (-1, right.pages, UNUSED, -UNUSED)), *lengths]:
        wrong = right.replace()
        wrong.cache_seqlens[1] = length
        if entry is not None:
            wrong.block_table[1, 2] = wrong.block_table[1, 0] = entry
        if length < 0:
            wrong.block_table[1] = UNUSED
        got_out, got_lse = wrong.call(**options)
        assert_same_bits([got_out[::2], got_lse[::2]], [out[::2], lse[::2]])
        rooms = wrong.k_cache._base, right.k_cache._base, wrong.v_cache._base, right.v_cache._base
        assert same(*rooms), f"length {length}, entry {entry}"


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_keys_beyond_the_first_coarse_row_of_the_table(seqlen_q):
    """The table of angles must reach to the end of the cache, not only to the last query."""
    reading((2100,), seqlen_q, Rotary.rope(32).local(100), heads=(1, 1), capacity=2150).check()


def test_new_keys_beyond_the_capacity_are_dropped():
    q, new = random(1, 4, HEADS_Q, 32), random(1, 4, HEADS_KV, 32, seed=3)
    k, v = random(2, 1, CAPACITY, HEADS_KV, 32)
    expected = k.clone()
    expected[:, -2:] = new[:, :2]
    attention_with_cache(q, k, v, RECTIFIED, int32([CAPACITY - 2], DEVICE), k=new, v=new, impl="triton")
    assert torch.equal(k, expected) and torch.equal(v[:, -2:], new[:, :2])


def number(x) -> int:
    """Returns a scalar of the interpreter."""
    return int(x.handle.data.item() if hasattr(x, "handle") else x)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls that only the interpreter makes one by one")
@pytest.mark.parametrize("length", [30, 64, 65, 120, 192])
def test_rotated_keys_are_those_of_the_window(length, monkeypatch):
    """In a step, ReRoPE rotates at most the keys of the window and one more block per sequence, for sequences of any
    length."""
    rotated, original = [], decode_keys.key_cos_sin

    def counted(source, column, *rest):
        rotated.append(min(number(source.keys.length) - number(column), BLOCK))
        return original(source, column, *rest)

    monkeypatch.setattr(decode_keys, "key_cos_sin", counted)
    reading((length,)).call(num_splits=2)
    per_head = sum(rotated) / HEADS_KV
    window = int(RECTIFIED.bands[0].stop)
    assert min(window, length) <= per_head <= window + BLOCK
    if length > 2 * BLOCK:
        assert per_head < length


@pytest.mark.skipif(DEVICE == "cuda", reason="counts stores that only the interpreter makes one by one")
@pytest.mark.parametrize("page_size", [0, PAGE])
def test_every_key_of_a_chunk_is_rotated_once(page_size, monkeypatch):
    """Keys that a rotating band can reach are rotated once, not once per tile of queries. No other key is rotated."""
    places, store = [], rotate.store_pairs

    def counted(view, first, second, rows, FIRST, VARIANT):
        inside = rows.index.handle.data[rows.index.handle.data < number(rows.length) - number(rows.first)]
        places.extend(view.ptr.handle.data.item() + inside.astype("int64") * view.stride_row.handle.data.item() * 2)
        store(view, first, second, rows, FIRST, VARIANT)

    def queries_only(*_):
        pytest.fail("keys rotated in the loop over tiles")

    monkeypatch.setattr(rotate, "store_pairs", counted)
    monkeypatch.setattr(decode_keys, "key_cos_sin", queries_only)
    lengths, window = (150, 70), int(RECTIFIED.bands[0].stop)
    seqlen_q = configs.tile("forward", 80, 32, 2, 2).block_m + 1
    reading(lengths, seqlen_q, page=page_size, heads=(1, 1)).call()
    assert len(places) == len(set(places)) == sum(min(length, seqlen_q + window - 1) for length in lengths)


LAUNCHED = [
    (RECTIFIED, CHUNK - 1, None, 8, ["attention_decode"]),
    (RECTIFIED, CHUNK, None, 8, ["rotate_cached_rows", "attention_chunks"]),
    (RECTIFIED, CHUNK, 1, 8, ["attention_decode"]),
    (Rotary.none(32), CHUNK, None, 8, ["attention_chunks"]),
    (Rotary.rope(32), CHUNK, None, 8, ["rotate_cached_rows", "attention_chunks"]),
    (Rotary.rope(32), CHUNK, None, 9, ["attention_decode"]),  # rotated keys would need more memory than the cache
]


@pytest.mark.parametrize(("rotary", "seqlen_q", "num_splits", "max_pages", "expected"), LAUNCHED)
def test_kernel_that_serves(rotary, seqlen_q, num_splits, max_pages, expected, monkeypatch):
    """Checks which kernels run, and the size of the buffer of rotated keys: under ReRoPE it holds the chunk and the
    window before it, not the whole cache."""
    launches = []
    monkeypatch.setattr(
        launcher, "launch", lambda kernel, grid, *args, **options: launches.append((kernel.__name__, args))
    )
    pages = torch.zeros(16, 1024, HEADS_KV, 32, dtype=DTYPE, device=DEVICE)
    table = torch.zeros(2, max_pages, dtype=torch.int32, device=DEVICE)
    attend(random(2, seqlen_q, HEADS_Q, 32), pages, pages, [3000, 5000], rotary, num_splits, block_table=table)
    assert [name for name, _ in launches if not name.startswith(("combine", "plan"))] == expected
    if expected[0] == "rotate_cached_rows":
        rows = CHUNK + 40 - 1 if rotary is RECTIFIED else 1024 * max_pages
        assert launches[0][1][1].ptr.shape == (1, 2 * rows, HEADS_KV, 32)
