"""Counts the work and the memory traffic of the compiled kernels, and compares them with what the kernels need."""

import pytest
import support
import torch
from caching import cached_call
from flashrope import Rotary, attention, rotate
from flashrope.backends.triton import chosen_tiles as tiles
from flashrope.calls.int8 import quantize
from flashrope.schemes.head_parts import copied_parts
from flashrope.triton_kernels import configs
from flashrope.triton_kernels.configs import Tile

from executor.machine.driver import Machine

HEAD_DIM, HEADS_Q, ITEMSIZE = 64, 4, 2
PAGE_SIZE = 256
SCALES = "cache.k_scale", "cache.v_scale"
ROW = HEAD_DIM * ITEMSIZE
WINDOW = 200
ROPE, HOPE = Rotary.rope(HEAD_DIM), Rotary.hope(HEAD_DIM, 512)
RECTIFIED = ROPE.rectify(WINDOW)
CHUNKED = ROPE.dual_chunk(300, 44)


def visited_tiles(bands, seqlen: int, block_m: int, block_n: int) -> list[int]:
    """Returns how many tiles of keys the forward kernel visits in every band.

    In the band [start, stop), query row x sees the keys with x - stop < k <= x - start. In a band over chunks, a row in
    chunk n sees the keys of the chunks with n - stop < c <= n - start.
    """
    counts = []
    for band in bands:
        unit, count = getattr(band, "chunk", 0) or 1, 0
        for first in range(0, seqlen, block_m):
            last = first + block_m - 1
            begin = 0 if band.stop > seqlen else max((first // unit - int(band.stop) + 1) * unit, 0) // block_n
            seen = min((last // unit - band.start + 1) * unit, last + 1, seqlen)
            end = -(-max(seen, 0) // block_n)
            count += max(end - begin, 0)
        counts.append(count)
    return counts


def late_products(bands, seqlen: int, block_m: int, block_n: int) -> int:
    """Returns how many products with values the forward kernel computes besides those of ``visited_tiles``, if it adds
    values one tile late: one for every tile of rows and band with keys that all rows see. There the first pass
    multiplies values by weights of 0."""
    count = 0
    for band in bands:
        unit = getattr(band, "chunk", 0) or 1
        for first in range(0, seqlen, block_m):
            last = first + block_m - 1
            begin = 0 if band.stop > seqlen else max((last // unit - int(band.stop) + 1) * unit, 0)
            end = min((first // unit - band.start + 1) * unit, first + 1)
            count += max(end, 0) // block_n > -(-begin // block_n)
    return count


def tensor_flops(tiles: int, block_m: int, block_n: int, block_d: int, block_dv: int | None = None) -> int:
    """Returns the floating-point operations of Q K^T and P V over ``tiles`` tiles. block_dv: channels of V; None: V has
    as many channels as Q."""
    return tiles * 2 * block_m * block_n * (block_d + (block_d if block_dv is None else block_dv))


def prefill(rotary, seqlen: int) -> list:
    """Returns the executor's launches of one causal attention with one head."""
    q, k, v = (torch.randn(1, seqlen, 1, HEAD_DIM).bfloat16() for _ in range(3))
    return launched(lambda: attention(q, k, v, rotary, impl="triton"))


def decode(
    rotary,
    seqlen: int,
    num_splits: int = 2,
    rotated_keys: bool = False,
    paged: bool = False,
    quantized: bool = False,
) -> list:
    """Returns the launches of one decoding step whose new token is the seqlen-th key. The cache is bfloat16, or int8 if
    it is quantized."""
    pages, page_size = (-(-seqlen // PAGE_SIZE), PAGE_SIZE) if paged else (1, seqlen + 100)
    k_cache, v_cache = torch.randn(2, pages, page_size, 1, rotary.head_dim).bfloat16()
    scales = {}
    if quantized:
        (k_cache, scales["k_scale"]), (v_cache, scales["v_scale"]) = map(quantize, (k_cache, v_cache))
    q, k, v = (torch.randn(1, 1, heads, rotary.head_dim).bfloat16() for heads in (HEADS_Q, 1, 1))
    seqlens = torch.tensor([seqlen - 1], dtype=torch.int32)
    options = {"impl": "triton", "num_splits": num_splits, "rotated_keys": rotated_keys}
    if paged:
        options["block_table"] = torch.arange(pages, dtype=torch.int32)[None]
    return launched(lambda: cached_call(q, k_cache, v_cache, rotary, seqlens, k=k, v=v, **scales, **options))


def rotated(rotary, seqlen: int, heads: int = 8):
    """Returns the launch of one ``flashrope.rotate``."""
    x = torch.randn(1, seqlen, heads, rotary.head_dim).bfloat16()
    (launch,) = launched(lambda: rotate(x, rotary, impl="triton"))
    return launch


def instructions_a_byte(rotary, paged: bool, seqlen: int = 2048) -> float:
    """Returns the decode kernel's warp instructions per byte of keys and values. This is the number of additional
    instructions divided by the number of additional bytes when the cache grows by `seqlen` keys."""

    def executed(keys: int) -> int:
        launches = decode(rotary, keys, num_splits=1, paged=paged)
        return next(launch for launch in launches if launch.kernel == "attention_decode").warps()

    return (executed(2 * seqlen) - executed(seqlen)) / (2 * seqlen * rotary.head_dim * ITEMSIZE)


def launched(call) -> list:
    Machine.current.launches.clear()
    with torch.no_grad():
        call()
    return list(Machine.current.launches)


def forward_tile(arch: int, num_bands: int):
    return configs.tile("forward", arch, HEAD_DIM, ITEMSIZE, num_bands)


def visited(arch, rotary, seqlen):
    """Returns the forward's tile, how many tiles of keys it visits in every band, and how many products with late
    values come in addition."""
    tile = forward_tile(arch, len(rotary.bands))
    sizes = rotary.bands, seqlen, tile.block_m, tile.block_n
    return tile, visited_tiles(*sizes), late_products(*sizes) if tile.lagged else 0


def forward_flops(tile, tiles: int, late: int, head_dim: int = HEAD_DIM) -> int:
    return tensor_flops(tiles, *tile[:2], head_dim) + late * 2 * tile.block_m * tile.block_n * head_dim


@pytest.mark.parametrize("seqlen", [256, 640, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rotary", [HOPE, RECTIFIED], ids=["hope", "rerope"])
def test_prefill(machine, arch, rotary, seqlen):
    rotate, forward = prefill(rotary, seqlen)
    tile, tiles, late = visited(arch, rotary, seqlen)
    assert forward.tensor_flops == forward_flops(tile, sum(tiles), late)
    tile_bytes = tile.block_n * ROW
    assert forward.tensors["v"].sectors_read == (sum(tiles) + late) * tile_bytes
    # Rotated keys are read only in the first band. There, the channels that do not rotate are read from the raw keys.
    copied = sum(part.width for part in copied_parts(rotary, causal=True)) * ITEMSIZE or ROW
    assert forward.tensors["rotated_k"].sectors_read == tiles[0] * tile.block_n * copied
    assert forward.tensors["k"].sectors_read == tiles[0] * tile.block_n * (ROW - copied) + sum(tiles[1:]) * tile_bytes
    # the pre-pass reads and writes each copied channel exactly once
    assert rotate.tensors["x"].sectors_read == rotate.tensors["out"].sectors_written == seqlen * copied
    assert forward.tensors["result.out"].sectors_written == seqlen * ROW
    # The queries are read once per band. With one band, every group of four warps reads at most as many bytes of cos
    # and sin as the tile of queries has. Four warps share the rows of the table, and the next four read these rows
    # again from L1.
    assert forward.tensors["q"].sectors_read == len(rotary.bands) * seqlen * ROW
    if len(rotary.bands) == 1:
        copies = tile.num_warps // 4
        assert forward.tensors["scheme.table"].sectors_read <= copies * forward.tensors["q"].sectors_read


@pytest.mark.parametrize("rotary_dim", [128, 32])
def test_rotate(machine, rotary_dim):
    """Every element is read once and written once. Four heads share a load of cos and sin from the two levels of the
    table. Both levels stay in the GPU's caches."""
    launch = rotated(Rotary.rope(128, rotary_dim=rotary_dim), 96)
    elements = 96 * 8 * 128
    assert launch.tensors["x"].sectors_read == launch.tensors["out"].sectors_written == 2 * elements
    (table,) = (traffic for name, traffic in launch.tensors.items() if name.endswith("table"))
    assert table.sectors_read <= 2.5 * elements and table.distinct_read < elements / 5
    assert launch.warps() <= 0.33 * elements


@pytest.mark.parametrize("seqlen", [640, pytest.param(2048, marks=pytest.mark.slow)])
def test_prefill_with_maps(machine, arch, seqlen):
    """Dual chunk attention visits no more tiles than RoPE, because chunks end where tiles do, and needs one rotated
    copy of the keys for all bands. Self-Extend visits ReRoPE's tiles and reads a copy of the keys per band."""
    for rotary, like in ((CHUNKED, ROPE), (ROPE.self_extend(WINDOW, 8), RECTIFIED)):
        rotate, forward = prefill(rotary, seqlen)
        tile, tiles, late = visited(arch, rotary, seqlen)
        assert sum(tiles) == sum(visited_tiles(like.bands, seqlen, tile.block_m, tile.block_n))
        assert forward.tensor_flops == forward_flops(tile, sum(tiles), late)
        assert forward.tensors["rotated_k"].sectors_read == sum(tiles) * tile.block_n * ROW
        copies = 1 if rotary is CHUNKED else 2
        assert rotate.tensors["out"].sectors_written == copies * seqlen * ROW


@pytest.mark.parametrize("seqlen", [65, 512, 700])
@pytest.mark.parametrize("rotary", [ROPE, RECTIFIED, CHUNKED], ids=["rope", "rerope", "dual_chunk"])
def test_decode(machine, arch, rotary, seqlen):
    """Every key and value is read once. With two bands, the tile that the window's edge divides is read twice. Rows of
    a tile after the last key read that key again, from L1."""
    step = next(launch for launch in decode(rotary, seqlen) if launch.kernel == "attention_decode")
    twice = 64 * ROW if len(rotary.bands) == 2 and seqlen > WINDOW else 0
    for name in ("k_cache", "v_cache"):
        traffic = step.tensors[name]
        assert traffic.distinct_read == seqlen * ROW
        assert 0 <= traffic.sectors_read - (seqlen * ROW + twice) <= 16 * ROW
        assert seqlen % 64 or traffic.sectors_read == seqlen * ROW + twice


def test_decode_of_quantized_caches(machine, arch):
    """Only the quantized values and the scale of every key and value are read from the caches."""
    launches = decode(RECTIFIED, 512, quantized=True)
    tensors = next(launch for launch in launches if launch.kernel == "attention_decode").tensors
    for name in ("k_cache", "v_cache"):
        assert tensors[name].distinct_read == 512 * ROW // 2
    for name in SCALES:
        assert tensors[name].distinct_read == 512 * 4


def test_quantized_keys_that_do_not_rotate_are_read_once(machine):
    """Quantized keys that do not rotate are read once: one load reads both halves of a key."""
    launches = decode(Rotary.rope(64), 512, rotated_keys=True, quantized=True)
    tensors = next(launch for launch in launches if launch.kernel == "attention_decode").tensors
    assert tensors["k_cache"].sectors_read == 512 * ROW // 2


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_instructions_a_byte_of_the_cache(machine, paged):
    """Decoding executes few enough instructions per byte of the cache. If every key is rotated, decoding is limited
    by instructions, not by memory. Blocks of 8 warps would take 0.126 instructions per byte, and a page lookup for
    every key 0.158. With groups of keys, as on sm_90, decoding over pages takes 0.121."""
    assert instructions_a_byte(Rotary.rope(128), paged, 512) <= (0.122 if paged else 0.117)


BF16 = support.Target("triton", torch.bfloat16, "cpu")
nondeterministic = pytest.mark.filterwarnings("ignore:deterministic:UserWarning")


def gradients(p, **options) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out, lse = attention(*leaves, p.rotary, causal=p.causal, return_lse=True, impl="triton", **options)
    grads = torch.autograd.grad((out, lse), leaves, (p.grad_out, p.grad_lse))
    return dict(zip(support.NAMES, (out.detach(), lse.detach(), *grads), strict=True))


@nondeterministic
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (64, 128), (128, 64)])
def test_products_of_the_backward(machine, head_dim, head_dim_v):
    """The backward computes five products if atomics accumulate dQ. Without atomics it computes five if values have the
    width of q, because dQ then comes from stored gradients of scores, and seven otherwise, because dQ has its own pass.
    Without a mask it visits all tiles. Scores, dK and dQ are as wide as q and k; dV and the gradient of the weights are
    as wide as v."""
    seqlen = 256
    p = support.problem(BF16, Rotary.rope(head_dim), seqlen, heads=1, group=1, head_dim_v=head_dim_v, causal=False)
    flops, tile = {}, configs.tile("forward", machine.arch, head_dim, 2, 1, head_dim_v, max_keys=seqlen)
    late = seqlen // tile.block_m * 2 * tile.block_m * tile.block_n * head_dim_v if tile.lagged else 0
    for deterministic in (True, False):
        machine.launches.clear()
        gradients(p, deterministic=deterministic)
        flops[deterministic] = sum(launch.tensor_flops for launch in machine.launches if "grad" in launch.kernel)
        [forward] = (launch for launch in machine.launches if launch.kernel == "attention_forward")
        assert forward.tensor_flops == tensor_flops(1, seqlen, seqlen, head_dim, head_dim_v) + late
    product = 2 * seqlen * seqlen
    five, seven = product * (3 * head_dim + 2 * head_dim_v), product * (4 * head_dim + 3 * head_dim_v)
    assert flops == {True: five if head_dim == head_dim_v else seven, False: five}


@nondeterministic
@pytest.mark.parametrize("rotary", [ROPE, ROPE.rectify(70)], ids=["rope", "rerope"])
def test_reproducible_or_atomic(machine, rotary):
    """Results are bitwise the same in any order of blocks and warps, except dQ if atomics accumulate it. With atomics,
    dQ is within the error budget in every order."""
    p = support.problem(BF16, rotary, 200, 230, seed=1)
    budget = support.exact_and_bound(p)
    for deterministic in (True, False):
        results = []
        for seed, threads in ((0, 1), (1, 1), (2, 2)):
            machine.reset(seed=seed, threads=threads)
            machine.launches.clear()
            results.append(gradients(p, deterministic=deterministic))
            assert max(support.excess(results[-1], *budget, torch.bfloat16).values()) <= 1
            last = machine.launches[-1].kernel
            assert last == ("attention_grad_q" if deterministic else "attention_finish_grad_q")
        for other in results[1:]:
            differing = {name for name in support.NAMES if not torch.equal(other[name], results[0][name])}
            assert differing <= (set() if deterministic else {"grad_q"})


@nondeterministic
@pytest.mark.parametrize(
    ("head_dim", "tile", "once"),
    [(64, (64, 64, 4, 3), True), (128, (32, 64, 4, 3), True), (16, (32, 64, 8, 2), False)],
    ids=["once", "rows of queries", "copied"],
)
def test_dq_is_added_from_accumulators_unless_warps_share_it(machine, arch, head_dim, tile, once):
    """dQ is added straight from the accumulators only if no two warps hold the same elements of dQ. In the last case
    several warps hold the same elements, so tl.atomic_add is used, which drops duplicates."""
    p = support.problem(BF16, Rotary.rope(head_dim).rectify(70), 200, 230, seed=2, deterministic=False)
    with tiles.forced("grad_qkv", Tile(*tile)):
        support.check(BF16, p)
    (step,) = (launch for launch in machine.launches if launch.kernel == "attention_grad_kv")
    adds = "red" if once else "atom"
    vector = ".v4" if arch >= 90 and once else ""
    assert step.warps(f"{adds}.global.add{vector}.f32") and not step.warps("atom" if adds == "red" else "red")


@nondeterministic
def test_what_atomics_add(machine):
    """Atomics add 4 bytes for every channel of dQ and every pair of tiles. The workspace has a float32 dQ for every
    band, in whole tiles of rows."""
    seqlen, tile = 256, Tile(32, 64, 4, 2)
    p = support.problem(BF16, RECTIFIED, seqlen, heads=1, group=1)
    with tiles.forced("grad_qkv", tile):
        gradients(p, deterministic=False)
    (step,) = (launch for launch in machine.launches if launch.kernel == "attention_grad_kv")
    visited = sum(visited_tiles(p.rotary.bands, seqlen, tile.block_m, tile.block_n))
    workspace = step.tensors["grad_sums"]
    assert workspace.size == 4 * (seqlen + configs.STATISTICS_ROWS) * HEAD_DIM * len(p.rotary.bands)
    assert workspace.written == 4 * visited * tile.block_m * HEAD_DIM
