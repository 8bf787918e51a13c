"""Predicts how long decoding of batches of unequal lengths takes, by how the keys are divided among blocks.

    python -m bench ragged [--scheme "rope contiguous" ...] [--publish]

The table gives the predicted time as a multiple of the time in which the memory can deliver the keys and values. The
batch decodes one token of every sequence with 32 query heads, 8 key heads, head_dim 128 and bf16 on an A100. A block
first takes the clocks of the code outside its loop, then the clocks of one pass for every tile of keys. The issue model
supplies both figures. Both depend on how many blocks run on the multiprocessor at that moment. When all blocks together
ask for more than the bandwidth, the passes of all blocks slow down by the same factor. A block that serves several
pieces takes the clocks outside its loop once per piece. Partial results are written and read once at the bandwidth. The
prediction leaves out launches and the latency of the kernel that combines partial results.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashrope.backends.splits import choose_splits
from flashrope.cli.files import replacing
from flashrope.triton_kernels.shares import SETUP

from . import machine
from .compiling import cases, issue, offline, predict, sass, waves
from .compiling.table import print_table
from .report.output import RESULTS
from .report.predicted import FOLDER, RAGGED

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
BATCHES = {
    "1 x 131,072": [131072],
    "32 x 8,192": [8192] * 32,
    "1 x 65,536 + 31 x 1,024": [65536] + [1024] * 31,
    "1 x 8,192 + 63 x 512": [8192] + [512] * 63,
    "1 x 131,072 + 15 x 2,048": [131072] + [2048] * 15,
    "4 x 4,096": [4096] * 4,
    "16 x 2,048": [2048] * 16,
    "128 x 512": [512] * 128,
}
SCHEMES = ("rope contiguous", "rerope contiguous")
MANY_SPLITS = 32
ITEMS = (512, 1024)  # how many keys an item has
COLUMNS = ("scheme", "lengths", "memory, us", "splits by shape", f"{MANY_SPLITS} splits") + tuple(
    f"items of {keys}" for keys in ITEMS
)
COLUMNS += ("shares",)
# How keys are divided. The outer list has an entry for every block, or for every place where a multiprocessor can hold
# a block. The entry lists the number of key tiles of each piece.
Division = list[list[int]]


@dataclass(frozen=True)
class Kernel:
    """Holds the clocks of a decode kernel.

    outside: clocks of the code outside the loop over keys. passes: clocks of a pass through the loop. Both have one
    entry for every number of blocks that the multiprocessor may hold, from 1 on. tile_bytes: bytes that a pass reads.
    """

    outside: tuple[float, ...]
    passes: tuple[float, ...]
    block_n: int
    tile_bytes: float

    @property
    def resident(self) -> int:
        return len(self.passes)


def measured(scheme: cases.Scheme) -> Kernel:
    """Compiles the decode kernel of a scheme for an A100 and simulates it."""
    launches = cases.Case(80, HEAD_DIM, "bf16", scheme).launches()
    (launch,) = (x for x in launches if x.kernel.__name__ == "attention_decode")
    compiled, variant = launch.compile(), launch.kwargs["VARIANT"]
    found = offline.measure(compiled)
    listing = sass.disassemble(compiled.asm["cubin"], offline.tool("nvdisasm"))
    loops, rates, counts = predict.bounds_of_loops(listing), issue.RATES[80], range(1, found.model.blocks + 1)
    within = {at for first, last in loops for at in range(first, last + 1)}
    around = [(at, at) for at in range(len(listing.opcodes)) if at not in within]
    loop, outside = (predict.code_of(listing, 80, parts) for parts in (loops[:1], around))
    return Kernel(
        tuple(issue.once(outside, found.warps, n, rates) for n in counts),
        tuple(issue.steady(loop, found.warps, n, rates).clocks for n in counts),
        variant.block_n,
        predict.cache_bytes(variant),
    )


def clocks(device: waves.Device, kernel: Kernel, blocks: Division, places: bool = False) -> float:
    """Returns the clocks until all blocks are done.

    blocks: the blocks in the order of launch. places: whether all blocks run from the start, one at every place of the
    device.
    """
    count, bandwidth = device.multiprocessors * kernel.resident, device.bandwidth / device.clock
    waiting = iter([] if places else blocks)
    own = [list(reversed(block)) for block in blocks] if places else []
    own += [[] for _ in range(count - len(own))]
    left, tiles, looping = [0.0] * count, [0] * count, [False] * count
    active = [0] * device.multiprocessors

    def begin(place: int) -> bool:
        """Begins the next piece at a place. Returns False if no piece is left for it."""
        if not own[place]:
            own[place] = list(reversed(next(waiting, [])))
        if not own[place]:
            return False
        left[place], tiles[place], looping[place] = 1.0, own[place].pop(), False
        return True

    running = [place for place in range(count) if begin(place)]
    for place in running:
        active[place % device.multiprocessors] += 1
    now = 0.0
    while running:
        rates = []
        for place in running:
            beside = active[place % device.multiprocessors] - 1
            rates.append(1 / (kernel.passes if looping[place] else kernel.outside)[beside])
        asked = kernel.tile_bytes * sum(rate for rate, place in zip(rates, running, strict=True) if looping[place])
        if asked > bandwidth:
            rates = [
                rate * bandwidth / asked if looping[place] else rate for rate, place in zip(rates, running, strict=True)
            ]
        step = min(left[place] / rate for place, rate in zip(running, rates, strict=True))
        now += step
        still = []
        for place, rate in zip(running, rates, strict=True):
            left[place] -= step * rate
            if left[place] > 1e-9:
                still.append(place)
            elif not looping[place] and tiles[place]:
                left[place], looping[place] = float(tiles[place]), True
                still.append(place)
            elif begin(place):
                still.append(place)
            else:
                active[place % device.multiprocessors] -= 1
        running = still
    return now


def splits(segments: Sequence[int], count: int) -> Division:
    """Divides every segment into `count` splits. segments: the number of key tiles of every sequence and key head."""
    return [[len(range(split, tiles, count))] for tiles in segments for split in range(count)]


def items(segments: Sequence[int], tiles_of_item: int, places: int) -> Division:
    """Divides the segments into items of at most `tiles_of_item` tiles. Every place works on its items one after the
    other."""
    found = [min(tiles_of_item, tiles - first) for tiles in segments for first in range(0, tiles, tiles_of_item)]
    return [found[place::places] for place in range(places)]


def shares(segments: Sequence[int], places: int) -> Division:
    """Divides the segments into shares as ``flashrope.triton_kernels.shares.plan_shares`` does."""
    segments = [tiles for tiles in segments if tiles]
    units, count = sum(segments), places
    if len(segments) <= places:
        each = -(-units // (len(segments) * (places // len(segments))))
        if each <= -(-units // places) + SETUP.value:
            count = len(segments) * -(-units // (len(segments) * each))
    count = min(count, units)
    found, start = [[] for _ in range(count)], 0
    for tiles in segments:
        for share in range(((start + 1) * count - 1) // units, ((start + tiles) * count - 1) // units + 1):
            first, stop = units * share // count, units * (share + 1) // count
            found[share].append(min(stop, start + tiles) - max(first, start))
        start += tiles
    return found


def partial_bytes(pieces: int) -> float:
    """Returns the bytes that are written and read for the partial results of a number of pieces."""
    return 2 * 4 * pieces * HEADS_Q // HEADS_KV * HEAD_DIM


def row(
    name: str, by_splits: Kernel, by_shares: Kernel, lengths: Sequence[int], device: waves.Device
) -> dict[str, str]:
    """Returns one row of the table: for each way to divide the keys, the predicted time divided by the time in which
    the memory can deliver keys and values."""
    segments = [-(-keys // by_splits.block_n) for keys in lengths for _ in range(HEADS_KV)]
    places = device.multiprocessors * by_splits.resident
    memory = sum(lengths) * HEADS_KV * by_splits.tile_bytes / by_splits.block_n / device.bandwidth

    def ratio(kernel: Kernel, blocks: Division, pieces: int, at_once: bool) -> str:
        times = (
            clocks(device, kernel, blocks, at_once) / device.clock,
            waves.copy_seconds(device, partial_bytes(pieces)),
        )
        return f"{sum(times) / memory:.2f}"

    cells = {"scheme": name, "lengths": "", "memory, us": f"{memory * 1e6:.0f}"}
    by_shape = choose_splits(len(segments), max(segments), places)
    for column, count in zip(COLUMNS[3:5], (by_shape, MANY_SPLITS), strict=True):
        pieces = sum(min(count, tiles) for tiles in segments) if count > 1 else 0
        cells[column] = ratio(by_splits, splits(segments, count), pieces, False)
    for column, keys in zip(COLUMNS[5:-1], ITEMS, strict=True):
        of_item = keys // by_shares.block_n
        pieces = sum(-(-tiles // of_item) for tiles in segments if tiles > of_item)
        cells[column] = ratio(by_shares, items(segments, of_item, places), pieces, True)
    if len(lengths) == 1:
        return cells | {COLUMNS[-1]: cells[COLUMNS[3]]}  # with one sequence, decoding uses the splits by shape
    found = shares(segments, places)
    cut = sum(map(len, found)) - len(segments)
    return cells | {COLUMNS[-1]: ratio(by_shares, found, 2 * cut, True)}


def rows(schemes: Sequence[str], device: waves.Device = waves.A100) -> Iterator[dict[str, str]]:
    """Yields a row of the table for every scheme and batch."""
    by_name = {scheme.name: scheme for scheme in cases.DECODE}
    for name in schemes:
        scheme = by_name[name]
        by_splits = measured(cases.with_splits(scheme))
        by_shares = measured(scheme)
        for lengths, batch in BATCHES.items():
            yield row(name, by_splits, by_shares, batch, device) | {"lengths": lengths}


def main(argv: list[str]) -> int:
    names = [scheme.name for scheme in cases.DECODE]
    p = argparse.ArgumentParser("python -m bench ragged", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--scheme", nargs="+", choices=names, default=SCHEMES, help="default: " + ", ".join(SCHEMES))
    p.add_argument("--publish", action="store_true", help=f"write the table to bench/results/{FOLDER}")
    options = p.parse_args(argv)
    if offline.missing_tools():
        p.error(f"missing: {' '.join(offline.missing_tools())}, which are part of Triton's package")
    found = list(rows(options.scheme))
    print("predicted time / time that the memory needs, on an A100; nothing was run on a GPU")
    print_table(COLUMNS, found, left=2)
    if options.publish:
        versions = machine.versions()
        with replacing(RESULTS / FOLDER / RAGGED) as partial, open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, ["revision", "triton", *COLUMNS], lineterminator="\n")
            writer.writeheader()
            writer.writerows({"revision": versions["revision"], "triton": versions["triton"], **each} for each in found)
    return 0
