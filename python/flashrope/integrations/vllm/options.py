"""The field "flashrope" of a model's configuration: the options of ``convert``, and clip."""

from __future__ import annotations

import math
import numbers
from typing import Any

from ...rotary.rotary import Rotary
from ..transformers.layer_schemes import check_beyond

FIELD = "flashrope"
KEYS = ("window", "factor", "log_n", "clip", "hope_train_length", "self_extend", "dual_chunk", "rotary")


def read_options(given) -> dict[str, Any]:
    """The options as ``LayerScheme`` takes them, and clip; rotary as a Rotary or a dict of one per layer type.

    Args:
        given: the field's value. {} asks for the model's own scheme, with raw keys in the cache.

    Raises:
        TypeError, ValueError: names the key, what was expected and what came.
    """
    if not isinstance(given, dict):
        raise TypeError(f"{FIELD}: expected a dict with some of {', '.join(KEYS)}, got {given!r}")
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        raise ValueError(f"{FIELD}: expected keys of {', '.join(KEYS)}, got {unknown[0]!r}")
    # convert saves options that are switched off as False
    options = {name: None if value is False and name != "clip" else value for name, value in given.items()}
    options = {name: options.get(name) for name in KEYS}
    window = options["window"]
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 0):
        raise ValueError(f"window: expected a non-negative integer, got {window!r}")
    for name in ("factor", "log_n", "hope_train_length"):
        value = options[name]
        if value is True and name == "log_n":
            continue
        if value is not None and not _is_positive(value):
            raise ValueError(f"{name}: expected a positive number{' or true' * (name == 'log_n')}, got {value!r}")
    if options["factor"] is not None and window is None:
        raise ValueError("factor: expected a window beside it, beyond which distances grow by 1 / factor")
    check_beyond({name: value for name, value in options.items() if value is not None})
    if options["clip"] is not None:
        if not isinstance(options["clip"], bool):
            raise TypeError(f"clip: expected true or false, got {options['clip']!r}")
        if options["log_n"] is None:
            raise ValueError("clip: expected log_n beside it, whose factor it keeps at 1 or more")
    options["rotary"] = _read_rotary(options["rotary"])
    return options


def _is_positive(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < value < math.inf


def _read_rotary(value):
    if isinstance(value, dict):
        return {layer_type: _read_text(text) for layer_type, text in value.items()}
    return None if value is None else _read_text(value)


def _read_text(text) -> Rotary:
    if not isinstance(text, str):
        raise TypeError(f"rotary: expected Rotary.text, or a dict of one per layer type, got {type(text).__name__}")
    try:
        return Rotary.from_text(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rotary: expected Rotary.text, got {text[:60]!r} ({error})") from error
