"""Holds the limits of the gate: spilled bytes, and instructions per tensor-core instruction in the hot loop."""

from __future__ import annotations

import dataclasses

import triton

from .architectures import AMD
from .architectures import NEWER as NEWER_TARGETS
from .cases import (
    DECODE,
    MAPS,
    MAPS_DECODE,
    PARTIAL,
    PARTS,
    PLACED_MAPS,
    QUANTIZED,
    QUANTIZED_CHUNKS,
    SHARED_ALL,
    SHORT,
    SMALL_PAGES,
    SPLITS,
    UNALIGNED,
    VALUES,
    VARIANTS,
    WIDE,
    Case,
)


@dataclasses.dataclass(frozen=True)
class SpillLimit:
    """Holds the spill limits of some kernels.

    spill: how many bytes per thread a kernel may spill. in_loops: how many spilled bytes per thread its tile loops may
    touch; default: none. in_hot_loop: how often its hot loop may touch spilled registers; default: never. The other
    fields say which kernels the limits are for. One of these fields matches every kernel if it is left at its default.
    """

    spill: float
    kernel: str = ""
    arch: int | str = 0
    above: int = 0  # head_dims larger than this
    head_dim: int = 0
    dtype: str = ""
    scheme: str = ""
    triton: str = ""  # version prefix
    in_loops: float = 0
    in_hot_loop: float = 0

    def covers(self, kernel: str, case: Case) -> bool:
        return (
            self.kernel in ("", kernel)
            and self.arch in (0, case.arch)
            and case.head_dim > self.above
            and self.head_dim in (0, case.head_dim)
            and self.dtype in ("", case.dtype)
            and self.scheme in ("", case.scheme.name)
            and triton.__version__.startswith(self.triton)
        )


LISTED = float("inf")  # means no limit: the gate only prints such spills


def listed(**covered) -> SpillLimit:
    return SpillLimit(LISTED, in_loops=LISTED, in_hot_loop=LISTED, **covered)


# Spill limits of the schemes with position maps (Self-Extend and dual chunk attention), by kernel and architecture, for
# head_dim 64 and 128. The kernels spill because, while they change from one band to the next, they hold cos and sin of
# two rotations for every row, besides the accumulators. All these spills are outside the hot loop. Only the spills in
# MAP_SPILLS_IN_LOOPS are in tile loops, namely in loops over edge tiles.
MAP_SPILLS = {
    ("attention_forward", 80): ((36, 0), (60, 0)),
    ("attention_forward", 90): ((0, 80), (0, 44)),
    ("attention_grad_kv", 80): ((0, 352), (0, 668)),  # head_dim 64: KEYS_128
    ("attention_grad_kv", 90): ((12, 176), (32, 384)),
    ("attention_grad_q", 80): ((12, 288), (20, 448)),
    ("attention_grad_q", 90): ((0, 80), (0, 224)),
}
MAP_SPILLS_IN_LOOPS = {"attention_forward": 128, "attention_grad_kv": 12, "attention_grad_q": 24}
MAP_LIMITS = tuple(
    SpillLimit(spill, kernel, arch, 0, head_dim, scheme=scheme.name, in_loops=MAP_SPILLS_IN_LOOPS[kernel])
    for (kernel, arch), of_schemes in MAP_SPILLS.items()
    for scheme, spills in zip(MAPS, of_schemes, strict=True)
    for head_dim, spill in zip((64, 128), spills, strict=True)
)

# Limits for the tile of 128 keys at head_dim 64. The tile is used although its kernels spill, because the issue model
# rates it higher than the tiles whose hot loops touch no spilled register. For each scheme the table gives spilled
# bytes, the spilled bytes that the tile loops touch, and accesses to spilled registers in the hot loop.
KEYS_128 = tuple(
    SpillLimit(spill, "attention_grad_kv", 80, head_dim=64, scheme=scheme, in_loops=in_loops, in_hot_loop=times)
    for scheme, (spill, in_loops, times) in {
        "rope": (84, 40, 1),
        "rerope": (228, 112, 4),
        "rope atomic": (92, 56, 3),
        "rerope atomic": (280, 152, 6),
        "self-extend": (504, 124, 3),
        "dual-chunk": (816, 180, 4),
    }.items()
)

# Limits of the reproducible backward, which stores dS, the gradients of scores. attention_grad_kv spills because
# converting dS to the layout in which it is stored takes registers. The schemes named "seven" do not store dS. A row
# gives the release of Triton, scheme, architecture, head_dim, spilled bytes, the spilled bytes that the tile loops
# touch, and accesses to spilled registers in the hot loop.
STORED_SCORES = (
    *(
        SpillLimit(spill, "attention_grad_kv", arch, 0, head_dim, "", scheme, release, in_loops, times)
        for release, scheme, arch, head_dim, spill, in_loops, times in (
            ("3.6.", "rope", 80, 64, 276, 264, 4),
            ("3.6.", "rerope", 80, 64, 700, 580, 10),
            ("3.6.", "self-extend", 80, 64, 696, 604, 11),
            ("3.6.", "dual-chunk", 80, 64, 872, 908, 11),
            ("3.6.", "rope", 80, 128, 24, 0, 0),
            ("3.6.", "rerope", 80, 128, 312, 8, 0),
            ("3.6.", "self-extend", 80, 128, 396, 112, 0),
            ("3.6.", "dual-chunk", 80, 128, 468, 152, 0),
            ("3.6.", "rope seven", 80, 64, 44, 36, 1),
            ("3.6.", "rerope seven", 80, 64, 208, 112, 3),
            ("3.6.", "rerope seven", 80, 128, 60, 0, 0),
            ("3.6.", "rope", 90, 64, 132, 12, 0),
            ("3.6.", "rerope", 90, 64, 260, 20, 0),
            ("3.6.", "self-extend", 90, 64, 100, 16, 0),
            ("3.6.", "dual-chunk", 90, 64, 128, 36, 0),
            ("3.6.", "rope", 90, 128, 108, 0, 0),
            ("3.6.", "rerope", 90, 128, 208, 0, 0),
            ("3.6.", "rerope seven", 90, 128, 8, 0, 0),
            ("3.9.", "rope", 80, 64, 176, 96, 1),
            ("3.9.", "rerope", 80, 64, 408, 196, 4),
            ("3.9.", "rope", 80, 128, 140, 60, 0),
            ("3.9.", "rerope", 80, 128, 260, 88, 1),
            ("3.9.", "rope seven", 80, 64, 84, 40, 1),
            ("3.9.", "rerope seven", 80, 64, 228, 104, 4),
            ("3.9.", "rope seven", 80, 128, 32, 0, 0),
            ("3.9.", "rerope seven", 80, 128, 100, 0, 0),
            ("3.9.", "rope", 90, 64, 116, 32, 0),
            ("3.9.", "rerope", 90, 64, 304, 48, 0),
            ("3.9.", "rope", 90, 128, 108, 4, 0),
            ("3.9.", "rerope", 90, 128, 340, 16, 0),
            ("3.9.", "rerope seven", 90, 128, 40, 0, 0),
        )
    ),
    SpillLimit(16, "attention_grad_q", 80, head_dim=128, scheme="rerope", triton="3.6."),
    SpillLimit(8, "attention_grad_q", 80, head_dim=128, scheme="rerope seven", triton="3.6."),
    SpillLimit(16, "attention_grad_q", 80, head_dim=128, scheme="rerope seven", triton="3.9."),
    SpillLimit(64, "attention_grad_q", 90, head_dim=128, scheme="rerope seven", triton="3.9."),
)

# The tiles were chosen with Triton 3.6. With the same accumulators, Triton 3.9 spills more. The additional spills are
# outside the inner loops.
NEWEST = (
    SpillLimit(52, "attention_grad_kv", 80, head_dim=128, scheme="rope atomic", triton="3.9", in_loops=4),
    SpillLimit(128, "attention_grad_kv", scheme="rope atomic", triton="3.9"),
    SpillLimit(120, "attention_grad_kv", head_dim=64, scheme="rerope atomic", triton="3.9"),
    SpillLimit(328, "attention_grad_kv", head_dim=128, scheme="rerope atomic", triton="3.9", in_loops=88),
    SpillLimit(16, "attention_grad_q", 80, head_dim=128, scheme="rerope", triton="3.9"),
    SpillLimit(28, "attention_decode", 90, head_dim=128, scheme="rerope contiguous", triton="3.9"),
    SpillLimit(20, "attention_decode", 90, head_dim=128, scheme="rerope paged", triton="3.9"),
)

# Limits of the forward with late values (configs.Tile.lagged) at head_dim 128 and one band. The weights of the tile
# before take 32 more registers, so the inner loop touches spilled registers 20 times in 595 instructions. In return,
# the products with the values run during the softmax.
LATE_VALUES = tuple(
    SpillLimit(80, kernel, 90, head_dim=128, scheme=scheme, triton="3.6.", in_loops=80, in_hot_loop=20)
    for kernel, scheme in (("attention_forward", "rope long"), ("attention_chunks", "rope contiguous chunk"))
)

# Limits of the backward with five products at head_dim 128: sm_90's tiles, and CONTENDERS of lab/tuning/candidates.py.
# On sm_90 the hot loop touches spilled registers up to three times in about 520 instructions, which should cost less
# than it gains. With three stages the loads of a tile are a whole pass ahead of its products; with two stages the pass
# waits for them. Tiles of 64 queries fill a wgmma for dQ; tiles of 32 do not.
FIVE_PRODUCTS = tuple(
    SpillLimit(spill, "attention_grad_kv", arch, 0, 128, "", scheme, in_loops=in_loops, in_hot_loop=times)
    for arch, scheme, spill, in_loops, times in (
        (90, "rope atomic", 56, 28, 3),
        (90, "rerope atomic", 320, 48, 1),
        (90, "rerope atomic 64x128x8x3", 316, 164, 3),
        (80, "rope atomic 32x128x8x3", 12, 0, 0),
        (80, "rerope atomic 32x128x8x3", 100, 0, 0),
    )
)

# Spill limits of kernels over quantized caches, by release of Triton. The spills are outside the tile loops, except in
# the edge tiles of the forward under 3.9.
CODES = (
    SpillLimit(16, "attention_decode", 80, scheme="rerope paged int8", triton="3.6."),
    SpillLimit(16, "attention_decode", 80, scheme="rerope paged int8", triton="3.9."),
    SpillLimit(32, "attention_decode", 90, scheme="rerope paged int8", triton="3.9."),
    SpillLimit(60, "attention_chunks", 90, scheme="rerope paged chunk int8", triton="3.9.", in_loops=64),
    SpillLimit(8, "attention_chunks", 90, scheme="rope contiguous chunk int8", triton="3.6."),
    SpillLimit(28, "attention_chunks", 90, scheme="rerope paged chunk int8", triton="3.6."),
    *(
        SpillLimit(0, scheme=scheme.name, triton=release)
        for release in ("3.6.", "3.9.")
        for scheme in QUANTIZED + QUANTIZED_CHUNKS
    ),
    *(listed(scheme=scheme.name) for scheme in QUANTIZED + QUANTIZED_CHUNKS),
)

# Limits for the targets other than sm_80, sm_86 and sm_90. In the cases that the gate compiles by default, only the
# kernels named here may spill. The spills of all other cases are printed but not limited. A register of an AMD GPU
# counts as four bytes.
OTHERS = (
    SpillLimit(20, "attention_forward", 100, head_dim=128, scheme="rerope", triton="3.6.", in_loops=8),
    SpillLimit(12, "attention_chunks", 100, head_dim=128, scheme="rerope paged chunk", triton="3.6."),
    # The pass of dK and dV also stores the gradients of scores. Storing them takes registers.
    SpillLimit(40, "attention_grad_kv", 100, head_dim=128, scheme="rope", triton="3.6.", in_loops=80),
    SpillLimit(8, "attention_grad_kv", 100, head_dim=128, scheme="rerope", triton="3.6.", in_loops=32),
    SpillLimit(56, "attention_grad_kv", 100, head_dim=128, scheme="rerope", triton="3.9.", in_loops=240),
    SpillLimit(76, "attention_grad_kv", 120, head_dim=128, scheme="rerope", triton="3.6."),
    SpillLimit(4, "attention_grad_kv", 120, head_dim=128, scheme="rerope", triton="3.9."),
    SpillLimit(8, "attention_grad_q", 120, head_dim=128, scheme="rerope", triton="3.6."),
    SpillLimit(16, "attention_grad_q", 120, head_dim=128, scheme="rerope", triton="3.9."),
    SpillLimit(20, "attention_grad_q", 100, head_dim=128, scheme="rerope", in_loops=60),
    SpillLimit(28, "attention_forward", 120, head_dim=128, scheme="rerope", triton="3.9."),
    *(
        SpillLimit(32, "attention_decode", 120, head_dim=128, scheme=scheme, triton="3.9.")
        for scheme in ("rope paged", "rerope paged")
    ),
    SpillLimit(4, "attention_grad_kv", "gfx942", head_dim=128, scheme="rerope", triton="3.9."),
    *(
        SpillLimit(0, arch=arch, head_dim=128, dtype="bf16", scheme=scheme.name)
        for arch in (100, 120, *AMD)
        for scheme in SHORT
    ),
    *(listed(arch=arch) for arch in (*NEWER_TARGETS, *AMD)),
)

# Limits of decoding at head_dim 128 on sm_90 with groups of keys (configs.key_groups). Each warp holds an accumulator,
# the queries and the fine rows of cos and sin for itself. With shares, that leaves too few registers, and the hot loop
# touches spilled ones at most 20 times, in 890 to 960 instructions with one band and in 380 to 443 with several (up to
# 950 if a map groups positions). In return a tile takes 5 or 2 barriers instead of 13 or 9. With pages of 16 rows and
# one band it touches them 24 times, but has 966 instructions, and 1,086 without groups, because a group needs one page
# number instead of 16.
GROUPS_90 = tuple(
    SpillLimit(spill, "attention_decode", 90, 0, 128, "", scheme, "3.6.", in_loops, times)
    for scheme, spill, in_loops, times in (
        ("rope contiguous", 136, 80, 20),
        ("rope paged", 136, 80, 20),
        ("rope paged 16", 164, 96, 24),
        ("rerope contiguous", 392, 168, 20),
        ("rerope paged", 392, 168, 20),
        ("rerope paged 16", 412, 176, 20),
        ("self-extend paged", 412, 212, 20),
        ("dual-chunk paged", 412, 212, 20),
        ("rerope contiguous splits", 80, 0, 0),
        ("rerope paged splits", 80, 0, 0),
    )
)

# Limits for decoding by shares. A program spills what it keeps from one piece to the next. It touches these registers
# once per piece, outside the loops over keys.
PARTS_SPILLS = {64: {100: 32}, 256: {80: 72, 90: 28, 100: 68}, 512: {80: 84, 86: 24, 89: 24, 90: 32, 100: 12, 120: 24}}
PIECES = (
    *GROUPS_90,
    SpillLimit(20, "attention_decode", 90, head_dim=128, scheme=SPLITS[1].name, triton="3.9"),
    SpillLimit(28, "attention_decode", 90, head_dim=128, scheme=SPLITS[2].name, triton="3.9"),
    # With groups of keys, a program spills what it needs outside its loops. Under 3.9 one case also spills in its
    # loops.
    SpillLimit(
        124, "attention_decode", 80, head_dim=128, scheme=SPLITS[2].name, triton="3.9", in_loops=32, in_hot_loop=1
    ),
    SpillLimit(100, "attention_decode", 80, head_dim=128, scheme=SPLITS[2].name),
    SpillLimit(56, "attention_decode", 80, head_dim=128, scheme=SPLITS[1].name),
    *(SpillLimit(0, scheme=scheme.name) for scheme in SPLITS),
    *(
        SpillLimit(spill, "attention_decode", arch, head_dim=head_dim, scheme=scheme.name)
        for arch, spill in ((80, 252), (90, 180))
        for head_dim in (64, 128)
        for scheme in (*DECODE, *SMALL_PAGES, *QUANTIZED, *PARTS, *MAPS_DECODE, WIDE, PARTIAL, SHARED_ALL)
    ),
    *(
        SpillLimit(
            spill,
            "attention_decode",
            arch,
            head_dim=head_dim,
            scheme=scheme.name,
            triton="3.6." if head_dim == 512 else "",
        )
        for head_dim, spills in PARTS_SPILLS.items()
        for arch, spill in spills.items()
        for scheme in PARTS
    ),
    *(
        SpillLimit(spill, "attention_decode", arch, head_dim=128, scheme=scheme.name)
        for arch, scheme, spill in (
            (100, DECODE[3], 12),
            (100, QUANTIZED[2], 24),
            (120, DECODE[2], 8),
            (120, DECODE[3], 88),
            (120, QUANTIZED[2], 28),
            ("gfx950", QUANTIZED[2], 24),
        )
    ),
)

# Spill limits of training with 257 to 512 channels: {(scheme, architecture, head_dim): spilled bytes of forward, dK and
# dV, dQ}. The backward with atomics, which is the default at these widths, computes dK, dV and dQ in one pass. Its
# spills are in the column of dK and dV. The spills are outside the tile loops, except those of WIDE_SPILLS_IN_LOOPS:
# {(kernel, scheme, architecture, head_dim): spilled bytes that the tile loops touch, accesses in the hot loop}. Such
# tiles are used because the issue model rates them higher than the tiles without such spills.
WIDE_SPILLS_IN_LOOPS = {
    ("attention_grad_kv", "rope", 80, 448): (96, 12),
    ("attention_grad_kv", "rope atomic", 80, 448): (152, 26),
    ("attention_grad_kv", "rerope atomic", 80, 448): (292, 16),
    ("attention_grad_kv", "rope atomic", 80, 512): (160, 36),
    ("attention_grad_kv", "rerope atomic", 80, 512): (288, 28),
    ("attention_grad_q", "rerope", 80, 512): (48, 1),
}
WIDE_TRAINING = tuple(
    SpillLimit(spill, kernel, arch, 0, head_dim, "", scheme, "3.6.", in_loops, times)
    for (scheme, arch, head_dim), spills in {
        ("rope", 80, 320): (0, 80, 0),
        ("rope", 80, 384): (0, 96, 0),
        ("rope", 80, 448): (0, 276, 0),
        ("few", 80, 512): (0, 408, 16),
        ("rerope", 80, 320): (0, 320, 0),
        ("rerope", 80, 384): (108, 456, 112),
        ("rerope", 80, 448): (0, 660, 204),
        ("rerope", 80, 512): (20, 1108, 232),
        ("rope atomic", 80, 320): (0, 136, 0),
        ("rope atomic", 80, 384): (0, 204, 0),
        ("rope atomic", 80, 448): (0, 500, 0),
        ("rope atomic", 80, 512): (0, 652, 0),
        ("rerope atomic", 80, 320): (0, 508, 0),
        ("rerope atomic", 80, 384): (108, 508, 0),
        ("rerope atomic", 80, 448): (0, 1296, 0),
        ("rerope atomic", 80, 512): (20, 1424, 0),
        ("rope", 86, 320): (0, 16, 0),
        ("rope", 86, 448): (0, 20, 0),
        ("rerope", 86, 384): (88, 32, 0),
        ("rope atomic", 86, 384): (0, 12, 0),
    }.items()
    for kernel, spill in zip(("attention_forward", "attention_grad_kv", "attention_grad_q"), spills, strict=True)
    for in_loops, times in [WIDE_SPILLS_IN_LOOPS.get((kernel, scheme, arch, head_dim), (0, 0))]
)

# The first match decides. Kernels with one and two bands in 16-bit types, at head_dim 64 and 128 on sm_80 and sm_90,
# are always limited, never only listed.
SPILL_LIMITS = (
    *PIECES,
    listed(head_dim=512, triton="3.9."),  # up to 36 bytes in the loops of sm_90 to sm_120
    *(SpillLimit(0, scheme=scheme.name) for scheme in PARTS),
    *OTHERS,
    *CODES,
    SpillLimit(4, "attention_decode", 90, head_dim=128, scheme=PLACED_MAPS[0].name, triton="3.6."),  # outside the loops
    SpillLimit(24, "attention_grad_kv", scheme="v 128 atomic", triton="3.6."),  # outside the tile loops
    *(SpillLimit(0, scheme=scheme.name, triton="3.6.") for scheme in VALUES),
    SpillLimit(0, "attention_forward", 90, head_dim=256, scheme="rope", triton="3.6."),
    SpillLimit(0, "attention_forward", scheme=UNALIGNED.name, triton="3.6."),
    *WIDE_TRAINING,
    listed(above=128),  # the accumulators of most tiles of 256 channels do not fit in 255 registers
    *(listed(head_dim=head_dim) for head_dim in (32, 96)),
    *(listed(scheme=scheme.name) for scheme in VARIANTS),
    listed(arch=86),
    listed(dtype="fp32"),
    *STORED_SCORES,
    *KEYS_128,
    *MAP_LIMITS,
    *NEWEST,
    # The gradient kernels below spill because they hold the accumulators of at least three products and, with several
    # bands, rotate a gradient's sum from one band's basis to the next one's. Only FIVE_PRODUCTS have spills in
    # the hot loop.
    *FIVE_PRODUCTS,
    SpillLimit(12, "attention_grad_kv", scheme="rope atomic"),
    SpillLimit(76, "attention_grad_kv", head_dim=64, scheme="rerope atomic"),
    SpillLimit(132, "attention_grad_kv", head_dim=128, scheme="rerope atomic"),
    SpillLimit(60, "attention_grad_kv", arch=80, head_dim=128, scheme="rerope"),
    SpillLimit(8, "attention_grad_kv", arch=80, above=64),
    SpillLimit(8, "attention_grad_q", arch=80, head_dim=128, scheme="rerope"),
    SpillLimit(16, "attention_grad_kv", arch=90, head_dim=128, scheme="rerope"),
    # The decode kernels below spill outside the loops over keys.
    *(
        SpillLimit(16, "attention_decode", arch=80, head_dim=128, scheme=scheme)
        for scheme in ("rerope contiguous", "rerope partial", "dual-chunk paged")
    ),
    # The kernels below spill outside the tile loops, because they hold page numbers and the queries' rotation besides
    # an accumulator.
    SpillLimit(8, "attention_chunks", arch=80, head_dim=64, scheme="rope paged chunk"),
    SpillLimit(112, "attention_chunks", arch=80, head_dim=64, scheme="rerope paged chunk"),
    SpillLimit(56, "attention_chunks", arch=80, head_dim=128, scheme="rerope paged chunk"),
    SpillLimit(112, "attention_chunks", arch=80, head_dim=64, scheme="few rerope paged chunk"),
    SpillLimit(4, "attention_chunks", arch=80, head_dim=128, scheme="few rerope paged chunk"),
    SpillLimit(4, "attention_decode", arch=80, head_dim=64, scheme="rerope wide"),
    SpillLimit(8, "attention_decode", arch=90, head_dim=128, scheme="rerope paged placed 256"),
    SpillLimit(28, "attention_chunks", arch=90, head_dim=64, scheme="rerope paged chunk", triton="3.9"),
    SpillLimit(20, "attention_chunks", arch=90, head_dim=64, scheme="few rerope paged chunk", triton="3.9"),
    SpillLimit(64, "attention_grad_q", arch=90, head_dim=128, scheme="rerope", triton="3.9"),
    # The kernels below spill in the loops over edge tiles, which run once or twice per band. In return, the inner loop
    # has a quarter fewer instructions.
    SpillLimit(68, "attention_chunks", arch=90, head_dim=128, scheme="rope paged chunk", in_loops=56),
    SpillLimit(44, "attention_chunks", arch=90, head_dim=128, scheme="few rerope paged chunk", in_loops=88),
    *LATE_VALUES,
    SpillLimit(28, "attention_forward", arch=90, head_dim=128, in_loops=56),
    SpillLimit(28, "attention_chunks", arch=90, head_dim=128, in_loops=56),
    SpillLimit(0),
)


# The kernels of sm_90 in which ptxas lets wgmma wait for one another (messages C7510 to C7518): (kernel, scheme). The
# loop of dQ from stored gradients of scores has a single product, which Triton lets run into the next pass. With one
# band ptxas gives up on that (C7515). Neither other tiles with several stages nor zeros that the compiler does not know
# change it. A single stage does, but has no prefetch.
SERIALISED = {("attention_grad_q", "rope")}


def may_serialise(kernel: str, case: Case) -> bool:
    return (kernel, case.scheme.name) in SERIALISED


def spill_limit(kernel: str, case: Case) -> SpillLimit:
    return next(limit for limit in SPILL_LIMITS if limit.covers(kernel, case))


def hot_loop_spills(kernel: str, case: Case) -> float:
    """Returns how often the hot loop of a candidate for this kernel may touch spilled registers: as often as the gate
    allows the kernel, or never if the gate only lists the kernel's spills."""
    times = spill_limit(kernel, case).in_hot_loop
    return 0 if times == LISTED else times


def _by_size(sm80: tuple[float, float], sm90: tuple[float, float]) -> dict[tuple[int, int], float]:
    """Returns {(architecture, head_dim): instructions}. sm80, sm90: the figures for head_dim 64 and 128."""
    return {(80, 64): sm80[0], (80, 128): sm80[1], (90, 64): sm90[0], (90, 128): sm90[1]}


# Instructions per HMMA (sm_80) or HGMMA (sm_90; its size follows from the tile) in bf16, by kernel and scheme. Kernels
# that are not listed have no limit. Each limit is a little above the figure of today's compilers. A compiler that only
# schedules differently therefore passes, but a lost vector load, a mask or a rotation in the inner loop fails.
INSTRUCTION_LIMITS = {
    ("attention_forward", "rope"): _by_size((5.2, 4.6), (41, 33.5)),
    ("attention_forward", "rope long"): {(90, 128): 37.5},
    ("attention_forward", "rerope"): _by_size((5.2, 4.1), (41, 33.5)),
    ("attention_grad_kv", "rope"): _by_size((4.9, 4.1), (24, 19.3)),
    ("attention_grad_kv", "rerope"): _by_size((4.9, 4.1), (24, 19.3)),
    ("attention_grad_kv", "rope seven"): _by_size((4, 3.4), (20.5, 19.3)),
    ("attention_grad_kv", "rerope seven"): _by_size((4, 3.4), (20.5, 19.3)),
    ("attention_grad_kv", "rope atomic"): _by_size((4.1, 3.5), (16, 16.8)),
    ("attention_grad_kv", "rerope atomic"): _by_size((4.1, 3.5), (16, 16.1)),
    ("attention_grad_kv", "rope atomic 32x128x8x3"): {(80, 128): 3.5},
    ("attention_grad_kv", "rerope atomic 32x128x8x3"): {(80, 128): 3.5},
    ("attention_grad_kv", "rerope atomic 64x128x8x3"): {(90, 128): 16.9},
    ("attention_grad_q", "rope"): _by_size((2.8, 2.5), (24.5, 23.5)),
    ("attention_grad_q", "rerope"): _by_size((2.8, 2.5), (24.5, 23.5)),
    ("attention_grad_q", "rope seven"): _by_size((4, 2.9), (24.5, 18.2)),
    ("attention_grad_q", "rerope seven"): _by_size((4, 2.9), (24.5, 18.2)),
    ("attention_decode", "rope contiguous"): _by_size((35.5, 28.5), (35.5, 28.5)),
    ("attention_decode", "rope paged"): _by_size((39, 31), (39, 31)),
    ("attention_decode", "rerope contiguous"): _by_size((17.5, 12.5), (17.5, 12.5)),
    ("attention_decode", "rerope paged"): _by_size((21, 14.5), (21, 14.5)),
    ("attention_decode", "rope paged 16"): {(90, 64): 42, (90, 128): 34},
    ("attention_decode", "rerope paged 16"): {(80, 64): 24.5, (90, 64): 24.5, (90, 128): 19},
    ("attention_decode", "rope paged placed 256"): _by_size((48, 35), (48, 35)),
    ("attention_decode", "rerope paged placed 256"): _by_size((26.5, 17.5), (26.5, 17.5)),
    ("attention_decode", "rope paged placed 16"): _by_size((63, 44), (63, 44)),
    ("attention_decode", "rerope paged placed 16"): _by_size((41.5, 24.5), (41.5, 24.5)),
    ("attention_decode", "rerope paged placed 256 stored"): _by_size((34, 27), (34, 27)),
    ("attention_decode", "mrope paged placed 256 stored"): _by_size((135, 138), (136, 140)),
}
INSTRUCTION_LIMITS |= {
    (kernel, scheme.name): INSTRUCTION_LIMITS[kernel, "rerope"]
    for kernel in ("attention_forward", "attention_grad_kv", "attention_grad_q")
    for scheme in MAPS
} | {
    ("attention_decode", scheme.name): limits
    for schemes, limits in (
        (MAPS_DECODE, _by_size((46, 44.5), (46, 44.5))),
        (PLACED_MAPS, _by_size((54, 51), (54, 51))),
    )
    for scheme in schemes
}
for _scheme, _limits in zip(PARTS, ((30, 22, 15, 14), (34, 24, 17, 15)), strict=True):
    INSTRUCTION_LIMITS["attention_decode", _scheme.name] = {
        (arch, head_dim): limit
        for arch in (80, 90)
        for head_dim, limit in zip((64, 128, 256, 512), _limits, strict=True)
    }
# Heads of 257 to 512 channels, sm_80.
for _kernel, _scheme, _limits in (
    ("attention_forward", "rope", (5.9, 5.5, 5.1, 5.5)),
    ("attention_forward", "rerope", (5.7, 5.3, 5.1, 5.5)),
    ("attention_grad_kv", "rope", (3.4, 3.9, 3.9, 4.3)),
    ("attention_grad_kv", "rerope", (3.4, 3.9, 3.9, 4.3)),
    ("attention_grad_kv", "rope atomic", (3.7, 5.4, 4.9, 5.3)),
    ("attention_grad_kv", "rerope atomic", (4.8, 5.4, 4.9, 5.3)),
    ("attention_grad_q", "rope", (3.1, 3, 3, 3.4)),
    ("attention_grad_q", "rerope", (3.1, 3, 3, 3.4)),
):
    INSTRUCTION_LIMITS[_kernel, _scheme] |= {
        (80, width): limit for width, limit in zip((320, 384, 448, 512), _limits, strict=True)
    }
# Barriers in the hot loop of a decode kernel in which each warp has a group of keys, by whether the loop rotates keys.
# Without groups the loop has 9 or 13 barriers.
GROUP_BARRIERS = {False: 2, True: 5}
# Instruction limits for quantized caches under Triton 3.6. Later versions stay below these limits too, except in the
# cases that NEWER lists.
CODE_INSTRUCTIONS = {
    ("attention_chunks", "rope contiguous chunk int8"): {(80, 128): 16.6, (90, 128): 83},
    ("attention_chunks", "rerope paged chunk int8"): {(80, 128): 21, (90, 128): 100},
    ("attention_decode", "rope contiguous int8"): {(80, 128): 39.5, (90, 128): 39},
    ("attention_decode", "rope paged int8"): {(80, 128): 40.5, (90, 128): 40},
    ("attention_decode", "rerope contiguous int8"): {(80, 128): 20, (90, 128): 20.5},
    ("attention_decode", "rerope paged int8"): {(80, 64): 32.5, (80, 128): 23, (90, 128): 22.5},
}
# Instruction limits under versions of Triton after 3.6, measured with 3.9. For these versions configs.py has other
# tiles, because the tiles for 3.6 would spill.
NEWER = {
    ("attention_forward", "rope"): {(80, 64): 6.7},
    ("attention_chunks", "rerope paged chunk int8"): {(90, 128): 107},
    ("attention_forward", "rerope"): {(80, 64): 6.7, (80, 128): 5.5},
    ("attention_grad_kv", "rope"): {(90, 64): 24.3},
    ("attention_grad_kv", "rerope"): {(90, 64): 24.3},
    ("attention_grad_q", "rope"): {(80, 64): 3.4, (80, 128): 3.4, (90, 128): 24.7},
    ("attention_grad_q", "rerope"): {(80, 64): 3.4, (80, 128): 3.4, (90, 128): 24.7},
    ("attention_grad_kv", "rope atomic"): _by_size((5.9, 5), (19.3, 8.6)) | {(80, 320): 4.1},
    ("attention_grad_kv", "rerope atomic"): _by_size((5.9, 5), (19.3, 8.6)),
}


def max_instructions(kernel: str, case: Case) -> float | None:
    """Returns the most instructions per tensor-core instruction that a kernel may have under the installed Triton
    version, or None if it has no limit."""
    if case.dtype != "bf16":
        return None
    newer = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
    for table in ((NEWER,) if newer else ()) + (INSTRUCTION_LIMITS, CODE_INSTRUCTIONS):
        limits = table.get((kernel, case.scheme.name), {})
        if (case.arch, case.head_dim) in limits:
            return limits[case.arch, case.head_dim]
    return None
