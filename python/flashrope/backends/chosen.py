"""The backend for ``impl=None``: it chooses the backend of every call, and of every backward by itself.

On the CPU the compiled kernels (``cpu``) serve what they can, and PyTorch's kernels (``sdpa``) the rest. On a GPU the
Triton kernels serve every call, except in training calls for which a row of ``ROWS`` names PyTorch's kernels. A row
enters the table only for calls that were timed, or for GPUs on which the Triton kernels never ran.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ..calls import addresses
from ..calls.cache_tables import CacheLayer, CachePositions, CacheTables
from ..calls.plans import CACHE_OPTIONS as CACHE_OPTIONS
from ..calls.plans import Queries
from ..calls.records import AttentionCall, CacheCall, KeptShapes, RotateCall
from ..schemes.bands import EVERYWHERE
from ..schemes.scales import UNSCALED
from . import others
from .shared.step_part import PartsPlan, StepPart, joined

SWITCH = "FLASHROPE_SDPA"  # the environment variable that turns the rows off, if it is "0"


class Row(NamedTuple):
    """Calls of attention that PyTorch's kernels serve: 16-bit types, batches of equal lengths, one band without a
    window, v with q's head_dim, and no explicit positions, scaled queries or reproducible gradients.

    capabilities: those of the GPUs, 90 for 9.0. head_dim: the largest. keys: the smallest seqlen_k. directions: passes.
    Gradients of lse always take the Triton kernels. reason: what was timed.
    """

    capabilities: range
    head_dim: int
    keys: int
    directions: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        low, high = self.capabilities[0], self.capabilities[-1]
        return (
            f"sm_{low} to sm_{high}, {' and '.join(self.directions)}: one band, float16 and bfloat16, head_dim up to "
            f"{self.head_dim}, from {self.keys:,} keys on ({self.reason})"
        )


BOTH = "forward", "backward"
ROWS = (
    Row(range(90, 100), 128, 1024, BOTH, "an H200: a rotation and cuDNN take 0.75 of Triton's time, in training 0.72"),
    Row(range(100, 110), 128, 1024, BOTH, "not timed here: published figures only"),
)


class Shape(NamedTuple):
    """What the choice depends on. No device is needed."""

    capability: int | None  # 90 for 9.0; None: not a GPU of NVIDIA
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int


def row_of(shape: Shape, call: AttentionCall) -> Row | None:
    """Returns the row that has the GPU, the type, the head_dim and the scheme of a call, whatever its lengths."""
    if os.environ.get(SWITCH) == "0" or shape.dtype not in (torch.float16, torch.bfloat16):
        return None
    if call.deterministic or call.cu_seqlens_q is not None or call.positions is not None:
        return None
    rotary = call.rotary
    if rotary.query_scale != UNSCALED or rotary.bands != (EVERYWHERE,):
        return None
    rows = (row for row in ROWS if shape.capability in row.capabilities and shape.head_dim <= row.head_dim)
    return next(rows, None)


def choose(shape: Shape, call: AttentionCall, direction: str, grad_lse: bool = False) -> str:
    """Returns the name of the backend for one pass of a call on a GPU."""
    row = row_of(shape, call)
    return "sdpa" if row is not None and _serves(row, shape, call, direction, grad_lse) else "triton"


def _serves(row: Row, shape: Shape, call: AttentionCall, direction: str, grad_lse: bool = False) -> bool:
    """Whether the row of a call is for this pass and these lengths."""
    if grad_lse or direction not in row.directions or torch.are_deterministic_algorithms_enabled():
        return False
    # cuDNN aligns a causal mask top left, and flashrope bottom right: they agree only for equal lengths.
    squares = shape.seqlen_q == shape.seqlen_k or not call.causal
    return squares and shape.seqlen_k >= row.keys and shape.head_dim_v == shape.head_dim


def defaults(q: torch.Tensor) -> dict[str, str]:
    """Returns, for tensors like q, {backend that impl=None takes: for which calls}. "" means all or all others."""
    if q.is_cuda:
        rows = [str(row) for row in ROWS if _shape(q, q, q).capability in row.capabilities]
        return {"triton": ""} | ({"sdpa": "; ".join(rows)} if rows and os.environ.get(SWITCH) != "0" else {})
    if others.backend("cpu").unsupported_reason(q):
        return {"sdpa": ""}
    return {"cpu": "", "sdpa": "what the compiled kernels do not serve"}


# ---- the functions of a backend


def unsupported_reason(q: torch.Tensor, cached: bool = False) -> str:
    return others.backend("triton").unsupported_reason(q) if q.is_cuda else ""


def unsupported_positions(positions: CachePositions) -> str:
    return ""


def kept_shapes(k: torch.Tensor, call: AttentionCall) -> KeptShapes:
    if not k.is_cuda:
        return KeptShapes()
    return others.backend("triton").kept_shapes(k, _keeping(row_of(_shape(k, k, k), call), call))


def forward(q, k, v, call: AttentionCall):
    if not q.is_cuda:
        return _on_cpu(others.backend("cpu").unserved_attention(q, v, call)).forward(q, k, v, call)
    shape = _shape(q, k, v)
    row = row_of(shape, call)
    if row is not None and _serves(row, shape, call, "forward"):
        return others.backend("sdpa").forward(q, k, v, call)
    return others.backend("triton").forward(q, k, v, _keeping(row, call))


def backward(grad_out, grad_lse, q, k, v, out, lse, kept, call: AttentionCall):
    if q.is_cuda:
        backend = others.backend(choose(_shape(q, k, v), call, "backward", grad_lse is not None))
    else:
        backend = _on_cpu(others.backend("cpu").unserved_attention(q, v, call))
    return backend.backward(grad_out, grad_lse, q, k, v, out, lse, kept, call)


def rotate(x: torch.Tensor, call: RotateCall) -> torch.Tensor:
    if x.is_cuda:
        return others.backend("triton").rotate(x, call)
    return _on_cpu(others.backend("cpu").unserved_rotation(x, call)).rotate(x, call)


def append_to_cache(layer: CacheLayer, k, v, tables: CacheTables, rotary=None) -> None:
    backend = _on_cpu(others.backend("cpu").unsupported_reason(k, True))
    backend.append_to_cache(layer, k, v, tables, rotary)


def plan_cache(call: CacheCall, layer: CacheLayer, queries: Queries):
    cpu = others.backend("cpu")
    backend = _on_cpu(cpu.unserved_cache(queries, layer, call))
    if backend is cpu and call.tables.positions is not None:
        return PlacedPlan(call, layer, queries)
    return backend.plan_cache(call, layer, queries)


class PlacedPlan(PartsPlan):
    """A ``protocol.BackendPlan`` for tables with explicit positions, which decide between ``cpu`` and ``sdpa`` for
    every sequence by itself. So the results of a sequence do not depend on the other sequences."""

    def __init__(self, call: CacheCall, layer: CacheLayer, queries: Queries):
        super().__init__(call, _attend_placed, PlacedPart)
        self._cpu = others.backend("cpu").plan_cache(call, layer, queries)

    def append(self, layer: CacheLayer, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._cpu.append(layer, k, v)


class PlacedPart(StepPart):
    """A ``StepPart`` that is divided into neighbors of which one backend serves all.

    shares: (sequences, the function ``attend_part`` of their backend, their part), found for the first layer.
    """

    def __init__(self, call: CacheCall):
        super().__init__(call)
        self.shares: list[tuple] = []

    def divide(self, k_cache: torch.Tensor, seqlen_q: int) -> None:
        names = ["cpu" if each.long_runs else "sdpa" for each in self.placed(k_cache, seqlen_q)]
        for sequences in addresses.neighbors(names):
            own = self.call._replace(tables=addresses.batch_of(self.call.tables, sequences))
            backend = others.backend(names[sequences.start])
            self.shares.append((sequences, backend.attend_part, backend.part_of(own)))


def _attend_placed(q: torch.Tensor, layer: CacheLayer, part: PlacedPart, out: torch.Tensor | None = None):
    if not part.shares:
        part.divide(layer.k, q.shape[1])
    if len(part.shares) == 1:
        _, attend, own = part.shares[0]
        return attend(q, layer, own, out)
    paged = part.call.tables.block_table is not None
    return joined(
        q,
        layer,
        (
            (sequences, attend(q[sequences], layer if paged else layer.part(sequences), own))
            for sequences, attend, own in part.shares
        ),
    )


def _on_cpu(reason: str):
    """Returns the backend for the CPU. reason: why the compiled kernels do not serve the call, or ""."""
    cpu = others.backend("cpu")
    if not reason:
        return cpu
    cpu.warn_once()
    return others.backend("sdpa")


def _keeping(row: Row | None, call: AttentionCall) -> AttentionCall:
    """Returns the call with the keys to keep: whole keys if the row may give the backward to PyTorch's kernels."""
    return call if row is None else call._replace(whole_keys=True)


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shape:
    capability = None if torch.version.hip else others.backend("triton").compute_capability(q.device)
    return Shape(capability, q.dtype, q.shape[-1], v.shape[-1], q.shape[-3], k.shape[-3])
