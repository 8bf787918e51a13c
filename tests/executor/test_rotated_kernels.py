"""Runs the compiled kernels of rotate and of caches of rotated keys on the executor."""

import pytest
import support
import torch
from caching import PAGE
from test_rotate import ROTATIONS, check
from test_rotated_keys import cached

BF16, FP16, FP32 = (support.Target("triton", dtype, "cpu") for dtype in (torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize(
    "target, scheme, head_dim",
    [
        (BF16, "rope", 64),
        (FP16, "rope_interleaved", 40),
        (FP32, "rotated_scale", 128),
    ],
    ids=["bf16", "fp16", "fp32"],
)
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_queries_and_keys(machine, target, scheme, head_dim, given):
    positions = 5000 * torch.rand(2, 70, generator=torch.Generator().manual_seed(1)) - 9 if given else None
    check(target, support.random((2, 70, 3, head_dim), target, 0), ROTATIONS[scheme](head_dim), positions)
    assert [launch.kernel for launch in machine.launches] == ["rotate_rows"]


SHORT = dict(lengths=(145, 4, 87), new=4)
CASES = {  # (target, scheme, head_dim, queries, num_splits), options
    "one-token-d64-bf16": ((BF16, "rope", 64, 1, None), dict(page=PAGE, leftpad=(3, 0, 40))),
    "hope-d128-fp16": ((FP16, "hope_yarn", 128, 1, 2), {}),
    "several-full-d40-bf16": ((BF16, "rope_partial", 40, 9, None), dict(causal=False)),
    "before-the-first-key-d16-fp32": ((FP32, "rope", 16, 9, None), dict(causal=False, **SHORT)),
    "prefill-paged-d64-bf16": ((BF16, "rope", 64, 70, None), dict(page=PAGE)),
    "prefill-before-the-first-key-d64-fp16": ((FP16, "local", 64, 70, None), SHORT),
}


@pytest.mark.parametrize("name", CASES)
def test_cached(machine, name):
    (target, scheme, head_dim, seqlen_q, num_splits), given = CASES[name]
    options = {"lengths": (145, max(seqlen_q, 41), 87), "queries": seqlen_q, "capacity": 192, **given}
    cached(target, ROTATIONS[scheme](head_dim), **options).check(num_splits=num_splits)
    kernels = [launch.kernel for launch in machine.launches]
    assert kernels[:2] == ["rotate_rows", "append_rows"] and "rotate_cached_rows" not in kernels
