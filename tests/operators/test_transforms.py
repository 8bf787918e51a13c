"""torch.func's transforms, forward-mode and second derivatives are right, or raise an error that says what to use
instead.

impl="reference" is compared with finite differences in float64, and the other backends with the reference.
"""

import contextlib

import pytest
import torch
from flashrope import Rotary, attention, attention_varlen, attention_with_cache
from support import INTERPRETED
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.overrides import BaseTorchFunctionMode

SCHEME = Rotary.rope(16).rectify(7).log_n(10)
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"))
SLOW = pytest.mark.slow
CU = torch.tensor([0, 5, 18], dtype=torch.int32)  # rows 18 and 19 belong to no sequence
POSITIONS = torch.arange(10) * 3.0
NO_JVP, NO_SECOND = "no forward-mode.*got tangents.*reference", "no second derivative.*reference"


def tensors(dtype=torch.float64, seqlen=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, seqlen, heads, 16) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def dense(*qkv, impl, **options):
    out, lse = attention(*qkv, SCHEME, impl=impl, return_lse=True, **options)
    return (out.square().sum() + lse.sin().sum()).to(torch.float64)


def packed(*qkv, impl):
    qkv = (x.flatten(0, 1) for x in qkv)
    out, lse = attention_varlen(*qkv, SCHEME, CU, CU, 13, 13, impl=impl, return_lse=True)
    return (out.square().sum() + lse[:, :18].sin().sum()).to(torch.float64)


def sinks(*qkv, impl):
    return dense(*qkv, impl=impl, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=qkv[0].dtype))


def positioned(*qkv, impl):
    out = attention(*qkv, Rotary.rope(16), positions=POSITIONS, impl=impl)
    return out.square().sum().to(torch.float64)


CALLS = [dense, packed, sinks, positioned]
calls = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
backends = pytest.mark.parametrize("impl", ["sdpa", TRITON])


def precision(impl):
    return (torch.float32, {"rtol": 2e-4, "atol": 2e-4}) if impl == "triton" else (torch.float64, {})


def close(got, want, impl):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.to(torch.float64), b.to(torch.float64), **precision(impl)[1])


# ---- the reference supports everything


@calls
def test_reference_derivatives_are_finite_differences(call):
    qkv = tuple(x.requires_grad_() for x in tensors(seqlen=4 if call not in (packed, positioned) else 10))
    options = {"check_forward_ad": True, "check_batched_grad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(lambda *x: call(*x, impl="reference"), qkv, **options)
    assert torch.autograd.gradgradcheck(lambda *x: call(*x, impl="reference"), qkv, fast_mode=True)


@calls
def test_reference_in_torch_func(call):
    def f(q, k, v):
        return call(q, k, v, impl="reference")

    qkv, step, eps = tensors(), tensors(seed=1), 1e-6
    forward, backward = (f(*(x + side * eps * t for x, t in zip(qkv, step, strict=True))) for side in (1, -1))
    slope = (forward - backward) / (2 * eps)
    grads = grad(f, (0, 1, 2))(*qkv)
    torch.testing.assert_close(jvp(f, tuple(qkv), tuple(step))[1], slope, rtol=1e-7, atol=1e-7)
    if call is dense:  # tracing takes seconds for packed calls
        torch.testing.assert_close(linearize(f, *qkv)[1](*step), slope, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(sum((g * t).sum() for g, t in zip(grads, step, strict=True)), slope, rtol=1e-7, atol=0)


def test_reference_second_derivatives():
    q, k, v = (x[:1] for x in tensors(seqlen=2))
    second = hessian(lambda q: dense(q, k, v, impl="reference"))(q)
    torch.testing.assert_close(second, jacrev(jacrev(lambda q: dense(q, k, v, impl="reference")))(q))
    assert second.abs().max() > 0.1


# ---- the other backends: first derivatives, with and without vmap


GRADS = [pytest.param(call, "sdpa", id=f"{call.__name__}-sdpa") for call in CALLS]
GRADS += [
    pytest.param(call, "triton", id=f"{call.__name__}-triton", marks=[TRITON.marks[0], *([SLOW] * (call is not dense))])
    for call in CALLS  # the transforms are the same for every call, and a backward in the interpreter is slow
]


@pytest.mark.parametrize(("call", "impl"), GRADS)
def test_grad_and_vjp(call, impl):
    qkv = tensors(precision(impl)[0])
    want = grad(lambda *x: call(*x, impl="reference"), (0, 1, 2))(*tensors())
    close(grad(lambda *x: call(*x, impl=impl), (0, 1, 2))(*qkv), want, impl)
    if impl != "triton":  # the same code for all backends, and slow in the interpreter
        close(vjp(lambda *x: call(*x, impl=impl), *qkv)[1](torch.ones((), dtype=torch.float64)), want, impl)


def test_jacrev():
    q, k, v = tensors(seqlen=3)
    got, want = (jacrev(lambda q, i=i: attention(q, k, v, SCHEME, impl=i))(q) for i in ("sdpa", "reference"))
    torch.testing.assert_close(got, want)


MAPPED = [("sdpa", call, dims) for call in CALLS for dims in ((0, 0, 0), (None, 0, 0), (0, None, None), (1, 3, 2))]
MAPPED += [pytest.param("triton", call, (1, None, 0), marks=TRITON.marks) for call in (dense, positioned)]


@pytest.mark.parametrize(("impl", "call", "mapped"), MAPPED)
def test_vmap_of_grad_is_a_gradient_per_sample(impl, call, mapped):
    """vmap of grad gives a gradient per sample, also for tensors that are not mapped."""
    dtype, _ = precision(impl)
    count = 2 if impl == "triton" else 3
    samples = list(zip(*(tensors(dtype, seed=seed) for seed in range(count)), strict=True))
    stacked = [x[0] if dim is None else torch.stack(x, dim) for x, dim in zip(samples, mapped, strict=True)]
    got = vmap(grad(lambda *x: call(*x, impl=impl), (0, 1, 2)), in_dims=mapped)(*stacked)
    for n in range(count):
        one = [x[0 if dim is None else n].to(torch.float64) for x, dim in zip(samples, mapped, strict=True)]
        close([x[n] for x in got], grad(lambda *x: call(*x, impl="reference"), (0, 1, 2))(*one), impl)


@calls
def test_grad_of_vmap_sums_over_the_samples(call):
    qkv = tensors()
    scales = torch.tensor([1.0, 0.5, -2.0], dtype=qkv[0].dtype)

    def total(*x, impl):
        return vmap(lambda scale: call(x[0] * scale, *x[1:], impl=impl))(scales.to(x[0].dtype)).sum()

    got, want = (grad(lambda *x, i=i: total(*x, impl=i), (0, 1, 2))(*qkv) for i in ("sdpa", "reference"))
    close(got, want, "sdpa")


def test_vmap_over_empty_batches():
    q = torch.zeros(3, 0, 6, 4, 16, dtype=torch.float64)
    out = vmap(lambda q: attention(q, q, q, Rotary.rope(16), impl="sdpa"))(q)
    assert out.shape == q.shape


def test_nested_vmap_and_mapped_positions():
    q = torch.randn(2, 3, 1, 6, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12.0).view(2, 6) * 7

    def f(q, positions, impl):
        return attention(q, q, q, Rotary.rope(16), positions=positions, impl=impl)

    got = vmap(lambda q, p: vmap(lambda q: f(q, p, "sdpa"))(q))(q, positions)
    want = torch.stack([torch.stack([f(q[a, b], positions[a], "reference") for b in range(3)]) for a in range(2)])
    torch.testing.assert_close(got, want)


def test_func_grad_of_a_module():
    """A module works in torch.func.grad through functional_call, as in meta-learning and per-sample gradients."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48, dtype=torch.float64)

        def forward(self, x, impl):
            return attention(*self.project(x).chunk(3, -1), SCHEME, impl=impl)

    layer, x = Layer(), tensors()[0]
    weights = dict(layer.named_parameters())

    def loss(weights, x, impl):
        return torch.func.functional_call(layer, weights, (x[None], impl)).square().sum()

    got, want = (vmap(grad(loss), (None, 0, None))(weights, x, impl) for impl in ("sdpa", "reference"))
    for name in want:
        torch.testing.assert_close(got[name], want[name])


# ---- what is refused


def dual(f, q):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q, torch.ones_like(q)))


FORWARD_MODE = {
    "jvp": lambda f, q: jvp(f, (q,), (torch.ones_like(q),)),
    "jacfwd": lambda f, q: jacfwd(f)(q),
    "linearize": lambda f, q: linearize(f, q),
    "dual tensors": dual,
    "dual leaves": lambda f, q: dual(f, q.clone().requires_grad_()),
    "jvp of grad": lambda f, q: jvp(grad(f), (q,), (torch.ones_like(q),)),
    "vmap of jvp": lambda f, q: vmap(lambda q: jvp(f, (q,), (torch.ones_like(q),)))(q[None]),
    "jvp of vmap": lambda f, q: jvp(lambda q: vmap(f)(q[None]).sum(), (q,), (torch.ones_like(q),)),
}


@pytest.mark.parametrize("mode", FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
@calls
def test_forward_mode_is_refused(call, mode, impl="sdpa"):
    q, k, v = tensors(precision(impl)[0], seqlen=10)
    with pytest.raises(NotImplementedError, match=NO_JVP):
        mode(lambda q: call(q, k, v, impl=impl), q)


@pytest.mark.parametrize("mode", [FORWARD_MODE["jvp"], FORWARD_MODE["dual tensors"]], ids=["jvp", "dual tensors"])
@pytest.mark.parametrize("impl", [TRITON])
def test_forward_mode_is_refused_on_triton(impl, mode):
    test_forward_mode_is_refused(dense, mode, impl)


@backends
def test_forward_mode_beside_attention_is_not_refused(impl):
    q, k, v = tensors(torch.float32)
    plain = attention(q, k, v, SCHEME, impl=impl)
    out, tangent = jvp(lambda x: attention(q, k, v, SCHEME, impl=impl) * x, (torch.ones(()),), (torch.ones(()),))
    assert torch.equal(out, plain) and torch.equal(tangent, plain)
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v, SCHEME, impl=impl), plain)


@pytest.mark.parametrize("impl", ["sdpa", pytest.param("triton", marks=[TRITON.marks[0], SLOW])])
def test_second_derivatives_are_refused(impl):
    q, k, v = tensors(precision(impl)[0])
    with pytest.raises(RuntimeError, match=NO_SECOND):
        grad(lambda q: grad(lambda q: dense(q, k, v, impl=impl))(q).square().sum())(q)
    q.requires_grad_()
    (first,) = torch.autograd.grad(dense(q, k, v, impl=impl), q, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        first.sum().backward()


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_a_cache_has_no_derivatives(impl):
    q, k, v = tensors(torch.float32)
    lengths = torch.tensor([10, 10], dtype=torch.int32)

    def f(q):
        return attention_with_cache(q, k, v, SCHEME, lengths, impl=impl).sum()

    for name in ("jvp", "jacfwd", "linearize", "dual tensors", "vmap of jvp"):
        with pytest.raises(NotImplementedError, match="cache has no forward-mode.*got tangents.*reference"):
            FORWARD_MODE[name](f, q)
    with pytest.raises(ValueError, match="q, k, v: expected tensors that do not require grad"):
        grad(f)(q)
    assert torch.equal(vmap(f)(q[None])[0], f(q))


# ---- under torch.compile


def compiled(f):
    torch.compiler.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def test_compiled_transforms_of_the_reference():
    q, k, v = tensors()

    def f(q):
        return dense(q, k, v, impl="reference")

    torch.testing.assert_close(compiled(lambda q: jvp(f, (q,), (q,))[1])(q), jvp(f, (q,), (q,))[1])
    torch.testing.assert_close(compiled(grad(f))(q), grad(f)(q))


@pytest.mark.parametrize("impl", [None, pytest.param("sdpa", marks=SLOW)])
def test_compiled_forward_mode_is_refused(impl):
    """Compiled forward-mode raises an error. It used to give zero tangents, because the operator has no rule for
    them."""
    q, k, v = tensors()
    for f in (lambda q: dense(q, k, v, impl=impl), cached(k, v)):
        with pytest.raises(Exception, match="no forward-mode"):
            compiled(lambda q, f=f: jvp(f, (q,), (q,))[1])(q)
        # torch 2.15 refuses the tangent before the operator does
        with pytest.raises(Exception, match="no forward-mode|forward-mode AD tangent"):
            dual(compiled(f), q)
        torch.compiler.reset()
        # without fullgraph, torch.compile falls back to eager mode
        with pytest.raises(NotImplementedError, match="no forward-mode"):
            torch.compile(lambda q, f=f: jvp(f, (q,), (q,))[1], backend="aot_eager")(q)


def test_a_compiled_gradient_over_a_cache_is_refused():
    """A compiled gradient over a cache raises an error. It used to be 0, because inside a compiled torch.func.grad
    tensors do not say that they require a gradient."""
    q, k, v = tensors()
    # torch 2.13 gives the first message, 2.15 repeats ours
    with pytest.raises(Exception, match="functorch transforms|expected .* not require grad"):
        compiled(grad(cached(k, v)))(q)


def cached(k, v):
    return lambda q: attention_with_cache(q, k, v, SCHEME, torch.tensor([10, 10], dtype=torch.int32)).sum()


def test_new_keys_are_appended_under_a_mode():
    """New keys are appended under a torch function mode. The mode sees the operators. Without a mode the call bypasses
    them."""
    q, k, v = (torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    results = []
    for mode in (contextlib.nullcontext(), BaseTorchFunctionMode()):
        caches, seqlens = torch.zeros(2, 1, 8, 2, 16), torch.tensor([2], dtype=torch.int32)
        with mode:
            out = attention_with_cache(q, *caches, Rotary.rope(16), seqlens, k=k, v=v)
        results.append((out, caches))
    assert all(map(torch.equal, *results)) and results[0][1][:, 0, 2].any()
