"""Tests bench peers: which kernels of FlashAttention-2 it picks, and what it counts in a listing."""

import csv
import re

import pytest

pytest.importorskip("triton", reason="the commands of bench.machine_code import it")

from bench import results_page as page
from bench.machine_code import peers, sass

FORWARD = (
    "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi128ELi128ELi64ELi4ELb0ELb0EN7cutlass10bfloat16_tE"
    "19Flash_kernel_traitsILi128ELi128ELi64ELi4ES3_EELb0ELb1ELb0ELb0ELb1ELb1ELb0ELb0EEEvNS_16Flash_fwd_paramsE"
)
BACKWARD = (
    "_ZN13pytorch_flash44flash_bwd_dq_dk_dv_loop_seqk_parallel_kernelI23Flash_bwd_kernel_traitsILi128ELi64ELi128ELi8ELi2E"
    "Li4ELi2ELb0ELb0EN7cutlass10bfloat16_tE19Flash_kernel_traitsILi128ELi64ELi128ELi8ES3_EE"
    "Lb0ELb1ELb0ELb0ELb1ELb1ELb0EEEvNS_16Flash_bwd_paramsE"
)
LISTING = """
//--------------------- .text.first --------------------------
.text.first:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/                   HMMA.1688.F32.BF16 R4, R8, R12, R4 ;
        /*0070*/                   MUFU.EX2 R5, R5 ;
        /*0080*/                   STL.64 [R1], R4 ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
//--------------------- .text.second --------------------------
.text.second:
        /*0000*/                   EXIT ;
"""


@pytest.mark.parametrize(("symbol", "shared_kb"), [(FORWARD, 64), (BACKWARD, 144)], ids=["forward", "backward"])
def test_one_kernel_is_picked(symbol, shared_kb):
    def picked(name):
        return [peer for peer in peers.peers() if re.fullmatch(rf"{peer.symbol}\w*", name)]

    [peer] = picked(symbol)
    assert peer.shared == 1024 * shared_kb and peer.head_dim == 128
    flags = re.search(r"EE((?:Lb\dE){7,8})E", symbol)[1]
    for at in range(0, len(flags), 4):  # every flag is "Lb0E" or "Lb1E"; a changed flag means another kernel
        other = flags[: at + 2] + str(1 - int(flags[at + 2])) + flags[at + 3 :]
        assert not picked(symbol.replace(flags, other)), other
    assert not picked(symbol.replace("10bfloat16_t", "6half_t"))
    assert not picked(symbol.replace("Li64E", "Li32E"))


def test_the_loop_over_tiles_is_the_one_with_exponentials():
    parts = peers.sections(LISTING)
    assert list(parts) == ["first", "second"] and "EXIT" not in parts["first"]
    listing = sass.parse(parts["first"])
    loop = peers.attention_loop(listing)
    assert (loop["total"], loop["products"], loop["ldsm"]) == (6, 1.5, 1)
    assert sass.hot_loop(listing)["products"] == 2  # hot_loop takes the loop that has products but no exponentials
    row = peers.figures(80, 255, 4, 64 * 1024, listing, 1.5)
    assert row == {
        "warps": "4",
        "regs": "255",
        "spill B": "8",
        "spills in loop": "1",
        "shared KB": "64",
        "blocks/SM": "2",
        "instr/product": "4.00",
        "ldsm/product": "0.667",
        "mufu+fp32/product": "0.67",
        "model": "",  # the listing has no control bits
    }


def test_hgmma_counts_as_the_products_of_one_warp():
    line = "        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;\n"
    assert sass.mix(sass.parse(line).opcodes)["products"] == 16
    assert sass.mix(["HGMMA.64x128x16.F32.BF16", "HGMMA.64x64x16.F32.BF16.GSB0", "FADD"])["products"] == 16 + 8


def test_a_library_without_such_kernels_is_refused(tmp_path):
    (tmp_path / "some.cubin").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match="found 0 of 4 kernels of FlashAttention-2 for sm_80"):
        peers.theirs(tmp_path / "some.cubin", 80, "none")


def test_the_page_has_the_table_and_its_notes(tmp_path):
    path = tmp_path / "torch.csv"
    names = ["revision", "triton", *peers.COLUMNS]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerow(dict.fromkeys(names, "7") | {"model": ""})
    (tmp_path / "notes.md").write_text("Why.\n")
    lines = page._peers(path)
    assert lines[-1] == "Why." and lines[-3].startswith("| 7 | 7 |")
    path.write_text("pass\nforward\n")
    with pytest.raises(ValueError, match="python -m bench peers --csv"):
        page._peers(path)
