"""Says for every kind of head and cache whether memory or the inner loop limits decoding.

On sm_80 the issue model gives the bytes of the cache that the inner loop takes per clock. If DRAM delivers more, the
loop limits decoding, and otherwise memory does. On sm_90 the table has the instructions of the loop per byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flashrope.lowering.lowered import lower

from . import cases, offline, predict, waves
from .architectures import name_of

HEAD_DIMS = (64, 128, 256, 512)
LATENT_DIM, LATENT_HEADS = 576, (16, 64, 128)
TYPES = ("bf16", *cases.CODES)
QUANTIZED_DIM = 256  # the most channels of a quantized cache that the calls accept
KINDS = {"RoPE": cases.ONE_BAND, "ReRoPE": cases.TWO_BANDS, "partial": cases.TRAINED}
ARCHS = (80, 90)
# The column "keys" is the number of keys in 1,000 clocks, at the rate that both the loop and DRAM allow.
COLUMNS = (
    *("scheme", "D", "rotates", "heads", "cache", "type", "tile", "warps", "stages", "blocks/SM", "clocks", "B/clk"),
    *("of DRAM", "limited by", "keys", "sm_90 tile", "sm_90 warps", "sm_90 instr/B"),
)
# The bytes that DRAM delivers per clock and multiprocessor.
DRAM = waves.A100.bandwidth / waves.A100.multiprocessors / waves.A100.clock


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Describes a row of the table: a scheme over a type of cache."""

    name: str
    head_dim: int
    scheme: cases.Scheme

    @property
    def type(self) -> str:
        return self.scheme.codes or "bf16"

    def cache_bytes(self, variant) -> float:
        """Returns the bytes of the cache that count for one pass of a block. If a key head has more query heads than a
        tile has rows, several blocks read the same keys, and each block counts its share of them."""
        blocks = -(-self.scheme.heads[0] // self.scheme.heads[1] // variant.block_m)
        return predict.cache_bytes(variant, self.scheme.bits) / blocks

    def launch(self, arch: int) -> offline.Launch:
        """Returns the launch of the row's decode kernel for an architecture."""
        launches = cases.Case(arch, self.head_dim, "bf16", self.scheme).launches()
        return next(launch for launch in launches if launch.kernel.__name__ == "attention_decode")


def rows_of(head_dims=HEAD_DIMS) -> list[Decoding]:
    """Returns the rows for heads of these head_dims, and the rows for latent attention if 512 is among them. There are
    no rows for quantized caches with more than QUANTIZED_DIM channels, because the calls refuse them."""
    found = []
    for head_dim in head_dims:
        for name, scheme in KINDS.items():
            for codes in TYPES if head_dim <= QUANTIZED_DIM else TYPES[:1]:
                found += [(name, head_dim, dict(codes=codes if codes in cases.CODES else ""), scheme)]
    latent = cases.LATENT[0]
    if latent.shared_values in head_dims:
        found += [("latent attention", LATENT_DIM, dict(heads=(heads, 1)), latent) for heads in LATENT_HEADS]
    return [
        Decoding(name, head_dim, dataclasses.replace(scheme, cache=cache, name=f"{name} {cache}", **changes))
        for name, head_dim, changes, scheme in found
        for cache in ("contiguous", "paged")
    ]


def table(head_dims, jobs: int) -> Iterator[dict[str, str]]:
    """Compiles the kernels of all rows for ``ARCHS`` and yields the cells of every row."""
    chosen = rows_of(head_dims)
    launches = [row.launch(arch) for row in chosen for arch in ARCHS]
    measured: list = [None] * len(launches)
    print(f"compiling {len(launches)} kernels, some seconds each (--jobs {jobs})", flush=True)
    for at, result, _ in offline.compile_all(launches, jobs):
        if isinstance(result, str):
            raise SystemExit(f"{chosen[at // len(ARCHS)]} for {name_of(launches[at].arch)}: {result}")
        measured[at] = result
    for n, row in enumerate(chosen):
        at = n * len(ARCHS)
        yield figures(row, [launch.kwargs["VARIANT"] for launch in launches[at : at + 2]], measured[at : at + 2])


def figures(row: Decoding, variants, measured) -> dict[str, str]:
    """Returns the cells of a row. variants: the ``Variant`` of the kernel for each of ``ARCHS``. measured: the figures
    of each of these kernels."""
    (sm80, sm90), (variant, variant_90) = measured, variants
    nbytes, nbytes_90 = (row.cache_bytes(each) for each in variants)
    taken, per_key = sm80.model.bytes_per_clock(nbytes), predict.cache_bytes(variant, row.scheme.bits) / variant.block_n
    rotary, heads = row.scheme.rotary(row.head_dim), row.scheme.heads
    return {
        "scheme": row.name,
        "D": str(row.head_dim),
        "rotates": str(2 * lower(rotary, True).rotated_pairs),
        "heads": f"{heads[0]} / {heads[1]}",
        "cache": row.scheme.cache,
        "type": row.type,
        "tile": f"{variant.block_m} x {variant.block_n}",
        "warps": str(sm80.warps),
        "stages": str(sm80.stages),
        "blocks/SM": str(sm80.model.blocks),
        "clocks": f"{sm80.model.clocks:.0f}",
        "B/clk": f"{taken:.1f}",
        "of DRAM": f"{taken / DRAM:.2f}",
        "limited by": "memory" if taken >= DRAM else "the loop",
        "keys": f"{1000 * min(taken, DRAM) / per_key:.0f}",
        "sm_90 tile": f"{variant_90.block_m} x {variant_90.block_n}",
        "sm_90 warps": str(sm90.warps),
        "sm_90 instr/B": f"{sm90.loop['total'] * sm90.warps / nbytes_90:.3f}",
    }
