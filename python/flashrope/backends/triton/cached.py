"""Attention over a cache: one plan for the layers of a step. Few queries take the decode kernel, long chunks that of
``chunks.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...lowering.cos_sin import coarse_rows, three_level_table, turn_table, two_level_table
from ...lowering.parts import Part, channel_parts
from ...triton_kernels import configs
from ...triton_kernels.arguments import CacheLayout as KernelCacheLayout
from ...triton_kernels.arguments import PositionTables, Result, TensorView, Variant, tensor_view
from ...triton_kernels.chunks import attention_chunks
from ...triton_kernels.configs import Tile
from ...triton_kernels.decode import attention_decode, combine_splits
from ...triton_kernels.explicit_positions import ENTRY_FIELDS, TOKEN_FIELDS, place_slots, place_tokens
from ...triton_kernels.rotate import rotate_cached_rows
from ..cache_tables import CacheLayer, CachePositions
from ..calls import MAX_SPLITS, CacheCall, RotateCall, cached_lse_shape, cached_out_shape, multiprocessors
from ..plans import Queries, append_rotary
from ..splits import choose_splits
from . import launcher
from .append import (
    AppendLaunch,
    alignment_key,
    append_key,
    kernel_layout,
    scale_fields,
    stride_fields,
    vector_of,
    view,
)
from .device import (
    block_d,
    cached_vector_sizes,
    current_device,
    fits_int32_offsets,
    variant_of,
    with_int32_offsets,
)
from .launcher import cdiv
from .plan import Plan
from .rotated import rotate


def unsupported_positions(positions: CachePositions) -> str:
    """Always "": these kernels take all tables."""
    return ""


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> CachePlan:
    """Plans the layers of a step; see ``CacheBackend``."""
    return CachePlan(call, layer, queries)


def attention_with_cache(q: torch.Tensor, layer: CacheLayer, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over one layer's cache; see ``CacheBackend``."""
    return CachePlan(call, layer, Queries.of(q)).attend(q, layer)


class Decode(NamedTuple):
    """The launches of ``attention_decode`` and, with several splits, of ``combine_splits``, and their workspace."""

    decode: launcher.Launch
    q_strides: tuple[int, int, int]
    num_splits: int = 1
    partial: torch.Tensor | None = None
    partial_lse: torch.Tensor | None = None
    combine: launcher.Launch | None = None


class RotatedRows(NamedTuple):
    """Rows of the workspace for rotated keys. per_sequence: `rows` of copied_keys in triton_kernels/tiles.py; longest:
    the most rows that one sequence has."""

    per_sequence: int
    longest: int
    total: int


class CachePlan(Plan):
    """Attention over a cache for the layers of a step, as ``protocol.CachePlan`` describes it.

    ``attention_decode`` serves short sequences of queries, ``attention_chunks`` longer ones.

    What depends on the values of the tables is launched for the first layer. The layers share one workspace, so they
    run on one stream.
    """

    def __init__(self, call: CacheCall, layer: CacheLayer, queries: Queries):
        self.append_rotary, self.call = append_rotary(call), call.for_backend() if call.rotated_keys else call
        self.queries, tables = queries, call.tables
        widest, head_dim = 2 * configs.WIDEST_PAIRS, queries.shape[-1]
        if head_dim > widest and not channel_parts(call.rotary, call.causal):
            raise ValueError(
                f"impl='triton' cannot serve this call: its kernels take head_dim {head_dim} where 32, 64, 128 or 256 "
                f"channels rotate and the others divide into runs of 32, got {call.rotary!r}; use impl='reference'"
            )
        self.cu_seqlens_q, self.capacity = tables.cu_seqlens_q, tables.capacity(layer.k)
        seqlen_q, device = queries.shape[-3], queries.device
        longest = seqlen_q if self.cu_seqlens_q is None else min(tables.max_seqlen_q, seqlen_q)
        self.stored = tables.positions is not None and _have_parts(tables.positions)
        scheme = self.call.rotary, call.causal
        if tables.positions is None:
            table = two_level_table(*scheme, coarse_rows(max(longest, self.capacity)), device)
        elif self.stored:
            table = turn_table(*scheme, device)
        else:
            table = three_level_table(*scheme, device)
        super().__init__(queries, self.call, self.cu_seqlens_q, longest, layer.k.shape[2], self.capacity, table)

        self.quantized = layer.k_scale is not None
        self.lse_shape, self.out_shape = cached_lse_shape(queries), cached_out_shape(queries, layer)
        self.head_dim_v = self.out_shape[-1]
        self.first_value = -1  # see Variant; a product takes at least SMALLEST_TILE channels of a tile
        if layer.first_value is not None and self.table.shape[-1] >= configs.SMALLEST_TILE:
            self.first_value = layer.first_value
        self.empty = not (0 not in queries.shape and layer.k.numel() and self.capacity and self.call.bands)
        self.prefills = not self.empty and self._can_prefill(layer)
        self.decodes = not self.prefills or self.cu_seqlens_q is not None
        self.decode_seqlen = configs.DECODE_SEQLEN if self.prefills else self.max_seqlen_q
        self.layout = self.new_layout = kernel_layout(layer, tables, self.decode_seqlen)
        self.page_size = 0 if tables.block_table is None else layer.k.shape[1]
        self.cache = "paged" if self.page_size else "contiguous"
        self.axes = self.rotary.axes if self.stored and self.rotary.axis else 0
        self.strides = stride_fields(layer.k), stride_fields(layer.v)
        self.placed = tables.positions is None
        self._decode_key: tuple | None = None
        self._append_key: tuple | None = None

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        if 0 in k.shape or 0 in layer.k.shape or not self.capacity:
            return
        tables = self.call.tables
        if self.append_rotary is not None and self.append_rotary.changes_channels:
            k = rotate(k, RotateCall(self.append_rotary, None, tables, self.capacity))
        key = append_key(layer, k, v)
        if key != self._append_key:
            self._append_key, self._append = key, AppendLaunch(layer, k, v, tables, self.new_layout, key)
        with current_device(k):
            self._append.run(layer, k, v)

    def attend(
        self, q: torch.Tensor, layer: CacheLayer, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if out is None:
            out = torch.empty(self.out_shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=q.device)
        if self.empty or self.cu_seqlens_q is not None:  # rows outside every sequence
            out.zero_(), lse.fill_(float("-inf"))
        if self.empty:
            return out, lse
        with current_device(q):
            if not self.placed:
                self._place_tokens(self.call.tables.positions)
            layout = self._layout_of(layer) if self.quantized else self.layout
            if self.decodes:
                self.decode(q, layer, layout, out, lse)
            if self.prefills:
                self.prefill(q, layer, layout, out, lse)
        return out, lse

    def _layout_of(self, layer: CacheLayer) -> KernelCacheLayout:
        """Returns the layout with the scales of the layer."""
        return self.layout._replace(**scale_fields(layer))

    def _place_tokens(self, positions: CachePositions | None) -> None:
        """Adds what ``place_tokens`` finds to the layout: one launch, or two if the bands use one-dimensional stored
        positions."""
        assert positions is not None
        device, tables = self.queries.device, self.call.tables
        entries = tables.block_table.shape[1] if tables.block_table is not None else 1
        queries = None if positions.queries is None else positions.queries.contiguous()
        tokens = self.batch * self.seqlen_q if self.cu_seqlens_q is None else self.seqlen_q
        rows, block_n, axes = configs.EXPLICIT_ROWS, configs.EXPLICIT_ENTRIES, self.axes
        fields = ENTRY_FIELDS + self.stored, TOKEN_FIELDS + 2 * self.num_bands + 2 * (axes or 1) * self.stored

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        layout = self.layout._replace(
            entries=numbers(self.batch, entries, fields[0]),
            tokens=numbers(tokens, fields[1]),
            visible=numbers(self.batch, 2),
        )
        variant = Variant(
            0,
            0,
            num_bands=self.num_bands,
            page_size=self.page_size,
            block_m=rows,
            block_n=block_n,
            stored=self.stored,
            axes=axes,
        )
        given = PositionTables(positions.page_positions, positions.page_first, positions.page_lengths, queries)
        options = configs.options(configs.EXPLICIT_WARPS)
        if positions.slot_positions is not None:
            layout = layout._replace(slot_positions=positions.slot_positions.contiguous())
        if self.stored and not axes:
            groups = numbers(self.batch, cdiv(self.capacity, block_n), 2)
            given = given._replace(groups=groups)
            arguments = (given, layout, self.cu_seqlens_q, self.seqlen_q)
            launcher.launch(place_slots, (self.batch * groups.shape[1],), *arguments, VARIANT=variant, **options)
        launcher.launch(
            place_tokens,
            (cdiv(self.max_seqlen_q, rows) * self.batch,),
            given,
            layout,
            self.cu_seqlens_q,
            self.device_scheme.bands,
            self.device_scheme.maps,
            self.seqlen_q,
            self.max_seqlen_q,
            CAUSAL=self.call.causal,
            VARIANT=variant,
            **options,
        )
        self.layout, self.placed = layout, True

    # ---- many queries

    def _can_prefill(self, layer: CacheLayer) -> bool:
        """Whether ``attention_chunks`` serves long queries: it rotates keys once, decoding once per query tile.

        Its workspace, one copy for each slope that rotates keys, must not exceed the cache. num_splits asks for the
        decode kernel, whose results do not depend on how tokens are divided into calls. Only the decode kernel takes
        key weights and heads of more than 512 channels.
        """
        too_wide = self.rotary.head_dim > 2 * configs.WIDEST_PAIRS
        if self.call.num_splits or layer.key_weight is not None or too_wide:
            return False
        if self.max_seqlen_q <= configs.DECODE_SEQLEN or self.call.tables.positions is not None:
            return False
        slots = layer.k.shape[0] * layer.k.shape[1]
        offsets_fit = fits_int32_offsets(layer.k) and fits_int32_offsets(layer.v)
        return self._rotated_rows().total <= slots and offsets_fit

    def _rotated_rows(self) -> RotatedRows:
        """Returns the size of the buffer for each sequence's last keys, as far back as bands that rotate keys reach."""
        if not self.lowered.k_stops:
            return RotatedRows(0, 0, 0)
        beyond = max(self.lowered.k_stops) - 1  # keys before the first query's own
        longest = max(min(self.capacity, self.max_seqlen_q + beyond), 0)
        if self.cu_seqlens_q is None:
            return RotatedRows(longest, longest, self.batch * longest)
        beyond = max(min(self.capacity, beyond), 0)
        return RotatedRows(beyond, longest, self.seqlen_q + self.seqlen_q // (configs.DECODE_SEQLEN + 1) * beyond)

    def prefill(self, q, layer: CacheLayer, layout: KernelCacheLayout, out, lse) -> None:
        """Fills the rows of out and lse that the decode kernel leaves, in two launches."""
        q, k_cache, v_cache = with_int32_offsets(q), layer.k, layer.v
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
                self.device_scheme.key_ranges,
                self.table,
                self.device_scheme.maps,
                layout,
                self.cu_seqlens_q,
                self.seqlen_q,
                rows.per_sequence,
                rows.longest,
                self.table_rows,
                self.heads_kv,
                HEADS_PER_PROGRAM=configs.ROTATE_HEADS,
                VARIANT=variant_of(self.rotary, vec, 0, 0, self.page_size, configs.ROTATE_ROWS, code_vec=code_vec),
                **configs.row_options(configs.ROTATE_WARPS, 2 * self.table.shape[-1]),
            )
        direction = "forward codes" if self.quantized else "forward" if vec > 1 else "forward unaligned"
        tile = self.tile(direction, self.cache, block_d(self.head_dim_v))
        # Only paged keys and codes are read in another way than copies.
        rotated_bands = self.lowered.rotated_bands if self.page_size or self.quantized else 0
        variant = variant_of(
            self.rotary,
            vec,
            self.num_bands,
            rotated_bands,
            self.page_size,
            tile.block_m,
            tile.block_n,
            head_dim_v=self.head_dim_v,
            code_vec=code_vec,
        )
        tensors, result, sequences = (q, k_cache, rotated_k, v_cache), Result(out, lse), (self.cu_seqlens_q, layout)
        self.launch_forward(attention_chunks, tensors, result, sequences, rows.per_sequence, variant, tile)

    # ---- few queries

    def decode(self, q, layer: CacheLayer, layout: KernelCacheLayout, out, lse) -> None:
        """Fills out and lse, in one launch or, with several splits, two. Packed queries that ``attention_chunks``
        serves are left to it. Most of the others are then a single token each."""
        v = layer.v if self.first_value < 0 else None  # no kernel reads a v that is a view of k
        key = (q.stride(), alignment_key(q, layer.k, v, *layer[2:], out))
        if key != self._decode_key:
            self._decode_key, self._decode = key, self._plan_decode(q, layer, layout, lse, key[1])
        plan = self._decode
        partial, partial_lse = (out, lse) if plan.partial is None else (plan.partial, plan.partial_lse)
        plan.decode(*self._decode_arguments(q, layer, plan.q_strides, layout, partial, partial_lse, plan.num_splits))
        if plan.combine is not None:
            plan.combine(
                partial,
                partial_lse,
                out,
                lse,
                self.cu_seqlens_q,
                self.seqlen_q,
                self.decode_seqlen,
                self.heads_q,
                plan.num_splits,
            )

    def _plan_decode(self, q, layer: CacheLayer, layout: KernelCacheLayout, lse, alignment) -> Decode:
        group, rows = self.heads_q // self.heads_kv, self.decode_seqlen * (self.heads_q // self.heads_kv)
        usual_rows = group if self.prefills else rows
        wide = not self.call.num_splits and usual_rows > configs.WIDE_ROWS
        channels, direction = self._channels(layout), "decode"
        shared = self.first_value >= 0 and len(channels) > 0
        if self.table.shape[-1] >= configs.CROWDED_PAIRS:
            crowded = self.quantized or layout.entries is not None
            direction = "decode codes" if crowded else "decode parts" if channels else "decode"
            direction = "decode shared" if shared else direction
        if wide:
            latent = shared and self.rotary.head_dim > 2 * configs.WIDEST_PAIRS
            direction = "decode shared wide" if latent else "decode wide"
        tile = self.tile(direction, self.cache, block_d(self.head_dim_v))
        aligned_maps = bool(self.lowered.maps) and layout.entries is None and self._maps_align(tile.block_n)
        if self.lowered.maps and not aligned_maps:
            # Every key has its own row of cos and sin. Requested ahead, they would fill shared memory.
            tile = tile._replace(num_stages=1)
        one_run = False
        if layout.entries is not None:
            tile, one_run = self._tile_of_explicit_positions(tile)
        programs = cdiv(rows, tile.block_m) * self.heads_kv * self.batch
        usual_programs = cdiv(usual_rows, tile.block_m) * self.heads_kv * self.batch
        if self.quantized:
            vec, code_vec = cached_vector_sizes(layer.k, layer.v, q)
        else:
            vec, code_vec = vector_of(alignment, q.dtype.itemsize, q.stride(), layer.k.stride(), layer.v.stride()), 0
        fields = (self.num_bands, self.lowered.rotated_bands, self.page_size, tile.block_m, tile.block_n)
        options = {
            "VARIANT": variant_of(
                self.rotary,
                vec,
                *fields,
                head_dim_v=self.head_dim_v,
                aligned_maps=aligned_maps,
                code_vec=code_vec,
                one_run=one_run,
                stored=self.stored,
                axes=self.axes,
                parts=1 if self.table.shape[-1] <= configs.WHOLE_PAIRS else 2,
                channels=channels,
                first_value=self.first_value,
            ),
            **tile.options,
        }
        num_splits = self._num_splits(usual_programs, q, layer, layout, lse, options)
        decode = launcher.Launch(attention_decode, (programs * num_splits,), options)
        if num_splits == 1:
            return Decode(decode, stride_fields(q))
        partial_rows = q.shape[:-1]
        if self.cu_seqlens_q is not None:
            partial_rows = (min(self.seqlen_q, self.batch * self.decode_seqlen), self.heads_q)
        lse_rows = lse.shape if self.cu_seqlens_q is None else partial_rows[::-1]
        combine = launcher.Launch(
            combine_splits,
            (self.batch * self.decode_seqlen * self.heads_q,),
            {
                "BLOCK_S": configs.COMBINE_SPLITS,
                "VARIANT": Variant(self.head_dim_v, block_d(self.head_dim_v)),
                **configs.options(configs.COMBINE_WARPS),
            },
        )
        return Decode(
            decode,
            stride_fields(q),
            num_splits,
            torch.empty(num_splits, *partial_rows, self.head_dim_v, dtype=torch.float32, device=q.device),
            torch.empty(num_splits, *lse_rows, dtype=torch.float32, device=q.device),
            combine,
        )

    def _channels(self, layout: KernelCacheLayout) -> tuple[Part, ...]:
        """Returns the parts of the head, or () where the kernel takes all of it as pairs: over a quantized cache, at
        explicit positions, and in a tile that the head does not fill."""
        parts = channel_parts(self.rotary, self.call.causal)
        padded = self.rotary.head_dim != 2 * self.table.shape[-1] and self.rotary.head_dim <= 2 * configs.WIDEST_PAIRS
        return () if self.quantized or layout.entries is not None or padded else parts

    def _maps_align(self, block_n: int) -> bool:
        """Whether every tile of block_n keys lies in one chunk, and in one group or over whole groups."""
        maps = [self.lowered.maps[rotation] for rotation in self.lowered.k_copies]
        return all(x.chunk % block_n == 0 and 0 in (x.group % block_n, block_n % x.group) for x in maps)

    def _tile_of_explicit_positions(self, tile: Tile) -> tuple[Tile, bool]:
        """Returns the tile for explicit positions, and whether each tile of keys lies in one page, so that its keys
        follow one another. Otherwise every key has its own rows of cos and sin, as with maps that do not align."""
        if self.lowered.maps and not self.stored:
            tile = tile._replace(num_stages=2)  # see decode; tiles are smaller here
        if (self.stored or self.lowered.maps) and self.table.shape[-1] >= configs.EXPLICIT_PAIRS:
            tile = tile._replace(block_n=min(tile.block_n, configs.EXPLICIT_KEYS))
        if not self.page_size:
            return tile, True
        tile = tile._replace(block_n=min(tile.block_n, self.page_size))
        if self.call.tables.leftpad is None and self.page_size % tile.block_n == 0:
            return tile, True
        return tile._replace(block_n=configs.SMALLEST_TILE, num_stages=1), False

    def _decode_arguments(self, q, layer: CacheLayer, q_strides, layout, partial, partial_lse, num_splits) -> tuple:
        k_strides, v_strides = self.strides
        return (
            view(TensorView, (q, *q_strides)),
            view(TensorView, (layer.k, *k_strides)),
            view(TensorView, (layer.k if self.first_value >= 0 else layer.v, *v_strides)),
            layer.key_weight,
            partial,
            partial_lse,
            self.scheme,
            self.cu_seqlens_q,
            layout,
            self.seqlen_q,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            num_splits,
        )

    def _num_splits(self, programs: int, q, layer: CacheLayer, layout: KernelCacheLayout, lse, options) -> int:
        """Returns the number that the call asks for, or one that fills the device. programs: blocks of one split."""
        block_n = options["VARIANT"].block_n
        if self.call.num_splits:
            return min(self.call.num_splits, MAX_SPLITS, cdiv(self.capacity, block_n))
        device = q.device
        key = (device, self.capability, q.dtype, layer.key_weight is None, *options.items())
        if key not in _resident:
            # Several splits store float32. lse stands in for their results, which are not allocated yet.
            arguments = self._decode_arguments(q, layer, stride_fields(q), layout, lse, lse, 2)
            _resident[key] = launcher.resident_blocks(self.capability, attention_decode, *arguments, **options)
        tiles = cdiv(min(self.capacity, self.lowered.reach + self.seqlen_q), block_n)
        return choose_splits(programs, tiles, _resident[key] * multiprocessors(device))


_resident: dict[tuple, int] = {}  # blocks of attention_decode that one multiprocessor holds


def _have_parts(positions: CachePositions) -> bool:
    """Whether positions may have fractions."""
    given = positions.queries is not None and positions.queries.is_floating_point()
    return given or positions.slot_positions is not None
