"""All tuning numbers of the kernels: tile sizes, warps and pipeline stages by architecture, head_dim and direction.

The compute capability selects a table: "sm80" (A100), "sm86" (sm_86 and sm_89, 99 KB of shared memory), "sm90" (H100,
H200), "sm100" (B200, and up to sm_119), "sm120" (RTX 50 and newer, 99 KB). AMD's gfx942 (MI300, 64 KB) and gfx950
(MI350) share the table "cdna".
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import triton

AMD = ("gfx942", "gfx950")  # AMD's GPUs that the kernels are compiled for


class Tile(NamedTuple):
    """block_m: query rows, block_n: key rows of a tile. lagged: as in ``Variant``, for the forward over contiguous
    keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    lagged: bool = False

    @property
    def options(self) -> dict[str, int | bool]:
        """Returns the launch options for Triton."""
        return options(self.num_warps, num_stages=self.num_stages)

    @property
    def description(self) -> str:
        late = ", late values" if self.lagged else ""
        return f"{self.block_m} x {self.block_n}, {self.num_warps} warps, {self.num_stages} stages{late}"


def by_block_d(*tiles: tuple[int, ...]) -> dict[int, Tile]:
    return {block_d: Tile(*tile) for block_d, tile in zip((16, 32, 64, 128, 256), tiles, strict=True)}


# Tiles by block_d, the power of two that holds head_dim. If a scheme has several bands, a "banded" entry replaces the
# entry of its direction, because rotating between bands takes registers. Two tiles have been timed: with
# one band and 128 channels, sm90's "forward" is the fastest of 24 on an H200 beyond 8,192 keys, and "forward short" is
# the fastest up to there (docs/speed.md).
# For 64 and more channels, the tiles of "sm80" and "sm86" were ranked by the issue model (python -m bench model). Each
# is the best among tiles of similar sizes. The tiles of "sm90" were ranked by instructions per needed product. Needed
# products are the products of tensor cores, without those of padding and without repetitions in other warps. Some tiles
# do spill in the inner loop. For 64 channels, sm80's dK and dV spill up to four registers. With one band they reach 75%
# of the tensor cores' peak in the model; the best tile without such spills reaches 69%. For 256 channels, sm80's
# forward tiles spill up to a seventh of the accumulator. With one band they reach 64%; the best tile without spills
# reaches 48%. sm86's dQ tile for 256 channels spills two registers. sm90's forward adds values one tile late (lagged):
# their products then run on the tensor cores during the softmax. For 128 channels and one band, its inner loop touches
# spilled registers 20 times among 595 instructions. With several bands it would touch them 26 times, so values are not
# late there. No GPU has timed late values yet. On sm80 the issue model predicts 36% more clocks for them, because
# mma.sync does not run beside the softmax.
# sm80's "decode" tile for 256 channels has one pipeline buffer for keys and values. Two blocks then fit on a
# multiprocessor, and one computes while the other waits. On the other targets this tile has two buffers, which cost 2%
# more instructions. With quantized caches or explicit positions, 4 warps would spill in their loops, so "decode codes"
# has 8 warps. "decode parts" is for heads of which at most half of the channels rotate. Rotating so few channels leaves
# registers for a tile of 64 keys. With other "grad_qkv" tile shapes, several warps may hold copies of the same dQ
# fragment, so the reduction straight from the accumulator's layout would add it more than once. sm90's "grad_qkv" tiles
# for 128 channels touch spilled registers in the inner loop: three times with one band, once with several. In return,
# three stages load a whole tile ahead, where two wait for loads of the pass before, and 64 rows fill a wgmma for dQ.
# fmt: off
HALF = {
    "sm80": {
        "forward": by_block_d((128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 3), (128, 32, 4, 3), (128, 64, 8, 2)),
        "forward banded": {128: Tile(128, 64, 8, 3)},
        "forward unaligned": {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3)},
        "grad_kv": by_block_d((32, 128, 4, 3), (32, 128, 4, 3), (32, 128, 4, 3), (32, 64, 4, 3), (32, 32, 4, 2)),
        "grad_q": by_block_d((128, 64, 4, 2), (128, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        "grad_q banded": {128: Tile(128, 64, 8, 2)},
        "grad_q scores": {64: Tile(128, 64, 4, 3), 128: Tile(128, 32, 4, 3)},
        "forward codes": {128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 4, 3)},
        "forward paged": {256: Tile(128, 32, 8, 3)},
        "decode": by_block_d((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
        "decode codes": {256: Tile(16, 32, 8, 3)},
        "decode parts": {256: Tile(16, 64, 4, 2)},
        "decode wide": by_block_d((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 8, 3), (32, 32, 8, 2)),
    },
    "sm86": {
        "forward": by_block_d((128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 16, 8, 3)),
        "forward codes": {128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 4, 1)},
        "forward unaligned": {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 3)},
        "grad_kv": by_block_d((32, 128, 4, 2), (32, 128, 4, 2), (64, 64, 4, 3), (32, 128, 8, 2), (32, 32, 4, 2)),
        "grad_q": by_block_d((128, 64, 4, 2), (128, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 1)),
        "grad_q banded": {256: Tile(32, 32, 4, 2)},
        "grad_q scores": {64: Tile(128, 32, 4, 3), 128: Tile(128, 32, 4, 3)},
        "grad_qkv": {64: Tile(64, 64, 4, 2), 128: Tile(32, 128, 8, 2)},
        "decode": by_block_d((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 3)),
        "decode codes": {256: Tile(16, 32, 8, 3)},
        "decode wide": by_block_d((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 8, 3), (32, 32, 8, 2)),
    },
    "sm90": {
        "forward": by_block_d(
            (128, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3, True), (128, 128, 8, 3, True), (128, 64, 8, 2)
        ),
        "forward banded": {128: Tile(128, 128, 8, 3)},
        "forward short": {128: Tile(64, 64, 4, 3)},
        "forward codes banded": {128: Tile(128, 64, 8, 3)},
        "grad_kv": by_block_d((32, 128, 4, 3), (32, 128, 4, 3), (64, 128, 8, 2), (32, 128, 8, 3), (64, 32, 8, 2)),
        "grad_q": by_block_d((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
        "grad_qkv": {64: Tile(64, 128, 8, 2), 128: Tile(64, 128, 8, 3)},
        "grad_qkv banded": {128: Tile(64, 128, 8, 2)},
        "decode": by_block_d((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 3)),
        "decode codes": {256: Tile(16, 32, 8, 3)},
        "decode parts": {256: Tile(16, 64, 4, 2)},
        "decode wide": by_block_d((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 8, 3), (32, 32, 8, 2)),
    },
}
# sm_100 and sm_120 take the tiles of sm_90 and sm_86, except where those would spill in their loops. sm_100 also keeps
# the loop whose values are not late and "grad_qkv" tiles of its own, and has no "forward short", because sm_90's were
# chosen for wgmma, which sm_100 lacks.
HALF["sm100"] = HALF["sm90"] | {
    "forward": {block_d: tile._replace(lagged=False) for block_d, tile in HALF["sm90"]["forward"].items()},
    "forward short": {},
    "grad_kv banded": {128: Tile(64, 64, 8, 3)},
    "grad_qkv": {64: Tile(64, 128, 8, 2), 128: Tile(64, 128, 8, 2)},
    "grad_qkv banded": {128: Tile(32, 128, 8, 2)},
}
HALF["sm120"] = HALF["sm86"] | {
    "grad_kv": HALF["sm86"]["grad_kv"] | {128: Tile(64, 64, 8, 2)},
    "grad_q banded": HALF["sm86"]["grad_q banded"] | {128: Tile(128, 32, 8, 2)},
}
# The tiles of "cdna" spill no vector register and fit in 64 KB of shared memory. They take fewer instructions per
# needed product than other such tiles. With at most four waves on a compute unit, a wave may use 512 registers.
HALF["cdna"] = {
    "forward": by_block_d((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 4, 2), (128, 16, 8, 2)),
    "forward codes": by_block_d((128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 4, 2), (128, 32, 4, 2), (64, 16, 8, 1)),
    "grad_kv": by_block_d((64, 128, 4, 1), (64, 128, 4, 1), (64, 128, 4, 1), (32, 128, 4, 1), (16, 64, 4, 1)),
    "grad_q": by_block_d((128, 64, 4, 1), (128, 64, 4, 1), (128, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1)),
    "grad_qkv": {128: Tile(32, 64, 4, 1)},
    "decode": by_block_d((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 1)),
    "decode wide": by_block_d((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (16, 32, 4, 1)),
}
# Tiles for Triton versions after 3.6 (checked: 3.9). They replace tiles of HALF that spill under newer versions
# but not under 3.6.
NEWER_HALF = {
    "sm80": {
        "forward": {64: Tile(128, 32, 4, 3)},
        "forward banded": {64: Tile(128, 32, 4, 3), 128: Tile(128, 32, 8, 3)},
        "grad_kv": {128: Tile(32, 128, 8, 3)},
    },
    "sm90": {
        "forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3)},  # late values would spill
        "grad_q banded": {128: Tile(128, 64, 8, 3)},
        "grad_qkv": {128: Tile(32, 128, 8, 2)},
        "decode wide": {128: Tile(32, 32, 8, 3)},
    },
    "sm100": {"forward": {128: Tile(128, 64, 8, 3)}},
}
# Tiles by (block_d, block_dv), for v with a different head_dim. If block_d is 256, a block_dv below 128 counts as 128.
# In multi-head latent attention (head_dim 192, and 128 for v) the narrower accumulators leave room for larger tiles.
# The tiles are ranked as in HALF. With one band, none of them spills in its loops. (64, 128) has its own tile, because
# the tile for 128 channels would compute some products twice.
OTHER_V = {
    "sm80": {
        "grad_kv": {(256, 128): Tile(64, 64, 8, 1)},
        "grad_q": {(256, 128): Tile(64, 64, 8, 1)},
        "grad_qkv": {(256, 128): Tile(32, 64, 8, 1), (64, 128): Tile(32, 64, 4, 2)},
    },
    "sm86": {
        "forward": {(256, 128): Tile(64, 64, 4, 2)},
        "forward paged": {(256, 128): Tile(64, 32, 4, 3)},
        "grad_kv": {(256, 128): Tile(32, 64, 8, 2)},
        "grad_q": {(256, 128): Tile(64, 32, 8, 2)},
        "grad_qkv": {(256, 128): Tile(32, 64, 8, 1), (64, 128): Tile(32, 64, 4, 2)},
    },
    "sm90": {
        "forward": {(256, 128): Tile(128, 64, 8, 3)},
        "grad_kv": {(256, 128): Tile(32, 64, 8, 2)},
        "grad_q": {(256, 128): Tile(128, 64, 8, 2)},
        "grad_qkv": {(256, 128): Tile(64, 32, 8, 1)},
    },
}
OTHER_V |= {"sm100": OTHER_V["sm90"], "sm120": dict(OTHER_V["sm86"]), "cdna": {}}
OTHER_V["sm120"]["grad_kv"] = OTHER_V["sm86"]["grad_kv"] | {(64, 128): Tile(32, 128, 8, 2)}
# The block_d for which deterministic=None selects the backward with five matrix products, which accumulates dQ by
# atomics. The entries hold for 16-bit types if v has the head_dim of q. The issue model predicts that this backward is
# faster than the one with seven products, at 512 to 128k tokens, with one and two bands. For "sm90" the model only
# shows fewer instructions. An H200 was faster with five products at head_dim 128: 387 against 315 TFLOP/s, forward and
# backward (docs/speed.md). The other entries are not timed on a GPU yet.
ATOMIC_WIDTHS = {"sm80": (64, 128, 512), "sm86": (64, 128, 512), "sm90": (64, 128, 512), "sm100": (64, 128)}
ATOMIC_WIDTHS["sm120"] = ATOMIC_WIDTHS["sm86"]
SCORE_WIDTHS = {name: (64, 128) for name in ("sm80", "sm86", "sm90", "sm100", "sm120")}  # see storing_is_faster
# Families whose shared memory fits a float32 dQ kernel beyond 256 channels (has_grad_q)
LARGE_SHARED = ("sm80", "sm90", "sm100", "cdna")
# Tiles for float32, whose products run without tensor cores (input_precision "ieee"). Their speed was not optimized.
FLOAT = {
    "forward": by_block_d((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    "grad_kv": by_block_d((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    "grad_q": by_block_d((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    "decode": by_block_d((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    "decode wide": by_block_d((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
}
# Tiles for heads of 257 to 576 channels; more than 512 only in decoding. Forward and gradients wait for shared memory
# most of the time. Their tiles were chosen among tiles whose loops access at most 292 bytes of local memory. They were
# ranked by the issue model where it applies. The others were ranked by instructions per needed product: a product of
# tensor cores that is neither padding nor repeated in another warp. In sm_90's gradients, every tile for wgmma, which
# needs 64 rows, spills more. "decode shared" is for heads in parts whose values are channels of the keys. "decode
# parts" does not spill. The decode tiles of heads without parts need 64 or more registers for cos and sin of their
# keys. On sm_90, sm_100 and sm_120 their loops access up to 24 bytes of local memory.
# Loads that are not aligned take more registers. So unaligned calls take smaller tiles, named "unaligned", for dK and
# dV.
WIDEST = {
    "sm80": {
        "forward": Tile(32, 64, 8, 1),
        "forward paged": Tile(32, 32, 4, 3),
        "grad_kv": Tile(64, 16, 8, 2),
        "grad_kv unaligned": Tile(16, 16, 4, 2),
        "grad_q": Tile(32, 32, 4, 2),
        "grad_qkv": Tile(64, 16, 8, 2),
        "grad_qkv unaligned": Tile(32, 16, 8, 2),
        "decode": Tile(16, 16, 4, 2),
        "decode parts": Tile(16, 32, 4, 2),
        "decode parts paged": Tile(16, 32, 4, 3),
        "decode wide": Tile(16, 32, 8, 2),
        "decode wide paged": Tile(16, 32, 8, 3),
        "decode shared": Tile(16, 32, 4, 2),
        "decode shared wide": Tile(32, 64, 8, 2),
        "decode shared wide paged": Tile(16, 32, 4, 2),
    },
    "sm86": {
        "forward": Tile(32, 32, 4, 2),
        "forward paged": Tile(32, 16, 4, 3),
        "grad_kv": Tile(32, 16, 8, 2),
        "grad_kv unaligned": Tile(16, 16, 4, 2),
        "grad_q": Tile(16, 32, 4, 2),
        "decode": Tile(16, 16, 4, 3),
        "decode parts": Tile(16, 32, 4, 2),
        "decode parts paged": Tile(16, 16, 4, 3),
        "decode wide": Tile(16, 32, 8, 2),
        "decode wide paged": Tile(16, 16, 8, 3),
        "decode shared": Tile(16, 32, 4, 2),
        "decode shared paged": Tile(16, 16, 4, 3),
        "decode shared wide": Tile(16, 32, 4, 2),
        "decode shared wide paged": Tile(16, 16, 4, 3),
    },
    "cdna": {
        "forward": Tile(32, 16, 4, 1),
        "grad_kv": Tile(16, 16, 4, 1),
        "grad_q": Tile(16, 16, 4, 1),
        "decode": Tile(16, 16, 4, 1),
        "decode parts": Tile(16, 32, 4, 1),
        "decode wide": Tile(16, 16, 4, 1),
    },
    "float": {
        "forward": Tile(16, 16, 4, 1),
        "grad_kv": Tile(16, 16, 4, 1),
        "grad_q": Tile(16, 16, 4, 1),
        "decode": Tile(16, 16, 4, 1),
        "decode wide": Tile(16, 16, 4, 1),
    },
}
WIDEST["sm90"] = WIDEST["sm80"] | {
    "forward": Tile(64, 32, 8, 2),
    "forward paged": Tile(64, 32, 8, 2),
    "grad_kv": Tile(32, 16, 8, 2),
    "grad_kv unaligned": Tile(32, 16, 8, 2),
    "grad_qkv": Tile(32, 16, 8, 2),
    "decode parts paged": Tile(16, 32, 4, 2),
    "decode shared": Tile(16, 32, 4, 3),
    "decode shared wide": Tile(64, 64, 8, 2),
    "decode shared wide paged": Tile(64, 32, 8, 3),
}
WIDEST |= {"sm100": WIDEST["sm90"], "sm120": WIDEST["sm86"]}
# Tiles for heads that training divides (training_widths), by family and sum of the widths. They replace WIDEST's.
DIVIDED = {
    ("sm80", 320): {
        "forward": Tile(32, 32, 4, 2),
        "grad_kv": Tile(64, 32, 8, 1),
        "grad_qkv": Tile(64, 32, 8, 1),
        "grad_qkv banded": Tile(64, 16, 8, 2),
    },
    ("sm80", 384): {
        "forward": Tile(32, 32, 4, 2),
        "grad_kv": Tile(64, 16, 8, 2),
        "grad_qkv": Tile(64, 16, 8, 1),
    },
    ("sm86", 320): {"grad_kv": Tile(32, 32, 8, 2)},
    ("sm86", 448): {"forward": Tile(32, 64, 8, 1)},
}
DIVIDED |= {("sm120", width): DIVIDED["sm86", width] for width in (320, 448)}
# fmt: on
# Rows per program, warps, and heads per program of the elementwise passes, for every type. The heads of a program share
# one load of cos and sin.
ROTATE_ROWS, ROTATE_WARPS, ROTATE_HEADS = 32, 4, 4
STATISTICS_ROWS, STATISTICS_WARPS = 64, 4  # every grad_kv tile's block_m divides STATISTICS_ROWS
# Gradients of scores that a reproducible backward stores (score_grads.py): bytes of the workspace, and rows and keys of
# a panel. Every block_m of the gradients divides PANEL_ROWS. If the workspace holds only some of the heads, each launch
# must have at least SCORE_BLOCKS blocks of dK and dV per multiprocessor. With fewer blocks, the longest ones run alone
# at the end.
SCORE_BYTES, SCORE_BLOCKS = 5 << 28, 3.5
PANEL_ROWS, PANEL_KEYS = 128, 64
APPEND_ROWS, APPEND_WARPS = 32, 4
COMBINE_SPLITS, COMBINE_WARPS = 16, 4  # splits that one step of a program combines
SHARE_WARPS = 1  # a program of plan_shares adds up the lengths of 32 sequences at once
# Decoding by shares, for 16-bit types. SHARE_DIMS: head_dims. SHARE_REGISTERS: the maximum number of registers per
# thread for the first of SHARE_DIMS and one band, by the tile's warps. With this limit, three blocks fit on a
# multiprocessor, as with splits. The families that are not in SHARE_FAMILIES have shared memory for only two blocks.
SHARE_DIMS, SHARE_REGISTERS = (64, 128), {4: 168}
SHARE_FAMILIES = ("sm80", "sm90", "sm100")
# Decoding with groups of keys (key_groups below), by family: (block_d, several bands, shares). NEWER_GROUPED replaces
# entries for Triton versions after 3.6, under which sm_90's loops for 128 channels touch local memory more often.
# UNWEIGHTED: (family, block_d) whose loops would touch it more than 20 times if keys have weights.
GROUPED = {
    "sm80": {(64, True, True), (64, True, False), (128, True, False)},
    "sm90": {*itertools.product((64, 128), (False, True), (False, True)), (32, False, False), (32, True, False)},
}
NEWER_GROUPED = {"sm90": {sizes for sizes in GROUPED["sm90"] if sizes[0] < 128}}
UNWEIGHTED = (("sm90", 128),)
SHORT_KEYS = 8192  # calls without a cache, with one band and not more keys than this, prefer the "short" entries
SMALLEST_TILE = 16  # the smallest number of keys in a product, and of rows in a page
EXPLICIT_ROWS, EXPLICIT_ENTRIES, EXPLICIT_WARPS = 16, 64, 4  # queries of a program, block-table entries per step, warps
# Where every key needs its own cos and sin (stored positions, or maps over pages), heads with at least EXPLICIT_PAIRS
# pairs use tiles of at most EXPLICIT_KEYS keys. Larger tiles would spill.
EXPLICIT_PAIRS, EXPLICIT_KEYS = 64, 32
CROWDED_PAIRS = 128  # only heads with at least this many pairs take the tiles "decode codes" and "decode parts"

# The numbers below are for calls over a KV cache.
WHOLE_PAIRS = 128  # the decode kernel loads at most this many pairs of a head at once, and larger heads in two parts
WIDEST_PAIRS = 256  # a head with more pairs needs ``Variant.channels`` in the decode kernel
DECODE_SEQLEN = 64  # sequences with more query tokens than this are served by chunks.py, not by the decode kernel
WIDE_ROWS = 16  # with more query rows per key head, decoding takes the "decode wide" tile


def options(num_warps: int, **others: int) -> dict[str, int | bool]:
    """Returns options for Triton's compiler. They switch FP fusion on, which is not the default from Triton 3.10 on."""
    return {"num_warps": num_warps, "enable_fp_fusion": True, **others}


def share_options(
    tile: Tile, capability: int | str, head_dim: int, itemsize: int, num_bands: int
) -> dict[str, int | bool]:
    """Returns options of the decode kernel where programs take equal shares of the keys."""
    limited = (head_dim, itemsize, num_bands) == (SHARE_DIMS[0], 2, 1) and family(capability) in SHARE_FAMILIES
    if limited and tile.num_warps in SHARE_REGISTERS:
        return tile.options | {"maxnreg": SHARE_REGISTERS[tile.num_warps]}
    return tile.options


def key_groups(
    tile: Tile,
    capability: int | str,
    block_d: int,
    itemsize: int,
    num_bands: int,
    shares: bool,
    weighted: bool = False,
) -> int:
    """Returns ``Variant.key_groups`` for keys that the decode kernel loads in 16 bits and as whole heads.

    With one group, all warps of a block share the softmax of a tile, so they wait for each other several times per
    tile. With as many groups as warps they do not. Every warp then takes the smallest tile of keys. docs/dev/tiles.md
    says what groups gain, and why other calls have one group. Neither pages nor padding decide, because they change no
    bit of a result. block_d: the larger one of keys and values. weighted: keys have weights.
    """
    fits = tile.block_m == SMALLEST_TILE and tile.block_n == SMALLEST_TILE * tile.num_warps
    name = family(capability)
    grouped = GROUPED | (NEWER_GROUPED if newer_triton() else {})
    gains = (block_d, num_bands > 1, shares) in grouped.get(name, ())
    gains = gains and not (weighted and (name, block_d) in UNWEIGHTED)
    return tile.num_warps if itemsize == 2 and fits and gains else 1


def newer_triton() -> bool:
    """Whether Triton is newer than the version with which the tiles were chosen."""
    return tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)


def row_options(num_warps: int, block_d: int) -> dict[str, int | bool]:
    """Returns options of an elementwise pass. Beyond 256 channels it has twice the warps, so that a thread holds no
    more channels than at 256."""
    return options(2 * num_warps if block_d > 256 else num_warps)


def family(capability: int | str) -> str:
    """Returns the name of the table for a compute capability such as 80 or 90, or for one of ``AMD``."""
    if isinstance(capability, str):
        if capability not in AMD:
            raise ValueError(f"the Triton kernels serve {' and '.join(AMD)} of AMD's GPUs, this device is {capability}")
        return "cdna"
    if capability < 80:
        raise ValueError(f"the Triton kernels need compute capability 8.0 or newer, this device has {capability / 10}")
    newest_first = ((120, "sm120"), (100, "sm100"), (90, "sm90"), (81, "sm86"), (80, "sm80"))
    return next(name for first, name in newest_first if capability >= first)


INSTEAD = {  # if a direction has no tile of its own, the direction whose tile it takes
    "grad_qkv": ["grad_kv"],
    "grad_q scores": ["grad_q"],
    "grad_kv unaligned": ["grad_kv"],
    "grad_qkv unaligned": ["grad_kv unaligned", "grad_qkv", "grad_kv"],
    "forward codes": ["forward"],
    "forward unaligned": ["forward"],
    "decode codes": ["decode"],
    "decode parts": ["decode"],
    "decode shared": ["decode parts", "decode"],
    "decode shared wide": ["decode wide"],
}


@lru_cache(maxsize=1024)
def tile(
    direction: str,
    capability: int | str,
    block_d: int,
    itemsize: int,
    num_bands: int,
    block_dv: int = 0,
    cache: str = "",
    max_keys: int = 0,
) -> Tile:
    """Returns the default tile, which ``flashrope tune`` may replace. The most specific entry of the tables wins.

    direction: "forward", "forward codes" (over a quantized cache), "forward unaligned" (some address or stride is not a
    multiple of 16 bytes), "grad_kv", "grad_q", "grad_q scores" (dQ from stored gradients of scores), "grad_qkv" (dQ in
    the pass of dK and dV), "grad_kv unaligned", "grad_qkv unaligned" (beyond 256 channels), "decode", "decode codes" (a
    quantized cache or explicit positions), "decode parts" (``Variant.channels``), "decode wide" (many query rows),
    "decode shared" or "decode shared wide" (heads in parts, whose values are channels of the keys).
    block_dv: block_d of v, or 0 if it is the same. If the two differ and OTHER_V has no tile, the larger one counts.
    cache: "paged" prefers the "paged" entries. Any other value ignores them.
    max_keys: the length of the longest sequence of keys is at most this. 0 if it is not known or has no bound."""
    block_dv = block_dv or block_d
    directions = [direction, *INSTEAD.get(direction, [])]
    if cache == "paged":
        directions.insert(0, f"{direction} paged")
    if num_bands == 1 and not cache and 0 < max_keys <= SHORT_KEYS:
        directions.insert(0, f"{direction} short")
    names = [name for d in directions for name in ([f"{d} banded", d] if num_bands > 1 else [d])]
    if max(block_d, block_dv) > 256:
        table = family(capability) if itemsize == 2 else "float"
        widest = WIDEST[table] | DIVIDED.get((table, block_d), {})
        return next(widest[name] for name in names if name in widest)
    widths = (block_d, max(block_dv, 128) if block_d == 256 else block_dv)
    block_d = max(block_d, block_dv)
    tables = [FLOAT]
    if itemsize == 2:
        tables = [HALF[family(capability)]]
        if newer_triton():
            tables.insert(0, NEWER_HALF.get(family(capability), {}))
        of_widths = OTHER_V[family(capability)]
        own = directions[: directions.index(direction) + 1]
        if found := next((of_widths[x][widths] for x in own if widths in of_widths.get(x, {})), None):
            return found
    return next(table[name][block_d] for table in tables for name in names if block_d in table.get(name, {}))


def training_widths(capability: int | str, head_dim: int, head_dim_v: int, itemsize: int) -> tuple[int, ...]:
    """Returns the widths of the tiles into which training divides a head, or () if a head is one tile of block_d.

    As one tile, a head of 257 to 448 channels would be padded to 512. In several tiles only the last one is padded. A
    head is one tile if v has another head_dim, and on sm_100 and AMD's GPUs, where the PTX executor cannot run the
    kernels. In float32 a head of more than 384 channels is one tile on sm_86, sm_89 and sm_120, where three tiles need
    more shared memory than a block has.
    """
    if head_dim != head_dim_v or not 256 < head_dim <= 448 or family(capability) in ("sm100", "cdna"):
        return ()
    widths = next(widths for widths in ((256, 64), (256, 128), (256, 128, 64)) if head_dim <= sum(widths))
    return widths if len(widths) == 2 or itemsize == 2 or family(capability) in LARGE_SHARED else ()


def forward_parts(tile: Tile, block_d: int, block_dv: int, itemsize: int) -> int:
    """Returns ``Variant.parts``. If a warp's accumulator has 32 rows of 128 channels, or 16 rows of 256, one part
    spills more registers in the inner loop than two parts. A part has at least the 16 channels that a tensor core
    takes."""
    rows = tile.block_m // tile.num_warps
    return 2 if itemsize == 2 and block_d >= 32 and rows * block_dv >= 32 * 128 else 1


def query_rows(capability: int | str, tile: Tile, block_d: int) -> bool:
    """Returns ``Variant.query_rows``. At 128 channels the issue model predicts that score tiles whose rows are queries
    are faster if a tile has 64 keys and fewer queries (dK and dV on sm_80: 65% of the tensor cores' peak instead of
    55%). On sm_90, score tiles whose rows are keys take fewer instructions, and wgmma needs 64 rows."""
    has_mma_sync = family(capability) in ("sm80", "sm86", "sm120")
    return has_mma_sync and block_d == 128 and tile.block_m < tile.block_n == 64


def atomics_are_faster(capability: int | str, itemsize: int, block_d: int, block_dv: int) -> bool:
    """Returns whether deterministic=None accumulates dQ by atomics."""
    return itemsize == 2 and block_d == block_dv and block_d in ATOMIC_WIDTHS.get(family(capability), ())


def has_grad_q(capability: int | str, itemsize: int, block_d: int, block_dv: int) -> bool:
    """Whether dQ has a kernel of its own. In float32 its block takes 128 KB of shared memory at 512 channels, more than
    sm_86, sm_89 and sm_120 have."""
    return itemsize == 2 or max(block_d, block_dv) <= 256 or family(capability) in LARGE_SHARED


def storing_is_faster(capability: int | str, itemsize: int, block_d: int, block_dv: int) -> bool:
    """Whether a reproducible backward stores the gradients of scores for dQ where its workspace has room: five products
    instead of seven. The issue model rates it faster on sm_80 and sm_86 at these block_d. Not timed on a GPU yet."""
    return itemsize == 2 and block_d == block_dv and block_d in SCORE_WIDTHS.get(family(capability), ())


def red_floats(capability: int | str, itemsize: int) -> int:
    """Returns ``Variant.red_floats``.

    Three cases use ``tl.atomic_add``: float32, whose products run without tensor cores; AMD's GPUs, which lack ``red``;
    and sm_100, whose accumulators come from tensor memory in other layouts. ``red`` of four floats needs sm_90.
    """
    if itemsize != 2 or isinstance(capability, str) or 100 <= capability < 120:
        return 0
    return 4 if capability >= 90 else 1
