"""Tests compiled decoding kernels for heads of more than 256 channels, with two parts of pairs, or with parts of which
one rotates."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from flashrope.backends.triton import cached
from flashrope.triton_kernels import configs

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
GEMMA = Rotary.p_rope(512, 0.25, base=1e6)  # Gemma 4's global layers
CASES = {  # target, scheme, number of parts (0: all channels as pairs), options of the call
    "rope-d512-bf16": (BF16, Rotary.rope(512), 0, {}),
    "p-rope-d512-bf16": (BF16, GEMMA, 4, {}),
    "p-rope-d512-bf16-rectified-paged": (BF16, GEMMA.rectify(21), 4, dict(page=PAGE)),
    "p-rope-d512-fp16-leaky-padded": (FP16, GEMMA.rectify(21, 4.0), 4, dict(leftpad=(3, 5))),
    "p-rope-d512-fp32-paged": (FP32, GEMMA.log_n(20), 4, dict(page=64)),
    "p-rope-d512-bf16-window": (BF16, GEMMA.local(40), 4, dict(page=32)),
    "p-rope-d512-bf16-20-queries": (BF16, GEMMA, 4, dict(queries=20, page=PAGE)),
    "p-rope-d512-bf16-chunk": (BF16, GEMMA.rectify(21), 4, dict(queries=70)),
    "p-rope-d512-bf16-packed": (BF16, GEMMA, 4, dict(queries=[1, 70], page=PAGE)),
    "p-rope-d320-fp16-chunk-paged-padded": (
        FP16,
        Rotary.p_rope(320, 0.25).rectify(21),
        0,
        dict(queries=70, page=PAGE, leftpad=(3, 0)),
    ),
    "rope-d512-fp32-chunk": (FP32, Rotary.rope(512), 0, dict(queries=70)),
    "rerope-d512-fp16-paged": (FP16, Rotary.rope(512).rectify(21), 0, dict(page=PAGE)),
    "hope-d512-bf16-interleaved": (BF16, Rotary.hope(512, 1e6, interleaved=True), 0, dict(page=128)),
    "rope-d512-bf16-chunk-paged": (BF16, Rotary.rope(512), 0, dict(queries=70, page=PAGE)),
    "none-d512-bf16": (BF16, Rotary.none(512), 0, {}),
    "self-extend-d512-bf16": (BF16, Rotary.rope(512).self_extend(64, 8), 0, dict(page=64)),
    "rope-d264-bf16-paged": (BF16, Rotary.rope(264), 0, dict(page=PAGE)),
    "p-rope-d320-bf16-padded": (BF16, Rotary.p_rope(320, 0.25).rectify(21), 0, dict(leftpad=(3, 5))),
    "partial-d384-fp16": (FP16, Rotary.rope(384, rotary_dim=256).rectify(21), 0, {}),
    "behind-d448-fp32-20-queries": (FP32, Rotary.rope(448, rotary_dim=64, first_channel=384), 0, dict(queries=20)),
}
QUICK = ("rope-d512-bf16", "p-rope-d512-bf16-rectified-paged", "p-rope-d512-bf16-packed", "p-rope-d320-bf16-padded")


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def test_case(machine, monkeypatch, case):
    target, rotary, parts, options = CASES[case]
    seen, real = [], cached.variant_of

    def variant_of(*args, **named):
        if "one_run" in named:  # only variants of the decode kernel have this field
            seen.append(len(named["channels"]))
        return real(*args, **named)

    monkeypatch.setattr(cached, "variant_of", variant_of)
    Cached(target, rotary, (90, 71), **{"queries": 1, "heads": (2, 1), **options}).check()
    kernels = {launch.kernel for launch in machine.launches}
    queries = options.get("queries", 1)
    lengths = queries if isinstance(queries, list) else [queries]
    decodes = min(lengths) <= configs.DECODE_SEQLEN
    assert ("attention_chunks" in kernels) == (max(lengths) > configs.DECODE_SEQLEN)
    assert ("attention_decode" in kernels) == decodes
    shares = parts > 0 and target.dtype.itemsize == 2
    assert ("plan_shares" in kernels) == (decodes and shares)
    assert seen == ([parts] if decodes else [])
