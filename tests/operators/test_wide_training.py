"""Tests attention without a cache, its gradients, and rotate at 257 to 512 channels."""

import pytest
import support
import torch
from flashrope import Rotary, attention, rotate
from packing import packing
from support import SCHEMES, check, problem
from test_rotate import check as check_rotated

GEMMA = Rotary.p_rope(512, 0.25, base=1e6)  # Gemma 4's global layers
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
NAMED = SCHEMES | {
    "p_rope": lambda d: Rotary.p_rope(d, 0.25, base=1e6),
    "p_rope_leaky_log_n": lambda d: Rotary.p_rope(d, 0.25, base=1e6).rectify(21, 4.0).log_n(20),
    "behind": lambda d: Rotary.rope(d, rotary_dim=64, first_channel=d - 64).rectify(21),
    "self_extend": lambda d: Rotary.rope(d).self_extend(16, 4),
    "dual_chunk": lambda d: Rotary.rope(d).dual_chunk(144, 16),
    "string": lambda d: Rotary.rope(d).string(24, 8),
}
WIDTHS = {  # schemes by width, so that every width and every scheme has a case
    264: ("rope_interleaved", "leaky"),
    320: ("p_rope", "hope_rerope_log_n"),
    384: ("rope", "local", "behind"),
    448: ("none", "string"),
    512: ("rope", "rerope", "p_rope", "p_rope_leaky_log_n", "hope_paper", "self_extend", "dual_chunk"),
}
CASES = [pytest.param(d, scheme, id=f"d{d}-{scheme}") for d, schemes in WIDTHS.items() for scheme in schemes]
targets = pytest.mark.parametrize("target", [t for t in support.TARGETS if t.impl == "cpu"], ids=str)


@targets
@pytest.mark.parametrize(("head_dim", "scheme"), CASES)
def test_accuracy(target, head_dim, scheme):
    """Results and gradients stay within the budget for grouped heads and more keys than queries."""
    lengths = (30, 300) if scheme == "dual_chunk" else (37, 53)
    check(target, problem(target, NAMED[scheme](head_dim), *lengths, seed=1))


@targets
@pytest.mark.parametrize("widths", [(512, 64), (64, 512), (320, 264), (192, 384)], ids=str)
def test_values_of_another_width(target, widths):
    check(target, problem(target, SCHEMES["rerope"](widths[0]), 41, heads=4, seed=2, head_dim_v=widths[1]))


@targets
@pytest.mark.parametrize("options", [{"causal": False}, {"positions": True}, {"layout": "poisoned"}], ids=str)
def test_options(target, options):
    if options.get("positions"):
        options = {"positions": torch.arange(35.0).flip(0)[None] * 3}
    check(target, problem(target, GEMMA, 35, heads=4, group=4, seed=3, **options))


@targets
def test_sinks(target):
    check(target, problem(target, GEMMA.rectify(21), 30, heads=4, seed=4, sinks=SINKS.to(support.lse_type(target))))


@targets
@pytest.mark.parametrize("scheme", ["p_rope_leaky_log_n", "rope_interleaved"])
def test_packed(target, scheme):
    rotary = NAMED[scheme](512 if scheme == "p_rope_leaky_log_n" else 264)
    p = packing(target, rotary, [17, 0, 40], [17, 3, 52], seed=5)
    p.check(p.run(target.impl), target.dtype)


@targets
@pytest.mark.parametrize("scheme", ["p_rope", "rope_interleaved", "hope_paper"])
@pytest.mark.parametrize("head_dim", [264, 512])
def test_rotate(target, scheme, head_dim):
    x = support.random((2, 70, 3, head_dim), target, seed=6)
    check_rotated(target, x, NAMED[scheme](head_dim))


def test_rotate_backward_turns_back():
    x = torch.randn(1, 40, 2, 512, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(rotate(x, GEMMA), x, rotate(x.detach(), GEMMA))
    torch.testing.assert_close(grad, x.detach())


def test_compiled_graph():
    q, k, v = (torch.randn(1, 20, heads, 512, requires_grad=True) for heads in (2, 1, 1))
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for run in (compiled, attention):
        out = run(q, k, v, GEMMA)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        if run is compiled:
            first = (out, *grads)
    torch.testing.assert_close((out, *grads), first)


@pytest.mark.skipif(not support.INTERPRETED, reason="shows what the interpreter's calls answer")
@pytest.mark.parametrize("width", [(512, 512), (64, 264)], ids=str)
def test_triton_names_what_it_does_not_serve(width):
    q, v = torch.zeros(1, 4, 2, width[0]), torch.zeros(1, 4, 2, width[1])
    message = (
        f"impl='triton' cannot serve this call: its kernels without a cache take head_dim up to 256, got {width[1]}"
    )
    with pytest.raises(ValueError, match=message):
        attention(q, q, v, Rotary.rope(width[0]), impl="triton")
