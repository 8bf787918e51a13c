"""Tests the compiled kernels of schemes whose rotated copies of keys hold only the channels that rotate."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from flashrope.schemes.head_parts import copied_parts
from flashrope.schemes.lowered import lower
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


GEMMA = Rotary.p_rope(512, 0.25, base=1e6)
BEHIND = Rotary.rope(128, rotary_dim=32, interleaved=True, first_channel=64)
CHUNKS = {  # target, scheme, options of a call over a cache
    "half-d128-bf16": (BF16, HALF, {}, ()),
    "half-d128-bf16-rectified-paged": (BF16, HALF.rectify(21), dict(page=PAGE), quick),
    "hope-d64-bf16-paged": (BF16, Rotary.hope(64, 512), dict(page=64), ()),
    "hope-d64-fp32-leaky-paged": (FP32, Rotary.hope(64, 512).rectify(21, 4.0), dict(page=PAGE), ()),
    "behind-interleaved-d128-bf16-paged": (BF16, BEHIND, dict(page=PAGE, leftpad=(3, 5)), ()),
    "behind-interleaved-d128-fp16-rectified": (FP16, BEHIND.rectify(21), dict(leftpad=(3, 5)), ()),
    "self-extend-d128-bf16-paged": (BF16, HALF.self_extend(48, 8), dict(page=PAGE), ()),
    "dual-chunk-d128-bf16": (BF16, HALF.dual_chunk(160, 32), {}, ()),
    "window-d192-fp16-paged": (FP16, Rotary.rope(192, rotary_dim=64, first_channel=128).local(40), dict(page=32), ()),
    "latent-d192-v128-bf16-paged": (
        BF16,
        Rotary.rope(192, rotary_dim=64, first_channel=128).rectify(21),
        dict(page=64, head_dim_v=128),
        (),
    ),
    "quarter-d256-bf16-log-n": (BF16, Rotary.rope(256, rotary_dim=64).log_n(20), {}, ()),
    "quarter-d256-bf16-rectified-paged": (BF16, Rotary.rope(256, rotary_dim=64).rectify(21), dict(page=PAGE), ()),
    "values-in-keys-d256-bf16-paged": (
        BF16,
        Rotary.rope(256, rotary_dim=64, first_channel=192),
        dict(page=PAGE, values=slice(0, 192)),
        (),
    ),
    "gemma-d512-bf16-rectified": (BF16, GEMMA.rectify(21), {}, ()),
    "gemma-d512-bf16-paged": (BF16, GEMMA, dict(page=PAGE), ()),
    "gemma-d512-bf16-rectified-paged": (BF16, GEMMA.rectify(21), dict(page=64, values=slice(None)), ()),
    "windows-of-a-buffer-d128-bf16-paged": (BF16, HALF.rectify(21), dict(page=PAGE, layout="poisoned"), ()),
}


@pytest.mark.parametrize("case", [pytest.param(case[:3], id=name, marks=case[3]) for name, case in CHUNKS.items()])
def test_chunk_over_a_cache(machine, case):
    """A chunk of queries gives the right results, and its workspace holds only the channels that rotate."""
    target, rotary, options = case
    call = Cached(target, rotary, (90, 71), 70, heads=(2, 1), **options)
    call.check()
    rotate, _ = (launch for launch in machine.launches if launch.kernel in ("rotate_cached_rows", "attention_chunks"))
    (part,), copies = copied_parts(rotary, True), len(lower(rotary, True).k_copies)
    row = copies * part.width * target.dtype.itemsize
    rows, left = divmod(rotate.tensors["out"].size, row)
    assert not left and max(call.lengths) <= rows <= call.slots * len(call.lengths)


def test_packed_chunks(machine):
    """Steps, a draft and prompts in one call give the right results, over pages and without."""
    for page in (0, PAGE):
        sizes = [(1, 30), (70, 100), (0, 0), (66, 66), (5, 40)]
        Cached.packed(BF16, HALF.rectify(21), sizes, heads=(2, 1), page=page).check()
    assert {"attention_decode", "attention_chunks"} <= {launch.kernel for launch in machine.launches}


def test_copies_of_quantized_keys_hold_all_channels(machine):
    call = Cached(BF16, HALF.rectify(21), (90, 71), 70, heads=(2, 1), page=PAGE, cache_dtype="int8")
    call.check()
    (rotate,) = (launch for launch in machine.launches if launch.kernel == "rotate_cached_rows")
    assert rotate.tensors["out"].size % (128 * 2) == 0 and rotate.tensors["out"].size >= 2 * 90 * 128 * 2


def test_packed(machine):
    p = packing(BF16, HALF.rectify(9), [17, 0, 40], [17, 3, 52], seed=5)
    p.check(p.run("triton"), torch.bfloat16)


def test_unaligned(machine):
    """Rows at addresses that are only multiples of 2 bytes give the right results."""
    p = support.problem(BF16, HALF, 50, seed=2)
    room = {name: torch.nn.functional.pad(getattr(p, name), (3, 0))[..., 3:] for name in ("q", "k", "v", "grad_out")}
    support.check(BF16, p.replace(**room))
