"""Hugging Face transformers: ``convert(model)`` runs a model on this package's attention, ``revert`` undoes it.

Where to look:

    conversion          convert and revert
    plan                which models are accepted, and what is done to them
    applying            applies a plan to a model, and undoes it
    untested            compares a model of another type with itself, converted
    layer_schemes       the scheme of every layer
    attention_function  the attention function that transformers calls
    masks               the mask function that transformers calls
    continuous_batching pages and requests of transformers' generate_batch
    caches              which conversion filled a cache
    codes_cache         CodesCache, in 8 or 4 bits
    saved               what a saved configuration says of the conversion
    loading             from_pretrained, register_auto_classes
    suggestion          suggest
    hf_config           the scheme of a configuration; needs no transformers

The names below are imported on first use, so ``hf_config`` works where transformers is not installed.
"""

from importlib import import_module

_MODULES = {
    "CodesCache": "codes_cache",
    "FAMILIES": "plan",
    "Suggestion": "suggestion",
    "accept_cache": "caches",
    "convert": "conversion",
    "from_pretrained": "loading",
    "register_auto_classes": "loading",
    "revert": "conversion",
    "suggest": "suggestion",
}

__all__ = [
    "CodesCache",
    "FAMILIES",
    "Suggestion",
    "accept_cache",
    "convert",
    "from_pretrained",
    "register_auto_classes",
    "revert",
    "suggest",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
