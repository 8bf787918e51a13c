"""Compiled kernels of schemes whose rotated copies of keys hold only the channels that rotate."""

import pytest
import support
import torch
from flashrope import Rotary
from flashrope.lowering.parts import copied_parts
from packing import packing

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
HALF = Rotary.rope(128, rotary_dim=64)
quick = pytest.mark.quick
pytestmark = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")
CASES = {  # target, scheme, lengths, options
    "half-d128-bf16": (BF16, HALF, (70, 90), {"heads": 4, "group": 2}, quick),
    "atomic-leaky-d128-fp16": (FP16, HALF.rectify(21, 4.0), (50, 70), {"deterministic": False}, ()),
    "hope-d64-fp32": (FP32, Rotary.hope(64, 512), (50, 70), {}, ()),
    "behind-interleaved-d128-bf16": (
        BF16,
        Rotary.rope(128, rotary_dim=32, interleaved=True, first_channel=64).rectify(21),
        (70,),
        {"batch": 2},
        (),
    ),
    "self-extend-d128-bf16": (BF16, HALF.self_extend(48, 8), (90,), {}, ()),
    "quarter-d256-bf16": (BF16, Rotary.rope(256, rotary_dim=64).log_n(20), (50, 70), {}, ()),
    "quarter-d512-bf16": (BF16, Rotary.rope(512, rotary_dim=128), (50,), {}, ()),
}


@pytest.mark.parametrize("case", [pytest.param(case[:4], id=name, marks=case[4]) for name, case in CASES.items()])
def test_attention(machine, case):
    target, rotary, lengths, options = case
    p = support.problem(target, rotary, *lengths, seed=1, **options)
    support.check(target, p)
    last = "attention_finish_grad_q" if p.deterministic is False else "attention_grad_q"
    assert copied_parts(rotary, True) and machine.launches[-1].kernel == last


def test_packed(machine):
    p = packing(BF16, HALF.rectify(9), [17, 0, 40], [17, 3, 52], seed=5)
    p.check(p.run("triton"), torch.bfloat16)


def test_unaligned(machine):
    """Rows at addresses that are only multiples of 2 bytes give the right results."""
    p = support.problem(BF16, HALF, 50, seed=2)
    room = {name: torch.nn.functional.pad(getattr(p, name), (3, 0))[..., 3:] for name in ("q", "k", "v", "grad_out")}
    support.check(BF16, p.replace(**room))
