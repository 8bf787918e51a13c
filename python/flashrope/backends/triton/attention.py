"""Launches the kernels of ``attention`` and ``attention_varlen``, with one plan per call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...calls.records import AttentionCall, Kept, KeptShapes, lse_shape, multiprocessors, out_shape
from ...schemes.cos_sin import coarse_rows, padded_pairs, position_table, two_level_table
from ...schemes.head_parts import Part, copied_parts
from ...schemes.lowered import lower
from ...schemes.scales import UNSCALED
from ...triton_kernels import configs
from ...triton_kernels.arguments import (
    NO_CACHE,
    CuSeqlens,
    Result,
    Variant,
    banded_view,
    pair_ranges,
    tensor_view,
)
from ...triton_kernels.attention.backward import attention_grad_kv, attention_statistics
from ...triton_kernels.attention.forward import attention_forward
from ...triton_kernels.attention.grad_q import attention_finish_grad_q, attention_grad_q
from ...triton_kernels.rotating.rotate import rotate_rows
from . import launcher
from .accumulators import held_once
from .deterministic import ScoreLayout, layout_of
from .device import block_d, current_device, variant_of, vector_size, with_int32_offsets
from .launcher import cdiv
from .plan import LaunchPlan


def kept_shapes(k: torch.Tensor, call: AttentionCall) -> KeptShapes:
    """Returns the shapes of ``Kept``. rotated_k has one copy of the keys for every distinct rotation. table is empty
    unless the caller gave positions."""
    table = (0,) if call.positions is None else (2, *call.positions.shape[:2], 2, padded_pairs(k.shape[-1]))
    return KeptShapes(_rotated_shape(k, call), table)


def _rotated_shape(k: torch.Tensor, call: AttentionCall) -> tuple[int, ...]:
    copies = len(lower(call.rotary, call.causal).k_copies)
    parts = () if call.whole_keys else copied_parts(call.rotary, call.causal)
    return (copies, _rows(k), k.shape[-2], parts[0].width if parts else k.shape[-1]) if copies else (0,)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall):
    """Returns (out, lse, kept), as ``AttentionBackend`` describes."""
    q, k, v = map(with_int32_offsets, (q, k, v))
    out = q.new_empty(out_shape(q, v))
    lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
    table = position_table(call.rotary, call.positions) if call.positions is not None else lse.new_empty(0)
    with current_device(q):
        rotated_k = k.new_empty(_rotated_shape(k, call))
        plan = AttentionPlan(q, k, v, call, table, rotated_k)
        if call.cu_seqlens_q is not None or plan.is_empty:
            out.zero_()  # rows outside every sequence
            lse.fill_(float("-inf"))
        if not plan.is_empty:
            plan.rotate_keys(k, rotated_k)
            plan.attend(q, k, rotated_k, v, out, lse)
    return out, lse, Kept(rotated_k, table)


def backward(grad_out, grad_lse, q, k, v, out, lse, kept: Kept, call: AttentionCall):
    """Returns the gradients of raw q, k and v, as ``AttentionBackend`` describes."""
    if call.deterministic is False:
        _alert_not_deterministic()
    q, k, v = map(with_int32_offsets, (q, k, v))
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    grad_out = torch.zeros_like(out) if grad_out is None else with_int32_offsets(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    with current_device(q):
        plan = AttentionPlan(q, k, v, call, kept.table, kept.rotated_k, grad_out)
        if call.cu_seqlens_q is not None or plan.is_empty:
            for grad in (grad_q, grad_k, grad_v):
                grad.zero_()
        if not plan.is_empty:
            rotated_q = plan.rotated_queries(q)
            statistics = plan.statistics(out, grad_out, lse, grad_lse)
            inputs = GradientInputs(rotated_q, k, kept.rotated_k, v, grad_out, statistics)
            if plan.is_reproducible(call.deterministic):
                plan.reproducible_gradients(inputs, grad_k, grad_v, grad_q)
            else:
                plan.finish_grad_q(*plan.grad_kv_and_sums(inputs, grad_k, grad_v), grad_q)
    return grad_q, grad_k, grad_v


def _alert_not_deterministic() -> None:
    """Raises or warns if torch requests deterministic algorithms, as torch does for its own operators."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "deterministic: expected True under torch.use_deterministic_algorithms(True), got False; the backward of the "
        "Triton kernels would add up the gradient of q with atomics"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


class GradientInputs(NamedTuple):
    """The tensors that both gradient kernels read. rotated_q: (band, *shape of q). statistics: (heads, rows, 2)."""

    rotated_q: torch.Tensor
    k: torch.Tensor
    rotated_k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    statistics: torch.Tensor


class AttentionPlan(LaunchPlan):
    """The launches of one call of attention, forward or backward. table, rotated_k: as in ``Kept``. The forward fills
    rotated_k later."""

    def __init__(self, q, k, v, call: AttentionCall, table, rotated_k, grad_out=None):
        self.seqlen_k, self.head_dim_v, positions = k.shape[-3], v.shape[-1], call.positions
        whole = rotated_k.shape[-1] == k.shape[-1]  # the copies hold all channels
        self.causal, self.channels = call.causal, () if whole else copied_parts(call.rotary, call.causal)
        if positions is None:
            rows = coarse_rows(max(q.shape[-3], self.seqlen_k))
            table = two_level_table(call.rotary, call.causal, rows, q.device)
        else:
            positions = scalar_positions(positions)
        self.max_seqlen_k = min(call.max_seqlen_k, self.seqlen_k)
        lengths = (min(call.max_seqlen_q, q.shape[-3]), k.shape[-2], self.max_seqlen_k)
        super().__init__(q, call, call.cu_seqlens_q, *lengths, table, positions)
        self.cu_seqlens = CuSeqlens(call.cu_seqlens_q, call.cu_seqlens_k)
        self.vec = vector_size(q, k, v) if grad_out is None else vector_size(q, k, v, grad_out)
        self.widths = configs.training_widths(self.capability, self.rotary.head_dim, self.head_dim_v, self.itemsize)
        self.is_empty = q.numel() == 0 or k.numel() == 0 or not self.num_bands

    def rotate_keys(self, k, rotated_k) -> None:
        """Fills rotated_k (copy, row, head, channel) with the channels of ``copied_parts``."""
        lengths = (self.seqlen_k, self.seqlen_q, self.max_seqlen_k)
        scheme = self.scheme._replace(**UNSCALED._asdict())
        cu_seqlens = (self.cu_seqlens.k, self.cu_seqlens.q)
        rotations = self.device_scheme.k_copies
        self._rotate(k, rotated_k, self.lowered.k_copies, rotations, scheme, cu_seqlens, lengths, self.channels)

    def rotated_queries(self, q) -> torch.Tensor:
        """Returns q rotated for every band and multiplied by its query scale, (band, *shape of q). If no
        query is rotated or scaled, q is expanded without a copy."""
        if not any(self.lowered.q_rotations) and self.rotary.query_scale == UNSCALED:
            return q.expand(self.num_bands, *q.shape)
        rotated_q = q.new_empty(self.num_bands, *q.shape)
        lengths = (self.seqlen_q, self.seqlen_k, self.max_seqlen_q)
        self._rotate(
            q,
            rotated_q.view(self.num_bands, _rows(q), *q.shape[-2:]),
            self.lowered.q_rotations,
            self.device_scheme.q_rotations,
            self.scheme,
            self.cu_seqlens,
            lengths,
        )
        return rotated_q

    def _rotate(self, x, out, copies, rotations, scheme, cu_seqlens, lengths, channels: tuple[Part, ...] = ()) -> None:
        if not copies:
            return
        heads, seqlen = x.shape[-2], lengths[2]
        grid = (
            cdiv(seqlen, configs.ROTATE_ROWS) * self.batch,
            cdiv(heads, configs.ROTATE_HEADS),
            len(copies),
        )
        variant = variant_of(self.rotary, self.vec, 0, 0, 0, configs.ROTATE_ROWS, channels=channels)
        launcher.launch(
            rotate_rows,
            grid,
            tensor_view(x),
            tensor_view(out),
            rotations,
            scheme,
            *cu_seqlens,
            *lengths,
            self.table_rows,
            heads,
            NO_CACHE,
            HEADS_PER_PROGRAM=configs.ROTATE_HEADS,
            VARIANT=variant,
            **configs.row_options(configs.ROTATE_WARPS, variant.block_d),
        )

    def attend(self, q, k, rotated_k, v, out, lse) -> None:
        tile, variant = self._tile("forward" if self.vec > 1 else "forward unaligned")
        rotated_k = rotated_k if self.lowered.k_copies else k
        tensors, result, sequences = (q, k, rotated_k, v), Result(out, lse), (self.cu_seqlens,)
        self.launch_forward(attention_forward, tensors, result, sequences, self.seqlen_k, variant, tile)

    def statistics(self, out, grad_out, lse, grad_lse) -> torch.Tensor:
        """Returns lse in log2 units and delta, float32 (heads, rows, 2). Sequences start at multiples of
        STATISTICS_ROWS."""
        rows = (_rows(out) // configs.STATISTICS_ROWS + self.batch) * configs.STATISTICS_ROWS
        statistics = lse.new_empty(self.heads_q, rows, 2)
        launcher.launch(
            attention_statistics,
            (cdiv(self.max_seqlen_q, configs.STATISTICS_ROWS) * self.batch * self.heads_q,),
            out,
            tensor_view(grad_out),
            lse,
            grad_lse,
            statistics,
            rows,
            self.cu_seqlens.q,
            self.seqlen_q,
            self.max_seqlen_q,
            self.heads_q,
            VARIANT=self._variant(0, 0, 0, configs.STATISTICS_ROWS),
            **configs.row_options(configs.STATISTICS_WARPS, block_d(self.head_dim_v)),
        )
        return statistics

    def is_reproducible(self, deterministic: bool | None) -> bool:
        """Whether the backward computes dQ without atomics. deterministic: as in ``AttentionCall``."""
        has_grad_q = configs.has_grad_q(self.capability, self.itemsize, *self._widths)
        if deterministic is not None or torch.are_deterministic_algorithms_enabled():
            if deterministic is not False and not has_grad_q:
                raise ValueError(
                    "deterministic: reproducible gradients are not supported by impl='triton' in float32 beyond "
                    f"head_dim 256 on sm_{self.capability} (dQ takes more shared memory than a block has), got "
                    f"head_dim {max(self.rotary.head_dim, self.head_dim_v)}; use deterministic=False"
                )
            return deterministic is not False
        if not has_grad_q:
            return False
        return not configs.atomics_are_faster(self.capability, self.itemsize, *self._widths)

    @property
    def _widths(self) -> tuple[int, int]:
        """Returns block_d and block_dv."""
        return 2 * self.table.shape[-1], block_d(self.head_dim_v)

    def reproducible_gradients(self, inputs: GradientInputs, grad_k, grad_v, grad_q) -> None:
        """Fills dK and dV, then dQ. If there is a ``score_layout``, both kernels run for some sequences and heads at a
        time, and the first one stores gradients of scores for the second."""
        kv_tile, kv_variant = self._grad_kv_tile("grad_kv")
        layout = self.score_layout(kv_tile.block_n, inputs.k.device)
        q_tile, q_variant = self._tile("grad_q" if layout is None else "grad_q scores")
        kv_programs = cdiv(self.max_seqlen_k, kv_tile.block_n)
        q_programs = cdiv(self.max_seqlen_q, q_tile.block_m) * (self.heads_q // self.heads_kv)
        launches: Iterable[tuple[Any, int]] = [(None, self.batch * self.heads_kv)]
        if layout is not None:
            launches = layout.launches(inputs.k.new_empty(layout.elements))
        for score_grads, pairs in launches:
            kv, q = (grad_k, grad_v, None, score_grads), (grad_q, score_grads)
            self._gradient(attention_grad_kv, kv_programs * pairs, inputs, kv, self.max_seqlen_k, kv_variant, kv_tile)
            self._gradient(attention_grad_q, q_programs * pairs, inputs, q, self.max_seqlen_q, q_variant, q_tile)

    def score_layout(self, block_n: int, device: torch.device) -> ScoreLayout | None:
        """Returns how to store the gradients of scores. None: the kernel of dQ computes them again.

        block_n: the number of keys of a block of dK and dV."""
        if not configs.storing_is_faster(self.capability, self.itemsize, *self._widths):
            return None
        packed, key_tiles = self.cu_seqlens.q is not None, cdiv(self.max_seqlen_k, block_n)
        if packed:  # blocks beyond the end of a shorter sequence have no work
            key_tiles = min(key_tiles * self.batch, cdiv(self.seqlen_k, block_n) + self.batch)
        sizes = self.seqlen_q, self.max_seqlen_k, self.batch, self.heads_q, self.heads_kv, self.itemsize
        layout = layout_of(*sizes, causal=self.causal, packed=packed)
        return layout if layout and layout.is_busy(key_tiles, multiprocessors(device)) else None

    def grad_kv_and_sums(self, inputs: GradientInputs, grad_k, grad_v) -> tuple[torch.Tensor, Variant]:
        """Fills dK and dV. Returns (the sums of dQ, the variant that says in which order they are stored). The sums are
        float32 (band, head, row of the statistics, channel)."""
        tile, variant = self._grad_kv_tile("grad_qkv")
        rows = inputs.statistics.shape[1]
        sums = inputs.statistics.new_zeros(self.num_bands, self.heads_q, rows, variant.padded_d)
        grads = (grad_k, grad_v, sums, None)
        if floats := configs.red_floats(self.capability, self.itemsize):
            with_red, arguments = variant._replace(red_floats=floats), self._arguments(inputs, grads, self.max_seqlen_k)
            if launcher.ir_allows(held_once, attention_grad_kv, *arguments, VARIANT=with_red, **tile.options):
                variant = with_red
        programs = cdiv(self.max_seqlen_k, tile.block_n) * self.batch * self.heads_kv
        self._gradient(attention_grad_kv, programs, inputs, grads, self.max_seqlen_k, variant, tile)
        return sums, variant

    def _grad_kv_tile(self, direction: str):
        """Returns the tile and the variant of the kernel for dK and dV."""
        if self.vec == 1 and max(self._widths) > 256:  # the usual tile may then exceed the shared memory
            direction += " unaligned"
        tile, variant = self._tile(direction)
        return tile, variant._replace(query_rows=configs.query_rows(self.capability, tile, variant.block_d))

    def finish_grad_q(self, sums: torch.Tensor, summed: Variant, grad_q) -> None:
        """Fills dQ from its sums. sums, summed: the results of ``grad_kv_and_sums``."""
        rows, heads = configs.ROTATE_ROWS, configs.ROTATE_HEADS
        variant = self._in_ranges(variant_of(self.rotary, self.vec, self.num_bands, 0, 0, rows))
        launcher.launch(
            attention_finish_grad_q,
            (cdiv(self.max_seqlen_q, rows) * self.batch, cdiv(self.heads_q, heads)),
            sums,
            sums.shape[2],
            tensor_view(grad_q),
            self.scheme,
            self.cu_seqlens,
            self.seqlen_q,
            self.seqlen_k,
            self.max_seqlen_q,
            self.table_rows,
            self.heads_q,
            HEADS_PER_PROGRAM=heads,
            VARIANT=variant._replace(red_floats=summed.red_floats, query_rows=summed.query_rows),
            **configs.row_options(configs.ROTATE_WARPS, variant.block_d),
        )

    def _gradient(self, kernel, programs, inputs: GradientInputs, grads, max_seqlen, variant, tile) -> None:
        arguments = self._arguments(inputs, grads, max_seqlen)
        launcher.launch(kernel, (programs,), *arguments, VARIANT=variant, **tile.options)

    def _arguments(self, inputs: GradientInputs, grads, max_seqlen: int) -> tuple:
        """Returns the kernel arguments common to grad_kv and grad_q."""
        rotated_q, k, rotated_k, v, grad_out, statistics = inputs
        return (
            banded_view(rotated_q),
            tensor_view(k),
            tensor_view(rotated_k if self.lowered.k_copies else k),
            tensor_view(v),
            tensor_view(grad_out),
            statistics,
            statistics.shape[1],
            *grads,
            self.scheme,
            self.cu_seqlens,
            self.seqlen_q,
            self.seqlen_k,
            max_seqlen,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
        )

    def _tile(self, direction: str):
        """Returns the tile and the variant of a kernel."""
        tile = self.tile(direction, block_dv=block_d(self.head_dim_v), widths=self.widths)
        variant = self._in_ranges(self._variant(self.num_bands, 0, 0, tile.block_m, tile.block_n))
        return tile, variant._replace(channels=self.channels)

    def _in_ranges(self, variant: Variant) -> Variant:
        """Returns the variant of a kernel that divides the head into tiles of ``configs.training_widths``."""
        if not self.widths:
            return variant
        return variant._replace(padded_d=sum(self.widths), pair_ranges=pair_ranges(self.widths))

    def _variant(self, *fields: int) -> Variant:
        return variant_of(self.rotary, self.vec, *fields, head_dim_v=self.head_dim_v)


def _rows(x: torch.Tensor) -> int:
    return x.shape[0] * x.shape[1] if x.ndim == 4 else x.shape[0]


def scalar_positions(positions: torch.Tensor) -> torch.Tensor:
    """Returns the positions for log n, float32 (batch, seqlen). Axial schemes have no log n, so their result is not
    read."""
    return (positions if positions.ndim == 2 else positions[..., 0]).to(torch.float32).contiguous()
