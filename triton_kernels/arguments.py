"""What the host passes to a kernel.

Triton specialises integers inside a tuple by value (multiple of 16? equal to 1? 64 bits?). Strides and sizes depend on
lengths, so they are encoded: every encoded number answers those questions alike, and no length compiles a kernel anew.
Integers outside tuples are ``do_not_specialize``.

    A stride of 4096:  (4096 << 4) + 2**40 = 1099511693312, a multiple of 16, not 1, of 64 bits.
    A stride of 4097:  (4097 << 4) + 2**40 = 1099511693328, the same three answers.
    In the kernel:     (1099511693328 - 2**40) // 16 = 4097.
"""

from typing import NamedTuple

import triton
import triton.language as tl

_TAG = 1 << 40
TAG = tl.constexpr(_TAG)


class TensorView(NamedTuple):
    """A tensor (batch, seqlen, heads, head_dim), last dimension contiguous. Strides in elements, encoded."""

    ptr: object
    stride_batch: object
    stride_row: object
    stride_head: object


class BandedView(NamedTuple):
    """A tensor (band, batch, seqlen, heads, head_dim); otherwise as TensorView."""

    ptr: object
    stride_band: object
    stride_batch: object
    stride_row: object
    stride_head: object


class Scheme(NamedTuple):
    """A lowered rotary scheme.

    bands: int32 (num_bands, 7), rows of ``flashrope.lowering.lowered.LoweredBand``.
    table: float32 cos and sin, or int64 turns, as ``flashrope.lowering.cos_sin`` builds them.
    positions: float32 (batch, seqlen) if the caller gave positions, else None.
    maps: int32 (rotations, 4), rows of ``flashrope.lowering.lowered.RowMap``, if the scheme maps positions, else None.
    score_scale: softmax_scale * temperature.
    log_n_factor, log_n_floor: the query at position i is scaled by max(log_n_floor, log_n_factor * ln(i + 1)).
    log_n_every, log_n_first: if given, by 1 + log_n_factor * ln(1 + floor((i + log_n_first) / log_n_every)) instead.
    length_scale: if given, also by max(1, 0.1 * ln(n / length_scale) + 1) in a sequence of n keys.
    """

    bands: object
    table: object
    positions: object
    maps: object
    score_scale: object
    log_n_factor: object
    log_n_floor: object
    log_n_every: object
    log_n_first: object
    length_scale: object


class CuSeqlens(NamedTuple):
    """First rows of packed sequences, int32 (sequences + 1,), or None and None."""

    q: object
    k: object


class Result(NamedTuple):
    """What the forward writes. out: (rows, heads_q, head_dim_v), contiguous. lse: float32, contiguous."""

    out: object
    lse: object


class Workspace(NamedTuple):
    """The work of every program of the decode kernel, int32, which ``shares.plan_shares`` finds, and partial results.

    shares: (programs, SHARE_FIELDS). pieces: (segments + programs, PIECE_FIELDS). cuts: (programs, CUT_FIELDS).
    empty: (batch,), 1 for a sequence without keys or queries, else 0.
    out: float32 (2 * programs, block_m, head_dim). lse: float32 (2 * programs, block_m). Tile 2 n is for the end of a
        segment that begins before share n, tile 2 n + 1 for the beginning of one that ends after it.
    """

    shares: object
    pieces: object
    cuts: object
    empty: object
    out: object
    lse: object


class CacheLayout(NamedTuple):
    """``flashrope.backends.calls.CacheLayout`` for a kernel. Numbers are encoded.

    seqlens, block_table, leftpad, slot_mapping: tensors. All but seqlens may be None.
    k_scale, v_scale: scales of a quantized cache, float32, or None.
    entries, tokens, shown: int32, filled by ``placed.place_tokens`` where positions of cached tokens are data, or None.
    slot_positions: float32, the position of every slot of the cache, with axes if the scheme has some; contiguous. Or
        None.
    seqlen_new: the keys that this call added to every sequence, or -1 for one per query.
    capacity: slots that a sequence can have.
    pages: of the cache.
    decode_seqlen: with packed queries, the longest sequence that the decode kernel serves. ``attention_chunks`` serves
        longer ones.
    k_batch, k_row, k_head, v_batch, v_row, v_head: strides of k_scale and v_scale (batch or page, row, head), or None.
    """

    seqlens: object
    block_table: object
    leftpad: object
    slot_mapping: object
    k_scale: object
    v_scale: object
    entries: object
    tokens: object
    shown: object
    slot_positions: object
    seqlen_new: object
    capacity: object
    pages: object
    decode_seqlen: object
    k_batch: object = None
    k_row: object = None
    k_head: object = None
    v_batch: object = None
    v_row: object = None
    v_head: object = None


class PositionTables(NamedTuple):
    """Positions of cached tokens as the caller gave them, each a tensor or None: page_positions, page_first and
    page_lengths int32 (batch, max_pages), queries int32, int64 or float32, of every query. groups:
    int32, filled by ``placed.place_slots``."""

    page_positions: object
    page_first: object
    page_lengths: object
    queries: object
    groups: object = None


class Variant(NamedTuple):
    """What a kernel is compiled for: sizes, and which features of the scheme and of the cache are present.

    A kernel takes it as the constexpr VARIANT. A field that a kernel does not use stays at its default.

    Sizes:

    block_d: the smallest power of two that is at least head_dim.
    head_dim_v, block_dv: head_dim and block_d of v and out.
    rotary_dim: the channels that rotate.
    first_channel: the first of them. 0 where pairs are interleaved: their table starts at channel 0.
    num_bands: the bands of the scheme.
    page_size: rows of a page, 0 without pages.
    block_m, block_n: query rows and key rows of a tile.
    vec: alignment of all pointers and strides, in elements.
    code_vec: alignment of a quantized cache, in bytes.
    axes: coordinates of stored positions if the scheme is axial, else 0.

    Features:

    interleaved: channels 2 c and 2 c + 1 are a pair, instead of c and c + rotary_dim / 2.
    rotated_bands: bit b is set if band b rotates its keys.
    aligned_maps: the scheme maps positions, every tile of keys lies in one chunk, and it lies in one group or holds
        whole groups.
    rotated_keys: the keys come rotated by their own positions. Queries then rotate by their positions, which may be
        negative.
    parts: how many parts, 1 or 2, the channels of q, k, v and out are divided into. Two parts leave more registers to
        the accumulators. The decode kernel has two beyond 256 channels. Quantized keys and values have one part.
    red_floats: how dQ is accumulated. 0: tl.atomic_add. 1 or 4: one PTX `red` per 1 or 4 floats, straight from the
        accumulator's layout, in which every element must belong to one thread.
    query_rows: in the pass of dK and dV, a tile of scores has rows of queries instead of rows of keys.
    one_run: where positions of cached tokens are data, every tile of keys lies in one page.
    stored: the cache stores positions.
    shares: programs of the decode kernel take equal shares of the keys of all sequences, instead of splits of each.
    channels: the head as the Parts of ``flashrope.lowering.parts``, so that the decode kernel rotates only the first
        of them. Empty: all pairs are rotated.
    """

    head_dim: int
    block_d: int
    rotary_dim: int = 0
    interleaved: bool = False
    vec: int = 1
    num_bands: int = 0
    rotated_bands: int = 0
    page_size: int = 0
    block_m: int = 0
    block_n: int = 0
    head_dim_v: int = 0
    block_dv: int = 0
    aligned_maps: bool = False
    rotated_keys: bool = False
    code_vec: int = 0
    red_floats: int = 0
    parts: int = 1
    query_rows: bool = False
    one_run: bool = False
    stored: bool = False
    axes: int = 0
    first_channel: int = 0
    channels: tuple = ()
    shares: bool = False


NO_CACHE = CacheLayout(*(None,) * 14)
# For every kind of argument: how many of its first fields are pointers, and the first of the numbers that may be None
# (0: there are none).
FIELDS = {
    TensorView: (1, 0),
    BandedView: (1, 0),
    Scheme: (4, Scheme._fields.index("log_n_every")),
    CuSeqlens: (2, 0),
    Result: (2, 0),
    PositionTables: (5, 0),
    Workspace: (6, 0),
    CacheLayout: (10, 0),  # its strides are None where k_scale is
}


def encode_int(number: int) -> int:
    """An integer for a field of a tuple."""
    return (number << 4) + _TAG


def encode_ints(*numbers: int) -> list[int]:
    """encode_int of each, in fewer calls."""
    return [(number << 4) + _TAG for number in numbers]


def tensor_view(x) -> TensorView:
    """Returns the view of a tensor (batch, seqlen, heads, head_dim), or of a packed one (total, heads, head_dim)."""
    stride = x.stride()
    batch = stride[0] if len(stride) == 4 else 0
    return TensorView(x, (batch << 4) + _TAG, (stride[-3] << 4) + _TAG, (stride[-2] << 4) + _TAG)  # encode_int, inlined


def banded_view(x) -> BandedView:
    """Returns the view of a tensor (band, batch, seqlen, heads, head_dim), or of packed ones (band, total, heads,
    head_dim)."""
    stride = x.stride()
    return BandedView(x, *map(encode_int, (stride[0], stride[1] if len(stride) == 5 else 0, stride[-3], stride[-2])))


@triton.jit
def decode_int(number):
    return ((number - TAG) // 16).to(tl.int32)


@triton.jit
def decode_int64(number):
    return (number - TAG) // 16


@triton.jit
def decode_code_stride(encoded, VARIANT: tl.constexpr):
    """decode_stride of a quantized cache."""
    VEC: tl.constexpr = VARIANT.code_vec
    return tl.multiple_of((encoded - TAG) // 16, VEC)


@triton.jit
def decode_stride(encoded, VARIANT: tl.constexpr):
    """int64: offsets into a tensor can exceed 2^31."""
    VEC: tl.constexpr = VARIANT.vec
    return tl.multiple_of((encoded - TAG) // 16, VEC)


@triton.jit
def band_view(x, band, VARIANT: tl.constexpr):
    """One band of a BandedView."""
    return TensorView(x.ptr + band * decode_stride(x.stride_band, VARIANT), x.stride_batch, x.stride_row, x.stride_head)
