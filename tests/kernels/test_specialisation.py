"""No length, batch, window or number of heads compiles a kernel anew: the launches of many shapes ask for one
specialisation each."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

# In a process of its own: Triton's interpreter, which the tests run in without a GPU, has no specialisations.
SCRIPT = """
import collections, itertools, json, torch
from bench.compiling.offline import caught_launches
from flashrope import Rotary
from flashrope.backends.calls import AttentionCall
from flashrope.backends import triton as backend
from flashrope.backends.triton import launcher

LAYOUTS = ("sequence first", "heads first", "packed")
keys = collections.defaultdict(set)
for head_dim, layout, (batch, seqlen_q, seqlen_k, window, heads_q, heads_kv) in itertools.product((40, 128), LAYOUTS, [
        (1, 1, 1, 1, 1, 1), (2, 16, 16, 0, 5, 1), (3, 100, 129, 16, 16, 16), (1, 128, 4096, 7, 32, 8),
        (2, 4095, 4095, 64, 6, 3),
        (2, 1 << 20, 1 << 20, 1024, 48, 1)]):
    rotary = Rotary.rope(head_dim).rectify(window) if window else Rotary.rope(head_dim).rectify(1)

    def heads(count, seqlen):
        if layout == "packed":
            return torch.empty(batch * seqlen, count, head_dim, dtype=torch.bfloat16, device="meta")
        if layout == "heads first":
            return torch.empty(batch, count, seqlen, head_dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        return torch.empty(batch, seqlen, count, head_dim, dtype=torch.bfloat16, device="meta")

    q, k, v = heads(heads_q, seqlen_q), heads(heads_kv, seqlen_k), heads(heads_kv, seqlen_k)
    cu_seqlens = torch.empty(batch + 1, dtype=torch.int32, device="meta") if layout == "packed" else None
    call = AttentionCall(rotary, True, 1.0, None, cu_seqlens, cu_seqlens, seqlen_q, seqlen_k)
    with caught_launches(launcher, 90) as launches:
        out, lse, kept = backend.forward(q, k, v, call)
        backend.backward(torch.empty_like(out), None, q, k, v, out, lse, kept, call)
    for launch in launches:
        keys[f"{head_dim} {layout} {launch.kernel.__name__}"].add(repr(launch.key))
print(json.dumps({name: len(of) for name, of in keys.items()}))
"""
LAYOUTS = ("sequence first", "heads first", "packed")
KERNELS = ("rotate_rows", "attention_forward", "attention_statistics", "attention_grad_kv", "attention_grad_q")


def test_lengths_share_kernels():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=pathlib.Path(__file__).parents[2],
        check=False,
    )
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout.splitlines()[-1])
    assert set(counts) == {f"{width} {layout} {name}" for width in (40, 128) for layout in LAYOUTS for name in KERNELS}
    assert set(counts.values()) == {1}, counts
