"""Tests what the executor reports. Each finding is shown by a minimal kernel, and a correct version of the kernel has
no finding."""

import pytest
import support
import torch
from flashrope import attention
from flashrope.backends.triton import device

from .machine.driver import Machine
from .machine.kernel import InvalidPtx, Kernel
from .machine.launches import ExecutionError

HEADER = """
.version 8.7
.target sm_{arch}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry probe(
	.param .u64 .ptr .global .align 1 probe_param_0
)
.reqntid {threads}
{{
	.reg .pred %p<20>;
	.reg .b16 %rs<20>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<20>;
	ld.param.b64 %rd1, [probe_param_0];
	mov.u32 %r1, %tid.x;
	shl.b32 %r2, %r1, 2;
	cvt.u64.u32 %rd2, %r2;
	add.s64 %rd3, %rd1, %rd2;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	shl.b32 %r5, %r1, 4;
	add.s32 %r6, %r3, %r5;
	mov.b32 %r10, 7;
	setp.lt.u32 %p1, %r1, 32;
	setp.lt.u32 %p2, %r1, 16;
{body}
	ret;
}}
"""
OUT = 1024  # bytes of the tensor


def run(
    body: str, arch: int = 80, threads: int = 64, shared: int = 1024, machine: Machine | None = None, blocks: int = 1
) -> torch.Tensor:
    machine = machine or Machine.current
    out = torch.zeros(OUT // 4, dtype=torch.int32)
    lines = "\n".join("\t" + line.strip() for line in body.strip().splitlines())
    text = HEADER.format(arch=f"{arch}a" if arch == 90 else arch, threads=threads, body=lines)
    Kernel(machine, text)((blocks,), out, shared_bytes=shared)
    return out


COPY = """
cp.async.ca.shared.global [%r4], [%rd3], 4;
cp.async.commit_group;
{wait}
ld.shared.b32 %r11, [%r4];
{late}
"""
NEIGHBOUR = "xor.b32 %r12, %r4, {bit};"
READ_NEIGHBOUR = f"st.shared.b32 [%r4], %r1;\nbar.sync 0;\n{NEIGHBOUR.format(bit=128)}\nld.shared.b32 %r11, [%r12];\n"
BYTES = """
prmt.b32 %r11, %r15, %r10, 0x1114U;
prmt.b32 %r12, %r11, %r10, 0x3210U;
prmt.b32 %r13, %r12, 0x64646464, 0x4140U;
sub.rn.f16x2 %r13, %r13, %r13;
mov.b32 {%rs1, %rs3}, %r13;
"""
WRONG_AND_RIGHT = {
    # name: (finding, wrong body, right body)
    "outside": ("write outside the tensors", "st.global.b32 [%rd3+1020], %r10;", "st.global.b32 [%rd3], %r10;"),
    "before": ("read outside the tensors", "ld.global.b32 %r11, [%rd3+-4];", "ld.global.b32 %r11, [%rd3];"),
    "requested outside": (
        "read outside the tensors",
        "prefetch.global.L2 [%rd3+1020];",
        "prefetch.global.L2 [%rd3+2];",
    ),
    "misaligned": ("misaligned global access", "ld.global.b32 %r11, [%rd3+2];", "ld.global.b32 %r11, [%rd3+4];"),
    "vector misaligned": (
        "misaligned global access",
        "ld.global.v2.b32 {%r11, %r12}, [%rd3];",
        "ld.global.v2.b32 {%r11, %r12}, [%rd1];",
    ),
    "outside shared": ("outside shared memory", "st.shared.b32 [%r4+1020], %r10;", "st.shared.b32 [%r4], %r10;"),
    "misaligned shared": ("misaligned shared access", "st.shared.b32 [%r4+2], %r10;", "st.shared.b32 [%r4+4], %r10;"),
    "unwritten shared": (
        "shared memory read before it was written",
        "ld.shared.b32 %r11, [%r4];",
        "st.shared.b32 [%r4], %r10;\nld.shared.b32 %r11, [%r4];",
    ),
    "unwritten register": (
        "register used before it was written",
        "add.s32 %r12, %r11, 1;\nst.global.b32 [%rd3], %r12;",
        "mov.b32 %r11, 1;\nadd.s32 %r12, %r11, 1;\nst.global.b32 [%rd3], %r12;",
    ),
    "unwritten in some lanes": (
        "register used before it was written",
        "@%p2 mov.b32 %r11, 1;\nst.global.b32 [%rd3], %r11;",
        "@%p2 mov.b32 %r11, 1;\n@%p2 st.global.b32 [%rd3], %r11;",
    ),
    "unwritten but not selected": (
        "register used before it was written",
        "selp.b32 %r12, %r11, %r10, %p1;\nst.global.b32 [%rd3], %r12;",
        "@%p2 mov.b32 %r11, 1;\nselp.b32 %r12, %r11, %r10, %p2;\nst.global.b32 [%rd3], %r12;",
    ),
    "unwritten but not permuted": (
        "register used before it was written",
        "prmt.b32 %r12, %r10, %r11, 0x3124U;\nst.global.b32 [%rd3], %r12;",
        "prmt.b32 %r12, %r10, %r11, 0xb120U;\nst.global.b32 [%rd3], %r12;",
    ),
    # One byte of %r11 is written, and no byte of %r15. The last instruction decides whether a bit of %r15 is stored.
    "unwritten half stored": (
        "register used before it was written",
        BYTES + "mov.b32 %r14, {%rs1, %rs3};\nst.global.b32 [%rd3], %r14;",
        BYTES + "mov.b32 %r14, {%rs1, %rs1};\nst.global.b32 [%rd3], %r14;",
    ),
    "unwritten bits masked": (
        "register used before it was written",
        BYTES + "and.b32 %r14, %r12, 0x0f0f0f0f;\nst.global.b32 [%rd3], %r14;",
        BYTES + "and.b32 %r14, %r12, 0x0000000f;\nst.global.b32 [%rd3], %r14;",
    ),
    "unwritten bits shifted": (
        "register used before it was written",
        BYTES + "shr.u32 %r14, %r12, 4;\nand.b32 %r14, %r14, 0x1f;\nst.global.b32 [%rd3], %r14;",
        BYTES + "shr.u32 %r14, %r12, 4;\nand.b32 %r14, %r14, 0x0f;\nst.global.b32 [%rd3], %r14;",
    ),
    "unwritten bits combined": (
        "register used before it was written",
        BYTES + "xor.b32 %r14, %r12, %r12;\nst.global.b32 [%rd3], %r14;",
        BYTES + "shl.b32 %r14, %r12, 24;\nor.b32 %r14, %r14, 7;\nst.global.b32 [%rd3], %r14;",
    ),
    "unwritten bits replaced": (
        "register used before it was written",
        BYTES + "bfi.b32 %r14, 5, %r12, 8, 16;\nst.global.b32 [%rd3], %r14;",
        BYTES + "bfi.b32 %r14, 5, %r12, 8, 24;\nst.global.b32 [%rd3], %r14;",
    ),
    "unwritten bits inserted": (
        "register used before it was written",
        BYTES + "bfi.b32 %r14, %r12, 7, 16, 16;\nst.global.b32 [%rd3], %r14;",
        BYTES + "bfi.b32 %r14, %r12, 7, 24, 9;\nst.global.b32 [%rd3], %r14;",
    ),
    "copy not waited for": (
        "shared memory read before cp.async was waited for",
        COPY.format(wait="", late="cp.async.wait_group 0;"),
        COPY.format(wait="cp.async.wait_group 0;", late=""),
    ),
    "wait lets one group run": (
        "shared memory read before cp.async was waited for",
        COPY.format(wait="cp.async.wait_group 1;", late="cp.async.wait_group 0;"),
        COPY.format(wait="cp.async.commit_group;\ncp.async.wait_group 1;", late=""),
    ),
    "copy never waited for": (
        "cp.async not waited for at the end",
        "cp.async.ca.shared.global [%r4], [%rd3], 4;",
        "cp.async.ca.shared.global [%r4], [%rd3], 4;\ncp.async.wait_all;",
    ),
    "race between warps": (
        "race: read of another warp's write",
        f"st.shared.b32 [%r4], %r1;\n{NEIGHBOUR.format(bit=128)}\nld.shared.b32 %r11, [%r12];",
        f"st.shared.b32 [%r4], %r1;\nbar.sync 0;\n{NEIGHBOUR.format(bit=128)}\nld.shared.b32 %r11, [%r12];",
    ),
    "race between lanes": (
        "race in a warp: read of another lane's write",
        f"st.shared.b32 [%r4], %r1;\n{NEIGHBOUR.format(bit=4)}\nld.shared.b32 %r11, [%r12];",
        f"st.shared.b32 [%r4], %r1;\nbar.warp.sync -1;\n{NEIGHBOUR.format(bit=4)}\nld.shared.b32 %r11, [%r12];",
    ),
    "two warps write": (
        "race: two warps write",
        "and.b32 %r12, %r1, 31;\nshl.b32 %r12, %r12, 2;\nadd.s32 %r12, %r12, %r3;\nst.shared.b32 [%r12], %r1;",
        "and.b32 %r12, %r1, 31;\nshl.b32 %r12, %r12, 2;\nadd.s32 %r12, %r12, %r3;\nst.shared.b32 [%r12], %r10;",
    ),
    "write after read": (
        "race: write of what another warp reads",
        READ_NEIGHBOUR + "st.shared.b32 [%r4], %r10;",
        READ_NEIGHBOUR + "bar.sync 0;\nst.shared.b32 [%r4], %r10;",
    ),
    "deadlock": ("deadlock", "@%p1 ret;\nbar.sync 0;", "bar.sync 0;\n@%p1 ret;"),
    "divergent barrier": (
        "divergent barrier",
        "@%p1 bra $L1;\nbar.sync 0;\nbra $L2;\n$L1:\nbar.sync 0;\n$L2:",
        "@%p1 bra $L1;\nbra $L1;\n$L1:\nbar.sync 0;",
    ),
    "barrier of some lanes": ("lanes apart", "@%p2 bar.sync 0;\n@!%p2 bar.sync 0;", "bar.sync 0;"),
    "endless loop": (
        "step limit",
        "$L1:\nbra $L1;",
        "$L1:\nadd.s32 %r10, %r10, -1;\nsetp.gt.s32 %p3, %r10, 0;\n@%p3 bra $L1;",
    ),
}


@pytest.mark.parametrize("name", WRONG_AND_RIGHT)
def test_noticed(machine, name):
    finding, wrong, right = WRONG_AND_RIGHT[name]
    machine.reset(step_limit=10_000)
    run(right)
    with pytest.raises(ExecutionError) as raised:
        run(wrong)
    found = [line for line in str(raised.value).splitlines() if line.startswith(finding + ": probe line ")]
    assert found and "block (0, 0, 0) warp " in found[0], raised.value


# m64n8k16: A in registers, B (16, 8) in 256 bytes of shared memory that every lane of a warp fills.
WGMMA = """
mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
mov.b32 %r24, 0; mov.b32 %r25, 0; mov.b32 %r26, 0; mov.b32 %r27, 0;
and.b32 %r12, %r1, 63;
shl.b32 %r12, %r12, 2;
add.s32 %r12, %r12, %r3;
st.shared.b32 [%r12], %r24;
{proxy}
bar.sync 0;
bfe.u32 %r13, %r3, 4, 14;
cvt.u64.u32 %rd5, %r13;
or.b64 %rd5, %rd5, 34359803904;
{fence}
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r20,%r21,%r22,%r23}}, {{%r24,%r25,%r26,%r27}}, %rd5, 1, 1, 1, 0;
wgmma.commit_group.sync.aligned;
{early}
{wait}
{late}
"""
RIGHT = {
    "proxy": "fence.proxy.async.shared::cta;",
    "fence": "wgmma.fence.sync.aligned;",
    "early": "",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "late": "add.s32 %r30, %r20, 1;",
}


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"proxy": ""}, "no fence.proxy.async between the write and wgmma"),
        ({"fence": ""}, "no wgmma.fence after a register was written"),
        ({"wait": ""}, "accumulator of an unfinished wgmma read"),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, "accumulator of an unfinished wgmma read"),
        ({"early": "mov.b32 %r24, 1;"}, "register of an unfinished wgmma written"),
        ({"early": "st.shared.b32 [%r12], %r10;"}, "shared memory written under an unfinished wgmma"),
        ({"wait": "", "late": ""}, "wgmma not waited for at the end"),
    ],
)
def test_wgmma(machine, arch, changes, finding):
    if arch != 90:
        pytest.skip("sm_90")
    run(WGMMA.format(**RIGHT), 90, 128)
    with pytest.raises(ExecutionError) as raised:
        run(WGMMA.format(**RIGHT | changes), 90, 128)
    assert any(line.startswith(finding) for line in str(raised.value).splitlines()), raised.value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sm_80", "sm_130", "line 3: compiled for a target outside sm_80 to sm_121"),
        ("sm_80", "sm_75", "a target outside"),
        (".version 8.7", ".version 6.5", "line 2: PTX version outside 7.0 to 9.x"),
        ("\tret;", "\tfoo.bar %r1;\n\tret;", r"unknown instruction: foo.bar \(line 28\)"),
        (
            "\tret;",
            "\tfoo.bar %r1;\n\ttcgen05.wait::st.sync.aligned;\n\tret;",
            "tensor memory of sm_100 is not modelled: tcgen05.wait::st.sync.aligned",
        ),
        ("\tret;", "\tadd.s32 %r1, %rd1, 1;", "operand %rd1 has 8 bytes, expected 4"),
        ("\tret;", "\tbra $nowhere;", "no label"),
        (".visible .entry", ".visible .func", "no .entry"),
    ],
)
def test_ptx_that_it_refuses(machine, old, new, message):
    text = HEADER.format(arch=80, threads=64, body="")
    with pytest.raises(InvalidPtx, match=message):
        Kernel(machine, text.replace(old, new))


def test_ptx_for_another_device(machine, arch):
    if arch != 121:
        with pytest.raises(InvalidPtx, match=f"newer device than sm_{arch}"):
            Kernel(machine, HEADER.format(arch="121", threads=64, body=""))
    if arch > 90:
        with pytest.raises(InvalidPtx, match=f"compiled only for sm_90, this is sm_{arch}"):
            Kernel(machine, HEADER.format(arch="90a", threads=64, body=""))


def test_order_of_warps_follows_the_seed(machine):
    """The order of warps follows the seed. Every warp writes its number to the same address in global memory, so the
    last number stays there."""
    last = set()
    for seed in range(8):
        machine.reset(seed=seed)
        out = run("shr.u32 %r11, %r1, 5;\nst.global.b32 [%rd1], %r11;", threads=256)
        last.add(int(out[0]))
        if seed == 0:
            assert int(out[0]) == 7
    assert len(last) > 2


ADD = "mov.b32 %r11, 0f3F800000;\n{guard} atom.global.gpu.relaxed.add.f32 %r12, [%rd1], %r11;"
STORE = "{guard} st.global.b32 [%rd1], %r10;"
LOAD = "{guard} ld.global.b32 %r12, [%rd1];"


@pytest.mark.parametrize(
    ("first", "others", "finding"),
    [
        (ADD, ADD, None),
        (LOAD, LOAD, None),
        (STORE, ADD, "race: atomic addition to another block's write"),
        (ADD, STORE, "race: two blocks write"),
        (ADD, LOAD, "race: read of another block's write"),
        (STORE, LOAD, "race: read of another block's write"),
    ],
)
def test_races_of_blocks(machine, first, others, finding):
    """Three blocks run in order. The first runs one body, the other two run another body."""
    machine.reset(seed=0, threads=1)
    body = "mov.u32 %r13, %ctaid.x;\nsetp.eq.u32 %p3, %r13, 0;\n"
    body += f"{first.format(guard='@%p3')}\n{others.format(guard='@!%p3')}"
    if finding is None:
        run(body, blocks=3)
        return
    with pytest.raises(ExecutionError) as raised:
        run(body, blocks=3)
    assert any(line.startswith(finding) for line in str(raised.value).splitlines()), raised.value


def test_order_of_blocks_follows_the_seed(machine):
    """The order of blocks follows the seed. Each block adds a number to a float32 sum. The numbers differ so much in
    size that rounding shows the order."""
    body = """
    mov.u32 %r13, %ctaid.x;
    shl.b32 %r13, %r13, 26;
    add.s32 %r13, %r13, 805306368;
    setp.eq.u32 %p3, %r1, 0;
    @%p3 atom.global.gpu.relaxed.add.f32 %r12, [%rd1], %r13;
    """
    sums = set()
    for seed in range(8):
        machine.reset(seed=seed, threads=1)
        sums.add(int(run(body, blocks=9)[0]))
    assert len(sums) > 1


def test_counters(machine):
    machine.launches.clear()
    run("ld.global.b32 %r11, [%rd3];\nex2.approx.ftz.f32 %r12, %r11;\nst.global.b32 [%rd3], %r12;", threads=64)
    (launch,) = machine.launches
    traffic = launch.tensors["argument 0"]
    assert (traffic.size, traffic.read, traffic.distinct_read, traffic.sectors_read) == (OUT, 256, 256, 256)
    assert (traffic.written, traffic.sectors_written) == (256, 256)
    assert launch.special_functions == 64 and launch.warps("ld.global", "st.global") == 4


def test_false_claim_of_alignment(machine, monkeypatch):
    """The executor notices a misaligned access: the second row of k has an odd address, but the launch uses the kernel
    for aligned rows."""
    target = support.Target("triton", torch.float16, "cpu")
    p = support.problem(target, support.SCHEMES["rerope"](64), 150, heads=2, seed=1, softmax_scale=0.02)
    room = torch.zeros(1, 150, 1, 67, dtype=torch.float16)
    machine.reset(strict=False)
    monkeypatch.setattr(device, "aligned", lambda *tensors: True)
    with torch.no_grad():
        attention(p.q, room[..., :64], p.v, p.rotary, softmax_scale=0.02, impl="triton")
    findings = [finding for launch in machine.launches for finding in launch.findings]
    assert any(finding.startswith("misaligned global access: attention_forward") for finding in findings), findings
