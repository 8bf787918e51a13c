"""Tests the compiled kernels over caches whose values are narrower than the keys."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary, rotate
from support import SCHEMES, int32

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
LATENT = Rotary.rope(192, rotary_dim=64)
DEEPSEEK, DEEPSEEK_V2 = (Rotary.rope(192, rotary_dim=64, interleaved=x, first_channel=128) for x in (False, True))
CHUNK = ("append_rows", "rotate_cached_rows", "attention_chunks")
CASES = {  # target, scheme, width of the values, options of the call
    "latent-d192-v128-bf16": (BF16, LATENT, 128, {}),
    "latent-d192-v128-bf16-rectified-paged": (BF16, LATENT.rectify(21), 128, dict(page=PAGE)),
    "latent-d192-v128-fp16-20-queries-padded": (FP16, LATENT, 128, dict(queries=20, page=64, leftpad=(3, 5))),
    "latent-d192-v128-bf16-packed": (BF16, LATENT, 128, dict(queries=[1, 70], page=PAGE)),
    "latent-d192-v128-bf16-chunk": (BF16, LATENT, 128, dict(queries=70)),
    "latent-d192-v128-bf16-rectified-chunk-paged": (BF16, LATENT.rectify(21), 128, dict(queries=70, page=64)),
    "latent-d192-v128-fp32": (FP32, LATENT, 128, {}),
    "deepseek-v3-d192-v128-bf16": (BF16, DEEPSEEK, 128, {}),
    "deepseek-v3-d192-v128-bf16-chunk": (BF16, DEEPSEEK, 128, dict(queries=70, leftpad=(3, 5))),
    "deepseek-v2-d192-v128-bf16-rectified": (BF16, DEEPSEEK_V2.rectify(21), 128, {}),
    "rerope-d64-v40-fp16": (FP16, SCHEMES["rerope"](64), 40, dict(page=PAGE)),
    "rerope-d64-v40-fp16-chunk": (FP16, SCHEMES["rerope"](64), 40, dict(queries=70, page=PAGE)),
    "leaky-d80-v8-bf16": (BF16, SCHEMES["leaky"](80), 8, {}),
    "rope-d256-v16-bf16": (BF16, SCHEMES["rope"](256), 16, {}),
    "rope-d256-v136-bf16-chunk": (BF16, SCHEMES["rope"](256), 136, dict(queries=70, page=PAGE)),
    "rope-d24-v8-bf16-odd": (BF16, SCHEMES["rope"](24), 8, dict(layout="poisoned")),
    "rope-d512-v256-bf16": (BF16, Rotary.rope(512), 256, {}),
    "p-rope-d512-v128-bf16-paged": (BF16, Rotary.p_rope(512, 0.25), 128, dict(page=PAGE)),
    "rope-d320-v16-fp16": (FP16, Rotary.rope(320), 16, dict(page=PAGE)),
    "rope-d512-v488-fp32-20-queries": (FP32, Rotary.rope(512), 488, dict(queries=20)),
}
QUICK = ("latent-d192-v128-bf16", "latent-d192-v128-bf16-packed", "rerope-d64-v40-fp16", "rope-d320-v16-fp16")


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def test_case(machine, case):
    target, rotary, width, options = CASES[case]
    call = Cached(target, rotary, (90, 71), head_dim_v=width, **{"heads": (2, 1), **options})
    call.check()
    used = {launch.kernel for launch in machine.launches}
    if "chunk" in case:
        assert used <= {*CHUNK}
    elif not call.is_packed:
        assert used <= {"append_rows", "plan_shares", "attention_decode", "combine_shares", "combine_splits"}


def test_splits(machine):
    Cached(BF16, LATENT, (120, 7), 2, head_dim_v=128, heads=(2, 1)).check(num_splits=3)
    assert "combine_splits" in {launch.kernel for launch in machine.launches}


@pytest.mark.slow
def test_placed_and_mapped_tokens():
    mapped = Cached.packed(FP16, SCHEMES["rerope"](64), [(3, 20), (1, 9)], head_dim_v=40, page=PAGE, mapped=True)
    mapped.check()
    call = Cached(BF16, LATENT.rectify(21), (40, 30), 2, new=0, page=PAGE, head_dim_v=128)
    starts = (torch.arange(call.block_table.shape[1]) * (PAGE + 3)).expand(2, -1)
    call.at(page_positions=int32(starts.tolist())).check()
    call.at(slot_positions=call.by_slot(torch.arange(call.slots) * 1.5 + torch.zeros(2, 1))).check()


@pytest.mark.slow
def test_rotated_keys():
    stored = lambda k: rotate(k.double(), LATENT, impl="reference")  # noqa: E731
    Cached(FP32, LATENT, (40, 30), 2, head_dim_v=128, stored=stored).check()
