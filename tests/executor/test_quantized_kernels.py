"""Runs the compiled kernels of quantized caches on the executor."""

import pytest
import support
import torch
from caching import PAGE, Cached
from flashrope import Rotary
from support import SCHEMES

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))

OWN_SCHEMES = SCHEMES | {"rerope_partial": lambda d: Rotary.rope(d, rotary_dim=d // 2).rectify(21)}

CASES = {  # (target, scheme, head_dim), options
    "rerope-d64-bf16": ((BF16, "rerope", 64), dict(leftpad=(3, 0, 40))),
    "rope-paged-d64-bf16": ((BF16, "rope", 64), dict(page=PAGE)),
    "interleaved-d64-fp16": ((FP16, "rope_interleaved", 64), dict(num_splits=2)),
    "leaky-paged-d128-fp16": ((FP16, "leaky", 128), dict(page=PAGE, seqlen_q=5)),
    # products that add up 16 terms, which Triton 3.6 gets wrong on tensor cores
    "rope-d16-bf16": ((BF16, "rope", 16), {}),
    "none-d16-fp16": ((FP16, "none", 16), dict(page=PAGE)),
    "interleaved-d8-fp16": ((FP16, "rope_interleaved", 8), {}),
    "prefill-rope-d16-bf16": ((BF16, "rope", 16), dict(seqlen_q=70)),
    "rope-d32-fp16": ((FP16, "rope", 32), {}),
    "none-d24-bf16": ((BF16, "none", 24), dict(page=PAGE)),
    "partial-d40-fp32": ((FP32, "rope_partial", 40), {}),
    # rotary_dim 14: first members of pairs do not fill whole words
    "compact-paged-d40-fp16": ((FP16, "hope_compact", 40), dict(page=PAGE)),
    "none-vllm-d64-bf16": ((BF16, "none", 64), dict(page=PAGE, layout="vllm")),
    "rerope-d128-bf16": ((BF16, "rerope", 128), dict(num_splits=2)),
    "none-vllm-d128-fp16": ((FP16, "none", 128), dict(page=PAGE, layout="vllm")),
    "rope-paged-d128-bf16": ((BF16, "rope", 128), dict(page=PAGE)),
    # padded to 128 channels, half of head_dim rotates, and the last key ends the tensor
    "partial-rerope-d96-bf16": ((BF16, "rerope_partial", 96), dict(lengths=(41, 87, 145), capacity=145)),
    "prefill-rerope-d64-bf16": ((BF16, "rerope", 64), dict(seqlen_q=70, leftpad=(3, 0, 7))),
    "prefill-leaky-vllm-d128-fp16": ((FP16, "leaky", 128), dict(seqlen_q=70, page=PAGE, layout="vllm")),
}
QUICK = ("rope-paged-d64-bf16", "rope-d16-bf16", "none-d16-fp16")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if x in QUICK else ()) for x in CASES])
def test_cached(machine, name):
    (target, scheme, head_dim), given = CASES[name]
    options = {"seqlen_q": 1, "num_splits": None, "capacity": 192, **given}
    seqlen_q, num_splits = options.pop("seqlen_q"), options.pop("num_splits")
    lengths, rotary = options.pop("lengths", (145, max(seqlen_q, 41), 87)), OWN_SCHEMES[scheme](head_dim)
    Cached(target, rotary, lengths, seqlen_q, cache_dtype="int8", **options).check(num_splits=num_splits)
    kernels = [launch.kernel for launch in machine.launches]
    assert kernels[0] == "append_rows"
    assert ("attention_chunks" if seqlen_q > 64 else "attention_decode") in kernels


def test_mixed_batch(machine):
    """Steps, drafts, chunks and prompts in one call give the right results."""
    rotary, sizes = SCHEMES["hope_rerope_log_n"](64), ((1, 45), (70, 70), (5, 5), (0, 9), (66, 112))
    options = dict(heads=(2, 1), leftpad=(3, 0, 0, 2, 0), page=PAGE, mapped=True, cache_dtype="int8")
    Cached.packed(BF16, rotary, sizes, **options).check()
    assert {"append_rows", "attention_decode", "attention_chunks"} <= {x.kernel for x in machine.launches}
