"""Counts what the compiled kernels do in the PTX executor of tests/executor, and compares it with what they need.

python -m bench work [--arch 90] [--seqlens 1024 4096] [--window 512] [--decode-only]

The command needs a C++ compiler but no GPU. Tensor-core work and bytes of global memory are exact counts over the
executed instructions. They say nothing about time.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

HEAD_DIM, HEADS_Q, ITEMSIZE = 64, 4, 2
PAGE_SIZE = 256
SCALES = "cache.k_scale", "cache.v_scale"


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
    import torch
    from flashrope import attention

    q, k, v = (torch.randn(1, seqlen, 1, HEAD_DIM).bfloat16() for _ in range(3))
    return _launches(lambda: attention(q, k, v, rotary, impl="triton"))


def decode(
    rotary,
    seqlen: int,
    num_splits: int = 2,
    rotated_keys: bool = False,
    paged: bool = False,
    cache_dtype: str | None = None,
) -> list:
    """Returns the launches of one decoding step whose new token is the seqlen-th key. cache_dtype: the dtype of a
    quantized cache; None: the cache is bfloat16."""
    import torch
    from flashrope import attention_with_cache
    from flashrope.backends.quantized import quantize
    from flashrope.cache.storage import CACHE_DTYPES

    pages, page_size = (-(-seqlen // PAGE_SIZE), PAGE_SIZE) if paged else (1, seqlen + 100)
    k_cache, v_cache = torch.randn(2, pages, page_size, 1, rotary.head_dim).bfloat16()
    scales = {}
    if cache_dtype:
        (k_cache, scales["k_scale"]), (v_cache, scales["v_scale"]) = (
            quantize(x, CACHE_DTYPES[cache_dtype]) for x in (k_cache, v_cache)
        )
    q, k, v = (torch.randn(1, 1, heads, rotary.head_dim).bfloat16() for heads in (HEADS_Q, 1, 1))
    seqlens = torch.tensor([seqlen - 1], dtype=torch.int32)
    options = {"impl": "triton", "num_splits": num_splits, "rotated_keys": rotated_keys}
    if paged:
        options["block_table"] = torch.arange(pages, dtype=torch.int32)[None]
    return _launches(lambda: attention_with_cache(q, k_cache, v_cache, rotary, seqlens, k=k, v=v, **scales, **options))


def rotate(rotary, seqlen: int, heads: int = 8):
    """Returns the launch of one ``flashrope.rotate``."""
    import torch
    from flashrope import rotate

    x = torch.randn(1, seqlen, heads, rotary.head_dim).bfloat16()
    (launch,) = _launches(lambda: rotate(x, rotary, impl="triton"))
    return launch


def instructions_a_byte(rotary, paged: bool, seqlen: int = 2048) -> float:
    """Returns the decode kernel's warp instructions per byte of keys and values. This is the number of additional
    instructions divided by the number of additional bytes when the cache grows by `seqlen` keys."""

    def executed(keys: int) -> int:
        launches = decode(rotary, keys, num_splits=1, paged=paged)
        return next(launch for launch in launches if launch.kernel == "attention_decode").warps()

    return (executed(2 * seqlen) - executed(seqlen)) / (2 * seqlen * rotary.head_dim * ITEMSIZE)


def _launches(call) -> list:
    import torch
    from executor.driver import Machine

    Machine.current.launches.clear()
    with torch.no_grad():
        call()
    return list(Machine.current.launches)


def forward_tile(arch: int, num_bands: int):
    from flashrope.triton_kernels import configs

    return configs.tile("forward", arch, HEAD_DIM, ITEMSIZE, num_bands)


def report(arch: int, seqlens: list[int], window: int, decode_only: bool = False) -> None:
    from flashrope import Rotary

    rope = Rotary.rope(HEAD_DIM)
    schemes = {
        "RoPE": rope,
        "HoPE": Rotary.hope(HEAD_DIM, 4096),
        "ReRoPE": rope.rectify(window),
        "Self-Extend": rope.self_extend(window, 8),
        "DCA": rope.dual_chunk(window + 128, 128),
    }
    if not decode_only:
        report_prefill(arch, seqlens, window, schemes)
    report_decode(seqlens, schemes)
    report_bytes(window)
    report_rotate(seqlens[-1])


def report_prefill(arch: int, seqlens: list[int], window: int, schemes: dict) -> None:
    print(f"prefill, one head, head_dim {HEAD_DIM}, bf16, causal, sm_{arch}; window {window}, chunks of as many")
    print(
        "| keys | scheme | warp instr. | tensor GFLOP | tiles | ex2 | Q read | table read | K read | V read "
        "| pre-pass read + written |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for seqlen in seqlens:
        flops = {}
        for name, rotary in schemes.items():
            rotate, forward = prefill(rotary, seqlen)
            tile = forward_tile(arch, len(rotary.bands))
            read = {name: traffic.sectors_read for name, traffic in forward.tensors.items()}
            keys = read.get("k", 0) + read.get("rotated_k", 0)
            flops[name] = forward.tensor_flops
            tiles = flops[name] // tensor_flops(1, tile.block_m, tile.block_n, HEAD_DIM)
            passed = f"{rotate.tensors['x'].sectors_read} + {rotate.tensors['out'].sectors_written}"
            print(
                f"| {seqlen} | {name} | {forward.warps()} | {flops[name] / 1e9:.3f} | {tiles} | "
                f"{forward.lanes('ex2.')} | {read['q']} | {read['scheme.table']} | {keys} | {read['v']} | {passed} |"
            )
        for name in list(schemes)[1:]:
            print(f"| | {name} over RoPE | | {100 * (flops[name] / flops['RoPE'] - 1):+.2f}% | | | | | | | |")


def report_decode(seqlens: list[int], schemes: dict) -> None:
    print(f"\ndecoding, one token, {HEADS_Q} query heads per key head, 2 splits, bytes read")
    print("| keys | scheme, cache | K | V | scales | bytes of K | warp instr. |\n|---|---|---|---|---|---|---|")
    cases = [(name, rotary, False, None) for name, rotary in schemes.items()]
    cases += [(name, schemes[name], True, None) for name in ("RoPE", "HoPE")]
    cases += [
        (name, schemes[name], rotated_keys, cache_dtype)
        for cache_dtype in ("int8", "int4")
        for name, rotated_keys in (("ReRoPE", False), ("RoPE", True), ("RoPE", False))
    ]
    for seqlen in seqlens:
        for name, rotary, rotated_keys, cache_dtype in cases:
            launches = decode(rotary, seqlen, rotated_keys=rotated_keys, cache_dtype=cache_dtype)
            step = next(launch for launch in launches if launch.kernel == "attention_decode")
            read = {name: traffic.sectors_read for name, traffic in step.tensors.items()}
            scales = sum(read.get(name, 0) for name in SCALES)
            row_bytes = HEAD_DIM * ITEMSIZE // {None: 1, "int8": 2, "int4": 4}[cache_dtype]
            label = ", ".join([name, *["rotated keys"] * rotated_keys, *[cache_dtype] * bool(cache_dtype)])
            figures = read["k_cache"], read["v_cache"], scales, seqlen * row_bytes, step.warps()
            print(f"| {seqlen} | {label} | {' | '.join(map(str, figures))} |")


def report_bytes(window: int) -> None:
    from flashrope import Rotary

    print(f"\ndecoding, warp instructions per byte of keys and values, {HEADS_Q} query heads per key head")
    print("| head_dim | scheme | contiguous | paged |\n|---|---|---|---|")
    for head_dim in (64, 128):
        rope = Rotary.rope(head_dim)
        for name, rotary in (("RoPE", rope), ("ReRoPE", rope.rectify(window))):
            figures = [instructions_a_byte(rotary, paged) for paged in (False, True)]
            print(f"| {head_dim} | {name} | {figures[0]:.3f} | {figures[1]:.3f} |")


def report_rotate(seqlen: int) -> None:
    """Prints the counts of ``flashrope.rotate`` per element of q. An element needs at least two bytes read and two
    written."""
    from flashrope import Rotary

    print(f"\nflashrope.rotate, 8 heads of 128, {seqlen} tokens, bytes and warp instructions per element")
    print("| scheme | read | written | cos and sin read | warp instr. |\n|---|---|---|---|---|")
    rotaries = {
        "RoPE": Rotary.rope(128),
        "RoPE of 32 channels": Rotary.rope(128, rotary_dim=32),
        "HoPE": Rotary.hope(128, 8192),
    }
    for name, rotary in rotaries.items():
        launch = rotate(rotary, seqlen)
        x, out = launch.tensors["x"], launch.tensors["out"]
        table = next(traffic.sectors_read for key, traffic in launch.tensors.items() if key.endswith("table"))
        counts = x.sectors_read, out.sectors_written, table, launch.warps()
        print(f"| {name} | {' | '.join(f'{count / (seqlen * 8 * 128):.3f}' for count in counts)} |")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench work", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, choices=(80, 86, 89, 90, 120))
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--decode-only", action="store_true", help="leave out prefill, which is slow at long contexts")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
    from executor import build, driver

    try:
        driver.prepare()  # before triton is imported
    except build.NoCompiler as error:
        print(error, file=sys.stderr)
        return 2
    with driver.executed(options.arch):
        report(options.arch, options.seqlens, options.window, options.decode_only)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
