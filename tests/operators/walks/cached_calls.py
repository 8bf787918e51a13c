"""Draws random calls over a cache: every width, pages, padding, packed queries, splits, quantized caches, values that
are channels of the keys, and weights of keys."""

from __future__ import annotations

import dataclasses

import support
import torch
from caching import Cached
from hypothesis import strategies as st

from .calls import ROUNDINGS, Case, maskings
from .schemes import make, schemes

LATENT = 576  # the only width beyond 512, for values that are channels of the keys
MANY = 40  # query heads of one key head, enough for the tile for many rows


@dataclasses.dataclass(frozen=True)
class CachedCall(Case):
    """One call over a cache. A size is (number of query rows, length of the sequence including them).

    values: the first channel of the keys that is a value and the channel behind the last one, or None if values have
    memory of their own. packed: queries are packed, with as many rows as the sizes say. Otherwise every sequence has as
    many query rows as the first one.
    """

    scheme: str
    sizes: tuple[tuple[int, int], ...]
    packed: bool
    heads: tuple[int, int]
    page: int
    leftpad: bool
    causal: bool
    layout: str
    cache_dtype: str | None
    head_dim_v: int | None
    values: tuple[int, int] | None
    weighted: bool
    num_splits: int | None
    seed: int

    def check(self, target: support.Target) -> None:
        call = self.call(target)
        try:
            call.check(num_splits=self.num_splits, roundings=ROUNDINGS[target.dtype])
        except ValueError as error:
            refused = f"its kernels support head_dim {LATENT} only if 32, 64, 128 or 256 channels rotate"
            assert target.impl == "triton" and refused in str(error), error

    def call(self, target: support.Target) -> Cached:
        rotary, lengths = make(self.scheme), [length for _, length in self.sizes]
        queries = [rows for rows, _ in self.sizes] if self.packed else self.sizes[0][0]
        # No cache is quantized in float64, with value slices, with weights of keys, or beyond 256 channels. A quantized
        # cache here is contiguous in memory, and its values are as wide as its keys.
        plain = target.dtype == torch.float64 or self.values is not None or self.weighted or rotary.head_dim > 256
        cache_dtype = None if plain else self.cache_dtype
        weight = torch.rand(rotary.head_dim, generator=torch.Generator().manual_seed(self.seed)) * 2 - 0.5
        return Cached(
            target,
            rotary,
            lengths,
            queries,
            heads=self.heads,
            page=self.page,
            leftpad=[(7 * b + self.seed) % 23 for b in range(len(lengths))] if self.leftpad else None,
            causal=self.causal,
            layout="contiguous" if cache_dtype else self.layout,
            cache_dtype=cache_dtype,
            head_dim_v=None if cache_dtype else self.head_dim_v,
            values=None if self.values is None else slice(*self.values),
            key_weight=weight if self.weighted else None,
            seed=self.seed,
        )


@st.composite
def latent_schemes(draw) -> str:
    """Returns the expression of a scheme as latent attention has it: at most 256 of 576 channels rotate."""
    rotary_dim, interleaved = draw(st.sampled_from((32, 64, 64, 128, 256))), draw(st.booleans())
    first_channel = draw(st.sampled_from((0, LATENT - rotary_dim)))
    change = draw(st.sampled_from(("", ".rectify(21)", ".rectify(40, 4.0)", ".local(50)", ".log_n(30)")))
    return f"Rotary.rope({LATENT}, 1e4, {rotary_dim}, {interleaved}, first_channel={first_channel}){change}"


@st.composite
def cached_calls(draw, longest: int) -> CachedCall:
    head_dim = 8 * draw(st.one_of(st.integers(1, 64), st.integers(33, 64), st.just(LATENT // 8)))
    scheme = draw(latent_schemes() if head_dim == LATENT else schemes(head_dim))
    values, head_dim_v = None, None
    if head_dim == LATENT or draw(st.booleans()):
        width = 8 * draw(st.integers(1, min(head_dim, 512) // 8))
        first = draw(st.one_of(st.just(0), st.just(head_dim - width), st.integers(0, head_dim - width)))
        values = first, first + width
    elif draw(st.booleans()):
        head_dim_v = 8 * draw(st.integers(1, head_dim // 8))
    packed, rows = draw(st.booleans()), st.sampled_from((1, 1, 1, 2, 5, 17, 70))
    if not packed:
        rows = st.just(draw(rows))
    before = st.one_of(st.integers(0, longest), st.sampled_from((0, 15, 16, 31, 63, 64, 127)))
    sizes = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(rows)
        sizes.append((n, n + draw(before)))
    heads_kv = draw(st.integers(1, 2))
    group = draw(st.sampled_from((1, 2, 3, 8) if heads_kv > 1 else (1, 2, 3, 8, MANY)))
    return CachedCall(
        scheme,
        tuple(sizes),
        packed,
        (heads_kv * group, heads_kv),
        draw(st.sampled_from((0, 0, 16, 32, 64, 128, 256))),
        draw(st.booleans()),
        draw(maskings(scheme)),
        draw(st.sampled_from(("contiguous", "poisoned", "heads first"))),
        draw(st.sampled_from((None, None, "int8"))),
        head_dim_v,
        values,
        draw(st.booleans()),
        draw(st.sampled_from((None, None, None, 1, 3))),
        draw(st.integers(0, 2**20)),
    )
