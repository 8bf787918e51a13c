"""Packed queries on the CUDA C++ kernels."""

import pytest
import support
import torch
from flashrope import Rotary, attention_varlen_with_cache
from flashrope.backends import cuda, reference
from flashrope.backends.cache_tables import CacheLayer, CacheTables
from flashrope.backends.cache_tables import Packed as PackedQueries
from flashrope.backends.calls import CacheCall
from test_decode_varlen import Packed

from .test_cuda_kernels import BF16, FP16, SCHEMES, operators, random

__all__ = ["operators"]  # the fixture that every test here uses

# (new tokens, length with them): a chunk, a step, nothing, a prompt, one token, two steps, the longest chunk
SIZES = ((17, 60), (1, 45), (0, 7), (5, 5), (1, 1), (2, 90), (64, 100))
PADS = (10, 3, 0, 0, 0, 1, 0)


@pytest.fixture(autouse=True)
def without_a_device(operators, monkeypatch):
    monkeypatch.setattr(cuda, "unsupported_reason", lambda q, cached=False: cuda.unsupported_queries(q))


def target(dtype) -> support.Target:
    return support.Target("cuda", dtype, "cpu")


@pytest.mark.parametrize("placed", [False, True], ids=["appended", "placed"])
@pytest.mark.parametrize("page_size", [0, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("scheme", ["rope", "rerope_local_log_n"])
def test_mixed_batch(scheme, page_size, placed):
    dtype = (BF16, FP16)[placed]
    options = dict(leftpad=PADS, page_size=page_size, placed=placed)
    Packed(target(dtype), SCHEMES[scheme](64), SIZES, **options).check(target(dtype))


@pytest.mark.parametrize("head_dim", [96, 256])
def test_head_dims(head_dim):
    Packed(target(BF16), SCHEMES["leaky"](head_dim), ((2, 45), (9, 33)), page_size=16).check(target(BF16))


def test_not_causal():
    Packed(target(BF16), SCHEMES["rerope"](64), ((3, 45), (1, 9)), page_size=16, causal=False).check(target(BF16))


def test_rows_outside_every_sequence():
    """A batch padded to the size of a CUDA graph: rows and sequences that are not there."""
    batch = Packed(target(BF16), SCHEMES["rerope"](64), ((1, 30), (6, 66)), page_size=16)
    want_out, want_lse = batch.run("cuda")
    packed = batch.packed
    batch.packed = lambda name: torch.cat([packed(name), packed(name)[:5]])
    batch.cu_seqlens_q = torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].expand(3)])
    batch.lengths_before = torch.cat([batch.lengths_before, batch.lengths_before.new_full((3,), 5)])
    batch.block_table = torch.cat([batch.block_table, batch.block_table[:1].expand(3, -1)])
    before = batch.k_cache.clone()
    out, lse = batch.run("cuda", validate=False)
    assert torch.equal(out[:7], want_out) and torch.equal(lse[:, :7], want_lse)
    assert not out[7:].any() and (lse[:, 7:] == -torch.inf).all()
    assert torch.equal(batch.k_cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("hostile", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("entry", ["cu_seqlens_q", "lengths_before", "block_table", "cache_leftpad", "slot_mapping"])
def test_hostile_tables(entry, hostile):
    """The executor watches the bounds; the first sequence and its pages stay as they are."""
    sizes, pads = ((3, 40), (1, 20), (2, 66)), (2, 1, 0)
    make = lambda: Packed(  # noqa: E731
        target(BF16), SCHEMES["rerope"](64), sizes, leftpad=pads, page_size=16, placed=entry == "slot_mapping"
    )
    right, wrong = make(), make()
    getattr(wrong, entry)[-1] = hostile
    if entry == "cu_seqlens_q":  # the check of host memory would refuse it
        packed = PackedQueries(wrong.cu_seqlens_q, 3, appends=True)
        tables = CacheTables(wrong.lengths_before, wrong.block_table, wrong.cache_leftpad, packed)
        layer = CacheLayer(wrong.k_cache, wrong.v_cache)
        cuda.append_to_cache(layer, wrong.packed("k"), wrong.packed("v"), tables)
        cuda._attend_packed(wrong.packed("q"), layer, CacheCall(right.sequences[0].rotary, True, 0.1, tables, 2))
    else:
        out, lse = wrong.run("cuda", validate=False)
        want_out, want_lse = right.run("cuda", validate=False)
        assert torch.equal(out[:3], want_out[:3]) and torch.equal(lse[:, :3], want_lse[:, :3])
        pages = right.block_table[0][:3].long()
        assert torch.equal(wrong.k_cache[pages].nan_to_num(7), right.k_cache[pages].nan_to_num(7))


@pytest.mark.parametrize("page_size", [0, 16], ids=["contiguous", "paged"])
def test_a_full_cache_drops_what_has_no_slot(page_size):
    """As the reference does."""
    batch = Packed(target(BF16), Rotary.rope(64), ((3, 40), (4, 20)), capacity=48, page_size=page_size)
    batch.lengths_before[0] = 46  # two of three fit
    new = [random(7, 2, 64, dtype=BF16, seed=i) for i in (7, 8)]
    got, expected = ([x.clone() for x in (batch.k_cache, batch.v_cache)] for _ in range(2))
    packed = PackedQueries(batch.cu_seqlens_q, 4, appends=True)
    tables = CacheTables(batch.lengths_before, batch.block_table, new=packed)
    cuda.append_to_cache(CacheLayer(*got), *(x[:, : batch.k_cache.shape[2]] for x in new), tables)
    reference.append_to_cache(CacheLayer(*expected), *(x[:, : batch.k_cache.shape[2]] for x in new), tables)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def test_no_host_reads_a_length(monkeypatch):
    batch = Packed(target(BF16), SCHEMES["rope"](64), ((1, 30), (6, 66)), page_size=16)
    packed = PackedQueries(batch.cu_seqlens_q, 6, appends=True)
    tables = CacheTables(batch.lengths_before, batch.block_table, new=packed)
    for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a length was read"))
    cuda._token_pages(batch.k_cache, batch.v_cache, 7, tables)
    cuda._token_sequences(batch.cu_seqlens_q, 7)


def test_refusals():
    q, cache = torch.zeros(70, 2, 64, dtype=BF16), torch.zeros(1, 100, 1, 64, dtype=BF16)
    starts, lengths = torch.tensor([0, 70], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    new = {"k": q[:, :1], "v": q[:, :1]}
    with pytest.raises(ValueError, match="max_seqlen_q: the CUDA kernels take up to 64 query tokens .* got 70"):
        attention_varlen_with_cache(q, cache, cache.clone(), Rotary.rope(64), starts, lengths, 70, **new, impl="cuda")
    starts[1] = 2
    with pytest.raises(ValueError, match="k_cache: to append packed keys .* capacity is a multiple of 16"):
        attention_varlen_with_cache(q, cache, cache.clone(), Rotary.rope(64), starts, lengths, 2, **new, impl="cuda")
