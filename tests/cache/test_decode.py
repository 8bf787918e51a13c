"""A call over a cache computes the last rows of full attention over each sequence, whatever else the cache holds. A
packed batch of one-token steps, chunks and whole prompts gives each sequence the same result as a separate call.
"""

import pytest
import support
import torch
from caching import PAGE, Cached, page_sizes
from flashrope import KVCache, Rotary, attention, attention_varlen_with_cache, attention_with_cache
from support import COEFFICIENT, SCHEMES, int32
from test_needles import needle

MAPS = {
    "self_extend": Rotary.rope(16).self_extend(24, 4),
    "self_extend_odd_log_n": Rotary.rope(16).self_extend(20, 5).log_n(50),
    "dual_chunk": Rotary.rope(16).dual_chunk(160, 32),
}
causalities = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


@pytest.mark.interpreted(
    lambda target, page_size, scheme: (
        target.dtype == torch.float32
        and bool(page_size)
        == (scheme in ("rope_interleaved", "rope_partial", "hope_rerope_log_n", "yarn_leaky_local_log_n"))
    )
)
@page_sizes
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_token(target, page_size, scheme):
    Cached(target, SCHEMES[scheme](16), (45, 1, 64, 22), page=page_size, leftpad=(3, 0, 0, 40)).check()


@pytest.mark.interpreted(lambda exact, page_size, scheme, causal: (scheme == "hope_rerope_log_n") == bool(page_size))
@causalities
@page_sizes
@pytest.mark.parametrize("scheme", ["rope_partial", "leaky", "hope_rerope_log_n", "local"])
def test_several_tokens(exact, page_size, scheme, causal):
    Cached(exact, SCHEMES[scheme](16), (45, 5, 64), 5, page=page_size, leftpad=(3, 0, 0), causal=causal).check()


@pytest.mark.interpreted(lambda exact, scheme: scheme == "leaky")
@pytest.mark.parametrize("scheme", ["rope", "leaky"])
def test_rows_before_the_first_key_that_see_keys_ahead(exact, scheme):
    """Queries before the first key get the right results without a causal mask. Their positions are negative, and the
    tables of cos and sin have no rows for negative positions."""
    Cached(exact, SCHEMES[scheme](16), (3, 45), 9, new=0, heads=(2, 1), causal=False).check()


@pytest.mark.interpreted(lambda target, scheme, seqlen_q: False)
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("scheme", ["none", "rope_interleaved", "hope_zeros", "rerope", "local", "log_n_trained"])
def test_equal_lengths(target, scheme, seqlen_q):
    """A batch of equal lengths gives the right results. If no splits have to be merged, the batch is computed in one
    piece."""
    Cached(target, SCHEMES[scheme](16), (20, 20), seqlen_q, leftpad=(3, 3), capacity=64).check()


@pytest.mark.interpreted(lambda exact, seqlen_q, page_size: seqlen_q == 65 and page_size)
@page_sizes
@pytest.mark.parametrize("seqlen_q", [17, 64, 65, 150])
def test_long_chunks(exact, page_size, seqlen_q):
    rotary = Rotary.rope(16).rectify(21).log_n(20)
    Cached(exact, rotary, (150, 170), seqlen_q, heads=(2, 1), capacity=192, page=page_size).check()


@pytest.mark.interpreted(
    lambda exact, page_size, scheme: (
        bool(page_size) == (scheme != "hope_rerope_log_n")
        and scheme in ("rope_interleaved", "hope_rerope_log_n", "yarn_leaky_local_log_n")
    )
)
@page_sizes
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_of_every_scheme(exact, page_size, scheme):
    """Chunks give the right results under every scheme. More than 64 queries may be served by another kernel. One
    sequence fills the cache, and one starts after padding."""
    Cached(exact, SCHEMES[scheme](16), (112, 66), 66, heads=(2, 1), leftpad=(0, 30), page=page_size).check()


@pytest.mark.interpreted(lambda exact, page_size, scheme: scheme == "hope_rerope_log_n" and page_size)
@page_sizes
@pytest.mark.parametrize("scheme", ["leaky", "hope_rerope_log_n", "local"])
def test_chunks_that_see_keys_ahead(exact, page_size, scheme):
    options = dict(heads=(2, 1), leftpad=(0, 9), page=page_size, causal=False)
    Cached(exact, SCHEMES[scheme](16), (112, 70), 66, **options).check()


HALF = Rotary.rope(64, rotary_dim=32)
PARTS = {  # heads of which at most half of the channels rotate: rotated copies hold only these channels
    "half_rectified": HALF.rectify(21),
    "hope": Rotary.hope(64, 512),
    "behind_interleaved_leaky": Rotary.rope(64, rotary_dim=32, interleaved=True, first_channel=32).rectify(21, 4.0),
    "self_extend": HALF.self_extend(24, 4),
    "between_local": Rotary.rope(96, rotary_dim=32, first_channel=32).local(21),
}


@pytest.mark.interpreted(lambda exact, page_size, scheme: bool(page_size) == (scheme not in ("hope", "between_local")))
@page_sizes
@pytest.mark.parametrize("scheme", PARTS)
def test_chunks_of_heads_of_which_a_part_rotates(exact, page_size, scheme):
    causal = bool(page_size) or scheme == "self_extend"  # maps need a causal mask
    options = dict(heads=(2, 1), leftpad=(0, 9), page=page_size, causal=causal)
    Cached(exact, PARTS[scheme], (90, 70), 66, **options).check()


@pytest.mark.interpreted(lambda exact, page_size: page_size)
@page_sizes
def test_chunks_longer_than_their_sequences(exact, page_size):
    """Chunks may have more queries than their sequence has keys. The sequences have no key, one key or some keys."""
    rotary, options = Rotary.rope(16).rectify(7).log_n(20), dict(heads=(2, 1), leftpad=(0, 5, 0), capacity=80)
    Cached(exact, rotary, (0, 1, 40), 66, new=0, page=page_size, **options).check()


HEADS = [(8, (4, 4)), (40, (6, 3)), (64, (8, 8)), (72, (5, 1)), (96, (32, 4)), (128, (8, 1)), (256, (4, 2))]
HEADS_OF_CHUNKS = [(8, (4, 4)), (40, (6, 3)), (64, (3, 3)), (72, (5, 1)), (128, (4, 1)), (256, (2, 2))]


@pytest.mark.interpreted(
    lambda target, seqlen_q, head_dim, heads: (
        target.dtype == torch.float16 and head_dim in ((128,) if seqlen_q == 65 else (40, 96, 128))
    )
)
@pytest.mark.parametrize(
    ("seqlen_q", "head_dim", "heads"), [(2, *x) for x in HEADS] + [(65, *x) for x in HEADS_OF_CHUNKS]
)
def test_head_dims_and_groups(target, seqlen_q, head_dim, heads):
    rotary = Rotary.hope(head_dim, 100, interleaved=head_dim == 128).rectify(21)
    Cached(target, rotary, (96, 70) if seqlen_q == 65 else (50, 33), seqlen_q, heads=heads, page=PAGE).check()


@page_sizes
def test_lengths_from_nothing_to_full(exact, page_size):
    """Sequences may have no key, one key, a page or the full capacity. Also tests queries without new keys, and more
    queries than keys."""
    rotary = Rotary.rope(16).rectify(7)
    for lengths, seqlen_q in (((0, 1, PAGE, 64), 1), ((0, 2, 64), 4), ((0, 0), 1)):
        Cached(exact, rotary, lengths, seqlen_q, new=0, capacity=64, page=page_size).check()


@pytest.mark.parametrize("leftpad", [None, (0, 0, 70, 1)], ids=["", "leftpad"])
def test_pages_of_whole_blocks(exact, leftpad):
    """Results are right if a page is exactly one block. The keys of a block then lie in one page, unless left padding
    shifts them."""
    lengths = (0, 64, 100, 190)
    Cached(exact, Rotary.rope(16).rectify(7), lengths, new=0, capacity=192, page=64, leftpad=leftpad).check()


@pytest.mark.interpreted(lambda exact, distance, kind: distance == 21)
@pytest.mark.parametrize("distance", [0, 20, 21, 22])
@pytest.mark.parametrize("kind", ["rectify", "local"])
def test_needles_on_the_edge(exact, kind, distance):
    full = needle(exact, getattr(Rotary.rope(16), kind)(21), distance)
    rows = []
    for n in range(1, 4):
        row = {name: getattr(full, name)[:, -n - 1 : -n] for name in ("q", "grad_out")}
        rows.append(full.replace(**row, grad_lse=full.grad_lse[..., -n - 1 : -n], k=full.k[:, :-n], v=full.v[:, :-n]))
    if kind == "rectify" or distance < 21:  # every third row has a needle: a key with nearly all of the probability
        assert max(support.exact_and_bound(p)[0]["lse"].max() for p in rows) > 8
    Cached(exact, full.rotary, [p.k.shape[1] for p in rows], page=PAGE, sequences=rows).check()


@page_sizes
def test_token_by_token_is_one_full_call(exact, page_size):
    """Chunks of several sizes, appended one after another, give the same rows as one call over all tokens."""
    chunks = (13, 1, 1, 7, 66, 1, 1, 3)
    p = support.problem(exact, Rotary.rope(16).rectify(9).log_n(10), sum(chunks))
    full, bound = support.exact_and_bound(p)
    caches = [x.new_full((7, PAGE, 1, 16) if page_size else (1, 7 * PAGE, 1, 16), torch.nan) for x in (p.k, p.v)]
    table = int32([[2, 0, 6, 3, 1, 5, 4]], exact.device) if page_size else None
    rows, start = [], 0
    options = dict(block_table=table, return_lse=True, impl=exact.impl)
    for chunk in chunks:
        q, k, v = (x[:, start : start + chunk] for x in (p.q, p.k, p.v))
        rows.append(attention_with_cache(q, *caches, p.rotary, int32([start], exact.device), k=k, v=v, **options))
        start += chunk
    got = {"out": torch.cat([out for out, _ in rows], 1), "lse": torch.cat([lse for _, lse in rows], 2)}
    assert max(support.excess(got, full, bound, exact.dtype).values()) <= COEFFICIENT[exact.dtype]


def test_pages_and_padding_change_no_bit(target):
    plain = Cached(target, SCHEMES["hope_rerope_log_n"](16), (45, 1, 60), 2, new=0)
    for changes in ({"page": PAGE}, {"leftpad": (7, 19, 0), "capacity": 80}):
        assert all(map(torch.equal, plain.call(), plain.replace(**changes).call()))


# ---- schemes that map positions


# (queries, splits): one query; several; more than the decode kernel takes
@pytest.mark.interpreted(lambda exact, name, queries, splits, pads: name[-1] != "n" and queries == 1 and pads)
@pytest.mark.parametrize("pads", [None, (0, 7, 3)], ids=["", "padded"])
@pytest.mark.parametrize(("queries", "splits"), [(1, 3), (5, None), (20, None)])
@pytest.mark.parametrize("name", MAPS)
def test_position_maps(exact, name, queries, splits, pads):
    """Position maps are right if sequences end in the last, the second and the first chunk of the map."""
    for page in (PAGE,) if pads else (0, PAGE):
        Cached(exact, MAPS[name], (208, 150, 21), queries, heads=(2, 1), page=page, leftpad=pads).check(
            num_splits=splits
        )


@pytest.mark.parametrize("name", MAPS)
def test_blocks_that_begin_within_a_chunk(name, monkeypatch):
    """PyTorch's kernels read a cache in blocks. A block may begin anywhere in a chunk of the position map."""
    monkeypatch.setattr("flashrope.backends.shared.blocks.MIN_BLOCK", 48)
    monkeypatch.setattr("flashrope.backends.shared.blocks.MAX_BLOCK", 48)
    target = support.Target("sdpa", torch.float32, "cpu")
    Cached(target, MAPS[name], (208, 150, 21), 5, new=0, heads=(2, 1)).check()


@pytest.mark.parametrize("name", MAPS)
def test_a_step_is_the_last_row_of_attention(name):
    """Steps over a growing cache give the rows of one attention call, also across the ends of a position map's chunks.
    The test uses the default backend."""
    q, k, v = (support.random((1, 290, 1, 16), support.Target("cpu", torch.float32, "cpu"), seed) for seed in range(3))
    cache = KVCache(1, 300, 1, 16, dtype=torch.float32, device="cpu")
    whole = attention(q, k, v, MAPS[name])
    step = 0
    for stop in (120, 127, 128, 129, 255, 256, 257, 290):
        out = cache.attend(q[:, step:stop], MAPS[name], k[:, step:stop], v[:, step:stop])
        torch.testing.assert_close(out, whole[:, step:stop], rtol=1e-4, atol=1e-5)
        step = stop


# ---- packed queries

# (query rows, tokens including them): a chunk, a step, nothing, a long prompt, a short one, two steps, a chunk
MIXED = ((66, 112), (1, 45), (0, 7), (70, 70), (5, 5), (1, 1), (1, 90), (65, 100))
mappings = pytest.mark.parametrize("mapped", [False, True], ids=["appended", "mapped"])


@pytest.mark.interpreted(
    lambda exact, scheme, page_size, mapped: scheme == "hope_rerope_log_n" and bool(page_size) == mapped
)
@mappings
@page_sizes
@pytest.mark.parametrize("scheme", ["none", "rope_interleaved", "hope_rerope_log_n", "leaky", "yarn_leaky_local_log_n"])
def test_mixed_batch(exact, scheme, page_size, mapped):
    pads = (10, 3, 0, 0, 2, 0, 1, 0)
    Cached.packed(exact, SCHEMES[scheme](16), MIXED, leftpad=pads, page=page_size, mapped=mapped).check()


@pytest.mark.interpreted(lambda target, mapped: target.dtype == torch.float16)
@mappings
def test_mixed_batch_of_every_type(target, mapped):
    Cached.packed(target, SCHEMES["hope_rerope_log_n"](40), MIXED, page=PAGE, mapped=mapped).check()


@pytest.mark.interpreted(lambda exact, heads, head_dim: heads == (20, 1))
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((6, 3), 72), ((20, 1), 16)])
def test_packed_head_dims_and_groups(exact, heads, head_dim):
    sizes = ((2, 45), (66, 80), (1, 3))
    Cached.packed(exact, Rotary.hope(head_dim, 100).rectify(21), sizes, heads=heads, page=PAGE).check()


SIZES = {"steps": ((1, 45), (1, 9)), "short": ((3, 45), (64, 64), (0, 3)), "long": ((70, 70),)}


@pytest.mark.interpreted(lambda exact, causal, sizes: causal == (len(sizes) > 1))
@causalities
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_packed_batches_of_one_kind(exact, causal, sizes):
    Cached.packed(exact, Rotary.rope(16).rectify(21).log_n(20), sizes, page=PAGE, causal=causal).check()


@pytest.mark.interpreted(lambda exact, name: False)
@pytest.mark.parametrize("name", MAPS)
def test_packed_position_maps(exact, name):
    sizes = ((1, 208), (19, 150), (4, 21))
    Cached.packed(exact, MAPS[name], sizes, heads=(2, 1), page=PAGE).check()


@pytest.mark.interpreted(lambda exact, num_splits: num_splits == 3)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_given_splits_are_bitwise_identical_to_each_sequence_alone(exact, num_splits):
    sizes, rotary = ((66, 112), (1, 45), (0, 7), (5, 5), (1, 90)), SCHEMES["hope_rerope_log_n"](16)
    batch = Cached.packed(exact, rotary, sizes, mapped=True, page=PAGE, leftpad=(10, 3, 0, 2, 1))
    out, lse = batch.call(num_splits=num_splits)
    options = dict(return_lse=True, impl=exact.impl, num_splits=num_splits)
    for b in (0, 1, 4):
        own = slice(b, b + 1)
        tables = dict(block_table=batch.block_table[own], cache_leftpad=batch.cache_leftpad[own], **options)
        caches = batch.k_cache, batch.v_cache, rotary, batch.cache_seqlens[own]
        alone = attention_with_cache(batch.q[None, batch.rows(b)], *caches, **tables)
        assert torch.equal(alone[0][0], out[batch.rows(b)]) and torch.equal(alone[1][0], lse[:, batch.rows(b)])


@pytest.mark.interpreted(lambda exact: True)
def test_steps_are_split_beside_prompts(exact):
    """With this capacity Triton splits the keys of sequences with few queries. The buffer of partial results has rows
    only for the queries of such sequences."""
    sizes = ((64, 80), (1, 500), (70, 90), (1, 9), (2, 400))
    Cached.packed(exact, Rotary.rope(16).rectify(21), sizes, heads=(2, 1), capacity=512, page=PAGE).check()


@pytest.mark.interpreted(lambda exact: True)
def test_rows_outside_every_sequence(exact):
    """A batch may be padded to the size of a CUDA graph, with rows and sequences that do not exist."""
    batch = Cached.packed(exact, Rotary.rope(16).rectify(9), ((1, 30), (66, 66)), page=PAGE)
    want_out, want_lse = batch.call()
    out, lse = padded(batch).call(validate=False)
    assert torch.equal(out[:67], want_out) and torch.equal(lse[:, :67], want_lse)
    assert not out[67:].any() and (lse[:, 67:] == float("-inf")).all()


def padded(batch: Cached) -> Cached:
    """Appends five query rows that belong to no sequence, and three sequences without queries."""
    batch.q, batch.k_new, batch.v_new = (torch.cat([x, x[:5]]) for x in (batch.q, batch.k_new, batch.v_new))
    batch.cu_seqlens_q = torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].expand(3)])
    batch.cache_seqlens = torch.cat([batch.cache_seqlens, batch.cache_seqlens.new_full((3,), 5)])
    batch.block_table = torch.cat([batch.block_table, batch.block_table[:1].expand(3, -1)])
    return batch


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_sequences_that_share_no_run(impl):
    """Empty calls work: no sequence, no query row, no key."""
    caches, rotary = torch.randn(2, 3, 16, 1, 16), Rotary.rope(16)
    q = torch.randn(2, 1, 16)
    out = attention_varlen_with_cache(q, *caches[:, :0], rotary, int32([0]), int32([]), 0, impl=impl)
    assert out.shape == (2, 1, 16) and not out.any()
    options = dict(return_lse=True, impl=impl)
    out, lse = attention_varlen_with_cache(q, *caches, rotary, int32([0, 1, 2, 2]), int32([0, 0, 0]), 1, **options)
    assert not out.any() and (lse == float("-inf")).all()


def test_rows_behind_sequences_of_equal_length(exact):
    q, k, v = (support.random((1, 3, heads, 16), exact, heads)[0] for heads in (4, 2, 2))
    caches = torch.zeros(2, 2, 16, 2, 16, device=exact.device)
    starts, seqlens = (int32(x, exact.device) for x in ([0, 1, 2], [3, 5]))
    options = dict(k=k, v=v, return_lse=True, impl=exact.impl)
    out, lse = attention_varlen_with_cache(q, *caches, Rotary.rope(16), starts, seqlens, 1, **options)
    assert out.shape == q.shape and lse.shape == (4, 3)
    assert out[:2].all() and not out[2].any() and lse[:, 2].isneginf().all() and lse[:, :2].isfinite().all()
