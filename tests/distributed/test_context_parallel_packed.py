"""Compares context parallelism over packed sequences with the float64 reference on each sequence by itself, within the
error budget of one device."""

import random as chance
from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
from flashrope import Rotary, attention_varlen
from flashrope.integrations import distributed
from flashrope.integrations.distributed import context_parallel_attention, shard_sequence
from packing import Packing, cu_seqlens, packing
from ranks import alone, first, on_ranks
from small_calls import check_refused
from support import SCHEMES, Target, int32
from test_context_parallel import CHOSEN, both_ways, check_compiled, interpreted, sharded

# {case: (numbers of queries, numbers of keys) of the sequences}. Both totals divide into 2 * 2 and into 2 * 3 chunks.
LENGTHS = {
    # one sequence crosses all ranks; sequences of 3, 5 and 13 rows have no rows on some ranks
    "packed": ((5, 0, 26, 3, 1, 13), (5, 0, 26, 3, 1, 13)),
    "one": ((48,), (48,)),
    "short": ((4,) * 12, (4,) * 12),
    "more_keys": ((5, 0, 26, 3, 1, 13), (9, 4, 30, 10, 0, 7)),  # with fewer keys than queries, some rows see no key
    "rank_without_keys": ((12, 24, 12), (20, 0, 28)),
    "long": ((30, 300, 6), (30, 300, 6)),
}
# The schemes depend on positions, not only on distances. So every key must have its position in its sequence.
MAPS = {
    "self_extend": lambda d: Rotary.rope(d).self_extend(8, 4),
    "dual_chunk": lambda d: Rotary.rope(d).dual_chunk(160, 32),
}
DOUBLE = torch.float64


def packed(name: str, rotary: Rotary, dtype=torch.float32, impl="sdpa", **options) -> Packing:
    return packing(Target(impl, dtype, "cpu"), rotary, *LENGTHS[name], **options)


def holds(count: int, scheme: str, dtype, name: str, impl="sdpa", **options) -> None:
    """Checks the call on the first `count` ranks."""
    if not (group := first(count)):
        return
    p = packed(name, (SCHEMES | MAPS)[scheme](16), dtype, impl, **options)
    p.grad_lse = torch.zeros_like(p.grad_lse)
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(cu_seqlens, p.lengths), strict=True))
    p.check(sharded(group, p, 0, impl=impl, **ends), dtype, f"{name}, {count} ranks: ")


@pytest.mark.parametrize("count", [2, 3])
@both_ways
@on_ranks
def test_forward_and_gradients(count, causal):
    for scheme in CHOSEN:
        holds(count, scheme, DOUBLE, "packed", causal=causal)
    for name in LENGTHS.keys() - {"packed", "long"}:
        holds(count, "hope_rerope_log_n", DOUBLE, name, causal=causal)
    holds(count, "yarn_leaky_local_log_n", torch.float32, "packed", causal=causal)


@pytest.mark.parametrize("count", [2, 3])
@on_ranks
def test_position_maps(count):
    for scheme in MAPS:
        holds(count, scheme, DOUBLE, "long")


@both_ways
@on_ranks
def test_every_scheme(causal):
    for scheme in SCHEMES.keys() - set(CHOSEN):
        holds(3, scheme, DOUBLE, "packed", causal=causal)


@both_ways
@on_ranks
def test_v_of_another_width(causal):
    holds(3, "rerope", DOUBLE, "more_keys", causal=causal, heads=3, heads_kv=3, head_dim_v=24)


@both_ways
@on_ranks
def test_sinks(causal):
    options = dict(causal=causal, heads=3, heads_kv=3, sinks=torch.linspace(-1, 2, 3, dtype=DOUBLE))
    holds(2, "hope_rerope_log_n", DOUBLE, "more_keys", **options)


@pytest.mark.slow
@interpreted
@on_ranks
def test_triton():
    holds(2, "rerope", torch.float32, "packed", "triton")


def seen(lengths, row: int) -> list[int]:
    """Returns which packed keys a packed row must see by the definition of the call."""
    starts_q, starts_k = ([0, *accumulate(counts)] for counts in lengths)
    n = max(n for n in range(len(lengths[0])) if starts_q[n] <= row and lengths[0][n])
    visible = row - starts_q[n] + lengths[1][n] - lengths[0][n] + 1
    return list(range(starts_k[n], starts_k[n] + max(visible, 0)))


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_computes_on_the_keys_that_its_rows_see(seed):
    draw = chance.Random(seed)
    size = draw.randint(1, 6)
    lengths = [[draw.choice((0, 1, 2, 5, 9)) for _ in range(8)] for _ in range(2)]
    lengths = [(*counts, -sum(counts) % (4 * size)) for counts in lengths]
    total = sum(lengths[0])
    if not total:
        return
    starts = distributed._Lengths(*([0, *accumulate(counts)] for counts in lengths))
    places = [(first, first + size) for first in draw.sample(range(0, total, size), 2)]
    call, ranges = distributed._rows_and_keys(starts, places)
    rows = [row for chunk in places for row in range(*chunk)]
    held = [key for bounds in ranges for key in range(*bounds)]
    assert call.q[-1] == len(rows) and call.k[-1] == len(held) and len(call.q) == len(call.k) == len(ranges) + 1
    counts = [[stop - start for start, stop in pairwise(values)] for values in call]
    assert all(counts[0]), "a sequence without a row"
    assert [[held[key] for key in seen(counts, n)] for n in range(len(rows))] == [seen(lengths, row) for row in rows]
    # The keys of a sequence end with the last key that its last row sees.
    for stop, end in zip(call.q[1:], call.k[1:], strict=True):
        assert not counts[1][call.q.index(stop) - 1] or seen(counts, stop - 1)[-1] == end - 1
    keys = torch.arange(sum(lengths[1]) or 4)[None]
    assert distributed._join(keys.chunk(4, 1), ranges)[0].tolist() == held


@on_ranks
def test_what_is_called():
    """A rank makes one call for both of its chunks, over the keys of their sequences. The option `deterministic` is
    passed on to it."""
    if not (group := first(3)):
        return
    p = packed("short", Rotary.rope(16))
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens(p.lengths[0]))
    q, k, v = (shard_sequence(x, group, 0) for x in (p.q, p.k, p.v))
    for deterministic in (True, False, None):
        for causal in (True, False):
            options = dict(causal=causal, deterministic=deterministic)
            with mock.patch.object(distributed, "attention_varlen", wraps=attention_varlen) as called:
                context_parallel_attention(q, k, v, p.rotary, group, **options, **ends)
            (call,) = called.call_args_list
            assert call.kwargs["deterministic"] is deterministic
            if causal:
                assert [x.shape[0] for x in call.args] == [16] * 3  # no sequence begins before its chunk
                assert call.kwargs["max_seqlen_q"] == call.kwargs["max_seqlen_k"] == 4
            with mock.patch.object(distributed, "attention", wraps=distributed.attention) as dense:
                context_parallel_attention(q[None], k[None], v[None], p.rotary, group, **options)
            assert [call.kwargs["deterministic"] for call in dense.call_args_list] == [deterministic] * (1 + causal)


@on_ranks
def test_one_rank_is_plain_attention():
    p = packed("more_keys", Rotary.rope(16))
    rotary, *ends, _, _ = p.arguments
    for causal in (True, False):
        options = dict(causal=causal, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        out = context_parallel_attention(p.q, p.k, p.v, rotary, alone(), **options)
        assert torch.equal(out, attention_varlen(p.q, p.k, p.v, *p.arguments, causal=causal))


@pytest.mark.slow
@on_ranks
def test_compile_breaks_the_graph():
    if not (group := first(2)):
        return
    p = packed("packed", Rotary.rope(16))
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens(p.lengths[0]))

    def loss(q, k, v):
        return context_parallel_attention(2 * q, k, v, p.rotary, group, **ends).square().sum()

    check_compiled(loss, [shard_sequence(x, group, 0) for x in (p.q, p.k, p.v)])


@pytest.mark.parametrize("count", [2, 3])
@on_ranks
def test_refusals(count):
    if not (group := first(count)):
        return
    rope, total, V, T = Rotary.rope(16), 4 * count, ValueError, TypeError
    q, k, v = (torch.zeros(4, heads, 16) for heads in (4, 2, 2))
    cu = int32([0, 3, total])

    def call(q=q, k=k, v=v, cu_q=cu, cu_k=cu, rotary=rope, **options):
        return context_parallel_attention(q, k, v, rotary, group, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)

    ends, of_q = f"to end at {total},", f"which is {count} times the 4 rows of q on this rank, got {{}}"
    chunks = f"two chunks of equal length, of a sequence that divides into 2 * {count} = {2 * count}"
    packed_q, scaled = "(total, heads, head_dim)", rope.dual_chunk(160, 32, length_scale=100)
    for row in (
        (lambda: call(cu_q=int32([0, 3, total - 1])), V, "cu_seqlens_q", ends, of_q.format(total - 1)),
        (lambda: call(cu_q=int32([0, 3, total + 1])), V, "cu_seqlens_q", ends, of_q.format(total + 1)),
        (lambda: call(cu_k=int32([0, 3, total - 1])), V, "cu_seqlens_k", "4 rows of k", f"got {total - 1}"),
        (lambda: call(cu_k=int32([0, 3, total + 1])), V, "cu_seqlens_k", "4 rows of k", f"got {total + 1}"),
        (lambda: call(q=q[:2]), V, "cu_seqlens_q", f"{count} times the 2 rows of q", f"got {total}"),
        (lambda: call(k=k[:3], v=v[:3]), V, "k", chunks, "got 3 positions"),
        (lambda: call(v=v[:2]), V, "v", "(4, 2, 16)", "(2, 2, 16)"),
        (lambda: call(cu_q=cu.long()), T, "cu_seqlens_q", "int32", "got torch.int64"),
        (lambda: call(cu_k=[0, 3, total]), T, "cu_seqlens_k", "an int32 tensor", "got list"),
        (lambda: call(cu_k=cu[None]), V, "cu_seqlens_k", "shape (sequences + 1,)", "(1, 3)"),
        (lambda: call(cu_q=cu.to("meta")), V, "cu_seqlens_q", "device cpu", "meta"),
        (lambda: call(cu_q=int32([1, total])), V, "cu_seqlens_q", "to begin at 0", "got 1"),
        (lambda: call(cu_q=int32([])), V, "cu_seqlens_q", "to begin at 0", "got no value"),
        (lambda: call(cu_k=int32([0, 5, 3, total])), V, "cu_seqlens_k", "non-decreasing", f"[0, 5, 3, {total}]"),
        (lambda: call(cu_k=int32([0, total])), V, "cu_seqlens_k", "shape (3,), the shape of cu_seqlens_q", "got (2,)"),
        (lambda: call(cu_q=None), V, "cu_seqlens_q", "a tensor", "got None"),
        (lambda: call(cu_k=None), V, "cu_seqlens_k", "a tensor", "got None"),
        (lambda: call(q=q[None]), V, "q", packed_q, "got shape (1, 4, 4, 16)"),
        (lambda: call(cu_q=None, cu_k=None), V, "q", "(batch, seqlen, heads, head_dim)", "got shape (4, 4, 16)"),
        (lambda: call(k=k.half()), T, "k", "torch.float32, the dtype of q", "got torch.float16"),
        (lambda: call(deterministic=1), T, "deterministic", "True, False or None", "got 1"),
        (lambda: call(rotary=scaled), V, "rotary", "length_scale is not supported", "got 100"),
    ):
        check_refused(*row)
    call()
