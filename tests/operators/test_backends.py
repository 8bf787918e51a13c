"""Checks that each backend has the functions of its protocols, and that the reference's backward equals autograd."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from flashrope import (
    Rotary,
    attention,
    attention_varlen,
    attention_varlen_with_cache,
    attention_with_cache,
)
from flashrope.backends import cuda, reference
from flashrope.backends.names import BACKENDS
from flashrope.backends.registry import load_backend
from flashrope.calls import protocol
from flashrope.calls import records as calls
from flashrope.calls.plans import CACHE_OPTIONS
from flashrope.calls.records import AttentionCall, lse_shape
from flashrope.schemes.cos_sin import FINE_ROWS
from flashrope.schemes.lowered import UNBOUNDED

PROTOCOLS = {
    "triton": (protocol.AttentionBackend, protocol.CacheBackend),
    "cuda": (protocol.CacheBackend,),
    "sdpa": (protocol.AttentionBackend, protocol.CacheBackend),
    "cpu": (protocol.AttentionBackend, protocol.CacheBackend),
    "auto": (protocol.AttentionBackend, protocol.CacheBackend),
    "reference": (protocol.AttentionBackend, protocol.CacheBackend),
}


def test_every_backend_has_its_protocols_listed():
    assert set(PROTOCOLS) == {*BACKENDS, "auto"}


@pytest.mark.parametrize("impl", PROTOCOLS)
def test_functions_have_the_parameters_of_the_protocol(impl):
    if impl == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    backend = load_backend(impl)
    for each in PROTOCOLS[impl]:
        functions = {name: function for name, function in vars(each).items() if inspect.isfunction(function)}
        for name in (name for name in functions if not name.startswith("_")):
            parameters = list(inspect.signature(functions[name]).parameters.values())[1:]
            found = inspect.signature(getattr(backend, name)).parameters.values()
            assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in parameters], f"{impl}.{name}"
        for name, annotation in inspect.get_annotations(each, eval_str=True).items():
            assert isinstance(getattr(backend, name), annotation), f"{impl}.{name}"


def test_options_that_the_backends_declare():
    for impl in PROTOCOLS:
        if impl != "triton" or not load_backend(impl).IMPORT_ERROR:
            options = load_backend(impl).CACHE_OPTIONS
            assert options == (frozenset() if impl == "cuda" else CACHE_OPTIONS)
            assert ("positions" in options) == hasattr(load_backend(impl), "unsupported_positions")


def test_differentiable_backends():
    assert protocol.DIFFERENTIABLE == ("reference",)


# ---- the reference's backward

SCHEME = Rotary.rope(16).rectify(5, 2.0).log_n(8)
CALLS = {
    "batch": AttentionCall(SCHEME, True, 0.25),
    "full": AttentionCall(SCHEME, False, 0.25),
    "positions": AttentionCall(Rotary.rope(16), True, 0.25, torch.arange(2 * 9).view(2, 9) * 1.5),
    "packed": AttentionCall(
        SCHEME,
        True,
        0.25,
        cu_seqlens_q=torch.tensor([0, 3, 3, 9], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 2, 4, 8], dtype=torch.int32),
        max_seqlen_q=6,
        max_seqlen_k=4,
    ),
}


@pytest.mark.parametrize("given", ["both", "out", "lse"])
@pytest.mark.parametrize("kind", CALLS)
def test_backward_of_the_reference_is_autograd(kind, given):
    call, generator = CALLS[kind], torch.Generator().manual_seed(0)
    shape = (9,) if kind == "packed" else (2, 9)
    q, k, v, grad_out = (
        torch.randn(*shape, heads, 16, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, kept = reference.forward(*leaves, call)
    assert kept is None and reference.kept_shapes(k, call) == ((0,), (0,))
    assert out.shape == q.shape and out.is_contiguous() and lse.shape == lse_shape(q)
    grad_lse = torch.randn(lse.shape, dtype=torch.float64, generator=generator).masked_fill(lse.isinf(), 0)
    grad_out, grad_lse = grad_out if given != "lse" else None, grad_lse if given != "out" else None
    results = [(x, grad) for x, grad in ((out, grad_out), (lse, grad_lse)) if grad is not None]
    with torch.no_grad():
        found = reference.backward(grad_out, grad_lse, q, k, v, out, lse, None, call)
    outputs, grads = zip(*results, strict=True)
    expected = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    for x, grad, want in zip((q, k, v), found, expected, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()
        assert torch.equal(grad, torch.zeros_like(x) if want is None else want)


def test_backward_of_the_reference_without_keys():
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 0, 1, 16)
    out, lse, _ = reference.forward(q, k, k, CALLS["batch"])
    grads = reference.backward(torch.ones_like(out), None, q, k, k, out, lse, None, CALLS["batch"])
    for x, grad in zip((q, k, k), grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


# ---- numbers that C++ and Python share


def test_constants_of_the_cuda_kernels():
    header = Path(__file__).resolve().parents[2] / "csrc/decode.h"
    constants = dict(re.findall(r"constexpr int (\w+) = ([\d <]+);", header.read_text()))
    expected = {
        "TILE_ROWS": cuda.TILE_ROWS,
        "FINE_ROWS": FINE_ROWS,
        "MAX_SEQLEN_Q": cuda.MAX_SEQLEN_Q,
        "MAX_SPLITS": calls.MAX_SPLITS,
        "UNBOUNDED": UNBOUNDED,
    }
    assert {name: eval(constants[name]) for name in expected} == expected


def test_alignment_goes_by_every_stride():
    """Tensors are aligned only if all strides are, even those of dimensions of size 1, which is_contiguous ignores."""
    room = torch.empty(1, 2, 2, 264, dtype=torch.bfloat16)
    assert calls.aligned(room) and calls.aligned(room[..., :256]) and calls.aligned(room[:, 1:, 1:, 8:])
    assert not calls.aligned(room[..., 4:260])
    for stride in range(3):
        strides = [512, 256, 256, 1]
        strides[stride] += 1
        assert not calls.aligned(room.as_strided((1, 1, 1, 256), strides))
    assert calls.aligned(room.as_strided((1, 1, 1, 256), (8, 16, 0, 1)))


# ---- the type of lse


@pytest.mark.parametrize("impl", [None, "sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_is_float64_for_float64_and_float32_for_all_others(dtype, impl):
    def of(*shape):
        return torch.zeros(*shape, dtype=dtype)

    rope, lengths, options = (
        Rotary.rope(16),
        torch.tensor([6, 6], dtype=torch.int32),
        {"return_lse": True, "impl": impl, "sinks": of(4)},
    )
    q, k, packed_q, packed_k = of(2, 6, 4, 16), of(2, 6, 2, 16), of(12, 4, 16), of(12, 2, 16)
    cu_seqlens = torch.tensor([0, 6, 12], dtype=torch.int32)
    results = [
        attention(q, k, k, rope, **options),
        attention(q[:, :0], k, k, rope, **options),
        attention(q, k[:, :0], k[:, :0], rope, **options),
        attention_varlen(packed_q, packed_k, packed_k, rope, cu_seqlens, cu_seqlens, 6, 6, **options),
        attention_with_cache(q, k, k, rope, lengths, **options),
        attention_varlen_with_cache(packed_q, k, k, rope, cu_seqlens, lengths, 6, **options),
    ]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        results.append(attention(of(2, 6, 4, 16), of(2, 6, 2, 16), of(2, 6, 2, 16), rope, **options))
    assert (results[-1][0].shape, results[-1][1].shape) == ((2, 6, 4, 16), (2, 4, 6))
    for out, lse in results:
        assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
