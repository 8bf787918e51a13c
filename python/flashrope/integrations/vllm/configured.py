"""Finds the field "flashrope" of a served model: where it was configured, what was misspelt, and what is lost.

This file also turns ``dual_chunk_attention_config`` (Qwen2.5-1M) into the option dual_chunk of the field. Importing it
does not import vLLM.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...schemes.catalogue import add_options
from ...schemes.dual_chunk import CHUNKS, read_chunks
from ..scheme_options import FIELD, RAW_KEYS, option_names

OVERRIDES = "--hf-overrides"
SAVED = "config.json"
SIMILAR = 0.75  # of difflib, for names without case and punctuation


def asked(config) -> bool:
    """Whether the model of a VllmConfig has a field "flashrope"."""
    return holder_of_field(config.model_config) is not None


def holder_of_field(model):
    """Returns the configuration that has the field: the configuration of the text model or of the whole model. Returns
    None if neither has the field."""
    return next((each for each in _configs(model) if getattr(each, FIELD, None) is not None), None)


def _configs(model) -> list:
    """Returns the configurations of the text model and of the whole model, which may be the same."""
    configs = (getattr(model, name, None) for name in ("hf_text_config", "hf_config"))
    return [config for config in configs if config is not None]


def origin_of(model) -> str:
    """Returns where the field of a ModelConfig was configured, for errors and the log."""
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides):  # a function may have set the field
        return f"{OVERRIDES} or {SAVED}"
    return OVERRIDES if _override(model) is not None else SAVED


def _override(model):
    """Returns the field in hf_overrides, of the whole model or of a part of it, or None."""
    return _find_field(getattr(model, "hf_overrides", None))


def _find_field(config):
    """Returns the field in a configuration that is a dict, or in a dict in it, or None."""
    if not isinstance(config, Mapping):
        return None
    parts = [config, *(each for each in config.values() if isinstance(each, Mapping))]
    return next((each[FIELD] for each in parts if each.get(FIELD) is not None), None)


# ---- what was misspelt or is lost


def misspelt(model) -> Iterator[str]:
    """Yields a warning for every key of a ModelConfig that nothing reads and that was probably meant for the field."""
    overrides = getattr(model, "hf_overrides", None)
    overrides = overrides if isinstance(overrides, dict) else {}
    found = {name: SAVED for config in _configs(model) for name in vars(config)} | dict.fromkeys(overrides, OVERRIDES)
    for name, origin in found.items():
        if name != FIELD and difflib.get_close_matches(_letters(name), [FIELD], cutoff=SIMILAR):
            yield f'{name} of {origin}: expected the name "{FIELD}", got "{name}", which has no effect'
    loose = {name: overrides[name] for name in [*option_names(), RAW_KEYS] if name in overrides}
    if loose:
        yield (
            f"{', '.join(loose)} of {OVERRIDES}: expected options within the field, {_as_json({FIELD: loose})}, got "
            f"{_as_json(loose)}, which has no effect"
        )


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def dropped(model, saved: Mapping[str, Any] | None) -> str:
    """Returns a warning if hf_overrides replaces options of config.json by none of the same kind, otherwise "".

    saved: the content of config.json, or None if the model has no such file.
    """
    given, had = _override(model), _find_field(saved)
    if not isinstance(given, dict) or not isinstance(had, dict):
        return ""
    together = add_options({name: value for name, value in had.items() if value not in (None, False)}, given)
    lost = {name: value for name, value in together.items() if name not in given}
    if not lost:
        return ""
    return (
        f"{FIELD} of {OVERRIDES}: replaces the whole field of {SAVED} and drops {_as_json(lost)}; to keep these "
        f"options, pass {_as_json({FIELD: together})}"
    )


def _as_json(value) -> str:
    return json.dumps(value, default=repr)


# ---- dual_chunk_attention_config


def adopt_chunks(model) -> bool:
    """Moves dual_chunk_attention_config of a ModelConfig into the field "flashrope", which vLLM also sends to its
    workers.

    vLLM's layers must not see dual_chunk_attention_config, because they would need an attention for which vLLM has no
    backend. If the field already has dual_chunk (even false) or rotary, it is not changed.

    Returns:
        Whether the configuration also requests sparse attention. This package's attention is dense.

    Raises:
        TypeError, ValueError: dual_chunk_attention_config is invalid. The message names the key.
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
    # make_plan raises an error for a field that is not a dict.
    if isinstance(field, dict) and field.get("dual_chunk") is None and field.get("rotary") is None:
        setattr(holder, FIELD, {**field, "dual_chunk": chunks.arguments})
    return chunks.sparse
