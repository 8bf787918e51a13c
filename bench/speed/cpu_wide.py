"""Measures wide heads for ``python -m bench cpu``: training and decoding at head_dim 512, and values that are
channels of the keys.

Only compiled kernels are measured. Training and decoding are compared with SDPA. A cache whose values are channels of
its keys is compared with separate caches of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from flashrope import attention_with_cache

from .contestants import KERNELS
from .cpu_cases import COMPILED, SCHEMES, SDPA, Entry, entry, forward_entries, heads_first
from .decode import own_with_cache
from .problem import Problem

HEAD_DIM, HEADS, SEQLEN, KEYS, GROUPED = 512, 2, 2048, 32768, 16  # GROUPED: query heads that share HEADS key heads
TRAINING = f"forward + backward, seqlen {SEQLEN}, window {SEQLEN // 4}, head_dim {HEAD_DIM}"
DECODING = f"decoding, {KEYS} keys, head_dim {HEAD_DIM}"
SHARED = f"{DECODING}, {GROUPED} heads to {HEADS}, values in keys"
WIDE = ("RoPE", "ReRoPE")
GOALS = (  # (name of the figure, largest allowed value)
    *((f"{DECODING}: {name}, {COMPILED} / {SDPA}", 1.0) for name in WIDE),
    *((f"{TRAINING}: {name}, {COMPILED} / {SDPA}", 0.85) for name in WIDE),
    *((f"{SHARED}: one cache, {kind} / two caches, {kind}", 0.6) for kind in ("float32", "bfloat16")),
)


def over_cache(shared: bool, impl: str, problem: Problem) -> Callable:
    """Returns a call that decodes with ReRoPE. shared: whether there is only a cache of keys, whose channels are also
    the values. False: keys and values have separate caches."""
    rotary, seqlens = problem.rerope(), torch.full((problem.batch,), problem.seqlen, dtype=torch.int32)

    def attend(q, k, v):
        return attention_with_cache(q, k, k if shared else v, rotary, seqlens, impl=impl)

    return attend


def shared_entries(kernels) -> list[Entry]:
    """Returns ReRoPE over separate caches of keys and values, and over one cache whose values are channels of its
    keys."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        for name, shared in (("two caches", False), ("one cache", True)):
            prepare, exact = (partial(over_cache, shared, impl) for impl in (None, "reference"))
            base = f"two caches, {kind}"
            each = entry(f"{name}, {kind}", base, Problem.rerope, prepare, kernels, heads_first, True, dtype, exact)
            found.append(each)
    return found


def decoding_entries(kernels) -> list[Entry]:
    """Returns SDPA, and RoPE and ReRoPE over raw keys."""
    found = [entry(SDPA, SDPA, Problem.none, KERNELS["SDPA flash"], arrange=heads_first)]
    for name in WIDE:
        cached = partial(own_with_cache, SCHEMES[name], None)
        found.append(entry(f"{name}, {COMPILED}", SDPA, SCHEMES[name], cached, kernels, heads_first, True))
    return found


def training_entries(kernels) -> list[Entry]:
    """Returns SDPA, and RoPE and ReRoPE with the compiled kernels."""
    return [each for each in forward_entries(kernels, WIDE) if each.name == SDPA or each.name.endswith(COMPILED)]


def measure(bench) -> None:
    """Measures the tables of wide heads with a ``cpu.Bench``."""
    if bench.kernels is None:
        return
    sizes = dict(heads=HEADS, heads_kv=HEADS, head_dim=HEAD_DIM)
    bench.measure(TRAINING, training_entries(bench.kernels), bench.problem(SEQLEN, SEQLEN // 4, **sizes), 0.1, True)
    decoding = bench.problem(KEYS, 1024, decoding=True, **sizes)
    bench.measure(DECODING, decoding_entries(bench.kernels), decoding, 0.1)
    bench.measure(SHARED, shared_entries(bench.kernels), decoding.replace(heads=GROUPED), 0.1)
