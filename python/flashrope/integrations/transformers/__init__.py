"""Hugging Face transformers: ``convert(model)`` runs a model on this package's attention, and ``revert`` undoes it.

Where to look:

    conversion           convert, revert, from_pretrained, register_auto_classes
    plan                 checks that a model is supported, and plans its conversion
    applying             applies a plan to a model and its configuration, and undoes it
    embeddings           the model's rotary embeddings: compares their tables, and switches their rotation off
    checkpointing        refuses the backward of a forward under another scheme
    configurations       writes options to a model's configuration, and gives the model a configuration of its own
    adapters             saves options with PEFT adapters, and compares them when an adapter is loaded
    untested             compares the outputs of a converted model of an untested type with the stock model's
    schemes              the scheme of every layer, and suggest; does not need transformers
    attention            the attention function and the mask function that transformers calls
    caches               records which conversion filled a cache, and defines CodesCache (int8)
    one_tensor           SharedKeysCache and LatentCache: one tensor per layer
    shared_layers        layers that read the keys of earlier layers
    reuse                passages that are prefilled once and joined into prompts
    continuous_batching  pages and requests of transformers' generate_batch
    versions             differences between versions of transformers

../../schemes/hugging_face.py reads the scheme of a configuration and does not need transformers.

The names below are imported on first use, so ``layer_schemes`` works without transformers.
"""

from importlib import import_module

_MODULES = {
    "CodesCache": "caches",
    "FAMILIES": "conversion_plan",
    "LatentCache": "one_tensor",
    "Passage": "reuse",
    "SharedKeysCache": "one_tensor",
    "Suggestion": "layer_schemes",
    "accept_cache": "caches",
    "convert": "conversion",
    "from_pretrained": "conversion",
    "join_passages": "reuse",
    "prefill_passage": "reuse",
    "register_auto_classes": "conversion",
    "revert": "conversion",
    "suggest": "layer_schemes",
}

__all__ = [
    "CodesCache",
    "FAMILIES",
    "LatentCache",
    "Passage",
    "SharedKeysCache",
    "Suggestion",
    "accept_cache",
    "convert",
    "from_pretrained",
    "join_passages",
    "prefill_passage",
    "register_auto_classes",
    "revert",
    "suggest",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
