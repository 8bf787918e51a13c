"""Prefill and training with ReRoPE, against two FlexAttention passes, two dense score matrices, and flashrope's HoPE.

python -m bench rerope [--head-dim 128] [--window 512] [--seqlens 2048 8192] [--passes forward] [--no-causal]
"""

from __future__ import annotations

from .contestants import prefill_rerope
from .session import prefill

CUDA = {
    "heads": 16,
    "heads_kv": 16,
    "head_dim": 128,
    "seqlens": [2048, 4096, 8192, 16384],
    "tokens": 16384,
    "window": 512,
}
CPU = {"heads": 4, "heads_kv": 4, "head_dim": 64, "seqlens": [1024, 2048, 4096], "tokens": 4096, "window": 256}


def main(argv: list[str]) -> int:
    return prefill("rerope", __doc__, CUDA, CPU, prefill_rerope, argv)
