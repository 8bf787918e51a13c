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
    328: ("rerope",),
    384: ("local", "behind", "rope_interleaved", "self_extend"),
    392: ("rope_interleaved",),
    448: ("string", "leaky"),
    512: ("rope", "rerope", "p_rope_leaky_log_n", "hope_paper", "self_extend", "dual_chunk"),
}
INTERPRETED = {
    torch.float32: (
        (392, "rope_interleaved"),
        (448, "leaky"),
        (320, "hope_rerope_log_n"),
        (384, "rope_interleaved"),
    ),
    torch.float16: ((384, "behind"), (512, "rerope")),
}
CASES = [pytest.param(d, scheme, id=f"d{d}-{scheme}") for d, schemes in WIDTHS.items() for scheme in schemes]


@pytest.mark.interpreted(lambda target, head_dim, scheme: (head_dim, scheme) in INTERPRETED[target.dtype])
@pytest.mark.parametrize(("head_dim", "scheme"), CASES)
def test_accuracy(target, head_dim, scheme):
    """Results and gradients stay within the budget for grouped heads and more keys than queries."""
    lengths = (30, 300) if scheme == "dual_chunk" else (37, 53)
    check(target, problem(target, NAMED[scheme](head_dim), *lengths, seed=1))


@pytest.mark.interpreted(lambda target, widths: widths == (64, 512) and target.dtype == torch.float32)
@pytest.mark.parametrize("widths", [(512, 64), (64, 512), (320, 264), (192, 384)], ids=str)
def test_values_of_another_width(target, widths):
    check(target, problem(target, SCHEMES["rerope"](widths[0]), 41, heads=4, seed=2, head_dim_v=widths[1]))


@pytest.mark.interpreted(lambda target, options: "positions" in options and target.dtype == torch.float32)
@pytest.mark.parametrize("options", [{"causal": False}, {"positions": True}, {"layout": "poisoned"}], ids=str)
def test_options(target, options):
    if options.get("positions"):
        options = {"positions": torch.arange(35.0, device=target.device).flip(0)[None] * 3}
    check(target, problem(target, GEMMA, 35, deterministic=False, heads=4, group=4, seed=3, **options))


@pytest.mark.interpreted(lambda target, head_dim, scheme: head_dim == 320 and target.dtype == torch.float32)
@pytest.mark.parametrize(
    ("head_dim", "scheme"), [(320, "rerope"), (328, "rope_interleaved"), (384, "p_rope"), (448, "rope")]
)
def test_atomic_gradients(target, head_dim, scheme):
    """If a head has several tiles, atomics add the dQ of each tile to that tile's own channels."""
    check(target, problem(target, NAMED[scheme](head_dim), 37, 53, batch=2, heads=4, deterministic=False, seed=7))


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120, "gfx942"])
def test_tiles_of_a_head(arch):
    """Heads of 257 to 448 channels have two or three tiles. They do not if v has a different head_dim, or on targets
    for which no such kernel was executed."""
    configs = pytest.importorskip("flashrope.triton_kernels.configs")
    divided = arch not in (100, "gfx942")
    three = {392: (256, 128, 64), 448: (256, 128, 64)}
    for head_dim, widths in ({264: (256, 64), 320: (256, 64), 328: (256, 128), 384: (256, 128)} | three).items():
        assert configs.training_widths(arch, head_dim, head_dim, 2) == (widths if divided else ())
        assert head_dim <= sum(widths) < 512
        assert configs.training_widths(arch, head_dim, 512, 2) == configs.training_widths(arch, 512, head_dim, 2) == ()
        small = arch in (86, 89, 120) and head_dim in three
        assert configs.training_widths(arch, head_dim, head_dim, 4) == (widths if divided and not small else ())
    assert not any(configs.training_widths(arch, head_dim, head_dim, 2) for head_dim in (64, 128, 256, 456, 512))


@pytest.mark.interpreted(lambda target: False)
def test_sinks(target):
    sinks = SINKS.to(target.device, support.lse_type(target))
    check(target, problem(target, GEMMA.rectify(21), 30, heads=4, seed=4, sinks=sinks))


@pytest.mark.interpreted(lambda target, scheme: scheme == "p_rope_leaky_log_n" and target.dtype == torch.float16)
@pytest.mark.parametrize("scheme", ["p_rope_leaky_log_n", "rope_interleaved"])
def test_packed(target, scheme):
    rotary = NAMED[scheme](512 if scheme == "p_rope_leaky_log_n" else 264)
    p = packing(target, rotary, [17, 0, 40], [17, 3, 52], seed=5)
    p.check(p.run(target.impl), target.dtype)


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
