"""Reads the options of a converted or served model: keywords of ``convert``, or a configuration's field "flashrope".

``convert``, ``from_pretrained``, the vLLM plugin and the commands all read options here. schemes/catalogue.py lists
them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..schemes.catalogue import known_options
from ..schemes.dual_chunk import asks_for_chunks

FIELD = "flashrope"
DUAL_CHUNK = "dual_chunk"
LOG_N_CLIP = "log_n_clip"  # an option whose default is True: False has an effect
IN_CONFIGURATION = "the model's configuration"
RAW_KEYS = "raw_keys"  # an option of the field, for engines: the engine's cache then holds raw keys under every scheme


def training_length(config, name: str) -> int:
    """Returns the configuration's max_position_embeddings, in tokens. name: the option, for the error if the
    configuration does not have this length."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ValueError(
            f"{name}: expected a length, because the configuration's max_position_embeddings is {length!r}"
        )
    return length


def read_options(given: Mapping[str, Any], config, length=training_length) -> dict[str, Any]:
    """Checks options and returns the options that have an effect. rerope=0 has an effect. None, False and default
    values have no effect, with two exceptions: log_n_clip=False, and dual_chunk=False, which switches off a
    configuration's dual_chunk_attention_config.

    Args:
        given: the options, by name. rotary is a Rotary, its text, or a dict with a Rotary or text per layer type.
        config: the text model's configuration.
        length: a function (config, name of an option) that returns the training length. It is called if the option is
            True.

    Returns:
        The options, in the form in which schemes/catalogue.py applies them. A True that stands for a training length is
        replaced by the length.

    Raises:
        TypeError, ValueError: an option is invalid. The message names the option and says what was expected.
    """
    _check_names(given, option_names())
    asked = {
        name: value for name, value in given.items() if value is not None and (value is not False or name == LOG_N_CLIP)
    }
    found: dict[str, Any] = {}
    if "rotary" in asked:
        found["rotary"] = _read_rotary(asked["rotary"], config)
    options = known_options()
    of_stage: dict[int, str] = {}
    for name, option in options.items():
        if name in asked:
            if option.stage in of_stage:
                names = [each.name for each in options.values() if each.stage == option.stage]
                raise ValueError(
                    f"{name}: expected at most one of {', '.join(names)}, got also {of_stage[option.stage]}"
                )
            of_stage[option.stage] = name
            found[name] = option.read(name, asked[name], partial(length, config))
        beside = option.beside
        if beside and beside.name in asked:
            value = beside.read(beside.name, asked[beside.name])
            if name not in asked:
                raise ValueError(f"{beside.name}: not supported without {name}, got {value!r}")
            if value != beside.default:
                found[beside.name] = value
    found = {name: found[name] for name in asked if name in found}
    if given.get(DUAL_CHUNK) is False and asks_for_chunks(config):
        found[DUAL_CHUNK] = False
    return found


def _check_names(given: Mapping[str, Any], names: list[str]) -> None:
    if unknown := sorted(set(given) - set(names)):
        _refuse_earlier_names(given)
        close = difflib.get_close_matches(unknown[0], names, n=1)
        raise TypeError(
            f"options: expected names among {', '.join(names)}, got {unknown[0]!r}"
            + (f"; did you mean {close[0]}?" if close else "")
        )


def _refuse_earlier_names(given: Mapping[str, Any]) -> None:
    """Raises TypeError for names that options had before they became names of schemes."""
    found = {old: given[old] for old in ("window", "factor", "hope_train_length") if old in given}
    if "factor" in found:
        expected = f"leaky_rerope=({found.get('window', 'window')}, {found['factor']})"
    elif "window" in found:
        expected = f"rerope={found['window']!r}"
    elif found:
        expected = f"hope={found['hope_train_length']!r}"
    else:
        return
    raise TypeError(f"{' and '.join(found)}: renamed, expected {expected}, got {as_keywords(found)}")


def read_field(config, length=training_length, origin: str = IN_CONFIGURATION) -> dict[str, Any]:
    """Returns the options in a configuration's field, without raw_keys, or {} if it has no field.

    Args:
        origin: where the field was configured, for errors.

    Raises:
        TypeError, ValueError: an option is invalid. The message names the field, its origin and the option.
    """
    with naming_field(origin):
        _check_names(_field(config), [*option_names(), RAW_KEYS])
        return read_options(saved_options(config), config, length)


def saved_options(config) -> dict[str, Any]:
    """Returns what a configuration's field holds, without raw_keys and without checking it."""
    return {name: value for name, value in _field(config).items() if name != RAW_KEYS}


def keeps_raw_keys(config, origin: str = IN_CONFIGURATION) -> bool:
    """Whether a configuration's field requests raw keys in an engine's cache. origin: as in ``read_field``.

    Raises:
        TypeError: the field is not a dict, or raw_keys is not a boolean.
    """
    with naming_field(origin):
        value = _field(config).get(RAW_KEYS, False)
        if not isinstance(value, bool):
            raise TypeError(f"{RAW_KEYS}: expected true or false, got {value!r}")
        return value


@contextmanager
def naming_field(origin: str) -> Iterator[None]:
    """Puts the name of the field and its origin in front of the message of a TypeError or ValueError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{FIELD} of {origin}: {error}") from error


def _field(config) -> dict[str, Any]:
    given = getattr(config, FIELD, None)
    if given is not None and not isinstance(given, dict):
        raise TypeError(f"expected a dict with some of {', '.join([*option_names(), RAW_KEYS])}, got {given!r}")
    return given or {}


def to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options from ``read_options`` in the form in which a configuration holds them."""
    rotary = options.get("rotary")
    if rotary is None:
        return dict(options)
    return {
        **options,
        "rotary": {key: each.text for key, each in rotary.items()} if isinstance(rotary, dict) else rotary.text,
    }


def as_keywords(options: Mapping[str, Any]) -> str:
    """Returns options in the form of keyword arguments. Tuples are lists in files, and tuples again here."""
    return ", ".join(f"{name}={tuple(x) if isinstance(x, list) else x!r}" for name, x in options.items())


def option_names() -> list[str]:
    """Returns the names of all options of ``convert``."""
    options = known_options().values()
    return [
        "rotary",
        *(option.name for option in options),
        *(option.beside.name for option in options if option.beside),
    ]


def _read_rotary(value, config):
    if not isinstance(value, dict):
        return _read_one(value)
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    if len(layer_types) < 2 and (not value or sorted(value) != layer_types):
        raise ValueError(
            "rotary: expected one Rotary, because all layers of this model are of one type, got a dict with "
            f"{sorted(value)}"
        )
    if sorted(value) != layer_types:
        raise ValueError(f"rotary: expected the layer types {layer_types}, got {sorted(value)}")
    return {layer_type: _read_one(each) for layer_type, each in value.items()}


def _read_one(value):
    from ..schemes.rotary import Rotary

    if isinstance(value, Rotary):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"rotary: expected a Rotary, its text, or a dict with one for each layer type, got {type(value).__name__}"
        )
    try:
        return Rotary.from_text(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rotary: expected the text of a Rotary, got {value[:60]!r} ({error})") from error
