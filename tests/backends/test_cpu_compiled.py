"""Tests the compiled kernels of the CPU backend. All tests with the target ``cpu`` also test their accuracy."""

import dataclasses

import pytest
import support
import torch
from caching import Cached, cached_call, check_needles
from flashrope import Band, Rotary, attention, attention_with_cache
from support import Target

pytestmark = pytest.mark.usefixtures("compiled")
FLOAT, BRAIN = (Target("cpu", dtype, "cpu") for dtype in (torch.float32, torch.bfloat16))
targets = pytest.mark.parametrize("target", [FLOAT, BRAIN], ids=str)
LENGTHS = (1300, 513, 1, 0)  # three chunks; two chunks, of which the second has one key; one key; no key
PADS = (15, 0, 0, 40)  # the first sequence begins in the last slot of a page


def reading(target, rotary, seqlen_q=1, **options) -> Cached:
    """Returns a call that appends nothing. If seqlen_q is larger than 1, the first rows of the last two sequences see
    no key."""
    options = {"new": 0, "leftpad": PADS, "capacity": 1536, **options}
    return Cached(target, rotary, LENGTHS, seqlen_q, **options)


SCHEMES = {
    "rerope": Rotary.rope(64).rectify(600),
    "leaky": Rotary.rope(40).rectify(70, 4.0).log_n(20),
    "hope_interleaved": Rotary.hope(128, 512, interleaved=True),
    "partial_local": Rotary.rope(24, rotary_dim=8).local(600),
    "none": Rotary.none(72),
    "hope": Rotary.hope(64, 512),  # half of the pairs rotate
    "self_extend": Rotary.rope(64).self_extend(588, 7),  # blocks begin anywhere in a group
    "self_extend_far": Rotary.rope(64, rotary_dim=32).self_extend(3, 3).log_n(100),
    "dual_chunk": Rotary.rope(64).dual_chunk(448, 64),  # blocks end anywhere in a chunk
    "gap": dataclasses.replace(Rotary.rope(64), bands=(Band(0, 30, 1.0, 0.0), Band(540, 700, 0.5, 200.0))),
}
PARTIAL = Rotary.rope(96, rotary_dim=32).rectify(40)


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
@targets
def test_chunks_of_keys(target, scheme, seqlen_q):
    """The results of several chunks and blocks of one sequence are combined. Other sequences have one key or no key."""
    reading(target, SCHEMES[scheme], seqlen_q).check()


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("scheme", ["self_extend", "self_extend_far", "dual_chunk"])
def test_needles_at_the_edges_of_maps(scheme, seqlen_q):
    """A single nonzero key is found at its distance if it is next to an edge of a window, a block, a group of
    positions, or a chunk of positions or of keys."""
    keys = 896
    edges = {0, 7, 63, 64, 70, 301, 308, 384, 512, 518, 768, keys - 588, keys - 3, keys}
    check_needles(SCHEMES[scheme], edges, keys, seqlen_q)


def test_more_keys_than_a_table_has_rows():
    """The rotation of a block is composed of rotations by 64 * 64 keys, by 64 keys and by one key."""
    rotary, p = SCHEMES["hope"], support.problem(FLOAT, SCHEMES["hope"], 2, 4200, heads=1, group=1)
    out, lse = attention_with_cache(p.q, p.k, p.v, rotary, support.int32([4200]), return_lse=True, impl="cpu")
    support.check_budget({"out": out, "lse": lse}, p, torch.float32)


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("scheme", ["partial_local", "gap"])
@targets
def test_unseen_keys_are_not_read(target, scheme, seqlen_q, page_size):
    """The keys and values that a query does not see change no bit of its result, even if they are in the query's own
    block."""
    rotary, keys = SCHEMES[scheme], LENGTHS[0]
    expected = reading(target, rotary, seqlen_q, page=page_size).call()
    distances = (keys - seqlen_q + torch.arange(seqlen_q))[:, None] - torch.arange(keys)
    seen = torch.stack([(distances >= band.start) & (distances < band.stop) for band in rotary.bands]).any(0)
    for row in range(seqlen_q):
        c = reading(target, rotary, seqlen_q, page=page_size)
        unseen = tuple(x[~seen[row]] for x in c.visible[0])
        c.k_cache[unseen] = c.v_cache[unseen] = torch.nan
        out, lse = c.call()
        assert torch.equal(out[0, row], expected[0][0, row]) and torch.equal(lse[0, :, row], expected[1][0, :, row])


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_read_and_rounded(dtype, width):
    """If a row sees a single key, its result is the value of that key, for all numbers of the type. NaN stays NaN."""
    v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 1, 1, 64)
    v = torch.nn.functional.pad(v, (0, width - 64))
    zeros, seqlens = torch.zeros_like(v), torch.ones(len(v), dtype=torch.int32)
    for out in (
        attention_with_cache(zeros, zeros, v, Rotary.rope(width), seqlens, impl="cpu"),
        attention(zeros, zeros, v, Rotary.rope(width), impl="cpu"),
    ):
        assert torch.equal(out.isnan(), v.isnan()) and torch.equal(out[~v.isnan()], v[~v.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoding_is_rounded_to_nearest(dtype):
    """The mean of two values, which float32 holds exactly, is rounded to nearest."""
    v = torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    zeros, seqlens = torch.zeros_like(v), torch.tensor([2], dtype=torch.int32)
    out = attention_with_cache(zeros[:, :1], zeros, v, Rotary.rope(64), seqlens, impl="cpu")
    assert torch.equal(out[0, 0], v[0].float().mean(0).to(dtype))


@pytest.mark.parametrize("page_size", [0, 16, 256])
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "shared", "poisoned"])
@targets
def test_layouts_are_bitwise_identical(target, layout, page_size):
    c = reading(target, SCHEMES["rerope"], 2)
    assert all(map(torch.equal, c.replace(layout=layout, page=page_size).call(), c.call()))


def test_neighbors_and_threads_change_nothing():
    c = reading(FLOAT, SCHEMES["leaky"])
    threads, expected = torch.get_num_threads(), c.call()
    q, k, v = (torch.randn(2, 200, 4, 64, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    full = attention(q, k, v, SCHEMES["rerope"], impl="cpu")
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, c.call(), expected))
        assert torch.equal(attention(q, k, v, SCHEMES["rerope"], impl="cpu"), full)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(attention(q[:1], k[:1], v[:1], SCHEMES["rerope"], impl="cpu"), full[:1])
    alone = c.replace(lengths=LENGTHS[:1], leftpad=PADS[:1], sequences=c.problems[:1], layout="heads first")
    assert torch.equal(alone.call()[0], expected[0][:1])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [(130, 130), (65, 200), (200, 65), (64, 64), (1, 129)], ids=str)
@targets
def test_tiles(target, lengths, causal):
    """Results are right for several tiles of queries and blocks of keys, whether or not the last ones are complete.
    They are right for windows shorter and longer than a block, and for channels after the rotated ones."""
    for rotary in (
        SCHEMES["leaky"],
        Rotary.rope(64).rectify(20),
        Rotary.rope(64, interleaved=True).local(100),
        PARTIAL,
    ):
        p = support.problem(target, rotary, *lengths, heads=4, causal=causal, layout="poisoned")
        support.check(target, p)


def test_positions_and_batch_tables():
    """Results are right if explicit positions, and therefore the tables of cos and sin, differ between the
    sequences."""
    positions = torch.rand(2, 70, generator=torch.Generator().manual_seed(2)) * 100
    support.check(FLOAT, support.problem(FLOAT, Rotary.rope(16), 70, batch=2, positions=positions))


def test_bfloat16_is_rounded_to_nearest():
    """The mean of two values, which float32 holds exactly, is rounded to nearest."""
    q, v = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16), support.random((1, 2, 1, 64), BRAIN, 4)
    out = attention(q, q, v, Rotary.rope(64), impl="cpu")
    assert torch.equal(out[0, 1], v[0].float().mean(0).to(torch.bfloat16))


def test_nan_reaches_the_rows_that_see_it():
    q, k, v = (torch.randn(1, 70, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    k[0, 40, 0, 3] = torch.nan
    out = attention(q, k, v, Rotary.rope(16), impl="cpu")
    assert out[0, 40:, 0].isnan().all() and not out[0, :40].isnan().any() and not out[0, :, 1].isnan().any()


def test_other_calls_are_refused_or_chosen(compiled, monkeypatch):
    """impl="cpu" refuses what the compiled kernels do not serve, and says what does. impl=None takes it."""
    monkeypatch.setattr(compiled, "decode", None)
    monkeypatch.setattr(compiled, "forward", None)
    q, k, v = torch.randn(3, 1, 20, 2, 16, dtype=torch.float64)
    assert torch.isfinite(attention(q, k, v, Rotary.rope(16))).all()
    seqlens = torch.tensor([20], dtype=torch.int32)
    assert torch.isfinite(attention_with_cache(q[:, :1], k, v, Rotary.rope(16), seqlens)).all()
    reason = "^impl='cpu' cannot serve this call: .* got torch.float64; use impl='sdpa'"
    with pytest.raises(ValueError, match=reason):
        attention(q, k, v, Rotary.rope(16), impl="cpu")
    with pytest.raises(ValueError, match=reason):
        attention_with_cache(q[:, :1], k, v, Rotary.rope(16), seqlens, impl="cpu")


def test_more_bands_than_the_kernels_take():
    bands = tuple(Band(start, start + 4, 1.0, 0.0) for start in range(0, 20, 4))
    rotary, (q, k, v) = dataclasses.replace(Rotary.rope(16), bands=bands), torch.randn(3, 1, 30, 2, 16)
    torch.testing.assert_close(*(attention(q, k, v, rotary, impl=impl) for impl in (None, "reference")))
    four = dataclasses.replace(rotary, bands=bands[:4])
    torch.testing.assert_close(*(attention(q, k, v, four, impl=impl) for impl in ("cpu", "reference")))
    with pytest.raises(
        ValueError, match="^impl='cpu' cannot serve this call: .* up to 4 bands, got 5; use impl='sdpa'"
    ):
        attention(q, k, v, rotary, impl="cpu")


@pytest.mark.parametrize("name", ["dual chunk", "scattered"])
def test_positions_that_the_kernels_do_not_take(name):
    """Over explicit positions, impl="cpu" refuses maps of positions and short runs, and impl=None takes them."""
    rotary = Rotary.rope(16).dual_chunk(256, 128) if name == "dual chunk" else Rotary.rope(16)
    k, v = torch.randn(2, 1, 200, 2, 16)
    positions = torch.arange(200, dtype=torch.float32)[None] * (3 if name == "scattered" else 1)
    options = dict(slot_positions=positions, positions=positions[:, -1:])
    arguments = torch.randn(1, 1, 4, 16), k, v, rotary, torch.tensor([200], dtype=torch.int32)
    torch.testing.assert_close(*(cached_call(*arguments, **options, impl=impl) for impl in (None, "reference")))
    reason = (
        "maps of positions" if name == "dual chunk" else "sequence 0 has 200 runs of consecutive positions among 200"
    )
    with pytest.raises(ValueError, match=f"^impl='cpu' cannot serve this call: .*{reason}.*; use impl='sdpa'"):
        cached_call(*arguments, **options, impl="cpu")


def test_without_compiled_kernels(without_kernels):
    q, k, v = torch.randn(3, 1, 20, 2, 16)
    torch.testing.assert_close(*(attention(q, k, v, Rotary.rope(16), impl=impl) for impl in (None, "reference")))
    with pytest.raises(ValueError, match=r"^impl='cpu' cannot serve this call: its kernels are not loaded \(.*\); use"):
        attention(q, k, v, Rotary.rope(16), impl="cpu")
