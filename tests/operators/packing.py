"""Runs ``attention_varlen`` on random packed sequences and checks each sequence against its own error
budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise

import support
import torch
from flashrope import Rotary, attention_varlen
from support import NAMES


def cu_seqlens(lengths: Sequence[int], device: str | None = None) -> torch.Tensor:
    return support.int32([0, *accumulate(lengths)], device)


@dataclasses.dataclass
class Packing:
    """Holds the inputs of one call over packed sequences and of its backward: (total, heads, width), and grad_lse
    (heads, total).

    lengths: the number of queries and the number of keys of every sequence. Rows after the last sequence belong to no
    sequence.
    """

    rotary: Rotary
    lengths: tuple[Sequence[int], Sequence[int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    causal: bool = True
    positions: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple:
        """Returns the arguments of ``attention_varlen`` that follow q, k and v."""
        of_device = (cu_seqlens(counts, self.q.device) for counts in self.lengths)
        return self.rotary, *of_device, *(max(counts, default=0) for counts in self.lengths)

    def run(self, impl: str, **options) -> dict[str, torch.Tensor]:
        """Returns out, lse and the gradients of the call."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v, self.sinks) if x is not None]
        options |= {"causal": self.causal, "positions": self.positions, "return_lse": True, "impl": impl}
        sinks = leaves[3] if self.sinks is not None else None
        out, lse = attention_varlen(*leaves[:3], *self.arguments, sinks=sinks, **options)
        grads = torch.autograd.grad((out, lse), leaves, (self.grad_out, torch.where(lse.isinf(), 0, self.grad_lse)))
        names = NAMES if self.sinks is None else (*NAMES, "grad_sinks")
        return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))

    def check(self, got: dict[str, torch.Tensor], dtype: torch.dtype, where: str = "", roundings: int = 1) -> None:
        """Checks any results that ``run`` returns against the error budget of each sequence.

        Rows of no sequence must be 0 in out and in the gradients, and -inf in lse.
        """
        of_keys, sinks = ("grad_k", "grad_v"), []
        ends = [list(accumulate(counts, initial=0)) for counts in self.lengths]
        for (row, end), (key, key_end) in zip(*map(pairwise, ends), strict=True):
            rows, keys = slice(row, end), slice(key, key_end)
            p = support.Problem(
                *(self.q[None, rows], self.k[None, keys], self.v[None, keys], self.rotary, self.causal),
                positions=None if self.positions is None else self.positions[None, rows],
                grad_out=self.grad_out[None, rows],
                grad_lse=self.grad_lse[None, :, rows],
                sinks=self.sinks,
            )
            at = {name: (slice(None), rows) if name == "lse" else keys if name in of_keys else rows for name in got}
            part = {name: got[name][at[name]][None] for name in got if name != "grad_sinks"}
            support.check_budget(part, p, dtype, f"{where}rows {row} to {end}: ", roundings)
            if self.sinks is not None:
                sinks.append([values["grad_sinks"] for values in support.exact_and_bound(p)])
        if self.sinks is not None:
            of_all = ({"grad_sinks": sum(values)} for values in zip(*sinks, strict=True))
            ratio = support.excess({"grad_sinks": got["grad_sinks"]}, *of_all, dtype)["grad_sinks"]
            assert ratio <= support.COEFFICIENT[dtype], ratio
        for name in got.keys() - {"lse", "grad_sinks"}:
            assert not got[name][ends[name in of_keys][-1] :].any(), name
        assert "lse" not in got or (got["lse"][:, ends[0][-1] :] == -torch.inf).all()


def packing(
    target: support.Target,
    rotary: Rotary,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    heads: int = 4,
    heads_kv: int = 2,
    head_dim_v: int | None = None,
    spare: int = 0,
    seed: int = 0,
    **options,
) -> Packing:
    """Returns random inputs, with spare rows of q and of k after the last sequence."""
    lengths = lengths_q, lengths_q if lengths_k is None else lengths_k
    rows, keys = (sum(counts) + spare for counts in lengths)
    width, width_v = rotary.head_dim, head_dim_v or rotary.head_dim
    shapes = (rows, heads, width), (keys, heads_kv, width), (keys, heads_kv, width_v), (rows, heads, width_v)
    tensors = [support.random((1, *shape), target, seed + n)[0] for n, shape in enumerate(shapes)]
    grad_lse = support.random((1, heads, rows, 1), target, seed + 4)[0, ..., 0].to(support.lse_type(target))
    return Packing(rotary, lengths, *tensors, grad_lse, **options)
