"""A kernel that comes from a Triton cache without IR is launched like one that was just compiled."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

SCRIPT = """
import json, torch
from bench.machine_code.offline import active, caught_launches
from flashrope import Rotary
from flashrope.backends import triton as backend
from flashrope.calls.records import AttentionCall
from flashrope.backends.triton import launcher
from flashrope.backends.triton.accumulators import held_once

q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="meta")
call = AttentionCall(Rotary.rope(64), True, 0.125, None, None, None, 256, 256, False)
with caught_launches(launcher, 80) as launches:
    out, lse, kept = backend.forward(q, q, q, call)
    backend.backward(torch.empty_like(q), None, q, q, q, out, lse, kept, call)
(launch,) = [x for x in launches if x.kernel.__name__ == "attention_grad_kv"]
compiled = launch.compile()
with active(80):
    allowed = launcher.ir_allows(held_once, launch.kernel, *launch.args, **launch.kwargs)
    ttgir = launcher.ttgir_of(compiled)
print(json.dumps(["ttgir" in compiled.asm, allowed, ttgir]))
"""


def run(cache: pathlib.Path, binary_only: bool):
    """Returns (whether the cache has the kernel's IR, whether the kernel may add dQ with red, the IR)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": str(int(binary_only))}
    options = dict(capture_output=True, text=True, env=environment, cwd=pathlib.Path(__file__).parents[2], check=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_cache_without_ir(tmp_path):
    whole = run(tmp_path / "whole", binary_only=False)
    assert whole[:2] == [True, True]
    for _ in range(2):  # compiled, then loaded from the cache
        assert run(tmp_path / "binary", binary_only=True) == [False, True, whole[2]]
