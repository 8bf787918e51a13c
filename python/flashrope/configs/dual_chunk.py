"""``dual_chunk_attention_config`` (Qwen2.5-1M), which neither transformers nor vLLM computes. Imports nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

CHUNKS = "dual_chunk_attention_config"
SIZES = ("chunk_size", "local_size")
LENGTH = "original_max_position_embeddings"
SPARSE = (
    "sparse_attention_config",
    "sparse_attention_enabled",
    "sparse_attention_threshold",
    "sparse_attention_last_q",
)


class Chunks(NamedTuple):
    """What a configuration asks for.

    Attributes:
        arguments: of ``Rotary.dual_chunk``: chunk_size, local_size, and the length of Qwen's factor where it is given.
        sparse: whether sparse attention is asked for too. It approximates the dense attention for speed, and is left
            out here.
    """

    arguments: list[Any]
    sparse: bool


def asks_for_chunks(config) -> bool:
    """Whether a configuration has a ``dual_chunk_attention_config`` that is not empty."""
    return bool(getattr(config, CHUNKS, None))


def read_chunks(*configs) -> Chunks | None:
    """Reads ``dual_chunk_attention_config`` of the first of the configurations that has one.

    Returns:
        The chunks, or None where no configuration asks for them.

    Raises:
        TypeError, ValueError: names the key, what was expected and what came.
    """
    config = next(filter(asks_for_chunks, configs), None)
    if config is None:
        return None
    chunks = getattr(config, CHUNKS)
    if not isinstance(chunks, dict):
        raise TypeError(f"{CHUNKS}: expected a dict with {', '.join(SIZES)}, got {chunks!r}")
    if missing := [name for name in SIZES if chunks.get(name) is None]:
        raise ValueError(f"{CHUNKS}: expected {' and '.join(SIZES)}, got none of {missing[0]} in {chunks!r}")
    if unknown := sorted(set(chunks) - {*SIZES, LENGTH, *SPARSE}):
        raise ValueError(f"{CHUNKS}: expected some of {', '.join((*SIZES, LENGTH, *SPARSE))}, got {unknown[0]!r}")
    length = chunks.get(LENGTH)
    arguments = [*(chunks[name] for name in SIZES), *([length] if length else [])]
    return Chunks(arguments, bool(chunks.get("sparse_attention_enabled", chunks.get("sparse_attention_config"))))
