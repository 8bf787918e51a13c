"""Loads the queries of a tile of the decode kernel and rotates them for every band."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..quantized import key_parts, split_columns
from ..rotating.channels import load_query_parts
from ..rotating.pairs import load_pairs
from ..rotating.rotation import join_hidden, load_cos_sin_at, query_scale
from ..rows import clamp_rows
from ..tiles import visible_keys
from .decode_keys import load_pair_weights, rotate_pairs
from .explicit_positions import explicit_keys, explicit_query_cos_sin, load_query_position, load_token
from .stored_positions import as_float


class DecodeRows(NamedTuple):
    """The query rows of a tile, each field [BM]. exists: whether the row exists. token: the index of its token in the
    sequence. head: its query head. position: its position."""

    exists: object
    token: object
    head: object
    position: object


class DecodeQueries(NamedTuple):
    """The raw queries of a tile.

    rows: DecodeRows.
    first, last: the positions of the first and of the last row, counted without explicit positions.
    entry [BM]: the index of each row's token over all sequences. column [BM]: the last column that the row sees. Both
        are None without explicit positions.
    ptr, offsets [BM, 1]: where the queries are.
    scale [BM, 1]: from query_scale. scale_log2: from log2_scale.
    """

    rows: object
    first: object
    last: object
    entry: object
    column: object
    ptr: object
    offsets: object
    scale: object
    scale_log2: object


class DecodeBandQueries(NamedTuple):
    """The queries of a tile in one band. parts: the rotated queries, in tiles of the same channels as the tiles of the
    band's keys. visible: the keys that each row sees. scale_log2: from log2_scale."""

    parts: object
    visible: object
    scale_log2: object


@triton.jit
def find_decode_rows(inputs, program, seq, group, VARIANT: tl.constexpr):
    """Returns the DecodeRows of a program's tile. inputs: DecodeInputs. group: number of query heads per key head."""
    rows = program.tile * VARIANT.block_m + tl.arange(0, VARIANT.block_m)
    exists = rows < seq.length_q * group
    rows = clamp_rows(rows, seq.length_q * group)
    token, head = rows // group, program.head_kv * group + rows % group
    position = token + seq.ahead
    if inputs.cache.tokens is not None:
        position = load_token(inputs.cache, token_entries(inputs, seq, token), 0, VARIANT)
    return DecodeRows(exists, token, head, position)


@triton.jit
def token_entries(inputs, seq, token):
    """Returns the indices over all sequences of tokens [BM] of a sequence."""
    return token + (seq.batch.to(tl.int64) * inputs.seqlen_q if inputs.cu_seqlens_q is None else seq.start_q)


@triton.jit
def scale_decode_rows(inputs, seq, rows, VARIANT: tl.constexpr):
    """Returns the query_scale of every row, [BM, 1]."""
    cache, position, length = inputs.cache, rows.position, seq.length_k
    if cache.tokens is not None:
        length = tl.load(cache.visible + 2 * seq.batch)
    if VARIANT.stored and VARIANT.axes == 0:
        position = as_float(load_query_position(cache, token_entries(inputs, seq, rows.token), 0, VARIANT))
    return query_scale(inputs.scheme, rows.token, position, length)[:, None]


@triton.jit
def scale_of_pairs(
    keys, scale, FIRST: tl.constexpr, COUNT: tl.constexpr, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns the factors on the first and on the second members of rotated query pairs. They are `scale` [BM, 1],
    times the key weights if the keys do not rotate."""
    if keys.weight is None or ROTATE_K:
        return scale, scale
    else:
        x, y = load_pair_weights(keys, FIRST, COUNT, VARIANT)
        return scale * x, scale * y


@triton.jit
def load_query_pairs(
    queries, keys, band, FIRST: tl.constexpr, COUNT: tl.constexpr, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns pairs FIRST to FIRST + COUNT - 1 of queries, rotated and scaled: two tiles [BM, COUNT]."""
    x, y = load_pairs(queries.ptr, queries.offsets, FIRST, COUNT, VARIANT)
    rows = queries.rows
    if queries.entry is None:
        cos, sin = load_cos_sin_at(keys.table, band.q_rotation, rows.position + keys.shift, FIRST, COUNT, VARIANT)
    else:
        cache = keys.cached.layout
        cos, sin = explicit_query_cos_sin(keys.table, band.q_rotation, cache, queries.entry, rows.position, VARIANT)
    scale_x, scale_y = scale_of_pairs(keys, queries.scale, FIRST, COUNT, ROTATE_K, VARIANT)
    return rotate_pairs(x, y, cos, sin, scale_x, scale_y, queries.ptr.dtype.element_ty)


@triton.jit
def load_query_halves(queries, keys, band, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns all pairs of queries, rotated and scaled, in two tiles for each of VARIANT.parts parts."""
    PARTS: tl.constexpr = VARIANT.parts
    COUNT: tl.constexpr = VARIANT.block_d // 2 // PARTS
    tiles = ()
    for part in tl.static_range(PARTS):
        tiles += load_query_pairs(queries, keys, band, part * COUNT, COUNT, ROTATE_K, VARIANT)
    return tiles


@triton.jit
def load_query_channels(queries, keys, band, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns queries, rotated and scaled, in the tiles of VARIANT.channels."""
    FIRST: tl.constexpr = VARIANT.channels[0].pair
    COUNT: tl.constexpr = VARIANT.channels[0].width // 2
    position = queries.rows.position + keys.shift
    cos, sin = load_cos_sin_at(keys.table, band.q_rotation, position, FIRST, COUNT, VARIANT)  # [BM, COUNT]
    return load_query_parts(queries.ptr, queries.offsets, cos, sin, queries.scale, keys.weight, ROTATE_K, VARIANT)


@triton.jit
def repeat_queries(tiles, VARIANT: tl.constexpr):
    """Returns tiles of queries [BM, N] once for every group of keys, [G, BM, N]."""
    repeated = ()
    for part in tl.static_range(len(tiles)):
        repeated += (repeat_tile(tiles[part], VARIANT),)
    return repeated


@triton.jit
def repeat_tile(tile, VARIANT: tl.constexpr):
    """Returns a tile [M, N] once for every group of keys, [G, M, N]."""
    GROUPS: tl.constexpr = VARIANT.key_groups
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    return tl.broadcast_to(tile[None, :, :], (GROUPS, M, N))


@triton.jit
def rotate_queries(queries, keys, band, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the DecodeBandQueries of a band. keys: SequenceKeys. ROTATE_K: whether the band's keys rotate."""
    rows = queries.rows
    if len(VARIANT.channels) > 0:
        tiles = load_query_channels(queries, keys, band, ROTATE_K, VARIANT)
    else:
        tiles = load_query_halves(queries, keys, band, ROTATE_K, VARIANT)
    if queries.entry is None:
        visible = visible_keys(rows.position, band, keys.length, keys.table.maps)
    else:
        cache = keys.cached.layout
        visible = explicit_keys(rows.position, queries.column, band, cache, queries.entry, keys.table.maps, VARIANT)
    if VARIANT.key_groups > 1:
        tiles = repeat_queries(tiles, VARIANT)
    CODES: tl.constexpr = keys.k.ptr.dtype.element_ty
    PARTS: tl.constexpr = key_parts(
        CODES,
        ROTATE_K,
        VARIANT.code_vec,
        VARIANT.block_d,
        VARIANT.head_dim,
        VARIANT.rotary_dim,
        VARIANT.first_channel,
    )
    if PARTS > 1:
        tile = join_hidden(tiles[0], tiles[1], keys.length > 0, VARIANT)
        tiles = split_columns(tile)
    return DecodeBandQueries(tiles, visible, queries.scale_log2)
