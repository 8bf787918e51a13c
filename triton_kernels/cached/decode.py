"""Computes attention over a KV cache for few queries. The cache holds raw keys, or keys that were rotated when they
were written. They are divided among programs, and ``combine.py`` combines the programs' results.

A tile holds the queries of all heads that share a key head: row m is query m // group of the group's head m % group.
Key blocks are counted from the first valid slot, and nothing on the host waits for a length. There are two ways to
divide the keys:

shares: programs have equal shares of the blocks of all sequences (``shares.py``). Padding and pages change no bit of a
sequence's result. The lengths of the other sequences can change its last bits, because they decide where a sequence is
cut.
splits: split s of a sequence takes blocks s, s + num_splits, ... of every band. So a sequence's result depends only on
its own queries and keys and on num_splits. Neither the other sequences nor the division of queries into calls changes a
bit of it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import decode_int, token_offsets
from ..attention.keys import CachedKeys, key_scales, scale_scores, scale_weights
from ..quantized import value_parts
from ..rotating.channels import shared_channels
from ..rotating.pairs import join_pairs
from ..rotating.rotation import CosSinTable, load_tile_map
from ..rows import float_value_parts, head_view, row_products
from ..softmax import (
    SoftmaxState,
    add_values,
    log2_scale,
    merge_groups,
    online_softmax,
    start_group_softmax,
    start_softmax,
)
from ..tiles import find_cached_sequence, key_tiles, load_band
from .combine import store_nothing, store_piece, store_segment, store_split
from .decode_keys import (
    KeySource,
    SequenceKeys,
    block_keys,
    find_block,
    load_block_keys,
    load_block_values,
    look_up,
    see_block,
)
from .decode_queries import DecodeQueries, find_decode_rows, rotate_queries, scale_decode_rows, token_entries
from .explicit_positions import band_columns, last_visible, load_token
from .shares import PIECE_FIELDS, SHARE_FIELDS, WHOLE


class DecodeInputs(NamedTuple):
    """The arguments of attention_decode that every part of the computation reads."""

    q: object
    k_cache: object
    v_cache: object
    key_weight: object
    scheme: object
    cu_seqlens_q: object
    cache: object
    seqlen_q: object
    table_rows: object
    heads_q: object
    heads_kv: object


class Program(NamedTuple):
    """The work of one program: a split of the keys, a tile of query rows, a key head and a sequence. batches: the
    number of sequences."""

    split: object
    tile: object
    head_kv: object
    batch: object
    batches: object


@triton.jit
def find_program(tiles, heads_kv, num_splits):
    """Returns the Program of this program id. tiles: number of tiles of query rows per sequence and key head."""
    split = tl.program_id(0) % num_splits
    tile = tl.program_id(0) // num_splits % tiles
    head_kv = tl.program_id(0) // num_splits // tiles % heads_kv
    batch = tl.program_id(0) // num_splits // tiles // heads_kv
    batches = tl.num_programs(0) // num_splits // tiles // heads_kv
    return Program(split, tile, head_kv, batch, batches)


class Blocks(NamedTuple):
    """Key blocks first, first + step, ..., below stop. If the keys are divided into splits, stop is None in a program's
    own Blocks. They are then the blocks b of every band with b % step == first."""

    first: object
    stop: object
    step: object


@triton.jit
def own_blocks(blocks, own):
    """Returns the Blocks of a band that a program takes. blocks: all blocks of the band. own: the program's Blocks."""
    if own.stop is None:
        first = blocks.begin + (own.first - blocks.begin % own.step + own.step) % own.step
        return Blocks(first, blocks.end, own.step)
    else:
        return Blocks(tl.maximum(blocks.begin, own.first), tl.minimum(blocks.end, own.stop), own.step)


@triton.jit
def band_blocks(queries, keys, band, cache, BAND: tl.constexpr, VARIANT: tl.constexpr):
    """Returns all blocks of keys that the queries of a tile see in band BAND, from block `begin` to before `end`."""
    if queries.entry is None:
        return key_tiles(band, queries.first, queries.last, keys.length, VARIANT.block_n, keys.table.maps)
    else:
        return band_columns(cache, queries.entry, BAND, VARIANT)


# ---- the attention of a tile of queries


@triton.jit
def start_shared_softmax(VARIANT: tl.constexpr):
    """Returns the initial SoftmaxState with one accumulator for every tile of keys that holds values."""
    BLOCK_M: tl.constexpr = VARIANT.block_m
    channels = shared_channels(VARIANT)
    state, acc = start_softmax(BLOCK_M, 16), ()
    for part in tl.static_range(len(channels)):
        acc += (tl.zeros((BLOCK_M, channels[part].shape[0]), tl.float32),)
    return SoftmaxState(acc, state.row_max, state.row_sum)


@triton.jit
def start_state(dtype: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the initial SoftmaxState of a tile. dtype: the element type of the cache."""
    if VARIANT.first_value >= 0:
        return start_shared_softmax(VARIANT)
    elif VARIANT.key_groups > 1:
        return start_group_softmax(VARIANT.key_groups, VARIANT.block_m, VARIANT.block_dv)
    else:
        V_PARTS: tl.constexpr = float_value_parts(VARIANT.parts, VARIANT.block_dv) * value_parts(
            dtype, VARIANT.code_vec, VARIANT.block_d
        )
        return start_softmax(VARIANT.block_m, VARIANT.block_dv, V_PARTS)


@triton.jit
def part_scores(queries, keys, VARIANT: tl.constexpr):
    """Returns the products of queries and keys, float32 [BM, BN], or [G, BM, BN / G] with G groups of keys. queries,
    keys: tuples of tiles with the same channels."""
    if VARIANT.block_d < 32:  # a tensor core takes at least 16 channels
        q, k = join_pairs(queries[0], queries[1], VARIANT), join_pairs(keys[0], keys[1], VARIANT)
        if VARIANT.code_vec > 0:
            q, k = q.to(tl.float32), k.to(tl.float32)  # Triton 3.6.0: tensor cores add joined bytes twice
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        return row_products(queries, keys)


@triton.jit
def attend_block(state, queries, source, block, ROTATE_K: tl.constexpr, VARIANT: tl.constexpr):
    """Does one step of the online softmax, over a KeyBlock. queries: BandQueries. source: KeySource."""
    dtype: tl.constexpr = queries.parts[0].dtype
    k, raw = load_block_keys(source, block, ROTATE_K, VARIANT, dtype)
    scores = part_scores(queries.parts, k, VARIANT)
    scores = scale_scores(scores, source.keys, block, VARIANT)
    # Every block is masked, not only edge blocks. A block in which a row sees no key changes no bit of the row's
    # result.
    visible = see_block(queries, source.keys, block, VARIANT)
    weights, state = online_softmax(state, scores, queries.scale_log2, visible)
    v = load_block_values(source, block, raw, VARIANT, dtype)
    weights, v = scale_weights(weights, v, source.keys, block, VARIANT)
    return add_values(state, weights, v)


@triton.jit
def attend_decode_band(state, queries, keys, inputs, own, BAND: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the SoftmaxState after the blocks of band BAND that a program takes. own: the program's Blocks."""
    ROTATE_K: tl.constexpr = (VARIANT.rotated_bands >> BAND) & 1
    band = load_band(inputs.scheme.bands, BAND)
    rotated = rotate_queries(queries, keys, band, ROTATE_K, VARIANT)
    tile_map = load_tile_map(keys.table.maps, band.k_rotation, block_keys(VARIANT)) if VARIANT.aligned_maps else None
    source = KeySource(keys, band.k_rotation, tile_map)
    taken = own_blocks(band_blocks(queries, keys, band, inputs.cache, BAND, VARIANT), own)
    begin = taken.first
    # Pages are loaded one block ahead. Otherwise the pipeline could not load K and V ahead.
    found = look_up(keys, begin * VARIANT.block_n, VARIANT)
    for n in tl.range(begin, taken.stop, taken.step):
        next_found = look_up(keys, (n + taken.step) * VARIANT.block_n, VARIANT)
        block = find_block(keys, n * VARIANT.block_n, found, VARIANT)
        state = attend_block(state, rotated, source, block, ROTATE_K, VARIANT)
        found = next_found
    return state


@triton.jit
def attend_blocks(inputs, program, seq, own, VARIANT: tl.constexpr):
    """Returns (the SoftmaxState of a tile of queries after the key blocks `own`, its QueryRows)."""
    # This function makes the tuples in which a field may be None, because no function can return them in Triton 3.6.
    cache, scheme, head_kv = inputs.cache, inputs.scheme, program.head_kv
    group = inputs.heads_q // inputs.heads_kv
    rows = find_decode_rows(inputs, program, seq, group, VARIANT)
    shift = tl.maximum(-seq.ahead, 0) if scheme.maps is None and not VARIANT.rotated_keys else 0
    first_row = program.tile * VARIANT.block_m
    last_token = tl.minimum((first_row + VARIANT.block_m - 1) // group, seq.length_q - 1)
    entry, column, last, scales = None, None, None, None
    if cache.tokens is not None:
        entry = token_entries(inputs, seq, rows.token)
        column = load_token(cache, entry, 1, VARIANT)
        last = last_visible(cache, program.batch, VARIANT)
    queries = DecodeQueries(
        rows=rows,
        first=first_row // group + seq.ahead,
        last=last_token + seq.ahead,
        entry=entry,
        column=column,
        ptr=inputs.q.ptr,
        offsets=token_offsets(inputs.q, program.batch, seq.start_q + rows.token, rows.head, VARIANT),
        scale=scale_decode_rows(inputs, seq, rows, VARIANT),
        scale_log2=log2_scale(scheme.score_scale),
    )
    k, v = head_view(inputs.k_cache, 0, 0, head_kv, VARIANT), head_view(inputs.v_cache, 0, 0, head_kv, VARIANT)
    if cache.k_scale is not None:
        scales = key_scales(cache, head_kv)
    table = CosSinTable(scheme.table, inputs.table_rows, None, scheme.maps)
    cached = CachedKeys(cache, scales, program.batch, seq.start_k)
    keys = SequenceKeys(k, v, cached, seq.length_k, table, shift, last, inputs.key_weight)
    state = start_state(inputs.k_cache.ptr.dtype.element_ty, VARIANT)
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        state = attend_decode_band(state, queries, keys, inputs, own, b, VARIANT)
    if VARIANT.key_groups > 1:
        state = merge_groups(state)
    return state, rows


# ---- the kernel


@triton.jit
def decode_share(inputs, out, lse, workspace, batches, VARIANT: tl.constexpr):
    """Computes the pieces of a program's share. If queries are not packed, programs also divide the sequences without
    keys among themselves and store their results."""
    cu_seqlens_q, seqlen_q, heads_q = inputs.cu_seqlens_q, inputs.seqlen_q, inputs.heads_q
    if cu_seqlens_q is None:
        for batch in tl.range(tl.program_id(0), batches, tl.num_programs(0)):
            if tl.load(workspace.empty + batch) > 0:
                store_nothing(out, lse, batch, seqlen_q * heads_q, VARIANT)
    share = workspace.shares + tl.program_id(0) * SHARE_FIELDS
    first_piece, pieces = tl.load(share), tl.load(share + 1)
    for n in tl.range(0, pieces, disable_licm=VARIANT.key_groups > 1 and VARIANT.num_bands == 1):
        piece = workspace.pieces + (first_piece + n).to(tl.int64) * PIECE_FIELDS
        batch, head_kv, tile, part = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 5)
        own = Blocks(tl.load(piece + 3), tl.load(piece + 4), 1)
        program = Program(0, tile, head_kv, batch, batches)
        seq = find_cached_sequence(inputs.cache, cu_seqlens_q, batch, seqlen_q)
        state, rows = attend_blocks(inputs, program, seq, own, VARIANT)
        if part == WHOLE:
            store_segment(out, lse, state, rows, program, seq, cu_seqlens_q, seqlen_q, heads_q, VARIANT)
        else:
            store_piece(workspace, state, rows, part, VARIANT)


@triton.jit(do_not_specialize=["seqlen_q", "table_rows", "heads_q", "heads_kv", "num_splits", "batches"])
def attention_decode(
    q,
    k_cache,
    v_cache,
    key_weight,
    out,
    lse,
    scheme,
    cu_seqlens_q,
    cache,
    seqlen_q,
    table_rows,
    heads_q,
    heads_kv,
    num_splits,
    batches,
    workspace,
    VARIANT: tl.constexpr,
):
    """Computes attention of few queries over a KV cache. q, k_cache, v_cache: TensorViews. key_weight: float32
    (head_dim,), or None.

    With VARIANT.shares, every program has a share of the work. out (batch, seqlen_q, heads_q, head_dim_v) and lse
    float32 (batch, heads_q, seqlen_q), packed or not, are contiguous. workspace: a Workspace, or None without
    VARIANT.shares.

    Otherwise, num_splits programs divide the keys of a tile of query rows. out is (num_splits, batch, seqlen_q,
    heads_q, head_dim_v) and lse (num_splits, batch, heads_q, seqlen_q). With packed queries they have the rows of
    ``partial_rows``. With several splits, rows of out whose lse is -inf are not written."""
    inputs = DecodeInputs(
        q, k_cache, v_cache, key_weight, scheme, cu_seqlens_q, cache, seqlen_q, table_rows, heads_q, heads_kv
    )
    if VARIANT.shares:
        decode_share(inputs, out, lse, workspace, batches, VARIANT)
        return
    group = heads_q // heads_kv
    max_seqlen_q = seqlen_q if cu_seqlens_q is None else decode_int(cache.decode_seqlen)
    program = find_program(tl.cdiv(max_seqlen_q * group, VARIANT.block_m), heads_kv, num_splits)
    seq = find_cached_sequence(cache, cu_seqlens_q, program.batch, seqlen_q)
    if cu_seqlens_q is not None:
        if (program.tile * VARIANT.block_m >= seq.length_q * group) | (seq.length_q > max_seqlen_q):
            return
    state, rows = attend_blocks(inputs, program, seq, Blocks(program.split, None, num_splits), VARIANT)
    store_split(out, lse, state, rows, program, seq, cu_seqlens_q, seqlen_q, max_seqlen_q, heads_q, num_splits, VARIANT)
