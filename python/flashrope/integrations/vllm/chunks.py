"""``dual_chunk_attention_config`` (Qwen2.5-1M) as the option dual_chunk of the field. Nothing here imports vLLM."""

from __future__ import annotations

from typing import Any

from ..options import FIELD

CHUNKS = "dual_chunk_attention_config"
SIZES = ("chunk_size", "local_size")
LENGTH = "original_max_position_embeddings"
SPARSE = (
    "sparse_attention_config",
    "sparse_attention_enabled",
    "sparse_attention_threshold",
    "sparse_attention_last_q",
)


def adopt_chunks(model) -> bool:
    """Moves dual_chunk_attention_config of a ModelConfig into the field "flashrope", where its workers find it too.

    vLLM's layers must not see it: they would ask for an attention that vLLM has no backend for. A field that has
    dual_chunk, false included, or rotary keeps it.

    Returns:
        Whether the configuration asks for sparse attention too, which the dense attention here takes the place of.

    Raises:
        TypeError, ValueError: names the key, what was expected and what came.
    """
    configs = _configs(model)
    found = [getattr(config, CHUNKS) for config in configs if hasattr(config, CHUNKS)]
    for config in configs:
        if hasattr(config, CHUNKS):
            delattr(config, CHUNKS)
    chunks = next((each for each in found if each), None)
    if chunks is None:
        return False
    sizes = _read(chunks)
    holder = next((config for config in configs if getattr(config, FIELD, None) is not None), configs[0])
    field = getattr(holder, FIELD, None)
    if field is None:
        field = {}
    # what is no dict is refused by make_plan
    if isinstance(field, dict) and field.get("dual_chunk") is None and field.get("rotary") is None:
        setattr(holder, FIELD, {**field, "dual_chunk": sizes})
    return bool(chunks.get("sparse_attention_enabled", chunks.get("sparse_attention_config")))


def _configs(model) -> list:
    """The text model's configuration, and that of the whole if it is another one."""
    configs = [getattr(model, name, None) for name in ("hf_text_config", "hf_config")]
    return [
        config for n, config in enumerate(configs) if config is not None and all(config is not c for c in configs[:n])
    ]


def _read(chunks) -> list[Any]:
    """[chunk_size, local_size], and the length of the factor where the configuration has one."""
    if not isinstance(chunks, dict):
        raise TypeError(f"{CHUNKS}: expected a dict with {', '.join(SIZES)}, got {chunks!r}")
    if missing := [name for name in SIZES if chunks.get(name) is None]:
        raise ValueError(f"{CHUNKS}: expected {' and '.join(SIZES)}, got none of {missing[0]} in {chunks!r}")
    if unknown := sorted(set(chunks) - {*SIZES, LENGTH, *SPARSE}):
        raise ValueError(f"{CHUNKS}: expected some of {', '.join((*SIZES, LENGTH, *SPARSE))}, got {unknown[0]!r}")
    length = chunks.get(LENGTH)
    return [*(chunks[name] for name in SIZES), *([length] if length else [])]
