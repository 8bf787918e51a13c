"""``dual_chunk_attention_config`` (Qwen2.5-1M) as the option dual_chunk of the field. Nothing here imports vLLM."""

from __future__ import annotations

from ..dual_chunk import CHUNKS, read_chunks
from ..options import FIELD


def adopt_chunks(model) -> bool:
    """Moves dual_chunk_attention_config of a ModelConfig into the field "flashrope", where its workers find it too.

    vLLM's layers must not see it: they would ask for an attention that vLLM has no backend for. A field that has
    dual_chunk, false included, or rotary keeps it.

    Returns:
        Whether the configuration asks for sparse attention too. The attention here is dense.

    Raises:
        TypeError, ValueError: names the key, what was expected and what came.
    """
    configs = _configs(model)
    chunks = read_chunks(*configs)
    for config in configs:
        if hasattr(config, CHUNKS):
            delattr(config, CHUNKS)
    if chunks is None:
        return False
    holder = next((config for config in configs if getattr(config, FIELD, None) is not None), configs[0])
    field = getattr(holder, FIELD, None)
    if field is None:
        field = {}
    # what is no dict is refused by make_plan
    if isinstance(field, dict) and field.get("dual_chunk") is None and field.get("rotary") is None:
        setattr(holder, FIELD, {**field, "dual_chunk": chunks.arguments})
    return chunks.sparse


def _configs(model) -> list:
    """The text model's configuration, and that of the whole, which may be the same."""
    configs = (getattr(model, name, None) for name in ("hf_text_config", "hf_config"))
    return [config for config in configs if config is not None]
