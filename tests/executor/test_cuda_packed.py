"""Tests packed queries on the CUDA C++ kernels."""

import pytest
import support
import torch
from caching import PAGE, Cached, page_sizes, same
from flashrope import Rotary, attention_varlen_with_cache
from flashrope.backends import cuda, reference
from flashrope.calls.addresses import token_sequences
from flashrope.calls.cache_tables import CacheLayer, CacheTables, Packed
from flashrope.calls.records import CacheCall
from test_decode import mappings, padded

from .test_cuda_kernels import BF16, FP16, SCHEMES, operators, random

__all__ = ["operators"]  # the fixture that every test here uses

# (new tokens, length including them): a chunk, a step, nothing, a prompt, one token, two steps, the longest chunk
SIZES = ((17, 60), (1, 45), (0, 7), (5, 5), (1, 1), (2, 90), (64, 100))
PADS = (10, 3, 0, 0, 0, 1, 0)


def packed(scheme, sizes, head_dim=64, dtype=BF16, **options) -> Cached:
    target = support.Target("cuda", dtype, "cpu")
    return Cached.packed(target, SCHEMES[scheme](head_dim), sizes, **{"page": PAGE, **options})


@mappings
@page_sizes
@pytest.mark.parametrize("scheme", ["rope", "rerope_local_log_n"])
def test_mixed_batch(scheme, page_size, mapped):
    packed(scheme, SIZES, dtype=(BF16, FP16)[mapped], leftpad=PADS, page=page_size, mapped=mapped).check()


@pytest.mark.parametrize("head_dim", [96, 256])
def test_head_dims(head_dim):
    packed("leaky", ((2, 45), (9, 33)), head_dim).check()


def test_not_causal():
    packed("rerope", ((3, 45), (1, 9)), causal=False).check()


def test_rows_outside_every_sequence():
    """A batch may be padded to the size of a CUDA graph, with rows and sequences that do not exist."""
    batch = packed("rerope", ((1, 30), (6, 66)))
    want_out, want_lse = batch.call()
    before = batch.k_cache.clone()
    out, lse = padded(batch).call(validate=False)
    assert torch.equal(out[:7], want_out) and torch.equal(lse[:, :7], want_lse)
    assert not out[7:].any() and (lse[:, 7:] == -torch.inf).all()
    assert same(batch.k_cache, before)


@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("entry", ["cu_seqlens_q", "cache_seqlens", "block_table", "cache_leftpad", "slot_mapping"])
def test_hostile_tables(entry, hostile):
    """A wrong entry in a table causes no access out of bounds. The results and pages of the first sequence do not
    change."""
    right = packed("rerope", ((3, 40), (1, 20), (2, 66)), leftpad=(2, 1, 0), mapped=entry == "slot_mapping")
    wrong = right.replace()
    getattr(wrong, entry)[-1] = hostile
    if entry == "cu_seqlens_q":  # the check for tables in host memory would refuse it
        new = Packed(wrong.cu_seqlens_q, 3, appends=True)
        tables = CacheTables(wrong.cache_seqlens, wrong.block_table, wrong.cache_leftpad, new)
        layer = CacheLayer(wrong.k_cache, wrong.v_cache)
        cuda.append_to_cache(layer, wrong.k_new, wrong.v_new, tables)
        cuda._attend_packed(wrong.q, layer, CacheCall(right.rotary, True, 0.1, tables, 2))
    else:
        (out, lse), (want_out, want_lse) = wrong.call(validate=False), right.call(validate=False)
        assert torch.equal(out[:3], want_out[:3]) and torch.equal(lse[:, :3], want_lse[:, :3])
        pages = right.block_table[0][:3].long()
        assert same(wrong.k_cache[pages], right.k_cache[pages])


@page_sizes
def test_a_full_cache_drops_what_has_no_slot(page_size):
    """New tokens without a slot are dropped, as in the reference."""
    batch = packed("rope", ((3, 40), (4, 20)), capacity=48, page=page_size)
    batch.cache_seqlens[0] = 46  # two of the three new tokens fit
    new = [random(7, 2, 64, dtype=BF16, seed=i) for i in (7, 8)]
    got, expected = ([x.clone() for x in (batch.k_cache, batch.v_cache)] for _ in range(2))
    tables = CacheTables(batch.cache_seqlens, batch.block_table, new=Packed(batch.cu_seqlens_q, 4, appends=True))
    cuda.append_to_cache(CacheLayer(*got), *new, tables)
    reference.append_to_cache(CacheLayer(*expected), *new, tables)
    assert same(got[0], expected[0], got[1], expected[1])


def test_no_host_reads_a_length(monkeypatch):
    batch = packed("rope", ((1, 30), (6, 66)))
    tables = CacheTables(batch.cache_seqlens, batch.block_table, new=Packed(batch.cu_seqlens_q, 6, appends=True))
    for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a length was read"))
    cuda._token_pages(batch.k_cache, batch.v_cache, 7, tables)
    token_sequences(batch.cu_seqlens_q, 7)


def test_refusals():
    q, cache = torch.zeros(70, 2, 64, dtype=BF16), torch.zeros(1, 100, 1, 64, dtype=BF16)
    starts, lengths = torch.tensor([0, 70], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    new = {"k": q[:, :1], "v": q[:, :1]}
    with pytest.raises(ValueError, match="max_seqlen_q: the CUDA kernels take up to 64 query tokens .* got 70"):
        attention_varlen_with_cache(q, cache, cache.clone(), Rotary.rope(64), starts, lengths, 70, **new, impl="cuda")
    starts[1] = 2
    with pytest.raises(ValueError, match="k_cache: to append packed keys .* capacity is a multiple of 16"):
        attention_varlen_with_cache(q, cache, cache.clone(), Rotary.rope(64), starts, lengths, 2, **new, impl="cuda")
