"""The work that the kernels do is what the formulas of bench/work.py say. Run like ``cases.py``."""

import pytest

from bench import work
from flashrope import Rotary

ROW = work.HEAD_DIM * work.ITEMSIZE
WINDOW = 200
ROPE, HOPE = Rotary.rope(work.HEAD_DIM), Rotary.hope(work.HEAD_DIM, 512)
RECTIFIED = ROPE.rectify(WINDOW)


@pytest.mark.parametrize("seqlen", [256, 640, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rotary", [HOPE, RECTIFIED], ids=["hope", "rerope"])
def test_prefill(machine, arch, rotary, seqlen):
    rotate, forward = work.prefill(rotary, seqlen)
    tile = work.forward_tile(arch, len(rotary.bands))
    tiles = work.visited_tiles(rotary.bands, seqlen, tile.block_m, tile.block_n)
    assert forward.tensor_flops == work.tensor_flops(sum(tiles), tile.block_m, tile.block_n, work.HEAD_DIM)
    tile_bytes = tile.block_n * ROW
    assert forward.tensors["v"].sectors_read == sum(tiles) * tile_bytes
    # rotated keys inside the window only, raw keys outside it only
    assert forward.tensors["rotated_k"].sectors_read == tiles[0] * tile_bytes
    assert forward.tensors["k"].sectors_read == sum(tiles[1:]) * tile_bytes
    # the pre-pass reads every key once and writes it once
    assert rotate.tensors["x"].sectors_read == rotate.tensors["out"].sectors_written == seqlen * ROW
    assert forward.tensors["out"].sectors_written == seqlen * ROW
    # the queries are read once per band; with one band, cos and sin of a tile are no more bytes than the tile, for
    # every four warps: the rows of the table are spread over so many, and the next four read them again from L1
    assert forward.tensors["q"].sectors_read == len(rotary.bands) * seqlen * ROW
    if len(rotary.bands) == 1:
        copies = tile.num_warps // 4
        assert forward.tensors["scheme.table"].sectors_read <= copies * forward.tensors["q"].sectors_read


@pytest.mark.parametrize("seqlen", [65, 512, 700])
@pytest.mark.parametrize("rotary", [ROPE, RECTIFIED], ids=["rope", "rerope"])
def test_decode(machine, arch, rotary, seqlen):
    """Every key and value once; of two bands also the tile that the window's edge divides. The rows of a tile behind
    the last key read that key again, from the cache of the multiprocessor."""
    step = next(launch for launch in work.decode(rotary, seqlen) if launch.kernel == "attention_decode")
    twice = 64 * ROW if len(rotary.bands) == 2 and seqlen > WINDOW else 0
    for name in ("k_cache", "v_cache"):
        traffic = step.tensors[name]
        assert traffic.distinct_read == seqlen * ROW
        assert 0 <= traffic.sectors_read - (seqlen * ROW + twice) <= 16 * ROW
        assert seqlen % 64 or traffic.sectors_read == seqlen * ROW + twice
