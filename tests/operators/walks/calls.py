"""Draws random calls of attention and attention_varlen. A failing case prints the script that repeats it."""

from __future__ import annotations

import dataclasses

import support
import torch
from hypothesis import strategies as st
from packing import packing

from .schemes import axial_schemes, make, schemes

SCRIPT = """\
# from the root of a checkout: PYTHONPATH=tests:tests/operators python this_script.py
import os
os.environ.setdefault("TRITON_INTERPRET", "1")
import support
from walks.{module} import {name}
{name}({arguments}).check(support.Target{target})
"""


# In 16-bit types the weights of a row are rounded for the product with V, and then the result is rounded: each costs u
# * P |V|. Chosen cases stay within one rounding. Among thousands of random cases a few exceed one.
ROUNDINGS = {torch.float64: 1, torch.float32: 1, torch.float16: 2, torch.bfloat16: 2}


class Case:
    def script(self, target: support.Target) -> str:
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        of_target = target.impl, target.dtype, target.device
        return SCRIPT.format(
            module=type(self).__module__.rsplit(".", 1)[-1],
            name=type(self).__name__,
            arguments=shown,
            target=repr(of_target).replace("torch.", "__import__('torch')."),
        )


def random_positions(target: support.Target, axes: int, rows: int, seed: int) -> torch.Tensor:
    """Returns (rows, axes): whole numbers and fractions on both sides of 0, or integers up to 2^30. Every fourth row is
    at position 0, where nothing rotates."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(-40, 120, (rows, axes), generator=generator) / 2
    if seed % 3 == 0:
        positions = torch.randint(-(2**30), 2**30, (rows, axes), generator=generator)
    positions[::4] = 0
    return positions.to(target.device)


@dataclasses.dataclass(frozen=True)
class Call(Case):
    """One call of attention and its backward."""

    scheme: str
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads_kv: int
    group: int
    causal: bool
    layout: str
    head_dim_v: int | None
    softmax_scale: float | None
    sinks: bool
    deterministic: bool
    seed: int

    def check(self, target: support.Target) -> None:
        heads, rotary = self.heads_kv * self.group, make(self.scheme)
        seqlen_k, positions = self.seqlen_k, None
        if rotary.axis:
            seqlen_k, shape = self.seqlen_q, (self.batch, self.seqlen_q, rotary.axes)
            positions = random_positions(target, rotary.axes, self.batch * self.seqlen_q, self.seed).view(shape)
        # In 16-bit types a sink adds one more rounding to out and to its gradient. The error budget does not include
        # that rounding.
        exact = target.dtype in (torch.float32, torch.float64)
        sinks = torch.randn(heads, generator=torch.Generator().manual_seed(self.seed), dtype=support.lse_type(target))
        support.check(
            target,
            support.problem(
                target,
                rotary,
                self.seqlen_q,
                seqlen_k,
                self.batch,
                heads,
                self.group,
                self.seed,
                self.layout,
                self.head_dim_v,
                causal=self.causal,
                softmax_scale=self.softmax_scale,
                sinks=sinks.to(target.device) if self.sinks and exact else None,
                deterministic=self.deterministic,
                positions=positions,
            ),
            ROUNDINGS[target.dtype],
        )


def maskings(scheme: str) -> st.SearchStrategy[bool]:
    """Returns the values that `causal` may have. Position maps take only True."""
    try:
        make(scheme).bands_for(False)
    except ValueError:
        return st.just(True)
    return st.booleans()


@st.composite
def calls(draw, longest: int) -> Call:
    scheme = draw(st.one_of(schemes(), schemes(), schemes(), axial_schemes()))
    causal = draw(maskings(scheme))
    lengths = st.integers(0, longest) if draw(st.booleans()) else st.integers(1, 24)
    return Call(
        scheme,
        draw(lengths),
        draw(lengths),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        causal,
        draw(st.sampled_from(("contiguous", "transposed", "poisoned"))),
        draw(st.sampled_from((None, None, 8, 32, 48))),
        draw(st.sampled_from((None, None, 0.0, 0.3))),
        draw(st.booleans()) and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**20)),
    )


@dataclasses.dataclass(frozen=True)
class Packed(Case):
    """One call of attention_varlen and its backward. Every sequence stays within its own budget."""

    scheme: str
    lengths: tuple[tuple[int, int], ...]
    spare: int
    heads_kv: int
    group: int
    causal: bool
    seed: int

    def check(self, target: support.Target) -> None:
        rotary = make(self.scheme)
        lengths = [n for n, _ in self.lengths], [n if rotary.axis else m for n, m in self.lengths]
        rows = sum(lengths[0]) + self.spare
        p = packing(
            *(target, rotary, *lengths, self.heads_kv * self.group, self.heads_kv),
            spare=self.spare,
            seed=self.seed,
            causal=self.causal,
            positions=random_positions(target, rotary.axes, rows, self.seed) if rotary.axis else None,
        )
        p.check(p.run(target.impl), target.dtype, roundings=ROUNDINGS[target.dtype])


@st.composite
def packed(draw, longest: int) -> Packed:
    scheme = draw(st.one_of(schemes(), schemes(), schemes(), axial_schemes()))
    causal = draw(maskings(scheme))
    lengths = st.tuples(st.integers(0, longest), st.integers(0, longest))
    return Packed(
        scheme,
        tuple(draw(st.lists(lengths, max_size=5))),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        causal,
        draw(st.integers(0, 2**20)),
    )
