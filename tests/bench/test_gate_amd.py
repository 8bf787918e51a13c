"""Tests what the gate reads from AMD's assembly, and how calls are dispatched on AMD's GPUs. No GPU is needed."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="the gate compiles Triton kernels")

from flashrope.backends import cuda
from flashrope.backends import triton as backend
from flashrope.backends.shared.splits import MULTIPROCESSORS, multiprocessor
from flashrope.backends.triton import device, launcher
from flashrope.triton_kernels import configs

from bench.machine_code import amdgcn, architectures, cases, gate, offline, sass

# Two loops. The first has two products and touches 12 bytes of scratch memory, the second has one product.
ASSEMBLY = """
attention_forward:
\ts_load_dwordx2 s[0:1], s[4:5], 0x0
\tscratch_store_dword off, v1, off
.LBB0_1:
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\tv_mfma_f32_32x32x8_bf16_1k a[16:31], v[0:1], v[2:3], a[16:31]
\tscratch_load_dwordx2 v[4:5], off, off
\tscratch_store_dword off, v4, off offset:8
\tv_exp_f32_e32 v6, v7
\ts_cbranch_scc1 .LBB0_1
.LBB0_2:
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_vccnz .LBB0_3
\tv_add_f32_e32 v6, v7, v8
\ts_branch .LBB0_2
.LBB0_3:
\ts_endpgm
.Lfunc_end0:
\ts_branch .LBB0_1
    .agpr_count:     32
    .sgpr_spill_count: 2
    .vgpr_count:     140
    .vgpr_spill_count: 3
"""
COMPILED = SimpleNamespace(
    asm={"amdgcn": ASSEMBLY},
    metadata=SimpleNamespace(target=architectures.target("gfx942"), shared=20 * 1024, num_warps=4, num_stages=2),
)


def test_listing():
    listing = amdgcn.listing(ASSEMBLY)
    assert listing.opcodes[0] == "s_load_dwordx2" and listing.opcodes[-1] == "s_endpgm"
    assert listing.loops == ((2, 7), (8, 11))
    assert sass.local_bytes_in_loops(listing) == 12
    assert sass.hot_loop(listing)["mma"] == 2


def test_measured():
    found = offline.measure(COMPILED)
    assert dataclasses.replace(found, loop={}) == amdgcn.Measured(140, 32, 3, 2, 20480, 3, 4, 2, {}, 12)
    assert found.figures() == {
        "warps": "4",
        "stages": "2",
        "VGPRs": "140",
        "AGPRs": "32",
        "spills": "3",
        "in loops": "12",
        "LDS KB": "20",
        "waves/SIMD": "3",
        "MMA": "2",
        "instr/MMA": "3.00",
    }


def test_every_limit_can_be_exceeded():
    found = offline.measure(COMPILED)
    assert found.violations(12, 12, 20480) == []
    assert found.violations(11, 11, 20479) == [
        "spills 3 vector registers, the limit is 2.75",
        "touches 12 spilled bytes per lane in its tile loops, the limit is 11",
        "needs 20480 bytes of LDS, a workgroup has 20479",
    ]


@pytest.mark.parametrize(
    "arch, registers, shared_kb, warps, blocks",
    [
        ("gfx942", 128, 8, 4, 4),
        ("gfx942", 168, 8, 4, 3),
        ("gfx942", 169, 8, 4, 2),  # registers are allocated in units of 8
        ("gfx942", 24, 1, 4, 8),  # at most 8 waves per SIMD
        ("gfx942", 24, 1, 1, 16),
        ("gfx942", 128, 33, 4, 1),
        ("gfx950", 128, 33, 4, 4),
        ("gfx942", 512, 8, 8, 0),  # does not fit
        (80, 255, 0, 8, 1),  # 8 warps of 256 registers fill all 65536
        (80, 168, 0, 4, 3),  # 12 warps of 5376 registers
        (80, 100, 0, 1, 19),  # 3200 registers are rounded up to 3328
        (80, 32, 54, 4, 2),  # 2 * (54 + 1) KB of 164
        (80, 32, 53, 4, 3),
        (80, 16, 0, 1, 32),
        (80, 32, 0, 16, 4),  # 2048 threads
    ],
)
def test_resident_blocks(arch, registers, shared_kb, warps, blocks):
    assert multiprocessor(arch).resident_blocks(registers, shared_kb * 1024, warps) == blocks


def test_targets_by_name():
    assert [architectures.parse(name) for name in ("80", "sm_120", "gfx950")] == [80, 120, "gfx950"]
    with pytest.raises(ValueError):
        architectures.parse("gfx90a")
    assert tuple(MULTIPROCESSORS) == architectures.ALL


def test_by_default_every_target_has_forward_backward_and_decoding():
    for quick in (True, False):
        by_target = {}
        for case in cases.cases(quick):
            by_target.setdefault(case.arch, set()).update(case.kernels)
        for arch in (*architectures.NEWER, *architectures.AMD):
            assert by_target[arch] >= {*cases.KERNELS, *cases.DECODE_KERNELS}, arch


def test_a_row_has_the_columns_of_its_vendor():
    row = gate.Row(SimpleNamespace(kernel=SimpleNamespace(__name__="attention_decode"), arch="gfx942"), [])
    row.result = offline.measure(COMPILED)
    assert row.figures().keys() == set(amdgcn.COLUMNS)


# ---- the dispatch, with a simulated device


@pytest.fixture
def on_amd(monkeypatch):
    """Makes torch look as if it ran under ROCm with a GPU of this name."""

    def be(name: str):
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=name))
        for module in (backend, device):
            monkeypatch.setattr(module, "interpreted", lambda: False)
        device._compute_capability.cache_clear()
        return SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=torch.device("cuda:0"))

    yield be
    device._compute_capability.cache_clear()


@pytest.mark.parametrize("name", ["gfx942:sramecc+:xnack-", "gfx950"])
def test_triton_serves_these(on_amd, name):
    q = on_amd(name)
    assert backend.unsupported_reason(q) == ""
    assert device.compute_capability(q.device) == name.split(":")[0]
    assert configs.tile("forward", name.split(":")[0], 128, 2, 1) == configs.HALF["cdna"]["forward"][128]


def test_others_are_refused_by_name(on_amd):
    assert backend.unsupported_reason(on_amd("gfx1100")) == (
        "the Triton kernels serve gfx942 and gfx950 of AMD's GPUs, this device is gfx1100 (cuda:0)"
    )
    assert cuda._unsupported_device(torch.device("cuda:0")) == "the CUDA kernels need an NVIDIA GPU, cuda:0 is AMD's"


@pytest.mark.parametrize("arch, allowed", [("gfx942", False), (90, True)])
def test_buffer_operations_are_off_where_kernels_compile_for_amd(arch, allowed):
    with offline.active(arch), triton.knobs.amd.scope():
        triton.knobs.amd.use_buffer_ops = True
        with launcher.compiling():
            assert triton.knobs.amd.use_buffer_ops is allowed
        assert triton.knobs.amd.use_buffer_ops
