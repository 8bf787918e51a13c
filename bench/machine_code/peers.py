"""Compares the machine code of FlashAttention-2's kernels with the machine code of ours, without a GPU.

    pip download --no-deps torch==2.14.1      # a wheel with CUDA
    python -m bench peers torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl [--csv PATH]

The command also reads a libtorch_cuda.so, or the .so of the flash-attn package. It stores figures of the machine code,
not the code. FlashAttention-2 is represented by the kernels that its launch templates choose for bf16, causal, no
dropout, and lengths that are multiples of the tile. The size of their shared memory is not in the binary, because the
host requests it at the launch. The command computes this size from the tile as FlashAttention's kernel_traits.h does.
Our kernels are those for RoPE, causal, bf16. The figures are for the tile loop with the fewest instructions per
product. A product is 16x8x16, computed by one warp. One HMMA is one product, and HGMMA.64xNx16 counts as N / 8 products
per warp.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flashrope.console.files import replacing

from .. import machine
from . import cases, offline, predict, sass
from .architectures import MULTIPROCESSORS
from .table import print_table

ARCHS, HEAD_DIMS = (80, 90), (64, 128)
OURS = {
    "attention_forward": "forward",
    "attention_grad_kv": "backward, dK and dV",
    "attention_grad_q": "backward, dQ",
}
COLUMNS = (
    "pass", "kernel", "arch", "D", "tile", "warps", "regs", "spill B", "spills in loop", "shared KB", "blocks/SM",
    "instr/product", "ldsm/product", "mufu+fp32/product", "model",
)  # fmt: skip


class Peer(NamedTuple):
    """Describes a kernel of FlashAttention-2: its tile, a pattern for its symbol, and its shared memory in bytes."""

    step: str
    head_dim: int
    block_m: int
    block_n: int
    warps: int
    symbol: str
    shared: int

    @property
    def products(self) -> float:
        """Returns how many HMMA 16x8x16 a tile of scores needs."""
        count = 2 if self.step == "forward" else 5
        return count * self.block_m * self.block_n * self.head_dim / predict.MULTIPLY_ADDS


def peers() -> list[Peer]:
    """Returns the kernels that run_mha_fwd_hdimD and run_mha_bwd_hdimD launch on devices with at least 144 KB of shared
    memory."""
    found = []
    for head_dim, block_m, block_n in ((64, 128, 128), (128, 128, 64)):
        traits = f"23Flash_fwd_kernel_traitsILi{head_dim}ELi{block_m}ELi{block_n}ELi4ELb0ELb0EN7cutlass10bfloat16_tE"
        symbol = rf"_ZN\w+16flash_fwd_kernelI{traits}\w*EE" + _flags(causal=1, even=4, count=8)
        shared = 2 * head_dim * (block_m + 2 * block_n)  # Q, K, V
        found.append(Peer("forward", head_dim, block_m, block_n, 4, symbol, shared))
    for head_dim, block_m, block_n in ((64, 128, 128), (128, 64, 128)):
        tile = f"Li{head_dim}ELi{block_m}ELi{block_n}ELi8E"
        traits = rf"23Flash_bwd_kernel_traitsI{tile}(?:Li\dE){{3}}Lb0ELb0EN7cutlass10bfloat16_tE"
        kernel = "44flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"
        symbol = rf"_ZN\w+{kernel}I{traits}\w*EE" + _flags(causal=1, even=4, count=7)
        # two tiles of Q, one tile of dO, and one tile each of K, V, P and dS
        shared = 2 * (3 * block_m * head_dim + 2 * block_n * head_dim + 2 * block_m * block_n)
        found.append(Peer("backward", head_dim, block_m, block_n, 8, symbol, shared))
    return found


def _flags(causal: int, even: int, count: int) -> str:
    """Returns `count` mangled boolean template arguments. causal, even: the indices of is_causal and of is_even_MN,
    which is_even_K follows. The three named arguments are true, and all others are false."""
    return "".join(f"Lb{int(at in (causal, even, even + 1))}E" for at in range(count)) + "E"


# ---- reading


def library(path: Path, folder: Path) -> tuple[Path, str]:
    """Returns (path of the shared library, its name in the tables). If path is a wheel, its library is extracted to the
    folder."""
    if path.suffix != ".whl":
        return path, path.stem
    name, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path) as wheel:
        [member] = [
            x for x in wheel.namelist() if re.fullmatch(r"torch/lib/libtorch_cuda\.so|flash_attn_2_cuda\S*\.so", x)
        ]
        return Path(wheel.extract(member, folder)), f"{name} {version}"


def cubins(path: Path, arch: int, folder: Path) -> Iterator[bytes]:
    """Yields the cubins of one architecture that contain kernels of FlashAttention-2."""
    if path.suffix == ".cubin":
        yield path.read_bytes()
        return
    cuobjdump = offline.tool("cuobjdump")
    extract = [cuobjdump, "-xelf", f"sm_{arch}.cubin", path.absolute()]
    subprocess.run(extract, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    for file in sorted(folder.glob("*.cubin")):
        content = file.read_bytes()
        file.unlink()
        if b"Flash_fwd_kernel_traits" in content or b"Flash_bwd_kernel_traits" in content:
            yield content


def sections(text: str) -> dict[str, str]:
    """Returns {symbol: text of its section} from an output of ``nvdisasm -c``."""
    parts = re.split(r"^//-+ \.text\.(\S+) -+\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def functions(cubin: bytes) -> dict[str, tuple[int, sass.Listing]]:
    """Returns {symbol: (registers, listing)}."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def output(*words):
            return subprocess.run([*words, file.name], check=True, capture_output=True, text=True).stdout

        registers = dict(re.findall(r"Function (\S+):\s+REG:(\d+)", output(offline.tool("cuobjdump"), "-res-usage")))
        listings = sections(output(offline.tool("nvdisasm"), "-c", "-hex"))
    return {name: (int(registers[name]), sass.parse(part)) for name, part in listings.items() if name in registers}


# ---- figures


def attention_loop(listing: sass.Listing) -> Counter:
    """Returns the instruction mix of the loop over tiles with the fewest instructions per product. A loop over tiles is
    recognised by having both products and exponentials; loops inside a product have no exponentials."""
    mixes = [sass.mix(listing.opcodes[first : last + 1]) for first, last in listing.loops]
    whole = [counts for counts in mixes if counts["products"] and counts["mufu"]]
    return min(whole, key=lambda counts: counts["total"] / counts["products"])


def figures(
    arch: int, registers: int, warps: int, shared: int, listing: sass.Listing, useful: float | None
) -> dict[str, str]:
    """Returns {column: figure} for a kernel. useful: how many HMMA 16x8x16 a tile of scores needs, from
    ``predict.useful_products``."""
    loop = attention_loop(listing)
    products, local = loop["products"], loop.get("local", 0)
    arithmetic = loop.get("mufu", 0) + loop.get("fp32", 0)
    model = predict.inner_loop(listing, arch, registers, shared, warps, whole_tiles=True)
    return {
        "warps": str(warps),
        "regs": str(registers),
        "spill B": str(sass.local_bytes(listing)[0]),
        "spills in loop": str(local),
        "shared KB": f"{shared / 1024:g}",
        "blocks/SM": str(MULTIPROCESSORS[arch].resident_blocks(registers, shared, warps)),
        "instr/product": f"{loop['total'] / products:.2f}",
        "ldsm/product": f"{loop.get('ldsm', 0) / products:.3f}",
        "mufu+fp32/product": f"{arithmetic / products:.2f}",
        "model": f"{model.tensor_share(useful):.0%}" if model and useful else "",
    }


def found_in(path: Path, arch: int) -> Iterator[tuple[Peer, int, sass.Listing]]:
    """Yields (kernel, registers, listing) for every kernel of FlashAttention-2 in a library. Exits if one is absent."""
    wanted, seen = peers(), 0
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(path, arch, Path(folder)):
            symbols = {name.decode() for name in re.findall(rb"_ZN\w{50,}", cubin)}
            here = [peer for peer in wanted if any(re.fullmatch(rf"{peer.symbol}\w*", name) for name in symbols)]
            known = functions(cubin) if here else {}
            for peer in here:
                [(registers, listing)] = [known[name] for name in known if re.fullmatch(rf"{peer.symbol}\w*", name)]
                seen += 1
                yield peer, registers, listing
    if seen != len(wanted):
        raise SystemExit(f"{path}: found {seen} of {len(wanted)} kernels of FlashAttention-2 for sm_{arch}")


def theirs(path: Path, arch: int, label: str) -> list[dict[str, str]]:
    return [
        {
            "pass": "forward" if peer.step == "forward" else "backward, dQ, dK and dV",
            "kernel": f"FlashAttention-2, {label}",
            "arch": f"sm_{arch}",
            "D": str(peer.head_dim),
            "tile": f"{peer.block_m} x {peer.block_n}",
            **figures(arch, registers, peer.warps, peer.shared, listing, peer.products),
        }
        for peer, registers, listing in found_in(path, arch)
    ]


def _inspect(compiled) -> tuple[int, int, int, sass.Listing]:
    cubin = compiled.asm["cubin"]
    registers, _ = offline.cubin_usage(cubin)
    listing = sass.disassemble(cubin, offline.tool("nvdisasm"))
    return registers, compiled.metadata.num_warps, compiled.metadata.shared, listing


def ours(archs: list[int], jobs: int) -> list[dict[str, str]]:
    launches = [
        (arch, head_dim, launch)
        for arch in archs
        for head_dim in HEAD_DIMS
        for launch in cases.Case(arch, head_dim, "bf16", cases.ONE_BAND).launches()
        if launch.kernel.__name__ in OURS
    ]
    rows: list[dict] = [{}] * len(launches)
    for at, result, _ in offline.compile_all([launch for *_, launch in launches], jobs, _inspect):
        if isinstance(result, str):
            raise SystemExit(f"{launches[at][2].kernel.__name__}: {result}")
        arch, head_dim, launch = launches[at]
        variant, (registers, warps, shared, listing) = launch.kwargs["VARIANT"], result
        rows[at] = {
            "pass": OURS[launch.kernel.__name__],
            "kernel": launch.kernel.__name__,
            "arch": f"sm_{arch}",
            "D": str(head_dim),
            "tile": f"{variant.block_m} x {variant.block_n}",
            **figures(
                arch, registers, warps, shared, listing, predict.useful_products(launch.kernel.__name__, variant)
            ),
        }
    return rows


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench peers", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("path", type=Path, help="a wheel of torch with CUDA, a libtorch_cuda.so, or flash-attn's .so")
    p.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=list(ARCHS), help="default: 80 90")
    p.add_argument("--label", help="what to call it (default: name and version of the wheel)")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes (default: all cores)")
    p.add_argument("--csv", type=Path, metavar="PATH", help="write the table there")
    options = p.parse_args(argv)
    if offline.missing_tools():
        p.error(f"missing: {' '.join(offline.missing_tools())}, which are part of Triton's package")
    with tempfile.TemporaryDirectory() as folder:
        path, label = library(options.path, Path(folder))
        rows = [row for arch in options.arch for row in theirs(path, arch, options.label or label)]
    rows += ours(options.arch, options.jobs)
    rows.sort(key=lambda row: (row["arch"], row["pass"].split(",")[0] != "forward", int(row["D"])))
    print_table(COLUMNS, rows, left=3)
    if options.csv:
        versions = machine.versions()
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with replacing(options.csv) as partial, open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, ["revision", "triton", *COLUMNS], lineterminator="\n")
            writer.writeheader()
            writer.writerows({"revision": versions["revision"], "triton": versions["triton"], **row} for row in rows)
    return 0
