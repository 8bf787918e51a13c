"""``dual_chunk_attention_config`` (Qwen2.5-1M), which neither transformers nor vLLM computes. Imports nothing."""

from __future__ import annotations

from typing import Any

CHUNKS = "dual_chunk_attention_config"
SIZES = ("chunk_size", "local_size")
LENGTH = "original_max_position_embeddings"
SPARSE = (
    "sparse_attention_config",
    "sparse_attention_enabled",
    "sparse_attention_threshold",
    "sparse_attention_last_q",
)


def read_chunks(chunks) -> list[Any]:
    """The arguments of ``Rotary.dual_chunk``: chunk_size, local_size, and the length of Qwen's factor where there is
    one. The sparse attention that may stand beside them is an approximation for speed, and left out.

    Raises:
        TypeError, ValueError: names the key, what was expected and what came.
    """
    if not isinstance(chunks, dict):
        raise TypeError(f"{CHUNKS}: expected a dict with {', '.join(SIZES)}, got {chunks!r}")
    if missing := [name for name in SIZES if chunks.get(name) is None]:
        raise ValueError(f"{CHUNKS}: expected {' and '.join(SIZES)}, got none of {missing[0]} in {chunks!r}")
    if unknown := sorted(set(chunks) - {*SIZES, LENGTH, *SPARSE}):
        raise ValueError(f"{CHUNKS}: expected some of {', '.join((*SIZES, LENGTH, *SPARSE))}, got {unknown[0]!r}")
    length = chunks.get(LENGTH)
    return [*(chunks[name] for name in SIZES), *([length] if length else [])]
