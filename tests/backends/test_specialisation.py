"""No length, batch size, window or number of heads compiles a kernel again: the launches of many shapes share one
specialisation."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

# This program runs in a separate process, because Triton's interpreter, which the tests use without a GPU, has no
# specialisations.
PROGRAM = """
import collections, itertools, json, torch
from bench.machine_code.offline import caught_launches
from flashrope import Rotary
from flashrope.calls.records import AttentionCall
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
    with caught_launches(launcher, 90) as launches:
        for deterministic in (True, False):
            call = AttentionCall(rotary, True, 1.0, None, cu_seqlens, cu_seqlens, seqlen_q, seqlen_k, deterministic)
            out, lse, kept = backend.forward(q, k, v, call)
            backend.backward(torch.empty_like(out), None, q, k, v, out, lse, kept, call)
    for launch in launches:
        keys[f"{head_dim} {layout} {launch.kernel.__name__}"].add(repr(launch.key))

from flashrope.calls.cache_tables import CacheLayer, CacheTables
from flashrope.calls.records import CacheCall
from flashrope.calls.plans import attend_once

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

for head_dim in (40, 128):
    for paged in (False, True):
        for batch, seqlen_q, slots, window, num_splits in [
                (1, 1, 4096, 1, 2), (2, 1, 8192, 64, 0), (3, 2, 4097 * 16, 100, 1), (16, 1, 1 << 20, 1024, 16),
                (5, 3, 1 << 16, 9, 0), (1, 1, 1 << 21, 7, 0), (1, 65, 4096, 1, 0), (2, 100, 8192, 64, 0),
                (3, 128, 4097 * 16, 100, 0), (1, 4097, 1 << 21, 7, 0)]:
            cache = tensor(batch * slots // 16 + 1, 16, 1, head_dim) if paged else tensor(batch, slots, 1, head_dim)
            table = tensor(batch, slots // 16, dtype=torch.int32) if paged else None
            seqlens, new = tensor(batch, dtype=torch.int32), tensor(batch, seqlen_q, 1, head_dim)
            tables, layer = CacheTables(seqlens, table, None, seqlen_q), CacheLayer(cache, cache)
            call = CacheCall(Rotary.rope(head_dim).rectify(window), True, 1.0, tables, num_splits)
            with caught_launches(launcher, 90) as launches:
                backend.append_to_cache(layer, new, new, tables)
                q = tensor(batch, seqlen_q, 5, head_dim)
                attend_once(backend, q, layer, call)
            for launch in launches:
                keys[f"{launch.kernel.__name__} {head_dim} {paged}"].add(repr(launch.key))
print(json.dumps({name: len(of) for name, of in keys.items()}))
"""


LAYOUTS = ("sequence first", "heads first", "packed")
KERNELS = dict.fromkeys(("rotate_rows", "attention_forward", "attention_statistics", "attention_finish_grad_q"), 1)
# Three backwards run: one that stores gradients of scores, one that does not, and one in which atomics accumulate dQ.
KERNELS |= {"attention_grad_kv": 3, "attention_grad_q": 2}


def test_lengths_share_kernels():
    """Every kernel is compiled as often as it has kinds, whatever the lengths are."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = dict(capture_output=True, text=True, env=environment, cwd=pathlib.Path(__file__).parents[2], check=False)
    run = subprocess.run([sys.executable, "-c", PROGRAM], **options)
    assert run.returncode == 0, run.stderr
    dense = {f"{width} {layout} {name}": n for width in (40, 128) for layout in LAYOUTS for name, n in KERNELS.items()}
    # A single split writes its result in half precision. Several splits write float32. Shares are a third kernel.
    kernels = ["append_rows", "combine_splits", "rotate_cached_rows", "attention_chunks"]
    splits = dict.fromkeys(kernels, 1) | {"attention_decode": 2}
    shares = splits | {"plan_shares": 1, "combine_shares": 1, "attention_decode": 3}
    cached = {
        f"{name} {head_dim} {paged}": n
        for head_dim, expected in ((40, splits), (128, shares))
        for paged in (False, True)
        for name, n in expected.items()
    }
    assert json.loads(run.stdout.splitlines()[-1]) == dense | cached
