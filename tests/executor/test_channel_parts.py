"""Tests compiled decoding kernels that rotate only a part of the head, and rotary channels that do not begin at 0."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from flashrope.backends.triton import cached
from support import int32

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))
SLOW = pytest.mark.slow
CASES = {
    "hope-d64-bf16": (BF16, Rotary.hope(64, 60), dict(parts=2)),
    "hope-d64-fp32-paged": (FP32, Rotary.hope(64, 60).log_n(20), dict(parts=2, page=PAGE)),
    "self-extend-d64-bf16": (BF16, Rotary.rope(64, rotary_dim=32).self_extend(64, 8), dict(parts=2, page=64)),
    "scaled-d64-bf16": (BF16, Rotary.rope(64, rotary_dim=32).scale_rotated(1.4), dict(parts=2)),
    "partial-d128-fp16-paged": (FP16, Rotary.rope(128, rotary_dim=64).rectify(21), dict(parts=2, page=PAGE)),
    "behind-d128-bf16": (BF16, Rotary.rope(128, rotary_dim=64, first_channel=64), dict(parts=2)),
    "behind-d128-fp32-wide": (FP32, Rotary.rope(128, rotary_dim=32, first_channel=96), dict(queries=20)),
    "behind-d128-bf16-wide": (BF16, Rotary.rope(128, rotary_dim=64, first_channel=64), dict(queries=20, page=PAGE)),
    "interleaved-d128-bf16": (BF16, Rotary.rope(128, rotary_dim=64, interleaved=True, first_channel=32), dict(parts=2)),
    "hope-d128-bf16-interleaved": (BF16, Rotary.hope(128, 512, interleaved=True), dict(parts=2)),
    "partial-d256-bf16": (BF16, Rotary.rope(256, rotary_dim=64), dict(parts=3)),
    "rerope-d256-bf16-paged": (BF16, Rotary.rope(256, rotary_dim=64).rectify(21, 4.0), dict(parts=3, page=64)),
    "behind-d256-fp16-padded": (FP16, Rotary.rope(256, rotary_dim=64, first_channel=192), dict(leftpad=(3, 5))),
    "between-d256-fp32": (FP32, Rotary.rope(256, rotary_dim=64, first_channel=64), dict(page=PAGE)),
    # Cases in which all channels are treated as pairs.
    "odd-d64-bf16": (BF16, Rotary.rope(64, rotary_dim=24, first_channel=6), dict(parts=0)),
    "behind-d96-bf16-paged": (BF16, Rotary.rope(96, rotary_dim=32, first_channel=64), dict(parts=0, page=PAGE)),
    "chunk-d64-bf16": (BF16, Rotary.rope(64, rotary_dim=32, first_channel=16), dict(queries=70)),
    "chunk-d128-bf16-interleaved": (
        BF16,
        Rotary.rope(128, rotary_dim=32, interleaved=True, first_channel=64),
        dict(queries=70, page=PAGE),
    ),
    **{
        f"int8-d{d}-first{first}": (
            BF16,
            Rotary.rope(d, rotary_dim=d // 4, first_channel=first).rectify(21),
            dict(parts=0, cache_dtype="int8"),
        )
        for d, first in ((32, 8), (32, 2), (64, 16), (64, 2), (128, 12))
    },
}
QUICK = (
    "hope-d64-bf16",
    "partial-d128-fp16-paged",
    "interleaved-d128-bf16",
    "odd-d64-bf16",
    "chunk-d64-bf16",
    "int8-d64-first16",
    "int8-d32-first2",
)


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in QUICK else SLOW) for x in CASES])
def test_case(machine, monkeypatch, case):
    target, rotary, options = CASES[case]
    options, seen = dict(options), []
    parts, queries = options.pop("parts", None), options.pop("queries", 1)
    real = cached.variant_of
    monkeypatch.setattr(cached, "variant_of", lambda *args, **named: seen.append(real(*args, **named)) or seen[-1])
    Cached(target, rotary, (90, 71), queries, heads=(2, 1), **options).check()
    kernel = "attention_chunks" if queries > 64 else "attention_decode"
    assert kernel in [launch.kernel for launch in machine.launches]
    if parts is not None:
        assert [len(variant.channels) for variant in seen] == [parts]


@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=SLOW)])
def test_explicit_positions(machine, interleaved):
    rotary = Rotary.rope(64, rotary_dim=32, interleaved=interleaved, first_channel=16).rectify(21)
    call = Cached(BF16, rotary, (48, 33), 1, new=0, heads=(2, 1), page=PAGE)
    call.at(page_positions=int32([[7, 23, 39], [0, 16, 32]])).check(validate=False)


@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=SLOW)])
def test_forward_and_backward(machine, interleaved):
    rotary = Rotary.rope(64, rotary_dim=32, interleaved=interleaved, first_channel=16).rectify(21)
    support.check(BF16, support.problem(BF16, rotary, 70, seed=3))
