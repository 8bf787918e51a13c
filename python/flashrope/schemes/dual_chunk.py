"""Reads ``dual_chunk_attention_config`` (Qwen2.5-1M), which neither transformers nor vLLM supports. This file imports
only the standard library."""

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
    """The content of a ``dual_chunk_attention_config``.

    Attributes:
        arguments: the arguments of ``Rotary.dual_chunk``: chunk_size, local_size, and length_scale if it is given.
        sparse: whether sparse attention is requested, too. Sparse attention approximates dense attention for speed, and
            is not supported here.
    """

    arguments: list[Any]
    sparse: bool


def asks_for_chunks(config) -> bool:
    """Whether a configuration has a ``dual_chunk_attention_config`` that is not empty."""
    return bool(getattr(config, CHUNKS, None))


def read_chunks(*configs) -> Chunks | None:
    """Reads ``dual_chunk_attention_config`` from the first configuration that has one.

    Returns:
        Its content, or None if no configuration has one.

    Raises:
        TypeError, ValueError: a key is invalid. The message names the key and says what was expected.
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
        raise ValueError(f"{CHUNKS}: expected names among {', '.join((*SIZES, LENGTH, *SPARSE))}, got {unknown[0]!r}")
    length = chunks.get(LENGTH)
    arguments = [*(chunks[name] for name in SIZES), *([length] if length else [])]
    return Chunks(arguments, bool(chunks.get("sparse_attention_enabled", chunks.get("sparse_attention_config"))))
