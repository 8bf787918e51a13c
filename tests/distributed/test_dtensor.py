"""Tests DTensor inputs: compares results with those of plain tensors, and counts the collectives."""

import copy
import itertools
import sys

import pytest
import torch
from flashrope import Rotary, attention, attention_varlen
from flashrope.backends import cpu
from flashrope.calls.records import AttentionCall, Kept, KeptShapes
from flashrope.integrations import distributed  # noqa: F401  registers the rules
from flashrope.operators import autograd
from flashrope.operators.fields import flatten
from flashrope.operators.torch_library import OPERATORS
from ranks import mesh, on_ranks
from support import SCHEMES
from test_context_parallel import interpreted
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HEADS, BATCH = Shard(2), Shard(0)


def inputs(batch=4, seqlen=20, heads=8, heads_kv=4):
    """Returns q, k, v, and gradients of the output and of lse, all float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [*((batch, seqlen, h, 16) for h in (heads, heads_kv, heads_kv, heads)), (batch, heads, seqlen)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def call_and_gradients(call, tensors, grad_out, grad_lse):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = call(*leaves)
    results, grads = ((out, lse), (grad_out, grad_lse)) if grad_lse is not None else ((out,), (grad_out,))
    return (out.detach(), lse.detach(), *torch.autograd.grad(results, leaves, grads))


def compare(device_mesh, placements, call, tensors, lse_placements=None, grad_lse=True, collectives=0, bits=True):
    """Checks that a call on DTensors gives the results of plain tensors, and that the results have the placements of
    the inputs."""
    *tensors, grad_out, of_lse = tensors
    of_lse = of_lse if grad_lse else None
    want = call_and_gradients(call, tensors, grad_out, of_lse)
    spread = [distribute_tensor(x, device_mesh, placements) for x in (*tensors, grad_out)]
    of_lse = distribute_tensor(of_lse, device_mesh, lse_placements) if grad_lse else None
    with CommDebugMode() as counted:
        got = call_and_gradients(call, spread[:3], spread[3], of_lse)
    if collectives is not None:
        assert counted.get_total_counts() == collectives, counted.get_comm_counts()
    for name, x, y in zip(("out", "lse", "grad_q", "grad_k", "grad_v"), got, want, strict=True):
        assert isinstance(x, DTensor), name
        if collectives == 0:
            expected = lse_placements if name == "lse" and lse_placements else placements
            assert tuple(x.placements) == tuple(expected), f"{name}: {x.placements}"
        full = x.full_tensor()
        if bits:
            assert torch.equal(full, y), f"{name}: off by {(full - y).abs().max()}"
        else:
            torch.testing.assert_close(full, y, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("count", [2, 4])
@on_ranks
def test_heads_and_batch(count):
    places = ((HEADS, Shard(1)), (BATCH, Shard(0)), (Replicate(), Replicate()))
    for scheme, causal, (place, of_lse) in itertools.product(("rerope", "log_n_clipped"), (True, False), places):

        def call(*qkv, scheme=scheme, causal=causal):
            return attention(*qkv, SCHEMES[scheme](16), causal=causal, return_lse=True)

        for grad_lse in (True, False):
            compare(mesh(count), [place], call, inputs(), [of_lse], grad_lse)


@on_ranks
def test_sinks():
    """Gradients of q, k, v and of the sinks are those of plain tensors. The sinks are sharded like the heads."""
    q, k, v, grad_out, _ = inputs()
    leaves = [x.detach().requires_grad_() for x in (q, k, v, torch.linspace(-9, 2, q.shape[2]))]
    rotary = SCHEMES["rerope"](16)
    want = torch.autograd.grad(attention(*leaves[:3], rotary, sinks=leaves[3]), leaves, grad_out)
    for placement, of_sinks in ((HEADS, Shard(0)), (BATCH, Replicate())):
        placements = [placement] * 3 + [of_sinks]
        spread = [distribute_tensor(x, mesh(2), [p]).requires_grad_() for x, p in zip(leaves, placements, strict=True)]
        out = attention(*spread[:3], rotary, sinks=spread[3])
        grads = torch.autograd.grad(out, spread, distribute_tensor(grad_out, mesh(2), [placement]))
        assert out.placements == (placement,)
        for got, expected in zip(grads, want, strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)


class _Keeping:
    """Changes the CPU backend so that it saves rotated keys for the backward, as Triton's backend does. The backward
    checks these keys."""

    unsupported_reason = staticmethod(cpu.unsupported_reason)

    @staticmethod
    def kept_shapes(k, call):
        return KeptShapes(
            (2, k.shape[0] * k.shape[1], *k.shape[2:]) if any(call.rotary.frequencies) else (0,),
            (0,) if call.positions is None else (2, *k.shape[:2], 2, 8),
        )

    @classmethod
    def forward(cls, q, k, v, call):
        out, lse, _ = cpu.forward(q, k, v, call)
        return out, lse, cls.kept(k, call)

    @classmethod
    def backward(cls, grad_out, grad_lse, q, k, v, out, lse, kept, call):
        assert all(map(torch.equal, kept, cls.kept(k, call)))
        return cpu.backward(grad_out, grad_lse, q, k, v, out, lse, kept, call)

    @classmethod
    def kept(cls, k, call):
        shapes = cls.kept_shapes(k, call)
        rotated_k = k.flatten(0, 1).expand(shapes.rotated_k).clone() if len(shapes.rotated_k) > 1 else k.new_empty(0)
        if call.positions is None:
            return Kept(rotated_k, k.new_empty(0, dtype=torch.float32))
        return Kept(rotated_k, call.positions[..., None, None].expand(shapes.table).float().clone())


@on_ranks
def test_rotated_keys():
    """Two schemes with inputs of equal shapes are not confused if only one of them saves rotated keys for the
    backward."""
    sys.modules["flashrope.backends.keeping"] = _Keeping
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases = (
        (mesh(4), [HEADS], [Shard(1)]),
        (mesh(4), [BATCH], [Shard(0)]),
        (both, [BATCH, HEADS], [Shard(0), Shard(1)]),
        (mesh(2), [Replicate()], [Replicate()]),
    )
    given = torch.rand(4, 20, generator=torch.Generator().manual_seed(7)) * 20
    schemes = ((Rotary.rope(16), None), (Rotary.none(16), None), (Rotary.rope(16), given))
    schemes += ((Rotary.rope(16).rectify(5, 2.0), None),)
    for device_mesh, placements, of_lse in cases:
        of_positions = [x if x == BATCH else Replicate() for x in placements]
        for rotary, positions in schemes:
            spread = None if positions is None else distribute_tensor(positions, device_mesh, of_positions)

            def call(q, k, v):
                p = spread if isinstance(q, DTensor) else positions
                call = AttentionCall(rotary, True, 0.25, p, None, None, 20, 20, True)
                return OPERATORS.attention(q, k, v, *flatten(AttentionCall, call), "keeping")[:2]

            compare(device_mesh, placements, call, inputs(), of_lse)
    compare(
        mesh(2), [BATCH], lambda q, k, v: attention(q, k, v, rotary, return_lse=True), inputs(batch=3), grad_lse=False
    )
    odd = [distribute_tensor(x, mesh(2), [BATCH]) for x in inputs(batch=3)[:3]]
    call = AttentionCall(rotary, True, 0.25, None, None, None, 20, 20, True)
    out, _, rotated_k, _ = OPERATORS.attention(*odd, *flatten(AttentionCall, call), "keeping")
    # 2 ranks cannot share 3 sequences equally. rotated_k, which holds the rows of all sequences, would be divided
    # inside the second sequence.
    assert out.placements == rotated_k.placements == (Replicate(),)
    whole = [distribute_tensor(x, mesh(2), [Replicate()]) for x in inputs(batch=3)[:3]]
    positions = distribute_tensor(given[:3], mesh(2), [BATCH])  # the only tensor that is sharded over the batch
    call = call._replace(positions=positions)
    out, _, rotated_k, _ = OPERATORS.attention(*whole, *flatten(AttentionCall, call), "keeping")
    assert out.placements == rotated_k.placements == (Replicate(),)


@pytest.mark.slow
@interpreted
@on_ranks
def test_triton():
    def call(*qkv):
        return attention(*qkv, Rotary.rope(16), return_lse=True, impl="triton")

    for placement, of_lse in ((HEADS, Shard(1)), (BATCH, Shard(0))):
        compare(mesh(2), [placement], call, inputs(batch=2, seqlen=4, heads=2, heads_kv=2), [of_lse])


@on_ranks
def test_mesh_of_two_dimensions():
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rotary = SCHEMES["hope_rerope_log_n"](16)
    for placements, of_lse in (
        ((BATCH, HEADS), (Shard(0), Shard(1))),
        ((HEADS, HEADS), (Shard(1), Shard(1))),
        ((Replicate(), HEADS), (Replicate(), Shard(1))),
    ):
        compare(both, placements, lambda q, k, v: attention(q, k, v, rotary, return_lse=True), inputs(), of_lse)


@on_ranks
def test_uneven_parts_are_gathered():
    """The inputs are gathered first if there are fewer key heads than ranks, if the batch is odd, or if the sequence is
    sharded."""
    rotary = SCHEMES["rerope"](16)

    def call(q, k, v):
        return attention(q, k, v, rotary, return_lse=True)

    for count, placement, sizes in (
        (4, HEADS, {"heads_kv": 2}),
        (2, HEADS, {"heads": 12, "heads_kv": 3}),
        (4, BATCH, {"batch": 3}),
        (2, BATCH, {"batch": 3}),
        (4, Shard(1), {}),
    ):
        compare(mesh(count), [placement], call, inputs(**sizes), grad_lse=False, collectives=None)


@on_ranks
def test_mixed_placements():
    """Results are those of plain tensors even if queries and keys have different placements, and even if the gradient
    has other placements than the output."""
    rotary, (q, k, v, grad_out, _) = SCHEMES["rope"](16), inputs()
    want = call_and_gradients(lambda *x: attention(*x, rotary, return_lse=True), (q, k, v), grad_out, None)
    cases = (
        *((HEADS, Replicate(), HEADS), (Replicate(), HEADS, HEADS)),
        *((BATCH, BATCH, Replicate()), (HEADS, BATCH, BATCH)),
    )
    for of_q, of_k, of_grad in cases:
        places = ((q, of_q), (k, of_k), (v, of_k), (grad_out, of_grad))
        spread = [distribute_tensor(x, mesh(2), [place]) for x, place in places]
        got = call_and_gradients(lambda *x: attention(*x, rotary, return_lse=True), spread[:3], spread[3], None)
        for name, x, y in zip(("out", "lse", "grad_q", "grad_k", "grad_v"), got, want, strict=True):
            assert torch.equal(x.full_tensor(), y), (name, of_q, of_k, of_grad)


@on_ranks
def test_positions_and_packed_sequences():
    rotary = Rotary.hope(16, 100).log_n(10)

    def given(positions, placement, call):
        """Returns the call with positions, or lengths, that are DTensors like the other inputs."""
        spread = distribute_tensor(positions, mesh(2), [placement])
        return lambda *x: call(*x, spread if isinstance(x[0], DTensor) else positions)

    for scheme, shape in ((rotary, (4, 20)), (Rotary.axial(16), (4, 20, 2))):

        def at(*x, scheme=scheme):
            return attention(*x[:3], scheme, positions=x[3], return_lse=True)

        positions = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 50
        for placement, of_positions, of_lse in ((HEADS, Replicate(), Shard(1)), (BATCH, Shard(0), Shard(0))):
            compare(mesh(2), [placement], given(positions, of_positions, at), inputs(), [of_lse])

    def by_lengths(q, k, v, lengths):
        return attention_varlen(q, k, v, rotary, lengths, lengths, 36, 36, return_lse=True)

    lengths = given(torch.tensor([0, 30, 44, 80], dtype=torch.int32), Replicate(), by_lengths)
    *packed, grad_lse = inputs()
    packed = [*(x.flatten(0, 1) for x in packed), grad_lse.transpose(0, 1).flatten(1)]
    compare(mesh(2), [Shard(1)], lengths, packed, [Shard(0)])


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, width, bias=False, dtype=torch.float64) for width in (128, 32, 32))
        self.out = nn.Linear(128, 64, bias=False, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, 16)) for project in (self.q, self.k, self.v))
        return self.out(attention(q, k, v, Rotary.hope(16, 100).rectify(7)).flatten(-2)).clone()


@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@on_ranks
def test_tensor_parallel_and_fully_sharded(local):
    """An attention layer has the gradients of one device if 8 query heads and 2 key heads are sharded over 2 ranks and
    the parameters over 2 more. Activations are local tensors or DTensors."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    plain, x = SelfAttention(), torch.randn(4, 20, 64, dtype=torch.float64)
    layer = copy.deepcopy(plain)
    loss = plain(x).square().mean()
    loss.backward()
    column = ColwiseParallel(use_local_output=local)
    parallelize_module(layer, both["tp"], {"q": column, "k": column, "v": column, "out": RowwiseParallel()})
    fully_shard(layer, mesh=both["fsdp"])
    mine = layer(x.chunk(2)[both.get_local_rank("fsdp")]).square().mean()
    mine.backward()
    for name, parameter in layer.named_parameters():
        want = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), want, rtol=0, atol=1e-13 * want.abs().max().item())


@on_ranks
def test_gradient_of_a_collective():
    """The backward of plain tensors accepts a gradient that is the pending result of a collective."""
    q, k, v, grad_out, _ = inputs()
    seen = []

    class Recording(_Keeping):
        @classmethod
        def backward(cls, grad_out, *rest):
            seen.append(type(grad_out))
            return super().backward(grad_out, *rest)

    sys.modules["flashrope.backends.recording"] = Recording
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = autograd.attention(*leaves, AttentionCall(Rotary.rope(16), True, 0.25), "recording")[0]
    want = torch.autograd.grad(out, leaves, 2 * grad_out, retain_graph=True)
    pending = collectives.all_reduce(grad_out, "sum", mesh(2))
    assert type(pending) is collectives.AsyncCollectiveTensor
    got = torch.autograd.grad(out, leaves, pending)
    assert seen == [torch.Tensor, torch.Tensor]
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
