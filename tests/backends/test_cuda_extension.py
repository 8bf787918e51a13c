"""Tests what the CUDA extension refuses, its build, and the gate that compiles its kernels.

The kernels themselves run in ``tests/executor/test_cuda_kernels.py``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flashrope.backends import cuda
from flashrope.backends.registry import resolve_impl

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16


# ---- refusals and checks


def test_unsupported_reasons(monkeypatch, tmp_path):
    q = torch.empty(1, 1, 1, 64, dtype=BF16)
    assert "only attention_with_cache" in cuda.unsupported_reason(q)
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "absent.so")
    assert "not built" in cuda.unsupported_reason(q, cached=True) and cuda.build_info() == "not built"
    monkeypatch.setattr(cuda, "LIBRARY", Path(__file__))
    assert "CUDA device" in cuda.unsupported_reason(q, cached=True)
    with pytest.raises(ValueError, match="impl='cuda' cannot serve this call: the CUDA kernels need a CUDA device"):
        resolve_impl("cuda", q, cached=True)
    assert "float32" in cuda.unsupported_queries(q.float())
    assert "head_dim 64, 96, 128, 256, q has 80" in cuda.unsupported_queries(q.new_empty(1, 1, 1, 80))
    assert "64 query tokens, q has 65" in cuda.unsupported_queries(q.new_empty(1, 65, 1, 64))
    assert not cuda.unsupported_queries(q)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in cuda._unsupported_device("cuda:0")


def test_a_build_without_nvcc_fails_and_names_it(tmp_path):
    env = {**os.environ, "FLASHROPE_BUILD_CUDA": "1", "PATH": str(tmp_path)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode != 0 and "FLASHROPE_BUILD_CUDA: needs nvcc" in run.stderr


STAND_IN = "int aoti_torch_get_current_cuda_stream(int device, void** stream) { *stream = 0; return 0; }"
LOAD = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
torch.ops.load_library(sys.argv[2])
print(torch.ops.flashrope_cuda.decode.default._schema)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("nvcc", "ninja", "c++"))), reason="needs nvcc, ninja and a C++ compiler on PATH"
)
def test_the_library_builds_and_loads_where_torch_has_cuda(tmp_path):
    """If this torch has no libtorch_cuda, a stub replaces it. No kernel runs, but every symbol must be found."""
    pytest.importorskip("pybind11", reason="the build needs pybind11")
    env = {**os.environ, "FLASHROPE_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "7.5"}
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        tmp_path / "lib",
        "--build-temp",
        tmp_path / "temp",
    ]
    refused = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "TORCH_CUDA_ARCH_LIST: expected numbers from 8.0 on" in refused.stderr
    env["TORCH_CUDA_ARCH_LIST"] = "8.0"
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    stand_in = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if not stand_in.exists():
        stand_in = tmp_path / "libtorch_cuda.so"
        (tmp_path / "stand_in.c").write_text(STAND_IN)
        options = ["-shared", "-fPIC", "-x", "c", "-Wl,-soname,libtorch_cuda.so"]
        subprocess.run(["c++", *options, tmp_path / "stand_in.c", "-o", stand_in], check=True)
    command = [sys.executable, "-c", LOAD, stand_in, tmp_path / "lib/flashrope/_cuda.abi3.so"]
    load = subprocess.run(command, capture_output=True, text=True)
    assert load.returncode == 0 and "flashrope_cuda::decode(Tensor q" in load.stdout, load.stderr
    assert list((tmp_path / "lib/flashrope").glob("_build_info.*.so"))


# ---- the gate
PTXAS = """\
ptxas info    : Compiling entry function '_ZN1a12split_kernelINS_8BFloat16ELi128ELb0EEEvNS_12DecodeParamsE' for 'sm_80'
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 600 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN1a13append_kernelENS_12AppendParamsE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers, 528 bytes cmem[0]
"""


@pytest.fixture
def gate(monkeypatch):
    pytest.importorskip("triton", reason="the gates share their table of GPUs with Triton's")
    monkeypatch.syspath_prepend(str(ROOT))  # bench is not part of the installed package
    from bench.machine_code import gate_cuda

    return gate_cuda


def test_the_gate_reads_registers_and_spills(gate):
    found = gate.ptxas_report(PTXAS)
    assert list(found.values()) == [(168, 32), (26, 0)]


def test_the_gate_reads_the_width_of_copies_per_kernel(gate):
    lines = [
        "        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64] ;",
        "        /*0020*/              @P0  LDGSTS.E [R2], [R4] ;",
        "        /*0030*/                   LDG.E.128 R4, [R2] ;",
    ]
    found = gate.functions("\n".join([".text.first:", *lines[:1], ".text.second:", *lines]))
    assert {name: gate.copy_bytes(listing.opcodes) for name, listing in found.items()} == {
        "first": (16,),
        "second": (16, 4),
    }


def test_every_limit_of_the_gate_can_be_broken(gate):
    name, append = gate.ptxas_report(PTXAS)
    shape = gate.Shape(4, (70_000, 75_000, 80_000, 85_000))
    good = gate.Kernel(80, name, 168, 0, (16, 16), shape)
    assert good.violations() == []
    assert good.label == {"kernel": "split", "arch": "sm_80", "D": "128", "dtype": "bf16", "pairs": "halves"}
    assert "spills 32" in gate.Kernel(80, name, 168, 32, (16,), shape).violations()[0]
    assert "spills 8" in gate.Kernel(80, append, 26, 8).violations()[0]
    assert gate.Kernel(80, name.replace("128", "256"), 255, 8, (16,), shape).violations() == []
    assert "shared memory" in gate.Kernel(80, name, 168, 0, (16,), gate.Shape(4, (1, 170_000, 1, 1))).violations()[0]
    assert "by [4, 16] bytes" in gate.Kernel(80, name, 168, 0, (16, 4), shape).violations()[0]
    assert "by no bytes" in gate.Kernel(80, name, 168, 0, (), shape).violations()[0]


def test_the_gate_says_when_there_is_no_nvcc(gate, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert gate.main([]) == 0
    assert "nvcc is not on PATH" in capsys.readouterr().out
