"""Tests the operators inside PyTorch: opcheck, compile, export, autocast, checkpointing, transforms."""

from functools import partial

import pytest
import support
import torch
from flashrope import Rotary, attention, attention_varlen, attention_with_cache, rotate
from flashrope.calls.records import AttentionCall
from flashrope.operators import autograd
from flashrope.operators.fields import flatten
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ROTARIES = {"hope": Rotary.hope(16, 100), "rerope": Rotary.rope(16).rectify(7).log_n(10)}


@pytest.fixture(params=ROTARIES.values(), ids=ROTARIES.keys())
def rotary(request):
    return request.param


def inputs(seqlen=20, dtype=torch.float32, requires_grad=True, heads=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(2, seqlen, h, 16, generator=generator).to(dtype).requires_grad_(requires_grad)
        for h in (heads, heads // 2, heads // 2)
    )


def eager(q, k, v, rotary, **options):
    out = attention(q, k, v, rotary, **options)
    return out, torch.autograd.grad(out.square().sum(), (q, k, v))


COORDINATES = torch.stack((torch.arange(40.0), torch.arange(40) // 5, torch.arange(40) % 5), -1)
SECTIONS = Rotary.rope(16).mrope([4, 2, 2])
CU = torch.tensor([0, 12, 36], dtype=torch.int32)
KINDS = {  # the scheme, the width of v, packed or not, and positions
    "hope": (ROTARIES["hope"], 16, False, None),
    "rerope": (ROTARIES["rerope"], 16, False, None),
    "packed": (ROTARIES["rerope"], 16, True, None),
    "v with its own head_dim": (ROTARIES["hope"], 40, False, None),
    "positions": (Rotary.rope(16), 16, False, COORDINATES[:, 0].view(2, 20) * 1.5),
    "packed coordinates": (SECTIONS, 16, True, COORDINATES),
}
WHOLE = ("rerope", "packed")
kinds = pytest.mark.parametrize("kind", KINDS)


def operator_arguments(kind, impl="cpu", device="cpu"):
    """Returns the arguments of torch.ops.flashrope.attention."""
    rotary, width, packed, positions = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, h, w, generator=generator) for h, w in ((4, 16), (2, 16), (2, width)))
    q, k, v = ((x.flatten(0, 1) if packed else x).to(device).requires_grad_() for x in (q, k, v))
    if positions is not None:  # (batch, seqlen, ...), also for packed sequences
        positions = (positions[None] if packed else positions).to(device)
    lengths = (CU.to(device), CU.to(device), 24, 24) if packed else (None, None, 20, 20)
    call = AttentionCall(rotary, True, 0.25, positions, *lengths, deterministic=False)
    return q, k, v, *flatten(AttentionCall, call), impl


def public_call(kind, q, k, v, impl="cpu"):
    """Returns the result of the public call that corresponds to the operator's arguments."""
    rotary, _, packed, positions = KINDS[kind]
    options = dict(positions=positions, softmax_scale=0.25, deterministic=False, impl=impl)
    if packed:
        return attention_varlen(q, k, v, rotary, CU, CU, 24, 24, **options)
    return attention(q, k, v, rotary, **options)


@pytest.mark.interpreted(lambda exact, kind: kind in ("v with its own head_dim", "packed coordinates"))
@kinds
def test_opcheck(exact, kind):
    """opcheck accepts the schemas and the shapes for tracing. On the CPU it also checks autograd and compilation of one
    dense and one packed call."""
    arguments, whole = operator_arguments(kind, exact.impl, exact.device), exact.impl == "cpu" and kind in WHOLE
    tests = {} if whole else {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(torch.ops.flashrope.attention, arguments, **tests)
    saved = torch.ops.flashrope.attention(*arguments)
    if exact.impl == "triton":  # with explicit positions, whose table is saved for backward
        assert (saved[3].numel() > 0) == (arguments[3] is not None)
    tensors = (torch.randn_like(saved[0]), torch.randn_like(saved[1]), *(x.detach() for x in (*arguments[:3], *saved)))
    for grad_out in (tensors[0], None)[: 1 + whole]:
        torch.library.opcheck(torch.ops.flashrope.attention_backward, (grad_out, *tensors[1:], *arguments[3:]), **tests)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@kinds
def test_the_operator_and_the_eager_call_agree_to_the_bit(kind, impl):
    """The operator and the eager call give the same bits. In the reference, autograd differentiates the eager call, and
    the operator uses ``reference.backward``."""
    arguments = operator_arguments(kind, impl)
    out, through = public_call(kind, *arguments[:3], impl), torch.ops.flashrope.attention(*arguments)[0]
    assert torch.equal(out, through)
    grads = (torch.autograd.grad(x.square().sum(), arguments[:3]) for x in (out, through))
    assert all(map(torch.equal, *grads))


class Seen(TorchDispatchMode):
    """Records the operators of flashrope that run in the mode."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flashrope":
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_mode_sees_the_operators(requires_grad, monkeypatch):
    """Dispatch modes such as profilers see the operator. Without a mode the backend is called directly."""
    q, k, v = inputs(requires_grad=requires_grad)
    direct = attention(q, k, v, ROTARIES["rerope"], impl="cpu")
    with Seen() as seen:
        out = attention(q, k, v, ROTARIES["rerope"], impl="cpu")
    assert seen.names == ["flashrope::attention"]
    assert torch.equal(out, direct) and out.requires_grad == requires_grad
    if not requires_grad:
        monkeypatch.setattr(autograd, "OPERATORS", None)
        assert torch.equal(attention(q, k, v, ROTARIES["rerope"], impl="cpu"), direct)


ROPE, SCALED, LATER = Rotary.rope(16), Rotary.rope(16, rotary_dim=8).scale_rotated(2.0), torch.arange(20) + 5
COMPILED = {kind: partial(public_call, kind) for kind in KINDS}
COMPILED |= {
    "sinks": lambda q, k, v: attention(q, k, v, ROPE, sinks=q[0, 0, :, 0]),
    "rotate": lambda q, k, v: attention(rotate(2 * q, SCALED), rotate(k, SCALED, LATER), v, ROPE),
}


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_in_one_graph(kind):
    """Forward and backward compile into one graph and give the results without torch.compile."""
    torch.compiler.reset()
    leaves, call = operator_arguments(kind if kind in KINDS else "hope")[:3], COMPILED[kind]
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(rotary, dynamic):
    """The call compiles into one graph. With dynamic shapes, a new length causes no recompilation."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, rotary), fullgraph=True, dynamic=dynamic, backend=counter
    )
    for seqlen in (20, 33, 41) if dynamic else (20, 20):
        q, k, v = inputs(seqlen)
        out = compiled(q, k, v)
        want, want_grads = eager(q, k, v, rotary)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), want_grads)
    assert counter.frame_count == 1


@pytest.mark.parametrize("impl", ["cpu", "reference", "triton"])
def test_compile_with_a_backend_by_name(impl):
    """A call that names its backend compiles into one graph. The backend's module is loaded while the operator is
    traced, not by the graph."""
    torch.compiler.reset()
    rotary, (q, k, v) = ROTARIES["rerope"], inputs()
    seqlens = torch.full((2,), 20, dtype=torch.int32)

    def run(q, k, v):
        cached = attention_with_cache(q.detach(), k.detach(), v.detach(), rotary, seqlens, impl=impl)
        return *attention(q, k, v, rotary, impl=impl, return_lse=True), cached

    out, lse, cached = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    expected = run(q, k, v)
    torch.testing.assert_close((out, lse, cached), expected)
    if impl == "cpu":  # the backwards of the others are tested elsewhere
        found, grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected[0]))
        torch.testing.assert_close(found, grads)


def test_compile_with_a_backend_that_cannot_serve_the_call():
    torch.compiler.reset()
    q, k, v = inputs(requires_grad=False)
    run = torch.compile(lambda: attention(q, k, v, ROTARIES["hope"], impl="cuda"), fullgraph=True, backend="eager")
    with pytest.raises(
        Exception, match="impl='cuda' cannot serve this call: the CUDA kernels support only attention_with_cache"
    ):
        run()
    with pytest.raises(Exception, match="impl: expected None or one of .* got 'fast'"):
        torch.compile(lambda: attention(q, k, v, ROTARIES["hope"], impl="fast"), fullgraph=True, backend="eager")()


def test_compile_takes_the_scheme_as_an_argument():
    """A Rotary is a constant of the graph: a call with the same Rotary does not recompile, and another Rotary
    compiles once."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    q, k, v = inputs(requires_grad=False)
    for rotary in (Rotary.hope(16, 100), Rotary.hope(16, 100), Rotary.rope(16).rectify(7)):
        torch.testing.assert_close(compiled(q, k, v, rotary), attention(q, k, v, rotary))
    assert counter.frame_count == 2


class Module(torch.nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, q, k, v):
        return attention(q, k, v, self.rotary)


def test_export(rotary):
    q, k, v = inputs(requires_grad=False)
    seqlen = torch.export.Dim("seqlen", min=2, max=512)
    shapes = tuple({1: seqlen} for _ in range(3))
    program = torch.export.export(Module(rotary), (q, k, v), dynamic_shapes=shapes)
    other = inputs(31, requires_grad=False, seed=1)
    torch.testing.assert_close(program.module()(*other), attention(*other, rotary))
    assert any("flashrope.attention" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("deterministic", [True, False, None])
def test_a_graph_holds_whether_the_backward_is_deterministic(rotary, deterministic):
    class Call(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, rotary, deterministic=deterministic)

    program = torch.export.export(Call(), inputs(requires_grad=False))
    (node,) = (node for node in program.graph.nodes if "flashrope.attention" in str(node.target))
    assert node.args[-3:] == (deterministic, False, "auto")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(rotary, dtype):
    q, k, v = inputs()
    with torch.autocast("cpu", dtype):
        out = attention(q, k, v, rotary)
        _, lse = attention(q, k, v, rotary, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    same = attention(*low, rotary)
    assert torch.equal(out, same)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    for grad, grad_of_low in zip(grads, torch.autograd.grad(same.float().sum(), low), strict=True):
        assert grad.dtype == torch.float32 and grad_of_low.dtype == dtype
        assert torch.equal(grad, grad_of_low.float())


def test_autocast_leaves_other_types(rotary):
    """Autocast does not cast float16 or float64 tensors. A call that mixes them with cast tensors raises an error."""
    q, k, v = inputs(requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(x.half() for x in (q, k, v)), rotary).dtype == torch.float16
        with pytest.raises(TypeError, match="k: expected torch.float16, the dtype of q, got torch.bfloat16"):
            attention(q.half(), k, v, rotary)


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("reference", torch.float64), (None, torch.bfloat16), ("sdpa", torch.float16), ("sdpa", torch.float64)],
)
def test_autocast_changes_nothing_inside(rotary, impl, dtype):
    """Under autocast, matrix products of float32 stay in float32 in the forward, in the backward and over a cache."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs())
    lengths = support.int32([k.shape[1]] * len(k))
    new = torch.ones(len(k), 1, *k.shape[2:], dtype=dtype)

    room = [torch.cat((x.detach(), new), 1) for x in (k, v)]

    def results():
        out, caches = attention(q, k, v, rotary, impl=impl), [x.clone() for x in room]
        step = attention_with_cache(q.detach()[:, -1:], *caches, rotary, lengths, k=new, v=new, impl=impl)
        turned = rotate(q.detach(), Rotary.rope(q.shape[-1]), impl=impl)
        return out, step, turned, *caches

    with torch.autocast("cpu", torch.bfloat16):
        cast = results()
    exact = results()
    # PyTorch differentiates the reference, and its backward runs under autocast.
    with torch.autocast("cpu", torch.bfloat16, enabled=impl != "reference"):
        cast += torch.autograd.grad(cast[0], (q, k, v), torch.ones_like(q))
    exact += torch.autograd.grad(exact[0], (q, k, v), torch.ones_like(q))
    for got, want in zip(cast, exact, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(rotary, use_reentrant):
    q, k, v = inputs()
    out = checkpoint(lambda *x: attention(*x, rotary), q, k, v, use_reentrant=use_reentrant)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v)) if not use_reentrant else None
    want, want_grads = eager(q, k, v, rotary)
    assert torch.equal(out, want)
    if use_reentrant:  # reentrant checkpointing does not work with autograd.grad
        out.square().sum().backward()
        grads = tuple(x.grad for x in (q, k, v))
    for a, b in zip(grads, want_grads, strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_of_the_operator_is_refused():
    """A second derivative of the operator raises an error. test_transforms.py tests the same for the eager call."""
    arguments = operator_arguments("rerope")
    out = torch.ops.flashrope.attention(*arguments)[0]
    (grad,) = torch.autograd.grad(out.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative.*reference"):
        grad.sum().backward()


def test_only_what_needs_a_gradient_gets_one(rotary):
    q, k, v = inputs()
    k = k.detach()
    attention(q, k, v, rotary).sum().backward()
    assert k.grad is None and q.grad is not None and v.grad is not None


def test_backward_twice_through_one_graph(rotary):
    q, k, v = inputs()
    out = attention(q, k, v, rotary)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), (q, k, v))


def test_inference_mode(rotary):
    q, k, v = inputs(requires_grad=False)
    with torch.inference_mode():
        out = attention(q, k, v, rotary)
    assert out.is_inference() and torch.equal(out, attention(q, k, v, rotary))
