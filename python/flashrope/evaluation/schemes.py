"""Finds the schemes under which a Hugging Face model can be measured."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..cli.options import BadInput
from ..integrations.options import FIELD, read_field, read_options
from ..rotary.catalogue import SCHEMES, Lengths, describe_options, name_options
from ..rotary.rotary import Rotary
from .model import rope_type_by_length, text_config
from .streaming import PIECE, Kept


class Measured(NamedTuple):
    """A scheme of the catalogue on one model.

    apply: a function that converts the model to the scheme.
    words: a description of the scheme's options.
    same_until: up to this length, in tokens, the scheme computes the same as the model's own scheme. 0: at no length.
    kept: the tokens that stay in the cache while the model reads. None: all tokens.
    """

    name: str
    label: str
    apply: Callable[[], object]
    words: str
    same_until: int = 0
    kept: Kept | None = None


SINKS = 4  # number of attention sinks (StreamingLLM, table 2)


def applicable(
    model,
    names: Sequence[str],
    train_length: int,
    longest: int,
    windows: Sequence[int] = (),
    given: Sequence[str] = (),
    all_converted: bool = False,
    sinks: int | None = None,
) -> tuple[list[Measured], dict[str, str]]:
    """Returns the schemes that this model can run under, and {label: reason} for the others.

    The model is unchanged afterwards. If it was converted before, "stock" is the scheme that it had, the other schemes
    are applied on top of that scheme, and all schemes get full names. Equal schemes are listed once, under the first
    name.

    Args:
        names: names in SCHEMES.
        train_length, longest: the training length and the longest length to measure, in tokens.
        windows: every scheme with a window is listed once for each of these windows. Default: half the training length.
        given: schemes that replace the model's scheme: the text of a Rotary, a file with that text, or the folder of a
            saved model.
        all_converted: the stock model also runs on this package's attention, under its own scheme.
        sinks: also list the model's own scheme with a cache that keeps the first 4 tokens and this many last tokens.

    Raises:
        BadInput: the model cannot run under any of the schemes, or cannot run under one of ``given``.
    """
    from ..integrations.transformers import convert, revert

    found, skipped = [], {}
    own = read_field(text_config(model))
    converted = bool(own)

    def stock():
        if converted:  # revert raises for families that convert does not support
            revert(model)
        return convert(model, **own) if own or all_converted else model

    def raw_keys():  # reverts first, because convert would keep the options of the previous scheme
        return convert(revert(model) if converted else model, **own)

    seen: dict[tuple, str] = {}
    stock_label = ""

    def add(name: str, asked: str, label: str, apply: Callable[[], object], words: str) -> None:
        apply()
        key = _layers(model) or (name,)  # no layers: a stock model that was not converted
        if key in seen:
            skipped[asked] = f"the same scheme as {seen[key]}"
            return
        seen[key] = label
        own_layers = next((x for x, of in seen.items() if of == stock_label and isinstance(x[0], tuple)), ())
        until = 0 if label == stock_label else _same_until(key, own_layers)
        found.append(Measured(name, label, apply, words, until))

    for name in names:
        row = SCHEMES[name]
        if name == "stock":
            stock_label = label = name_options(own) or row.label
            words = "its own scheme, converted" if all_converted else "the library's own attention"
            try:
                add(name, row.label, label, stock, "as it was saved" if own else words)
            except ValueError as error:
                raise BadInput(f"--cache-dtype: expected a model that convert takes; {error}") from None
            if not own:
                seen |= _stock_layers(model, label)
            continue
        chosen = windows if row.reads_window and windows else [None]
        for window in chosen:
            label = asked = f"{row.label}, window {window:,}" if len(chosen) > 1 else row.label
            try:
                options = row.options(Lengths(train_length, longest, window))
                changes = own | options
                words = describe_options(options).removeprefix(f"{label} ")
                if own:
                    new = {option: value for option, value in options.items() if own.get(option) != value}
                    on_top = not own.keys() & new.keys()
                    label = f"{name_options(own)}; + {name_options(new)}" if on_top and new else name_options(changes)
                convert(model, **changes)
                converted = True
                add(name, asked, label, partial(convert, model, **changes), words)
            except ValueError as error:
                skipped[asked] = str(error)
    for each in given:
        label, changes = _read_given(each, model)
        if repeated := sum(label == name or name.startswith(f"{label} (") for name in (*seen.values(), *skipped)):
            label = f"{label} ({repeated + 1})"
        try:
            convert(model, **changes)
        except (TypeError, ValueError) as error:
            raise BadInput(f"--rotary: {label}: {error}") from None
        converted = True
        add(
            "rotary",
            label,
            label,
            partial(convert, model, **changes),
            "a scheme of your own" if "rotary" in changes else each,
        )
    if sinks:
        label, kept = f"window {sinks:,} with {SINKS} sinks", Kept(SINKS, sinks)
        try:
            _check_streams(model)
            raw_keys()
            converted = True
            words = f"StreamingLLM: its own scheme, read in pieces of {PIECE} tokens"
            found.append(Measured("sinks", label, raw_keys, words, SINKS + sinks, kept))
        except ValueError as error:
            skipped[label] = str(error)
    stock()
    if not found:
        raise BadInput(f"--schemes: none of {', '.join(names)} fits this model: {'; '.join(skipped.values())}")
    return found, skipped


def settings(schemes: Sequence[Measured], skipped: dict[str, str]) -> dict[str, str]:
    """Returns the entries about schemes for a list of settings."""
    facts = {"schemes": "; ".join(f"{scheme.label}: {scheme.words}" for scheme in schemes)}
    if skipped:
        facts["left out"] = "; ".join(f"{label}: {reason}" for label, reason in skipped.items())
    return facts


def _check_streams(model) -> None:
    """Checks that a model can read text in pieces, with a cache that is cut between them.

    Raises:
        ValueError: the model cannot be read in this way.
    """
    from transformers import DynamicCache

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
    if kinds:
        raise ValueError(f"sinks: a cache with layers of the type {', '.join(sorted(kinds))} is not supported")
    if kind := rope_type_by_length(model):
        raise ValueError(f"sinks: rope type {kind} is not supported, its frequencies depend on the length")


def _layers(model) -> tuple:
    """Returns the schemes of a converted model's layers, for comparing models, or () if it is not converted."""
    layers = [module._flashrope for module in model.modules() if hasattr(module, "_flashrope")]
    return tuple((each.rotary, each.grows_from) for each in layers if hasattr(each, "rotary"))


def _stock_layers(model, label: str) -> dict[tuple, str]:
    """Returns {the schemes of the stock model's layers: label}, or {} if the model cannot be converted."""
    from ..integrations.transformers import convert, revert

    try:
        layers = _layers(convert(model))
    except ValueError:
        return {}
    revert(model)
    return {layers: label}


def _same_until(layers: tuple, own: tuple) -> int:
    """Returns the length in tokens up to which two models with these layers compute the same results."""
    if len(layers) != len(own) or not all(isinstance(each, tuple) for each in (*layers, *own)):
        return 0
    lengths = [min(same_length(a, b), from_a, from_b) for (a, from_a), (b, from_b) in zip(layers, own, strict=True)]
    return int(min(lengths, default=0))


def same_length(first: Rotary, second: Rotary) -> float:
    """Returns the number of tokens up to which two schemes give the same scores, or inf if they are the same.

    Bands count up to the first distance at which they differ. log n that is at least 1 has no effect up to its length.
    """
    table = ("head_dim", "frequencies", "interleaved", "axis", "temperature", "rotated_scale", "length_scale")
    if any(getattr(first, name) != getattr(second, name) for name in (*table, "log_steps_scale")):
        return 0
    until = math.inf
    scales = first.log_n_scale, second.log_n_scale
    if scales[0] != scales[1]:
        for scale in scales:
            if scale is not None:
                until = min(until, scale[0] if scale[1] else 0)
    for one, other in itertools.zip_longest(first.bands, second.bands):
        if one == other:
            continue
        if one and other and one[2:] == other[2:] and one.start == other.start:
            return min(until, one.stop, other.stop)
        return min(until, *(band.start for band in (one, other) if band))
    return until


def _read_given(given: str, model) -> tuple[str, dict[str, Any]]:
    """Returns (label, options of ``convert``) of a value of --rotary.

    Raises:
        BadInput: the value is neither the text of a Rotary, nor a file or folder with such a text.
    """
    path = Path(given)
    if given.lstrip().startswith("{"):
        return "own Rotary", {"rotary": _rotary(given)}
    if path.is_file():
        return path.stem, {"rotary": _rotary(path.read_text(encoding="utf-8"))}
    try:
        saved = json.loads((path / "config.json").read_text(encoding="utf-8")).get(FIELD)
    except (OSError, ValueError):
        saved = None
    if not saved:
        raise BadInput(
            "--rotary: expected the text of a Rotary, a file with it, or the folder of a model that was saved with a "
            f"scheme, got {given[:60]!r}"
        )
    try:
        options = read_options(saved, text_config(model))
    except (TypeError, ValueError) as error:
        raise BadInput(f"--rotary: {given}: {error}") from None
    return f"{path.name}: {name_options(options)}", options


def _rotary(text: str) -> Rotary:
    try:
        return Rotary.from_text(text.strip())
    except (TypeError, ValueError) as error:
        raise BadInput(f"--rotary: {error}") from None
