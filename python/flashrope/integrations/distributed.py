"""Supports distributed training with torch.distributed: sharding rules for DTensor, and context parallelism.

With the sharding rules, ``flashrope.attention`` and ``attention_varlen`` accept DTensors that are sharded over the
batch or the heads. Each rank computes its own part, without communication. FSDP2, and tensor parallelism with local
outputs, do not need these rules.

Context parallelism shards the sequence. The work of a causal query grows with its position, so the sequence is divided
into 2n chunks for n ranks, and rank r holds chunk r followed by chunk 2n - 1 - r. All ranks then do the same work.
Packed sequences are divided as one row of tokens, so chunks begin and end inside sequences.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..backends.registry import load_backend
from ..cache.storage import upload
from ..calls.checks import check_int32, check_options, check_outside_context_parallel, check_sinks, check_tensors
from ..calls.records import AttentionCall, Kept
from ..operators.fields import FIELDS, unflatten
from ..operators.functional import attention, attention_varlen
from ..operators.torch_library import OPERATORS
from ..schemes.rotary import Rotary

__all__ = ["context_parallel_attention", "sequence_positions", "shard_sequence", "unshard_sequence"]

# torch before 2.13 has only all_gather_tensor_autograd.
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

Group = dist.ProcessGroup | DeviceMesh | None


# ---- sharding rules
class _Strategy(NamedTuple):
    """The placements of a call's tensors along one dimension of the mesh."""

    rows: Replicate | Shard  # q, k, v, out and their gradients
    lse: Replicate | Shard
    rotated_k: Replicate | Shard  # (copies, rows, heads_kv, head_dim), or empty
    positions: Replicate | Shard
    table: Replicate | Shard  # (rotations, batch, seqlen, 2, pairs), or empty
    cu_seqlens: Replicate | Shard = Replicate()


def _strategies(packed: bool, kept: Kept, batch: int, heads_kv: int, specs) -> list[_Strategy]:
    """Returns the strategies for a call.

    kept: for each tensor of ``calls.Kept``, whether it is saved.

    specs: for every tensor, (its DTensorSpec or None, its batch dimension, its heads dimension). DTensor shards along
    a mesh dimension only if some input is already sharded along it.

    Strategies that would give ranks unequal parts are left out, because unequal parts separate query heads from their
    key heads, or rows of rotated_k from their sequence.
    """
    strategies = [_Strategy(*(Replicate(),) * 5)]
    if not packed and (not kept.rotated_k or batch % _shards((spec, dim) for spec, dim, _ in specs) == 0):
        of_kept = (Shard(1) if x else Replicate() for x in kept)
        strategies.append(_Strategy(Shard(0), Shard(0), next(of_kept), Shard(0), next(of_kept)))
    if heads_kv % _shards((spec, dim) for spec, _, dim in specs) == 0:
        rows, lse = (Shard(1), Shard(0)) if packed else (Shard(2), Shard(1))
        strategies.append(_Strategy(rows, lse, Shard(2) if kept.rotated_k else Replicate(), *(Replicate(),) * 2))
    return strategies


def _shards(specs) -> int:
    """Returns the number of parts into which a tensor dimension is split: the product of the sizes of all mesh
    dimensions along which any (spec, dim) is sharded."""
    parts = {}
    for spec, dim in specs:
        if spec is not None and dim is not None:
            parts.update(
                {i: spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement.is_shard(dim)}
            )
    return torch.Size(parts.values()).numel()


class _Keys(NamedTuple):
    """What ``kept_shapes`` reads of a tensor, of which DTensor gives only a description."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    ndim: int
    is_cuda: bool

    @classmethod
    def of(cls, spec) -> _Keys:
        device = torch.device(spec.mesh.device_type)
        return cls(spec.shape, spec.tensor_meta.dtype, device, spec.ndim, device.type == "cuda")


@register_sharding(OPERATORS.attention.default)
def _shard_attention(q, k, v, *arguments):
    call, (impl,) = unflatten(AttentionCall, arguments)
    packed = call.cu_seqlens_q is not None
    shapes = load_backend(impl).kept_shapes(_Keys.of(k), call)
    kept = Kept(*(len(shape) > 1 for shape in shapes))
    heads = 1 if packed else 2
    specs = [(x, 0, heads) for x in (q, k, v)] + [(call.positions, 0, None)]
    return [
        (
            [strategy.rows, strategy.lse, strategy.rotated_k, strategy.table],
            [*[strategy.rows] * 3, *_placements(strategy, call)],
        )
        for strategy in _strategies(packed, kept, q.shape[0], k.shape[heads], specs)
    ]


@register_sharding(OPERATORS.attention_backward.default)
def _shard_attention_backward(grad_out, grad_lse, q, k, v, out, lse, rotated_k, table, *arguments):
    call, _ = unflatten(AttentionCall, arguments)
    packed, kept = call.cu_seqlens_q is not None, Kept(len(rotated_k.shape) > 1, len(table.shape) > 1)
    heads = 1 if packed else 2
    specs = [(x, 0, heads) for x in (grad_out, q, k, v, out)] + [(x, 0, heads - 1) for x in (grad_lse, lse)]
    specs += [(call.positions, 0, None)] + ([(rotated_k, 1, 2)] if kept.rotated_k else [])
    specs += [(table, 1, None)] if kept.table else []
    return [
        (
            [strategy.rows] * 3,
            [
                strategy.rows if grad_out is not None else None,
                strategy.lse if grad_lse is not None else None,
                *[strategy.rows] * 4,
                strategy.lse,
                strategy.rotated_k,
                strategy.table,
                *_placements(strategy, call),
            ],
        )
        for strategy in _strategies(packed, kept, q.shape[0], k.shape[heads], specs)
    ]


def _placements(strategy: _Strategy, call: AttentionCall) -> list:
    """Returns the placement of each leaf of the call and of the backend's name, or None if it is not a tensor."""
    of_tensors = {
        "positions": strategy.positions,
        "cu_seqlens_q": strategy.cu_seqlens,
        "cu_seqlens_k": strategy.cu_seqlens,
    }
    names = [field.name for field in FIELDS[AttentionCall]]
    return [None if getattr(call, name) is None else of_tensors.get(name) for name in names] + [None]


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
    sinks: torch.Tensor | None = None,
    deterministic: bool | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``attention``, or with cu_seqlens ``attention_varlen``, for sequences sharded over the ranks of a group.

    Use it for sequences that are too long for one device. The result is exact and differentiable. Every query keeps its
    position in the full sequence, so bands and log n are computed as in the full sequence.

    Example:
        import torch.distributed as dist
        from flashrope.integrations.distributed import context_parallel_attention

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun pass only "gloo"
        q, k, v = (torch.randn(2, 64, heads, 64) for heads in (8, 2, 2))  # this rank's part of both sequences
        out = context_parallel_attention(q, k, v, Rotary.rope(64))
        dist.destroy_process_group()

    If causal, raw k and v are gathered in one collective, whose backward reduces their gradients. Each of the rank's
    two chunks of queries attends to the keys up to its own end. If not causal, two all-to-all exchanges give every rank
    the full sequences for its share of the heads.

    If packed and causal, both chunks are computed in one call of ``attention_varlen``. For each sequence in a chunk,
    the queries are the rows of the sequence in that chunk, and the keys are all keys of the sequence up to the last of
    those rows. The rank computes with no other keys.

    Args:
        q: (batch, seqlen / n, heads_q, head_dim), this rank's part in the order of ``shard_sequence``. q has the same
            shape on all n ranks. Packed: (total_q / n, heads_q, head_dim).
        k, v: (batch, seqlen / n, heads_kv, head_dim), this rank's part. Packed: (total_k / n, heads_kv, head_dim). v
            may have a different head_dim, as in ``attention``.
        rotary: any scheme that is not axial.
        group: the ranks that share a sequence: a process group, a one-dimensional DeviceMesh, or None for all ranks.
        causal, softmax_scale, impl, sinks, deterministic: as in ``attention``, the same on all ranks.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, on q's device or on the CPU: the first row of every sequence
            in the packed tokens of all ranks. Both tensors must be the same on all ranks. They begin at 0 and end at n
            times the rows of q and of k on this rank. Padding must be a separate sequence at the end. The host reads
            the values: on a GPU every call therefore waits for the device. Inside ``torch.compile`` a packed call
            breaks the graph.

    Returns:
        This rank's part of out, like q but with the head_dim of v. The gradients of k and v are summed over the ranks,
        in the dtype of k and v. The gradient of sinks is only this rank's contribution. Reduce it over the ranks, like
        the gradient of any replicated parameter.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names the argument and says what was expected. The
            shapes and cu_seqlens on other ranks are not checked.
        RuntimeError: the call is inside ``torch.distributed.tensor.experimental.context_parallel``.
    """
    group = _process_group(group)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_context_parallel(q, k, v, rotary, group, packed)
    softmax_scale = check_options(causal, softmax_scale, q, deterministic)
    if sinks is not None:
        check_sinks(sinks, q)
    options: dict[str, Any] = dict(
        rotary=rotary,
        causal=causal,
        softmax_scale=softmax_scale,
        impl=impl,
        sinks=sinks,
        deterministic=deterministic,
    )
    if packed:
        return _packed(q, k, v, options, group, cu_seqlens_q, cu_seqlens_k)
    if group.size() == 1:
        return attention(q, k, v, **options)
    if not causal:
        return _over_heads(q, k, v, options, group)
    k, v = (torch.cat(chunks, 1) for chunks in _gather_keys(k, v, group))
    outs = []
    for rows, chunk in zip(q.chunk(2, 1), _chunks_of(group), strict=True):
        end = (chunk + 1) * rows.shape[1]  # keys end where the chunk ends, so its queries keep their positions
        outs.append(attention(rows, k[:, :end], v[:, :end], **options))
    return torch.cat(outs, 1)


class _Lengths(NamedTuple):
    """cu_seqlens of packed queries and of packed keys, as numbers on the host."""

    q: Sequence[int]
    k: Sequence[int]


@torch.compiler.disable  # shapes depend on the values of cu_seqlens
def _packed(q, k, v, options: dict, group: dist.ProcessGroup, cu_seqlens_q, cu_seqlens_k) -> torch.Tensor:
    lengths = _check_lengths(q, k, group, cu_seqlens_q, cu_seqlens_k)
    q, k, v = q[None], k[None], v[None]
    if group.size() == 1:
        return _attend_packed(q, k, v, lengths, **options)[0]
    if not options["causal"]:
        return _over_heads(q, k, v, options, group, lengths)[0]
    size = q.shape[1] // 2
    own, ranges = _rows_and_keys(lengths, [(chunk * size, (chunk + 1) * size) for chunk in _chunks_of(group)])
    k, v = (_join(chunks, ranges) for chunks in _gather_keys(k, v, group))
    return _attend_packed(q, k, v, own, **options)[0]


def _attend_packed(q, k, v, lengths: _Lengths, **options) -> torch.Tensor:
    """Calls ``attention_varlen`` with the packed tokens of a batch of one."""
    cu_seqlens = (upload(values, torch.int32, q.device) for values in lengths)
    longest = (max((stop - start for start, stop in pairwise(values)), default=0) for values in lengths)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    call: dict[str, Any] = dict(zip(names, (*cu_seqlens, *longest), strict=True))
    return attention_varlen(q[0], k[0], v[0], **call, **options)[None]


def _over_heads(q, k, v, options: dict, group: dist.ProcessGroup, lengths: _Lengths | None = None) -> torch.Tensor:
    """Attends over full sequences on every rank, for the rank's share of the heads.

    lengths: the lengths of packed sequences. With lengths, the tensors have a batch size of 1.
    """
    heads_q, sinks = q.shape[2], options["sinks"]
    q, k, v = _even_heads(q, k, v, group.size())
    if sinks is not None:
        sinks = F.pad(sinks, (0, q.shape[2] - heads_q)).chunk(group.size())[group.rank()]
        options = options | {"sinks": sinks}
    q, k, v = (_heads_for_sequence(x, group) for x in (q, k, v))
    attend = attention if lengths is None else functools.partial(_attend_packed, lengths=lengths)
    return _sequence_for_heads(attend(q, k, v, **options), group)[:, :, :heads_q]


def _rows_and_keys(lengths: _Lengths, chunks: Iterable[tuple[int, int]]) -> tuple[_Lengths, list[tuple[int, int]]]:
    """Plans the packed call for the query rows in some chunks. chunks: (first row, row after the last row) of each
    chunk.

    Returns cu_seqlens of the call, and the ranges of packed keys that form its keys. If a chunk holds a part of a
    sequence, the keys of this part end with the last key that the part's last row sees. The last row is then aligned
    with the last key, as the causal mask requires.
    """
    count_q, count_k, ranges = [], [], []
    for first, last in chunks:
        sequence = bisect_right(lengths.q, first) - 1
        while sequence < len(lengths.q) - 1 and lengths.q[sequence] < last:
            stop = min(lengths.q[sequence + 1], last)
            rows = stop - max(lengths.q[sequence], first)
            if rows:
                start_k, stop_k = lengths.k[sequence : sequence + 2]
                end = max(stop_k - (lengths.q[sequence + 1] - stop), start_k)  # rows before the first key see no key
                count_q.append(rows)
                count_k.append(end - start_k)
                ranges.append((start_k, end))
            sequence += 1
    return _Lengths(*([*accumulate(counts, initial=0)] for counts in (count_q, count_k))), ranges


def _join(chunks: Sequence[torch.Tensor], ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Returns a copy of the rows in some ranges, one after another. chunks: the tensor, in chunks of equal size."""
    size = chunks[0].shape[1]
    parts = []
    for start, stop in _joined(ranges):
        for n in range(start // size, -(-stop // size)):
            parts.append(chunks[n][:, max(start - n * size, 0) : stop - n * size])
    # Even an empty result is a slice of a chunk, so that autograd runs the backward of the chunks on this rank, too.
    # That backward calls a collective in which every rank must take part.
    return torch.cat(parts or [chunks[0][:, :0]], 1)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges that are not empty, with adjacent ranges merged."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def shard_sequence(x: torch.Tensor, group: Group = None, dim: int = 1) -> torch.Tensor:
    """Returns this rank's part of a sequence that all n ranks hold: chunks r and 2n - 1 - r of 2n chunks, for rank r.

    Use it for the inputs of a model that calls ``context_parallel_attention``. Queries in early chunks see few keys,
    and queries in late chunks see many keys. Each rank gets one early and one late chunk, so all ranks have the same
    work.

    Example:
        import torch.distributed as dist
        from flashrope.integrations.distributed import sequence_positions, shard_sequence, unshard_sequence

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tokens = torch.randint(256, (2, 64))
        part, positions = shard_sequence(tokens), sequence_positions(64)
        assert torch.equal(unshard_sequence(part), tokens)
        dist.destroy_process_group()

    Args:
        x: tokens, labels, embeddings or any other tensor with one entry per position.
        group: as in ``context_parallel_attention``.
        dim: the dimension of the sequence, a multiple of 2n positions.
    """
    group = _process_group(group)
    _check_sequence("x", x, dim)
    _check_divides("x", x.shape[dim], group.size())
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat([chunks[c] for c in _chunks_of(group)], dim)


def unshard_sequence(x: torch.Tensor, group: Group = None, dim: int = 1) -> torch.Tensor:
    """Returns the full sequence on every rank. It undoes ``shard_sequence``. Gradients are summed over the ranks."""
    group = _process_group(group)
    _check_sequence("x", x, dim)
    if x.shape[dim] % 2:
        raise ValueError(f"x: expected two chunks of equal length along dimension {dim}, got {x.shape[dim]} positions")
    return _gather_sequence((x,), dim, group)[0] if group.size() > 1 else x


def sequence_positions(seqlen: int, group: Group = None, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns the position of every row of this rank's part in a sequence of seqlen positions, int64 (seqlen / n,).

    Use it for code outside the attention, such as a learned position embedding. ``context_parallel_attention`` does not
    need these positions.
    """
    return shard_sequence(torch.arange(seqlen, device=device), group, 0)


def _gather_sequence(parts: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gathers tensors of equal shape in one collective. Each result is a full sequence, in order."""
    return [torch.cat(chunks, dim) for chunks in _gather_chunks(parts, dim, group)]


def _gather_keys(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> list[tuple[torch.Tensor, ...]]:
    """Returns the chunks of the full k and of the full v, in order."""
    alike = [(k, v)] if v.shape[-1] == k.shape[-1] else [(k,), (v,)]
    return [chunks for parts in alike for chunks in _gather_chunks(parts, 1, group)]


def _gather_chunks(parts: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[tuple[torch.Tensor, ...]]:
    """Gathers tensors of equal shape in one collective. Returns the 2n chunks of each tensor, in order."""
    pieces = _all_gather(torch.stack([half for x in parts for half in x.chunk(2, dim)]), 0, group).unbind(0)
    return [_in_order(pieces[2 * i :: 2 * len(parts)], pieces[2 * i + 1 :: 2 * len(parts)]) for i in range(len(parts))]


def _in_order(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the first and the second chunk of every rank in the order of the sequence."""
    return (*first, *second[::-1])


def _chunks_of(group: dist.ProcessGroup) -> tuple[int, int]:
    rank, ranks = group.rank(), group.size()
    return rank, 2 * ranks - 1 - rank


def _even_heads(q, k, v, ranks: int):
    """Returns q, k, v with a number of key heads that is a multiple of ``ranks``.

    Key heads are repeated if that is enough. Otherwise heads of zeros are appended to q, k and v.
    """
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
    """Exchanges heads for sequence: (batch, seqlen / n, heads, channels) to (batch, seqlen, heads / n, channels)."""
    sent = torch.stack([part for heads in x.chunk(group.size(), 2) for part in heads.chunk(2, 1)])
    received = collectives.all_to_all_single_autograd(sent, None, None, group).unbind(0)
    return torch.cat(_in_order(received[0::2], received[1::2]), 1)


def _sequence_for_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges sequence for heads: (batch, seqlen, heads / n, channels) to (batch, seqlen / n, heads, channels)."""
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
        return dist.group.WORLD  # type: ignore[return-value]  # None only before the initialisation
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, got {group.ndim}; select one, as in mesh['cp']")
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that includes this rank, got one without it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    return group


def _check_context_parallel(q, k, v, rotary, group, packed: bool) -> None:
    check_outside_context_parallel()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, DTensor):
            raise TypeError(f"{name}: expected this rank's part as a plain tensor, got a DTensor; pass its to_local()")
    shape_q, shape_k = check_tensors(q, k, v, rotary, rank=3 if packed else 4)
    if not packed and shape_k[:2] != shape_q[:2]:
        raise ValueError(f"k: expected batch and seqlen {tuple(shape_q[:2])} as in q, got {tuple(shape_k[:2])}")
    for name, rows in (("q", shape_q[-3]), ("k", shape_k[-3])):
        if rows % 2:
            ranks = group.size()
            raise ValueError(
                f"{name}: expected two chunks of equal length, of a sequence that divides into 2 * {ranks} = "
                f"{2 * ranks}, got {rows} positions"
            )
    if rotary.axis:
        raise ValueError(
            "rotary: axial schemes are not supported with context parallelism (ranks count one-dimensional positions), "
            f"got {rotary.axes} axes"
        )
    if rotary.length_scale is not None:
        raise ValueError(
            f"rotary: length_scale is not supported with context parallelism (each rank would count only its own "
            f"keys), got {rotary.length_scale:g}"
        )


def _check_lengths(q, k, group: dist.ProcessGroup, cu_seqlens_q, cu_seqlens_k) -> _Lengths:
    named = {"cu_seqlens_q": (cu_seqlens_q, q), "cu_seqlens_k": (cu_seqlens_k, k)}
    lengths = []
    for name, (cu_seqlens, x) in named.items():
        if cu_seqlens is None:
            raise ValueError(f"{name}: expected a tensor, because the other cu_seqlens is given, got None")
        on_host = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type == "cpu"
        check_int32(name, cu_seqlens, cu_seqlens if on_host else q, "q", ("sequences + 1",))
        values, rows, ranks = cu_seqlens.tolist(), x.shape[0], group.size()
        if not values or values[0] != 0:
            raise ValueError(f"{name}: expected to begin at 0, got {values[0] if values else 'no value'}")
        if any(stop < start for start, stop in pairwise(values)):
            raise ValueError(f"{name}: expected non-decreasing values, got {values}")
        if values[-1] != rows * ranks:
            raise ValueError(
                f"{name}: expected to end at {rows * ranks}, the packed tokens of all ranks, which is {ranks} times "
                f"the {rows} rows of {name[-1]} on this rank, got {values[-1]}"
            )
        lengths.append(values)
    if len(lengths[0]) != len(lengths[1]):
        raise ValueError(
            f"cu_seqlens_k: expected shape {tuple(cu_seqlens_q.shape)}, the shape of cu_seqlens_q, got "
            f"{tuple(cu_seqlens_k.shape)}"
        )
    return _Lengths(*lengths)


def _check_sequence(name, x, dim) -> None:
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        raise TypeError(f"{name}: expected a plain tensor, got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim: expected a dimension of {name}, which has {x.ndim} dimensions, got {dim}")


def _check_divides(name, seqlen: int, ranks: int) -> None:
    if seqlen % (2 * ranks):
        raise ValueError(
            f"{name}: expected a sequence that divides into 2 * {ranks} = {2 * ranks} chunks, got {seqlen} "
            f"positions; pad it to {-(-seqlen // (2 * ranks)) * 2 * ranks}"
        )
