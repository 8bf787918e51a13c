"""Handles differences between the supported versions of transformers.

Decoders take and return a cache as "past_key_values", and from transformers 5.24 on as "cache". Decoders before 5.40
also accept the old name, so the hooks of a decoder may get either name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.masking_utils import create_causal_mask

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
UNTESTED = (5, 25)  # the first untested version; later versions are untested, too

OLD_NAME = "past_key_values"
# The name of a cache in the arguments and the outputs of decoders and their layers.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else OLD_NAME
# Whether a training forward with gradient checkpointing and without gradients returns a cache.
CACHES_WITHOUT_GRADIENTS = VERSION >= (5, 24)


def check_version() -> None:
    """Checks that the tests ran with this version of transformers.

    Raises:
        ValueError: the tests did not run with this version. The message names the version.
    """
    if VERSION >= UNTESTED:
        newest = ".".join(map(str, UNTESTED))
        raise ValueError(
            f"transformers: a version from {newest} on is not supported (the tests did not run with it), got "
            f"{transformers.__version__}; pip install 'transformers<{newest}'"
        )


def arguments_of(decoder, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a decoder's forward by name, with a cache under the name ``CACHE``."""
    named = dict(kwargs)
    if args:
        named = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | named
    if OLD_NAME in named:
        named.setdefault(CACHE, named[OLD_NAME])  # if both names are given, transformers reads the new one
    return named


def with_arguments(decoder, args: tuple, kwargs: Mapping[str, Any], added: Mapping[str, Any]) -> tuple[tuple, dict]:
    """Returns the arguments of a decoder's forward with ``added``, which replaces those of the same name."""
    named = list(inspect.signature(decoder.forward).parameters)[: len(args)]
    return tuple(added.get(name, each) for name, each in zip(named, args, strict=False)), {
        **kwargs,
        **{name: value for name, value in added.items() if name not in named},
    }


def cache_of(output) -> Any:
    """Returns the cache in a model's output, or None if the output has no cache."""
    return getattr(output, CACHE, None)
