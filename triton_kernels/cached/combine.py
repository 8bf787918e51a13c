"""Stores the results of the decode kernel, and combines partial results."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..quantized import join_columns
from ..rotating.channels import shared_channels
from ..rows import value_channels
from ..softmax import LN_2, LOG2_E, finish_softmax
from ..tiles import sequence_rows
from .shares import BEGINNING, CUT_FIELDS


@triton.jit
def partial_rows(start_q, total_q, batch, batches, max_seqlen_q):
    """Returns (a sequence's first row, the number of rows) in the partial results of one split. Called if queries are
    packed. Sequences with more than max_seqlen_q queries have no rows in these results."""
    return tl.minimum(start_q, batch.to(tl.int64) * max_seqlen_q), tl.minimum(total_q, batches * max_seqlen_q)


@triton.jit
def result_rows(cu_seqlens_q, batch, start_q, token, head, seqlen_q, heads_q):
    """Returns (row in out, row in lse) of each query."""
    if cu_seqlens_q is None:
        batch = batch.to(tl.int64)
        return (batch * seqlen_q + token) * heads_q + head, (batch * heads_q + head) * seqlen_q + token
    else:
        token += start_q
        return token * heads_q + head, head.to(tl.int64) * seqlen_q + token


@triton.jit
def store_result_rows(out, lse, state, row, lse_row, exists, written, VARIANT: tl.constexpr):
    """Stores the results of a tile. Row m goes to row[m] of out if written[m], and to lse_row[m] of lse if
    exists[m]."""
    result, log_sum = finish_softmax(state)
    if VARIANT.first_value >= 0:
        channels = shared_channels(VARIANT)
    else:
        channels = value_channels(VARIANT)
    tl.store(lse + lse_row, log_sum, mask=exists)
    if len(result) == 2 and VARIANT.code_vec > 0:
        result = (join_columns(result[0], result[1]),)
    for part in tl.static_range(len(result)):
        channel = channels[part]
        if VARIANT.first_value >= 0:
            channel = channel - VARIANT.first_value
        to = row[:, None] * VARIANT.head_dim_v + channel[None, :]
        mask = written[:, None] & (channel < VARIANT.head_dim_v)[None, :]
        if VARIANT.first_value > 0:
            mask = mask & (channel >= 0)[None, :]
        tl.store(out + to, result[part].to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_split(
    out,
    lse,
    state,
    rows,
    program,
    seq,
    cu_seqlens_q,
    seqlen_q,
    max_seqlen_q,
    heads_q,
    num_splits,
    VARIANT: tl.constexpr,
):
    """Stores the results of a split for the rows of a tile."""
    split_batch, token = program.split.to(tl.int64) * program.batches + program.batch, rows.token
    if cu_seqlens_q is not None:
        split_batch = program.split.to(tl.int64)
        start, rows_in_all = partial_rows(seq.start_q, seqlen_q, program.batch, program.batches, max_seqlen_q)
        token += tl.where(num_splits == 1, seq.start_q, start)
        seqlen_q = tl.where(num_splits == 1, seqlen_q, rows_in_all)
    row = (split_batch * seqlen_q + token) * heads_q + rows.head
    lse_row = (split_batch * heads_q + rows.head) * seqlen_q + token
    written = tl.where(num_splits == 1, rows.exists, rows.exists & (state.row_sum != 0))
    store_result_rows(out, lse, state, row, lse_row, rows.exists, written, VARIANT)


@triton.jit
def store_segment(out, lse, state, rows, program, seq, cu_seqlens_q, seqlen_q, heads_q, VARIANT: tl.constexpr):
    """Stores the results of the rows of a tile over all their keys."""
    row, lse_row = result_rows(cu_seqlens_q, program.batch, seq.start_q, rows.token, rows.head, seqlen_q, heads_q)
    store_result_rows(out, lse, state, row, lse_row, rows.exists, rows.exists, VARIANT)


@triton.jit
def store_piece(workspace, state, rows, part, VARIANT: tl.constexpr):
    """Stores the partial results of the rows of a tile over a piece of a segment, in the workspace."""
    tile = 2 * tl.program_id(0) + (part == BEGINNING).to(tl.int32)
    row = tile * VARIANT.block_m + tl.arange(0, VARIANT.block_m)
    written = rows.exists & (state.row_sum != 0)
    store_result_rows(workspace.out, workspace.lse, state, row, row, rows.exists, written, VARIANT)


@triton.jit
def store_nothing(out, lse, batch, rows, VARIANT: tl.constexpr):
    """Stores out 0 and lse -inf for the `rows` rows of a sequence without keys."""
    channels = tl.arange(0, VARIANT.block_dv)
    for first in tl.range(0, rows, VARIANT.block_m):
        row = first + tl.arange(0, VARIANT.block_m)
        exists, row = row < rows, tl.cast(batch, tl.int64) * rows + row
        tl.store(lse + row, float("-inf"), mask=exists)
        mask = exists[:, None] & (channels < VARIANT.head_dim_v)[None, :]
        to = out + row[:, None] * VARIANT.head_dim_v + channels[None, :]
        tl.store(to, 0.0, mask=mask)


class Partials(NamedTuple):
    """Says where the partial results of a row are stored. row, lse_row: the rows of the first result. rows: the
    distance from one result to the next. second: an additional offset of all results after the first."""

    row: object
    lse_row: object
    rows: object
    second: object


@triton.jit
def merge_partials(
    partial, partial_lse, out, lse, at, count, to_row, to_lse, BLOCK_S: tl.constexpr, VARIANT: tl.constexpr
):
    """Combines `count` partial results of a row, BLOCK_S at a time, and stores the result in out and lse. head_dim and
    block_d of VARIANT are those of the values."""
    D: tl.constexpr = VARIANT.block_d
    channels = tl.arange(0, VARIANT.block_d)
    has_channel = channels < VARIANT.head_dim
    indices = tl.arange(0, BLOCK_S)
    largest = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    for first in tl.range(0, count, BLOCK_S):
        index = first + indices
        from_lse = index * at.rows + at.lse_row + tl.where(index > 0, at.second, 0)
        largest = tl.maximum(largest, tl.load(partial_lse + from_lse, mask=index < count, other=float("-inf")))
    largest = tl.max(largest, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # a row without keys
    total = tl.zeros((BLOCK_S,), tl.float32)
    acc = tl.zeros((BLOCK_S, D), tl.float32)
    for first in tl.range(0, count, BLOCK_S):
        index = first + indices
        second = tl.where(index > 0, at.second, 0)
        from_lse = index * at.rows + at.lse_row + second
        log_sum = tl.load(partial_lse + from_lse, mask=index < count, other=float("-inf"))
        weights = tl.exp2((log_sum - finite) * LOG2_E)
        offsets = (index * at.rows + at.row + second)[:, None] * VARIANT.head_dim + channels[None, :]
        mask = (log_sum > float("-inf"))[:, None] & has_channel[None, :]
        acc += weights[:, None] * tl.load(partial + offsets, mask=mask, other=0.0)
        total += weights
    total = tl.sum(total, 0)
    empty = total == 0
    result = tl.sum(acc, 0) / tl.where(empty, 1.0, total)
    tl.store(out + to_row * VARIANT.head_dim + channels, result.to(out.dtype.element_ty), mask=has_channel)
    tl.store(lse + to_lse, tl.where(empty, float("-inf"), finite + tl.log2(tl.where(empty, 1.0, total)) * LN_2))


@triton.jit(do_not_specialize=["seqlen_q", "max_seqlen_q", "num_splits", "heads_q"])
def combine_splits(
    partial,
    partial_lse,
    out,
    lse,
    cu_seqlens_q,
    seqlen_q,
    max_seqlen_q,
    heads_q,
    num_splits,
    BLOCK_S: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Combines the splits of one row of out per program. partial, partial_lse: as attention_decode writes them, in
    float32."""
    row = tl.program_id(0).to(tl.int64)
    batch, token, head = row // heads_q // max_seqlen_q, row // heads_q % max_seqlen_q, row % heads_q
    if cu_seqlens_q is None:
        rows = tl.num_programs(0).to(tl.int64)
        lse_row = (batch * heads_q + head) * seqlen_q + token
        to_row, to_lse = row, lse_row
    else:
        start, length = sequence_rows(cu_seqlens_q, batch, seqlen_q)
        if (token >= length) | (length > max_seqlen_q):
            return
        batches = tl.num_programs(0) // heads_q // max_seqlen_q
        partial_start, total = partial_rows(start, seqlen_q, batch, batches, max_seqlen_q)
        rows = total.to(tl.int64) * heads_q
        row, lse_row = (partial_start + token) * heads_q + head, head * total + partial_start + token
        to_row, to_lse = (start + token) * heads_q + head, head * seqlen_q + start + token
    first = Partials(row, lse_row, rows, 0)
    merge_partials(partial, partial_lse, out, lse, first, num_splits, to_row, to_lse, BLOCK_S, VARIANT)


@triton.jit(do_not_specialize=["seqlen_q", "rows", "heads_q", "heads_kv"])
def combine_shares(
    workspace,
    out,
    lse,
    cu_seqlens_q,
    seqlen_q,
    rows,
    heads_q,
    heads_kv,
    BLOCK_S: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Combines the partial results of one row of a segment that is cut. Program n serves row n % rows of the segment
    that begins in share n // rows and ends after it, if there is one. rows: the largest number of query rows of a
    tile."""
    share, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    cut = workspace.cuts + share * CUT_FIELDS
    pieces = tl.load(cut)
    if pieces == 0:
        return
    batch, group = tl.load(cut + 1), heads_q // heads_kv
    start_q, length_q = sequence_rows(cu_seqlens_q, batch, seqlen_q)
    in_all = tl.load(cut + 3) * VARIANT.block_m + row
    if in_all >= length_q * group:
        return
    token, head = in_all // group, tl.load(cut + 2) * group + in_all % group
    to_row, to_lse = result_rows(cu_seqlens_q, batch, start_q, token, head, seqlen_q, heads_q)
    first = (2 * share + 1) * VARIANT.block_m + row
    at = Partials(first, first, 2 * VARIANT.block_m, -VARIANT.block_m)
    merge_partials(workspace.out, workspace.lse, out, lse, at, pieces, to_row, to_lse, BLOCK_S, VARIANT)
