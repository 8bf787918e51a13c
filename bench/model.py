"""Predicts clocks of the kernels' inner loops from their machine code. Needs no GPU.

    python -m bench model [--arch 80 86 89] [--head-dim 64 128] [--scheme rope rerope]
    python -m bench model --candidates --publish       # the order in which flashrope tune tries tiles

The table has the inner loop over tiles of every kernel: clocks of a pass, the share of the time in which the tensor
cores work on needed products, and how the schedulers spend their clocks. The figures rank tiles and promise no speed.
HGMMA, the tensor-core instruction of sm_90, is not simulated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from flashrope.console.files import write

from .machine_code import candidates, cases, issue, offline, predict
from .machine_code.table import print_table
from .report.output import RESULTS

ARCHS, HEAD_DIMS = tuple(issue.RATES), (64, 96, 128, 256, 320, 384, 448, 512)
SCHEMES = (cases.ONE_BAND, cases.TWO_BANDS, *cases.SEVEN, *cases.ATOMIC, *cases.DECODE, *cases.MAPS)
ON_REQUEST = (*cases.PARTS, cases.TRAINED, cases.TRAINED_BANDS, *cases.CHUNKS, *cases.FEW_CHUNKS)
NAMES = {
    "attention_forward": "forward",
    "attention_grad_kv": "dK and dV",
    "attention_grad_q": "dQ",
    "attention_decode": "decoding",
    "attention_chunks": "prefill",
}
COLUMNS = (
    *("kernel", "scheme", "arch", "D", "tile", "warps", "stages", "regs", "local", "blocks/SM", "clocks"),
    *("tensor", "B/clk", *(f"% {name}" for name in issue.WAITS)),
)
ORDER = RESULTS / "model" / "candidates.csv"


def launches(arch: int, head_dim: int, scheme: cases.Scheme) -> list[offline.Launch]:
    """Returns the scheme's launches that the model can predict. The forward is left out for schemes that differ from
    another scheme only in their backward ("seven", "atomic")."""
    found = cases.Case(arch, head_dim, "bf16", scheme).launches()
    names = set(NAMES)
    if not scheme.deterministic or scheme.recomputed:
        names -= {"attention_forward"}
    return list({launch.key: launch for launch in found if launch.kernel.__name__ in names}.values())


def row(scheme: cases.Scheme, launch: offline.Launch, measured: offline.Measured) -> dict[str, str]:
    """Returns the cells of a compiled kernel whose inner loop was simulated."""
    name, variant, loop = launch.kernel.__name__, launch.kwargs["VARIANT"], measured.model
    cells = {
        "kernel": NAMES[name],
        "scheme": scheme.name,
        "arch": f"sm_{launch.arch}",
        "D": str(variant.head_dim),
        "tile": f"{variant.block_m} x {variant.block_n}",
        "warps": str(measured.warps),
        "stages": str(measured.stages),
        "regs": str(measured.registers),
        "local": str(measured.loop.get("local", 0)),
        "blocks/SM": str(loop.blocks),
        "clocks": f"{loop.clocks:.0f}",
    }
    if products := predict.useful_products(name, variant, not scheme.deterministic, launch.stores_scores):
        cells["tensor"] = f"{loop.tensor_share(products):.1%}"
    if name == "attention_decode":
        cells["B/clk"] = f"{loop.bytes_per_clock(predict.cache_bytes(variant, scheme.quantized)):.1f}"
    return cells | {f"% {kind}": f"{100 * share:.0f}" for kind, share in loop.waits.items()}


def rows(archs, head_dims, schemes, jobs: int) -> Iterator[dict[str, str]]:
    """Compiles and simulates the kernels, and yields their rows. Leaves out kernels that the model cannot simulate."""
    chosen = [
        (scheme, launch)
        for arch in archs
        for head_dim in head_dims
        for scheme in schemes
        for launch in launches(arch, head_dim, scheme)
    ]
    print(f"compiling and simulating {len(chosen)} kernels, some seconds each (--jobs {jobs})", flush=True)
    for (scheme, launch), result in zip(chosen, candidates.compiled([each for _, each in chosen], jobs), strict=True):
        if isinstance(result, str):
            raise SystemExit(f"{launch.kernel.__name__}: {result}")
        if result.model:
            yield row(scheme, launch, result)


def order_candidates(options: argparse.Namespace) -> None:
    """Ranks the candidates that the options select. With --publish, writes them into the stored table of all
    candidates."""
    chosen = [
        (family, direction, head_dim, bands)
        for family, arch in candidates.FAMILIES.items()
        for direction in options.direction or candidates.KERNELS
        for head_dim in candidates.HEAD_DIMS
        for bands in candidates.BANDS
        if arch in options.arch and head_dim in options.head_dim
    ]
    found = candidates.ranking_rows(chosen, options.jobs)
    print_table(candidates.COLUMNS, found, left=5)
    if options.publish:
        found = candidates.merged(candidates.read_table(ORDER) if ORDER.exists() else [], found)
        candidates.write_table(ORDER, found)
        source = Path(__file__).resolve().parents[1] / "python/flashrope/lab/tuning/candidates.py"
        write(source, candidates.with_order(source.read_text(), found))


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser("python -m bench model", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=[80, 86], help="default: 80 86")
    p.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=[64, 128], help="default: 64 128")
    p.add_argument(
        "--scheme", nargs="+", choices=[each.name for each in SCHEMES + ON_REQUEST], help="only these schemes"
    )
    p.add_argument("--candidates", action="store_true", help="instead rank the candidates of flashrope tune")
    p.add_argument("--direction", nargs="+", choices=candidates.KERNELS, help="only these candidates")
    p.add_argument("--publish", action="store_true", help="with --candidates: write the ranking to bench/results/model")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes (default: all cores)")
    options = p.parse_args(argv)
    if offline.missing_tools():
        p.error(f"missing: {' '.join(offline.missing_tools())}, which are part of Triton's package")
    if options.publish and not options.candidates:
        p.error("--publish: expected --candidates, because no other table is kept")
    if options.candidates:
        order_candidates(options)
        return 0
    chosen = [each for each in SCHEMES + ON_REQUEST if each.name in (options.scheme or [x.name for x in SCHEMES])]
    print_table(COLUMNS, list(rows(options.arch, options.head_dim, chosen, options.jobs)), left=2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
