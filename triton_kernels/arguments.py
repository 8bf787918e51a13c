"""Defines the tuples that the host passes to kernels.

Triton compiles a kernel again if an integer inside a tuple changes in one of three properties: whether it is a multiple
of 16, whether it is 1, and whether it needs 64 bits. Strides and sizes depend on lengths, so the host encodes them. All
encoded numbers have the same three properties, so a new length does not compile a kernel again. Integers outside tuples
are listed in ``do_not_specialize``.

    A stride of 4096:  (4096 << 4) + 2**40 = 1099511693312, a multiple of 16, not 1, of 64 bits.
    A stride of 4097:  (4097 << 4) + 2**40 = 1099511693328, with the same three properties.
    In the kernel:     (1099511693328 - 2**40) // 16 = 4097.
"""

from typing import NamedTuple

import triton
import triton.language as tl

_TAG = 1 << 40
TAG = tl.constexpr(_TAG)


class TensorView(NamedTuple):
    """A tensor (batch, seqlen, heads, head_dim) whose last dimension is contiguous. Strides are in elements and
    encoded."""

    ptr: object
    stride_batch: object
    stride_row: object
    stride_head: object


class BandedView(NamedTuple):
    """A TensorView with one more dimension: (band, batch, seqlen, heads, head_dim)."""

    ptr: object
    stride_band: object
    stride_batch: object
    stride_row: object
    stride_head: object


class SchemeArguments(NamedTuple):
    """A lowered rotary scheme.

    bands: int32 (num_bands, 7), rows of ``flashrope.schemes.lowered.LoweredBand``.
    table: float32 cos and sin, or int64 phases, as ``flashrope.schemes.cos_sin`` builds them.
    positions: float32 (batch, seqlen) if the caller gave positions, else None.
    maps: int32 (rotations, 4), rows of ``flashrope.schemes.lowered.RowMap``, if the scheme maps positions, else None.
    score_scale: softmax_scale * temperature.
    log_n_factor, log_n_floor: the query at position i is scaled by max(log_n_floor, log_n_factor * ln(i + 1)).
    log_n_every, log_n_first: if they are not None, the query at position i is scaled by
        1 + log_n_factor * ln(1 + floor((i + log_n_first) / log_n_every)) instead.
    length_scale: if it is not None, queries are also scaled by max(1, 0.1 * ln(n / length_scale) + 1), where n is the
        number of keys of their sequence.
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
    """The first row of each packed sequence, then the total number of rows, int32 (sequences + 1,), for q and for k.
    Both fields are None if tensors are not packed."""

    q: object
    k: object


class ScoreGrads(NamedTuple):
    """The stored gradients of the scores of a launch's heads (``score_grads.py``), in q's type. Numbers are encoded.

    batch, head, heads: the first batch index of the launch, its first key head, and how many key heads it has.
    width, growth: the fields of ``score_grads.Matrix``.
    stride_batch: the number of panels from one sequence to the next, if sequences are not packed. stride_head: the
        number of panels from one query head to the next.
    """

    ptr: object
    batch: object
    head: object
    heads: object
    width: object
    growth: object
    stride_batch: object
    stride_head: object


class Result(NamedTuple):
    """The results of the forward. out: (rows, heads_q, head_dim_v), contiguous. lse: float32, contiguous."""

    out: object
    lse: object


class Workspace(NamedTuple):
    """The work of every program of the decode kernel, and its partial results. ``shares.plan_shares`` fills the int32
    tensors.

    shares: (programs, SHARE_FIELDS). pieces: (segments + programs, PIECE_FIELDS). cuts: (programs, CUT_FIELDS).
    empty: (batch,), 1 for a sequence without keys or queries, else 0.
    out: float32 (2 * programs, block_m, head_dim_v). lse: float32 (2 * programs, block_m). Tile 2 n holds the partial
        result of a segment that begins before share n. Tile 2 n + 1 holds the partial result of a segment that begins
        in share n and ends after it.
    """

    shares: object
    pieces: object
    cuts: object
    empty: object
    out: object
    lse: object


class CacheLayout(NamedTuple):
    """``flashrope.calls.records.CacheLayout`` as kernels take it. Numbers are encoded.

    seqlens, block_table, leftpad, slot_mapping: tensors. All but seqlens may be None.
    k_scale, v_scale: scales of a quantized cache, float32, or None.
    entries, tokens, visible: int32, filled by ``placing.place_tokens`` if the caller gave positions of
        cached tokens, else None.
    slot_positions: float32, contiguous: the position of every slot of the cache, with one number per axis if the scheme
        is axial. None if the cache does not store positions.
    seqlen_new: the number of keys that this call added to every sequence, or -1 if it added one key per query.
    capacity: the largest number of slots of a sequence.
    pages: the number of pages of the cache.
    decode_seqlen: the decode kernel serves sequences with at most this many packed queries. ``attention_chunks`` serves
        sequences with more.
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
    visible: object
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
    """Positions of cached tokens as the caller gave them. Every field is a tensor or None.

    page_positions, page_first, page_lengths: int32 (batch, max_pages).
    queries: the position of every query, int32, int64 or float32.
    groups: int32, filled by ``placing.place_slots``.
    """

    page_positions: object
    page_first: object
    page_lengths: object
    queries: object
    groups: object = None


class PairRange(NamedTuple):
    """Consecutive pairs of a head that have a tile of their own, [M, 2 count]. The tiles of q and k hold the channels
    of these pairs. The tiles of v and out hold channels ``2 * first`` to ``2 * (first + count) - 1``.

    first: the first pair. count: the number of pairs, a power of two, at least 16."""

    first: int
    count: int


class Variant(NamedTuple):
    """What a kernel is compiled for: sizes, and which features of the scheme and of the cache are present.

    A kernel takes it as the constexpr VARIANT. A field that a kernel does not use stays at its default.

    Sizes:

    block_d: the smallest power of two that is at least head_dim. A row of the cos/sin table holds block_d numbers.
    padded_d: the number of channels of the tiles that hold a head: block_d, or the channels of all pair_ranges.
        Channels beyond head_dim are masked.
    head_dim_v, block_dv: head_dim and block_d of v and out.
    rotary_dim: the number of channels that rotate.
    first_channel: the first channel that rotates. It is 0 if pairs are interleaved, because their table starts at
        channel 0.
    num_bands: the number of bands of the scheme.
    page_size: rows of a page, 0 without pages.
    block_m, block_n: query rows and key rows of a tile.
    vec: alignment of all pointers and strides, in elements.
    code_vec: alignment of a quantized cache, in bytes.
    axes: the number of coordinates of a stored position if the scheme is axial, else 0.

    Features:

    interleaved: channels 2 c and 2 c + 1 are a pair, not channels c and c + rotary_dim / 2.
    rotated_bands: bit b is set if band b rotates its keys.
    aligned_maps: the scheme maps positions, every tile of keys lies in one chunk, and every tile either lies in one
        group or holds whole groups.
    rotated_keys: the caller's keys are already rotated by their positions. Queries then rotate by their own positions,
        which may be negative.
    parts: the number of parts, 1 or 2, into which the channels of q, k, v and out are divided. With two parts, the
        accumulators can use more registers. The decode kernel uses two parts beyond 256 channels. Quantized keys and
        values always form one part.
    red_floats: how dQ is accumulated. 0: tl.atomic_add. 1 or 4: one PTX `red` per 1 or 4 floats, straight from the
        accumulator's layout, in which every element must belong to one thread.
    query_rows: in the pass that computes dK and dV, the rows of a score tile are queries, not keys.
    one_run: the caller gave positions of cached tokens, and every tile of keys lies in one page.
    stored: the cache stores positions, or the positions of queries may have fractions.
    channels: the Parts of ``flashrope.schemes.head_parts`` that make up a head. The decode kernel rotates only the
        first part. Empty: all pairs are rotated.
    pair_ranges: the PairRanges into which forward and backward without a cache divide q, k, v and out, which then have
        the same head_dim. Empty: a head has one tile, or VARIANT.parts tiles.
    first_value: the first channel of the keys that is a value, if values are channels of the keys and the decode kernel
        takes them from the tile of keys. -1: values are loaded.
    shares: programs of the decode kernel take equal shares of the keys of all sequences, not splits of each sequence.
    key_groups: the number of groups into which the decode kernel divides the keys of a tile. Each group has a softmax
        of its own. With as many groups as warps, warps do not wait for each other between their products.
    lagged: the forward adds weights @ V of an inner tile one tile late (forward.attend_inner_lagged).
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
    first_value: int = -1
    shares: bool = False
    padded_d: int = 0
    pair_ranges: tuple = ()
    key_groups: int = 1
    lagged: bool = False


def pair_ranges(widths: tuple[int, ...]) -> tuple[PairRange, ...]:
    """Returns consecutive PairRanges whose tiles have these widths."""
    return tuple(PairRange(sum(widths[:part]) // 2, width // 2) for part, width in enumerate(widths))


NO_CACHE = CacheLayout(*(None,) * 14)
# Maps every tuple to (the number of its leading fields that are pointers, the index of its first number that may be
# None). The index is 0 if no number may be None.
FIELDS = {
    TensorView: (1, 0),
    BandedView: (1, 0),
    SchemeArguments: (4, SchemeArguments._fields.index("log_n_every")),
    CuSeqlens: (2, 0),
    ScoreGrads: (1, 0),
    Result: (2, 0),
    PositionTables: (5, 0),
    Workspace: (6, 0),
    CacheLayout: (10, 0),  # its strides are None if k_scale is None
}


def encode_int(number: int) -> int:
    """Encodes an integer for a field of a tuple."""
    return (number << 4) + _TAG


def encode_ints(*numbers: int) -> list[int]:
    """Encodes each number as encode_int does, but with fewer function calls."""
    return [(number << 4) + _TAG for number in numbers]


def tensor_view(x) -> TensorView:
    """Returns the view of a tensor (batch, seqlen, heads, head_dim), or of a packed one (total, heads, head_dim)."""
    stride = x.stride()
    batch = stride[0] if len(stride) == 4 else 0
    return TensorView(x, (batch << 4) + _TAG, (stride[-3] << 4) + _TAG, (stride[-2] << 4) + _TAG)  # encode_int, inlined


def banded_view(x) -> BandedView:
    """Returns the view of a tensor (band, batch, seqlen, heads, head_dim), or of a packed one (band, total, heads,
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
    """Returns a stride of a quantized cache in elements, int64. Its alignment is VARIANT.code_vec."""
    VEC: tl.constexpr = VARIANT.code_vec
    return tl.multiple_of((encoded - TAG) // 16, VEC)


@triton.jit
def decode_stride(encoded, VARIANT: tl.constexpr):
    """Returns a stride in elements. It is int64, because offsets into a tensor can exceed 2^31."""
    VEC: tl.constexpr = VARIANT.vec
    return tl.multiple_of((encoded - TAG) // 16, VEC)


@triton.jit
def band_view(x, band, VARIANT: tl.constexpr):
    """Returns one band of a BandedView."""
    return TensorView(x.ptr + band * decode_stride(x.stride_band, VARIANT), x.stride_batch, x.stride_row, x.stride_head)


@triton.jit
def token_offsets(x, batch, token, head, VARIANT: tl.constexpr):
    """Returns the offsets [M, 1] of tokens of a TensorView, int64."""
    offset = batch.to(tl.int64) * decode_stride(x.stride_batch, VARIANT) + token * decode_stride(x.stride_row, VARIANT)
    return (offset + head * decode_stride(x.stride_head, VARIANT))[:, None]
