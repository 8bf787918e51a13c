"""Many devices, on torch.distributed: sharding rules for DTensor, and context parallelism.

The rules let ``flashrope.attention`` and ``attention_varlen`` take DTensors that are sharded over the batch or over the
heads; each rank then computes its own part and nothing is sent. FSDP2 and tensor parallelism with local outputs need no
rule at all.

Context parallelism shares out the sequence. Causal attention costs a query as much as the keys before it, so the
sequence is cut into 2n chunks for n ranks and rank r holds the chunks r and 2n - 1 - r, one after the other: every rank
then has the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..api import _check_tensors, attention, check_outside_context_parallel
from ..backends import load_backend
from ..ops import OPERATORS, _call
from ..rotary import Rotary

__all__ = ["context_parallel_attention", "sequence_positions", "shard_sequence", "unshard_sequence"]

_all_gather = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)  # before 2.13

Group = dist.ProcessGroup | DeviceMesh | None


# ---- sharding rules
class _Way(NamedTuple):
    """One way to share out a call over one dimension of the mesh."""

    rows: Replicate | Shard  # q, k, v, out and their gradients
    lse: Replicate | Shard
    rotated_k: Replicate | Shard  # (slots, rows, heads_kv, head_dim), or empty
    positions: Replicate | Shard
    cu_seqlens: Replicate | Shard = Replicate()


def _ways(packed: bool, turned: bool, batch: int, heads_kv: int, specs) -> list[_Way]:
    """The ways that suit a call; specs are (DTensorSpec or None, its batch dimension, its heads dimension).

    A way that would leave the ranks unequal parts is left out: query heads would part from their key heads, and the
        rows of
    rotated_k, which are sharded as they come, from the batch. DTensor only ever shards what one of the inputs is
    sharded over.
    """
    heads = _Way(Shard(1 if packed else 2), Shard(0 if packed else 1), Shard(2) if turned else Replicate(), Replicate())
    ways = [_Way(*(Replicate(),) * 4)]
    if not packed and (not turned or batch % _shards((spec, dim) for spec, dim, _ in specs) == 0):
        ways.append(_Way(Shard(0), Shard(0), Shard(1) if turned else Replicate(), Shard(0)))
    if heads_kv % _shards((spec, dim) for spec, _, dim in specs) == 0:
        ways.append(heads)
    return ways


def _shards(specs) -> int:
    """The parts that a dimension falls into over all dimensions of the mesh that any of (spec, dim) is sharded over."""
    parts = {}
    for spec, dim in specs:
        if spec is not None and dim is not None:
            parts.update(
                {i: spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement.is_shard(dim)}
            )
    return torch.Size(parts.values()).numel()


@register_sharding(OPERATORS.attention.default)
def _shard_attention(q, k, v, *call_and_impl):
    *call, impl = call_and_impl
    positions, cu_seqlens_q, cu_seqlens_k = call[:3]
    packed = cu_seqlens_q is not None
    turned = len(load_backend(impl).rotated_k_shape(k, _call(*call))) > 1
    heads = 1 if packed else 2
    ways = _ways(
        packed, turned, q.shape[0], k.shape[heads], [(x, 0, heads) for x in (q, k, v)] + [(positions, 0, None)]
    )
    return [([way.rows, way.lse, way.rotated_k], [way.rows] * 3 + _of_call(way, call)) for way in ways]


@register_sharding(OPERATORS.attention_backward.default)
def _shard_attention_backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, *call_and_impl):
    *call, _ = call_and_impl
    positions, cu_seqlens_q, cu_seqlens_k = call[:3]
    packed, turned = cu_seqlens_q is not None, len(rotated_k.shape) > 1
    heads = 1 if packed else 2
    specs = [(x, 0, heads) for x in (grad_out, q, k, v, out)] + [(x, 0, heads - 1) for x in (grad_lse, lse)]
    specs += [(positions, 0, None)] + ([(rotated_k, 1, 2)] if turned else [])
    return [
        (
            [way.rows] * 3,
            [
                way.rows if grad_out is not None else None,
                way.lse if grad_lse is not None else None,
                *[way.rows] * 4,
                way.lse,
                way.rotated_k,
                *_of_call(way, call),
            ],
        )
        for way in _ways(packed, turned, q.shape[0], k.shape[heads], specs)
    ]


def _of_call(way: _Way, call: Sequence) -> list:
    """The placements of the arguments from positions to impl; None for those that are no tensors."""
    placements = (way.positions, way.cu_seqlens, way.cu_seqlens)
    tensors = [None if x is None else placement for x, placement in zip(call[:3], placements, strict=True)]
    return tensors + [None] * (len(call) - 2)


# ---- context parallelism


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary,
    group: Group = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """``flashrope.attention`` over sequences that are shared out over the ranks of a group; exact, gradients too.

    Every query keeps its position in the whole sequence, so bands and log n are those of the whole. Causal: raw k and v
    are gathered (one collective; the gradients are reduced by its reverse), and each rank's two chunks of queries
    attend to the keys up to their own end. Not causal: heads are exchanged for the sequence and back (all-to-all), and
    every rank computes whole sequences for its share of the heads.

    Args:
        q: (batch, seqlen / n, heads_q, head_dim), this rank's part in the order of ``shard_sequence``; one shape on all
            ranks.
        k, v: (batch, seqlen / n, heads_kv, head_dim), likewise.
        rotary: any scheme but an axial one.
        group: the ranks that share one sequence: a process group, a one-dimensional DeviceMesh, or None for all ranks.
        causal, softmax_scale, impl: as in ``flashrope.attention``, the same on all ranks.

    Returns:
        out like q, this rank's part. The gradients that arrive at k and v are sums over the ranks, in their own type.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came. Lengths of other ranks are not
            looked at.
        RuntimeError: inside ``torch.distributed.tensor.experimental.context_parallel``.
    """
    group = _process_group(group)
    _check_context_parallel(q, k, v, rotary, group, causal)
    if group.size() == 1:
        return attention(q, k, v, rotary, causal, softmax_scale, impl=impl)
    if not causal:
        heads_q = q.shape[2]
        q, k, v = (_heads_for_sequence(x, group) for x in _even_heads(q, k, v, group.size()))
        return _sequence_for_heads(attention(q, k, v, rotary, causal, softmax_scale, impl=impl), group)[:, :, :heads_q]
    k, v = _whole((k, v), 1, group)
    outs = []
    for rows, chunk in zip(q.chunk(2, 1), _chunks_of(group), strict=True):
        end = (chunk + 1) * rows.shape[
            1
        ]  # the last query meets the last key, so every row stands at its global position
        outs.append(attention(rows, k[:, :end], v[:, :end], rotary, causal, softmax_scale, impl=impl))
    return torch.cat(outs, 1)


def shard_sequence(x: torch.Tensor, group: Group = None, dim: int = 1) -> torch.Tensor:
    """This rank's part of x, whose dimension dim is a sequence that all ranks hold: chunks r and 2n - 1 - r of 2n.

    Tokens, labels, embeddings: all that has one entry per position. The sequence must divide into 2n chunks.
    """
    group = _process_group(group)
    _check_sequence("x", x, dim)
    _check_divides("x", x.shape[dim], group.size())
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat([chunks[c] for c in _chunks_of(group)], dim)


def unshard_sequence(x: torch.Tensor, group: Group = None, dim: int = 1) -> torch.Tensor:
    """The whole sequence on every rank: the reverse of ``shard_sequence``. Its gradient is summed over the ranks."""
    group = _process_group(group)
    _check_sequence("x", x, dim)
    if x.shape[dim] % 2:
        raise ValueError(f"x: expected two chunks of one length along dimension {dim}, got {x.shape[dim]} positions")
    return _whole((x,), dim, group)[0] if group.size() > 1 else x


def sequence_positions(seqlen: int, group: Group = None, device: torch.device | str | None = None) -> torch.Tensor:
    """int64 (seqlen / n,): where each row of this rank's part stands in a sequence of seqlen positions.

    For what is no part of the attention, such as a learned position embedding; ``context_parallel_attention`` needs
    none.
    """
    return shard_sequence(torch.arange(seqlen, device=device), group, 0)


def _whole(parts: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Tensors of one shape, gathered in one collective and each joined in the order of the sequence."""
    pieces = _all_gather(torch.stack([half for x in parts for half in x.chunk(2, dim)]), 0, group).unbind(0)
    return [
        _joined(pieces[2 * i :: 2 * len(parts)], pieces[2 * i + 1 :: 2 * len(parts)], dim) for i in range(len(parts))
    ]


def _joined(heads: Sequence[torch.Tensor], tails: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The first and the second chunk of every rank, in the order of the sequence."""
    return torch.cat((*heads, *tails[::-1]), dim)


def _chunks_of(group: dist.ProcessGroup) -> tuple[int, int]:
    rank, ranks = group.rank(), group.size()
    return rank, 2 * ranks - 1 - rank


def _even_heads(q, k, v, ranks: int):
    """k and v with heads that divide by ranks: each repeated where that does it, else with heads of zeros behind. q to
    match."""
    heads_kv = k.shape[2]
    per_head = q.shape[2] // heads_kv
    repeats = next((n for n in range(1, per_head + 1) if per_head % n == 0 and heads_kv * n % ranks == 0), 1)
    k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
    missing = -k.shape[2] % ranks
    return tuple(
        F.pad(x, (0, 0, 0, count)) if missing else x
        for x, count in ((q, missing * per_head // repeats), (k, missing), (v, missing))
    )


def _heads_for_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seqlen / n, heads, head_dim) to (batch, seqlen, heads / n, head_dim)."""
    sent = torch.stack([part for heads in x.chunk(group.size(), 2) for part in heads.chunk(2, 1)])
    received = collectives.all_to_all_single_autograd(sent, None, None, group).unbind(0)
    return _joined(received[0::2], received[1::2], 1)


def _sequence_for_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, seqlen, heads / n, head_dim) to (batch, seqlen / n, heads, head_dim)."""
    ranks = group.size()
    chunks = x.chunk(2 * ranks, 1)
    sent = torch.stack([chunks[c] for rank in range(ranks) for c in (rank, 2 * ranks - 1 - rank)])
    received = collectives.all_to_all_single_autograd(sent, None, None, group).unbind(0)
    return torch.cat([torch.cat(received[2 * rank : 2 * rank + 2], 1) for rank in range(ranks)], 2)


# ---- checks
def _process_group(group: Group) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "group: expected torch.distributed to be initialised; call torch.distributed.init_process_group first"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a mesh of one dimension, got {group.ndim}; name one of them, as in mesh['cp']"
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected one that this rank is part of, got one that it is not")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    return group


def _check_context_parallel(q, k, v, rotary, group, causal) -> None:
    check_outside_context_parallel()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, DTensor):
            raise TypeError(f"{name}: expected this rank's part as a plain tensor, got a DTensor; pass its to_local()")
    shape_q, shape_k = _check_tensors(q, k, v, rotary, rank=4)
    if shape_k[:2] != shape_q[:2]:
        raise ValueError(f"k: expected batch and seqlen {tuple(shape_q[:2])} as in q, got {tuple(shape_k[:2])}")
    if shape_q[1] % 2:
        ranks = group.size()
        raise ValueError(
            f"q: expected two chunks of one length, of a sequence that divides into 2 * {ranks} = {2 * ranks}, "
            f"got {shape_q[1]} positions"
        )
    if rotary.axis:
        raise ValueError(
            "rotary: expected one-dimensional positions, which the ranks count by themselves; this one is axial"
        )
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")


def _check_sequence(name, x, dim) -> None:
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        raise TypeError(f"{name}: expected a plain tensor, got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim: expected a dimension of {name}, which has {x.ndim}, got {dim}")


def _check_divides(name, seqlen: int, ranks: int) -> None:
    if seqlen % (2 * ranks):
        raise ValueError(
            f"{name}: expected a sequence that divides into 2 * {ranks} = {2 * ranks} chunks, got {seqlen} "
            f"positions; pad it to {-(-seqlen // (2 * ranks)) * 2 * ranks}"
        )
