"""Divides the key tiles of all sequences evenly among the programs of the decode kernel, whatever the lengths are.

A segment is a tile of query rows of one sequence and key head. It has as many units as there are key tiles that these
rows can see. The units of all segments are numbered, sequence by sequence. With U units in all, share n of N has units
n * U // N to (n + 1) * U // N - 1. If a share ends within a segment, the segment is cut into pieces. Each program
computes the pieces of its share one by one. ``combine_shares`` merges the results of a segment that is cut.

Two sequences of 5 and 2 key tiles, two key heads, four shares, six pieces (a to f):

    units      0 1 2 3 4 | 5 6 7 8 9 | 10 11 | 12 13
    shares     0 0 0 1 1   1 1 2 2 2    3  3    3  3
    pieces     a a a b b   c c d d d    e  e    f  f

``plan_shares`` runs once for all layers of a step. It finds the pieces from the lengths on the device, so nothing on
the host waits for a length.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import decode_int
from ..tiles import find_cached_sequence, key_tiles, load_band

SCAN = tl.constexpr(32)  # sequences whose lengths a program adds up at once: a scan within a warp
# The time that a program takes to begin a second segment, in key tiles. A division in which all segments are cut alike
# may make shares longer by this much.
SETUP = tl.constexpr(2)
SHARE_FIELDS = tl.constexpr(2)  # the first piece of a share, the number of its pieces
PIECE_FIELDS = tl.constexpr(6)  # sequence, key head, query tile, first key tile, last key tile + 1, which piece (below)
WHOLE, BEGINNING, REST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # says which piece of its segment a piece is
# A share may end within a segment. The first field is the number of pieces of that segment, or 0 if there is none. The
# others are the segment's sequence, key head and tile of query rows.
CUT_FIELDS = tl.constexpr(4)


class Queue(NamedTuple):
    """The numbers that determine the segments. group: query heads of a key head. max_seqlen_q: sequences with more
    queries have no segments."""

    cache: object
    cu_seqlens_q: object
    bands: object
    maps: object
    batches: object
    seqlen_q: object
    max_seqlen_q: object
    heads_kv: object
    group: object


class Segments(NamedTuple):
    """The segments of a sequence, or of several [N]. count: number of segments. first: the first key tile of each
    segment. tiles: number of its key tiles. If it has no tiles, count is 0."""

    count: object
    first: object
    tiles: object


@triton.jit
def sequence_segments(queue, batch, VARIANT: tl.constexpr):
    """Returns the Segments of a batch index, or of several [N]."""
    seq = find_cached_sequence(queue.cache, queue.cu_seqlens_q, batch, queue.seqlen_q)
    first, stop = seq.length_k, seq.length_k * 0
    NUM_BANDS: tl.constexpr = VARIANT.num_bands
    for b in tl.static_range(NUM_BANDS):
        band, last = load_band(queue.bands, b), seq.ahead + seq.length_q - 1
        tiles = key_tiles(band, seq.ahead, last, seq.length_k, VARIANT.block_n, queue.maps)
        first = tl.where(tiles.begin < tiles.end, tl.minimum(first, tiles.begin), first)
        stop = tl.where(tiles.begin < tiles.end, tl.maximum(stop, tiles.end), stop)
    tiles = tl.maximum(stop - first, 0)
    count = tl.cdiv(seq.length_q * queue.group, VARIANT.block_m) * queue.heads_kv
    if queue.cu_seqlens_q is not None:
        count = tl.where(seq.length_q <= queue.max_seqlen_q, count, 0)
    return Segments(tl.where(tiles > 0, count, 0), first, tiles)


@triton.jit
def next_segments(queue, first_batch, VARIANT: tl.constexpr):
    """Returns the Segments [SCAN] of the sequences from `first_batch` on. Indices beyond the last sequence have
    no segments."""
    batch = first_batch + tl.arange(0, SCAN)
    segments = sequence_segments(queue, tl.minimum(batch, queue.batches - 1), VARIANT)
    return Segments(tl.where(batch < queue.batches, segments.count, 0), segments.first, segments.tiles)


class Shares(NamedTuple):
    """units: number of units of all segments, int64. count: number of shares, at most the number of programs."""

    units: object
    count: object


@triton.jit
def count_shares(queue, programs, VARIANT: tl.constexpr):
    """Returns the Shares. Prefers a division that cuts all segments into the same number of pieces, if it makes no
    share longer by more than SETUP units."""
    units, segments = tl.zeros((SCAN,), tl.int64), tl.zeros((SCAN,), tl.int64)
    for first in tl.range(0, queue.batches, SCAN):
        found = next_segments(queue, first, VARIANT)
        units += found.count.to(tl.int64) * found.tiles
        segments += found.count
    units, segments = tl.sum(units, 0), tl.maximum(tl.sum(segments, 0), 1)
    each = tl.maximum(tl.cdiv(units, segments * tl.maximum(programs // segments, 1)), 1)
    alike = (segments <= programs) & (each <= tl.cdiv(units, programs) + SETUP)
    count = tl.where(alike, segments * tl.cdiv(units, segments * each), programs)
    return Shares(units, tl.minimum(count, tl.minimum(units, programs)).to(tl.int32))


@triton.jit
def first_unit(shares, share):
    """Returns the first unit of a share, int64."""
    return shares.units * share // tl.maximum(shares.count, 1)


@triton.jit
def share_of(shares, unit):
    """Returns the share that a unit belongs to."""
    return (((unit + 1) * shares.count - 1) // tl.maximum(shares.units, 1)).to(tl.int32)


class SharePlace(NamedTuple):
    """A sequence (batch), its first unit (start), and the number of segments before it (segments)."""

    batch: object
    start: object
    segments: object


@triton.jit
def find_unit(queue, unit, VARIANT: tl.constexpr):
    """Returns the SharePlace of the sequence that a unit belongs to."""
    batch, segments = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    start, before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for first in tl.range(0, queue.batches, SCAN):
        found = next_segments(queue, first, VARIANT)
        ends = before + tl.cumsum(found.count.to(tl.int64) * found.tiles, 0)
        passed = ends <= unit
        batch += tl.sum(passed.to(tl.int32), 0)
        segments += tl.sum(tl.where(passed, found.count, 0), 0)
        start = tl.maximum(start, tl.max(tl.where(passed, ends, 0), 0))
        before = tl.max(ends, 0)
    return SharePlace(tl.minimum(batch, queue.batches - 1), start, segments)


@triton.jit
def store_pieces(workspace, share, queue, place, own, first_segment, unit, stop):
    """Stores the pieces of SCAN segments of a sequence, from `first_segment` on, that lie in the units from `unit` to
    `stop`. own: the Segments of the sequence."""
    segment = first_segment + tl.arange(0, SCAN)
    start = place.start + segment.to(tl.int64) * own.tiles
    begin = tl.maximum(unit - start, 0).to(tl.int32)
    end = tl.minimum(stop - start, own.tiles).to(tl.int32)
    mask = (segment < own.count) & (begin < end)
    batch, head, tile = place.batch + segment * 0, segment % queue.heads_kv, segment // queue.heads_kv
    part = tl.where(begin > 0, REST, tl.where(end < own.tiles, BEGINNING, WHOLE))
    to = workspace.pieces + (place.segments + segment + share).to(tl.int64) * PIECE_FIELDS
    tl.store(to, batch, mask=mask)
    tl.store(to + 1, head, mask=mask)
    tl.store(to + 2, tile, mask=mask)
    tl.store(to + 3, own.first + begin, mask=mask)
    tl.store(to + 4, own.first + end, mask=mask)
    tl.store(to + 5, part, mask=mask)


@triton.jit
def find_segment(queue, unit, VARIANT: tl.constexpr):
    """Returns (the SharePlace of the sequence that a unit belongs to, the sequence's Segments, the number of the unit's
    segment among them)."""
    place = find_unit(queue, unit, VARIANT)
    own = sequence_segments(queue, place.batch, VARIANT)
    return place, own, ((unit - place.start) // tl.maximum(own.tiles, 1)).to(tl.int32)


@triton.jit
def store_cut(to, pieces, place, segment, heads_kv):
    """Stores a row of Workspace.cuts."""
    tl.store(to, pieces)
    tl.store(to + 1, place.batch)
    tl.store(to + 2, segment % heads_kv)
    tl.store(to + 3, segment // heads_kv)


@triton.jit(do_not_specialize=["seqlen_q", "heads_q", "heads_kv", "batches"])
def plan_shares(
    workspace, cache, cu_seqlens_q, bands, maps, seqlen_q, heads_q, heads_kv, batches, VARIANT: tl.constexpr
):
    """Fills the first four tensors of the Workspace. Program n finds the pieces of share n. The index of a piece is the
    number of its segment plus the number of its share, so the pieces of a share are contiguous."""
    share, programs = tl.program_id(0), tl.num_programs(0)
    max_seqlen_q = seqlen_q if cu_seqlens_q is None else decode_int(cache.decode_seqlen)
    queue = Queue(cache, cu_seqlens_q, bands, maps, batches, seqlen_q, max_seqlen_q, heads_kv, heads_q // heads_kv)
    for batch in tl.range(share, batches, programs):
        tl.store(workspace.empty + batch, (sequence_segments(queue, batch, VARIANT).count == 0).to(tl.int32))
    shares = count_shares(queue, programs, VARIANT)
    to, cut = workspace.shares + share * SHARE_FIELDS, workspace.cuts + share * CUT_FIELDS
    if share >= shares.count:
        tl.store(to + 1, 0)
        tl.store(cut, 0)
        return
    unit, stop = first_unit(shares, share), first_unit(shares, share + 1)
    last, own, segment = find_segment(queue, stop - 1, VARIANT)
    begin = last.start + segment.to(tl.int64) * own.tiles
    pieces = share_of(shares, begin + own.tiles - 1) - share + 1
    store_cut(cut, tl.where((unit <= begin) & (pieces > 1), pieces, 0), last, segment, heads_kv)
    end_piece = last.segments + segment + 1
    place, own, segment = find_segment(queue, unit, VARIANT)
    tl.store(to, place.segments + segment + share)
    tl.store(to + 1, end_piece - (place.segments + segment))
    while unit < stop:
        store_pieces(workspace, share, queue, place, own, segment, unit, stop)
        segment += SCAN
        unit = place.start + tl.minimum(segment, own.count).to(tl.int64) * own.tiles
        if unit < stop:
            if segment >= own.count:
                place, own, segment = find_segment(queue, unit, VARIANT)
