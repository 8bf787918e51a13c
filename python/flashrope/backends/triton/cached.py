"""attention_with_cache: one plan per call. Few queries take the decode kernel, long chunks the forward kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...lowering.cos_sin import coarse_rows, three_level_table, turn_table, two_level_table
from ...rotary.rotary import Rotary
from ...triton_kernels import configs
from ...triton_kernels.arguments import CacheLayout as KernelCacheLayout
from ...triton_kernels.arguments import CuSeqlens, PositionTables, Shape, encode_ints, tensor_view
from ...triton_kernels.configs import Tile
from ...triton_kernels.decode import append_rows, attention_decode, combine_splits
from ...triton_kernels.placed import ENTRY_FIELDS, TOKEN_FIELDS, place_slots, place_tokens
from ...triton_kernels.rotate import rotate_cached_rows
from ..calls import MAX_SPLITS, CacheCall, CacheLayout, RotateCall, cached_lse_shape, multiprocessors
from ..shown import Positions
from ..splits import choose_splits
from . import launcher
from .device import (
    block_d,
    cached_vector_sizes,
    current_device,
    fits_int32_offsets,
    shape_of,
    vector_size,
    with_int32_offsets,
)
from .launcher import cdiv
from .plan import Plan
from .rotated import rotate


def unsupported_positions(positions: Positions) -> str:
    """Always "": these kernels take all tables."""
    return ""


def append_to_cache(k_cache, v_cache, k, v, layout: CacheLayout, rotary: Rotary | None = None) -> None:
    """As in ``CacheBackend``, in one launch, or two if k is rotated."""
    seqlen, heads_kv, head_dim = k.shape[-3:]
    if not k.numel() or not k_cache.numel() or (layout.block_table is not None and not layout.block_table.numel()):
        return
    if rotary is not None and rotary.changes_channels:
        k = rotate(k, RotateCall(rotary, None, layout, layout.capacity(k_cache)))
    packed, placed = layout.cu_seqlens_q is not None, layout.slot_mapping is not None
    batch = 1 if placed else layout.cu_seqlens_q.shape[0] - 1 if packed else k.shape[0]
    max_seqlen = min(layout.max_seqlen_q, seqlen) if packed and not placed else seqlen
    kernel_layout, page_size = _kernel_layout(k_cache, layout._replace(leftpad=None))
    if layout.k_scale is None:
        vec = vector_size(k_cache, v_cache, k, v)
    else:
        vec = min(cached_vector_sizes(k_cache, v_cache, k, v))
    shape = Shape(head_dim, block_d(head_dim), vec=vec, page_size=page_size, block_m=configs.APPEND_ROWS)
    with current_device(k):
        launcher.launch(
            append_rows,
            (cdiv(max_seqlen * heads_kv, configs.APPEND_ROWS) * batch,),
            *map(tensor_view, (k_cache, v_cache, k, v)),
            kernel_layout,
            None if placed else layout.cu_seqlens_q,
            seqlen,
            max_seqlen,
            heads_kv,
            SHAPE=shape,
            **configs.options(configs.APPEND_WARPS),
        )


def attention_with_cache(q, k_cache, v_cache, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """As in ``CacheBackend``."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(cached_lse_shape(q), dtype=torch.float32, device=q.device)
    if call.layout.cu_seqlens_q is not None:  # rows outside every sequence
        out.zero_(), lse.fill_(float("-inf"))
    if not q.numel() or not k_cache.numel() or not call.layout.capacity(k_cache) or not call.bands:
        return out.zero_(), lse.fill_(float("-inf"))
    with current_device(q):
        plan = CachePlan(q, k_cache, v_cache, call)
        if plan.decodes:
            plan.decode(out, lse)
        if plan.prefills:
            plan.prefill(out, lse)
    return out, lse


class RotatedRows(NamedTuple):
    """Rows of the workspace for rotated keys. per_sequence: `rows` of copied_keys in triton_kernels/tiles.py; longest:
    the most rows that one sequence has."""

    per_sequence: int
    longest: int
    total: int


class CachePlan(Plan):
    """Queries over a cache, of which the decode kernel serves the short sequences and the forward kernel the others."""

    def __init__(self, q, k_cache, v_cache, call: CacheCall):
        self.q, self.k_cache, self.v_cache, self.call, layout = q, k_cache, v_cache, call, call.layout
        self.cu_seqlens_q, self.capacity = layout.cu_seqlens_q, layout.capacity(k_cache)
        longest = q.shape[1] if self.cu_seqlens_q is None else min(layout.max_seqlen_q, q.shape[0])
        self.stored = layout.positions is not None and _have_parts(layout.positions)
        if layout.positions is None:
            table = two_level_table(call.rotary, call.causal, coarse_rows(max(longest, self.capacity)), q.device)
        elif self.stored:
            table = turn_table(call.rotary, call.causal, q.device)
        else:
            table = three_level_table(call.rotary, call.causal, q.device)
        super().__init__(q, call, self.cu_seqlens_q, longest, k_cache.shape[2], self.capacity, table)

        self.prefills = self._can_prefill()
        self.decodes = not self.prefills or self.cu_seqlens_q is not None
        self.decode_seqlen = configs.DECODE_SEQLEN if self.prefills else self.max_seqlen_q
        self.layout, self.page_size = _kernel_layout(k_cache, layout, self.decode_seqlen)
        self.cache = "paged" if self.page_size else "contiguous"
        self.axes = self.rotary.axes if self.stored and self.rotary.axis else 0
        if layout.positions is not None:
            self.layout = self._place_tokens(layout.positions)

    def _place_tokens(self, positions: Positions) -> KernelCacheLayout:
        """The layout with what ``place_tokens`` finds, in one launch, or two where bands go by stored positions."""
        entries = self.call.layout.block_table.shape[1] if self.page_size else 1
        queries = None if positions.queries is None else positions.queries.contiguous()
        tokens = self.batch * self.seqlen_q if self.cu_seqlens_q is None else self.seqlen_q
        rows, block_n, axes = configs.PLACED_ROWS, configs.PLACED_ENTRIES, self.axes
        fields = ENTRY_FIELDS + self.stored, TOKEN_FIELDS + 2 * self.num_bands + 2 * (axes or 1) * self.stored
        layout = self.layout._replace(
            entries=self.q.new_empty(self.batch, entries, fields[0], dtype=torch.int32),
            tokens=self.q.new_empty(tokens, fields[1], dtype=torch.int32),
            shown=self.q.new_empty(self.batch, 2, dtype=torch.int32),
        )
        shape = Shape(
            0,
            0,
            num_bands=self.num_bands,
            page_size=self.page_size,
            block_m=rows,
            block_n=block_n,
            stored=self.stored,
            axes=axes,
        )
        tables = PositionTables(positions.page_positions, positions.page_first, positions.page_lengths, queries)
        options = configs.options(configs.PLACED_WARPS)
        if positions.slot_positions is not None:
            layout = layout._replace(slot_positions=positions.slot_positions.contiguous())
        if self.stored and not axes:
            groups = self.q.new_empty(self.batch, cdiv(self.capacity, block_n), 2, dtype=torch.int32)
            tables = tables._replace(groups=groups)
            arguments = (tables, layout, self.cu_seqlens_q, self.seqlen_q)
            launcher.launch(place_slots, (self.batch * groups.shape[1],), *arguments, SHAPE=shape, **options)
        launcher.launch(
            place_tokens,
            (cdiv(self.max_seqlen_q, rows) * self.batch,),
            tables,
            layout,
            self.cu_seqlens_q,
            self.tables.bands,
            self.tables.maps,
            self.seqlen_q,
            self.max_seqlen_q,
            CAUSAL=self.call.causal,
            SHAPE=shape,
            **options,
        )
        return layout

    # ---- many queries

    def _can_prefill(self) -> bool:
        """Whether the forward kernel serves long queries: it rotates keys once, decoding once per query tile.

        Its workspace, one copy for each slope that rotates keys, must not exceed the cache. num_splits asks for the
        decode kernel, whose results do not depend on how tokens are divided into calls.
        """
        if self.call.num_splits or self.max_seqlen_q <= configs.DECODE_SEQLEN or self.call.layout.positions is not None:
            return False
        slots = self.k_cache.shape[0] * self.k_cache.shape[1]
        offsets_fit = fits_int32_offsets(self.k_cache) and fits_int32_offsets(self.v_cache)
        return self._rotated_rows().total <= slots and offsets_fit

    def _rotated_rows(self) -> RotatedRows:
        """Room for the last keys of every sequence, those that the bands that rotate keys can reach."""
        if not self.lowered.k_stops:
            return RotatedRows(0, 0, 0)
        beyond = max(self.lowered.k_stops) - 1  # keys before the first query's own
        longest = max(min(self.capacity, self.max_seqlen_q + beyond), 0)
        if self.cu_seqlens_q is None:
            return RotatedRows(longest, longest, self.batch * longest)
        beyond = max(min(self.capacity, beyond), 0)
        return RotatedRows(beyond, longest, self.seqlen_q + self.seqlen_q // (configs.DECODE_SEQLEN + 1) * beyond)

    def prefill(self, out, lse) -> None:
        """Fills the rows of out and lse that the decode kernel leaves, in two launches."""
        q, k_cache, v_cache = with_int32_offsets(self.q), self.k_cache, self.v_cache
        copies, rows = len(self.lowered.k_copies), self._rotated_rows()
        vec, code_vec = cached_vector_sizes(k_cache, v_cache, q)
        rotated_k = k_cache
        if rows.total:
            rotated_k = q.new_empty(copies, rows.total, k_cache.shape[2], q.shape[-1])
            grid = (
                cdiv(rows.longest, configs.ROTATE_ROWS) * self.batch,
                cdiv(self.heads_kv, configs.ROTATE_HEADS),
                copies,
            )
            launcher.launch(
                rotate_cached_rows,
                grid,
                tensor_view(k_cache),
                tensor_view(rotated_k),
                self.tables.key_ranges,
                self.table,
                self.tables.maps,
                self.layout,
                self.cu_seqlens_q,
                self.seqlen_q,
                rows.per_sequence,
                rows.longest,
                self.table_rows,
                self.heads_kv,
                HEADS_PER_PROGRAM=configs.ROTATE_HEADS,
                SHAPE=shape_of(self.rotary, vec, 0, 0, self.page_size, configs.ROTATE_ROWS, code_vec=code_vec),
                **configs.options(configs.ROTATE_WARPS),
            )
        codes = self.call.layout.k_scale is not None
        tile = self.tile("forward codes" if codes else "forward" if vec > 1 else "forward unaligned", self.cache)
        # Only paged keys and codes are read in another way than copies.
        rotated_bands = self.lowered.rotated_bands if self.page_size or codes else 0
        shape = shape_of(
            self.rotary,
            vec,
            self.num_bands,
            rotated_bands,
            self.page_size,
            tile.block_m,
            tile.block_n,
            code_vec=code_vec,
        )
        cu_seqlens = CuSeqlens(self.cu_seqlens_q, None)
        self.launch_forward(
            q, k_cache, rotated_k, v_cache, out, lse, cu_seqlens, self.layout, rows.per_sequence, shape, tile
        )

    # ---- few queries

    def decode(self, out, lse) -> None:
        """Fills out and lse, in one launch or, with several splits, two. Packed queries that the forward kernel serves
        are left to it; most of the others are then a single token each."""
        group, rows = self.heads_q // self.heads_kv, self.decode_seqlen * (self.heads_q // self.heads_kv)
        usual_rows = group if self.prefills else rows
        wide = not self.call.num_splits and usual_rows > configs.WIDE_ROWS
        tile = self.tile("decode wide" if wide else "decode", self.cache)
        aligned_maps = bool(self.lowered.maps) and self.layout.entries is None and self._maps_align(tile.block_n)
        if self.lowered.maps and not aligned_maps:
            # Every key has its own row of cos and sin. Requested ahead, they would fill shared memory.
            tile = tile._replace(num_stages=1)
        one_run = False
        if self.layout.entries is not None:
            tile, one_run = self._placed_tile(tile)
        programs = cdiv(rows, tile.block_m) * self.heads_kv * self.batch
        usual_programs = cdiv(usual_rows, tile.block_m) * self.heads_kv * self.batch
        if self.call.layout.k_scale is None:
            vec, code_vec = vector_size(self.q, self.k_cache, self.v_cache), 0
        else:
            vec, code_vec = cached_vector_sizes(self.k_cache, self.v_cache, self.q)
        fields = (self.num_bands, self.lowered.rotated_bands, self.page_size, tile.block_m, tile.block_n)
        options = {
            "SHAPE": shape_of(
                self.rotary,
                vec,
                *fields,
                aligned_maps=aligned_maps,
                code_vec=code_vec,
                one_run=one_run,
                stored=self.stored,
                axes=self.axes,
            ),
            **tile.options,
        }
        num_splits = self._num_splits(usual_programs, lse, options)
        partial, partial_lse = out, lse
        if num_splits > 1:
            shape, lse_shape = out.shape, lse.shape
            if self.cu_seqlens_q is not None:
                partial_rows = min(self.seqlen_q, self.batch * self.decode_seqlen)
                shape, lse_shape = (partial_rows, *shape[1:]), (self.heads_q, partial_rows)
            partial = torch.empty(num_splits, *shape, dtype=torch.float32, device=out.device)
            partial_lse = torch.empty(num_splits, *lse_shape, dtype=torch.float32, device=out.device)
        launcher.launch(
            attention_decode,
            (programs * num_splits,),
            *self._decode_arguments(partial, partial_lse, num_splits),
            **options,
        )
        if num_splits > 1:
            launcher.launch(
                combine_splits,
                (self.batch * self.decode_seqlen * self.heads_q,),
                partial,
                partial_lse,
                out,
                lse,
                self.cu_seqlens_q,
                self.seqlen_q,
                self.decode_seqlen,
                self.heads_q,
                num_splits,
                BLOCK_S=configs.COMBINE_SPLITS,
                SHAPE=Shape(self.rotary.head_dim, 2 * self.table.shape[-1]),
                **configs.options(configs.COMBINE_WARPS),
            )

    def _maps_align(self, block_n: int) -> bool:
        """Whether every tile of so many keys lies in one chunk, and in one group or over whole groups."""
        maps = [self.lowered.maps[rotation] for rotation in self.lowered.k_copies]
        return all(x.chunk % block_n == 0 and 0 in (x.group % block_n, block_n % x.group) for x in maps)

    def _placed_tile(self, tile: Tile) -> tuple[Tile, bool]:
        """(The tile where positions are data, whether each lies in one page.) Its keys then follow one another.
        Otherwise every key has its own rows of cos and sin, as with maps that do not align."""
        if self.lowered.maps and not self.stored:
            tile = tile._replace(num_stages=2)  # see decode; tiles are smaller here
        if (self.stored or self.lowered.maps) and self.table.shape[-1] >= configs.PLACED_PAIRS:
            tile = tile._replace(block_n=min(tile.block_n, configs.PLACED_KEYS))
        if not self.page_size:
            return tile, True
        tile = tile._replace(block_n=min(tile.block_n, self.page_size))
        if self.call.layout.leftpad is None and self.page_size % tile.block_n == 0:
            return tile, True
        return tile._replace(block_n=configs.SMALLEST_TILE, num_stages=1), False

    def _decode_arguments(self, partial, partial_lse, num_splits: int) -> tuple:
        return (
            tensor_view(self.q),
            tensor_view(self.k_cache),
            tensor_view(self.v_cache),
            partial,
            partial_lse,
            self.scheme,
            self.cu_seqlens_q,
            self.layout,
            self.seqlen_q,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            num_splits,
        )

    def _num_splits(self, programs: int, lse, options) -> int:
        """The number that the call asks for, or one that fills the device. programs: blocks of one split."""
        block_n = options["SHAPE"].block_n
        if self.call.num_splits:
            return min(self.call.num_splits, MAX_SPLITS, cdiv(self.capacity, block_n))
        device = self.q.device
        key = (device, self.capability, self.q.dtype, *options.items())
        if key not in _resident:
            # Several splits store float32. lse stands in for their results, which are not allocated yet.
            arguments = self._decode_arguments(lse, lse, 2)
            _resident[key] = launcher.resident_blocks(self.capability, attention_decode, *arguments, **options)
        tiles = cdiv(min(self.capacity, self.lowered.reach + self.seqlen_q), block_n)
        return choose_splits(programs, tiles, _resident[key] * multiprocessors(device))


_resident: dict[tuple, int] = {}  # blocks of attention_decode that one multiprocessor holds


def _have_parts(positions: Positions) -> bool:
    """Whether positions may have fractions."""
    given = positions.queries is not None and positions.queries.is_floating_point()
    return given or positions.slot_positions is not None


def _kernel_layout(k_cache, layout: CacheLayout, decode_seqlen: int = 0) -> tuple[KernelCacheLayout, int]:
    """The layout as kernels take it, and the page size, 0 for a contiguous cache."""
    pages, page_size, _, _ = k_cache.shape
    seqlens, block_table, leftpad, seqlen_new, _, slot_mapping, _, k_scale, v_scale, _, _ = layout
    numbers = encode_ints(seqlen_new, layout.capacity(k_cache), pages, decode_seqlen)
    scales = (k_scale, v_scale)
    strides = () if k_scale is None or v_scale is None else encode_ints(*k_scale.stride(), *v_scale.stride())
    tensors = (seqlens, block_table, leftpad, slot_mapping, *scales, None, None, None, None)
    kernel_layout = KernelCacheLayout(*tensors, *numbers, *strides)
    return kernel_layout, 0 if block_table is None else page_size
