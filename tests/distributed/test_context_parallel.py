"""Compares context parallelism with the float64 reference on the full sequence, within the error budget of one
device."""

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
from ranks import alone, mesh, on_ranks
from small_calls import check_refused
from support import SCHEMES, Problem, Target, check_budget, problem

CHOSEN = ("rope", "hope_paper", "rerope", "leaky", "local", "log_n_clipped")
CHOSEN += ("hope_rerope_log_n", "yarn_leaky_local_log_n")
TYPES = (torch.float32, torch.float64)
SEQLEN = 48  # chunks of 12 and 6, not multiples of any block
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the ranks are on the CPU, where Triton is only interpreted"
)


def sharded(group, p: Problem, dim: int = 1, **options) -> dict[str, torch.Tensor]:
    """Returns the results of a call over the ranks of a group, gathered from all ranks. p: a Problem, or packed
    sequences if dim is 0."""
    leaves = [shard_sequence(x, group, dim).detach().requires_grad_() for x in (p.q, p.k, p.v)]
    if p.sinks is not None:
        leaves.append(p.sinks.detach().requires_grad_())
        options["sinks"] = leaves[3]
    out = context_parallel_attention(*leaves[:3], p.rotary, group, p.causal, **options)
    (*grads,) = torch.autograd.grad(out, leaves, shard_sequence(p.grad_out, group, dim))
    names = ("out", "grad_q", "grad_k", "grad_v")
    gathered = (unshard_sequence(x.detach(), group, dim) for x in (out, *grads[:3]))
    results = dict(zip(names, gathered, strict=True))
    for share in grads[3:]:
        dist.all_reduce(share, group=group if isinstance(group, dist.ProcessGroup) else group.get_group())
        results["grad_sinks"] = share
    return results


def holds(count: int, scheme: str, dtype: torch.dtype, impl: str = "sdpa", sinks: bool = False, **options) -> None:
    p = problem(Target(impl, dtype, "cpu"), SCHEMES[scheme](16), SEQLEN, **options)
    p = p.replace(grad_lse=torch.zeros_like(p.grad_lse))
    if sinks:
        p = p.replace(sinks=torch.linspace(-1, 2, p.q.shape[2], dtype=dtype))
    check_budget(sharded(mesh(count), p, impl=impl), p, dtype, f"{count} ranks, {options}: ")


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
@on_ranks
def test_forward_and_gradients(count, causal, dtype):
    for scheme in CHOSEN:
        holds(count, scheme, dtype, causal=causal, heads=4, group=2, batch=2)
        holds(count, scheme, dtype, causal=causal, heads=2, group=1, batch=1)


@both_ways
@on_ranks
def test_sinks(causal):
    """Three key heads on two ranks give the right results. Calls that are not causal pad the heads and the sinks."""
    holds(2, "rerope", torch.float64, sinks=True, causal=causal, heads=3, group=1)


@both_ways
@on_ranks
def test_v_of_another_width(causal):
    holds(2, "rerope", torch.float64, causal=causal, heads=4, group=2, head_dim_v=24)


@on_ranks
def test_two_byte_types():
    holds(2, "hope_rerope_log_n", torch.float16, heads=4, group=2, causal=False)
    holds(2, "rope", torch.bfloat16, heads=4, group=2)


@pytest.mark.slow
@interpreted
@on_ranks
def test_triton():
    holds(2, "rerope", torch.float32, "triton")


@on_ranks
def test_heads_that_do_not_divide():
    for heads, group in ((6, 2), (3, 1), (4, 4), (8, 4), (12, 2)):
        holds(4, "rerope", torch.float32, causal=False, heads=heads, group=group)


@pytest.mark.parametrize("count", [2, 4])
@on_ranks
def test_order_of_the_parts(count):
    group, rank = mesh(count), mesh(count).get_local_rank()
    x = torch.arange(2 * 8 * count).view(2, -1).double().requires_grad_()
    part = shard_sequence(x, group)
    first, last = x.detach().chunk(2 * count, 1)[rank], x.detach().chunk(2 * count, 1)[2 * count - 1 - rank]
    assert torch.equal(part, torch.cat((first, last), 1))
    assert torch.equal(sequence_positions(8 * count, group), part[0].long())
    full = unshard_sequence(part, group)
    assert torch.equal(full, x)
    # Every rank passes the same gradient, so the gradient of this rank's part is `count` times as large.
    (grad,) = torch.autograd.grad(full, x, x.detach())
    want = torch.zeros_like(x).index_copy(1, sequence_positions(8 * count, group), count * part.detach())
    assert torch.equal(grad, want)
    assert torch.equal(unshard_sequence(shard_sequence(x, group.get_group(), -1), group, -1), x)


def local_inputs():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 8, heads, 16, generator=generator) for heads in (4, 2, 2)]


@on_ranks
def test_one_rank_is_plain_attention():
    q, k, v = local_inputs()
    for causal in (True, False):
        out = context_parallel_attention(q, k, v, Rotary.rope(16), alone(), causal)
        assert torch.equal(out, attention(q, k, v, Rotary.rope(16), causal=causal))
    assert torch.equal(unshard_sequence(shard_sequence(q, alone()), alone()), q)


def check_compiled(loss, tensors, **options) -> None:
    """Checks that a loss has the same gradients under torch.compile as without it."""
    eager, graph = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    want = torch.autograd.grad(loss(*eager), eager)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", **options)(*graph), graph)
    torch.testing.assert_close(got, want)


@pytest.mark.slow
@on_ranks
def test_compile():
    group, rotary = mesh(2), Rotary.rope(16).rectify(5).log_n(10)
    for causal in (True, False):

        def loss(q, k, v):
            return context_parallel_attention(q, k, v, rotary, group, causal).square().sum()

        check_compiled(loss, local_inputs(), fullgraph=True)


@pytest.mark.parametrize("count", [2, 4])
@on_ranks
def test_refusals(count):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rope, (q, k, v), parts = Rotary.rope(16), local_inputs(), f"2 * {count} = {2 * count}"
    table = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group, pair = mesh(count), dist.new_group([0, 1])

    def call(q=q, k=k, v=v, rotary=rope, group=group, **options):
        return context_parallel_attention(q, k, v, rotary, group, **options)

    def shard(x, dim=1):
        return shard_sequence(x, group, dim)

    chunks = f"two chunks of equal length, of a sequence that divides into {parts}"
    spread = DTensor.from_local(q, group, [Shard(1)])
    padded = f"got 9 positions; pad it to {-(-9 // (2 * count)) * 2 * count}"
    for row in (
        (lambda: call(q[:, :7], k[:, :7], v[:, :7]), ValueError, "q", chunks, "got 7 positions"),
        (lambda: call(k=k[:, :6], v=v[:, :6]), ValueError, "k", "batch and seqlen (1, 8) as in q", "(1, 6)"),
        (lambda: call(v=v[:, :6]), ValueError, "v", "(1, 8, 2, 16)", "(1, 6, 2, 16)"),
        (lambda: call(spread), TypeError, "q", "plain tensor", "DTensor"),
        (lambda: call(rotary=Rotary.axial(16)), ValueError, "rotary", "one-dimensional positions", "axial"),
        (lambda: call(causal=1), TypeError, "causal", "expected True or False", "1"),
        (
            lambda: call(rotary=rope.dual_chunk(160, 32, length_scale=100)),
            *(ValueError, "rotary", "length_scale is not supported", "got 100"),
        ),
        (lambda: call(impl="fast"), ValueError, "impl", "expected None or one of", "'fast'"),
        (lambda: call(softmax_scale=float("nan")), ValueError, "softmax_scale", "expected", "nan"),
        (lambda: call(group="cp"), TypeError, "group", "a ProcessGroup, a DeviceMesh or None", "str"),
        (lambda: call(group=table), ValueError, "group", "one dimension", "2"),
        (lambda: shard(torch.zeros(1, 9)), ValueError, "x", f"divides into {parts} chunks", padded),
        (lambda: unshard_sequence(torch.zeros(1, 3), group), ValueError, "x", "two chunks", "got 3"),
        (lambda: shard(torch.zeros(1, 8), 5), ValueError, "dim", "a dimension of x, which has 2", "5"),
        (lambda: shard([1, 2]), TypeError, "x", "a plain tensor", "list"),
    ):
        check_refused(*row)
    if dist.get_rank() > 1:
        check_refused(lambda: call(group=pair), ValueError, "group", "a group that includes this rank", "without it")
    call()


@pytest.mark.parametrize("count", [2, 4])
@on_ranks
def test_inside_pytorchs_context_parallel(count):
    """Inside PyTorch's own context parallelism, a call raises an error. PyTorch's context replaces SDPA, and the CPU
    backend calls SDPA."""
    from torch.distributed.tensor.experimental import context_parallel

    rope, qkv, group = Rotary.rope(16), local_inputs(), mesh(count)
    buffer, theirs = torch.zeros(1, 16 * count), F.scaled_dot_product_attention
    with context_parallel(group, buffers=[buffer], buffer_seq_dims=[1]):
        assert F.scaled_dot_product_attention is not theirs
        with pytest.raises(RuntimeError, match="context_parallel.*scaled_dot_product_attention.*shard_sequence"):
            context_parallel_attention(*qkv, rope, group)
        for impl in ("sdpa", "reference"):
            with pytest.raises(RuntimeError, match="context_parallel.*shard_sequence"):
                attention(*qkv, rope, impl=impl)
    attention(*qkv, rope)
    context_parallel_attention(*qkv, rope, group)


def test_without_torch_distributed():
    q = torch.zeros(1, 8, 2, 16)
    with pytest.raises(RuntimeError, match="group: expected torch.distributed to be initialised.*init_process_group f"):
        context_parallel_attention(q, q, q, Rotary.rope(16))
