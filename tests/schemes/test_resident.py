"""Tests the tensors of a scheme that stay on a GPU. The meta device replaces the GPU."""

import subprocess
import sys
import threading

import pytest
import torch
from flashrope import Rotary
from flashrope.schemes import resident
from flashrope.schemes.cos_sin import _resident_frequencies, two_level_table
from flashrope.schemes.resident import kept_on_device
from test_launches import compiling_environment

META, CPU = torch.device("meta"), torch.device("cpu")
BASES = range(10_000, 10_000 + 300)  # more bases than any bounded cache could hold


@pytest.fixture
def capturing(monkeypatch):
    """Returns a function that makes torch behave as within the capture of a CUDA graph."""
    return lambda: monkeypatch.setattr(resident, "is_capturing", lambda: True)


def tables(base, device):
    rotary = Rotary.rope(32, base=base).rectify(50)
    found = [two_level_table(rotary, True, 4, device), *_resident_frequencies(rotary, device)]
    triton = pytest.importorskip("flashrope.backends.triton.device", reason="Triton has no wheel for this platform")
    return [x for x in (*found, *triton.scheme_on(rotary, True, device)[1:]) if x is not None]


def test_what_a_graph_may_point_to_is_never_dropped():
    first = tables(BASES[0], META)
    for base in BASES:
        tables(base, META)
    assert all(x is y for x, y in zip(first, tables(BASES[0], META), strict=True))


def test_on_the_cpu_it_is():
    made = []
    build = kept_on_device("numbers")(lambda n, device: made.append(n) or torch.tensor(n))
    for n in (*BASES, BASES[0]):
        build(n, CPU)
    assert made == [*BASES, BASES[0]]


def test_first_use_inside_a_capture_is_refused(capturing):
    tables(9_999, META)
    capturing()
    tables(9_999, META)
    with pytest.raises(RuntimeError, match="cos/sin tables of this scheme.*Make one call.*before the capture"):
        tables(9_998, META)


def test_threads_share_one_copy():
    made, start = [], threading.Barrier(8)

    @kept_on_device("numbers")
    def build(n, device):
        made.append(n)
        return torch.empty(3, device=device)

    def use():
        start.wait()
        found.append(build(1, META))

    found = []
    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and all(x is found[0] for x in found)


def test_another_thread_makes_it():
    """A resident tensor is made in another thread, because the calling thread may allocate from the pool of a CUDA
    graph, or make inference tensors."""
    build = kept_on_device("numbers")(lambda device: (threading.get_ident(), torch.is_inference_mode_enabled()))
    with torch.inference_mode():
        thread, inference = build(META)
    assert thread != threading.get_ident() and not inference


def test_many_schemes_are_reported_once(monkeypatch):
    monkeypatch.setattr(resident, "MANY", 3)
    build = kept_on_device("numbers")(lambda n, device: torch.empty(n, device=device))
    with pytest.warns(UserWarning, match="numbers of 3 different schemes.*Avoid a new Rotary") as seen:
        for n in range(6):
            build(n, META)
    assert len(seen) == 1


FIRST_LAUNCH = """
import torch
from bench.machine_code import offline
from flashrope import Rotary, attention_with_cache
from flashrope.backends import triton as backend
from flashrope.lowering import resident

backend.unsupported_reason = lambda q, cached=False: ""
q, k = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16), torch.zeros(1, 64, 1, 16, dtype=torch.bfloat16)
capturing = False
resident.is_capturing = lambda: capturing
with offline.active(80, offline.AbsentDevice(80, lambda *_: lambda *_: None)):
    for dtype in (torch.bfloat16, torch.float16):
        for num_splits in (1, None):
            arguments = q.to(dtype), k.to(dtype), k.to(dtype), Rotary.rope(16), torch.ones(1, dtype=torch.int32)
            capturing = True
            try:
                attention_with_cache(*arguments, num_splits=num_splits, impl="triton")
            except RuntimeError as error:
                print(error)
            capturing = False
            attention_with_cache(*arguments, num_splits=num_splits, impl="triton")
            capturing = True
            attention_with_cache(*arguments, num_splits=num_splits, impl="triton")
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/backends/test_cuda_graphs.py captures real graphs")
def test_a_kernel_that_is_not_compiled_yet_is_refused_inside_a_capture():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LAUNCH], capture_output=True, text=True, env=compiling_environment(), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all("kernel attention_decode for these arguments" in line for line in lines), lines
