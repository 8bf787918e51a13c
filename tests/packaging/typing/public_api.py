"""Contains public calls for a type checker. `mypy` reads this file, and nothing runs it."""
# mypy: warn-unused-ignores

from __future__ import annotations

import torch
from flashrope import KVCache, PagedKVCache, Rotary, attention, attention_varlen, attention_with_cache


def schemes() -> list[Rotary]:
    rope = Rotary.rope(head_dim=128, base=500_000.0, rotary_dim=64, interleaved=True)
    hope = Rotary.hope(128, train_length=8192, compact=True)
    table: torch.Tensor = hope.inv_freq
    bands = [(band.start, band.stop, band.slope, band.offset) for band in hope.rectify(window=1024, factor=16.0).bands]
    text: str = rope.text
    assert bands and text
    return [
        rope.yarn(4.0, train_length=4096).log_n(4096, clip=False),
        Rotary.from_inv_freq(table, head_dim=128),
        rope.ntk(4.0, variant="mixed"),
        rope.interpolate(2.0).local(512),
        Rotary.from_text(text),
        Rotary.axial(64, axes=2),
    ]


def calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    out, lse = attention(q, k, v, rotary, causal=False, softmax_scale=0.1, return_lse=True, impl="reference")
    packed = attention_varlen(q[0], k[0], v[0], rotary, lengths, lengths, 16, 16)
    cached = attention_with_cache(q, k, v, rotary, lengths, cache_leftpad=lengths, num_splits=4, validate=True)
    attention(q, k, v, rotary, window_size=(128, 0))  # type: ignore[arg-type]  # an unknown keyword is an error
    return out + packed + cached + lse


def caches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> int:
    cache = KVCache(batch=2, capacity=64, heads_kv=2, head_dim=64, dtype=torch.bfloat16, device="cpu")
    cache.attend(q, rotary, k, v)
    cache.truncate(None, [3, 4])
    paged = PagedKVCache(
        pages=8, page_size=16, heads_kv=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu")
    )
    sequence: int = paged.allocate()
    paged.append([sequence], k, v)
    paged.free(paged.fork(sequence))
    return cache.lengths[0] + paged.free_pages
