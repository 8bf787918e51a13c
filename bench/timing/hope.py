"""Prefill and training with RoPE and HoPE, against attention after a separate rotation.

python -m bench hope [--head-dim 128] [--heads 16] [--heads-kv 16] [--seqlens 2048 8192] [--passes forward]
"""

from __future__ import annotations

from .contestants import prefill_hope
from .session import prefill

CUDA = {
    "heads": 16,
    "heads_kv": 16,
    "head_dim": 128,
    "seqlens": [512, 1024, 2048, 4096, 8192, 16384],
    "tokens": 16384,
    "window": 512,
}
CPU = {"heads": 4, "heads_kv": 4, "head_dim": 64, "seqlens": [512, 1024, 2048, 4096], "tokens": 4096, "window": 256}


def main(argv: list[str]) -> int:
    return prefill("hope", __doc__, CUDA, CPU, prefill_hope, argv)
