"""Tests the issue model on small loops, blocks and waves whose clocks can be counted by hand. Also tests the tables
that ``bench model`` writes."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the commands of bench.compiling import it")

from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile
from flashrope.tuning import candidates as tuning

from bench import model
from bench import results_page as page
from bench.compiling import bounds, candidates, cases, issue, predict, sass, waves
from bench.report import predicted

RATES = issue.RATES[80]
RESULTS = Path(__file__).resolve().parents[2] / "bench/results/model"


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


# ---- listings and blocks

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


def test_inner_loop_and_the_block_around_it():
    listing = sass.parse(LISTING)
    loop = predict.inner_loop(listing, 80, 128, 40_000, 4)
    assert (loop.blocks, loop.warps) == (4, 4)
    # every block has one HMMA per pass on each scheduler, so 4 blocks take at least 4 * 8 clocks
    assert loop.clocks >= 32 and loop.tensor_share(4) == pytest.approx(32 / loop.clocks)
    assert loop.bytes_per_clock(1000) == pytest.approx(4000 / loop.clocks)
    block = predict.block(listing, loop)
    assert block.inner == block.edge == loop.clocks  # there is no other loop
    assert 0 < block.fixed < 40
    assert block.clocks(10, 2) == pytest.approx(block.fixed + 12 * loop.clocks)
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
    assert predict.cache_bytes(shape, 4) == 32 * (96 + 2 * 4)  # half a byte of each number, and two scales


# ---- waves

DEVICE = waves.Device("two multiprocessors", 2, 1e6, 1e9)


def test_blocks_go_where_there_is_room():
    assert waves.seconds(DEVICE, [4, 3, 2, 1], 1, 1) == 5e-6  # 4 + 1 and 3 + 2
    assert waves.seconds(DEVICE, [1, 2, 3, 4], 1, 1) == 6e-6  # 1 + 3 and 2 + 4
    assert waves.seconds(DEVICE, [4, 3, 2, 1], 2, 1) == 4e-6
    assert waves.seconds(DEVICE, [1], 2, 9) == 3e-6
    assert waves.copy_seconds(DEVICE, 5e8) == 0.5


def test_causal_lengths():
    block, sizes = predict.Block(100, 10, 1000, 1), waves.Problem(1, 1, 256, 64)
    # Tiles have 128 queries and 64 keys. The first tile of queries visits 2 tiles of keys, both on the diagonal. The
    # second visits 4.
    assert waves.query_tile_lengths(block, sizes, 128, 64) == [2100, 2120]
    assert waves.key_tile_lengths(block, sizes, 64, 128) == [2120, 2100]
    windowed = waves.Problem(1, 1, 1024, 64, window=128)
    assert waves.query_tile_lengths(block, windowed, 128, 64)[-1] == 100 + 5000 + 11 * 10
    assert sizes.flops == 2 * 256**2 * 64 and sizes.tensor_bytes == 2 * 256 * 64
    assert waves.tflops(sizes, 2.5, [1e-6, 1e-6]) == pytest.approx(2.5 * sizes.flops / 2e-6 / 1e12)


# ---- what is published


def test_flash_attention_2_is_predicted_within_15_percent():
    """The page's table follows from the stored figures of FlashAttention-2's kernels. Its predictions are within 15% of
    the published measurements."""
    rows = {
        (row["who"], row["pass"], row["D"]): row
        for row in model.device_rows({}, model.read_csv(RESULTS / model.THEIRS))
    }
    kept = {(row["who"], row["pass"], row["D"]): row for row in model.read_csv(RESULTS / model.DEVICE)}
    for head_dim, published in model.PUBLISHED.items():
        for seqlen, speed in published.items():
            predicted = rows["FlashAttention-2", "both", str(head_dim)][str(seqlen)]
            assert kept["FlashAttention-2", "both", str(head_dim)][str(seqlen)] == predicted
            assert kept["published", "both", str(head_dim)][str(seqlen)] == str(speed)
            assert abs(float(predicted) / speed - 1) < 0.15


def compiled(scheme, *names, head_dim=128):
    """Returns {key: kernel} as device_rows takes them, for kernels of sm_80 whose loops take 10 clocks."""
    variant = SimpleNamespace(block_m=64, block_n=64)
    kernel = SimpleNamespace(block=predict.Block(100, 10, 10, 1), variant=variant)
    return {(80, head_dim, scheme, name): kernel for name in names}


def test_calls_have_no_figures_where_a_kernel_was_not_compiled():
    """For long sequences the workspace of score gradients does not fit. RoPE's predictions then use the kernels of the
    scheme that stores no score gradients."""
    found = compiled("rope", "attention_forward", "attention_grad_kv", "attention_grad_q")
    rows = list(model.device_rows(found, []))
    assert {(row["who"], row["pass"]) for row in rows} == {("rope", each) for each in ("forward", "backward", "both")}
    assert all("512" in row and "131072" not in row for row in rows)
    seven = found | compiled("rope seven", "attention_grad_kv", "attention_grad_q")
    assert all("131072" in row for row in model.device_rows(seven, []))
    backward = compiled("rerope", "attention_grad_kv", "attention_grad_q")
    assert list(model.device_rows(found | backward, [])) == rows


def test_only_calls_that_store_gradients_of_scores_run_for_few_heads():
    """At 128 channels, where gradients of scores are stored, a launch at 32,768 tokens serves one head. At 512 channels
    nothing is stored, so a launch serves all heads, and sequences of every length have figures."""
    calls = {}

    def seconds(device, lengths, resident, rounds):
        calls.setdefault(head_dim, []).append(rounds)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.waves, "seconds", seconds)
        for head_dim in (128, 512):
            found = compiled("rope", *("attention_forward", "attention_grad_kv", "attention_grad_q"), head_dim=head_dim)
            problem = model.problem(32768, head_dim)
            assert model.our_seconds(found, cases.ONE_BAND, problem, waves.A100)
            rows = [row for row in model.device_rows(found, []) if row["pass"] == "both"]
            assert ["131072" in row for row in rows] == [head_dim == 512]
    assert set(calls[128][:33]) == {16, 1} and set(calls[512][:3]) == {4}


@pytest.mark.parametrize(
    "words",
    ["--scheme rope", "--head-dim 64", "--arch 80", "--head-dim 128 512 --scheme rope", "--head-dim 512 --arch 86"],
)
def test_tables_are_not_published_with_fewer_rows(words, capsys):
    with pytest.raises(SystemExit):
        model.main([*words.split(), "--publish"])
    assert "--publish: expected every scheme" in capsys.readouterr().err


# ---- what limits decoding


def test_rows_of_the_table_of_decoding():
    """The table has rows for every head_dim and every type of cache that the calls accept, contiguous and in pages."""
    rows = bounds.rows_of()
    assert {row.head_dim for row in rows} == {64, 128, 256, 512, 576}
    assert {row.type for row in rows if row.head_dim <= 256} == {"bf16", "int8", "int4"}
    assert {row.type for row in rows if row.head_dim > 256} == {"bf16"}
    assert {row.scheme.heads for row in rows if row.head_dim == 576} == {(16, 1), (64, 1), (128, 1)}
    assert len(rows) == 2 * (3 * 3 * 3 + 3 + 3) == len(set(rows))
    assert {row.head_dim for row in bounds.rows_of([64])} == {64}


@pytest.mark.parametrize(("heads", "blocks"), [((40, 8), 1), ((64, 1), 4), ((128, 1), 8)])
def test_a_row_of_the_table_of_decoding(heads, blocks):
    """If a pass of 1,000 clocks reads 6,700 bytes, two blocks read 13.4 bytes per clock, as much as DRAM delivers.
    Keys that several blocks read count once."""
    scheme = cases.Scheme("some", cases.ONE_BAND.rotary, cache="paged", heads=heads, codes="int8")
    row = bounds.Decoding("RoPE", 128, scheme)
    variant = SimpleNamespace(block_m=16, block_n=32, head_dim=128, head_dim_v=0, first_value=-1)
    sm80 = SimpleNamespace(model=predict.Loop(80, 1000, 2, 4, {}), warps=4, stages=3)
    sm90 = SimpleNamespace(loop={"total": 500}, warps=4)
    nbytes = 32 * (2 * 128 + 8) / blocks
    cells = bounds.figures(row, (variant, variant), (sm80, sm90))
    assert cells["B/clk"] == f"{2 * nbytes / 1000:.1f}" and cells["sm_90 instr/B"] == f"{4 * 500 / nbytes:.3f}"
    assert cells["keys"] == ("51" if blocks == 1 else f"{64 / blocks:.0f}")  # a pass of both blocks reads 64 keys
    assert cells["limited by"] == ("memory" if blocks == 1 else "the loop") and cells["type"] == "int8"
    assert list(cells) == list(bounds.COLUMNS) and pytest.approx(13.39, abs=0.01) == bounds.DRAM


def test_the_page_ranks_by_the_model_and_promises_no_speed():
    """The page has the clocks of inner loops, marked as predicted, and no predicted time or speed of an A100."""
    lines = predicted.section(RESULTS.parent, page._table)
    assert predicted.MARK in lines[0] and "No A100 was measured." in predicted.TEXT
    loops = predicted.read(RESULTS / predicted.LOOPS)
    shown = [line for line in lines if line.startswith(f"| {loops[0]['kernel']} | {loops[0]['scheme']} | sm_80 |")]
    assert any(f"| {loops[0]['clocks']} |" in line for line in shown)
    headings = [line for line, below in zip(lines, lines[1:], strict=False) if below.startswith("|---")]
    assert headings and not any("A100" in heading for heading in headings)


def test_candidates_have_the_order_that_the_model_wrote():
    rows = candidates.read_table(RESULTS / model.ORDER)
    source = Path(tuning.__file__).read_text()
    assert candidates.with_order(source, rows) == source
    changed = [dict(rows[0], tile="16 16 16 16"), *rows[1:]]
    assert candidates.with_order(source, changed) != source
    for (family, direction, head_dim, banded), text in tuning.ORDER.items():
        values = [
            float(row["value"].rstrip("%"))
            for row in rows
            if (row["family"], row["direction"], row["D"], row["bands"] != "1")
            == (family, direction, str(head_dim), banded)
            and not row["dropped"]
        ]
        assert values == sorted(values, reverse=True)
        shape = SimpleNamespace(direction=direction, block_d=head_dim, banded=banded, itemsize=2, cache="", max_keys=0)
        found = tuning.candidates_of(shape, candidates.FAMILIES[family])
        contenders = tuning.CONTENDERS.get((family, direction, head_dim, banded), ())
        first = list(dict.fromkeys([found[0], *contenders]))  # newer versions of Triton have a contender as default
        assert found[: len(first)] == first
        wanted = [Tile(*map(int, numbers.split())) for numbers in text.split(",")]
        assert [tile for tile in found if tile in wanted and tile not in first] == [
            tile for tile in wanted if tile not in first
        ]
        assert found[0] == tuning.default(shape, candidates.FAMILIES[family])
        assert set(found) == {found[0], *tuning.tiles(direction)}


def test_atomics_are_chosen_where_they_are_predicted_to_be_faster():
    """The backward with atomics is faster than seven products at every length. From 8,192 tokens on it is also faster
    than the backward that stores gradients of scores."""
    found = model.read_csv(RESULTS / model.DEVICE) + model.read_csv(RESULTS / model.WIDE)
    rows = {(row["who"], row["D"]): row for row in found if row["pass"] == "backward"}
    for width in configs.ATOMIC_WIDTHS["sm80"]:
        for scheme in ("rope", "rerope"):
            stored, five = rows[scheme, str(width)], rows[f"{scheme} atomic", str(width)]
            seven = rows.get((f"{scheme} seven", str(width)), stored)  # at 512 channels nothing is stored
            assert all(float(five[str(n)]) > float(seven[str(n)]) for n in model.SEQLENS)
            assert all(float(five[str(n)]) > float(stored[str(n)]) for n in model.SEQLENS if n >= 8192)


def test_a_part_of_the_candidates_replaces_its_rows():
    def row(direction, bands, tile):
        return dict(zip(candidates.COLUMNS, ("sm80", direction, "64", bands, tile, "model", "", ""), strict=True))

    before = [row("forward", "1", "a"), row("grad_q", "1", "b"), row("grad_q", "2", "c")]
    after = [row("grad_q", "1", "d"), row("grad_q", "1", "e"), row("grad_kv", "2", "f")]
    tiles = [row["tile"] for row in candidates.merged(before, after)]
    assert tiles == ["a", "f", "d", "e", "c"]
    spills = [dict(before[0], dropped="spills"), *before[1:]]
    assert '"forward"' in candidates.order_text(before) and '"forward"' not in candidates.order_text(spills)


def test_files_without_rows(tmp_path):
    assert model.read_csv(tmp_path / "absent.csv") == []
    model.write_csv(tmp_path / "new" / "table.csv", ("a", "b"), [{"a": "1", "b": "2"}])
    with open(tmp_path / "new" / "table.csv") as lines:
        [row] = csv.DictReader(lines)
    assert (row["a"], row["b"]) == ("1", "2") and set(row) == {"revision", "triton", "a", "b"}
