"""Tests the issue model on small loops whose clocks can be counted by hand. Also tests the ranking that ``bench model``
writes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the commands of bench.machine_code import it")


from bench import model
from bench.machine_code import cases, issue, predict, sass

RATES = issue.RATES[80]


def code(*texts):
    """Returns the instructions that the texts describe. A text is an opcode and then words: s with a stall count, w or
    r with a scoreboard to hold, or W with a scoreboard to wait for."""
    found = []
    for text in texts:
        opcode, *words = text.split()
        fields = {word[0]: int(word[1:]) for word in words if word[0] in "swrW"}
        control = fields.get("s", 1) << 41 | fields.get("w", 7) << 46 | fields.get("r", 7) << 49
        if "W" in fields:
            control |= 1 << 52 + fields["W"]
        found.append(issue.instruction(opcode, " ".join(word for word in words if word[0] == "S"), control))
    return found


def clocks(*texts, warps=1, blocks=1):
    return issue.steady(code(*texts), warps, blocks, RATES).clocks


# ---- issue


def test_one_instruction_a_clock():
    assert clocks(*["S2R"] * 10) == 10  # this instruction has no pipe
    assert clocks(*["S2R"] * 10, warps=4) == 10  # every warp has its own scheduler
    assert clocks(*["S2R"] * 10, warps=8) == 20


def test_stall_counts_of_one_warp_are_filled_by_another():
    assert clocks("S2R s8", "S2R s2") == 10
    assert clocks("S2R s8", "S2R s2", warps=8) == 10
    assert clocks(*["S2R s2"] * 5, warps=16) == 20  # four warps per scheduler


@pytest.mark.parametrize(
    ("opcode", "busy"),
    [
        ("HMMA.16816.F32.BF16", 8),
        ("HMMA.1688.F32.BF16", 4),
        ("FFMA.FTZ", 2),
        ("IMAD.WIDE", 2),
        ("IADD3", 2),
        ("MUFU.EX2", 8),
    ],
)
def test_a_pipe_takes_an_instruction_every_few_clocks(opcode, busy):
    assert clocks(*[opcode] * 6) == 6 * busy
    assert clocks(*[opcode] * 6, warps=8) == 12 * busy  # two warps share the pipe


def test_pipes_overlap():
    """Pipes overlap: with four products and their additions, the tensor cores never wait for the other pipe."""
    assert clocks(*["HMMA.16816.F32", "FADD", "FADD", "FADD"] * 4) == 4 * 8
    assert clocks(*["HMMA.16816.F32", *["FADD"] * 5] * 4) == 4 * 10


def test_shared_memory_is_of_all_schedulers():
    """All schedulers share the bandwidth of shared memory. An LDSM.x4 moves 512 bytes in 4 clocks. Each of four warps
    issues 8 of these loads, so the queue never empties."""
    assert clocks(*["LDSM.16.M88.4"] * 8, warps=4) == pytest.approx(4 * 8 * 4, abs=1)
    assert clocks(*["LDSM.16.M88.4"] * 8, warps=8) == pytest.approx(8 * 8 * 4, abs=2)
    assert clocks(*["LDS.128"] * 8, warps=4) == pytest.approx(4 * 8 * 4, abs=1)
    assert clocks(*["LDS"] * 8, warps=4) == pytest.approx(4 * 8, abs=1)  # 128 bytes take one clock


def test_a_scoreboard_holds_the_next_instruction_back():
    """An instruction waits for its scoreboard. A load leaves the queue after 4 clocks, transfers for 4 clocks, and its
    result is there after its latency. Only then does the addition issue, and after it the next load."""
    wait = 4 + 4 + RATES.shared_latency
    assert clocks("LDSM.16.M88.4 w0", "FADD W0 s1") == wait + 1
    assert clocks("LDSM.16.M88.4 w0", "FADD W1 s1") < wait  # the addition waits for another scoreboard
    assert clocks("MUFU.EX2 w2", "FADD W2") == RATES.mufu_latency + 1
    # A store reads its operands when it leaves the queue. Only then may the operands' registers be overwritten.
    assert clocks("STS.128 r3", "FADD W3") == 4 + 4 + 1


def test_copies_in_the_background():
    """Copies by cp.async run in the background. A wait that allows no outstanding group takes the whole latency. A wait
    that allows one outstanding group takes less."""
    arrival = 4 + 4 + RATES.memory_latency
    copy = ["LDGSTS.E.BYPASS.128", "LDGDEPBAR"]
    assert clocks(*copy, "DEPBAR.LE SB0,0x0") == pytest.approx(arrival + 1, abs=1)
    assert clocks(*copy, "DEPBAR.LE SB0,0x1") == pytest.approx((arrival + 1) / 2, rel=0.1)  # two in flight
    assert clocks(*copy, *["S2R s15"] * 60, "DEPBAR.LE SB0,0x1") == pytest.approx(60 * 15 + 3, abs=1)


def test_a_barrier_waits_for_the_warps_of_its_block():
    """A barrier waits for the warps of its block. Each of two warps on one scheduler has 20 instructions before the
    barrier, and both wait until all 40 are issued."""
    body = [*["S2R"] * 20, "BAR.SYNC"]
    assert clocks(*body, warps=1) == 20 + RATES.barrier
    assert clocks(*body, warps=8) == 2 * 20 + 1 + RATES.barrier
    # While one block waits, the other works. So the total is the time needed to issue the instructions of both blocks.
    both = issue.Multiprocessor(code(*body), 4, 2, RATES, 21).run(2, 6)
    assert both.clocks == pytest.approx(2 * 21, abs=1)


def test_the_waits_add_up():
    steady = issue.steady(code("MUFU.EX2 w2", "FADD W2"), 4, 1, RATES)
    assert sum(steady.waits.values()) == pytest.approx(1)
    assert steady.waits["issue"] == pytest.approx(2 / (RATES.mufu_latency + 1))
    assert steady.waits["mufu"] == pytest.approx(1 - steady.waits["issue"])
    steady = issue.steady(code(*["HMMA.16816.F32"] * 4), 4, 1, RATES)
    assert steady.waits["tensor"] == pytest.approx(7 / 8) and steady.waits["issue"] == pytest.approx(1 / 8)
    steady = issue.steady(code(*["S2R"] * 20, "BAR.SYNC"), 4, 1, RATES)
    assert steady.waits["barrier"] == pytest.approx((RATES.barrier - 1) / (20 + RATES.barrier))


def test_smaller_devices_take_longer_for_products():
    body = [issue.instruction("HMMA.16816.F32.BF16", rates=issue.RATES[86])] * 4
    assert issue.steady(body, 4, 1, issue.RATES[86]).clocks == 4 * 16


# ---- listings

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                /* 0x00000a0000017a02 */
                                                                         /* 0x000fe20000000f00 */
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x0000000c0804723c */
                                                                         /* 0x000ff00000041804 */
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R2], [R4.64] ;   /* 0x0000000004027fae */
                                                                         /* 0x0003e2000b901c44 */
        /*0030*/                   DEPBAR.LE SB0, 0x1 ;                  /* 0x000080400000791a */
                                                                         /* 0x004fca0000000000 */
        /*0040*/               @P0 BRA `(.L_x_1) ;                       /* 0xffffff8000007947 */
                                                                         /* 0x000fea000383ffff */
        /*0050*/                   EXIT ;                                /* 0x000000000000794d */
                                                                         /* 0x000fea0003800000 */
"""


def test_control_bits():
    """The stall count is in bits 41 to 44 of the upper half, the scoreboards to set are in 46 to 51, and those to wait
    for in 52 to 57."""
    listing = sass.parse(LISTING)
    assert len(listing.controls) == len(listing.opcodes) == 6 and listing.loops == ((1, 4),)
    found = predict.code_of(listing, 80, [(0, 5)])
    assert [each.stall for each in found] == [1, 8, 1, 5, 5, 5]
    assert found[1].write is found[1].read is None and found[1].pipe == "tensor"
    assert found[2].read == 1 or found[2].write == 1 and found[2].copies
    assert found[3].waits == (2,) and found[3].groups == 1
    assert sass.parse(LISTING.replace("/* 0x", "/* x")).controls == ()


def test_inner_loop():
    listing = sass.parse(LISTING)
    loop = predict.inner_loop(listing, 80, 128, 40_000, 4)
    assert (loop.blocks, loop.warps) == (4, 4)
    # every block has one HMMA per pass on each scheduler, so 4 blocks take at least 4 * 8 clocks
    assert loop.clocks >= 32 and loop.tensor_share(4) == pytest.approx(32 / loop.clocks)
    assert loop.bytes_per_clock(1000) == pytest.approx(4000 / loop.clocks)
    assert predict.inner_loop(listing, 90, 128, 40_000, 4) is None  # HGMMA is not simulated
    assert predict.inner_loop(listing, 80, 128, 200_000, 4) is None  # a block does not fit on the multiprocessor


def test_products_that_are_needed():
    """A tile of 64 x 32 scores over 96 of 128 channels needs 2 x 64 x 32 x 96 multiply-adds in the forward. One HMMA
    does 2,048 of them."""
    shape = SimpleNamespace(block_m=64, block_n=32, head_dim=96, head_dim_v=0, first_value=-1)
    assert predict.useful_products("attention_forward", shape) == 2 * 96
    assert predict.useful_products("attention_grad_q", shape) == 3 * 96
    assert predict.useful_products("attention_grad_kv", shape) == 4 * 96
    assert predict.useful_products("attention_grad_kv", shape, atomic=True) == 5 * 96
    narrow = SimpleNamespace(block_m=64, block_n=32, head_dim=192, head_dim_v=128, first_value=-1)
    assert predict.useful_products("attention_grad_q", narrow) == 2 * 192 + 128
    assert predict.useful_products("attention_decode", shape) is None
    assert predict.cache_bytes(shape) == 32 * 96 * 2 * 2
    assert predict.cache_bytes(shape, quantized=True) == 32 * (2 * 96 + 2 * 4)  # and two scales


# ---- the command


def test_cells_of_a_row():
    """Two blocks of decoding read a tile each of 32 int8 keys and values, with their scales, in 1,000 clocks."""
    variant = SimpleNamespace(block_m=16, block_n=32, head_dim=128, head_dim_v=0, first_value=-1)
    waits = dict.fromkeys(issue.WAITS, 1 / len(issue.WAITS))
    loop = predict.Loop(80, 1000, 2, 4, waits)
    measured = SimpleNamespace(model=loop, warps=4, stages=3, registers=99, loop={})
    scheme = cases.Scheme("some", cases.ONE_BAND.rotary, cache="paged", quantized=True)
    decode = SimpleNamespace(__name__="attention_decode")
    launch = SimpleNamespace(kernel=decode, arch=80, kwargs={"VARIANT": variant}, stores_scores=False)
    cells = model.row(scheme, launch, measured)
    assert cells["B/clk"] == f"{2 * 32 * (2 * 128 + 8) / 1000:.1f}" and "tensor" not in cells
    launch.kernel.__name__ = "attention_forward"
    forward = model.row(cases.ONE_BAND, launch, measured)
    assert "B/clk" not in forward and forward["tensor"] == f"{loop.tensor_share(2 * 16 * 32 * 128 / 2048):.1%}"
    assert set(cells) | set(forward) == set(model.COLUMNS)
