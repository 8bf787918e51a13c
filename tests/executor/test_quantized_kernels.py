"""Runs the compiled kernels of quantized caches on the executor."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from support import SCHEMES

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))

OWN_SCHEMES = SCHEMES | {"rerope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 2).rectify(21)}

CASES = {  # (target, scheme, head_dim, cache_dtype), options
    "rerope-int8-d64-bf16": ((BF16, "rerope", 64, "int8"), dict(leftpad=(3, 0, 40))),
    "rope-int4-paged-d64-bf16": ((BF16, "rope", 64, "int4"), dict(page=PAGE)),
    "interleaved-int4-d64-fp16": ((FP16, "rope_interleaved", 64, "int4"), dict(num_splits=2)),
    "leaky-int8-paged-d128-fp16": ((FP16, "leaky", 128, "int8"), dict(page=PAGE, seqlen_q=5)),
    # products that add up 16 terms need hide_codes
    "rope-int4-d32-fp16": ((FP16, "rope", 32, "int4"), {}),
    "none-int4-d24-bf16": ((BF16, "none", 24, "int4"), dict(page=PAGE)),
    "rope-int8-d16-bf16": ((BF16, "rope", 16, "int8"), {}),
    "interleaved-int8-d8-fp16": ((FP16, "rope_interleaved", 8, "int8"), {}),
    "prefill-none-int4-d8-bf16": ((BF16, "none", 8, "int4"), dict(seqlen_q=70)),
    "partial-int8-d40-fp32": ((FP32, "rope_partial", 40, "int8"), {}),
    "partial-int4-d40-bf16": ((BF16, "rope_partial", 40, "int4"), {}),
    # rotary_dim 14: the two members of a pair lie in different halves of their bytes
    "compact-int4-paged-d40-fp16": ((FP16, "hope_compact", 40, "int4"), dict(page=PAGE)),
    "prefill-compact-int4-d40-bf16": ((BF16, "hope_compact", 40, "int4"), dict(seqlen_q=70)),
    "none-int8-vllm-d64-bf16": ((BF16, "none", 64, "int8"), dict(page=PAGE, layout="vllm")),
    "rerope-int8-d128-bf16": ((BF16, "rerope", 128, "int8"), dict(num_splits=2)),
    "rerope-int4-paged-d128-bf16": ((BF16, "rerope", 128, "int4"), dict(page=PAGE, leftpad=(3, 0, 40))),
    "rerope-int4-d128-fp16": ((FP16, "rerope", 128, "int4"), {}),
    "none-int8-vllm-d128-fp16": ((FP16, "none", 128, "int8"), dict(page=PAGE, layout="vllm")),
    "rope-int8-paged-d128-bf16": ((BF16, "rope", 128, "int8"), dict(page=PAGE)),
    "rope-int4-d128-bf16": ((BF16, "rope", 128, "int4"), dict(seqlen_q=5)),
    # padded to 128 channels, half of head_dim rotates, and the last key ends the tensor
    "partial-rerope-int8-d96-bf16": ((BF16, "rerope_partial", 96, "int8"), dict(lengths=(41, 87, 145), capacity=145)),
    "partial-rerope-int4-d96-fp16": ((FP16, "rerope_partial", 96, "int4"), dict(page=PAGE, layout="vllm")),
    "prefill-rerope-int8-d64-bf16": ((BF16, "rerope", 64, "int8"), dict(seqlen_q=70, leftpad=(3, 0, 7))),
    "prefill-partial-int4-paged-d64-bf16": ((BF16, "rope_partial", 64, "int4"), dict(seqlen_q=70, page=PAGE)),
    "prefill-leaky-int8-vllm-d128-fp16": ((FP16, "leaky", 128, "int8"), dict(seqlen_q=70, page=PAGE, layout="vllm")),
    "prefill-rerope-int4-vllm-d64-fp16": ((FP16, "rerope", 64, "int4"), dict(seqlen_q=70, page=PAGE, layout="vllm")),
}  # fmt: skip
QUICK = ("rope-int4-paged-d64-bf16", "rope-int4-d32-fp16", "rope-int8-d16-bf16")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if x in QUICK else ()) for x in CASES])
def test_cached(machine, name):
    (target, scheme, head_dim, cache_dtype), given = CASES[name]
    options = {"seqlen_q": 1, "num_splits": None, "capacity": 192, **given}
    seqlen_q, num_splits = options.pop("seqlen_q"), options.pop("num_splits")
    lengths, rotary = options.pop("lengths", (145, max(seqlen_q, 41), 87)), OWN_SCHEMES[scheme](head_dim)
    Cached(target, rotary, lengths, seqlen_q, cache_dtype=cache_dtype, **options).check(num_splits=num_splits)
    kernels = [launch.kernel for launch in machine.launches]
    assert kernels[0] == "append_rows"
    assert ("attention_chunks" if seqlen_q > 64 else "attention_decode") in kernels


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
def test_mixed_batch(machine, cache_dtype):
    """Steps, drafts, chunks and prompts in one call give the right results."""
    rotary, sizes = SCHEMES["hope_rerope_log_n"](64), ((1, 45), (70, 70), (5, 5), (0, 9), (66, 112))
    options = dict(
        heads=(2, 1), leftpad=(3, 0, 0, 2, 0), page=PAGE, mapped=cache_dtype == "int8", cache_dtype=cache_dtype
    )
    Cached.packed(BF16, rotary, sizes, **options).check()
    assert {"append_rows", "attention_decode", "attention_chunks"} <= {x.kernel for x in machine.launches}
