"""Context parallelism over packed sequences: every sequence compared with the float64 reference on it alone, within the
error budget of one device."""

import random as chance
from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from flashrope import Rotary, attention_varlen
from flashrope.integrations import distributed
from flashrope.integrations.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from ranks import first
from support import COEFFICIENT, SCHEMES, Problem, Target, check_budget, exact_and_bound, excess, int32, random
from test_context_parallel import CHOSEN, refuses

# (queries, keys) of every sequence; both totals divide into 2 * 2 and 2 * 3 chunks
LENGTHS = {
    # one crosses all ranks; of 3, 5 and 13 rows some ranks hold none
    "packed": ((5, 0, 26, 3, 1, 13), (5, 0, 26, 3, 1, 13)),
    "one": ((48,), (48,)),
    "short": ((4,) * 12, (4,) * 12),
    "more_keys": ((5, 0, 26, 3, 1, 13), (9, 4, 30, 10, 0, 7)),  # and fewer: rows that see none
    "rank_without_keys": ((12, 24, 12), (20, 0, 28)),
    "long": ((30, 300, 6), (30, 300, 6)),
}
# Rotations that go by the position itself, not by distances alone: keys must stand where they do in their sequence.
MAPS = {
    "self_extend": lambda d: Rotary.rope(d).self_extend(8, 4),
    "dual_chunk": lambda d: Rotary.rope(d).dual_chunk(160, 32),
}


def cu_seqlens(lengths) -> torch.Tensor:
    return int32([0, *accumulate(lengths)])


def inputs(target: Target, lengths, heads=(4, 2), widths=(16, 16)) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    total_q, total_k = map(sum, lengths)
    shapes = ((total_q, heads[0], widths[0]), (total_k, heads[1], widths[0]), (total_k, heads[1], widths[1]))
    shapes += ((total_q, heads[0], widths[1]),)
    return [random((1, *shape), target, seed)[0] for seed, shape in enumerate(shapes)]


def sharded(group, parts, rotary: Rotary, lengths, sinks=None, **options) -> dict[str, torch.Tensor]:
    """The results of a call over the ranks of group, gathered."""
    *leaves, grad_out = (shard_sequence(x, group, 0) for x in parts)
    leaves = [x.detach().requires_grad_() for x in (*leaves, sinks) if x is not None]
    options = dict(options, cu_seqlens_q=cu_seqlens(lengths[0]), cu_seqlens_k=cu_seqlens(lengths[1]))
    if sinks is not None:
        options["sinks"] = leaves[3]
    out = context_parallel_attention(*leaves[:3], rotary, group, **options)
    grads = torch.autograd.grad(out, leaves, grad_out)
    results = dict(zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads[:3]), strict=True))
    results = {name: unshard_sequence(x, group, 0) for name, x in results.items()}
    for share in grads[3:]:
        dist.all_reduce(share, group=group)
        results["grad_sinks"] = share
    return results


def holds(group, scheme: str, dtype, name: str, causal=True, sinks=None, impl="cpu", **sizes) -> None:
    target, rotary, lengths = Target(impl, dtype, "cpu"), (SCHEMES | MAPS)[scheme](16), LENGTHS[name]
    q, k, v, grad_out = parts = inputs(target, lengths, **sizes)
    got = sharded(group, parts, rotary, lengths, sinks, causal=causal, impl=impl)
    of_sinks = []
    for n, bounds in enumerate(zip(*(pairwise(accumulate(counts, initial=0)) for counts in lengths), strict=True)):
        rows, keys = (slice(*ends) for ends in bounds)
        of_keys = {key: got[key][None, keys] for key in ("grad_k", "grad_v")}
        if rows.start == rows.stop:
            assert not any(x.any() for x in of_keys.values())
            continue
        p = Problem(q[None, rows], k[None, keys], v[None, keys], rotary, causal, sinks=sinks)
        p = p.replace(grad_out=grad_out[None, rows], grad_lse=q.new_zeros(1, q.shape[1], rows.stop - rows.start))
        results = of_keys | {key: got[key][None, rows] for key in ("out", "grad_q")}
        check_budget(results, p, dtype, f"{name}, sequence {n}, {group.size()} ranks: ")
        if sinks is not None:
            of_sinks.append([values["grad_sinks"] for values in exact_and_bound(p)])
    if sinks is not None:
        exact, bound = (sum(values) for values in zip(*of_sinks, strict=True))
        ratio = excess(*({"grad_sinks": x} for x in (got["grad_sinks"], exact, bound)), dtype)["grad_sinks"]
        assert ratio <= COEFFICIENT[dtype], ratio


def every(count: int, cases) -> None:
    """cases: (scheme, dtype, name of LENGTHS, options)."""
    if group := first(count):
        for scheme, dtype, name, options in cases:
            holds(group, scheme, dtype, name, **options)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_forward_and_gradients(ranks, count, causal):
    cases = [(scheme, torch.float64, "packed", dict(causal=causal)) for scheme in CHOSEN]
    cases += [
        ("hope_rerope_log_n", torch.float64, name, dict(causal=causal))
        for name in LENGTHS
        if name not in ("packed", "long")
    ]
    cases += [("yarn_leaky_local_log_n", torch.float32, "packed", dict(causal=causal))]
    ranks(every, count, cases)


@pytest.mark.parametrize("count", [2, 3])
def test_position_maps(ranks, count):
    ranks(every, count, [(scheme, torch.float64, "long", {}) for scheme in MAPS])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_every_scheme(ranks, causal):
    ranks(every, 3, [(scheme, torch.float64, "packed", dict(causal=causal)) for scheme in SCHEMES])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_v_of_another_width(ranks, causal):
    ranks(every, 3, [("rerope", torch.float64, "more_keys", dict(causal=causal, heads=(3, 3), widths=(16, 24)))])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_sinks(ranks, causal):
    options = dict(causal=causal, heads=(3, 3), sinks=torch.linspace(-1, 2, 3, dtype=torch.float64))
    ranks(every, 2, [("hope_rerope_log_n", torch.float64, "more_keys", options)])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are on the CPU, where Triton is only interpreted")
def test_triton(ranks):
    ranks(every, 2, [("rerope", torch.float32, "packed", dict(impl="triton"))])


def seen(lengths, row: int) -> list[int]:
    """The packed keys that a packed row sees, by the definition."""
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
    for stop, end in zip(call.q[1:], call.k[1:], strict=True):  # no key behind the last row's last
        assert not counts[1][call.q.index(stop) - 1] or seen(counts, stop - 1)[-1] == end - 1
    keys = torch.arange(sum(lengths[1]) or 4)[None]
    assert distributed._join(keys.chunk(4, 1), ranges)[0].tolist() == held


def what_is_called(count: int) -> None:
    """deterministic goes through, and both chunks of a rank are one call over the keys of their sequences."""
    group, lengths = first(count), LENGTHS["short"]
    if not group:
        return
    parts = inputs(Target("cpu", torch.float32, "cpu"), lengths)
    cu = cu_seqlens(lengths[0])
    q, k, v = (shard_sequence(x, group, 0) for x in parts[:3])
    for deterministic in (True, False, None):
        for causal in (True, False):
            options = dict(causal=causal, deterministic=deterministic)
            with mock.patch.object(distributed, "attention_varlen", wraps=attention_varlen) as packed:
                context_parallel_attention(q, k, v, Rotary.rope(16), group, **options, cu_seqlens_q=cu, cu_seqlens_k=cu)
            (call,) = packed.call_args_list
            assert call.kwargs["deterministic"] is deterministic
            if causal:
                assert [x.shape[0] for x in call.args] == [48 // count] * 3  # chunks of whole sequences
                assert call.kwargs["max_seqlen_q"] == call.kwargs["max_seqlen_k"] == 4
            with mock.patch.object(distributed, "attention", wraps=distributed.attention) as dense:
                context_parallel_attention(q[None], k[None], v[None], Rotary.rope(16), group, **options)
            assert [call.kwargs["deterministic"] for call in dense.call_args_list] == [deterministic] * (1 + causal)


def test_what_is_called(ranks):
    ranks(what_is_called, 3)


def one_rank() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    lengths = LENGTHS["more_keys"]
    q, k, v, _ = inputs(Target("cpu", torch.float32, "cpu"), lengths)
    cu = [cu_seqlens(counts) for counts in lengths]
    for causal in (True, False):
        options = dict(causal=causal, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
        out = context_parallel_attention(q, k, v, Rotary.rope(16), alone, **options)
        assert torch.equal(out, attention_varlen(q, k, v, Rotary.rope(16), *cu, 26, 30, causal=causal))


def test_one_rank_is_plain_attention(ranks):
    ranks(one_rank)


def compiled(count: int) -> None:
    if not (group := first(count)):
        return
    lengths = LENGTHS["packed"]
    *leaves, _ = (shard_sequence(x, group, 0) for x in inputs(Target("cpu", torch.float32, "cpu"), lengths))
    cu = cu_seqlens(lengths[0])

    def loss(q, k, v):
        out = context_parallel_attention(2 * q, k, v, Rotary.rope(16), group, cu_seqlens_q=cu, cu_seqlens_k=cu)
        return out.square().sum()

    eager, graph = ([x.clone().requires_grad_() for x in leaves] for _ in range(2))
    want = torch.autograd.grad(loss(*eager), eager)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*graph), graph)
    torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_compile_breaks_the_graph(ranks):
    ranks(compiled, 2, seconds=240)


def refusals(count: int) -> None:
    if not (group := first(count)):
        return
    rope, total = Rotary.rope(16), 4 * count
    q, k, v = (torch.zeros(4, heads, 16) for heads in (4, 2, 2))
    cu = int32([0, 3, total])

    def call(q=q, k=k, v=v, cu_q=cu, cu_k=cu, rotary=rope, **options):
        return context_parallel_attention(q, k, v, rotary, group, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)

    for wrong in (total - 1, total + 1):
        with refuses(ValueError, "cu_seqlens_q: expected to end at", f"{total},", f"{count} times the 4 rows of q"):
            call(cu_q=int32([0, 3, wrong]))
        with refuses(ValueError, "cu_seqlens_k: expected to end at", f"{count} times the 4 rows of k", f"got {wrong}"):
            call(cu_k=int32([0, 3, wrong]))
    with refuses(ValueError, "cu_seqlens_q: expected to end at", f"{count} times the 2 rows of q", f"got {total}"):
        call(q=q[:2])
    with refuses(ValueError, "k: ", "two chunks of equal length", f"2 * {count} = {2 * count}", "got 3 positions"):
        call(k=k[:3], v=v[:3])
    with refuses(ValueError, "v: ", "(4, 2, 16)", "(2, 2, 16)"):
        call(v=v[:2])
    with refuses(TypeError, "cu_seqlens_q: expected int32, got torch.int64"):
        call(cu_q=cu.long())
    with refuses(TypeError, "cu_seqlens_k: expected an int32 tensor, got list"):
        call(cu_k=[0, 3, total])
    with refuses(ValueError, "cu_seqlens_k: ", "expected shape (sequences + 1,)", "(1, 3)"):
        call(cu_k=cu[None])
    with refuses(ValueError, "cu_seqlens_q: expected device cpu", "meta"):
        call(cu_q=cu.to("meta"))
    with refuses(ValueError, "cu_seqlens_q: expected to begin at 0, got 1"):
        call(cu_q=int32([1, total]))
    with refuses(ValueError, "cu_seqlens_q: expected to begin at 0, got no value"):
        call(cu_q=int32([]))
    with refuses(ValueError, "cu_seqlens_k: expected non-decreasing values", f"[0, 5, 3, {total}]"):
        call(cu_k=int32([0, 5, 3, total]))
    with refuses(ValueError, "cu_seqlens_k: expected shape (3,) as cu_seqlens_q, got (2,)"):
        call(cu_k=int32([0, total]))
    for missing in ("cu_q", "cu_k"):
        with refuses(ValueError, f"cu_seqlens{missing[2:]}: expected a tensor", "got None"):
            call(**{missing: None})
    with refuses(ValueError, "q: expected (total, heads, head_dim), got shape (1, 4, 4, 16)"):
        call(q=q[None])
    with refuses(ValueError, "q: expected (batch, seqlen, heads, head_dim), got shape (4, 4, 16)"):
        context_parallel_attention(q, k, v, rope, group)
    with refuses(TypeError, "k: expected torch.float32 as in q, got torch.float16"):
        call(k=k.half())
    with refuses(TypeError, "deterministic: expected True, False or None, got 1"):
        call(deterministic=1)
    with refuses(ValueError, "rotary: ", "none with length_scale"):
        call(rotary=rope.dual_chunk(160, 32, length_scale=100))
    call()


@pytest.mark.parametrize("count", [2, 3])
def test_refusals(ranks, count):
    ranks(refusals, count)
