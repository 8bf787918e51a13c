"""Launches the kernels of attention over a cache, with one plan for the layers of a step. Sequences with few queries
use the decode kernel, and sequences with many queries use the kernel of ``chunks.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...calls.cache_tables import CacheLayer, CachePositions
from ...calls.plans import Queries, append_rotary, options_of
from ...calls.records import MAX_SPLITS, CacheCall, RotateCall, lse_shape, multiprocessors, out_shape
from ...schemes.cos_sin import coarse_rows, three_level_table, turn_table, two_level_table
from ...schemes.head_parts import Part, channel_parts, copied_parts
from ...triton_kernels import configs
from ...triton_kernels.arguments import CacheLayout as KernelCacheLayout
from ...triton_kernels.arguments import (
    PositionTables,
    Result,
    TensorView,
    Variant,
    Workspace,
    tensor_view,
)
from ...triton_kernels.cached.chunks import attention_chunks
from ...triton_kernels.cached.combine import combine_shares, combine_splits
from ...triton_kernels.cached.decode import attention_decode
from ...triton_kernels.cached.explicit_positions import ENTRY_FIELDS, TOKEN_FIELDS
from ...triton_kernels.cached.placing import place_slots, place_tokens
from ...triton_kernels.cached.shares import plan_shares
from ...triton_kernels.rotating.rotate import rotate_cached_rows
from ..shared.splits import choose_splits
from . import launcher
from .decode import DecodeCase
from .device import (
    block_d,
    cached_vector_sizes,
    current_device,
    fits_int32_offsets,
    variant_of,
    with_int32_offsets,
)
from .divisions import Decode, combine_launch, share_workspace
from .launcher import cdiv
from .plan import LaunchPlan
from .rotated import rotate
from .writing import (
    AppendLaunch,
    alignment_key,
    append_key,
    kernel_layout,
    scale_fields,
    stride_fields,
    vector_of,
    view,
)


def unsupported_positions(positions: CachePositions) -> str:
    """Returns "", because these kernels support all tables."""
    return ""


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries) -> TritonCachePlan:
    """Plans the layers of a step, as ``CacheBackend`` describes."""
    return TritonCachePlan(call, layer, queries)


class RotatedRows(NamedTuple):
    """The size of the workspace for rotated keys, in rows. per_sequence: the argument `rows` of copied_keys in
    triton_kernels/tiles.py. longest: the largest number of rows of a sequence. total: the rows of all sequences."""

    per_sequence: int
    longest: int
    total: int


class TritonCachePlan(LaunchPlan):
    """Attention over a cache for the layers of a step, as ``protocol.BackendPlan`` describes it.

    ``attention_decode`` computes sequences with few queries, and ``attention_chunks`` computes sequences with many
    queries.

    Kernels whose results depend only on the tables run once, for the first layer. The layers share one workspace, so
    they must run on one stream.
    """

    def __init__(self, call: CacheCall, layer: CacheLayer, queries: Queries):
        self.append_rotary, self.call = append_rotary(call), call.for_backend() if call.rotated_keys else call
        self.queries, tables = queries, call.tables
        widest, head_dim = 2 * configs.WIDEST_PAIRS, queries.shape[-1]
        if head_dim > widest and not channel_parts(call.rotary, call.causal):
            raise ValueError(
                f"impl='triton' cannot serve this call: its kernels support head_dim {head_dim} only if 32, 64, 128 or "
                f"256 channels rotate and the other channels divide into runs of 32, got {call.rotary!r}; use "
                "impl='reference'"
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
        self.lse_shape, self.out_shape = lse_shape(queries), out_shape(queries, layer.v)
        self.head_dim_v = self.out_shape[-1]
        self.first_value = -1  # see Variant; a matrix product needs at least SMALLEST_TILE channels
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
        """Launches ``place_tokens`` and adds the tensors that it fills to the layout. If positions may have fractions
        and the scheme is not axial, ``place_slots`` is launched first."""
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
        """Whether ``attention_chunks`` computes the sequences with many queries. ``attention_chunks`` rotates keys
        once, while the decode kernel rotates keys once per query tile.

        The workspace of ``attention_chunks`` holds one copy for each rotation of keys, and must not have more rows than
        the cache. num_splits requests the decode kernel, whose results do not depend on how tokens are divided into
        calls. Only the decode kernel supports the options of a layer and heads of more than 512 channels.
        """
        too_wide = self.rotary.head_dim > 2 * configs.WIDEST_PAIRS
        if self.call.num_splits or options_of(layer, False) or too_wide:
            return False
        if self.max_seqlen_q <= configs.DECODE_SEQLEN or self.call.tables.positions is not None:
            return False
        slots = layer.k.shape[0] * layer.k.shape[1]
        offsets_fit = fits_int32_offsets(layer.k) and fits_int32_offsets(layer.v)
        return self._rotated_rows().total <= slots and offsets_fit

    def _rotated_rows(self) -> RotatedRows:
        """Returns the size of the workspace for rotated keys. The workspace holds each sequence's last keys, as far
        back as the bands that rotate keys reach."""
        if not self.lowered.k_stops:
            return RotatedRows(0, 0, 0)
        beyond = max(self.lowered.k_stops) - 1  # number of keys before the first query's own key
        longest = max(min(self.capacity, self.max_seqlen_q + beyond), 0)
        if self.cu_seqlens_q is None:
            return RotatedRows(longest, longest, self.batch * longest)
        beyond = max(min(self.capacity, beyond), 0)
        copies = min(self.batch, self.seqlen_q // (configs.DECODE_SEQLEN + 1))  # sequences that may have a copy
        return RotatedRows(beyond, longest, self.seqlen_q + copies * beyond)

    def prefill(self, q, layer: CacheLayer, layout: KernelCacheLayout, out, lse) -> None:
        """Fills the rows of out and lse that the decode kernel does not fill, in at most two launches."""
        q, k_cache, v_cache = with_int32_offsets(q), layer.k, layer.v
        copies, rows = len(self.lowered.k_copies), self._rotated_rows()
        vec, code_vec = cached_vector_sizes(k_cache, v_cache, q)
        channels, rotated_k = self._copied_channels(), k_cache
        if rows.total:
            width = channels[0].width if channels else q.shape[-1]
            rotated_k = q.new_empty(copies, rows.total, k_cache.shape[2], width)
            grid = (
                cdiv(rows.longest, configs.ROTATE_ROWS) * self.batch,
                cdiv(self.heads_kv, configs.ROTATE_HEADS),
                copies,
            )
            sizes = 0, 0, self.page_size, configs.ROTATE_ROWS
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
                VARIANT=variant_of(self.rotary, vec, *sizes, code_vec=code_vec, channels=channels),
                **configs.row_options(configs.ROTATE_WARPS, 2 * self.table.shape[-1]),
            )
        direction = "forward codes" if self.quantized else "forward" if vec > 1 else "forward unaligned"
        tile = self.tile(direction, self.cache, block_d(self.head_dim_v))
        # Contiguous keys that are not quantized are loaded in the same way as rotated copies.
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
            channels=channels,
        )
        tensors, result, sequences = (q, k_cache, rotated_k, v_cache), Result(out, lse), (self.cu_seqlens_q, layout)
        self.launch_forward(attention_chunks, tensors, result, sequences, rows.per_sequence, variant, tile)

    def _copied_channels(self) -> tuple[Part, ...]:
        """Returns the part of the head that rotated copies hold, or () if they hold all channels. Copies of quantized
        keys hold all channels, because one load cannot read both rotated and quantized values."""
        return () if self.quantized else copied_parts(self.rotary, self.call.causal)

    # ---- few queries

    def decode(self, q, layer: CacheLayer, layout: KernelCacheLayout, out, lse) -> None:
        """Fills out and lse in one launch, or in two if the keys of a sequence can be divided. If keys are divided into
        shares (triton_kernels/cached/shares.py), the first layer also launches ``plan_shares``. Skips sequences that
        ``attention_chunks`` computes."""
        v = layer.v if self.first_value < 0 else None  # no kernel reads a v that is a view of k
        key = (q.stride(), alignment_key(q, layer.k, v, *layer[2:], out))
        if key != self._decode_key:
            self._decode_key, self._decode = key, self._plan_decode(q, layer, layout, out, lse, key[1])
        plan = self._decode
        partial = plan.partial or Result(out, lse)
        plan.decode(*self._decode_arguments(q, layer, plan.q_strides, layout, partial, plan.num_splits, plan.workspace))
        if plan.combine is None:
            return
        sequences, heads = (self.cu_seqlens_q, self.seqlen_q), (self.heads_q, self.heads_kv)
        if plan.workspace is None:
            plan.combine(*partial, out, lse, *sequences, self.decode_seqlen, self.heads_q, plan.num_splits)
        else:
            plan.combine(plan.workspace, out, lse, *sequences, plan.rows, *heads)

    @property
    def usual_rows(self) -> int:
        """Returns the query rows per key head in the usual call of the plan. Beside prompts, that is one token."""
        return self.heads_q // self.heads_kv * (1 if self.prefills else self.decode_seqlen)

    def _plan_decode(self, q, layer: CacheLayer, layout: KernelCacheLayout, out, lse, alignment) -> Decode:
        case = DecodeCase.of(self, layout.entries is not None)
        tile, aligned_maps, one_run = case.tile(self)
        rows = self.heads_q // self.heads_kv * self.decode_seqlen
        segments, usual_segments = (
            cdiv(each, tile.block_m) * self.heads_kv * self.batch for each in (rows, self.usual_rows)
        )
        if self.quantized:
            vec, code_vec = cached_vector_sizes(layer.k, layer.v, q)
        else:
            vec, code_vec = vector_of(alignment, q.dtype.itemsize, q.stride(), layer.k.stride(), layer.v.stride()), 0
        several = self.batch > 1 and self.capacity > tile.block_n and not self.call.num_splits
        shares = several and case.shares_fit(self)
        variant = variant_of(
            self.rotary,
            vec,
            self.num_bands,
            self.lowered.rotated_bands,
            self.page_size,
            tile.block_m,
            tile.block_n,
            head_dim_v=self.head_dim_v,
            aligned_maps=aligned_maps,
            code_vec=code_vec,
            one_run=one_run,
            stored=self.stored,
            axes=self.axes,
            parts=1 if self.table.shape[-1] <= configs.WHOLE_PAIRS else 2,
            channels=case.parts,
            first_value=self.first_value,
            shares=shares,
            key_groups=case.key_groups(self, tile, aligned_maps, shares, layer.key_weight is not None),
        )
        options = {"VARIANT": variant, **tile.options}
        if shares:
            size = self.rotary.head_dim, self.itemsize, self.num_bands
            options |= configs.share_options(tile, self.capability, *size)
            return self._plan_shares(q, layer, layout, Result(out, lse), segments, options)
        num_splits = self._num_splits(usual_segments, q, layer, layout, lse, options)
        decode = launcher.Launch(attention_decode, (segments * num_splits,), options)
        if num_splits == 1:
            return Decode(decode, stride_fields(q), num_splits)
        partial_rows = q.shape[:-1]
        if self.cu_seqlens_q is not None:
            partial_rows = (min(self.seqlen_q, self.batch * self.decode_seqlen), self.heads_q)
        lse_rows = lse.shape if self.cu_seqlens_q is None else partial_rows[::-1]
        combine = combine_launch(combine_splits, self.batch * self.decode_seqlen * self.heads_q, self.head_dim_v)
        partial = Result(
            torch.empty(num_splits, *partial_rows, self.head_dim_v, dtype=torch.float32, device=q.device),
            torch.empty(num_splits, *lse_rows, dtype=torch.float32, device=q.device),
        )
        return Decode(decode, stride_fields(q), num_splits, partial, None, combine)

    def _plan_shares(self, q, layer: CacheLayer, layout, result: Result, segments: int, options) -> Decode:
        """Launches ``plan_shares``. The number of programs is the number of blocks that the device holds at once, but
        at most the number of key tiles. segments: number of tiles of query rows of all heads and sequences."""
        variant = options["VARIANT"]

        def workspace(programs: int) -> Workspace:
            return share_workspace(programs, segments, self.batch, variant.block_m, self.head_dim_v, q.device)

        def arguments() -> tuple:
            return self._decode_arguments(q, layer, stride_fields(q), layout, result, 0, workspace(1))

        resident = self._resident_blocks(q, layer, arguments, options)
        programs = min(resident, segments * cdiv(self.capacity, variant.block_n))
        rows = min(variant.block_m, self.decode_seqlen * (self.heads_q // self.heads_kv))
        combine = None
        if programs > 1:
            combine = combine_launch(combine_shares, (programs - 1) * rows, self.head_dim_v, variant.block_m)
        decode = launcher.Launch(attention_decode, (programs,), options)
        plan = Decode(decode, stride_fields(q), 0, workspace=workspace(programs), combine=combine, rows=rows)
        launcher.launch(
            plan_shares,
            (programs,),
            plan.workspace,
            layout,
            self.cu_seqlens_q,
            self.device_scheme.bands,
            self.device_scheme.maps,
            self.seqlen_q,
            self.heads_q,
            self.heads_kv,
            self.batch,
            VARIANT=Variant(0, 0, num_bands=self.num_bands, block_m=variant.block_m, block_n=variant.block_n),
            **configs.options(configs.SHARE_WARPS),
        )
        return plan

    def _decode_arguments(
        self, q, layer: CacheLayer, q_strides, layout, result: Result, num_splits: int, workspace: Workspace | None
    ) -> tuple:
        k_strides, v_strides = self.strides
        return (
            view(TensorView, (q, *q_strides)),
            view(TensorView, (layer.k, *k_strides)),
            view(TensorView, (layer.k if self.first_value >= 0 else layer.v, *v_strides)),
            layer.key_weight,
            *result,
            self.scheme,
            self.cu_seqlens_q,
            layout,
            self.seqlen_q,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            num_splits,
            self.batch,
            workspace,
        )

    def _num_splits(self, segments: int, q, layer: CacheLayer, layout: KernelCacheLayout, lse, options) -> int:
        """Returns the number of splits that the call requests, or else a number that fills the device. segments: blocks
        of one split."""
        block_n = options["VARIANT"].block_n
        if self.call.num_splits:
            return min(self.call.num_splits, MAX_SPLITS, cdiv(self.capacity, block_n))

        def arguments() -> tuple:
            # Several splits store their results in float32. lse stands in for these tensors, which do not exist yet.
            return self._decode_arguments(q, layer, stride_fields(q), layout, Result(lse, lse), 2, None)

        resident = self._resident_blocks(q, layer, arguments, options)
        tiles = cdiv(min(self.capacity, self.lowered.reach + self.seqlen_q), block_n)
        return choose_splits(segments, tiles, resident)

    def _resident_blocks(self, q, layer: CacheLayer, arguments: Callable[[], tuple], options) -> int:
        """Returns how many blocks of ``attention_decode`` the device holds at once."""
        given = self.cu_seqlens_q is None, *options_of(layer, False)
        key = (q.device, self.capability, q.dtype, *given, *options.items())
        if key not in _resident:
            blocks = launcher.resident_blocks(self.capability, attention_decode, *arguments(), **options)
            if blocks is None:  # not known, so not remembered
                return multiprocessors(q.device)
            _resident[key] = blocks
        return _resident[key] * multiprocessors(q.device)


_resident: dict[tuple, int] = {}  # number of blocks of attention_decode that one multiprocessor holds


def _have_parts(positions: CachePositions) -> bool:
    """Whether positions may have fractions."""
    given = positions.queries is not None and positions.queries.is_floating_point()
    return given or positions.slot_positions is not None
