"""Hugging Face transformers: ``convert(model)`` runs a model on this package's attention; ``revert`` undoes it.

``hf_config`` reads a rotary scheme from a configuration and does not need transformers; the names below import it.
"""

from importlib import import_module

__all__ = ["FAMILIES", "Suggestion", "convert", "revert", "suggest"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".conversion", __name__), name)
