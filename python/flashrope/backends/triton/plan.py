"""Defines ``LaunchPlan``, the part that all launches of a call share. A plan holds the scheme on the device, chooses
tiles and launches the forward."""

from __future__ import annotations

import torch

from ...calls.plans import Queries
from ...calls.records import AttentionCall, CacheCall
from ...triton_kernels import configs
from ...triton_kernels.arguments import Result, SchemeArguments, Variant, tensor_view
from ...triton_kernels.configs import Tile
from . import chosen_tiles, launcher
from .device import compute_capability, scheme_on
from .launcher import cdiv


class LaunchPlan:
    """The base of ``AttentionPlan`` and ``TritonCachePlan``. It holds what the launches of one call have in common.

    q: the queries, or ``Queries``. The plan keeps no reference to it.
    keys: the length of the longest sequence of keys, or the capacity of the cache.
    table, positions: fields of ``SchemeArguments``.
    """

    def __init__(
        self,
        q: torch.Tensor | Queries,
        call: AttentionCall | CacheCall,
        cu_seqlens_q: torch.Tensor | None,
        max_seqlen_q: int,
        heads_kv: int,
        keys: int,
        table: torch.Tensor,
        positions: torch.Tensor | None = None,
    ):
        self.rotary, self.table, scheme = call.rotary, table, scheme_on(call.rotary, call.causal, q.device)
        self.device_scheme, self.lowered, self.num_bands = scheme, scheme.lowered, len(scheme.lowered.bands)
        self.scheme = SchemeArguments(
            scheme.bands, table, positions, scheme.maps, call.score_scale, *call.rotary.query_scale
        )
        self.table_rows = table.shape[1] if positions is None else table.shape[1] * table.shape[2]
        self.seqlen_q, self.heads_q, _ = q.shape[-3:]  # if packed, seqlen_q is the number of all queries
        self.batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        self.max_seqlen_q, self.heads_kv, self.keys = max_seqlen_q, heads_kv, keys
        self.capability, self.itemsize = compute_capability(q.device), q.dtype.itemsize

    def tile(self, direction: str, cache: str = "", block_dv: int = 0, widths: tuple[int, ...] = ()) -> Tile:
        """Returns the tile of a launch, from ``tiles.choose``. widths: from ``configs.training_widths``."""
        device, block_d, grouped = self.table.device, 2 * self.table.shape[-1], self.heads_q > self.heads_kv
        if widths:
            block_d = block_dv = sum(widths)
        fields = (block_d, self.itemsize, self.num_bands, self.keys, grouped, cache, block_dv)
        return chosen_tiles.choose(direction, device, self.capability, *fields)

    def launch_forward(
        self,
        kernel,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        result: Result,
        sequences: tuple,
        rows_k: int,
        variant: Variant,
        tile: Tile,
    ) -> None:
        """Launches the forward kernel of ``forward.py`` or of ``chunks.py``.

        tensors: queries, keys, rotated copies of keys, and values. sequences: the kernel's arguments that hold the
        bounds of sequences. rows_k: the argument seqlen_k of the kernel in ``forward.py``, or the argument rows_copied
        of the kernel in ``chunks.py``."""
        parts = configs.forward_parts(tile, variant.block_d, variant.block_dv, self.itemsize)
        lagged = tile.lagged and not variant.page_size and not variant.code_vec
        variant = variant._replace(parts=1 if variant.code_vec or variant.pair_ranges else parts, lagged=lagged)
        launcher.launch(
            kernel,
            (cdiv(self.max_seqlen_q, tile.block_m) * self.batch * self.heads_q,),
            *map(tensor_view, tensors),
            result,
            self.scheme,
            *sequences,
            self.seqlen_q,
            rows_k,
            self.max_seqlen_q,
            self.table_rows,
            self.heads_q,
            self.heads_kv,
            VARIANT=variant,
            **tile.options,
        )
