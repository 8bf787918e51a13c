"""Lists the calls over caches that the package offers for compiled kernels. They are all combinations of options that
the checks accept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from caching import cached_call
from flashrope import Rotary


class Offered(NamedTuple):
    """A combination that the checks accept or refuse.

    head_dim: channels. page: slots of a page, or 0 for a contiguous cache. dtype: the type of the queries. cache_dtype:
    "int8" or None. positions: None, "tables" (of pages) or "stored" (of slots).
    """

    head_dim: int
    page: int
    dtype: torch.dtype
    cache_dtype: str | None
    positions: str | None


class Case(NamedTuple):
    """An offered combination, with a scheme, a number of queries, and whether the sequences are padded on the left."""

    offered: Offered
    scheme: str
    seqlen_q: int
    padded: bool

    def __str__(self) -> str:
        head_dim, page, dtype, cache_dtype, positions = self.offered
        words = [f"d{head_dim}", f"page{page}" if page else "contiguous", str(dtype).removeprefix("torch.")]
        words += [cache_dtype or "plain", *filter(None, [positions]), self.scheme, f"q{self.seqlen_q}"]
        return "-".join([*words, *(["padded"] if self.padded else [])])


HEAD_DIMS = (8, 16, 24, 32, 40, 64, 96, 128, 192, 256, 264, 512)
PAGES = (0, 16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = (None, "int8")
POSITIONS = (None, "tables", "stored")
# two of these divide the head into parts
SCHEMES = ("rope", "rope_interleaved", "rope_partial", "rope_behind", "rerope", "none")
SEQLENS = (1, 20, 70)  # the decode kernel with its narrow and its wide tile, and attention_chunks
PADDED = (False, True)
AXES = (HEAD_DIMS, PAGES, DTYPES, CACHE_DTYPES, POSITIONS)


def is_offered(head_dim, page, dtype, cache_dtype, positions) -> bool:
    """Whether impl="triton" accepts this call. The function makes the call with zero sequences, so that no kernel is
    launched."""

    def empty(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, options = page or 256, {}
    if cache_dtype is not None:
        scale = empty(0, rows, 1, dtype=torch.float32)
        options |= {"k_scale": scale, "v_scale": scale.clone()}
    stored = {None: dtype, "int8": torch.int8}.get(cache_dtype, cache_dtype)
    cache = empty(0, rows, 1, head_dim, dtype=stored)
    if page:
        options["block_table"] = empty(0, 1, dtype=torch.int32)
    if positions == "tables":
        options["page_positions"] = empty(0, 1, dtype=torch.int32)
    elif positions == "stored":
        options["slot_positions"] = empty(0, rows, dtype=torch.float32)
    q, lengths = empty(0, 1, 1, head_dim, dtype=dtype), empty(0, dtype=torch.int32)
    try:
        rotary = Rotary.rope(head_dim)
        cached_call(q, cache, cache.clone(), rotary, lengths, impl="triton", **options)
    except (TypeError, ValueError):
        return False
    return True


def product() -> list[Case]:
    """Returns every offered combination once. Schemes, numbers of queries and padding alternate."""
    combinations = [Offered(*values) for values in itertools.product(*AXES) if _fits(*values)]
    rest = list(itertools.product(SCHEMES, SEQLENS, PADDED))
    random.Random(0).shuffle(rest)
    return [Case(offered, *rest[n % len(rest)]) for n, offered in enumerate(combinations)]


def _fits(head_dim, page, dtype, cache_dtype, positions) -> bool:
    plain = cache_dtype is None and positions is None
    return plain if head_dim > 256 else bool(page) or positions != "tables"


def sample() -> list[Case]:
    """Returns a small set of cases that covers every pair of values of two different axes, chosen greedily. It is the
    same in every run."""
    choose, axes = random.Random(0), (*AXES, SCHEMES, SEQLENS, PADDED)
    missing = {pair for values in itertools.product(*axes) if _fits(*values[:5]) for pair in _pairs(values)}
    cases = []
    while missing:
        best: tuple = ()
        most = -1
        for _ in range(100):
            values = _grown(choose, axes, missing)
            found = len(missing.intersection(_pairs(values))) if _fits(*values[:5]) else -1
            if found > most:
                best, most = values, found
        missing.difference_update(_pairs(best))
        cases.append(Case(Offered(*best[:5]), *best[5:]))
    return cases


def _grown(choose: random.Random, axes: tuple, missing: set) -> tuple:
    """Returns values of all axes that include one missing pair. The other values are drawn at random."""
    values = [choose.choice(axis) for axis in axes]
    for n, value in choose.choice(sorted(missing, key=repr)) if len(missing) < 200 else ():
        values[n] = value
    return tuple(values)


def _pairs(values: Iterable) -> Iterator[tuple]:
    return itertools.combinations(enumerate(values), 2)
