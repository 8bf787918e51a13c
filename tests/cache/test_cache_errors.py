"""Tests wrong arguments of the calls over caches and of the caches themselves. A refused call writes nothing.

The second part tests caches that hold tokens: their lengths and contents stay as they were.
"""

import re

import pytest
import torch
from flashrope import KVCache, PagedKVCache, Rotary
from small_calls import NEW, ONE, ROPE, cached, check_refused, int32, paged, varlen_cached, zeros
from test_cache import SCHEMES, check, contiguous, queries
from test_cache import paged as made
from test_cache import rows as tokens
from test_cache_layers import Both, both, write

T, V, M = TypeError, ValueError, "meta"
TABLE = int32(0, 1, 2, 3).view(2, 2)
SLOTS = torch.arange(9)


def rows(**options):
    sizes = {"batch": 2, "capacity": 32, "heads_kv": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    return KVCache(**sizes | options)


def pages(**options):
    return PagedKVCache(**{"pages": 8, "page_size": 16, "heads_kv": 2, "head_dim": 16, "device": "cpu"} | options)


def caches(*shape):
    return {"k_cache": zeros(*shape), "v_cache": zeros(*shape)}


SCALE = zeros(2, 32, 2)


def codes(dtype=torch.int8, width=16, shape=(2, 32, 2), **changes):
    """Returns the arguments of a quantized cache of zeros."""
    caches = {"k_cache": zeros(*shape, width).to(dtype), "v_cache": zeros(*shape, width).to(dtype)}
    return caches | {"k_scale": zeros(*shape), "v_scale": zeros(*shape)} | changes


# case: (call, error, the argument, what is expected, what was given)
REFUSED = {
    "one length for all": (lambda: cached(cache_seqlens=5), T, "cache_seqlens", "an int32 tensor", "got int"),
    "long lengths": (lambda: cached(cache_seqlens=int32(3, 5).long()), T, "cache_seqlens", "int32", "got torch.int64"),
    "one length of two": (lambda: cached(cache_seqlens=int32(3)), V, "cache_seqlens", "shape (2,)", "got (1,)"),
    "lengths on meta": (lambda: cached(cache_seqlens=int32(3, 5).to(M)), V, "cache_seqlens", "device cpu", "got meta"),
    "paddings of three": (lambda: cached(cache_leftpad=int32(0, 0, 0)), V, "cache_leftpad", "shape (2,)", "got (3,)"),
    "k without v": (lambda: cached(v=None), V, "v", "both or none of k and v", "only k"),
    "query heads as keys": (lambda: cached(k=ONE), V, "k", "shape (2, 1, 2, 16)", "got (2, 1, 4, 16)"),
    "a KVCache as k_cache": (lambda: cached(k_cache=rows()), T, "k_cache", "a tensor", "got KVCache"),
    "an int8 cache without scales": (lambda: cached(**codes(k_scale=None, v_scale=None)), V, "k_scale",
                                     "a float32 tensor of shape (2, 32, 2) for a cache of torch.int8", "got None"),
    "one scale of two": (lambda: cached(**codes(v_scale=None)), V, "v_scale", "a float32 tensor", "got None"),
    "scales beside floats": (lambda: cached(k_scale=SCALE, v_scale=SCALE), V, "k_cache", "int8, because k_scale",
                             "got torch.float32"),
    "scales of a channel": (lambda: cached(**codes(k_scale=zeros(2, 32, 2, 16))), V, "k_scale", "shape (2, 32, 2)",
                            "got shape (2, 32, 2, 16)"),
    "half-precision scales": (lambda: cached(**codes(v_scale=SCALE.half())), V, "v_scale", "a float32 tensor",
                              "got torch.float16"),
    "a number as scale": (lambda: cached(**codes(k_scale=0.5)), V, "k_scale", "a float32 tensor", "got float"),
    "scales on meta": (lambda: cached(**codes(k_scale=SCALE.to(M))), V, "k_scale", "device cpu", "got meta"),
    "a gradient of scales": (lambda: cached(**codes(k_scale=SCALE.clone().requires_grad_())), V, "k_scale",
                             "does not require grad", "torch.no_grad"),
    "int8 of half rows": (lambda: cached(**codes(width=8)), V, "k_cache", "head_dim 16 as in q", "got 8"),
    "4 bits in v_cache": (lambda: cached(**codes(v_cache=zeros(2, 32, 2, 8).byte())), V, "v_cache",
                          "int8, because k_scale or v_scale is given", "got torch.uint8"),
    "codes of three": (lambda: cached(**codes(v_cache=zeros(3, 32, 2, 16).char())), V, "v_cache",
                       "shape (2, 32, 2, 16), the shape of k_cache", "got (3, 32, 2, 16)"),
    "a quantized k_cache": (lambda: cached(k_cache=zeros(2, 32, 2, 16).char()), V, "v_cache", "int8, because",
                            "got torch.float32"),
    "a quantized v_cache": (lambda: cached(v_cache=zeros(2, 32, 2, 16).char()), V, "v_cache", "float16, bfloat16",
                            "k_scale and v_scale"),
    "int8 queries": (lambda: cached(q=ONE.char()), V, "q", "float16, bfloat16", "got torch.int8"),
    "a plan of int8 queries": (lambda: cached(**codes(q=ONE.char())), T, "dtype", "float16, bfloat16",
                               "got torch.int8"),
    "quantized pages on cuda": (lambda: paged(**codes(shape=(8, 16, 2)), impl="cuda"), V, "impl='cuda'",
                                "cannot serve this call: ", ""),
    "scales of packed queries": (lambda: varlen_cached(**codes(k_scale=SCALE[:1])), V, "k_scale", "shape (2, 32, 2)",
                                 "got shape (1, 32, 2)"),
    "a half-precision cache": (lambda: cached(k_cache=zeros(2, 32, 2, 16).half()), T, "k_cache", "torch.float32",
                               "got torch.float16"),
    "a cache of three": (lambda: cached(**caches(3, 32, 2, 16)), V, "k_cache", "batch 2", "got 3"),
    "a shorter v_cache": (lambda: cached(v_cache=zeros(2, 31, 2, 16)), V, "v_cache", "shape (2, 32, 2, 16)",
                          "got (2, 31, 2, 16)"),
    "a gradient": (lambda: cached(q=ONE.clone().requires_grad_()), V, "q, k, v", "do not require grad",
                   "torch.no_grad"),
    "no splits": (lambda: cached(num_splits=0), V, "num_splits", "None or a number from 1 to 256", "got 0"),
    "causal=1": (lambda: cached(causal=1), T, "causal", "True or False", "got 1"),
    "cuda": (lambda: cached(impl="cuda"), V, "impl='cuda'", "cannot serve this call: ", ""),
    # block tables
    "pages without a table": (lambda: paged(block_table=None), V, "k_cache", "need a block_table", "got 8"),
    "pages of 24": (lambda: paged(**caches(8, 24, 2, 16)), V, "k_cache", "pages of 16, 32, 64", "page_size 24"),
    "a long table": (lambda: paged(block_table=TABLE.long()), T, "block_table", "int32", "got torch.int64"),
    "a list as table": (lambda: paged(block_table=[[0], [1]]), T, "block_table", "an int32 tensor", "got list"),
    "one row of a table": (lambda: paged(block_table=TABLE[0]), V, "block_table", "shape (2, max_pages)", "got (2,)"),
    "a table of one": (lambda: paged(block_table=TABLE[:1]), V, "block_table", "shape (2, max_pages)", "got (1, 2)"),
    "a transposed table": (lambda: paged(block_table=TABLE.T), V, "block_table", "a contiguous", ""),
    # contents of lengths and tables
    "a page too far": (lambda: paged(block_table=int32(0, 1, 9, 9).view(2, 2), validate=True), V,
                       "block_table: sequence 1, entry 0", "a page of the cache, 0 to 7", "got 9"),
    "the first page behind the cache": (lambda: paged(block_table=int32(8, 0, 1, 2).view(2, 2), validate=True), V,
                                        "block_table: sequence 0, entry 0", "a page of the cache, 0 to 7", "got 8"),
    "a page for two": (lambda: paged(block_table=int32(0, 1, 0, 1).view(2, 2), validate=True), V,
                       "block_table: sequence 1, entry 0", "no other entry writes to", "got 0"),
    "a full cache": (lambda: cached(cache_seqlens=int32(3, 32), validate=True), V, "cache_seqlens: sequence 1",
                     "at most 31, with room for 1 new keys in 32 slots", "got 32"),
    "a negative length": (lambda: cached(cache_seqlens=int32(-1, 3), validate=True), V, "cache_seqlens: sequence 0",
                          "at least 0", "got -1"),
    "padding beyond": (lambda: cached(cache_leftpad=int32(0, 9), validate=True), V, "cache_leftpad: sequence 1",
                       "0 to 6, its length", "got 9"),
    # packed
    "dense queries": (lambda: varlen_cached(q=ONE), V, "q", "(total, heads, head_dim)", "got shape (2, 1, 4, 16)"),
    "too few queries": (lambda: varlen_cached(q=zeros(7, 4, 16)), V, "cu_seqlens_q",
                        "to end at 7 at most, the rows of q", "got 9"),
    "a small maximum": (lambda: varlen_cached(max_seqlen_q=4), V, "max_seqlen_q", "at least the longest sequence, 5",
                        "got 4"),
    "too few keys": (lambda: varlen_cached(k=zeros(7, 2, 16)), V, "k", "shape (9, 2, 16)", "got (7, 2, 16)"),
    "packed k without v": (lambda: varlen_cached(v=None), V, "v", "both or none of k and v", "only k"),
    "packed and a cache of three": (lambda: varlen_cached(**caches(3, 32, 2, 16)), V, "k_cache",
                                    "batch 2 as in cu_seqlens_q", "got 3"),
    "three lengths": (lambda: varlen_cached(cache_seqlens=int32(0, 0, 0)), V, "cache_seqlens", "shape (2,)",
                      "got (3,)"),
    "no room": (lambda: varlen_cached(cache_seqlens=int32(3, 28), validate=True), V, "cache_seqlens: sequence 1",
                "at most 27, with room for 5 new keys in 32 slots", "got 28"),
    "a gradient of packed queries": (lambda: varlen_cached(q=zeros(9, 4, 16, requires_grad=True)), V, "q, k, v",
                                     "do not require grad", "torch.no_grad"),
    "a float as slot": (lambda: varlen_cached(slot_mapping=SLOTS.float()), T, "slot_mapping", "int32 or int64",
                        "got torch.float32"),
    "too few slots": (lambda: varlen_cached(slot_mapping=SLOTS[:2]), V, "slot_mapping", "shape (9,)", "got (2,)"),
    "a slot too far": (lambda: varlen_cached(slot_mapping=SLOTS + 60, validate=True), V, "slot_mapping: token 4",
                       "a slot below 64", "got 64"),
    "a slot twice": (lambda: varlen_cached(slot_mapping=int32(*[7] * 9), validate=True), V, "slot_mapping: token 1",
                     "a slot of its own", "got 7, the slot of token 0"),
    # caches
    "a dtype by name": (lambda: rows(dtype="bfloat16"), T, "dtype", "float16, bfloat16, float32", "got 'bfloat16'"),
    "a device called gpu": (lambda: rows(device="gpu"), V, "device", "a torch.device, its name or No", "'gpu'"),
    "no capacity": (lambda: rows(capacity=0), V, "capacity", "at least 1", "got 0"),
    "rotary forgotten": (lambda: rows().attend(ONE, NEW, NEW), T, "v", "a tensor", "NoneType"),
    "window_size": (lambda: rows().attend(ONE, ROPE, NEW, NEW, window_size=3), T, "window_size", "rotary.local",
                    "window_size=3"),
    "half-precision q": (lambda: rows().attend(ONE.half(), ROPE, NEW, NEW), T, "q",
                         "torch.float32, the dtype of the cache", "float16"),
    "no such layer": (lambda: rows().layer(2), V, "layer", "at least 0 and at most 0", "got 2"),
    "no pages": (lambda: pages(pages=0), V, "pages", "at least 1", "got 0"),
    "page_size 8": (lambda: pages(page_size=8), V, "page_size", "at least 16 and at most 256", "got 8"),
    "page_size 48": (lambda: pages(page_size=48), V, "page_size", "16, 32, 64, 128 or 256", "got 48"),
    "head_dim 12": (lambda: pages(head_dim=12), V, "head_dim", "a multiple of 8 up to 512", "got 12"),
    "cache_dtype fp8": (lambda: pages(cache_dtype="fp8"), V, "cache_dtype", "None or 'int8'", "got 'fp8'"),
    "cache_dtype int4": (lambda: pages(cache_dtype="int4"), V, "cache_dtype", "None or 'int8'", "got 'int4'"),
    "a torch cache_dtype": (lambda: rows(cache_dtype=torch.int8), V, "cache_dtype", "None or 'int8'", "got torch.int8"),
    "scales to attend": (lambda: rows(cache_dtype="int8").attend(ONE, ROPE, NEW, NEW, k_scale=SCALE), T, "k_scale",
                         "not accepted by attend()", "the cache tracks it"),
    "int8 pages": (lambda: pages(dtype=torch.int8), T, "dtype", "float16, bfloat16, float32 or float64",
                   "got torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "name", "expected", "given"), REFUSED.values(), ids=REFUSED.keys())
def test_the_message_names_the_argument_what_was_expected_and_what_came(call, error, name, expected, given):
    check_refused(call, error, name, expected, given)


@pytest.mark.parametrize("call", [cached, varlen_cached])
def test_axial_schemes_are_refused(call):
    with pytest.raises(ValueError, match="rotary: an axial"):
        call(rotary=Rotary.axial(16))


# ---- caches that hold tokens

ROTARY = SCHEMES["rope"]
ROWS = [  # (call of the cache, q and k, error, message)
    (lambda c, q, k: c.append(k[:2], k[:2]), V, "k: expected shape (3, seqlen_new, 1, 8), got (2, 4, 1, 8)"),
    (lambda c, q, k: c.append(k[0], k[0]), V, "k: expected shape (3, seqlen_new, 1, 8), got (4, 1, 8); packed k and v"),
    (lambda c, q, k: c.append(k, k[:, :3]), V, "v: expected shape (3, 4, 1, 8), got (3, 3, 1, 8)"),
    (lambda c, q, k: c.append(k.float(), k), T, "k: expected torch.float64, the dtype of the cache, got torch.float32"),
    (lambda c, q, k: c.append(k, k.to("meta")), V, "v: expected device"),
    (lambda c, q, k: c.append(None, None), T, "k: expected a tensor, got NoneType"),
    (lambda c, q, k: c.append(k.requires_grad_(), k), V, "k: expected a tensor that does not require grad"),
    (lambda c, q, k: c.append(k.transpose(1, 3).contiguous().transpose(1, 3), k), V, "k: expected a contiguous"),
    (lambda c, q, k: c.append(k, k, impl="flash"), V, "impl: expected None or one of"),
    (lambda c, q, k: c.attend(q[:2], ROTARY, k, k), V, "q: expected shape (3, seqlen_q, heads_q"),
    (lambda c, q, k: c.attend(q, ROTARY, v=k), T, "k: expected a tensor, got NoneType"),
    (lambda c, q, k: c.attend(q, ROTARY, k, k, softmax_scale="1"), T, "softmax_scale: expected a number"),
    (lambda c, q, k: c.attend(q, ROTARY, k, k, block_table=None), T, "block_table"),
    (lambda c, q, k: c.attend(q, Rotary.rope(16), k, k), V, "rotary: expected head_dim 8 as in q, got 16"),
    (lambda c, q, k: c.truncate(1, 6), V, "length of sequence 1: expected at least 0 and at most 5, got 6"),
    (lambda c, q, k: c.truncate(None, [5, 5, -1]), V, "length of sequence 2: expected at least 0 and at most 5"),
    (lambda c, q, k: c.truncate(None, [5, 5]), V, "length: expected a number or a list of 3 numbers, got [5, 5]"),
    (lambda c, q, k: c.reset(3), V, "sequence: expected at least 0 and at most 2, got 3"),
]


@pytest.mark.parametrize("call, error, message", ROWS)
def test_a_filled_contiguous_cache(call, error, message):
    cache = contiguous()
    cache.append(*tokens([[1, 2, 3, 4, 5]] * 3))
    before = cache.k.clone(), cache.v.clone()
    with pytest.raises(error, match=re.escape(message)):
        call(cache, queries(2, 3), tokens([[6, 7, 8, 9]] * 3)[0])
    assert cache.lengths == cache.seqlens.tolist() == [5, 5, 5]
    for now, then in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num())


PAGES = [
    (lambda c, q, k: c.append([0, 7], k, k), V, "sequence 7 was never allocated"),
    (lambda c, q, k: c.append([0, 2], k, k), V, "sequence 2 was freed"),
    (lambda c, q, k: c.append([1, 1], k, k), V, "sequences: expected each sequence once, got sequence 1 2 times"),
    (lambda c, q, k: c.append(0, k, k), T, "sequences: expected a list of numbers"),
    (lambda c, q, k: c.append([0, None], k, k), T, "sequence: expected a number that allocate or fork returned"),
    (
        lambda c, q, k: c.append([0, 1], *[k.repeat(1, 16, 1, 1)] * 2),
        V,
        "sequence 0 has 5 of 60 tokens: no room for 64",
    ),
    (lambda c, q, k: c.attend([0, 1], q[:1], ROTARY, k, k), V, "q: expected shape (2, seqlen_q, heads_q"),
    (lambda c, q, k: c.attend([0, 1], q, Rotary.rope(16), k, k), V, "rotary: expected head_dim 8 as in q, got 16"),
    (lambda c, q, k: c.attend([0, 1], q.requires_grad_(), ROTARY, k, k), V, "not require grad"),
    (lambda c, q, k: c.free(2), V, "sequence 2 was freed"),
    (lambda c, q, k: c.truncate(0, 6), V, "length of sequence 0: expected at least 0 and at most 5, got 6"),
    (lambda c, q, k: c.reserve([0], 1.5), T, "seqlen_new: expected an integer, got 1.5"),
    (lambda c, q, k: c.append([0, 1], k[:, 0], k[:, 0]), V, "8); packed k and v need the list seqlen_new"),
    (lambda c, q, k: c.allocate(61), V, "length: expected at least 0 and at most 60"),
]


@pytest.mark.parametrize("call, error, message", PAGES)
def test_a_filled_paged_cache(call, error, message):
    cache = made(max_seqlen=60)
    for _ in range(2):
        cache.append([cache.allocate()], *tokens([[1, 2, 3, 4, 5]]))
    cache.free(cache.fork(1))
    with pytest.raises(error, match=re.escape(message)):
        call(cache, queries(2, 2), tokens([[6, 7, 8, 9]] * 2)[0])
    check(cache, {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4, 5]})


K = torch.zeros(3, 4, 1, 8, dtype=torch.float64, device=queries(1, 1).device)
ONE_EACH = "leftpad: expected a list of 3 numbers, one per sequence"
LAYERED = [
    (lambda c: c.attend(queries(1, 3), ROTARY), T, "layer: expected an integer, got None"),
    (lambda c: c.attend(queries(1, 3), ROTARY, layer=3), V, "layer: expected at least 0 and at most 2, got 3"),
    (lambda c: c.attend(queries(1, 3), ROTARY, K, K, layer=0), V,
     "k: expected None, because a cache of 3 layers takes k and v in a step"),
    (lambda c: c.append(K, K), V, "k: expected shape (3, sequences, seqlen_new, heads_kv, head_dim), got (3, 4, 1, 8)"),
    (lambda c: c.append(None, K), T, "k: expected a tensor, got NoneType"),
    (lambda c: c.attend(torch.zeros(3, 4, 8, dtype=torch.float64), ROTARY, layer=0), V, "q: expected shape (3, seq"),
    (lambda c: c.step(4, leftpad=[1, 2]), V, ONE_EACH),
    (lambda c: c.step(4, leftpad=3), V, f"{ONE_EACH}, got 3"),
    (lambda c: c.step(4, leftpad=[2, 1, 0]), V, "leftpad of entry 0: expected at least 1 and at most 1, got 2"),
    (lambda c: c.step(4, leftpad=[1, 1, 0]), V, "leftpad of entry 2: expected at least 5 and at most 9, got 0"),
    (lambda c: c.step(4, leftpad=[1, 1, 10]), V, "leftpad of entry 2: expected at least 5 and at most 9, got 10"),
    (lambda c: c.step(-1), V, "seqlen_new: expected at least 0, got -1"),
    (lambda c: c.step([1, 2]), V, "seqlen_new: expected a number, or a list of 3 numbers, one per sequence"),
    (lambda c: c.step([1, 2.0, 1]), T, "seqlen_new of sequence 1: expected an integer, got 2.0"),
    (lambda c: c.step([1, 1, -1]), V, "seqlen_new of sequence 2: expected at least 0"),
    (lambda c: c.step("123"), T, "seqlen_new: expected an integer, got '123'"),
    (lambda c: c.attend(queries(1, 3), ROTARY, layer=0, cache_leftpad=int32(0, 0, 0)), V,
     "cache_leftpad: expected None, because the cache remembers"),
]  # fmt: skip


@both
@pytest.mark.parametrize("call, error, message", LAYERED)
def test_a_filled_cache_of_layers(kind, call, error, message):
    cache = Both(kind)
    with cache.step(5, leftpad=[1, 1, 5]) as step:
        write(step, [[1] * 5] * 3)
    with pytest.raises(error, match=re.escape(message)):
        call(cache)
    assert cache.lengths == [5] * 3 and cache.padding == [1, 1, 5]


def test_padding_without_keys():
    cache = contiguous(layers=1)
    with pytest.raises(TypeError, match="^k: expected a tensor, got NoneType"):
        cache.attend(queries(1, 3), ROTARY, leftpad=[1, 1, 5])


IN_A_STEP = [
    (lambda s: s.append(K, K, layer=0), V, "layer 0: expected k and v once per step"),
    (lambda s: s.append(K[:, :3], K[:, :3], layer=1), V, "k: expected seqlen_new 4, as in the call of step(), got 3"),
    (lambda s: s.append(K, K), T, "layer: expected an integer, got None"),
    (lambda s: s.append(K, K[:, :3], layer=1), V, "v: expected shape (3, 4, 1, 8), got (3, 3, 1, 8)"),
    (lambda s: s.append(K.float(), K, layer=1), T, "k: expected torch.float64, the dtype of the cache"),
    (lambda s: s.attend(queries(1, 2), ROTARY, K, K, layer=1), V, "q: expected shape (3, seqlen_q, heads_q"),
    (lambda s: s.attend(queries(1, 3), ROTARY, v=K, layer=1), T, "k: expected a tensor"),
    (
        lambda s: s.attend(queries(1, 3), ROTARY, K, K, layer=1, num_splits=0),
        V,
        "num_splits: expected None or a number",
    ),
]


ROWS = torch.zeros(5, 1, 8, dtype=torch.float64, device=K.device)
IN_A_RAGGED_STEP = [
    (
        lambda s: s.append(K, K, layer=1),
        V,
        "k: expected shape (5, 1, 8), because seqlen_new is [3, 0, 2], got (3, 4, 1, 8)",
    ),
    (lambda s: s.append(ROWS, ROWS[:4], layer=1), V, "v: expected shape (5, 1, 8), got (4, 1, 8)"),
    (
        lambda s: s.attend(queries(1, 3), ROTARY, ROWS, ROWS, layer=1),
        V,
        "q: expected shape (5, heads_q, head_dim), got (3,",
    ),
    (
        lambda s: s.attend(ROWS[:4], ROTARY, ROWS, ROWS, layer=1),
        V,
        "q: expected shape (5, heads_q, head_dim), got (4, 1, 8)",
    ),
]


@both
@pytest.mark.parametrize("call, error, message", IN_A_RAGGED_STEP)
def test_in_a_ragged_step(kind, call, error, message):
    cache = Both(kind)
    with pytest.raises(error, match=re.escape(message)), cache.step([3, 0, 2]) as step:
        step.append(ROWS, ROWS, layer=0)
        call(step)
    assert cache.lengths == [0] * 3


@both
@pytest.mark.parametrize("call, error, message", IN_A_STEP)
def test_in_a_step(kind, call, error, message):
    cache = Both(kind)
    with pytest.raises(error, match=re.escape(message)), cache.step(4) as step:
        write(step, [[1] * 4] * 3, [0])
        call(step)
    assert cache.lengths == [0] * 3
    assert cache.contiguous or cache.cache.free_pages == 12
