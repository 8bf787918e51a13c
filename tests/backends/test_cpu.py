"""Tests the geometry of PyTorch's kernels on the CPU: how bands are divided into pieces, and caches into blocks."""

import pytest
import support
import torch
from flashrope import KVCache, PagedKVCache, Rotary, attention_with_cache
from flashrope.backends.sdpa.pieces import plan
from flashrope.backends.shared import blocks
from flashrope.backends.shared.host_rotation import KEY_FACTORS, rotation_of_rows

ROPE = Rotary.rope(8)
SCHEMES = [ROPE, ROPE.rectify(5, 2.0).local(40), ROPE.rectify(70, 2.0).local(150)]
SCHEMES += [ROPE.rectify(0)]
SCHEMES += [scheme(window) for window in (1, 2, 3, 16, 63, 64, 65, 100, 1000) for scheme in (ROPE.rectify, ROPE.local)]
LENGTHS = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1), (40, 40), (70, 200), (200, 70), (300, 300), (33, 64)]


@pytest.mark.parametrize("rows", [1, 4000, 5000, 10_000])
@pytest.mark.parametrize("first", [0, 2**20 - 3, 2**20 + 4090, 3 * 2**20 + 1])
def test_tables_of_rows_far_from_the_start(first, rows):
    """The table of cos and sin for positions `first` to `first + rows - 1` is right, also far from position 0."""
    (band,) = ROPE.bands_for(True)
    found = rotation_of_rows(ROPE, band.keys, KEY_FACTORS, first, rows, torch.float64)
    frequencies = torch.tensor(ROPE.frequencies, dtype=torch.float64)
    angle = torch.outer(torch.arange(first, first + rows, dtype=torch.float64), frequencies)
    torch.testing.assert_close(found.cos[:, 0], angle.cos().tile(2), rtol=0, atol=1e-8)


@pytest.mark.parametrize("ahead", [0, 3, 130, -2, -90], ids=lambda ahead: f"ahead{ahead}")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda pair: f"{pair[0]}x{pair[1]}")
def test_pieces_hold_every_visible_pair_once(lengths, causal, ahead):
    """Every visible pair of a query and a key is in exactly one piece. ahead: by how many positions the last
    query follows the last key. The keys may be one block of a longer sequence."""
    seqlen_q, seqlen_k = lengths
    shift = seqlen_k - seqlen_q + ahead
    distance = torch.arange(seqlen_q)[:, None] + shift - torch.arange(seqlen_k)
    for rotary in SCHEMES:
        bands = rotary.bands_for(causal)
        held = {band.queries: torch.zeros(seqlen_q, seqlen_k, dtype=torch.int) for band in bands}
        wanted = {rotation: torch.zeros_like(x) for rotation, x in held.items()}
        for band in bands:
            wanted[band.queries] += (distance >= band.start) & (distance < band.stop)
        for queries, _, pieces in plan(bands, seqlen_q, seqlen_k, shift):
            for piece in pieces:
                local = torch.arange(piece.rows)[:, None] - torch.arange(piece.keys)
                seen = (
                    (local >= 0) & (local < (piece.width or seqlen_q))
                    if piece.causal
                    else torch.ones_like(local, dtype=torch.bool)
                )
                assert seen.any(1).all(), f"a row without keys in {piece}"
                seen = seen.flip(0, 1) if piece.reversed else seen
                for again in range(piece.repeat):
                    row, key = piece.row + again * piece.stride, piece.key + again * piece.stride
                    assert row >= 0 and row + piece.rows <= seqlen_q and key >= 0 and key + piece.keys <= seqlen_k, (
                        piece
                    )
                    held[queries][row : row + piece.rows, key : key + piece.keys] += seen
        for rotation, want in wanted.items():
            assert torch.equal(held[rotation], want), (rotary, rotation)


@pytest.mark.parametrize("seqlen_q", [1, 5, 70])
@pytest.mark.parametrize(
    "scheme", [ROPE, ROPE.rectify(20).log_n(9), ROPE.rectify(20, 2.0), ROPE.local(20), Rotary.none(8)], ids=repr
)
def test_blocks_of_a_cache(monkeypatch, scheme, seqlen_q):
    """Blocks may end inside a page, inside a band, and at the last key of a sequence."""
    monkeypatch.setattr(blocks, "MIN_BLOCK", 24)
    monkeypatch.setattr(blocks, "MAX_BLOCK", 24)
    q, (k, v) = torch.randn(3, seqlen_q, 4, 8), torch.randn(2, 12, 16, 2, 8)
    table = torch.tensor([[3, 4, 5, 6, 7], [0, 2, 9, 8, 1], [11, 10, 9, 2, 0]], dtype=torch.int32)
    contiguous = [x[table].flatten(1, 2) for x in (k, v)]
    for lengths in ([80, 71, 48], [73, 73, 73]):
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        expected = attention_with_cache(q, *contiguous, scheme, seqlens, impl="reference", return_lse=True)
        heads_first = [
            [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches] for caches in (contiguous, (k, v))
        ]
        for caches, block_table in (contiguous, None), ((k, v), table), (heads_first[0], None), (heads_first[1], table):
            result = attention_with_cache(
                q, *caches, scheme, seqlens, block_table=block_table, impl="sdpa", return_lse=True
            )
            for x, y in zip(result, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda **o: KVCache(3, 100, 2, 16, **o), lambda **o: PagedKVCache(3, 32, 2, 16, **o)])
def test_caches_lie_heads_first_on_the_cpu(make):
    cache = make(dtype=torch.float32, device="cpu")
    assert cache.k.shape[2:] == cache.v.shape[2:] == (2, 16)
    assert cache.k.transpose(1, 2).is_contiguous() and cache.v.transpose(1, 2).is_contiguous()
    with torch.device("meta"):  # on any other device the rows come before the heads
        assert make(dtype=torch.float32).k.is_contiguous()


@pytest.mark.parametrize("causal", [True, False])
def test_a_scale_of_0_weighs_all_keys_alike(causal):
    """A scale of 0 gives all visible keys the same weight. torch's kernel would multiply the scores of masked keys,
    -inf, by 0."""
    target = support.Target("sdpa", torch.float32, "cpu")
    for rotary in (Rotary.rope(8).rectify(1), Rotary.rope(8).local(9)):
        support.check(target, support.problem(target, rotary, 70, 80, causal=causal, softmax_scale=0.0))
