"""What the executor notices of mbarriers, TMA, barriers of some warps and setmaxnreg. Like ``watches.py``, for sm_90.

Each finding is caused by the smallest kernel that does it, and not by the right version of that kernel.
"""

import ctypes

import pytest
import torch

from .kernel import Kernel
from .launches import ExecutionError

pytestmark = pytest.mark.quick

HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry probe(
	.param .u64 .ptr .global .align 1 probe_param_0,
	.param .align 64 .b8 probe_param_1[128]
)
.reqntid {threads}
.maxnreg 64
{{
	.reg .pred %p<20>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<20>;
	mov.u32 %r1, %tid.x;
	shl.b32 %r2, %r1, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	add.s32 %r5, %r3, 8192;
	mov.b64 %rd1, probe_param_1;
	cvta.param.u64 %rd2, %rd1;
	setp.lt.u32 %p1, %r1, 32;
	setp.eq.b32 %p2, %r1, 0;
	setp.eq.b32 %p3, %r1, 32;
	setp.ge.u32 %p4, %r1, 32;
	setp.lt.u32 %p5, %r1, 128;
	mov.b32 %r10, 0;
	mov.b32 %r11, 1;
{body}
	ret;
}}
"""
ROWS, COLUMNS = 24, 64  # of the tensor; the box has 16 rows of 128 bytes


def tensor_map(machine, tensor: torch.Tensor, swizzle: int):
    room = (ctypes.c_char * 192)()
    aligned = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    strides = (ctypes.c_uint64 * 1)(2 * COLUMNS)
    sizes, box, ones = (ctypes.c_uint64 * 2)(COLUMNS, ROWS), (ctypes.c_uint32 * 2)(64, 16), (ctypes.c_uint32 * 2)(1, 1)
    base = ctypes.c_void_p(tensor.data_ptr())
    encode = machine.library.cuTensorMapEncodeTiled
    assert encode(aligned, 9, 2, base, sizes, strides, box, ones, 0, swizzle, 0, 0) == 0
    return aligned


def run(machine, body: str, threads: int = 64, swizzle: int = 0) -> torch.Tensor:
    """What the kernel leaves of a tensor of the numbers 0, 1, 2, ..."""
    tensor = torch.arange(ROWS * COLUMNS, dtype=torch.int16)
    lines = "\n".join("\t" + line.strip() for line in body.strip().splitlines())
    text = HEADER.format(threads=threads, body=lines)
    Kernel(machine, text)((1,), tensor, tensor_map(machine, tensor, swizzle), shared_bytes=8192 + 64)
    return tensor


def wait(parity: str = "%r10", barrier: str = "%r5") -> str:
    return f"""{{
.reg .pred complete;
waitLoop:
mbarrier.try_wait.parity.shared.b64 complete, [{barrier}], {parity};
@!complete bra.uni waitLoop;
}}"""


INIT = "@%p2 mbarrier.init.shared::cta.b64 [%r5], {count};\nfence.proxy.async.shared::cta;\n{order}"
# The second warp writes and arrives, the first waits and reads what was written.
MBARRIER = (
    INIT
    + """
@%p1 bra $L1;
st.shared.b32 [%r4+-128], %r1;
bar.warp.sync -1;
{arrive}
bra $L2;
$L1:
{wait}
ld.shared.b32 %r12, [%r4];
$L2:
"""
)
RIGHT_MBARRIER = {
    "count": "1",
    "order": "bar.sync 0;",
    "arrive": "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r5];",
    "wait": wait(),
}
# The first warp copies a box and waits for it; both read it; the first copies over it.
TMA = (
    INIT
    + """
@%p4 bra $L1;
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], {bytes};
bar.warp.sync -1;
elect.sync %r20|%p6, -1;
{copy}
{more}
$L1:
{wait}
{read}
{release}
@%p4 bra $L2;
{again}
$L2:
"""
)
COPY = (
    "@%p6 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r3+{to}], [%rd2, {{%r10, %r11}}], [%r5];"
)
COPY_AGAIN = "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 2048;\nbar.warp.sync -1;\n" + COPY.format(to=0)
RIGHT_TMA = {
    "count": "1",
    "order": "bar.sync 0;",
    "bytes": "2048",
    "copy": COPY.format(to=0),
    "more": "",
    "wait": wait(),
    "read": "ld.shared.b32 %r12, [%r4];",
    "release": "bar.sync 1, 64;",
    "again": COPY_AGAIN + wait("%r11"),
}
REGISTERS = """
@%p5 bra $L1;
setmaxnreg.inc.sync.aligned.u32 {more};
bra $L2;
$L1:
setmaxnreg.dec.sync.aligned.u32 {fewer};
$L2:
"""
RIGHT_REGISTERS = {"more": "88", "fewer": "40"}
SOME_WARPS = """
@%p5 bra $L1;
bra $L2;
$L1:
st.shared.b32 [%r4], %r1;
bar.sync {id}, {threads};
xor.b32 %r12, %r4, 128;
ld.shared.b32 %r13, [%r12];
$L2:
"""
RIGHT_SOME_WARPS = {"id": "3", "threads": "128"}
# Which one depends on the order of the warps.
UNORDERED = (
    "race: read of another warp's write",
    "race: write of what another warp reads",
    "race: copy over what another warp reads",
    "shared memory read before the mbarrier of its copy completed",
)
# name: (the kernel, its right version, threads, what is wrong, the finding)
WATCHES = {
    "arrive left out": (MBARRIER, RIGHT_MBARRIER, 64, {"arrive": ""}, "deadlock"),
    "arrival of one warp too few": (MBARRIER, RIGHT_MBARRIER, 64, {"count": "2"}, "deadlock"),
    "the other parity": (MBARRIER, RIGHT_MBARRIER, 64, {"wait": wait("%r11")}, (*UNORDERED, "deadlock")),
    "no wait": (MBARRIER, RIGHT_MBARRIER, 64, {"wait": ""}, UNORDERED),
    "every lane arrives": (
        MBARRIER,
        RIGHT_MBARRIER,
        64,
        {"count": "8", "arrive": "mbarrier.arrive.shared::cta.b64 _, [%r5], 3;"},
        "mbarrier: too many arrivals",
    ),
    "init not seen": (
        MBARRIER,
        RIGHT_MBARRIER,
        64,
        {"order": "bar.warp.sync -1;"},
        ("race: mbarrier used before its init was seen", "no mbarrier"),
    ),
    "too many bytes expected": (TMA, RIGHT_TMA, 64, {"bytes": "4096"}, "deadlock"),
    "too few bytes expected": (TMA, RIGHT_TMA, 64, {"bytes": "1024"}, "deadlock"),
    "no bytes expected": (TMA, RIGHT_TMA, 64, {"bytes": "0"}, UNORDERED),
    "two copies, the bytes of one": (
        TMA,
        RIGHT_TMA,
        64,
        {"more": COPY.format(to=2048)},
        ("mbarrier: bytes that its phase did not expect", "deadlock", "bulk copy not waited for"),
    ),
    "copy read before it is there": (
        TMA,
        RIGHT_TMA,
        64,
        {"wait": "", "again": wait()},
        UNORDERED,
    ),
    "copy over what is still read": (TMA, RIGHT_TMA, 64, {"release": ""}, UNORDERED),
    "copy never waited for": (TMA, RIGHT_TMA, 64, {"again": COPY_AGAIN}, "bulk copy not waited for at the end"),
    "copy to a misaligned address": (TMA, RIGHT_TMA, 64, {"copy": COPY.format(to=64)}, "misaligned shared access"),
    "copy behind the end": (TMA, RIGHT_TMA, 64, {"copy": COPY.format(to=7168)}, "outside shared memory"),
    "more registers than there are": (REGISTERS, RIGHT_REGISTERS, 256, {"more": "96"}, "deadlock"),
    "registers given that it lacks": (REGISTERS, RIGHT_REGISTERS, 256, {"fewer": "72"}, "impossible setmaxnreg"),
    "registers not a multiple of 8": (REGISTERS, RIGHT_REGISTERS, 256, {"fewer": "36"}, "impossible setmaxnreg"),
    "warps missing at a barrier": (SOME_WARPS, RIGHT_SOME_WARPS, 256, {"threads": "160"}, "deadlock"),
    "barrier of too few warps": (
        SOME_WARPS,
        RIGHT_SOME_WARPS,
        256,
        {"threads": "32"},
        UNORDERED,
    ),
    "no such barrier": (SOME_WARPS, RIGHT_SOME_WARPS, 256, {"id": "16"}, "impossible barrier"),
}
NO_FENCE = TMA.replace("fence.proxy.async.shared::cta;\n", "")


@pytest.fixture(autouse=True)
def hopper(arch):
    if arch < 90:
        pytest.skip("sm_90")


def findings(machine, body: str, threads: int = 64) -> list[str]:
    with pytest.raises(ExecutionError) as raised:
        run(machine, body, threads)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("name", WATCHES)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_noticed(machine, name, seed):
    kernel, right, threads, wrong, finding = WATCHES[name]
    machine.reset(seed=seed)
    run(machine, kernel.format(**right), threads)
    found = findings(machine, kernel.format(**right | wrong), threads)
    named = [line for line in found if line.startswith(finding)]
    assert named and "probe line " in named[0] and " warp " in named[0], found


def test_tma_needs_a_fence_behind_the_init(machine):
    found = findings(machine, NO_FENCE.format(**RIGHT_TMA))
    assert any(line.startswith("no fence between mbarrier.init and its use by TMA") for line in found), found


@pytest.mark.parametrize("swizzle", [0, 3])
@pytest.mark.parametrize("first", [1, 23, -1])
def test_tma_copies_a_box(machine, swizzle, first):
    """The first two rows of a box that begins at row `first`: rows outside the tensor are 0. The swizzle exchanges
    pieces of 16 bytes within every row."""
    read = "ld.shared.b32 %r12, [%r4];\nld.param.b64 %rd3, [probe_param_0];\ncvt.u64.u32 %rd4, %r2;\n"
    read += "add.s64 %rd5, %rd3, %rd4;\nst.global.b32 [%rd5], %r12;"
    body = f"mov.b32 %r11, {first};\n" + TMA.format(**RIGHT_TMA | {"read": read, "again": ""})
    rows = torch.zeros(ROWS + 2, COLUMNS, dtype=torch.int16)
    rows[1:-1] = torch.arange(ROWS * COLUMNS, dtype=torch.int16).view(ROWS, COLUMNS)
    pieces = rows[first + 1 : first + 3].view(2, 8, 8)
    if swizzle:
        pieces = torch.stack([row[torch.arange(8) ^ n] for n, row in enumerate(pieces)])
    assert torch.equal(run(machine, body, 64, swizzle)[:128], pieces.flatten())


@pytest.mark.parametrize("seed", range(20))
def test_every_order_gives_the_same(machine, seed):
    machine.reset(seed=seed)
    for kernel, right, threads, *_ in WATCHES.values():
        run(machine, kernel.format(**right), threads)
