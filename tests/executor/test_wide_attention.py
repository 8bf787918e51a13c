"""Tests the compiled kernels without a cache for heads of 257 to 512 channels: forward, statistics, dK, dV, dQ, and
rotate."""

import pytest
import support
import torch
from flashrope import Rotary
from packing import packing
from support import SCHEMES
from test_rotate import check as check_rotated

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
GEMMA = Rotary.p_rope(512, 0.25, base=1e6)  # Gemma 4's global layers
SMALL_SHARED = (86, 89, 120)  # the backward in float32 is offered with five products only
slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")
CASES = {  # target, scheme, lengths, options
    "p-rope-d512-bf16": (BF16, GEMMA, (70, 90), {}, ()),
    "p-rope-leaky-log-n-d512-fp16": (FP16, GEMMA.rectify(21, 4.0).log_n(20), (50, 70), {}, ()),
    "rope-d512-fp32": (FP32, Rotary.rope(512), (40, 50), {}, ()),
    "rerope-d512-bf16": (BF16, SCHEMES["rerope"](512), (70,), {"batch": 2}, slow),
    "hope-interleaved-d512-bf16": (BF16, Rotary.hope(512, 100, interleaved=True), (60,), {}, slow),
    "window-d512-bf16": (BF16, GEMMA.local(30), (90,), {}, slow),
    "none-two-sided-d512-bf16": (BF16, Rotary.none(512), (50, 70), {"causal": False}, slow),
    "self-extend-d512-bf16": (BF16, Rotary.rope(512).self_extend(48, 8), (90,), {}, slow),
    "dual-chunk-d512-bf16": (BF16, GEMMA.dual_chunk(160, 32), (40, 200), {}, slow),
    "more-queries-than-keys-d512-bf16": (BF16, GEMMA.rectify(21), (70, 40), {}, slow),
    "poisoned-d512-bf16": (BF16, GEMMA, (45,), {"layout": "poisoned", "heads": 4}, slow),
    "leaky-d264-bf16": (BF16, SCHEMES["leaky"](264), (50, 70), {}, ()),
    "p-rope-d320-bf16": (BF16, Rotary.p_rope(320, 0.25), (70,), {}, slow),
    "rope-interleaved-d384-fp16": (FP16, SCHEMES["rope_interleaved"](384), (50,), {}, slow),
    "rope-d448-bf16": (BF16, Rotary.rope(448), (50, 70), {}, ()),
    "leaky-interleaved-d448-fp16": (
        FP16,
        Rotary.rope(448, interleaved=True).rectify(21, 4.0),
        (70, 50),
        {"batch": 2},
        slow,
    ),
    "partial-behind-d448-bf16": (
        BF16,
        Rotary.rope(448, rotary_dim=64, first_channel=384).rectify(21),
        (50,),
        {},
        slow,
    ),
    "rerope-log-n-d392-bf16": (BF16, SCHEMES["rerope"](392).log_n(20), (50, 70), {"heads": 4}, slow),
    "dual-chunk-d448-bf16": (BF16, Rotary.p_rope(448, 0.25).dual_chunk(160, 32), (40, 200), {}, slow),
    "none-two-sided-d448-bf16": (BF16, Rotary.none(448), (50, 70), {"causal": False}, slow),
    "poisoned-d448-bf16": (BF16, Rotary.rope(448), (45,), {"layout": "poisoned", "heads": 4}, slow),
    "rope-d448-fp32": (FP32, Rotary.rope(448), (40, 50), {}, slow),
    "rope-d320-bf16": (BF16, Rotary.rope(320), (50, 70), {}, ()),
    "rerope-log-n-d384-fp16": (FP16, SCHEMES["rerope"](384).log_n(20), (70, 50), {"batch": 2}, ()),
    "leaky-interleaved-d320-bf16": (BF16, Rotary.rope(320, interleaved=True).rectify(21, 4.0), (50, 70), {}, slow),
    "hope-window-d384-bf16": (BF16, Rotary.hope(384, 100).local(30), (90,), {}, slow),
    "none-two-sided-d320-bf16": (BF16, Rotary.none(320), (50, 70), {"causal": False}, slow),
    "partial-behind-d320-fp16": (
        FP16,
        Rotary.rope(320, rotary_dim=64, first_channel=256).rectify(21),
        (50,),
        {"heads": 4},
        slow,
    ),
    "self-extend-d384-bf16": (BF16, Rotary.rope(384).self_extend(48, 8), (90,), {}, slow),
    "dual-chunk-d320-bf16": (BF16, Rotary.p_rope(320, 0.25).dual_chunk(160, 32), (40, 200), {}, slow),
    "poisoned-d320-bf16": (BF16, Rotary.rope(320), (45,), {"layout": "poisoned", "heads": 4}, slow),
    "rope-d320-fp32": (FP32, Rotary.rope(320), (40, 50), {}, slow),
    "rerope-d328-bf16": (BF16, SCHEMES["rerope"](328), (50,), {}, slow),
    "d512-v64-bf16": (BF16, GEMMA.rectify(21), (50,), {"head_dim_v": 64}, slow),
    "d64-v512-fp16": (FP16, SCHEMES["rerope"](64), (50,), {"head_dim_v": 512}, slow),
    "d320-v264-bf16": (BF16, Rotary.rope(320), (50,), {"head_dim_v": 264}, slow),
    "atomic-p-rope-d512-bf16": (BF16, GEMMA, (50, 70), {"deterministic": False}, ()),
    "atomic-rerope-d264-fp16": (FP16, SCHEMES["rerope"](264), (50,), {"deterministic": False}, slow),
    "atomic-rope-d320-bf16": (BF16, Rotary.rope(320), (50, 70), {"deterministic": False}, ()),
    "atomic-leaky-d384-fp16": (FP16, SCHEMES["leaky"](384), (50,), {"deterministic": False, "heads": 4}, slow),
    "atomic-rerope-d448-bf16": (BF16, SCHEMES["rerope"](448), (50, 70), {"deterministic": False}, slow),
    "atomic-rope-d448-fp32": (FP32, Rotary.rope(448), (40,), {"deterministic": False}, slow),
    "atomic-rope-d392-fp16": (FP16, Rotary.rope(392), (50,), {"deterministic": False, "heads": 4}, slow),
    "atomic-interleaved-d328-bf16": (BF16, SCHEMES["rope_interleaved"](328), (70,), {"deterministic": False}, slow),
    "atomic-rerope-d320-fp32": (FP32, SCHEMES["rerope"](320), (40,), {"deterministic": False}, slow),
    "atomic-rope-d512-fp32": (FP32, Rotary.rope(512), (40,), {"deterministic": False}, slow),
}


def odd(x: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers at addresses that are only multiples of 2 bytes."""
    room = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    room[..., 3:] = x
    return room[..., 3:]


@pytest.mark.parametrize("case", [pytest.param(case[:4], id=name, marks=case[4]) for name, case in CASES.items()])
def test_attention(machine, arch, case):
    target, rotary, lengths, options = case
    p = support.problem(target, rotary, *lengths, seed=1, **options)
    if target is FP32 and p.deterministic and arch in SMALL_SHARED:
        with pytest.raises(ValueError, match="reproducible gradients are not supported .* float32 beyond head_dim 256"):
            support.run(p, "triton")
        p = p.replace(deterministic=False)
    support.check(target, p)
    last = "attention_grad_q" if p.deterministic else "attention_finish_grad_q"
    assert machine.launches[-1].kernel == last


@pytest.mark.parametrize("head_dim", [264, *(pytest.param(head_dim, marks=slow) for head_dim in (320, 384, 448, 512))])
def test_unaligned(machine, head_dim):
    """Rows at addresses that are only multiples of 2 bytes give the right results."""
    p = support.problem(BF16, SCHEMES["leaky"](head_dim), 50, seed=2)
    support.check(BF16, p.replace(**{name: odd(getattr(p, name)) for name in ("q", "k", "v", "grad_out")}))


@pytest.mark.parametrize("head_dim", [320, pytest.param(448, marks=slow), 512])
def test_packed(machine, head_dim):
    p = packing(BF16, Rotary.p_rope(head_dim, 0.25, base=1e6).rectify(21), [17, 0, 40], [17, 3, 52], seed=5)
    p.check(p.run("triton"), torch.bfloat16)


@slow
@pytest.mark.parametrize("rotary", [GEMMA, Rotary.rope(384), Rotary.rope(448)], ids=["d512", "d384", "d448"])
def test_positions_and_sinks(machine, rotary):
    options = {"positions": torch.arange(45.0).flip(0)[None] * 3, "sinks": torch.tensor([0.5, -1.0])}
    support.check(BF16, support.problem(BF16, rotary.log_n(20), 45, seed=6, **options))


@pytest.mark.parametrize("target", [BF16, pytest.param(FP32, marks=slow)], ids=str)
@pytest.mark.parametrize("head_dim", [264, 512])
def test_rotate(machine, target, head_dim):
    check_rotated(target, support.random((2, 70, 3, head_dim), target, seed=7), Rotary.hope(head_dim, 100))
    assert [launch.kernel for launch in machine.launches] == ["rotate_rows"]
