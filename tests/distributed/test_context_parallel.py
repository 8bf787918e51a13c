"""Context parallelism compared with the float64 reference on the full sequence, within the error budget of one
device."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from flashrope import Rotary, attention
from flashrope.integrations.distributed import (
    context_parallel_attention,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from ranks import mesh
from support import COEFFICIENT, SCHEMES, Problem, Target, exact_and_bound, excess, problem

CHOSEN = ("rope", "hope_paper", "rerope", "leaky", "local", "log_n_clipped")
CHOSEN += ("hope_rerope_log_n", "yarn_leaky_local_log_n")
TYPES = (torch.float32, torch.float64)
SEQLEN = 48  # chunks of 12 and 6, not multiples of any block


def sharded(p: Problem, group, impl: str | None = None) -> dict[str, torch.Tensor]:
    """The results of a call over the ranks of group, gathered."""
    leaves = [shard_sequence(x, group).detach().requires_grad_() for x in (p.q, p.k, p.v)]
    sinks = None if p.sinks is None else p.sinks.detach().requires_grad_()
    out = context_parallel_attention(*leaves, p.rotary, group, p.causal, p.softmax_scale, impl, sinks)
    grad_out = shard_sequence(p.grad_out, group)
    of_sinks = {}
    if sinks is not None:
        (share,) = torch.autograd.grad(out, sinks, grad_out, retain_graph=True)
        dist.all_reduce(share, group=group.get_group())
        of_sinks["grad_sinks"] = share
    grads = torch.autograd.grad(out, leaves, grad_out)
    results = zip(("out", "grad_q", "grad_k", "grad_v"), (out, *grads), strict=True)
    return {name: unshard_sequence(x.detach(), group) for name, x in results} | of_sinks


def holds(ranks: int, scheme: str, dtype: torch.dtype, impl: str, sinks: bool = False, **options) -> dict[str, float]:
    p = problem(Target(impl, dtype, "cpu"), SCHEMES[scheme](16), SEQLEN, **options)
    p = p.replace(grad_lse=torch.zeros_like(p.grad_lse))
    if sinks:
        p = p.replace(sinks=torch.linspace(-1, 2, p.q.shape[2], dtype=dtype))
    ratios = excess(sharded(p, mesh(ranks), impl), *exact_and_bound(p), dtype)
    over = {name: ratio for name, ratio in ratios.items() if not ratio <= COEFFICIENT[dtype]}
    assert not over, f"error over u * bound, allowed {COEFFICIENT[dtype]}: {over}, {ranks} ranks, {options}, {p.rotary}"
    return ratios


def every_scheme(count: int, dtype: torch.dtype, causal: bool, schemes) -> dict[str, float]:
    """The largest ratio of each result over schemes, batch sizes and heads."""
    worst: dict[str, float] = {}
    for scheme in schemes:
        for heads, group, batch in ((4, 2, 2), (2, 1, 1)):
            sizes = dict(heads=heads, group=group, batch=batch)
            for name, ratio in holds(count, scheme, dtype, "cpu", causal=causal, **sizes).items():
                worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


@pytest.mark.parametrize(
    ("count", "causal", "dtype"),
    [
        pytest.param(
            count,
            causal,
            dtype,
            id=f"{count}-{'causal' if causal else 'both_ways'}-{dtype}",
            marks=() if dtype == torch.float32 or count == 4 and causal else pytest.mark.slow,
        )
        for dtype in TYPES
        for causal in (True, False)
        for count in (2, 4)
    ],
)
def test_forward_and_gradients(ranks, count, causal, dtype):
    ranks(every_scheme, count, dtype, causal, CHOSEN)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_sinks(ranks, causal):
    """Three key heads on two ranks: those that are not causal are padded, and so are the sinks."""
    options = dict(sinks=True, causal=causal, heads=3, group=1)
    ranks(functools.partial(holds, **options), 2, "rerope", torch.float64, "cpu")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
def test_v_of_another_width(ranks, causal):
    options = dict(causal=causal, heads=4, group=2, head_dim_v=24)
    ranks(functools.partial(holds, **options), 2, "rerope", torch.float64, "cpu")


def local_inputs(count: int, seqlen: int = 8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, seqlen, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    return mesh(count), q, k, v


def low_precision(count: int) -> None:
    holds(count, "hope_rerope_log_n", torch.float16, "cpu", heads=4, group=2, causal=False)
    holds(count, "rope", torch.bfloat16, "cpu", heads=4, group=2)


def test_two_byte_types(ranks):
    ranks(low_precision, 2)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are on the CPU, where Triton is only interpreted")
def test_triton(ranks):
    ranks(holds, 2, "rerope", torch.float32, "triton")


def uneven_heads(count: int) -> None:
    for heads, group in ((6, 2), (3, 1), (4, 4), (8, 4), (12, 2)):
        holds(count, "rerope", torch.float32, "cpu", causal=False, heads=heads, group=group)


def test_heads_that_do_not_divide(ranks):
    ranks(uneven_heads, 4)


def the_order(count: int) -> None:
    group, rank = mesh(count), mesh(count).get_local_rank()
    x = torch.arange(2 * 8 * count).view(2, -1).double().requires_grad_()
    part = shard_sequence(x, group)
    first, last = x.detach().chunk(2 * count, 1)[rank], x.detach().chunk(2 * count, 1)[2 * count - 1 - rank]
    assert torch.equal(part, torch.cat((first, last), 1))
    assert torch.equal(sequence_positions(8 * count, group), part[0].long())
    full = unshard_sequence(part, group)
    assert torch.equal(full, x)
    # every rank passes the same gradient, so this rank's part is count times that
    (grad,) = torch.autograd.grad(full, x, x.detach())
    want = torch.zeros_like(x).index_copy(1, sequence_positions(8 * count, group), count * part.detach())
    assert torch.equal(grad, want)
    assert torch.equal(unshard_sequence(shard_sequence(x, group.get_group(), -1), group, -1), x)


@pytest.mark.parametrize("count", [2, 4])
def test_order_of_the_parts(ranks, count):
    ranks(the_order, count)


def one_rank() -> None:
    _, q, k, v = local_inputs(2)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for causal in (True, False):
        out = context_parallel_attention(q, k, v, Rotary.rope(16), alone, causal)
        assert torch.equal(out, attention(q, k, v, Rotary.rope(16), causal=causal))
    assert torch.equal(unshard_sequence(shard_sequence(q, alone), alone), q)


def test_one_rank_is_plain_attention(ranks):
    ranks(one_rank)


def compiled(count: int) -> None:
    group, q, k, v = local_inputs(count)
    rotary = Rotary.rope(16).rectify(5).log_n(10)
    for causal in (True, False):

        def loss(q, k, v):
            return context_parallel_attention(q, k, v, rotary, group, causal).square().sum()

        eager, graph = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
        want = torch.autograd.grad(loss(*eager), eager)
        got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*graph), graph)
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_compile(ranks):
    ranks(compiled, 2, seconds=240)


@contextlib.contextmanager
def refuses(kind, *words: str):
    with pytest.raises(kind) as error:
        yield
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"


def refusals(count: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    group, q, k, v = local_inputs(count)
    rope = Rotary.rope(16)
    with refuses(ValueError, "q: ", "two chunks of equal length", f"2 * {count} = {2 * count}", "got 7 positions"):
        context_parallel_attention(q[:, :7], k[:, :7], v[:, :7], rope, group)
    with refuses(ValueError, "k: ", "batch and seqlen (1, 8) as in q", "(1, 6)"):
        context_parallel_attention(q, k[:, :6], v[:, :6], rope, group)
    with refuses(ValueError, "v: ", "(1, 8, 2, 16)", "(1, 6, 2, 16)"):
        context_parallel_attention(q, k, v[:, :6], rope, group)
    with refuses(TypeError, "q: ", "plain tensor", "DTensor"):
        context_parallel_attention(DTensor.from_local(q, group, [Shard(1)]), k, v, rope, group)
    with refuses(ValueError, "rotary: ", "axial"):
        context_parallel_attention(q, k, v, Rotary.axial(16), group)
    with refuses(TypeError, "causal: ", "expected True or False", "1"):
        context_parallel_attention(q, k, v, rope, group, causal=1)
    with refuses(ValueError, "rotary: ", "none with length_scale", "got 100"):
        context_parallel_attention(q, k, v, rope.dual_chunk(160, 32, length_scale=100), group)
    with refuses(ValueError, "impl: ", "'fast'"):
        context_parallel_attention(q, k, v, rope, group, impl="fast")
    with refuses(ValueError, "softmax_scale: ", "nan"):
        context_parallel_attention(q, k, v, rope, group, softmax_scale=float("nan"))
    with refuses(TypeError, "group: ", "a ProcessGroup, a DeviceMesh or None", "str"):
        context_parallel_attention(q, k, v, rope, "cp")
    with refuses(ValueError, "group: ", "one dimension", "2"):
        context_parallel_attention(q, k, v, rope, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with refuses(ValueError, "group: ", "not"):
            context_parallel_attention(q, k, v, rope, pair)
    with refuses(
        ValueError, "x: ", f"2 * {count} = {2 * count}", "got 9", f"pad it to {-(-9 // (2 * count)) * 2 * count}"
    ):
        shard_sequence(torch.zeros(1, 9), group)
    with refuses(ValueError, "x: ", "got 3"):
        unshard_sequence(torch.zeros(1, 3), group)
    with refuses(ValueError, "dim: ", "a dimension of x", "2", "5"):
        shard_sequence(torch.zeros(1, 8), group, 5)
    with refuses(TypeError, "x: ", "list"):
        shard_sequence([1, 2], group)
    buffer, theirs = torch.zeros(1, 16 * count), F.scaled_dot_product_attention
    with context_parallel(group, buffers=[buffer], buffer_seq_dims=[1]):
        assert F.scaled_dot_product_attention is not theirs
        with refuses(RuntimeError, "context_parallel", "scaled_dot_product_attention", "shard_sequence"):
            context_parallel_attention(q, k, v, rope, group)
        for impl in ("cpu", "reference"):
            with refuses(RuntimeError, "context_parallel", "shard_sequence"):
                attention(q, k, v, rope, impl=impl)
    attention(q, k, v, rope)
    context_parallel_attention(q, k, v, rope, group)


@pytest.mark.parametrize("count", [2, 4])
def test_refusals(ranks, count):
    ranks(refusals, count)


def test_without_torch_distributed():
    q = torch.zeros(1, 8, 2, 16)
    with refuses(RuntimeError, "group: ", "torch.distributed to be initialised", "init_process_group first"):
        context_parallel_attention(q, q, q, Rotary.rope(16))
